"""Data in one `.npz` file: x_train, y_train, x_test, y_test (or x, y), and perhaps class_names."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedalloy.data.raw import Array, Part, Raw
from fedalloy.errors import FedAlloyError

_PAIRS = ("x_train", "y_train", "x_test", "y_test")
_BROKEN = (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)


def read_npz(path: Path) -> Raw:
    """The arrays of the file; anything pickled is refused."""
    try:
        files, arrays = _arrays(path)
    except _BROKEN as error:
        if "pickle" in str(error).lower():
            raise FedAlloyError(
                f"{path} holds pickled Python objects, which could run any program when opened; "
                "save plain arrays of numbers with np.savez"
            ) from None
        raise FedAlloyError(f"{path} is empty, cut short or no npz file ({error}); write it anew") from None
    names = tuple(str(name) for name in arrays.get("class_names", np.array([])).astype(str).ravel())
    if all(key in arrays for key in _PAIRS):
        train = Part(arrays["x_train"], arrays["y_train"])
        return Raw(train, Part(arrays["x_test"], arrays["y_test"]), names)
    if "x" in arrays and "y" in arrays:
        return Raw(Part(arrays["x"], arrays["y"]), class_names=names)
    raise FedAlloyError(
        f"{path} holds {', '.join(files) or 'nothing'}; "
        "expected x_train, y_train, x_test and y_test, or x and y"
    )


def _arrays(path: Path) -> tuple[list[str], dict[str, Array]]:
    with path.open("rb") as stream:
        file = np.load(stream, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        wanted = ("class_names", *(_PAIRS if "x_train" in file.files else ("x", "y")))
        return file.files, {key: file[key] for key in file.files if key in wanted}
