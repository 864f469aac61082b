"""Hugging Face data sets: a folder written with `save_to_disk`, or a name on the hub."""

from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.data.images import stack
from fedalloy.data.raw import Array, Part, Raw
from fedalloy.data.table import LABELS, label_array
from fedalloy.errors import FedAlloyError

TEXTS = ("text", "sentence", "content")


def read_hub(name: str, root: Path | None) -> Raw:
    """Image and label, or text and label, of the splits train and test (else validation, else held out)."""
    try:
        import datasets
    except ImportError:
        raise FedAlloyError(f'hf:{name} needs the library datasets: pip install "fedalloy[hub]"') from None
    folders = [folder / Path(name).expanduser() for folder in (Path(), root) if folder is not None]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    try:
        found = datasets.load_from_disk(str(folder)) if folder else datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError) as error:
        if folder:
            raise FedAlloyError(
                f"{folder} was not written with save_to_disk ({_first_line(error)})"
            ) from None
        looked = ", ".join(str(folder) for folder in folders)
        raise FedAlloyError(
            f"hf:{name} cannot be loaded: looked for a folder written with save_to_disk at {looked}, "
            f"then on the hub ({_first_line(error)})"
        ) from None
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise FedAlloyError(f"hf:{name} has the splits {', '.join(splits)}; a split 'train' is needed")
    train, test = splits["train"], splits.get("test", splits.get("validation"))
    parts = [train] if test is None else [train, test]
    label = _label(name, train.features, datasets.ClassLabel)
    image = next((key for key, kind in train.features.items() if isinstance(kind, datasets.Image)), None)
    text = next((key for key in TEXTS if key in train.features), None)
    if image:
        xs = _images(name, [part.select_columns([image]) for part in parts], image)
    elif text:
        xs = [np.array([str(words) for words in part[text]], dtype=object) for part in parts]
    else:
        raise FedAlloyError(
            f"hf:{name} has the columns {', '.join(train.features)}; "
            f"an image or one of {', '.join(TEXTS)} is needed"
        )
    ys = [label_array(["" if word is None else str(word) for word in part[label]]) for part in parts]
    names = tuple(getattr(train.features[label], "names", None) or ())
    made = [Part(x, y) for x, y in zip(xs, ys, strict=True)]
    return Raw(made[0], made[1] if len(made) == 2 else None, names)


def _label(name: str, features: dict[str, Any], class_label: type) -> str:
    typed = [key for key, kind in features.items() if isinstance(kind, class_label)]
    named = [key for key in LABELS if key in features]
    if not named + typed:
        raise FedAlloyError(
            f"hf:{name} has the columns {', '.join(features)}; a label column is needed ({', '.join(LABELS)})"
        )
    return (named + typed)[0]


def _images(name: str, parts: list[Any], column: str) -> list[Array]:
    ends = np.cumsum([len(part) for part in parts])
    train = int(ends[0])

    def image(position: int) -> Any:
        part, place = (parts[0], position) if position < train else (parts[1], position - train)
        found = part[place][column]
        if found is None:
            raise FedAlloyError(f"hf:{name}: sample {place} has no image")
        return found

    x = stack(int(ends[-1]), image, lambda position: f"hf:{name}: image {position}")
    return np.split(x, ends[:-1])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
