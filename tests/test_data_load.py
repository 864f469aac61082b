"""Loading data sets: every source, every way a file can be wrong."""

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from fedalloy.data import Dataset, load
from fedalloy.data.catalogue import EMBEDDED
from fedalloy.errors import FedAlloyError

Array = NDArray[Any]
REAL = Path(os.environ.get("FEDALLOY_TEST_DATA", "")) / "mnist.npz"


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def four(x: Array, y: Array, train: int) -> dict[str, Array]:
    return {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:]}


def pixels(*shape: int) -> Array:
    return draw().integers(0, 256, shape, dtype=np.uint8)


def labels(count: int, classes: int = 3) -> Array:
    return np.arange(count) % classes


def save(root: Path, name: str, /, **arrays: Array) -> None:
    np.savez(root / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def picture(path: Path, size: tuple[int, int] = (6, 6), mode: str = "RGB", level: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level,) * len(mode)).save(path)


# --- digits


def test_the_embedded_digits_are_those_of_scikit_learn() -> None:
    theirs = load_digits()
    with np.load(EMBEDDED) as ours:
        assert np.array_equal(ours["x"], np.rint(theirs.images * (255 / 16)))
        assert np.array_equal(ours["y"], theirs.target)


def test_digits() -> None:
    data = load("digits")
    assert data.inputs.kind == "image"
    assert data.inputs.shape == (1, 8, 8)
    assert (len(data.y), data.classes) == (1797, 10)
    assert data.x.dtype == torch.uint8
    assert data.x.max() == 255
    whole, train = data.y.bincount(), data.y[: data.train].bincount()
    assert ((whole * 0.8 - train).abs() <= 0.5).all()
    again = load("digits")
    assert torch.equal(data.x, again.x)
    assert torch.equal(data.y, again.y)


