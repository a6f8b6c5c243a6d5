"""From a target epsilon to the noise, the decay or the number of steps that meets it, and never exceeds it.

A target is counted by the PLD or by RDP (proved), or by one of the published accountants (for comparison
with the paper: which decay from sigma_0 = 15 spends what sigma = 6 spends over T steps?).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.accounting._affordable import largest
from gradveil.accounting._checks import check_delta
from gradveil.accounting._compose import (
    Accountant,
    Neighbours,
    check_view,
    composed_epsilon,
    default_view,
    usable_accountant,
    why_no_bound,
)
from gradveil.accounting._events import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER, Unbounded
from gradveil.accounting._search import meet
from gradveil.accounting.paper import METHODS, paper_curve
from gradveil.accounting.planned import Setting, check_steps, sigma_schedule, sigmas_of
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism.schedules import Schedule

ACCOUNTANTS = ("PLD", "RDP", *METHODS)
TOLERANCE = 0.002  # how far below the target a result may be, relative, where sigma is free
_MOST_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Target:
    """``epsilon`` at ``delta``, as ``accountant`` counts it; neighbours default to those of the sampler."""

    epsilon: float
    delta: float = 1e-5
    accountant: str = "PLD"
    neighbours: Neighbours | None = None

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ConfigError(f"target epsilon {self.epsilon!r} is not a positive finite number. Give one, such as 1.")
        check_delta(self.delta)
        if self.accountant not in ACCOUNTANTS:
            raise UnknownNameError("accountant", self.accountant, ACCOUNTANTS)
        if self.neighbours is not None:
            check_view(self.neighbours, "PLD")
            if not self.is_proved:
                raise ConfigError(
                    f"neighbours {self.neighbours!r} were given, but {self.accountant} is a published accountant "
                    "that knows no such choice. Leave them out, or count by PLD or RDP."
                )

    @property
    def is_proved(self) -> bool:
        return self.accountant in ("PLD", "RDP")


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What meets the target: ``schedule`` over ``steps`` steps costs ``epsilon``."""

    schedule: Schedule
    steps: int
    epsilon: float
    target: Target
    accountant: str
    neighbours: str | None

    @property
    def sigma(self) -> float:
        """sigma at the first step."""
        return self.schedule(0)

    @property
    def sigma_end(self) -> float:
        """sigma at the last step."""
        return self.schedule(max(self.steps - 1, 0))

    @property
    def kind(self) -> str:
        return "proved" if self.target.is_proved else "as published, not a guarantee"

    def to_dict(self) -> dict[str, Any]:
        return {
            "sigma": self.sigma,
            "epsilon": self.epsilon,
            "sigma_end": self.sigma_end,
            "steps": self.steps,
            "delta": self.target.delta,
            "target": self.target.epsilon,
            "accountant": self.accountant,
            "neighbours": self.neighbours,
            "kind": self.kind,
            "schedule": self.schedule.to_dict(),
        }


class _Spending:
    """epsilon of a list of sigmas, as the target counts it; refuses at once what has no bound."""

    def __init__(self, target: Target, setting: Setting) -> None:
        self.target, self.setting = target, setting
        self.neighbours: Neighbours = target.neighbours or default_view(setting.sampling)[0]
        self.accountant = target.accountant
        self.proved: Accountant | None = "PLD" if target.accountant == "PLD" else "RDP"
        if not target.is_proved:
            self.proved = None
        elif (why := why_no_bound(setting.mechanism, self.neighbours, self.proved)) is not None:
            raise ConfigError(f"there is no {target.accountant} epsilon to aim at: {why}.")

    def __call__(self, sigmas: Sequence[float]) -> float:
        target = self.target
        if self.proved is None:
            curve = paper_curve(sigmas, self.setting.sample_rate, target.delta, methods=[target.accountant])
            return float(curve[target.accountant][-1]) if len(sigmas) else 0.0
        try:
            charges = self.setting.charges(sigmas)
        except Unbounded:
            return math.inf
        self.accountant = usable_accountant(charges, delta=target.delta, accountant=self.proved)
        return composed_epsilon(charges, delta=target.delta, neighbours=self.neighbours, accountant=self.proved)

    def result(self, schedule: Schedule, steps: int, epsilon: float) -> Calibrated:
        return Calibrated(
            schedule=schedule,
            steps=steps,
            epsilon=epsilon,
            target=self.target,
            accountant=self.accountant,
            neighbours=self.neighbours if self.target.is_proved else None,
        )


