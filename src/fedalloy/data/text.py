"""Texts as rows of word numbers: 0 is padding, 1 a word outside the vocabulary."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from fedalloy.data.raw import Array

VOCABULARY = 20_000  # most frequent training words that get a number of their own
LENGTH = 256  # words of a text that are read
UNKNOWN = 1

_WORD = re.compile(r"\w+(?:'\w+)?")


def tokenise(train: Sequence[str], test: Sequence[str]) -> tuple[Array, Array, int]:
    """Word numbers of both parts, as wide as the longest text, and the size of the vocabulary."""
    counts = Counter(word for text in train for word in _words(text))
    common = sorted(counts, key=lambda word: (-counts[word], word))[:VOCABULARY]
    number = {word: position for position, word in enumerate(common, start=2)}
    rows = [_numbers(text, number) for texts in (train, test) for text in texts]
    x = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, numbers in zip(x, rows, strict=True):
        row[: len(numbers)] = numbers
    return x[: len(train)], x[len(train) :], len(common) + 2


def _words(text: str) -> Iterable[str]:
    return (match.group() for match in _WORD.finditer(text.lower()))


def _numbers(text: str, number: dict[str, int]) -> list[int]:
    numbers = [number.get(word, UNKNOWN) for word, _ in zip(_words(text), range(LENGTH), strict=False)]
    return numbers or [UNKNOWN]  # no sample is padding alone: pooling over its words would be 0 / 0
