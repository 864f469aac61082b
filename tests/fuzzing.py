"""Generated cases: few and always the same in `make test`, many and drawn anew in `make fuzz`.

What `make fuzz` finds is kept as a fixed example beside the test that found it.
"""

import os
import random
import secrets
from collections.abc import Iterator

from hypothesis import settings

FUZZING = bool(os.environ.get("FEDALLOY_FUZZ"))
MORE = 20  # times as many examples of hypothesis

# Whether a test passes depends on nothing but the code: no chance, no clock, no memory of earlier runs.
settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fuzz" if FUZZING else "steady")


def examples(count: int) -> settings:
    """How many examples hypothesis tries of one property: `@examples(40)` above `@given(...)`."""
    return settings(max_examples=MORE * count if FUZZING else count)


def dice(count: int, many: int) -> Iterator[random.Random]:
    """A generator for each case: `count` of them, always the same, or `many` new ones.

    The number of a case is its seed: a failure that prints it can be played again.
    """
    start = secrets.randbelow(2**48) if FUZZING else 0
    for case in range(start, start + (many if FUZZING else count)):
        yield Dice(case)


class Dice(random.Random):
    """A generator that says where it started."""

    def __init__(self, case: int) -> None:
        super().__init__(case)
        self.case = case

    def __repr__(self) -> str:
        return f"Dice({self.case})"
