"""The named strategies, as data.

A strategy says, in four words, where a step's privacy parameters come from:

- bounds, what an example is clipped by: none, constant, decay, private-quantile, private-estimate, per-coordinate,
  adaptive; or normalised, by nothing
- sensitivity, what sigma is scaled with: none, clip, l2max
- noise, how sigma moves: none, constant, decay; or adaptive, by a rule that is given what was released before
- guarantee, which follows from the three: proved, paper-only, none

A user adds one with :func:`register`; nothing else has to change. The guarantee is derived, never
declared: noise scaled to a function of the private batch (l2-max) has no finite epsilon, in whichever
reading, so such a strategy is "paper-only" whatever its author says.

>>> get("dyn-s-sigma").guarantee
'paper-only'
>>> mine = register(Strategy(name="my-decay", bounds="decay", sensitivity="clip", noise="constant",
...                          summary="my own row"))
>>> get("my-decay").guarantee
'proved'
>>> unregister("my-decay")
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from gradveil.errors import ConfigError, ScheduleError, UnknownNameError
from gradveil.mechanism import schedules
from gradveil.mechanism.adaptive import RANGE, AdaptiveRule, SignalRule, check_rule
from gradveil.mechanism.records import Guarantee
from gradveil.mechanism.schedules import Constant, Schedule

Reading = Literal["example", "batch"]
READINGS: tuple[Reading, ...] = ("example", "batch")

BOUNDS = (
    "none",
    "constant",
    "decay",
    "private-quantile",
    "private-estimate",
    "per-coordinate",
    "normalised",
    "adaptive",
)
_DECAYING = ("decay", "private-estimate")  # where the plan's clip moves: it is the bound itself, or its ceiling
_UNIT = ("per-coordinate", "normalised")  # where an example's contribution is of norm 1, and there is no C
SENSITIVITIES = ("none", "clip", "l2max")
NOISES = ("none", "constant", "decay", "adaptive")

# Where a decay ends when the user names no end: the clip bound at half, the noise scale at 4/15
# (15 to 4: the decay whose proved epsilon is the reference value of this project's tests).
CLIP_END_RATIO = 0.5
SIGMA_END_RATIO = 4.0 / 15.0
CLIP_DECAY = "linear"
SIGMA_DECAY = "exponential"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One row of the table of strategies. ``rule`` chooses noise and bounds where both are "adaptive"."""

    name: str
    bounds: str
    sensitivity: str
    noise: str
    summary: str
    source: str = ""
    rule: AdaptiveRule | None = None

    def __post_init__(self) -> None:
        for field, known in (("bounds", BOUNDS), ("sensitivity", SENSITIVITIES), ("noise", NOISES)):
            if getattr(self, field) not in known:
                raise UnknownNameError(f"{field} of a strategy", getattr(self, field), known)
        if len({self.bounds == "adaptive", self.noise == "adaptive", self.rule is not None}) > 1:
            raise ConfigError(
                f"strategy {self.name!r} has bounds={self.bounds!r}, noise={self.noise!r} and rule={self.rule!r}: a "
                "rule chooses both from what was released. Give bounds='adaptive', noise='adaptive' and a rule."
            )
        if self.rule is not None:
            check_rule(self.rule)
        parts = (self.bounds, self.sensitivity, self.noise)
        if "none" in parts and set(parts) != {"none"}:
            raise ConfigError(
                f"strategy {self.name!r} has bounds={self.bounds!r}, sensitivity={self.sensitivity!r}, "
                f"noise={self.noise!r}: clipping without noise, or noise without clipping, is neither private "
                "nor non-private. Give all three, or none of them."
            )

    @property
    def is_private(self) -> bool:
        return self.bounds != "none"

    @property
    def guarantee(self) -> Guarantee:
        """What can be said of a run: noise scaled to the clip bound is provable, to the batch it is not."""
        if not self.is_private:
            return "none"
        return "proved" if self.sensitivity == "clip" else "paper-only"

    @property
    def has_dynamic_sensitivity(self) -> bool:
        """Whether S moves over the steps, so that fixed-variance mode means something."""
        return self.sensitivity == "l2max" or self.bounds == "decay"


_PAPER = "Wei & Liu, Gradient Leakage Attack Resilient Deep Learning"
_STRATEGIES: dict[str, Strategy] = {}


