"""What the finite precision of the noise costs, for noise on a lattice. docs/noise.md derives the constants."""

from __future__ import annotations

import math

from gradveil.mechanism.records import RunHeader

_OF_SUM = 2.0**-97  # distance of one draw from the ideal, in parts that add up: cut tail, decisions in 120 bits
_OF_ROOT = 2.0**-68  # in parts that add up in square: the density in the middle of a cell for its integral, 116 bits


def distance(draws: float) -> float:
    """Total variation distance of so many draws, adaptively chosen from, from those of an ideal rounded Gaussian.

    >>> distance(1e12) < 4e-15
    True
    """
    return draws * _OF_SUM + math.sqrt(draws) * _OF_ROOT


def is_covered(header: RunHeader) -> bool:
    """Whether the run's noise lies on a lattice, so that its epsilon holds in floating point too."""
    return header.plan.get("noise") == "lattice" and bool(header.plan.get("group_sizes"))


def extra_delta(header: RunHeader, epsilon: float, *, steps: int) -> float:
    """What is added to delta: (1 + e^epsilon) times the distance, over ``steps`` releases. 0 if not covered.

    Beside each coordinate of the gradient one value of each group may be released in a step, such as a count.
    """
    if not is_covered(header) or not math.isfinite(epsilon):
        return 0.0
    sizes = header.plan["group_sizes"]
    draws = float(steps) * (sum(sizes) + len(sizes))
    return min(1.0, (1.0 + math.exp(min(epsilon, 700.0))) * distance(draws))
