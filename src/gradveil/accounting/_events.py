"""Which steps a run is charged for, and at which noise multiplier. Reads the records, nothing else.

Whoever runs a loop sees released values (weights, and metrics computed from them) and may stop because of them. The
number of steps is then a released value too, and the epsilon of the steps taken does not hold; that of all steps the
run could have taken does, because what was released is a function of what they would have released. So a run is
charged for every step it declared, taken or not, with two exceptions:

- nothing was released: there was nothing to stop because of, and nothing is charged;
- the run declared stopping="public": when it stops is decided without looking at anything computed from the private
  data. It is charged for the steps taken.

A run held to a budget (``plan["budget"]``) ends at the step the budget affords, which follows from public records: no
step after that one could have been taken, and none is charged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradveil.accounting._affordable import affordable
from gradveil.accounting._compose import SAMPLERS, Charge, default_view, why_no_bound
from gradveil.accounting._next_release import is_derived
from gradveil.accounting._pld import FIXED_SIZE, Mechanism
from gradveil.accounting._quantize import Array
from gradveil.accounting._release_table import ReleaseTable, kinds, steps_of
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader, planned_multiplier, why_unproved
from gradveil.mechanism.schedules import from_dict

_STOPPINGS = ("none", "public", "private")
_GUARANTEES = ("proved", "paper-only", "none")
_SAME = 1e-12  # relative; records are written with all their digits
MOST_DECLARED = 10_000_000  # steps
# A multiplier beyond the largest is charged at it. One below the smallest has an epsilon of 1e5 and more.
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER = 1e-3, 1e6


class Unbounded(Exception):
    """No finite epsilon; the message says why. Never leaves this package."""


def _check_rate(rate: float, batch_size: float, population: int, whose: str) -> None:
    if not (0 < rate <= 1 and population > 0 and math.isclose(rate * population, batch_size, rel_tol=_SAME)):
        raise Unbounded(
            f"{whose} has sample rate {rate!r}, which is not its expected batch size {batch_size!r} out of "
            f"{population!r} examples, so the records do not describe the sampling"
        )


def check_header(header: RunHeader) -> None:
    """Raises ``Unbounded`` where the header says something that is not known or not consistent."""
    for what, value, known in (
        ("guarantee", header.guarantee, _GUARANTEES),
        ("stopping rule", header.stopping, _STOPPINGS),
        ("sampler", header.sampling, SAMPLERS),
    ):
        if value not in known:
            raise Unbounded(f"the {what} {value!r} in the records is not known (known: {', '.join(known)})")
    if header.guarantee == "none":
        check_provable(header)
    if header.steps > MOST_DECLARED:
        raise Unbounded(f"the header declares {header.steps} steps, and at most {MOST_DECLARED} are charged one by one")
    _check_rate(header.sample_rate, header.expected_batch_size, header.population, "the header")


def check_provable(header: RunHeader) -> None:
    """Raises ``Unbounded`` where a step of this strategy has no finite epsilon, however it was sampled."""
    fixed_variance = bool(header.plan.get("fixed_variance"))
    if (why := why_unproved(header.guarantee, fixed_variance=fixed_variance, strategy=header.strategy)) is not None:
        raise Unbounded(why)


def mechanism_of(sampler: str, *, rate: float, batch_size: float, population: int) -> Mechanism:
    """How a step drew its batch, as accounting sees it."""
    if sampler not in FIXED_SIZE:
        # A sampler without a bound has no rate worth keeping: it has no bound at any.
        return Mechanism(sampler=sampler, rate=rate if sampler == "poisson" else 1.0)
    whole = round(batch_size) if math.isfinite(batch_size) and abs(batch_size - round(batch_size)) < 1e-6 else 0
    return Mechanism(sampler=sampler, rate=rate, batch_size=whole, population=population)


def planned_mechanism(header: RunHeader) -> Mechanism:
    """The sampling that the header declares for steps not yet taken."""
    return mechanism_of(
        header.sampling,
        rate=header.sample_rate,
        batch_size=header.expected_batch_size,
        population=header.population,
    )


def _check_scale(header: RunHeader, release: Release) -> None:
    public = release.scale_is_public
    if public and release.sensitivity_rule.startswith("l2max"):
        # S is a function of the batch: public noise is possible only where it does not follow S.
        varsigma = header.plan.get("varsigma")
        public = (
            bool(header.plan.get("fixed_variance"))
            and isinstance(varsigma, int | float)
            and all(
                # A line recovered after a crash stands for one that cannot be read, at no more noise than that.
                math.isclose(std, varsigma, rel_tol=_SAME) or (release.recovered and std < varsigma)
                for std in release.noise_std
            )
        )
    if not public:
        raise Unbounded(
            f"at step {release.step} the scale of the noise depends on the data (sensitivity rule "
            f"{release.sensitivity_rule!r}): two neighbouring data sets give outputs that differ in "
            "scale, and no sigma hides that"
        )


def checked_multiplier(z: float, step: int) -> float:
    """``z`` as it is charged; raises ``Unbounded`` where it protects nothing."""
    if not z >= SMALLEST_MULTIPLIER:
        raise Unbounded(
            f"step {step} released something without noise, or with so little that no epsilon is worth stating "
            f"(noise multiplier {z:g}): clipping alone protects nothing"
        )
    return min(z, LARGEST_MULTIPLIER)


def is_charged(release: Release) -> bool:
    """Whether anything was released that depends on the data."""
    return any(release.clip) or any(side.sensitivity for side in release.side)


def _charge(header: RunHeader, release: Release) -> Charge:
    _check_scale(header, release)
    z = checked_multiplier(release.multiplier, release.step)
    if release.sampler in ("poisson", *FIXED_SIZE) and is_charged(release):
        whose = f"the release of step {release.step}"
        _check_rate(release.sample_rate, release.expected_batch_size, header.population, whose)
        if not math.isclose(release.sample_rate, header.sample_rate, rel_tol=_SAME):
            raise Unbounded(
                f"{whose} has sample rate {release.sample_rate!r}, but the header declares "
                f"{header.sample_rate!r}, so the records do not describe the sampling"
            )
    mechanism = mechanism_of(
        release.sampler,
        rate=release.sample_rate,
        batch_size=release.expected_batch_size,
        population=header.population,
    )
    return mechanism, z


def _multipliers(release: Release, sigmas: Array) -> Array | None:
    """The multiplier of releases like this one at other sigmas; None where they must be looked at one by one."""
    if release.sensitivity_rule.startswith("l2max") or not np.all(np.isfinite(sigmas) & (sigmas > 0)):
        return None
    if not is_derived(release):
        return np.full(len(sigmas), release.multiplier)
    pairs = [(c, s) for c, s in zip(release.clip, release.sensitivity, strict=True) if c]
    moved = math.fsum((c / s) ** 2 for c, s in pairs)  # the release has noise, so no s is 0
    with np.errstate(all="ignore"):
        found = 1 / np.sqrt(moved / sigmas**2 + release.side_inverse_square)
    return found if np.all(found >= SMALLEST_MULTIPLIER) else None


def release_charges(header: RunHeader, releases: Iterable[Release]) -> list[Charge]:
    """One charge per release: duplicates of a step and recovered lines included."""
    if not isinstance(releases, ReleaseTable):
        return [charge for r in releases for charge in [_charge(header, r)] if is_charged(r)]
    if (known := releases.charges_under(header)) is not None:
        return known
    charges: list[Charge] = []
    place = 0
    for release, sigmas in releases.stretches():
        charge, count = _charge(header, release), len(sigmas)
        place += count
        if not is_charged(release):
            continue
        if np.all(sigmas == sigmas[0]):
            charges += [charge] * count
        elif (zs := _multipliers(release, sigmas)) is not None:
            charges += [(charge[0], z) for z in np.minimum(zs, LARGEST_MULTIPLIER).tolist()]
        else:
            charges += [_charge(header, releases[i]) for i in range(place - count, place)]
    releases.keep_charges(header, charges)
    return charges


def _planned_side(header: RunHeader, releases: Sequence[Release]) -> float:
    """What side releases add to 1 / z^2 in a step not taken: the plan's, or the costliest so far if larger."""
    planned = float(header.plan.get("side_inverse_square", 0.0))
    if not (planned >= 0 and math.isfinite(planned)):
        raise ValueError(f"its side_inverse_square is {planned!r}")
    return max([planned, *(release.side_inverse_square for release, _ in kinds(releases))])