def register(strategy: Strategy) -> Strategy:
    """Add a strategy under its name; a name is given once."""
    if strategy.name in _STRATEGIES:
        raise ConfigError(f"strategy {strategy.name!r} is registered already; give yours another name.")
    _STRATEGIES[strategy.name] = strategy
    return strategy


def unregister(name: str) -> None:
    """Take a strategy out again."""
    del _STRATEGIES[get(name).name]


def get(name: str | Strategy) -> Strategy:
    """The strategy of that name, or an error with the near names."""
    if isinstance(name, Strategy):
        return name
    if name not in _STRATEGIES:
        raise UnknownNameError("strategy", name, _STRATEGIES)
    return _STRATEGIES[name]


def names() -> list[str]:
    return list(_STRATEGIES)


for _name, _bounds, _sensitivity, _noise, _summary, _source in (
    ("non-private", "none", "none", "none", "plain training, nothing protected", ""),
    ("baseline", "constant", "clip", "constant", "fixed clip, fixed noise", "Abadi et al. 2016"),
    ("dyn-s-decay", "decay", "clip", "constant", "decaying clip bound", _PAPER),
    ("dyn-s-l2max", "constant", "l2max", "constant", "noise follows the largest norm in the batch", _PAPER),
    ("dyn-s", "decay", "l2max", "constant", "decaying clip bound and l2-max", _PAPER),
    ("dyn-sigma", "constant", "clip", "decay", "decaying noise scale", _PAPER),
    ("dyn-sigma-decay", "decay", "clip", "decay", "decaying noise scale and clip bound", _PAPER),
    ("dyn-sigma-l2max", "constant", "l2max", "decay", "decaying noise scale and l2-max", _PAPER),
    ("dyn-s-sigma", "decay", "l2max", "decay", "decaying clip bound and noise scale, l2-max", _PAPER),
    (
        "quantile-clip",
        "private-quantile",
        "clip",
        "constant",
        "clip bound follows a private quantile of the norms",
        "Thakkar, Andrew & McMahan 2019; Andrew et al. 2021",
    ),
    (
        "adaclip",
        "per-coordinate",
        "clip",
        "constant",
        "each coordinate whitened by estimates from already noised gradients",
        "Pichapati et al. 2019",
    ),
    (
        "dyn-private",
        "private-estimate",
        "clip",
        "constant",
        "clip bound and noise follow a private estimate of the norms, under a decaying ceiling",
        "",
    ),
    (
        "dyn-private-sigma",
        "private-estimate",
        "clip",
        "decay",
        "the same with a decaying noise scale",
        "",
    ),
    (
        "normalised",
        "normalised",
        "clip",
        "constant",
        "every gradient scaled to g / (|g| + gamma): no clip bound",
        "Bu et al. 2023; Yang et al. 2022",
    ),
):
    register(
        Strategy(
            name=_name,
            bounds=_bounds,
            sensitivity=_sensitivity,
            noise=_noise,
            summary=_summary,
            source=_source,
        )
    )


register(
    Strategy(
        name="dyn-adaptive",
        bounds="adaptive",
        sensitivity="clip",
        noise="adaptive",
        summary="noise and clip bound follow the signal in released gradients, under a privacy filter",
        rule=SignalRule(),
    )
)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """A strategy with its numbers: the public plan of a whole run, a pure function of the step."""

    strategy: Strategy
    steps: int
    clip: Schedule
    sigma: Schedule
    reading: Reading | None = None
    fixed_variance: bool = False

    @property
    def varsigma(self) -> float:
        """The constant noise std of fixed-variance mode: sigma_0 C_0."""
        return self.sigma.start * self.clip.start

    @property
    def sensitivity_rule(self) -> str:
        """The recorded name of the rule for S; the two readings of l2-max cannot be confused."""
        return f"l2max-{self.reading}" if self.strategy.sensitivity == "l2max" else self.strategy.sensitivity

    def to_plan(self) -> dict[str, Any]:
        """The public schedules as plain data, for the ledger's header."""
        least = {} if self.strategy.rule is None else {"sigma_least": self.sigma.start / RANGE}
        return least | {
            "clip": self.clip.to_dict(),
            "sigma": self.sigma.to_dict(),
            "fixed_variance": self.fixed_variance,
            "varsigma": self.varsigma,
            "sensitivity_rule": self.sensitivity_rule,
        }


