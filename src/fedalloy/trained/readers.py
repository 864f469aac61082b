"""New samples from files: with labels or without, matched to what a model reads."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fedalloy.data.images import ENDINGS, SIDE
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.raw import Array
from fedalloy.data.table import LABELS
from fedalloy.errors import FedAlloyError
from fedalloy.trained.samples import stored


@dataclass(frozen=True)
class Found:
    """Samples in stored form, what they are called, and their labels if they have any."""

    x: Tensor
    titles: tuple[str, ...]
    labels: tuple[int, ...] | None = None
    ignored: tuple[str, ...] = ()


def read(path: Path, how: Preprocessing) -> Found:
    """The samples in a file or folder."""
    if path.is_dir() or path.suffix.lower() in ENDINGS:
        return _pictures(path, how)
    if not path.is_file():
        raise FedAlloyError(f"there is no file or folder {path}")
    if path.suffix == ".csv":
        return _table(path, how)
    if path.suffix == ".npz":
        return _npz(path, how)
    raise FedAlloyError(f"{path.name}: give a .csv or .npz file, an image, or a folder of images")


def _npz(path: Path, how: Preprocessing) -> Found:
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            keys = set(getattr(file, "files", ()))
            name, label = ("x", "y") if "x" in keys else ("x_test", "y_test")
            x: Array | None = file[name] if name in keys else None
            y: Array | None = file[label] if label in keys and x is not None else None
            own = tuple(map(str, file["class_names"].ravel().tolist())) if "class_names" in keys else ()
    except Exception:  # whatever numpy says to a file that is none of its own
        raise FedAlloyError(f"{path} is no readable npz file of plain arrays") from None
    if x is None:
        raise FedAlloyError(f"{path} holds {', '.join(sorted(keys)) or 'nothing'}; expected x, or x_test")
    made = stored(x, how)
    titles = tuple(str(number) for number in range(1, len(made) + 1))
    if y is None:
        return Found(made, titles)
    if y.size != len(made):
        raise FedAlloyError(f"{path}: {len(made)} samples but {y.size} labels")
    return Found(made, titles, _labels(path, _spelt(path, y, own or tuple(_known(how))), how))


def _spelt(path: Path, y: Array, names: tuple[str, ...]) -> list[str]:
    """Labels as names of classes; numbers are places in `names`, as in training."""
    words = y.ravel().tolist()
    if y.dtype.kind not in "iufb":
        return [str(word) for word in words]
    for word in words:
        if word not in range(len(names)):  # 1.5 and NaN neither
            raise FedAlloyError(
                f"{path}: label {word} is out of range; there are {len(names)} classes, from 0"
            )
    return [names[int(word)] for word in words]


def _table(path: Path, how: Preprocessing) -> Found:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedAlloyError(f"{path} is not a readable UTF-8 CSV file ({error})") from None
    header = [cell.strip() for cell in rows[0]] if rows else []
    body = rows[1:]
    if not body:
        raise FedAlloyError(f"{path} has no rows below the names of the columns")
    for number, row in enumerate(body, 2):
        if len(row) != len(header):
            raise FedAlloyError(f"{path}, row {number}: {len(row)} cells for {len(header)} columns")
    if len(set(header)) != len(header):
        raise FedAlloyError(f"{path}: two columns have the same name")
    text = next((name for name in header if name.lower() == "text"), None)
    if how.kind == "image":
        raise FedAlloyError(f"{path} is a table; the model reads images")
    wanted = _wanted(path, header, how, text)
    rest = [name for name in header if name not in wanted]
    label = _label_column(rest, header, body, how)
    labels = None if label is None else _labels(path, [row[header.index(label)] for row in body], how)
    if how.kind == "tokens":
        x = stored([row[header.index(wanted[0])] for row in body], how)
    else:
        x = stored(_numbers(path, body, [header.index(name) for name in wanted], wanted), how)
    ignored = tuple(name for name in rest if name != label)
    return Found(x, tuple(str(number) for number in range(1, len(body) + 1)), labels, ignored)


def _wanted(path: Path, header: Sequence[str], how: Preprocessing, text: str | None) -> list[str]:
    """The columns that the model reads, in its order."""
    if how.kind == "tokens":
        if text is None:
            raise FedAlloyError(f"{path} has no column 'text', which the model reads")
        return [text]
    if not how.feature_names:
        spare = [name for name in header if name.lower() not in (*LABELS, "split")]
        if len(spare) != how.shape[0]:
            raise FedAlloyError(f"{path} has {len(spare)} columns of numbers; the model reads {how.shape[0]}")
        return spare
    if missing := [name for name in how.feature_names if name not in header]:
        raise FedAlloyError(f"{path} lacks the column {missing[0]!r}, which the model reads")
    return list(how.feature_names)


def _label_column(
    rest: Sequence[str], header: Sequence[str], body: Sequence[Sequence[str]], how: Preprocessing
) -> str | None:
    """A column with a label's name, else the only other one if it holds nothing but classes."""
    named = next((name for word in LABELS for name in rest if name.lower() == word), None)
    others = [name for name in rest if name.lower() != "split"]
    if named is not None or len(others) != 1:
        return named
    place, known = header.index(others[0]), _known(how)
    return others[0] if all(row[place].strip() in known for row in body) else None


