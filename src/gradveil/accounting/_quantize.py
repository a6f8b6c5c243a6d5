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
Index = NDArray[np.int64]

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
    levels, index = cell_index(multipliers, exact_limit=exact_limit, cell_limit=cell_limit)
    counts = np.bincount(index, minlength=levels.size)
    return tuple((float(z), int(count)) for z, count in zip(levels, counts, strict=True))


def cell_index(
    multipliers: Sequence[float], *, exact_limit: int = EXACT_LIMIT, cell_limit: int = CELL_LIMIT
) -> tuple[Array, Index]:
    """The smallest multiplier of each cell, in the order in which cells first appear, and each step's cell."""
    if len(multipliers) == 0:
        return np.zeros(0), np.zeros(0, dtype=np.int64)
    values = _floor(np.asarray(multipliers, dtype=float))
    distinct = np.unique(values)
    if distinct.size <= exact_limit:
        keys = np.searchsorted(distinct, values)
    else:
        keys = np.floor(np.log(values) / CELL_WIDTH).astype(np.int64)
        while np.unique(keys).size > cell_limit:
            keys = np.floor_divide(keys, 2)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(order.size, dtype=np.int64)
    rank[order] = np.arange(order.size)
    index = rank[inverse]
    smallest = np.full(first.size, math.inf)
    np.minimum.at(smallest, index, values)
    return smallest, index
