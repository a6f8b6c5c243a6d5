"""Group near-equal noise multipliers, so that thousands of distinct ones stay cheap to compose.

Rounding is to the safe side only: every multiplier is charged at the smallest one of its cell. The
cells lie on one fixed logarithmic grid, so that adding a step can only lower a cell's smallest
multiplier or raise its count: the composed epsilon never falls when a step is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXACT_LIMIT = 64  # up to so many distinct multipliers, none is rounded
CELL_WIDTH = 0.004  # ratio between neighbouring grid lines; costs about .2 % of epsilon
DIGITS = 12  # significant ones kept, so that the last bits of equal multipliers do not make them distinct
CELL_LIMIT = 512  # where more cells would be used, the width is doubled (nested, so still monotone)


def _floor(values: Array) -> Array:
    """``values`` rounded down to :data:`DIGITS` significant digits.

    By half a digit more than needed, so that a value such as 6.0 does not lie on the edge.
    """
    unit = 10.0 ** (np.floor(np.log10(values)) - (DIGITS - 1))
    return np.asarray(np.minimum(np.floor(values / unit - 0.5) * unit, values))


def cells(
    multipliers: Sequence[float], *, exact_limit: int = EXACT_LIMIT, cell_limit: int = CELL_LIMIT
) -> tuple[tuple[float, int], ...]:
    """``(smallest multiplier, number of steps)`` per cell, in the order in which cells first appear.

    >>> [(round(z, 9), count) for z, count in cells([6.0, 6.0, 5.0])]
    [(6.0, 2), (5.0, 1)]
    >>> [(round(z, 9), count) for z, count in cells([6.0, 5.999, 4.0], exact_limit=2)]
    [(5.999, 2), (4.0, 1)]
    """
    if len(multipliers) == 0:
        return ()
    values = _floor(np.asarray(multipliers, dtype=float))
    distinct = np.unique(values)
    if distinct.size <= exact_limit:
        keys = np.searchsorted(distinct, values)
    else:
        width = CELL_WIDTH
        keys = np.floor(np.log(values) / width).astype(np.int64)
        while np.unique(keys).size > cell_limit:
            width *= 2.0
            keys = np.floor_divide(keys, 2)
    _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    smallest = np.full(first.size, math.inf)
    np.minimum.at(smallest, inverse, values)
    return tuple((float(smallest[i]), int(counts[i])) for i in np.argsort(first, kind="stable"))
