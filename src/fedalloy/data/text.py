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


def vocabulary_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The most frequent words, by how often they occur, then by the alphabet."""
    counts = Counter(word for text in texts for word in _words(text))
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:VOCABULARY])


def numbered(texts: Iterable[str], vocabulary: Sequence[str], length: int | None = None) -> Array:
    """Word numbers, a row for each text: as wide as the longest one, or `length` wide."""
    number = {word: position for position, word in enumerate(vocabulary, start=2)}
    rows = [_numbers(text, number) for text in texts]
    x = np.zeros((len(rows), length or max(map(len, rows))), np.int32)
    for row, numbers in zip(x, rows, strict=True):
        row[: len(numbers)] = numbers[: len(row)]
    return x


def _words(text: str) -> Iterable[str]:
    return (match.group() for match in _WORD.finditer(text.lower()))


def _numbers(text: str, number: dict[str, int]) -> list[int]:
    numbers = [number.get(word, UNKNOWN) for word, _ in zip(_words(text), range(LENGTH), strict=False)]
    return numbers or [UNKNOWN]  # no sample is padding alone: pooling over its words would be 0 / 0
