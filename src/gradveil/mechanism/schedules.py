"""Schedules: a clip bound C_t or a noise scale sigma_t as a pure function of the step t = 0, 1, 2, ...

Every schedule is frozen data: it knows its formula, its floor, and how to be written to a file and
read back. A schedule that would reach zero is refused, with the step at which it does, by
:meth:`Schedule.check`: a clip bound of 0 trains nothing and a noise scale of 0 protects nothing.

>>> sigma = Exponential.to(15.0, end=4.0, steps=10_000)
>>> round(sigma(0), 6), round(sigma(9_999), 6)
(15.0, 4.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from gradveil.errors import ConfigError, ScheduleError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A positive function of the step, never below ``floor`` (0 means: no floor).

    The floor is absolute: the smallest value the schedule may take, whatever its formula says.
    """

    start: float
    floor: float = 0.0

    kind: ClassVar[str]
    formula: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ScheduleError(
                    f"{self.kind} schedule: {field.name} is {value!r}, which is not a finite number. "
                    "A clip bound or noise scale must be one at every step."
                )
        if self.start <= 0:
            raise ScheduleError(
                f"{self.kind} schedule: it starts at {self.start!r}. A clip bound or a noise scale must be "
                "positive: zero noise protects nothing, a zero bound trains nothing."
            )
        if self.floor < 0 or self.floor > self.start:
            raise ScheduleError(
                f"{self.kind} schedule: floor {self.floor!r} is not between 0 and the start {self.start!r}."
            )

    def raw(self, step: int) -> float:
        """The formula at ``step``, before the floor."""
        raise NotImplementedError

    def __call__(self, step: int) -> float:
        if step < 0:
            raise ConfigError(f"step {step} is negative; steps count from 0.")
        return max(self.floor, self.raw(step))

    def check(self, steps: int) -> None:
        """Refuse, with the step, a schedule that is not positive and finite on ``0 .. steps - 1``."""
        for step in range(steps):
            value = self(step)
            if not (value > 0 and math.isfinite(value)):
                raise ScheduleError(
                    f"{self.kind} schedule {self.formula} reaches {value:g} at step {step} of {steps}. "
                    "A clip bound or noise scale must stay positive. "
                    "Give a slower decay, an end value, or a positive floor."
                )

    @property
    def is_constant(self) -> bool:
        return isinstance(self, Constant)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for files; :func:`from_dict` reads it back."""
        return {"kind": self.kind, **asdict(self)}


def _intervals(start: float, end: float, steps: int, kind: str) -> int:
    """Common checks of the ``to`` constructors; the number of decay intervals between first and last step."""
    Constant(start=start)  # refuses a start that is not a positive number, in its own words
    if not (end > 0 and math.isfinite(end)):
        raise ScheduleError(
            f"{kind} schedule: it would reach its end value {end!r} at step {steps - 1} of {steps}, which is not a "
            "positive number. A decay must end above zero: zero noise protects nothing, a zero bound trains nothing. "
            "Give a positive end value."
        )
    if end > start:
        raise ScheduleError(f"{kind} schedule: it is to decay from {start!r} to {end!r}, which is larger.")
    if steps < 1:
        raise ScheduleError(f"{kind} schedule: {steps!r} steps. Give the number of training steps, at least 1.")
    return max(steps - 1, 1)


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """C_t = C_0."""

    kind: ClassVar[str] = "constant"
    formula: ClassVar[str] = "C0"

    def raw(self, step: int) -> float:
        return self.start


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """C_t = C_0 (1 - rate t).

    >>> Linear(start=4.0, rate=0.1)(5)
    2.0
    >>> Linear.to(4.0, end=2.0, steps=101)(100)
    2.0
    """

    rate: float

    kind: ClassVar[str] = "linear"
    formula: ClassVar[str] = "C0 (1 - g1 t)"

    def raw(self, step: int) -> float:
        return self.start * (1.0 - self.rate * step)

    @classmethod
    def to(cls, start: float, *, end: float, steps: int, floor: float = 0.0) -> Linear:
        """From ``start`` at the first step to ``end`` at the last of ``steps``."""
        intervals = _intervals(start, end, steps, cls.kind)
        return cls(start=start, rate=(1.0 - end / start) / intervals, floor=floor)


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """C_t = C_0 exp(-rate t).

    >>> round(Exponential(start=8.0, rate=math.log(2))(3), 12)
    1.0
    """

    rate: float

    kind: ClassVar[str] = "exponential"
    formula: ClassVar[str] = "C0 exp(-g2 t)"

    def raw(self, step: int) -> float:
        return self.start * math.exp(-self.rate * step)

    @classmethod
    def to(cls, start: float, *, end: float, steps: int, floor: float = 0.0) -> Exponential:
        """From ``start`` at the first step to ``end`` at the last of ``steps``."""
        intervals = _intervals(start, end, steps, cls.kind)
        return cls(start=start, rate=math.log(start / end) / intervals, floor=floor)


@dataclass(frozen=True, kw_only=True)
class Cyclic(Schedule):
    """Falling and rising ramps of ``length`` steps under an envelope that falls after each pair.

    With v, tau = divmod(t, length) and k = v // 2:

        C_t = C_0 max(envelope_floor, 1 - 2 envelope_rate k) (1 - rate (tau if v is even else length - tau))

    The paper writes V both for the step length and for the index of a ramp; this is the reading that
    is continuous inside a cycle: down for ``length`` steps, up for ``length`` steps, then a lower envelope.

    >>> wave = Cyclic(start=4.0, length=10, rate=0.05, envelope_rate=0.1)
    >>> [round(wave(t), 3) for t in (0, 10, 19, 20, 30)]
    [4.0, 2.0, 3.8, 3.2, 1.6]
    """

    length: int
    rate: float
    envelope_rate: float
    envelope_floor: float = 0.0

    kind: ClassVar[str] = "cyclic"
    formula: ClassVar[str] = "C0 max(floor, 1 - 2 g4 k) (1 - g3 tau)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length != int(self.length) or self.length < 1:
            raise ScheduleError(f"cyclic schedule: a ramp of {self.length!r} steps; give a whole number, at least 1.")

    def raw(self, step: int) -> float:
        ramp, tau = divmod(step, int(self.length))
        cycle = ramp // 2
        envelope = max(self.envelope_floor, 1.0 - 2.0 * self.envelope_rate * cycle)
        return self.start * envelope * (1.0 - self.rate * (tau if ramp % 2 == 0 else self.length - tau))

    @classmethod
    def to(cls, start: float, *, end: float, steps: int, floor: float = 0.0, ramps: int = 10) -> Cyclic:
        """``ramps`` ramps (an even number) over ``steps``; the lowest point, at the last valley, is ``end``.

        Envelope and ramp share the fall equally: both end at sqrt(end / start) of where they began.
        """
        _intervals(start, end, steps, cls.kind)
        if ramps < 2 or ramps % 2:
            raise ScheduleError(f"cyclic schedule: {ramps!r} ramps; give an even number, at least 2.")
        length = max(1, math.ceil(steps / ramps))
        last_cycle = max(0, (math.ceil(steps / length) - 1) // 2)
        dip = math.sqrt(end / start) if last_cycle else end / start
        return cls(
            start=start,
            length=length,
            rate=(1.0 - dip) / length,
            envelope_rate=(1.0 - dip) / (2.0 * last_cycle) if last_cycle else 0.0,
            envelope_floor=dip if last_cycle else 0.0,
            floor=floor,
        )


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """C_t = C_0 factor^(t // every).

    >>> [Step(start=8.0, factor=0.5, every=10)(t) for t in (0, 9, 10, 25)]
    [8.0, 8.0, 4.0, 2.0]
    """

    factor: float
    every: int

    kind: ClassVar[str] = "step"
    formula: ClassVar[str] = "C0 factor^(t // every)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every != int(self.every) or self.every < 1:
            raise ScheduleError(f"step schedule: every={self.every!r}; give a whole number of steps, at least 1.")
        if not 0 < self.factor <= 1:
            raise ScheduleError(f"step schedule: factor {self.factor!r} is not in (0, 1].")

    def raw(self, step: int) -> float:
        return self.start * self.factor ** (step // int(self.every))

    @classmethod
    def to(cls, start: float, *, end: float, steps: int, floor: float = 0.0, levels: int = 5) -> Step:
        """``levels`` equal plateaus over ``steps``, the last of them at ``end``."""
        _intervals(start, end, steps, cls.kind)
        levels = max(1, min(levels, steps))
        every = math.ceil(steps / levels)
        falls = (steps - 1) // every
        return cls(start=start, factor=(end / start) ** (1.0 / falls) if falls else 1.0, every=every, floor=floor)


KINDS: dict[str, type[Schedule]] = {k.kind: k for k in (Constant, Linear, Exponential, Cyclic, Step)}
DECAYS: dict[str, Callable[..., Schedule]] = {k.kind: k.to for k in (Linear, Exponential, Cyclic, Step)}


def decay(kind: str, start: float, *, end: float, steps: int, floor: float = 0.0) -> Schedule:
    """The named decay from ``start`` at the first step to ``end`` at the last of ``steps``."""
    if kind not in DECAYS:
        raise UnknownNameError("decay", kind, DECAYS)
    return DECAYS[kind](start, end=end, steps=steps, floor=floor)


def from_dict(data: Mapping[str, Any]) -> Schedule:
    """Read back what :meth:`Schedule.to_dict` wrote.

    >>> from_dict(Linear(start=4.0, rate=0.1).to_dict()) == Linear(start=4.0, rate=0.1)
    True
    """
    settings = dict(data)
    kind = settings.pop("kind", None)
    if kind not in KINDS:
        raise UnknownNameError("schedule", kind, KINDS)
    try:
        return KINDS[kind](**settings)
    except TypeError as error:
        raise ScheduleError(f"{kind} schedule: {error}. Expected {[f.name for f in fields(KINDS[kind])]}.") from None
