"""The proved epsilon: an upper bound that follows from the records alone, or infinity with the reason.

    sampler               add-remove             replace-one
    poisson, full         PLD, RDP               PLD, RDP
    without-replacement   undefined (infinite)   PLD, RDP
    with-replacement      undefined (infinite)   PLD
    shuffle, unknown      infinite               infinite

An unknown situation is answered with infinity and a reason, never with a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradveil.accounting._checks import check_delta
from gradveil.accounting._compose import (
    Accountant,
    Charge,
    Neighbours,
    check_view,
    composed_epsilon,
    usable_accountant,
    why_no_bound,
)
from gradveil.accounting._events import Charged, Unbounded, budget_of, remaining_steps, run_charges, taken_charges
from gradveil.accounting._release_table import kinds
from gradveil.accounting.filter import NAME as FILTER
from gradveil.accounting.filter import filtered
from gradveil.accounting.finite_precision import is_covered
from gradveil.errors import UnknownNameError
from gradveil.mechanism.records import Release, RunHeader

ChargedSteps = Literal["declared", "taken"]

UNIT = "the unit of protection is one example"
NOT_COVERED = "hyper-parameter search, and metrics computed from the training data (such as the loss), are not covered"
GAUSSIAN = "the noise is taken to be exactly Gaussian; drawn in floating point it is not quite"
ON_LATTICE = "the noise is drawn on a lattice: how far it is from Gaussian is charged in addition to delta"
_ALWAYS = (
    UNIT,
    "which examples were drawn and what noise was added stay secret",
    GAUSSIAN,
    NOT_COVERED,
)
_ONE_ROW = "each example contributes to at most one row of a batch in each step"
_MANY_ROWS = "an example fills as many rows of a batch as it was drawn times, each clipped on its own"
_VIEWS = "{rows}; the {views} views of an example are averaged before they are clipped, and are one row here"
_FIXED_RATE = (
    "the sampling rate {rate:g} is taken as fixed and public: it is B/N with the public {population}, and "
    "adding or removing one example is taken not to change it"
)
_SEEDED = (
    "the run was seeded: anyone who knows the seed can subtract the noise; the value holds only while the seed is "
    "secret, cannot be guessed, and is used for no other run on the data"
)
_PUBLIC_STOP = (
    "the run was declared to stop without looking at anything computed from the private data (stopping='public'), so "
    "only the steps taken are charged"
)
_ANY_STOP = "training may stop on released values: every declared step is charged, taken or not"
_BUDGET_STOP = (
    "training may stop on released values: the declared steps are charged as far as the budget of epsilon = {budget:g} "
    "affords them, because the run ends there in any case"
)
_FILTER_STOP = (
    "noise, bounds and the end of training may follow released values: the run is charged its filter's whole budget, "
    "wherever it ended"
)
_FIXED_STOP = "the step at which training stops was fixed in advance: only the steps taken are charged"
_RECORDED_S = (
    "the sensitivities S_t recorded in the ledger depend on the data and must not be published with the model, nor the "
    "figures as published, which are computed from them"
)


@dataclass(frozen=True, kw_only=True)
class ProvedEpsilon:
    """(``epsilon``, ``delta``)-differential privacy of a whole run; ``reason`` says why it is infinite.

    ``at_budget``: not all declared steps are charged, because the budget that the run is held to affords no more.
    ``filter``: of a run held to a privacy filter, its order and budget, what it granted, and the theorem.
    """

    epsilon: float
    delta: float
    neighbours: str
    sampler: str
    accountant: str
    steps_charged: int
    assumptions: tuple[str, ...]
    reason: str | None = None
    at_budget: bool = False
    filter: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite epsilon is the string "inf"."""
        data = asdict(self)
        if self.filter is None:
            del data["filter"]
        data["assumptions"] = list(self.assumptions)
        data["epsilon"] = self.epsilon if math.isfinite(self.epsilon) else "inf"
        return data


def assumptions(
    *, samplers: Collection[str], neighbours: Neighbours, rate: float, population: int | None, views: int = 1
) -> tuple[str, ...]:
    """What every bound takes for granted, for runs drawn by ``samplers``."""
    rows = _MANY_ROWS if "with-replacement" in samplers else _ONE_ROW
    notes = [*_ALWAYS, rows if views == 1 else _VIEWS.format(rows=rows, views=views)]
    if neighbours == "add-remove":
        known = "N" if population is None else f"N = {population}"
        notes.append(_FIXED_RATE.format(rate=rate, population=known))
    return tuple(notes)


def _stopping_note(
    header: RunHeader, releases: Sequence[Release], charge: ChargedSteps, charged: Charged
) -> str | None:
    if header.stopping == "public":
        return _PUBLIC_STOP
    if charge == "taken":
        return _FIXED_STOP if remaining_steps(header, releases) else None
    if charged.by_budget:
        return _BUDGET_STOP.format(budget=budget_of(header))
    return _ANY_STOP if charged.remaining or header.stopping == "private" else None