# --- npz


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((30, 5, 6), (1, 5, 6)),
        ((30, 5, 6, 3), (3, 5, 6)),
        ((30, 3, 5, 6), (3, 5, 6)),
        ((30, 1, 5, 6), (1, 5, 6)),
        ((30, 1, 5, 4), (1, 5, 4)),
        ((30, 5, 6, 4), (4, 5, 6)),
    ],
)
def test_image_layouts(tmp_path: Path, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x = pixels(*given)
    save(tmp_path, "a", **four(x, labels(30), 20))
    data = load("a", tmp_path)
    assert data.inputs.shape == shape
    assert (data.kind, data.train, data.classes, data.x.dtype) == ("image", 20, 3, torch.uint8)
    channels_last = x if len(given) == 4 and shape[0] == given[3] and given[1] != shape[0] else None
    expected = x.reshape(30, *shape) if channels_last is None else x.transpose(0, 3, 1, 2)
    assert np.array_equal(data.x.numpy(), expected)


def test_float_images_become_bytes_and_stats_are_those_of_the_training_part(tmp_path: Path) -> None:
    x = pixels(5000, 4, 4, 3)  # more than one chunk
    save(tmp_path, "floats", **four(x / np.float32(255), labels(5000), 4500))
    save(tmp_path, "bytes", **four(x, labels(5000), 4500))
    floats, whole = load("floats", tmp_path), load("bytes", tmp_path)
    assert torch.equal(floats.x, whole.x)
    scaled = x[:4500].astype(np.float64) / 255
    assert whole.mean == pytest.approx(scaled.mean((0, 1, 2)))
    assert whole.std == pytest.approx(scaled.std((0, 1, 2)))


def test_known_normalisation(tmp_path: Path) -> None:
    save(tmp_path, "mnist", **four(pixels(30, 5, 6), labels(30), 20))
    save(tmp_path, "cifar100", **four(pixels(30, 5, 6, 3), labels(30), 20))
    assert (load("mnist", tmp_path).mean, load("mnist", tmp_path).std) == ((0.1307,), (0.3081,))
    assert load("cifar100", tmp_path).mean == (0.4914, 0.4822, 0.4465)


def test_vectors(tmp_path: Path) -> None:
    x = draw().normal(3, 2, (40, 4))
    x[:, 2] = 0.1  # constant: its std is 1, not 0
    save(tmp_path, "v", **four(x, labels(40).astype(np.int16), 30))
    data = load("v", tmp_path)
    assert (data.kind, data.x.dtype, data.inputs.shape) == ("vector", torch.float32, (4,))
    assert data.mean == pytest.approx(x[:30].mean(0))
    assert data.std[2] == 1.0
    assert data.std[0] == pytest.approx(x[:30, 0].std(), rel=1e-6)


def test_tokens(tmp_path: Path) -> None:
    x = draw().integers(0, 50, (40, 7)).astype(np.int16)
    x[0, 0] = 60
    save(tmp_path, "t", **four(x, labels(40, 2).astype(np.uint8), 30))
    data = load("t", tmp_path)
    assert (data.kind, data.vocab, data.inputs.shape) == ("tokens", 61, (7,))
    assert np.array_equal(data.x.numpy(), x)


def test_x_and_y_alone_are_split(tmp_path: Path) -> None:
    save(tmp_path, "a", x=pixels(50, 4, 4), y=labels(50, 5), class_names=np.array(list("abcde")))
    data = load("a", tmp_path)
    assert data.train == 40
    assert data.y[40:].bincount().tolist() == [2] * 5
    assert data.class_names == tuple("abcde")


def test_string_labels(tmp_path: Path) -> None:
    words = np.array(["dog", "cat", "owl"] * 10)
    save(tmp_path, "a", **four(pixels(30, 4, 4), words, 21))
    data = load("a", tmp_path)
    assert data.class_names == ("cat", "dog", "owl")
    assert data.y[:3].tolist() == [1, 0, 2]


def bad_label(value: float) -> Callable[[dict[str, Array]], None]:
    def change(arrays: dict[str, Array]) -> None:
        arrays["y_train"] = arrays["y_train"].astype(float)
        arrays["y_train"][4] = value

    return change


def put(**arrays: Array) -> Callable[[dict[str, Array]], None]:
    return lambda given: given.update(arrays)


BAD: list[tuple[str, Callable[[dict[str, Array]], None], str]] = [
    ("negative", bad_label(-1), "negative"),
    ("fraction", bad_label(0.5), "not a whole number"),
    ("nan label", bad_label(np.nan), "NaN"),
    ("huge label", bad_label(1e12), "out of range"),
    ("gap", bad_label(999), "out of range"),
    ("from one", put(y_train=labels(20) + 1, y_test=labels(10) + 1), "start at 1"),
    ("unknown in test", put(y_test=np.full(10, 3)), "test label 3 is out of range"),
    ("beyond names", put(class_names=np.array(["a", "b"])), "2 class names"),
    ("one class", put(y_train=np.zeros(20, int), y_test=np.zeros(10, int)), "two classes"),
    ("label matrix", put(y_train=np.zeros((20, 2), int)), "one number per sample"),
    ("complex labels", put(y_train=np.zeros(20, complex)), "whole numbers"),
    ("length", put(y_train=labels(19)), "20 samples but 19 labels"),
    ("empty", put(x_train=pixels(0, 4, 4), y_train=labels(0)), "no samples"),
    ("no pixels", put(x_train=pixels(20, 0, 4), x_test=pixels(10, 0, 4)), "no numbers"),
    ("shapes", put(x_test=pixels(10, 4, 5)), "training sample has shape (4, 4)"),
    ("types", put(x_test=np.zeros((10, 4, 4))), "one type"),
    ("nan pixel", put(x_train=np.full((20, 4, 4), np.nan), x_test=np.zeros((10, 4, 4))), "NaN"),
    ("float range", put(x_train=np.full((20, 4, 4), 9.0), x_test=np.zeros((10, 4, 4))), "expected [0, 1]"),
    ("int range", put(x_train=np.full((20, 4, 4), 256)), "expected 0 to 255"),
    ("channels", put(x_train=pixels(20, 5, 6, 7), x_test=pixels(10, 5, 6, 7)), "channels"),
    ("one axis", put(x_train=pixels(20), x_test=pixels(10)), "neither images"),
    ("bools", put(x_train=np.ones((20, 4), bool), x_test=np.ones((10, 4), bool)), "neither images"),
    ("inf feature", put(x_train=np.full((20, 4), np.inf), x_test=np.zeros((10, 4))), "feature 0 of sample 0"),
    ("too large", put(x_train=np.full((20, 4), 1e300), x_test=np.zeros((10, 4))), "float32"),
    ("negative token", put(x_train=np.full((20, 4), -1), x_test=np.zeros((10, 4), int)), "token ids"),
    ("pickled", put(x_train=np.array([{}] * 20, dtype=object)), "pickled"),
    ("pickled names", put(class_names=np.array(["a", None, "b"], dtype=object)), "pickled"),
]


@pytest.mark.parametrize(("change", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_arrays(tmp_path: Path, change: Callable[[dict[str, Array]], None], sentence: str) -> None:
    arrays = four(pixels(30, 4, 4), labels(30), 20)
    change(arrays)
    save(tmp_path, "bad", **arrays)
    with pytest.raises(FedAlloyError, match=r"bad") as caught:
        load("bad", tmp_path)
    assert sentence in str(caught.value)


def test_broken_files(tmp_path: Path) -> None:
    save(tmp_path, "good", **four(pixels(30, 4, 4), labels(30), 20))
    content = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "short.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "words.npz").write_bytes(b"these are only words, no arrays at all")
    damaged = bytearray(content)
    damaged[200:400] = bytes(200)
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("empty", "short", "words", "damaged"):
        with pytest.raises(FedAlloyError, match=rf"{name}\.npz"):
            load(name, tmp_path)
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, pixels(3, 3))
    with pytest.raises(FedAlloyError, match="single array"):
        load("single", tmp_path)
    save(tmp_path, "keys", images=pixels(3, 3))
    with pytest.raises(FedAlloyError, match="holds images; expected x_train"):
        load("keys", tmp_path)
    save(tmp_path, "few", x=pixels(2, 3, 3), y=labels(2))
    with pytest.raises(FedAlloyError, match="too few samples"):
        load("few", tmp_path)


# --- names


def test_missing_names(tmp_path: Path) -> None:
    with pytest.raises(FedAlloyError, match="give --data-root DIR"):
        load("mnist")
    with pytest.raises(FedAlloyError, match="not a folder"):
        load("mnist", tmp_path / "nowhere")
    for name in ("../a", "/a", "", ".."):
        with pytest.raises(FedAlloyError, match="no data set name"):
            load(name, tmp_path)
    save(tmp_path, "mnist", **four(pixels(30, 5, 6), labels(30), 20))
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("not data")
    with pytest.raises(FedAlloyError) as caught:
        load("mnits", tmp_path)
    said = str(caught.value)
    assert "looked for mnits.npz, mnits/, mnits.csv, mnits.parquet in" in said
    assert "did you mean 'mnist'?" in said
    assert said.endswith("there are: digits, mnist, photos")
    with pytest.raises(FedAlloyError, match=r"usps\.npz.*synthdigits_recreated\.parquet"):
        load("digit5", tmp_path)


# --- domains


def test_digit5(tmp_path: Path) -> None:
    sizes = {"mnist": (28, 28), "usps": (16, 16), "svhn": (32, 32, 3), "mnistm": (32, 32, 3)}
    sizes["synthdigits_recreated"] = (32, 32, 3)
    for number, (name, size) in enumerate(sizes.items()):
        x = np.full((20, *size), 40 * number, np.uint8)
        save(tmp_path, name, **four(x, labels(20, 10), 12))
    data = load("digit5", tmp_path)
    assert data.inputs.shape == (3, 32, 32)
    assert data.domain_names == tuple(sizes)
    assert data.domain is not None
    assert data.domain[: data.train].bincount().tolist() == [12] * 5
    assert data.domain[data.train :].bincount().tolist() == [8] * 5
    assert torch.equal(data.x[:, 0, 0, 0].long(), 40 * data.domain)
    assert data.y[12:24].tolist() == labels(12, 10).tolist()


def test_resize_is_bilinear_and_repeats_grey(tmp_path: Path) -> None:
    ramp = np.tile(np.array([0, 200], np.uint8), (20, 2, 1))
    save(tmp_path, "small", **four(ramp, labels(20), 12))
    save(tmp_path, "large", **four(pixels(20, 4, 4, 3), labels(20), 12))
    data = load("small+large", tmp_path)
    assert data.inputs.shape == (3, 4, 4)
    assert data.domain_names == ("small", "large")
    assert data.x[0, :, 0].tolist() == [[0, 50, 150, 200]] * 3


def test_domains_that_do_not_fit(tmp_path: Path) -> None:
    save(tmp_path, "image", **four(pixels(20, 4, 4), labels(20), 12))
    save(tmp_path, "four", **four(pixels(20, 4, 4, 4), labels(20), 12))
    save(tmp_path, "color", **four(pixels(20, 4, 4, 3), labels(20), 12))
    save(tmp_path, "vector", **four(draw().normal(size=(20, 4)), labels(20), 12))
    save(tmp_path, "wide", **four(draw().normal(size=(20, 5)), labels(20), 12))
    save(tmp_path, "tokens", **four(np.ones((20, 5), int), labels(20), 12))
    for name, letters in (("abc", "abc"), ("xyz", "xyz")):
        save(tmp_path, name, **four(pixels(20, 4, 4), labels(20), 12), class_names=np.array(list(letters)))
    for names, sentence in {
        "image+vector": "cannot be domains",
        "tokens+tokens": "cannot be domains",
        "vector+wide": "differ in width",
        "abc+xyz": "different classes",
        "four+color": "channels",
    }.items():
        with pytest.raises(FedAlloyError, match=sentence):
            load(names, tmp_path)
    assert load("vector+vector", tmp_path).domain_names == ("vector", "vector")


# --- folders of images


def test_folder_by_class(tmp_path: Path) -> None:
    for name in ("bird", "ant"):
        for number in range(5):
            picture(tmp_path / "pets" / name / f"{number}.png", mode="L")
    (tmp_path / "pets" / "ant" / "notes.txt").write_text("left aside")
    data = load("pets", tmp_path)
    assert (data.class_names, data.inputs.shape, data.train) == (("ant", "bird"), (1, 6, 6), 8)


def test_folder_with_train_and_test_of_mixed_sizes_and_modes(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for name in ("ant", "bird"):
            for number in range(count):
                picture(tmp_path / "pets" / part / name / f"{number}.bmp", (5 + number, 9))
    picture(tmp_path / "pets" / "train" / "ant" / "grey.JPG", mode="L", level=7)
    data = load("pets", tmp_path)
    assert data.inputs.shape == (3, 64, 64)
    assert (data.train, len(data.y)) == (7, 11)
    assert (data.x[3] == 7).all()
    picture(tmp_path / "pets" / "test" / "cow" / "0.png")
    with pytest.raises(FedAlloyError, match="'cow' is in test/ but not in train/"):
        load("pets", tmp_path)
    picture(tmp_path / "pets" / "val" / "ant" / "0.png")
    with pytest.raises(FedAlloyError, match="val/ beside train/"):
        load("pets", tmp_path)


def test_folder_by_domain_and_class(tmp_path: Path) -> None:
    for domain in ("photo", "art"):
        for name in ("ant", "bird"):
            for number in range(5):
                picture(tmp_path / "pacs" / domain / name / f"{number}.webp")
    data = load("pacs", tmp_path)
    assert (data.domain_names, data.class_names) == (("art", "photo"), ("ant", "bird"))
    assert data.domain is not None
    cell = 2 * data.domain + data.y
    assert cell[: data.train].bincount().tolist() == [4] * 4
    assert cell[data.train :].bincount().tolist() == [1] * 4


def test_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "bare" / "ant").mkdir(parents=True)
    for part in ("ant", "bird"):
        picture(tmp_path / "hole" / part / "0.png")
    (tmp_path / "hole" / "cow").mkdir()
    picture(tmp_path / "torn" / "ant" / "0.png", (40, 40))
    content = (tmp_path / "torn" / "ant" / "0.png").read_bytes()
    (tmp_path / "torn" / "ant" / "1.png").write_bytes(content[:60])
    picture(tmp_path / "fake" / "ant" / "0.png")
    (tmp_path / "fake" / "ant" / "1.png").write_bytes(b"no image")
    picture(tmp_path / "deep" / "ant" / "0.png")
    Image.fromarray(np.full((6, 6), 40_000, np.uint16)).save(tmp_path / "deep" / "ant" / "1.png")
    for name, sentence in {
        "none": "no folders",
        "bare": "no images",
        "hole": "cow has no images",
        "torn": r"1\.png cannot be read",
        "fake": r"1\.png is not a readable image",
        "deep": r"1\.png has more than 8 bits",
    }.items():
        with pytest.raises(FedAlloyError, match=sentence):
            load(name, tmp_path)


# --- tables


def test_csv_features(tmp_path: Path) -> None:
    rows = [f"{number},{number * number},{'yes' if number % 2 else 'no'}" for number in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,verdict", *rows, ""]))
    data = load("t", tmp_path)
    assert (data.kind, data.inputs.shape, data.class_names) == ("vector", (2,), ("no", "yes"))
    assert data.train == 16
    train = data.x[:16].double()
    assert data.mean == pytest.approx(train.mean(0).tolist())
    assert data.std == pytest.approx(train.std(0, correction=0).tolist())


def test_csv_with_label_and_split_columns(tmp_path: Path) -> None:
    lines = ["Target,split,a", "0,train,1.5", "1,train,2.5", "1.0,test,3.5", "0,train,4.5"]
    (tmp_path / "t.csv").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    data = load("t", tmp_path)
    assert (data.train, data.y.tolist(), data.x.flatten().tolist()) == (3, [0, 1, 0, 1], [1.5, 2.5, 4.5, 3.5])


def test_csv_whose_columns_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,1,label\n" + "1.5,2,0\n2.5,3,1\n" * 4)
    assert load("t", tmp_path).inputs.shape == (2,)


def test_csv_text(tmp_path: Path) -> None:
    lines = [
        "text,label,split",
        '"The cat, the DOG!",pos,train',
        "the cat isn't,neg,train",
        "the unseen cat,pos,test",
        "...,neg,test",
        f"{'cat ' * 300},neg,test",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    data = load("t", tmp_path)
    assert (data.kind, data.vocab, data.inputs.shape) == ("tokens", 6, (256,))
    assert data.x[:, :5].tolist() == [
        [2, 3, 2, 4, 0],
        [2, 3, 5, 0, 0],
        [2, 1, 3, 0, 0],
        [1, 0, 0, 0, 0],
        [3] * 5,
    ]
    assert data.class_names == ("neg", "pos")


BAD_TABLES = {
    "": "is empty",
    "a,label\n": "no rows",
    "label\n0\n1\n": "only the label column",
    "text,split\nx,train\n": "no label column",
    ",a,label\n0,1,0\n": "a column has no name",
    "a,a,label\n1,2,0\n": "2 columns are named 'a'",
    "1.5,2.5,0\n1,2,0\n": "must name the columns",
    "a,colour,label\n1,2,0\n1,red,1\n": "line 3: column 'colour' holds 'red'",
    "a,label\n,0\n1,1\n": "column 'a' holds ''",
    "a,label\n1,0\nnan,1\n": "column 'a', row 3 is missing, NaN",
    "a,label\n1,0\n1,\n": "row 3 has no label",
    "a,label\n1,0\n1\n": "line 3: 1 cells",
    "a,label\n1,0.5\n1,1\n": "not a whole number",
    "a,split,label\n1,train,0\n2,train,1\n": "no row has 'test'",
    "a,split,label\n1,train,0\n2,test,1\n3,valid,1\n": "holds 'valid'",
    "a,split,label\n1,train,x\n2,train,y\n3,test,z\n": "label 'z' is no class",
}


@pytest.mark.parametrize(("content", "sentence"), BAD_TABLES.items())
def test_bad_csv(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(FedAlloyError) as caught:
        load("t", tmp_path)
    assert sentence in str(caught.value)


def test_csv_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,label\n\xff\xfe,0\n")
    with pytest.raises(FedAlloyError, match="UTF-8"):
        load("t", tmp_path)


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": [1, 2, 3, 4], "b": [0.5, 1.5, 2.5, 3.5], "class": ["u", "v", "u", "v"]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = load("t", tmp_path)
    assert (data.kind, data.inputs.shape, data.class_names, data.train) == ("vector", (2,), ("u", "v"), 2)
    texts = {"text": ["a b", "b c", "c"], "label": [0, 1, 1], "split": ["train", "train", "test"]}
    parquet.write_table(pa.table(texts), tmp_path / "texts.parquet")
    assert load("texts", tmp_path).x.tolist() == [[3, 2], [2, 4], [4, 0]]
    for name, extra, sentence in (
        ("words", {"a": ["p", "q", "r", "s"]}, "column 'a' holds string"),
        ("nulls", {"a": [1, None, 3, 4]}, "column 'a', row 2 is missing"),
        ("blank", {"class": ["u", None, "u", "v"]}, "row 2 has no label"),
    ):
        parquet.write_table(pa.table(columns | extra), tmp_path / f"{name}.parquet")
        with pytest.raises(FedAlloyError, match=sentence):
            load(name, tmp_path)
    (tmp_path / "short.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:50])
    with pytest.raises(FedAlloyError, match="not a readable Parquet"):
        load("short", tmp_path)


@pytest.mark.parametrize(
    ("missing", "name", "extra"), [("pyarrow", "t", "parquet"), ("datasets", "hf:t", "hub")]
)
def test_optional_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, name: str, extra: str
) -> None:
    (tmp_path / "t.parquet").write_bytes(b"")
    found = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == missing:
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FedAlloyError, match=rf'pip install "fedalloy\[{extra}\]"'):
        load(name, tmp_path)


# --- Hugging Face


def test_hub_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bird"])}
    )
    rows = {"image": [Image.fromarray(tile) for tile in pixels(10, 5, 5, 3)], "label": labels(10, 2).tolist()}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "test": table.select(range(4))}).save_to_disk(
        str(tmp_path / "pets")
    )
    data = load(f"hf:{tmp_path / 'pets'}")
    assert (data.class_names, data.inputs.shape, data.train) == (("ant", "bird"), (3, 5, 5), 10)
    assert np.array_equal(data.x[10:].numpy().transpose(0, 2, 3, 1), pixels(10, 5, 5, 3)[:4])
    table.save_to_disk(str(tmp_path / "one"))
    assert load("hf:one", tmp_path).train == 8


def test_hub_texts_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["good film", "bad film"] * 5, "label": ["pos", "neg"] * 5}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "films"))
    data = load("hf:films", tmp_path)
    assert (data.kind, data.class_names, data.vocab) == ("tokens", ("neg", "pos"), 5)
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "bare"))
    datasets.Dataset.from_dict({"x": [1], "label": [0]}).save_to_disk(str(tmp_path / "odd"))
    extra = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"other": extra}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "plain").mkdir()

    def offline(name: str) -> Dataset:
        raise ConnectionError(f"no hub for {name}")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for name, sentence in {
        "bare": "label column is needed",
        "odd": "an image or one of text",
        "splits": "'train' is needed",
        "plain": "plain was not written with save_to_disk",
        "somewhere/else": "no hub for somewhere/else",
    }.items():
        with pytest.raises(FedAlloyError, match=sentence):
            load(f"hf:{name}", tmp_path)


@pytest.mark.skipif(not REAL.is_file(), reason="FEDALLOY_TEST_DATA names no folder with mnist.npz")
def test_real_mnist() -> None:
    data = load("mnist", REAL.parent)
    assert (data.x.shape, data.train) == ((70_000, 1, 28, 28), 60_000)
    assert data.y[:60_000].bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
