"""The proved epsilon after each step, for plots. RDP at every step; the PLD at chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradveil.accounting._checks import check_delta
from gradveil.accounting._compose import (
    Accountant,
    Charge,
    Neighbours,
    check_view,
    composed_epsilon,
    renyi_steps,
    usable_accountant,
    why_no_bound,
)
from gradveil.accounting._events import Unbounded, is_charged, taken_charges
from gradveil.accounting._quantize import cell_index
from gradveil.accounting._rdp import tight_epsilons
from gradveil.accounting._release_table import kinds
from gradveil.accounting.planned import Setting
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader

Array = NDArray[np.float64]
Index = NDArray[np.int64]

PLD_POINTS = 24


@dataclass(frozen=True, kw_only=True)
class Curve:
    """``epsilon[i]`` after ``steps[i]`` steps. Empty, with the reason, where nothing is proved."""

    steps: Index
    epsilon: Array
    neighbours: str
    accountant: str
    reason: str | None = None


def _points(total: int, at: Sequence[int] | None, accountant: Accountant) -> Index:
    if at is None:
        if accountant == "RDP" or total <= PLD_POINTS:
            return np.arange(1, total + 1)
        # Half of them evenly, half closer together towards the start, where the curve is steep.
        even, early = np.linspace(1, total, PLD_POINTS // 2), np.geomspace(1, total, PLD_POINTS // 2)
        return np.unique(np.append(even, early).round().astype(np.int64))
    wanted = np.unique(np.asarray(at, dtype=np.int64))
    if wanted.size and not (wanted[0] >= 1 and wanted[-1] <= total):
        raise ConfigError(f"a point of the curve is outside 1 .. {total}, the steps of the run.")
    return wanted


def _renyi_curve(charges: Sequence[Charge], neighbours: Neighbours, delta: float) -> Array:
    """After every step. Cells are those of the whole run, so that the last value is the run's."""
    mechanisms = list(dict.fromkeys(m for m, _ in charges))
    orders, rdp_of, limits = renyi_steps(mechanisms, neighbours)
    table: list[Array] = []
    index = np.empty(len(charges), dtype=np.int64)
    for mechanism in mechanisms:
        mine = np.array([i for i, (m, _) in enumerate(charges) if m == mechanism])
        levels, cell = cell_index([charges[i][1] for i in mine], **limits)
        index[mine] = cell + len(table)
        table += [rdp_of(mechanism, float(z)) for z in levels]
    rows, curve, spent = np.array(table), np.empty(len(charges)), np.zeros(len(orders))
    for start in range(0, len(charges), 4096):  # bounds the memory of long runs
        block = spent + np.cumsum(rows[index[start : start + 4096]], axis=0)
        curve[start : start + 4096] = tight_epsilons(orders, block, delta)
        spent = block[-1]
    return np.maximum.accumulate(curve)


def _curve(
    charged: Callable[[], tuple[Sequence[Charge], Sequence[int]]],
    total: int,
    *,
    at: Sequence[int] | None,
    delta: float,
    neighbours: Neighbours,
    accountant: Accountant,
) -> Curve:
    """``charged`` gives all charges, and how many of them the run has after each of its ``total`` steps."""
    points, reason = _points(total, at, accountant), None
    epsilon = np.zeros(0)
    try:
        charges, ends = charged()
        accountant = usable_accountant(charges, delta=delta, accountant=accountant)
        for mechanism in dict.fromkeys(m for m, _ in charges):
            if (why := why_no_bound(mechanism, neighbours, accountant)) is not None:
                raise Unbounded(why)
        counts = [ends[n - 1] for n in points.tolist()]
        if accountant == "RDP" and charges:
            epsilon = np.append(0.0, _renyi_curve(charges, neighbours, delta))[counts]
        else:
            values = {
                n: composed_epsilon(charges[:n], delta=delta, neighbours=neighbours, accountant=accountant)
                for n in dict.fromkeys(counts)
            }
            epsilon = np.array([values[n] for n in counts])
    except Unbounded as error:
        points, reason = points[:0], str(error)
    return Curve(steps=points, epsilon=epsilon, neighbours=neighbours, accountant=accountant, reason=reason)


def planned_curve(
    sigmas: Sequence[float],
    setting: Setting,
    *,
    delta: float = 1e-5,
    neighbours: Neighbours = "add-remove",
    accountant: Accountant = "RDP",
    at: Sequence[int] | None = None,
) -> Curve:
    """The proved epsilon after each step (RDP), or after the steps ``at`` (by default 24 of them for the PLD)."""
    check_view(neighbours, accountant)
    check_delta(delta)

    def charged() -> tuple[Sequence[Charge], Sequence[int]]:
        return setting.charges(sigmas), range(1, len(sigmas) + 1)

    return _curve(charged, len(sigmas), at=at, delta=delta, neighbours=neighbours, accountant=accountant)


def proved_curve(
    header: RunHeader,
    releases: Sequence[Release],
    *,
    delta: float | None = None,
    neighbours: Neighbours = "add-remove",
    accountant: Accountant = "RDP",
    at: Sequence[int] | None = None,
) -> Curve:
    """The same for a run: what was spent by each of its releases, had it been fixed in advance to stop there.

    A run that did stop early may be charged for more: its proved epsilon is that of the statement
    (:func:`~gradveil.accounting.proved.proved_epsilon`), not the last value here.
    """
    check_view(neighbours, accountant)
    delta = check_delta(header.delta if delta is None else delta)

    def charged() -> tuple[Sequence[Charge], Sequence[int]]:
        # A release that holds nothing is a step, but no charge.
        each = [(is_charged(release), count) for release, count in kinds(releases)]
        ends = np.cumsum(np.repeat([charged for charged, _ in each], [count for _, count in each]))
        return taken_charges(header, releases), ends.tolist()

    return _curve(charged, len(releases), at=at, delta=delta, neighbours=neighbours, accountant=accountant)