def _run_assumptions(
    header: RunHeader, releases: Sequence[Release], neighbours: Neighbours, stopping: str | None
) -> tuple[str, ...]:
    samplers = {header.sampling, *(r.sampler for r, _ in kinds(releases))}
    notes = list(
        assumptions(
            samplers=samplers,
            neighbours=neighbours,
            rate=header.sample_rate,
            population=header.population,
            views=header.plan.get("views", 1),
        )
    )
    if is_covered(header):
        notes[notes.index(GAUSSIAN)] = ON_LATTICE
    if header.seeded:
        notes.append(_SEEDED)
    if stopping is not None:
        notes.append(stopping)
    if any(r.scale_is_public and r.sensitivity_rule.startswith(("l2max", "l2-max")) for r, _ in kinds(releases)):
        notes.append(_RECORDED_S)
    return tuple(notes)


def bound(
    charges_of: Callable[[], list[Charge]], *, delta: float, neighbours: Neighbours, accountant: Accountant
) -> tuple[float, Accountant, str | None]:
    """Epsilon, the accountant that really gave it, and why it is infinite if it is."""
    try:
        charges = charges_of()
        usable = usable_accountant(charges, delta=delta, accountant=accountant)
        for kind in dict.fromkeys((accountant, usable)):
            for mechanism in dict.fromkeys(mechanism for mechanism, _ in charges):
                if (why := why_no_bound(mechanism, neighbours, kind)) is not None:
                    small = f" (delta {delta:g} is too small for the PLD of {len(charges)} steps)"
                    raise Unbounded(why if kind == accountant else why + small)
        epsilon = composed_epsilon(charges, delta=delta, neighbours=neighbours, accountant=usable)
        if not math.isfinite(epsilon):
            return math.inf, usable, "the noise is so small that no finite epsilon holds at this delta"
        return epsilon, usable, None
    except Unbounded as error:
        return math.inf, accountant, str(error)


def proved_epsilon(
    header: RunHeader,
    releases: Sequence[Release],
    *,
    delta: float | None = None,
    neighbours: Neighbours = "add-remove",
    accountant: Accountant = "PLD",
    charge: ChargedSteps = "declared",
) -> ProvedEpsilon:
    """The epsilon that is proved for the run at ``delta`` (by default the header's).

    Guaranteed: the released outputs are (epsilon, delta)-differentially private under ``neighbours`` and
    the listed assumptions. Each release is charged at its joint noise multiplier over groups and side
    releases; recovered lines and redone steps are all charged. More than 64 distinct multipliers are
    rounded down to a grid (:mod:`gradveil.accounting._quantize`), which keeps the bound and costs about .2 %
    of epsilon.

    ``charge="declared"``: once something was released, the run is charged for all steps it declared, taken or
    not (:mod:`gradveil.accounting._events` says why), as far as its budget affords them if it has one; with
    stopping="public", for the steps taken. ``charge="taken"``: for exactly ``releases``, which holds if it was
    fixed in advance that training stops after them. That is the epsilon spent so far, for plots, displays and
    budgets; it is no statement about a run that stopped for another reason.

    A run that declared a privacy filter is charged the filter's budget, wherever it ended, whatever ``accountant``
    says (:mod:`gradveil.accounting.filter`).

    No releases: epsilon 0. Any data-dependent noise scale, step without noise, or sampler without a bound:
    infinite, with the reason.
    """
    check_view(neighbours, accountant)
    if charge not in ("declared", "taken"):
        raise UnknownNameError("charge", charge, ["declared", "taken"])
    delta = check_delta(header.delta if delta is None else delta)
    sampler = " + ".join(sorted({r.sampler for r, _ in kinds(releases)})) or header.sampling
    charged = Charged(taken=[], remaining=[])
    if charge == "declared" and header.plan.get(FILTER) is not None:
        return _filtered(header, releases, delta=delta, neighbours=neighbours, sampler=sampler)

    def charges_of() -> list[Charge]:
        nonlocal charged
        if charge == "taken":
            charged = Charged(taken=taken_charges(header, releases), remaining=[])
        else:
            charged = run_charges(header, releases)
        return charged.charges

    epsilon, accountant, reason = bound(charges_of, delta=delta, neighbours=neighbours, accountant=accountant)
    return ProvedEpsilon(
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,
        sampler=sampler,
        accountant=accountant,
        steps_charged=len(releases) + len(charged.remaining),
        assumptions=_run_assumptions(header, releases, neighbours, _stopping_note(header, releases, charge, charged)),
        reason=reason,
        at_budget=charged.by_budget,
    )


def _filtered(
    header: RunHeader, releases: Sequence[Release], *, delta: float, neighbours: Neighbours, sampler: str
) -> ProvedEpsilon:
    epsilon, facts, reason = math.inf, None, None
    try:
        taken_charges(header, releases)
        epsilon, facts = filtered(header, releases, delta=delta, neighbours=neighbours)
    except Unbounded as error:
        reason = str(error)
    return ProvedEpsilon(
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,
        sampler=sampler,
        accountant="Renyi filter" if facts is None else f"Renyi filter of order {facts['order']:g}",
        steps_charged=len(releases),
        assumptions=_run_assumptions(header, releases, neighbours, _FILTER_STOP),
        reason=reason,
        filter=facts,
    )
