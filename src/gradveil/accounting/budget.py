"""How many further steps a budget affords. Asked before a step, so that nothing is overspent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from gradveil.accounting._charges import (
    LARGEST_MULTIPLIER,
    SMALLEST_MULTIPLIER,
    Unbounded,
    check_provable,
    planned_mechanism,
    release_charges,
    run_charges,
)
from gradveil.accounting._checks import check_delta, check_noise
from gradveil.accounting._compose import Accountant, Neighbours, check_view, composed_epsilon, why_no_bound
from gradveil.accounting.paper import check_method, paper_curve
from gradveil.accounting.proved import default_view
from gradveil.errors import ConfigError
from gradveil.records import Release, RunHeader


def largest(epsilon_after: Callable[[int], float], low: int, high: int, budget: float) -> int:
    """Largest n in [low, high) with epsilon_after(n) <= budget; low is known to fit and high not to.

    Interpolates on epsilon^2 (nearly linear in the number of steps) with a few steps of margin, and
    bisects where that does not shrink the interval.
    """
    at_low, at_high = epsilon_after(low), epsilon_after(high)
    guess_turn = True
    while high - low > 1:
        n = (low + high) // 2
        if guess_turn and math.isfinite(at_high) and at_high > at_low:
            share = (budget**2 - at_low**2) / (at_high**2 - at_low**2)
            n = min(high - 1, max(low + 1, low + math.floor(share * (high - low))))
        value = epsilon_after(n)
        shrunk = (high - n) if value <= budget else (n - low)
        guess_turn = not guess_turn or shrunk <= (high - low) // 4
        if value <= budget:
            low, at_low = n, value
        else:
            high, at_high = n, value
    return low


def _check_budget(budget: float) -> None:
    if not budget > 0:
        raise ConfigError(f"budget {budget!r} is not above zero: no private step has epsilon 0. Give epsilon > 0.")


def paper_affordable_steps(
    sigmas: Sequence[float], sample_rate: float, delta: float, budget: float, method: str = "MA"
) -> int:
    """The largest n such that the first n of ``sigmas`` cost at most ``budget`` by a *published* accountant.

    Not a guarantee, and for strategies without one the only budget there is: whoever holds a run to it must
    name it "as published". Steps already taken are the first of ``sigmas``. 0 where the first step is over it.

    >>> paper_affordable_steps([6.0] * 10_000, 0.01, 1e-5, 0.636)
    6008
    """
    _check_budget(budget)
    spent = paper_curve(sigmas, sample_rate, delta, methods=[check_method(method)])[method]
    over = np.flatnonzero(~(spent <= budget))
    return int(over[0]) if over.size else len(spent)


def affordable_steps(
    header: RunHeader,
    releases: Sequence[Release],
    planned: Sequence[float],
    *,
    budget: float,
    delta: float | None = None,
    neighbours: Neighbours | None = None,
    accountant: Accountant | None = None,
) -> int:
    """The largest n such that ``releases`` and the first n of ``planned`` stay within epsilon ``budget``.

    ``planned`` holds the noise multipliers (add or remove one, joint over groups and side releases) of
    the steps to come; they are drawn as the header declares. Neighbours and accountant default to those
    the statement leads with. Guaranteed: :func:`~gradveil.accounting.proved.proved_epsilon` of the run
    after n such steps is at most ``budget``, and after n + 1 it is not (or n = len(planned)).

    0 where even the releases so far are over the budget, or where they or the strategy have no finite
    epsilon; for a run that stops on private data also where its declared steps (``header.steps``) cost
    more than ``budget``, because they are charged whether they are taken or not.
    """
    _check_budget(budget)
    default_neighbours, default_accountant = default_view(header.sampling)
    neighbours = neighbours or default_neighbours
    accountant = accountant or default_accountant
    check_view(neighbours, accountant)
    delta = check_delta(header.delta if delta is None else delta)
    planned = [check_noise(z, what="planned noise multiplier", step=i) for i, z in enumerate(planned)]
    enough = next((i for i, z in enumerate(planned) if z < SMALLEST_MULTIPLIER), len(planned))
    planned = [min(z, LARGEST_MULTIPLIER) for z in planned[:enough]]  # beyond: no finite epsilon
    try:
        check_provable(header)
        charged = run_charges(header, releases)
        spent = release_charges(header, releases)
    except Unbounded:
        return 0
    mechanism = planned_mechanism(header)
    if any(why_no_bound(m, neighbours, accountant) for m in {mechanism, *(m for m, _ in spent)}):
        return 0

    known: dict[int, float] = {}

    def epsilon_after(n: int) -> float:
        if n not in known:
            charges = [*spent, *((mechanism, z) for z in planned[:n])]
            known[n] = composed_epsilon(charges, delta=delta, neighbours=neighbours, accountant=accountant)
        return known[n]

    if header.stopping == "private":
        declared = composed_epsilon(charged, delta=delta, neighbours=neighbours, accountant=accountant)
        if not declared <= budget:
            return 0
    total = len(planned)
    if epsilon_after(total) <= budget:
        return total
    if epsilon_after(0) > budget:
        return 0
    return largest(epsilon_after, 0, total, budget)