def remaining_steps(header: RunHeader, releases: Sequence[Release]) -> Sequence[int]:
    """The declared steps that the run, were it to go on, would still take: those after its latest release.

    A run that went back to a checkpoint takes the steps after it again. Steps that were left out count too: the
    engine leaves out none. Empty where nothing was released.
    """
    if not releases:
        return []
    later = range(min(releases[-1].step + 1, header.steps), header.steps)
    if header.steps > MOST_DECLARED:
        return later  # it is not charged step by step
    taken = np.unique(np.asarray(steps_of(releases), dtype=np.int64))
    taken = taken[taken < later.start]
    if len(taken) == later.start:
        return later
    return [*np.setdiff1d(np.arange(later.start), taken).tolist(), *later]


def _planned_charges(header: RunHeader, releases: Sequence[Release], steps: Sequence[int]) -> list[Charge]:
    """Charges for steps that were not taken, as the header's plan would have noised them."""
    fixed = bool(header.plan.get("fixed_variance"))
    side = _planned_side(header, releases)
    varsigma = float(header.plan["varsigma"]) if fixed else None
    clip_at = from_dict(header.plan["clip"]) if fixed else None
    sigma_at = None if fixed else from_dict(header.plan["sigma"])
    mechanism = planned_mechanism(header)
    charges: list[Charge] = []
    same = (sigma_at or clip_at) is not None and (sigma_at or clip_at).is_constant  # type: ignore[union-attr]
    for t in steps[:1] if same else steps:
        z = planned_multiplier(
            groups=len(header.groups),
            sigma=sigma_at(t) if sigma_at else math.nan,
            clip=clip_at(t) if clip_at else math.nan,
            varsigma=varsigma,
            side_inverse_square=side,
        )
        if not math.isfinite(z):
            raise ValueError(f"its noise multiplier at step {t} is {z!r}")
        charges.append((mechanism, checked_multiplier(z, t)))
    return charges * len(steps) if same else charges


