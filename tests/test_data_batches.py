"""Batches: normalised as stored statistics say, augmented only by the generator that is given."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.data import Augment, Dataset, Prepare, parse_augment
from fedalloy.errors import FedAlloyError
from fuzzing import examples


def images(batch: int = 16, side: int = 6) -> Tensor:
    return torch.randint(1, 256, (batch, 3, side, side), generator=torch.Generator().manual_seed(0)).byte()


def dataset(x: Tensor, kind: str) -> Dataset:
    size = x.shape[1] if kind != "tokens" else 0
    mean, std = tuple(0.1 * (n + 1) for n in range(size)), tuple(0.2 + n for n in range(size))
    y = torch.arange(len(x)) % 2
    return Dataset("toy", x, y, len(x), kind, 2, mean=mean, std=std, vocab=9)  # type: ignore[arg-type]


def normalised(data: Dataset, x: Tensor) -> Tensor:
    mean, std = torch.tensor(data.mean)[:, None, None], torch.tensor(data.std)[:, None, None]
    return (x.float() / 255 - mean) / std


def test_images_are_normalised_and_nothing_is_drawn() -> None:
    data = dataset(images(), "image")
    draw = torch.Generator().manual_seed(1)
    before = draw.get_state()
    for prepared in (Prepare.of(data)(data.x, draw), Prepare.of(data, Augment(2, True))(data.x, None)):
        assert prepared.dtype == torch.float32
        torch.testing.assert_close(prepared, normalised(data, data.x), atol=1e-6, rtol=1e-5)
    assert torch.equal(before, draw.get_state())


def test_vectors_are_standardised_and_not_changed_in_place() -> None:
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    data, kept = dataset(x, "vector"), x.clone()
    torch.testing.assert_close(Prepare.of(data)(x), (x - torch.tensor(data.mean)) / torch.tensor(data.std))
    assert torch.equal(x, kept)


def test_tokens_are_long() -> None:
    x = torch.randint(9, (10, 4), dtype=torch.int16)
    prepared = Prepare.of(dataset(x, "tokens"))(x, torch.Generator())
    assert prepared.dtype == torch.int64
    assert torch.equal(prepared, x.long())


def test_without_statistics_pixels_are_scaled_to_one() -> None:
    torch.testing.assert_close(Prepare("image")(images()), images().float() / 255)


@examples(40)
@given(st.integers(0, 3), st.booleans(), st.integers(0, 10_000))
def test_augmented_images_are_shifted_and_mirrored_originals(crop: int, flip: bool, seed: int) -> None:
    data = dataset(images(8), "image")
    prepare = Prepare.of(data, Augment(crop, flip))
    found = prepare(data.x, torch.Generator().manual_seed(seed))
    assert torch.equal(found, prepare(data.x, torch.Generator().manual_seed(seed)))
    padded = torch.nn.functional.pad(data.x, [crop] * 4)  # black before normalisation, as on files
    side = data.x.shape[2]
    for sample, image in zip(padded, found, strict=True):
        candidates = [
            sample[:, row : row + side, column : column + side]
            for row in range(2 * crop + 1)
            for column in range(2 * crop + 1)
        ]
        candidates += [candidate.flip(2) for candidate in candidates if flip]
        gaps = [(normalised(data, candidate) - image).abs().max() for candidate in candidates]
        assert min(gaps) < 1e-5


def test_every_offset_and_both_directions_occur_evenly() -> None:
    x = torch.zeros(9000, 1, 3, 3, dtype=torch.uint8)
    x[:, 0, 1, 1] = 255
    moved = Prepare("image", crop=1)(x, torch.Generator().manual_seed(0))
    assert (moved.sum((0, 1)) / 1000 - 1).abs().max() < 0.15
    x = torch.zeros(9000, 1, 1, 2, dtype=torch.uint8)
    x[:, 0, 0, 0] = 255
    mirrored = Prepare("image", flip=True)(x, torch.Generator().manual_seed(0))
    assert (mirrored.mean((0, 1, 2)) - 0.5).abs().max() < 0.03


@pytest.mark.parametrize("text", ["none", "flip", "crop:4", "crop:4,flip"])
def test_text(text: str) -> None:
    assert str(parse_augment(text)) == text
    assert parse_augment(f" {text.upper()} ") == parse_augment(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("flop", "did you mean 'flip'?"),
        ("", "there are: crop, flip, none"),
        ("crop", "such as crop:4"),
        ("crop:0", "such as crop:4"),
        ("crop:-1", "such as crop:4"),
        ("crop:x", "such as crop:4"),
        ("flip:2", "stands alone"),
        ("none,flip", "stands alone"),
    ],
)
def test_bad_text(text: str, sentence: str) -> None:
    with pytest.raises(FedAlloyError) as caught:
        parse_augment(text)
    assert sentence in str(caught.value)


def test_augmentation_that_does_not_fit() -> None:
    with pytest.raises(FedAlloyError, match="is for images"):
        Prepare.of(dataset(torch.randn(4, 3), "vector"), Augment(flip=True))
    with pytest.raises(FedAlloyError, match="less than 6"):
        Prepare.of(dataset(images(), "image"), Augment(crop=6))
