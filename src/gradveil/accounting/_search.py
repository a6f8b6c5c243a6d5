"""The noise that meets a target epsilon: a root, searched with few evaluations, for each may take a second."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradveil.errors import ConfigError


def meet(
    epsilon_of: Callable[[float], float],
    target: float,
    *,
    guess: float,
    low: float,
    high: float,
    tolerance: float,
) -> float:
    """x in [low, high] with epsilon_of(x) at most ``target`` and within the relative tolerance of it.

    ``epsilon_of`` falls in x.

    Secants of log epsilon over log x, which is nearly a line; bisection where they do not help. Refuses a target that
    is not between the two ends' epsilons.
    """
    aim = target * (1 - tolerance / 2)
    over: tuple[float, float] | None = None
    under: tuple[float, float] | None = None
    last: tuple[float, float] | None = None
    x, widths = min(max(guess, low), high), [math.inf] * 3
    for _ in range(200):
        value = epsilon_of(x)
        if value <= target:
            under = (x, value)
            if value >= target * (1 - tolerance):
                return x
        else:
            over = (x, value)
        before, last = last, (x, value)
        if over is None or under is None:
            if x == (high if under is None else low):
                raise ConfigError(
                    f"epsilon {target:g} is out of reach: at {x:g}, the {'most' if under is None else 'least'} noise "
                    f"that this search allows, {value:g} is spent. Change the target, the steps, the sample rate, or "
                    "the noise of what is released beside the gradient."
                )
            factor = value / aim if 0 < value < math.inf else (0.25 if value == 0 else 4.0)
            step = min(max(factor, 1.02), 4.0) if under is None else max(min(factor, 0.98), 0.25)
            x = min(max(x * step, low), high)
            continue
        gap = math.log(under[0] / over[0])
        if gap < 1e-12:
            return under[0]
        share: float | None = None
        if gap < 0.5 * widths[-3]:  # otherwise the last secants have not narrowed it down
            share = _secant(before, last, over, gap, aim) or _secant(under, over, over, gap, aim)
        widths.append(gap)
        x = over[0] * math.exp(gap * min(max(share or 0.5, 0.001), 0.999))
    return under[0] if under is not None else high


def _secant(
    a: tuple[float, float] | None, b: tuple[float, float], over: tuple[float, float], gap: float, aim: float
) -> float | None:
    """Where the line through two points (x, epsilon), in logarithms, meets ``aim``, as a share of the gap.

    The gap begins at ``over``. None where there is no such line, or it meets ``aim`` outside the gap.
    """
    if a is None or a[0] == b[0] or a[1] == b[1] or not (0 < a[1] < math.inf and 0 < b[1] < math.inf):
        return None
    slope = math.log(a[1] / b[1]) / math.log(a[0] / b[0])
    share = (math.log(b[0] / over[0]) + math.log(aim / b[1]) / slope) / gap
    return share if 0 < share < 1 else None