def remaining_charges(header: RunHeader, releases: Sequence[Release]) -> list[Charge]:
    """Charges for the declared steps that were not taken. Raises ``Unbounded`` where the plan does not give them."""
    steps = remaining_steps(header, releases)
    if not steps:
        return []
    why = f"all {header.steps} declared steps are charged, because training may have stopped on released values"
    try:
        check_provable(header)
        return _planned_charges(header, releases, steps)
    except Unbounded as error:
        raise Unbounded(f"{error}; {why}") from None
    except (ArithmeticError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise Unbounded(
            f"{why}, but the plan does not say how the {len(steps)} steps not taken would have been noised ({error})"
        ) from None


def budget_of(header: RunHeader) -> float | None:
    """The proved epsilon that the run is held to; None where it has no budget, or one that is no number."""
    budget = header.plan.get("budget")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        return None
    return float(budget)


@dataclass(frozen=True, kw_only=True)
class Charged:
    """What a run is charged for: the releases it made, and steps that it declared and did not take.

    ``by_budget``: not all of those steps are charged, because the run's budget affords no more of them.
    """

    taken: list[Charge]
    remaining: list[Charge]
    by_budget: bool = False

    @property
    def charges(self) -> list[Charge]:
        return [*self.taken, *self.remaining]


def taken_charges(header: RunHeader, releases: Sequence[Release]) -> list[Charge]:
    """What was released so far, and nothing else. Raises ``Unbounded`` where it has no finite epsilon."""
    check_header(header)
    charges = release_charges(header, releases)
    if charges:
        check_provable(header)
    return charges


def run_charges(header: RunHeader, releases: Sequence[Release]) -> Charged:
    """Every step the run is charged for. Raises ``Unbounded`` where none of it has a finite epsilon.

    A budget is counted as the engine counts it: at the header's delta, under the view that the statement leads with.
    What was released is charged even where it is over the budget.
    """
    taken = taken_charges(header, releases)
    if not taken or header.stopping == "public":
        return Charged(taken=taken, remaining=[])
    remaining = remaining_charges(header, releases)
    budget = budget_of(header)
    if budget is None or not remaining or not 0 < header.delta < 1:
        return Charged(taken=taken, remaining=remaining)
    neighbours, accountant = default_view(header.sampling)
    if any(why_no_bound(m, neighbours, accountant) for m in dict.fromkeys(m for m, _ in (*taken, *remaining))):
        return Charged(taken=taken, remaining=remaining)  # no budget was ever held to: the guard needs a bound
    count = affordable(
        taken, remaining, budget=budget, delta=header.delta, neighbours=neighbours, accountant=accountant
    )
    return Charged(taken=taken, remaining=remaining[:count], by_budget=count < len(remaining))


def covers(mine: RunHeader, theirs: RunHeader, releases: Sequence[Release]) -> bool:
    """Whether a run that declared ``mine`` is charged, after ``releases``, at least what one with ``theirs`` is.

    Step by step: each declared step that the other is charged for is charged here too, at no more noise. A run with a
    privacy filter is covered by one with the same filter, which counts the other's releases, and by no other.
    """
    if (filters := mine.plan.get("filter")) is not None or theirs.plan.get("filter") is not None:
        return bool(filters == theirs.plan.get("filter"))
    try:
        here = run_charges(mine, releases).remaining
    except Unbounded:
        return True  # charged with infinity
    try:
        there = run_charges(theirs, releases).remaining
    except Unbounded:
        return False
    return len(here) >= len(there) and all(
        mechanism == same and z <= other * (1 + _SAME)
        for (mechanism, z), (same, other) in zip(here, there, strict=False)
    )