def _schedule(
    quantity: str,
    value: float | Schedule | None,
    decays: bool,
    kind: str,
    end: float | None,
    ratio: float,
    steps: int,
) -> Schedule:
    if value is None:
        raise ConfigError(f"{quantity} is missing: a private strategy needs a positive {quantity}.")
    if isinstance(value, float | int) and not (value > 0 and math.isfinite(value)):
        raise ScheduleError(
            f"{quantity} is {value!r}, which is not a positive, finite number: zero noise protects nothing, a zero "
            f"bound trains nothing. Give {quantity} > 0."
        )
    if isinstance(value, Schedule):
        if decays == value.is_constant:
            wanted = "a decay" if decays else "a constant"
            raise ConfigError(f"{quantity} is a {value.kind} schedule, but this strategy needs {wanted} here.")
        schedule = value
    elif not decays:
        if end is not None and end != value:
            raise ConfigError(f"{quantity} is to end at {end!r}, but it does not move under this strategy.")
        schedule = Constant(start=value)
    else:
        schedule = schedules.decay(kind, value, end=value * ratio if end is None else end, steps=steps)
    schedule.check(steps)
    return schedule


def parameters(
    strategy: str | Strategy,
    *,
    steps: int,
    clip: float | Schedule | None = None,
    sigma: float | Schedule | None = None,
    reading: str | None = None,
    decay: str | None = None,
    clip_decay: str | None = None,
    clip_end: float | None = None,
    sigma_decay: str | None = None,
    sigma_end: float | None = None,
    fixed_variance: bool = False,
) -> PrivacyPlan:
    """Check a strategy's numbers and lay out its public plan over ``steps``.

    ``clip`` and ``sigma`` are the starting values, or whole schedules. ``decay`` names the shape of
    whatever decays (``clip_decay`` and ``sigma_decay`` name them apart); an end value left out is half
    the clip bound, and 4/15 of sigma.

    >>> plan = parameters("dyn-s-decay", steps=100, clip=4.0, sigma=6.0)
    >>> plan.clip(0), plan.clip(99), plan.sigma(50)
    (4.0, 2.0, 6.0)
    """
    chosen = get(strategy)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"steps is {steps!r}. A run declares its number of steps, a whole number of at least 1.")
    if reading is not None and reading not in READINGS:
        raise UnknownNameError("reading of l2-max", reading, READINGS)
    if reading is not None and chosen.sensitivity != "l2max":
        warnings.warn(f"reading={reading!r} has no effect: {chosen.name!r} has no l2-max.", stacklevel=3)
    if fixed_variance and not chosen.has_dynamic_sensitivity:
        raise ConfigError(
            f"fixed variance (sigma_t = varsigma / S_t) is for strategies whose sensitivity moves; "
            f"that of {chosen.name!r} does not."
        )
    if fixed_variance and chosen.noise == "decay":
        raise ConfigError(
            f"fixed variance sets sigma_t = varsigma / S_t, but {chosen.name!r} lets sigma decay on a schedule of "
            "its own. Choose dyn-s-decay, dyn-s-l2max or dyn-s."
        )
    for kind in (decay, clip_decay, sigma_decay):
        if kind is not None and kind not in schedules.DECAYS:
            raise UnknownNameError("decay", kind, schedules.DECAYS)
    if decay is not None and not (chosen.bounds in _DECAYING or chosen.noise == "decay"):
        warnings.warn(f"decay={decay!r} has no effect: nothing decays under {chosen.name!r}.", stacklevel=3)
    if not chosen.is_private:
        one = Constant(start=1.0)
        return PrivacyPlan(strategy=chosen, steps=steps, clip=one, sigma=one)
    if chosen.bounds in _UNIT:
        clip = 1.0
    clips = _schedule(
        "clip",
        clip,
        chosen.bounds in _DECAYING,
        clip_decay or decay or CLIP_DECAY,
        clip_end,
        CLIP_END_RATIO,
        steps,
    )
    sigmas = _schedule(
        "sigma",
        sigma,
        chosen.noise == "decay",
        sigma_decay or decay or SIGMA_DECAY,
        sigma_end,
        SIGMA_END_RATIO,
        steps,
    )
    chosen_reading: Reading | None = None
    if chosen.sensitivity == "l2max":
        chosen_reading = "batch" if reading == "batch" else "example"
    return PrivacyPlan(
        strategy=chosen,
        steps=steps,
        clip=clips,
        sigma=sigmas,
        reading=chosen_reading,
        fixed_variance=fixed_variance,
    )
