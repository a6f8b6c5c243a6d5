"""A Renyi privacy filter: grants or refuses the next release, given what was granted so far.

Composition theorems fix the noise of every step, and the number of steps, before the run. A filter lets both be
functions of what was released: it fixes an order a and a budget R instead, and grants a release while the Renyi
divergences of order a of all granted ones, each bounded given the releases before it, add up to at most R. Everything
that was released, at whatever released value training stopped, then has Renyi divergence of order a of at most R
(Feldman & Zrnic 2021, "Individual privacy accounting via a Renyi filter"; Lecuyer 2021, "Practical privacy filters and
odometers with Renyi differential privacy"). Proof: with p and q the densities of the outputs on two neighbouring data
sets, and r_i the bound of step i, which is a function of earlier outputs, the product over granted steps of

    (p_i / q_i)^a exp(-(a - 1) r_i)

has a mean of at most 1 under q after each step, given the steps before it: it is a supermartingale, and stays one when
it stops. At the end the r_i add up to at most R, so E_q (p / q)^a <= exp((a - 1) R). The same with p and q exchanged.

The order is fixed before the run: the best order at the end is a function of the outputs, and the theorem is for one.
It is the order at which the *planned* noise fits the budget most often; other noise costs more than it has to, and
never too much. Both neighbouring relations have a filter of their own, and a release needs the grant of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradveil.accounting._compose import Charge, Neighbours, parts_of
from gradveil.accounting._events import Unbounded, planned_mechanism, release_charges
from gradveil.accounting._pld import Mechanism
from gradveil.accounting._rdp import PROVED_ORDERS, Array, rdp_poisson, tight_epsilon
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader

THEOREM = "Renyi filter at a fixed order (Feldman & Zrnic 2021; Lecuyer 2021)"
SAMPLERS = ("poisson", "full")  # whose steps have a Renyi bound at every order
NAME = "filter"  # of the accountant, in settings and in a header's plan

_MARGIN = 1e-9  # of the budget: sums of floating-point numbers stay below it
_SLACK = 1.25  # of the second relation's budget: other noise than planned has another ratio between the two


@dataclass(frozen=True, kw_only=True)
class RenyiFilter:
    """``budget`` on the sum of Renyi divergences of order ``order`` under ``neighbours``."""

    neighbours: Neighbours
    order: float
    budget: float

    def __post_init__(self) -> None:
        if not (self.order > 1 and math.isfinite(self.order) and self.budget > 0 and math.isfinite(self.budget)):
            raise ValueError(f"a filter of order {self.order!r} and budget {self.budget!r}")

    def cost(self, mechanism: Mechanism, z: float) -> float:
        """The divergence of one step of noise multiplier ``z`` (relative to add or remove one)."""
        if mechanism.sampler not in SAMPLERS:
            raise Unbounded(f"a filter has no bound for batches drawn by {mechanism.sampler!r}; use Poisson sampling")
        rate = mechanism.rate if mechanism.sampler == "poisson" else 1.0
        return float(rdp_poisson(rate, z, (self.order,), self.neighbours == "replace-one")[0])

    def epsilon(self, delta: float) -> float:
        """What the whole run is proved to have spent at ``delta``, at whatever released value it stopped."""
        return tight_epsilon((self.order,), np.array([self.budget]), delta)

    def success(self, kappa: float) -> float:
        """No attack reconstructs an example with more than this where the best guess does with ``kappa``.

        Hoelder's inequality: P(A) <= (Q(A) e^R)^((a - 1) / a) for every event A.
        """
        return float(min(1.0, (kappa * math.exp(self.budget)) ** ((self.order - 1) / self.order)))


def budget_at(order: float, *, epsilon: float, delta: float) -> float:
    """The largest Renyi divergence of that order that is (epsilon, delta)-private; negative where none is.

    The conversion of Canonne, Kamath and Steinke 2020, solved for the divergence.

    >>> round(budget_at(20.0, epsilon=1.0, delta=1e-5), 4)
    0.603
    """
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def choose_filters(planned: Sequence[Charge], *, delta: float, epsilon: float | None = None) -> tuple[RenyiFilter, ...]:
    """The filters of a run that is planned as ``planned``; the first is of the relation that ``epsilon`` is for.

    Each order affords the plan so many times over: the order that affords it most often is taken, and with it the
    budget that makes the run (``epsilon``, ``delta``)-private under add-remove. Without ``epsilon``, the budget is
    what the plan costs at its best order.
    """
    parts = parts_of(planned)
    if not parts or any(m.sampler not in SAMPLERS for m, _, _ in parts):
        raise ConfigError("a privacy filter needs Poisson sampling, and at least one planned step.")
    orders = np.array(PROVED_ORDERS)
    total = _total(parts, replace=False)
    if epsilon is None:
        epsilon = tight_epsilon(PROVED_ORDERS, total, delta) * (1 + 100 * _MARGIN)  # the last planned step fits too
    usable = orders > 1.01  # the conversion loses its digits below
    budgets = np.array([budget_at(a, epsilon=epsilon, delta=delta) for a in PROVED_ORDERS])
    times = np.where(usable, budgets / total, -math.inf)
    best = int(np.argmax(times))
    if not times[best] > 0:
        raise ConfigError(
            f"epsilon = {epsilon:g} at delta = {delta:g} leaves a privacy filter nothing to grant: the conversion from "
            "Renyi divergence alone costs more. Ask for a larger epsilon, or use accountant='PLD'."
        )
    lead = RenyiFilter(neighbours="add-remove", order=PROVED_ORDERS[best], budget=_rounded_down(budgets[best]))
    other = _total(parts, replace=True) * float(times[best])
    epsilons = np.array([tight_epsilon((a,), other[i : i + 1], delta) for i, a in enumerate(PROVED_ORDERS)])
    at = int(np.argmin(np.where(usable, epsilons, math.inf)))
    beside = RenyiFilter(neighbours="replace-one", order=PROVED_ORDERS[at], budget=_rounded_down(_SLACK * other[at]))
    return (lead, beside)


def _rounded_down(value: float) -> float:
    """To ten digits: a run that is resumed elsewhere must find the same budget, whatever the last bits are there."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 9)
    return math.floor(value / unit) * unit