def calibrate_sigma(
    target: Target,
    setting: Setting,
    *,
    steps: int,
    decay: str | None = None,
    ratio: float | None = None,
    end: float | None = None,
) -> Calibrated:
    """The smallest sigma (or sigma_0 of a decay to ``ratio`` sigma_0, or to ``end``) that meets the target.

    Guaranteed: its epsilon is at most the target's. It lies within .2 % of it, or as near as the accountant's
    own steps allow (1 % at most, by test).

    >>> calibrate_sigma(Target(epsilon=0.601), Setting(sample_rate=0.01), steps=10_000).sigma.__round__(1)
    6.0
    """
    if check_steps(steps) < 1:
        raise ConfigError("steps is 0: a run without steps needs no noise. Give at least 1.")
    spent = _Spending(target, setting)
    root = math.sqrt(setting.layers) if target.is_proved else 1.0

    def schedule_of(sigma: float) -> Schedule:
        return sigma_schedule(sigma, steps=steps, decay=decay, ratio=ratio, end=end)

    schedule_of(end or 1.0)  # refuses a decay that makes no sense, in its own words
    rough = setting.sample_rate * math.sqrt(steps * 2 * math.log(1 / target.delta)) / target.epsilon
    sigma = meet(
        lambda s: spent(sigmas_of(schedule_of(s), steps)),
        target.epsilon,
        guess=root * (0.5 + rough) * (1.0 if decay is None else 1.5),
        low=max(end or 0.0, SMALLEST_MULTIPLIER * root),
        high=LARGEST_MULTIPLIER * root,
        tolerance=TOLERANCE,
    )
    schedule = schedule_of(sigma)
    return spent.result(schedule, steps, spent(sigmas_of(schedule, steps)))


def calibrate_decay(
    target: Target, setting: Setting, *, sigma: float, steps: int, decay: str = "exponential"
) -> Calibrated:
    """How fast sigma may fall from ``sigma`` over ``steps`` steps: the ``decay`` that meets the target.

    The paper's use: the target is what a constant sigma = 6 spends (:func:`spent_by`), and sigma_0 = 15.
    Refused where even the constant ``sigma`` spends more than the target.
    """
    if check_steps(steps) < 2:
        raise ConfigError(f"steps is {steps}: nothing decays over fewer than 2 steps.")
    spent = _Spending(target, setting)

    def sigmas(end: float) -> list[float]:
        return sigmas_of(sigma_schedule(sigma, steps=steps, decay=decay, end=end), steps)

    constant = spent(sigmas(sigma))
    if constant > target.epsilon:
        raise ConfigError(
            f"sigma = {sigma:g} spends epsilon = {constant:g} over {steps} steps without any decay, which is more "
            f"than the target of {target.epsilon:g}. Give a larger sigma, fewer steps or a larger target."
        )
    end = sigma
    if constant < target.epsilon * (1 - TOLERANCE):
        end = meet(
            lambda e: spent(sigmas(e)),
            target.epsilon,
            guess=0.3 * sigma,
            low=min(sigma, SMALLEST_MULTIPLIER),
            high=sigma,
            tolerance=TOLERANCE,
        )
    schedule = sigma_schedule(sigma, steps=steps, decay=decay, end=end)
    return spent.result(schedule, steps, spent(sigmas_of(schedule, steps)))


def calibrate_steps(
    target: Target,
    setting: Setting,
    *,
    sigma: float,
    decay: str | None = None,
    ratio: float | None = None,
    end: float | None = None,
) -> Calibrated:
    """The number of steps that meets the target: it fits and one more does not. A decay is spread over them."""
    spent = _Spending(target, setting)
    known: dict[int, float] = {0: 0.0}

    def schedule_of(steps: int) -> Schedule:
        return sigma_schedule(sigma, steps=steps, decay=decay, ratio=ratio, end=end)

    def epsilon_after(steps: int) -> float:
        if steps not in known:
            known[steps] = spent(sigmas_of(schedule_of(steps), steps))
        return known[steps]

    if epsilon_after(1) > target.epsilon:
        raise ConfigError(
            f"one step at sigma = {sigma:g} spends epsilon = {epsilon_after(1):g}, more than the target of "
            f"{target.epsilon:g}. Give a larger sigma or target."
        )
    high = 64
    while epsilon_after(high) <= target.epsilon:
        if high >= _MOST_STEPS:
            raise ConfigError(
                f"{_MOST_STEPS} steps at sigma = {sigma:g} spend only epsilon = {epsilon_after(high):g}. "
                "Give a smaller sigma or target."
            )
        high = min(4 * high, _MOST_STEPS)
    steps = largest(epsilon_after, high // 4 if high > 64 else 1, high, target.epsilon)
    return spent.result(schedule_of(steps), steps, epsilon_after(steps))


def spent_by(sigmas: Sequence[float], setting: Setting, target: Target) -> float:
    """What ``sigmas`` cost as ``target`` counts; its own epsilon plays no part."""
    return _Spending(target, setting)(sigmas)
