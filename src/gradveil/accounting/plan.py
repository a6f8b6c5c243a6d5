"""From a target epsilon to the sigma of a whole run, whatever its strategy releases at each step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

from gradveil.accounting._compose import Accountant, composed_epsilon, default_view, why_no_bound
from gradveil.accounting._events import (
    LARGEST_MULTIPLIER,
    SMALLEST_MULTIPLIER,
    Unbounded,
    checked_multiplier,
    mechanism_of,
)
from gradveil.accounting._search import meet
from gradveil.accounting.calibrate import Target
from gradveil.accounting.filter import RenyiFilter, choose_filters
from gradveil.errors import ConfigError
from gradveil.mechanism.records import planned_multiplier, why_unproved
from gradveil.mechanism.strategies import PrivacyPlan

TOLERANCE = 0.001  # how far below the target the epsilon of what is found may be, relative


def calibrate_plan(
    epsilon: float,
    *,
    plan_of: Callable[[float], PrivacyPlan],
    groups: int,
    sampling: str,
    population: int,
    batch_size: int,
    delta: float,
    side_of: Callable[[PrivacyPlan], float] | None = None,
    least: float = 0.0,
    accountant: Accountant | None = None,
) -> float:
    """The smallest starting sigma with which all declared steps of a run cost at most ``epsilon``.

    ``plan_of`` gives the plan of the run at a starting sigma (:func:`gradveil.mechanism.strategies.parameters`, with
    everything else fixed); its decays, unit bounds and fixed variance are charged as the engine will record them.
    ``groups`` is the number of clipping groups. ``side_of`` gives what the side releases of a step add to 1/z^2 under a
    plan: the bound rule's ``side_inverse_square``, which may depend on sigma; None: there are none. ``least`` is the
    smallest sigma that makes sense, such as the given end of a decay. ``accountant`` is by default the statement's,
    PLD; RDP for a run with a privacy filter, whose order is then the one at which the plan just fits.

    Guaranteed: the whole run, counted as its statement counts it (PLD, the neighbours that suit the sampler), costs at
    most ``epsilon``, and at least (1 - 0.001) of it. Stopping rules play no part: all declared steps are charged.
    Refused where the plan or the sampling has no finite epsilon, and where no sigma of at least ``least`` meets it.

    >>> from gradveil.mechanism.strategies import parameters
    >>> round(calibrate_plan(0.601, plan_of=lambda s: parameters("baseline", steps=10_000, clip=1.0, sigma=s),
    ...                      groups=1, sampling="poisson", population=60_000, batch_size=600, delta=1e-5), 1)
    6.0
    """
    target = Target(epsilon=epsilon, delta=delta)
    rate, root = batch_size / population, math.sqrt(groups)
    neighbours, usual = default_view(sampling)
    accountant = accountant or usual
    mechanism = mechanism_of(sampling, rate=rate, batch_size=float(batch_size), population=population)
    low = max(least, SMALLEST_MULTIPLIER * root)
    plan = _quietly(plan_of, max(low, 1.0))
    why = _why_unproved(plan, sampling) or why_no_bound(mechanism, neighbours, accountant)
    if why is not None:
        raise ConfigError(f"there is no epsilon to aim at: {why}.")

    def spent(sigma: float) -> float:
        here = _quietly(plan_of, sigma)
        try:
            zs = _multipliers(here, groups, 0.0 if side_of is None else side_of(here))
            charges = [(mechanism, checked_multiplier(z, t)) for t, z in enumerate(zs)]
        except Unbounded:
            return math.inf
        return composed_epsilon(charges, delta=target.delta, neighbours=neighbours, accountant=accountant)

    if low == least and spent(low) < epsilon * (1 - TOLERANCE):
        raise ConfigError(
            f"epsilon = {epsilon:g} cannot be spent: at sigma = {low:g}, the least that this plan allows, the run "
            f"spends {spent(low):g}. Ask for less, or let sigma end lower."
        )
    rough = rate * math.sqrt(plan.steps * 2 * math.log(1 / delta)) / epsilon
    zs = _multipliers(plan, groups, 0.0)
    decay = math.sqrt(sum((zs[0] / z) ** 2 for z in zs) / len(zs))  # by how much a sigma that falls starts higher
    guess, high = root * (0.5 + rough) * decay, LARGEST_MULTIPLIER * root
    return meet(spent, epsilon, guess=guess, low=low, high=high, tolerance=TOLERANCE)


def plan_filters(
    plan: PrivacyPlan,
    *,
    groups: int,
    side_inverse_square: float,
    sampling: str,
    population: int,
    batch_size: int,
    delta: float,
    epsilon: float | None,
) -> tuple[RenyiFilter, ...]:
    """The privacy filters of a run with this plan (:func:`~gradveil.accounting.filter.choose_filters`)."""
    if (why := _why_unproved(plan, sampling)) is not None:
        raise ConfigError(f"a privacy filter has nothing to hold: {why}.")
    rate = batch_size / population
    mechanism = mechanism_of(sampling, rate=rate, batch_size=float(batch_size), population=population)
    zs = _multipliers(plan, groups, side_inverse_square)
    try:
        charges = [(mechanism, checked_multiplier(z, t)) for t, z in enumerate(zs)]
    except Unbounded as error:
        raise ConfigError(f"a privacy filter has nothing to hold: {error}.") from None
    return choose_filters(charges, delta=delta, epsilon=epsilon)


def _quietly(plan_of: Callable[[float], PrivacyPlan], sigma: float) -> PrivacyPlan:
    with warnings.catch_warnings():  # of settings without effect: they were given when the run was set up
        warnings.simplefilter("ignore")
        return plan_of(sigma)


def _why_unproved(plan: PrivacyPlan, sampling: str) -> str | None:
    strategy = plan.strategy
    return why_unproved(
        strategy.guarantee, fixed_variance=plan.fixed_variance, sampling=sampling, strategy=strategy.name
    )


def _multipliers(plan: PrivacyPlan, groups: int, side: float) -> list[float]:
    """The noise multiplier of every step of ``plan``."""
    varsigma = plan.varsigma if plan.fixed_variance else None
    return [
        planned_multiplier(
            groups=groups, sigma=plan.sigma(t), clip=plan.clip(t), varsigma=varsigma, side_inverse_square=side
        )
        for t in range(plan.steps)
    ]
