"""Ranges of hyper-parameters, as annotations: they are checked when a user types a value, and shown by `explain`."""

from typing import Annotated

from annotated_types import Ge, Gt, Interval

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Momentum = Annotated[float, Interval(ge=0, lt=1)]
Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
