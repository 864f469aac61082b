"""What is agreed on once: it survives a file to the last bit, refuses nonsense, and does not depend on grouping."""

import contextlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.data import Prepare, Preprocessing, load
from fedalloy.data.totals import Totals
from fedalloy.errors import FedAlloyError
from fuzzing import dice, examples

PICTURES = Preprocessing("image", (1, 8, 8), 2, ("cat", "dog"), (0.1 + 0.2,), (1 / 3,))
TEXTS = Preprocessing("tokens", (7,), 2, vocab=4, vocabulary=("good", "bad"))
TABLE = Preprocessing("vector", (2,), 2, (), (1e-300, 0.1), (2e-38, 1.0), feature_names=("age", "dose"))


@pytest.mark.parametrize("made", [PICTURES, TEXTS, TABLE])
def test_it_comes_back_to_the_last_bit(made: Preprocessing) -> None:
    again = Preprocessing.from_json(made.to_json())
    assert again == made
    assert again.sha256 == made.sha256
    assert again.sha256 != Preprocessing("vector", (3,), 2).sha256


def changed(made: Preprocessing, **changes: Any) -> str:
    return json.dumps({**json.loads(made.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "not written by this version"),
        ("{}", "not written by this version"),
        (changed(PICTURES, mean=[float("nan")]), "no JSON"),
        (changed(PICTURES, mean=[10**400]), "mean is not finite"),
        (changed(PICTURES, std=[0.0]), "not positive"),
        (changed(PICTURES, std=[-1]), "not positive"),
        (changed(PICTURES, std=[5e-324]), "beyond float32"),
        (changed(PICTURES, mean=[1e300]), "beyond float32"),
        (changed(PICTURES, std=[1.0, 1.0]), "mean has 1 numbers and std 2; expected 1 each"),
        (changed(PICTURES, mean="0.5"), "mean is not what it should be"),
        (changed(PICTURES, mean=[True]), "mean is not what it should be"),
        (changed(PICTURES, classes=3), "3 classes but 2 class names"),
        (changed(PICTURES, class_names=["a", "a"]), "stands there twice"),
        (changed(PICTURES, class_names=["a", 1]), "class_names is not what it should be"),
        (changed(PICTURES, kind="sound"), "expected image, vector or tokens"),
        (changed(PICTURES, shape=[8, 8]), "does not have shape"),
        (changed(PICTURES, shape=[1, 8, 0]), "below 1 or beyond"),
        (changed(PICTURES, shape=[1, 8, 2**40]), "below 1 or beyond"),
        (changed(PICTURES, vocab=5), "only tokens have a vocabulary"),
        (changed(TEXTS, vocab=5), "2 words need 4 ids, not 5"),
        (changed(TEXTS, mean=[0.0], std=[1.0]), "expected 0 each"),
        (changed(TABLE, feature_names=["age"]), "1 names of columns"),
        (changed(TABLE, feature_names=["age", "age"]), "stands there twice"),
        (changed(TABLE, extra=1), "'extra' is unknown"),
        (json.dumps({"format": "fedalloy preprocessing 1", "kind": "image"}), "'class_names' is missing"),
        ('"' + " " * 2**24 + '"', "at most"),
    ],
)
def test_nonsense_is_refused(text: str, why: str) -> None:
    with pytest.raises(FedAlloyError, match=why):
        Preprocessing.from_json(text)


@pytest.mark.fuzz
@examples(50)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
        min_size=2,
    ),
    st.integers(1, 100),
)
def test_totals_of_vectors_are_exact_however_they_are_grouped(rows: list[list[float]], at: int) -> None:
    x = torch.tensor(rows)
    whole = Totals.of("vector", x)
    assert whole == Totals.of("vector", x[:at]) + Totals.of("vector", x[at:])
    for column in range(2):
        exact = [Fraction(row[column]) for row in x.tolist()]
        assert whole.sums[column] == sum(exact) * 2**149
        assert whole.squares[column] == sum(value**2 for value in exact) * 2**298
    assert whole.nonsense() is None


def test_totals_of_pixels_are_those_of_numpy() -> None:
    x = torch.randint(256, (5000, 2, 3, 3), dtype=torch.uint8)
    whole = Totals.of("image", x)
    assert whole == Totals.of("image", x[:1]) + Totals.of("image", x[1:4200]) + Totals.of("image", x[4200:])
    mean, std = whole.stats()
    scaled = x.numpy() / 255
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-12)


def test_data_are_prepared_as_agreed_whatever_they_hold(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=np.full((6, 8, 8), 200, np.uint8), y=np.array([1] * 6))
    alone, told = load("one", tmp_path, ("cat", "dog")), load("one", tmp_path, agreed=PICTURES)
    assert told.preprocessing == PICTURES
    assert alone.mean != told.mean
    assert Prepare.of(told) == Prepare.of(PICTURES)


def test_texts_get_the_agreed_numbers_and_length(tmp_path: Path) -> None:
    rows = "".join(f"{text},{label}\n" for text, label in [("bad bad good", 0), ("good new", 1)] * 4)
    (tmp_path / "notes.csv").write_text("text,label\n" + rows)
    found = load("notes", tmp_path)
    assert found.vocabulary == ("bad", "good", "new")
    assert found.preprocessing.shape == (3,)
    told = load("notes", tmp_path, agreed=TEXTS)
    assert told.x.shape[1] == 7
    assert {tuple(row) for row in told.x.tolist()} == {(3, 3, 2, 0, 0, 0, 0), (2, 1, 0, 0, 0, 0, 0)}


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    (tmp_path / "ward.csv").write_text(
        "dose,label,age\n" + "".join(f"{n},{n % 2},{90 + n}\n" for n in range(8))
    )
    assert load("ward", tmp_path).feature_names == ("dose", "age")
    told = load("ward", tmp_path, agreed=TABLE)
    assert told.feature_names == ("age", "dose")
    assert bool((told.x[:, 0] >= 90).all())
    other = Preprocessing("vector", (2,), 2, feature_names=("age", "weight"))
    with pytest.raises(FedAlloyError, match=r"ward has column 'dose'; the columns agreed on are age, weight"):
        load("ward", tmp_path, agreed=other)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=np.full((6, 9, 9), 200, np.uint8), y=np.array([0, 1] * 3))
    with pytest.raises(
        FedAlloyError, match=r"shape \(1, 9, 9\) in 2 classes; agreed on are image, \(1, 8, 8\)"
    ):
        load("one", tmp_path, agreed=PICTURES)


@pytest.mark.fuzz
def test_damaged_files_are_refused_or_mean_something() -> None:
    """Bytes changed at random: a sentence, or a value that makes sense; nothing else."""
    for one in dice(40, 5000):
        for made in (PICTURES, TEXTS, TABLE):
            text = bytearray(made.to_json().encode())
            for _ in range(one.randint(1, 4)):
                place = one.randrange(len(text))
                text[place : place + one.randint(0, 3)] = bytes(
                    one.choice(b'0123456789-+.eE[]{}", naN\x00\xff') for _ in range(one.randint(0, 3))
                )
            with contextlib.suppress(FedAlloyError):
                assert Preprocessing.from_json(bytes(text)).nonsense() is None
