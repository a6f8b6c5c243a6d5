"""Bounds in print: an upper bound is never rounded down, a lower bound never up."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return "infinite"
    # The shortest decimal that is this float: 5.8 is printed as such, though its binary is a little less.
    short = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(float(value))))
    return f"{float(short):.{digits}g}"


def at_most(value: float, *, digits: int = 4) -> str:
    """An upper bound in print, rounded up: what is printed is proved too.

    >>> at_most(14.3507), at_most(2.0), at_most(0.0), at_most(math.inf)
    ('14.36', '2', '0', 'infinite')
    """
    return _rounded(value, digits, ROUND_CEILING)


def at_least(value: float, *, digits: int = 4) -> str:
    """A lower bound in print, rounded down.

    >>> at_least(14.3597)
    '14.35'
    """
    return _rounded(value, digits, ROUND_FLOOR)


def percent_at_most(share: float) -> str | None:
    """A share below 1 in percent, three digits, rounded up; None where only 100 % would be left to print.

    >>> percent_at_most(0.5234), percent_at_most(0.9989), percent_at_most(0.9995)
    ('52.4', '99.9', None)
    """
    text = at_most(100 * share, digits=3)
    return None if float(text) >= 100 else text
