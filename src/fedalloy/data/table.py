"""Tables: a label column, numeric features or a text, and perhaps a column `split` that says train or test.

The label is the column named label, target, class or y, else the last one. With a column named `text` the
text is the sample and other columns are left aside.
"""

import csv
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.data.raw import Array, Part, Raw, divided
from fedalloy.errors import FedAlloyError

LABELS = ("label", "target", "class", "y")

_MEND = "turn it into numbers or drop it"


@dataclass(frozen=True)
class _Roles:
    """Which column is what; features are empty where there is a text."""

    label: str
    split: str | None
    text: str | None
    features: tuple[str, ...]


def read_csv(path: Path) -> Raw:
    """A CSV file (UTF-8, comma separated) whose first line names the columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _from_rows(path, csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedAlloyError(f"{path} is not a readable UTF-8 CSV file ({error})") from None


def read_parquet(path: Path) -> Raw:
    """A Parquet file; needs pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise FedAlloyError(f'{path} needs pyarrow to be read: pip install "fedalloy[parquet]"') from None
    try:
        table = parquet.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise FedAlloyError(f"{path} is not a readable Parquet file ({error})") from None
    roles = _roles(path, table.column_names)
    for name in roles.features:
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise FedAlloyError(f"{path}: column {name!r} holds {kind}, not numbers; {_MEND}")
    features = np.empty((table.num_rows, len(roles.features)))
    for position, name in enumerate(roles.features):
        features[:, position] = table.column(name).to_numpy()
    words = {
        name: _words(table.column(name).to_pylist())
        for name in (roles.label, roles.split, roles.text)
        if name
    }
    return _raw(path, roles, features, words, first_line=1)


def _from_rows(path: Path, rows: Any) -> Raw:
    header = [cell.strip() for cell in next(rows, [])]
    roles = _roles(path, header)
    places = [header.index(name) for name in roles.features]
    words: dict[str, list[str]] = {name: [] for name in (roles.label, roles.split, roles.text) if name}
    word_places = [(header.index(name), column) for name, column in words.items()]
    numbers = array("d")
    for row in filter(None, rows):
        if len(row) != len(header):
            raise FedAlloyError(
                f"{path}, line {rows.line_num}: {len(row)} cells; the first line names {len(header)} columns"
            )
        for place, column in word_places:
            column.append(row[place])
        try:
            numbers.extend([float(row[place]) for place in places])
        except ValueError:
            raise _not_a_number(f"{path}, line {rows.line_num}", header, row, places) from None
    features = np.frombuffer(numbers, np.float64) if numbers else np.empty(0)
    return _raw(path, roles, features.reshape(-1, len(places) or 1), words, first_line=2)


def _not_a_number(where: str, header: list[str], row: list[str], places: list[int]) -> FedAlloyError:
    for place in places:
        try:
            float(row[place])
        except ValueError:
            return FedAlloyError(
                f"{where}: column {header[place]!r} holds {row[place]!r}, not a number; {_MEND}"
            )
    raise AssertionError("some cell was not a number")


def _roles(path: Path, columns: Sequence[str]) -> _Roles:
    if not columns:
        raise FedAlloyError(f"{path} is empty; the first line must name the columns")
    if "" in columns:
        raise FedAlloyError(f"{path}: a column has no name; name or drop it (pandas: to_csv(index=False))")
    ((most, times),) = Counter(columns).most_common(1)
    if times > 1:
        raise FedAlloyError(f"{path}: {times} columns are named {most!r}")
    numbers = [name for name in columns if _is_number(name)]
    if numbers != [str(position) for position in range(len(numbers))]:  # 0, 1, 2, ... are fair names
        raise FedAlloyError(f"{path}: the first line must name the columns; it holds numbers")
    lower = {name.lower(): name for name in columns}
    split, text = lower.get("split"), lower.get("text")
    rest = [name for name in columns if name not in (split, text)]
    if not rest:
        raise FedAlloyError(
            f"{path}: there is no label column; name it {', '.join(LABELS[:-1])} or {LABELS[-1]}"
        )
    label = next((lower[name] for name in LABELS if name in lower), rest[-1])
    features = () if text else tuple(name for name in rest if name != label)
    if not features and not text:
        raise FedAlloyError(
            f"{path}: there is only the label column {label!r}; features or a text are needed"
        )
    return _Roles(label, split, text, features)


def _raw(path: Path, roles: _Roles, features: Array, words: dict[str, list[str]], first_line: int) -> Raw:
    labels = [word.strip() for word in words[roles.label]]
    if not labels:
        raise FedAlloyError(f"{path} has no rows below the names of the columns")
    if "" in labels:
        raise FedAlloyError(f"{path}: row {labels.index('') + first_line} has no label")
    if roles.text:
        x = np.array(words[roles.text], dtype=object)
    else:
        x = features
        if not np.isfinite(x).all():
            row, column = np.argwhere(~np.isfinite(x))[0]
            raise FedAlloyError(
                f"{path}: column {roles.features[column]!r}, row {row + first_line} is missing, NaN or "
                "infinite; fill it or drop the row"
            )
    test = _is_test(path, words[roles.split]) if roles.split else None
    return replace(divided(Part(x, label_array(labels)), test), feature_names=roles.features)


def label_array(words: Sequence[str]) -> Array:
    """Numbers if all words are numbers, else the words."""
    found = np.array(words)
    for dtype in (np.int64, np.float64):
        try:
            return found.astype(dtype)
        except (ValueError, OverflowError):
            continue
    return found


def _is_test(path: Path, words: Sequence[str]) -> Array:
    split = np.array([word.strip().lower() for word in words])
    for word in ("train", "test"):
        if word not in split:
            raise FedAlloyError(f"{path}: no row has {word!r} in column 'split'")
    strange = sorted(set(split.tolist()) - {"train", "test"})
    if strange:
        raise FedAlloyError(f"{path}: column 'split' holds {strange[0]!r}; expected train or test")
    return np.asarray(split == "test")


def _words(values: Sequence[object]) -> list[str]:
    return ["" if value is None else str(value) for value in values]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