def _total(parts: Sequence[tuple[Mechanism, float, int]], *, replace: bool) -> Array:
    found = np.zeros(len(PROVED_ORDERS))
    for mechanism, z, count in parts:
        rate = mechanism.rate if mechanism.sampler == "poisson" else 1.0
        found = found + count * rdp_poisson(rate, z, PROVED_ORDERS, replace)
    return found


def to_plan(filters: Sequence[RenyiFilter]) -> list[dict[str, Any]]:
    """For a header's plan, under :data:`NAME`."""
    return [asdict(one) for one in filters]


def filters_of(header: RunHeader) -> tuple[RenyiFilter, ...]:
    """The filters that a run declared; empty where it has none. Raises ``Unbounded`` where they cannot be read."""
    declared = header.plan.get(NAME)
    if declared is None:
        return ()
    try:
        found = tuple(RenyiFilter(**one) for one in declared)
        if not found or len({one.neighbours for one in found}) != len(found):
            raise ValueError("no filter, or two of one relation")
        return found
    except (TypeError, ValueError) as error:
        raise Unbounded(f"the privacy filter in the records cannot be read ({error})") from None


class FilterAccountant:
    """What the filters of a run have granted so far, and whether they grant the next release. Reads records alone.

    A line that a crash cut in half was granted before it was written: it costs at most what was left then.
    """

    def __init__(self, header: RunHeader) -> None:
        self.header, self.filters = header, filters_of(header)
        self.granted = [0.0] * len(self.filters)
        self._seen = 0
        self._after: dict[int, list[float]] = {}  # granted up to a step, each step counted once

    def observe(self, releases: Sequence[Release]) -> FilterAccountant:
        """Count the releases that were not counted yet; ``releases`` are all of the run, in their order."""
        for release in releases[self._seen :]:
            before = list(self.granted)
            for charge in release_charges(self.header, [release]):
                self._add(charge, recovered=release.recovered)
            so_far = self._after.get(release.step - 1, [0.0] * len(before))
            costs = (now - then for now, then in zip(self.granted, before, strict=True))
            self._after[release.step] = [a + b for a, b in zip(so_far, costs, strict=True)]
        self._seen = len(releases)
        return self

    def _add(self, charge: Charge, *, recovered: bool = False) -> None:
        for i, one in enumerate(self.filters):
            cost = one.cost(*charge)
            left = max(0.0, one.budget * (1 - _MARGIN) - self.granted[i])
            self.granted[i] += min(cost, left) if recovered else cost

    def grants(self, z: float) -> bool:
        """Whether one more step of noise multiplier ``z``, drawn as the header declares, stays within all budgets."""
        mechanism = planned_mechanism(self.header)
        return all(
            spent + one.cost(mechanism, z) <= one.budget * (1 - _MARGIN)
            for one, spent in zip(self.filters, self.granted, strict=True)
        )

    def grant(self, z: float) -> bool:
        """:meth:`grants`, and counts the step if so."""
        if not self.grants(z):
            return False
        self._add((planned_mechanism(self.header), z))
        return True

    @property
    def left(self) -> float:
        """The share of the budget that is left: the smallest over the filters."""
        return self._left(self.granted)

    def left_after(self, step: int) -> float:
        """The same at the time of a step, which a run that takes steps again does not change."""
        return self._left(self._after.get(step, self.granted))

    def _left(self, granted: Sequence[float]) -> float:
        return max(0.0, min(1 - g / one.budget for one, g in zip(self.filters, granted, strict=True)))


def filtered(
    header: RunHeader, releases: Sequence[Release], *, delta: float, neighbours: Neighbours
) -> tuple[float, Mapping[str, Any]]:
    """Epsilon of a run that is held to filters, and the facts of the one for ``neighbours``.

    Raises ``Unbounded`` where there is none for them, or where the run released more than it grants: the theorem
    says nothing of such a run.
    """
    found = FilterAccountant(header).observe(releases)
    for one, granted in zip(found.filters, found.granted, strict=True):
        if one.neighbours != neighbours:
            continue
        if not granted <= one.budget:
            raise Unbounded(
                f"the run released more than its privacy filter grants ({granted:g} of {one.budget:g} at order "
                f"{one.order:g}): the noise may have followed released values beyond what the theorem covers"
            )
        facts = {**asdict(one), "granted": granted, "theorem": THEOREM}
        return (one.epsilon(delta) if granted else 0.0), facts
    raise Unbounded(f"the run's privacy filter was not set for {neighbours}, and noise may have followed its releases")
