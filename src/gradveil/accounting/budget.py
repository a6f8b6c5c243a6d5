"""How many further steps a budget affords. Asked before a step, so that nothing is overspent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradveil.accounting._affordable import affordable
from gradveil.accounting._checks import check_delta, check_noise
from gradveil.accounting._compose import Accountant, Charge, Neighbours, check_view, default_view
from gradveil.accounting._events import (
    LARGEST_MULTIPLIER,
    SMALLEST_MULTIPLIER,
    Unbounded,
    check_provable,
    planned_mechanism,
    taken_charges,
)
from gradveil.accounting.paper import check_method, paper_curve
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader


def _check_budget(budget: float) -> None:
    if not budget > 0:
        raise ConfigError(f"budget {budget!r} is not above zero: no private step has epsilon 0. Give epsilon > 0.")


def paper_affordable_steps(
    sigmas: Sequence[float], sample_rate: float, delta: float, budget: float, method: str = "MA"
) -> int:
    """The largest n such that the first n of ``sigmas`` cost at most ``budget`` by a *published* accountant.

    Not a guarantee, and for strategies without one the only budget there is: anyone who holds a run to it must
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
    with ``charge="taken"`` is at most ``budget`` after n such steps, and after n + 1 it is not (or
    n = len(planned)). A run whose header holds that budget is charged for no more, wherever it stops.

    0 where even the releases so far are over the budget, or where they or the strategy have no finite
    epsilon.
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
        spent = taken_charges(header, releases)
    except Unbounded:
        return 0
    mechanism = planned_mechanism(header)
    further: list[Charge] = [(mechanism, z) for z in planned]
    return affordable(spent, further, budget=budget, delta=delta, neighbours=neighbours, accountant=accountant)
