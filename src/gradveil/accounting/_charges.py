"""Which steps a run is charged for, and at which noise multiplier. Reads the records, nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradveil.accounting._checks import check_rate
from gradveil.accounting._compose import FIXED_SIZE, Charge
from gradveil.accounting._pld import Mechanism
from gradveil.errors import ConfigError
from gradveil.records import Release, RunHeader
from gradveil.schedules import from_dict


class Unbounded(Exception):
    """No finite epsilon; the message says why. Never leaves this package."""


def mechanism_of(header: RunHeader, sampler: str, rate: float, batch_size: float) -> Mechanism:
    """The sampling of one step; a fixed-size sampler also needs the batch size and the population."""
    if sampler not in FIXED_SIZE:
        # An unknown sampler has no rate worth checking: it has no bound at any.
        return Mechanism(sampler=sampler, rate=check_rate(rate) if sampler == "poisson" else 1.0)
    whole = round(batch_size) if math.isfinite(batch_size) and abs(batch_size - round(batch_size)) < 1e-6 else 0
    return Mechanism(sampler=sampler, rate=check_rate(rate), batch_size=whole, population=header.population)


def planned_mechanism(header: RunHeader) -> Mechanism:
    """The sampling that the header declares for steps not yet taken."""
    return mechanism_of(header, header.sampling, header.sample_rate, header.expected_batch_size)


def release_charges(header: RunHeader, releases: Iterable[Release]) -> list[Charge]:
    """One charge per release: duplicates of a step and recovered lines included."""
    charges: list[Charge] = []
    for release in releases:
        if not release.scale_is_public:
            raise Unbounded(
                f"at step {release.step} the scale of the noise depends on the data (sensitivity rule "
                f"{release.sensitivity_rule!r}): two neighbouring data sets give outputs that differ in "
                "scale, and no sigma hides that"
            )
        z = release.multiplier if release.clip else 0.0
        if not z > 0:
            raise Unbounded(
                f"step {release.step} released something without noise (noise multiplier {z:g}): "
                "clipping alone protects nothing"
            )
        if math.isfinite(z):  # an infinite multiplier: every bound is 0 and nothing depends on the data
            charges.append((mechanism_of(header, release.sampler, release.sample_rate, release.expected_batch_size), z))
    return charges


def _side_inverse_square(release: Release) -> float:
    return sum((s.sensitivity / s.noise_std) ** 2 if s.noise_std > 0 else math.inf for s in release.side)


def _missing_multiplier(header: RunHeader, step: int, side: float, sigma: float, clip: float) -> float:
    groups = len(header.groups)
    if header.plan.get("fixed_variance"):
        inverse_square = groups * (clip / float(header.plan["varsigma"])) ** 2
    else:
        inverse_square = groups / sigma**2
    z = 1.0 / math.sqrt(inverse_square + side)
    if not (z > 0 and math.isfinite(z)):
        raise ValueError(f"its noise multiplier at step {step} is {z!r}")
    return z


def declared_charges(header: RunHeader, releases: Sequence[Release]) -> list[Charge]:
    """Charges for the declared steps that were not taken, from the plan (stopping on private data).

    Side releases are taken to cost what the costliest so far did (they do not vary within a run).
    """
    missing = sorted(set(range(header.steps)) - {release.step for release in releases})
    if not missing:
        return []
    fixed = bool(header.plan.get("fixed_variance"))
    if header.guarantee == "paper-only" and not fixed:
        raise Unbounded(
            f"strategy {header.strategy!r} scales its noise to the data, and the run is charged for all of "
            f"its {header.steps} declared steps because it stops on private data"
        )
    side = max((_side_inverse_square(release) for release in releases), default=0.0)
    try:
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
    except (ConfigError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Unbounded(
            f"the run stops on private data, so all {header.steps} declared steps are charged, but its plan "
            f"does not say how the {len(missing)} steps not taken would have been noised ({error})"
        ) from None