def _numbers(path: Path, body: Sequence[Sequence[str]], places: list[int], names: list[str]) -> Array:
    made = np.empty((len(body), len(places)))
    for number, row in enumerate(body):
        for position, place in enumerate(places):
            try:
                made[number, position] = float(row[place])
            except ValueError:
                raise FedAlloyError(
                    f"{path}, row {number + 2}: column {names[position]!r} holds {row[place]!r}, not a number"
                ) from None
    return made


def _pictures(path: Path, how: Preprocessing) -> Found:
    if how.kind != "image":
        raise FedAlloyError(f"{path} holds images; the model reads {how.kind}")
    if not path.is_dir():
        return Found(stored(_picture(path, how)[None], how), (path.name,))
    inside = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in inside if entry.is_file() and entry.suffix.lower() in ENDINGS]
    classes = [entry for entry in inside if entry.is_dir()] if not files else []
    files = files or sorted(
        file for folder in classes for file in folder.iterdir() if file.suffix.lower() in ENDINGS
    )
    if not files:
        raise FedAlloyError(f"{path} holds no images ({', '.join(sorted(ENDINGS))})")
    x = stored(np.stack([_picture(file, how) for file in files]), how)
    titles = tuple(str(file.relative_to(path)) for file in files)
    labelled = classes and all(folder.name in _known(how) for folder in classes)
    return Found(x, titles, _labels(path, [file.parent.name for file in files], how) if labelled else None)


def _picture(path: Path, how: Preprocessing) -> Array:
    """Pixels H W C of the size that the model reads."""
    from PIL import Image

    channels, height, width = how.shape
    if channels not in (1, 3):
        raise FedAlloyError(
            f"the model reads {channels} channels, which no image file has; give an .npz file"
        )
    try:
        with Image.open(path) as opened:
            if opened.mode[0] in "IF":
                raise FedAlloyError(f"{path} has more than 8 bits per pixel; convert it to 8 bits")
            plain = opened.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, FedAlloyError):
            raise
        raise FedAlloyError(f"{path} is not a readable image ({error})") from None
    if plain.size != (width, height):
        if (width, height) != (SIDE, SIDE):
            raise FedAlloyError(
                f"{path} has {plain.size[0]}x{plain.size[1]} pixels; the model reads {width}x{height}: resize it as "
                "the training images were"
            )
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)  # as the reader of folders does
    return np.asarray(plain).reshape(height, width, channels)


def _known(how: Preprocessing) -> dict[str, int]:
    """Classes by name, and by number where they have no names."""
    names = how.class_names or tuple(str(number) for number in range(how.classes))
    return {name: number for number, name in enumerate(names)}


def _labels(path: Path, words: Sequence[str], how: Preprocessing) -> tuple[int, ...]:
    known = _known(how)
    numbers = {str(number): number for number in range(how.classes)}
    found = []
    for word in (word.strip() for word in words):
        number = known.get(word, numbers.get(word.removesuffix(".0")))
        if number is None:
            raise FedAlloyError(f"{path}: label {word[:80]!r} is no class of the model")
        found.append(number)
    return tuple(found)
