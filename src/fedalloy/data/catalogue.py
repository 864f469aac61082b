"""Data sets by name: the embedded digits, files in a user's folder, the hub, several as domains."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import numpy as np

from fedalloy.data.arrays import read_npz
from fedalloy.data.assemble import assemble, fitted
from fedalloy.data.dataset import Dataset
from fedalloy.data.domains import join
from fedalloy.data.hub import read_hub
from fedalloy.data.images import read_folder
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.raw import Part, Raw
from fedalloy.data.table import read_csv, read_parquet
from fedalloy.errors import FedAlloyError

EMBEDDED = Path(__file__).with_name("digits.npz")
READERS: dict[str, Callable[[Path], Raw]] = {
    ".npz": read_npz,
    "": read_folder,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


@dataclass(frozen=True)
class Domains:
    """Sets that belong together as domains (alternatives by `|`), as colour squares of this side."""

    members: tuple[str, ...]
    side: int


JOINED = {
    "digit5": Domains(("mnist", "usps", "svhn", "mnistm", "syn|synthdigits_recreated"), 32),
    "office10": Domains(("office_amazon", "office_caltech", "office_dslr", "office_webcam"), 64),
}


def load(
    name: str,
    root: Path | None = None,
    class_names: tuple[str, ...] = (),
    agreed: Preprocessing | None = None,
) -> Dataset:
    """The data set of this name; with `class_names` it may hold samples of only some classes of a federation.

    With an agreed preprocessing it is normalised and numbered as that says, whatever it holds.

    `digits` is always there; `digit5`, `office10` and `a+b+c` join sets as domains; `hf:NAME` is a Hugging
    Face data set; any other name is ROOT/NAME.npz, else a folder ROOT/NAME of images, else ROOT/NAME.csv,
    else ROOT/NAME.parquet.
    """
    if name == "digits":
        return assemble(name, _digits(), class_names, agreed)
    if name in JOINED and not (root and _path(name, root)):
        domains = JOINED[name]
        members = _present(name, domains.members, _checked(name, root))
        joined = join(name, [load(member, root, class_names) for member in members], domains.side)
        return fitted(joined, agreed) if agreed else joined
    if "+" in name:
        joined = join(name, [load(member.strip(), root, class_names) for member in name.split("+")])
        return fitted(joined, agreed) if agreed else joined
    if name.startswith("hf:"):
        return assemble(name, read_hub(name.removeprefix("hf:"), root), class_names, agreed)
    root = _checked(name, root)
    path = _path(name, root)
    if path is None:
        raise _missing(name, [name], root)
    return assemble(name, READERS["" if path.is_dir() else path.suffix](path), class_names, agreed)


@cache
def _digits() -> Raw:
    """1797 grey 8 x 8 digits; the 17 grey levels of the original are spread over 0 .. 255.

    The test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI, 1998, CC BY 4.0),
    in the order of scikit-learn's `load_digits`.
    """
    with np.load(EMBEDDED) as found:
        return Raw(Part(found["x"], found["y"].astype(np.int64)))


def _checked(name: str, root: Path | None) -> Path:
    if name != Path(name).name or name in ("", ".", ".."):
        raise FedAlloyError(
            f"{name!r} is no data set name; give its folder with --data-root DIR and its plain name"
        )
    if root is None:
        hint = "did you mean 'digits'? " if get_close_matches(name, ["digits"]) else ""
        raise FedAlloyError(
            f"data set {name!r} is read from a folder: {hint}give --data-root DIR (only 'digits' needs none)"
        )
    if not root.is_dir():
        raise FedAlloyError(f"--data-root {root} is not a folder")
    return root


def _path(name: str, root: Path) -> Path | None:
    candidates = ((root / f"{name}{ending}", ending) for ending in READERS)
    return next((path for path, ending in candidates if (path.is_file() if ending else path.is_dir())), None)


def _present(name: str, members: tuple[str, ...], root: Path) -> list[str]:
    found = [next((word for word in member.split("|") if _path(word, root)), None) for member in members]
    missing = [member for member, word in zip(members, found, strict=True) if word is None]
    if missing:
        raise _missing(name, [word for member in missing for word in member.split("|")], root)
    return [word for word in found if word is not None]


def _missing(name: str, wanted: list[str], root: Path) -> FedAlloyError:
    looked = ", ".join(f"{word}{ending or '/'}" for word in wanted for ending in READERS)
    there = sorted(
        entry.stem if entry.is_file() else entry.name
        for entry in root.iterdir()
        if not entry.name.startswith(".") and (entry.is_dir() or (entry.suffix and entry.suffix in READERS))
    )
    near = get_close_matches(name, [*there, *JOINED, "digits"], n=1, cutoff=0.55)
    hint = f"did you mean {near[0]!r}? " if near and near[0] != name else ""
    return FedAlloyError(
        f"no data set {name!r}: looked for {looked} in {root}; {hint}there are: digits"
        + "".join(f", {word}" for word in dict.fromkeys(there))
    )
