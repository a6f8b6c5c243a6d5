"""Epsilons of a run that is described by its parameters, before there is a ledger.

The same bounds as for a ledger (:mod:`gradveil.accounting.proved`), with the same assumptions. What a ledger
would record is taken from the parameters: per-layer clipping at C with noise sigma C on each of ``layers``
layers has the joint sensitivity C sqrt(layers), so each step is charged at sigma / sqrt(layers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.accounting._checks import check_delta, check_noise, check_rate
from gradveil.accounting._compose import SAMPLERS, Accountant, Charge, Neighbours, check_view
from gradveil.accounting._events import checked_multiplier
from gradveil.accounting._pld import FIXED_SIZE, Mechanism
from gradveil.accounting.proved import ProvedEpsilon, assumptions, bound
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism import schedules
from gradveil.mechanism.records import noise_multiplier
from gradveil.mechanism.schedules import Constant, Schedule

MOST_STEPS = 10_000_000
# Without a population, fixed-size batches are taken from so many examples. What is bounded without
# replacement depends on the rate alone; with replacement it grows with the population, by ever less.
LARGE_POPULATION = 10_000_000
_SAME = 1e-9  # relative: a batch size that is whole but for rounding


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How batches are drawn, how many layers are clipped apart, and the noise on what is counted beside them.

    ``population`` matters for fixed-size sampling only; left out, a large one is taken. The batch size is
    then rounded up to a whole number, which is to the safe side. ``count_noise`` is that of quantile-clip and
    dyn-private, which release for each layer how many examples are within its bound: an example moves such a
    count by 1/2. None: nothing is counted.
    """

    sample_rate: float
    layers: int = 1
    sampling: str = "poisson"
    population: int | None = None
    count_noise: float | None = None

    def __post_init__(self) -> None:
        check_rate(self.sample_rate)
        if self.count_noise is not None and not (self.count_noise > 0 and math.isfinite(self.count_noise)):
            raise ConfigError(f"count_noise is {self.count_noise!r}; released counts need positive, finite noise.")
        if self.sampling not in SAMPLERS:
            raise UnknownNameError("sampling", self.sampling, SAMPLERS)
        for what, value in (("layers", self.layers), ("population", self.population)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{what} is {value!r}. It is a count: give a whole number, at least 1.")
        size = self.sample_rate * (self.population or 1)
        if self.population is not None and self.sampling in FIXED_SIZE and abs(size - round(size)) > _SAME * size:
            raise ConfigError(
                f"sample rate {self.sample_rate!r} of {self.population} examples is a batch of {size:g}, but "
                f"{self.sampling!r} draws batches of a fixed, whole size. Give batch size / population exactly."
            )

    @property
    def mechanism(self) -> Mechanism:
        """How each step draws its batch, as accounting sees it."""
        if self.sampling in FIXED_SIZE:
            population = self.population or LARGE_POPULATION
            size = self.sample_rate * population
            whole = round(size) if abs(size - round(size)) <= _SAME * size else math.ceil(size)
            return Mechanism(
                sampler=self.sampling, rate=whole / population, batch_size=max(1, whole), population=population
            )
        return Mechanism(sampler=self.sampling, rate=self.sample_rate if self.sampling == "poisson" else 1.0)

    def charges(self, sigmas: Sequence[float]) -> list[Charge]:
        """One charge per step. Raises ``Unbounded`` where a step has next to no noise."""
        mechanism = self.mechanism
        return [(mechanism, checked_multiplier(self.multiplier(sigma), t)) for t, sigma in enumerate(sigmas)]

    def multiplier(self, sigma: float) -> float:
        """Noise of a whole release relative to what one example moves it by, where each layer's is ``sigma``."""
        root = math.sqrt(self.layers)
        counts = [] if self.count_noise is None else [(root / 2, self.count_noise)]
        return noise_multiplier([(root, sigma), *counts])


def check_steps(steps: int) -> int:
    """``steps`` if it is a number of steps that can be accounted for; otherwise refused."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ConfigError(f"steps is {steps!r}. Give the number of training steps, a whole number of at least 0.")
    if steps > MOST_STEPS:
        raise ConfigError(f"steps is {steps}. More than {MOST_STEPS} steps are not accounted for one by one.")
    return steps


def sigma_schedule(
    sigma: float, *, steps: int, decay: str | None = None, end: float | None = None, ratio: float | None = None
) -> Schedule:
    """Constant ``sigma``, or its decay to ``end``, or to ``ratio`` times itself, at the last step.

    A ratio above 1 is read as start / end: a decay never grows, so the two cannot be mistaken.
    """
    check_noise(sigma)
    if decay is None:
        if end is not None or ratio is not None:
            raise ConfigError(
                f"sigma is to end at {end if end is not None else ratio!r}, but no decay is named. Give one of "
                f"{', '.join(schedules.DECAYS)}."
            )
        return Constant(start=sigma)
    if (end is None) == (ratio is None):
        raise ConfigError(f"a {decay} decay needs either the end value of sigma or its ratio to the start. Give one.")
    if ratio is not None:
        end = sigma * checked_ratio(ratio)
    assert end is not None
    schedule = schedules.decay(decay, sigma, end=end, steps=max(steps, 1))
    schedule.check(steps)
    return schedule


def checked_ratio(ratio: float) -> float:
    """end / start, from either end / start or start / end."""
    check_noise(ratio, what="ratio")
    return 1.0 / ratio if ratio > 1 else ratio


def sigmas_of(schedule: Schedule, steps: int) -> list[float]:
    """sigma_t for t = 0 .. steps - 1."""
    check_steps(steps)
    return [schedule(0)] * steps if schedule.is_constant else [schedule(t) for t in range(steps)]


def planned_epsilon(
    sigmas: Sequence[float],
    setting: Setting,
    *,
    delta: float = 1e-5,
    neighbours: Neighbours = "add-remove",
    accountant: Accountant = "PLD",
) -> ProvedEpsilon:
    """The epsilon that is proved for a run of these ``sigmas``, if it is carried out as described.

    >>> planned_epsilon([6.0] * 10_000, Setting(sample_rate=0.01)).epsilon.__round__(3)
    0.601
    """
    check_view(neighbours, accountant)
    check_delta(delta)
    for t, sigma in enumerate(sigmas):
        check_noise(sigma, step=t)
    epsilon, accountant, reason = bound(
        lambda: setting.charges(sigmas), delta=delta, neighbours=neighbours, accountant=accountant
    )
    return ProvedEpsilon(
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,
        sampler=setting.sampling,
        accountant=accountant,
        steps_charged=len(sigmas),
        assumptions=assumptions(
            samplers={setting.sampling}, neighbours=neighbours, rate=setting.sample_rate, population=setting.population
        ),
        reason=reason,
    )


def all_views(epsilon: Any) -> dict[str, dict[str, ProvedEpsilon]]:
    """``epsilon(neighbours=..., accountant=...)`` under both neighbouring relations and both accountants."""
    return {
        neighbours.replace("-", "_"): {
            accountant: epsilon(neighbours=neighbours, accountant=accountant) for accountant in ("PLD", "RDP")
        }
        for neighbours in ("add-remove", "replace-one")
    }
