"""Which steps a run is charged for, and at which noise multiplier. Reads the records, nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradveil.accounting._compose import SAMPLERS, Charge
from gradveil.accounting._pld import FIXED_SIZE, Mechanism
from gradveil.errors import ConfigError
from gradveil.records import Release, RunHeader
from gradveil.schedules import from_dict

_STOPPINGS = ("none", "public", "private")
_GUARANTEES = ("proved", "paper-only", "none")
_SAME = 1e-12  # relative; records are written with all their digits
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
        raise Unbounded(f"strategy {header.strategy!r} is not private: it adds no noise")
    _check_rate(header.sample_rate, header.expected_batch_size, header.population, "the header")


def check_provable(header: RunHeader) -> None:
    """Raises ``Unbounded`` where a step of this strategy has no finite epsilon."""
    if header.guarantee != "proved" and not header.plan.get("fixed_variance"):
        raise Unbounded(f"strategy {header.strategy!r} scales its noise to the data, for which nothing is proved")


def _mechanism(header: RunHeader, sampler: str, rate: float, batch_size: float) -> Mechanism:
    if sampler not in FIXED_SIZE:
        # A sampler without a bound has no rate worth keeping: it has no bound at any.
        return Mechanism(sampler=sampler, rate=rate if sampler == "poisson" else 1.0)
    whole = round(batch_size) if math.isfinite(batch_size) and abs(batch_size - round(batch_size)) < 1e-6 else 0
    return Mechanism(sampler=sampler, rate=rate, batch_size=whole, population=header.population)


def planned_mechanism(header: RunHeader) -> Mechanism:
    """The sampling that the header declares for steps not yet taken."""
    return _mechanism(header, header.sampling, header.sample_rate, header.expected_batch_size)


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


def release_charges(header: RunHeader, releases: Iterable[Release]) -> list[Charge]:
    """One charge per release: duplicates of a step and recovered lines included."""
    charges: list[Charge] = []
    for release in releases:
        _check_scale(header, release)
        z = checked_multiplier(release.multiplier, release.step)
        if not any(release.clip) and not any(side.sensitivity for side in release.side):
            continue  # nothing that depends on the data was released
        if release.sampler in ("poisson", *FIXED_SIZE):
            whose = f"the release of step {release.step}"
            _check_rate(release.sample_rate, release.expected_batch_size, header.population, whose)
            if not math.isclose(release.sample_rate, header.sample_rate, rel_tol=_SAME):
                raise Unbounded(
                    f"{whose} has sample rate {release.sample_rate!r}, but the header declares "
                    f"{header.sample_rate!r}, so the records do not describe the sampling"
                )
        charges.append((_mechanism(header, release.sampler, release.sample_rate, release.expected_batch_size), z))
    return charges


def _side_inverse_square(release: Release) -> float:
    return sum((s.sensitivity / s.noise_std) ** 2 if s.noise_std > 0 else math.inf for s in release.side)


def _planned_side(header: RunHeader, releases: Sequence[Release]) -> float:
    """What side releases add to 1 / z^2 in a step not taken: the plan's, or the costliest so far if larger."""
    planned = float(header.plan.get("side_inverse_square", 0.0))
    if not (planned >= 0 and math.isfinite(planned)):
        raise ValueError(f"its side_inverse_square is {planned!r}")
    return max([planned, *map(_side_inverse_square, releases)])


def _missing_multiplier(header: RunHeader, step: int, side: float, sigma: float, clip: float) -> float:
    groups = len(header.groups)
    if header.plan.get("fixed_variance"):
        inverse_square = groups * (clip / float(header.plan["varsigma"])) ** 2
    else:
        inverse_square = groups / sigma**2
    z = 1.0 / math.sqrt(inverse_square + side)
    if not (z > 0 and math.isfinite(z)):
        raise ValueError(f"its noise multiplier at step {step} is {z!r}")
    return checked_multiplier(z, step)


def declared_charges(header: RunHeader, releases: Sequence[Release]) -> list[Charge]:
    """Charges for the declared steps that were not taken, from the plan (stopping on private data)."""
    missing = sorted(set(range(header.steps)) - {release.step for release in releases})
    if not missing:
        return []
    fixed = bool(header.plan.get("fixed_variance"))
    try:
        check_provable(header)
        side = _planned_side(header, releases)
        clip_at = from_dict(header.plan["clip"]) if fixed else None
        sigma_at = None if fixed else from_dict(header.plan["sigma"])
        mechanism = planned_mechanism(header)
        return [
            (
                mechanism,
                _missing_multiplier(
                    header,
                    t,
                    side,
                    sigma_at(t) if sigma_at else math.nan,
                    clip_at(t) if clip_at else math.nan,
                ),
            )
            for t in missing
        ]
    except Unbounded as error:
        raise Unbounded(
            f"{error}; the run stops on private data, so all of its {header.steps} declared steps are charged"
        ) from None
    except (ArithmeticError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise Unbounded(
            f"the run stops on private data, so all {header.steps} declared steps are charged, but its plan "
            f"does not say how the {len(missing)} steps not taken would have been noised ({error})"
        ) from None


def run_charges(header: RunHeader, releases: Sequence[Release]) -> list[Charge]:
    """Every step the run is charged for. Raises ``Unbounded`` where none of it has a finite epsilon."""
    check_header(header)
    charges = release_charges(header, releases)
    if charges:
        check_provable(header)
    if header.stopping == "private":
        charges += declared_charges(header, releases)
    return charges
