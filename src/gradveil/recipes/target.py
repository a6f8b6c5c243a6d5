"""From a target epsilon to the sigma of a whole run, whatever its strategy releases at each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from scipy.optimize import brentq

from gradveil.accounting import ProvedEpsilon, default_view, proved_epsilon
from gradveil.errors import ConfigError
from gradveil.records import RunHeader

TOLERANCE = 0.001  # how far below the target, relative, the epsilon of what is found may lie
_SMALLEST, _START, _LARGEST = 0.01, 4.0, 1e6


def planned_epsilon(header: RunHeader) -> ProvedEpsilon:
    """What all steps that a run declares would cost, as its statement would count them."""
    neighbours, accountant = default_view(header.sampling)
    whole = replace(header, stopping="private")  # charges every declared step, taken or not
    return proved_epsilon(whole, (), neighbours=neighbours, accountant=accountant)


def sigma_for(epsilon: float, header_of: Callable[[float], RunHeader], *, least: float = 0.0) -> float:
    """The smallest sigma, within the tolerance, with which a run spends at most ``epsilon``.

    ``header_of`` gives the header that the run would have with a given sigma: groups, decays, fixed variance and what
    is released beside the gradients are charged as the engine will record them. ``least``: sigmas below it make no
    sense (the given end of a decay). Refused where no sigma comes near ``epsilon``.
    """
    known: dict[float, float] = {}

    def spent(sigma: float) -> float:
        if sigma not in known:
            known[sigma] = planned_epsilon(header_of(sigma)).epsilon
        return known[sigma]

    least = max(least, _SMALLEST)
    low = high = max(least, _START)
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > _LARGEST:
            raise ConfigError(
                f"epsilon = {epsilon:g} is out of reach: at sigma = {low:g} the run spends {spent(low):g} still. Take "
                "fewer steps, smaller batches or a larger epsilon, or give more noise to what else is released."
            )
    while low > least and spent(low) <= epsilon:
        low, high = max(least, low / 2), low
    aim = epsilon * (1 - TOLERANCE / 2)
    if spent(low) <= aim:
        raise ConfigError(
            f"epsilon = {epsilon:g} cannot be spent: at sigma = {low:g}, the least that this plan allows, the run "
            f"spends {spent(low):g}. Ask for less, or let sigma end lower."
        )
    if spent(high) >= aim:
        return high

    def excess(log_sigma: float) -> float:
        value = spent(math.exp(log_sigma))
        return math.log(value / aim) if math.isfinite(value) else 100.0

    sigma = math.exp(brentq(excess, math.log(low), math.log(high), xtol=TOLERANCE / 10))
    while spent(sigma) > epsilon:
        sigma *= 1 + TOLERANCE / 10
    return sigma
