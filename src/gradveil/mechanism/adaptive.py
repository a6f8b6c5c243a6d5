"""Rules that choose the noise and the clip bounds of a step from what was released before it.

A rule is given numbers, and nothing else: the public settings (:class:`PublicSettings`), what the last step released
(:class:`ReleasedStep`: its noise, its bounds, and how long the *noised* gradient was), and its own memory, a tuple of
numbers that it returned last time. None of these types can hold anything but numbers. A rule is frozen data with two
methods, and :func:`check_rule` refuses one that reaches for anything else: closures, globals, imports, attributes that
are no numbers. So what it returns is a function of released values and public settings, which is what a privacy filter
(:mod:`gradveil.accounting.filter`) needs; and because the ledger keeps every number that it was given, :func:`replay`
proves it of a run afterwards.

>>> @dataclass(frozen=True)
... class Halving(AdaptiveRule):
...     every: int = 10
...
...     def after(self, seen, memory, public):
...         fallen = 0.5 ** ((seen.step + 1) // self.every)
...         return Choice(sigma=public.sigma, clip=tuple(public.clip * fallen for _ in seen.clip))
>>> check_rule(Halving(every=5))
"""

from __future__ import annotations

import dataclasses
import dis
import math
import types
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gradveil.errors import ConfigError, LedgerError
from gradveil.mechanism.records import Release, RunHeader

RANGE = 4.0  # by which sigma may be above or below the plan's
_RAISE = 1.05  # what a sigma that the filter does not grant is multiplied with, until it does


def _is_number(value: object) -> bool:
    return type(value) in (int, float, bool)


@dataclass(frozen=True)
class _Numbers:
    """Frozen, and every field is a number or a tuple of numbers."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (_is_number(value) or (type(value) is tuple and all(map(_is_number, value)))):
                raise ConfigError(
                    f"{type(self).__name__}.{field.name} is {type(value).__name__}: a rule is given numbers and tuples "
                    "of numbers only, so that nothing private can reach it."
                )


@dataclass(frozen=True, kw_only=True)
class PublicSettings(_Numbers):
    """Of the whole run: declared steps, batch size, planned bound and sigma, coordinates of each clipping group."""

    steps: int
    batch_size: float
    clip: float
    sigma: float
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ReleasedStep(_Numbers):
    """One release: ``squares`` are the squared norms of the groups' noised mean gradients.

    ``noise_std`` is of the noise on each coordinate of those means. ``left`` is the share of the filter's budget that
    is left after the step.
    """

    step: int
    sigma: float
    clip: tuple[float, ...]
    noise_std: tuple[float, ...]
    squares: tuple[float, ...]
    left: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a rule returns: the next step's noise and bounds, what it wants to remember, and a reason to stop."""

    sigma: float
    clip: tuple[float, ...]
    memory: tuple[float, ...] = ()
    stop: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.sigma, *self.clip)
        if not all(_is_number(n) and math.isfinite(n) and n > 0 for n in numbers) or not all(
            _is_number(n) and math.isfinite(n) for n in self.memory
        ):
            raise ConfigError(
                f"a rule chose sigma {self.sigma!r}, clip {self.clip!r} and memory {self.memory!r}: give finite "
                "numbers, and sigma and clip above zero."
            )


@dataclass(frozen=True)
class AdaptiveRule:
    """The rule that keeps to the plan. Subclass it as a frozen dataclass whose fields are numbers."""

    def first(self, public: PublicSettings) -> Choice:
        """For the first step, before anything was released."""
        return Choice(sigma=public.sigma, clip=(public.clip,) * len(public.sizes))

    def after(self, seen: ReleasedStep, memory: tuple[float, ...], public: PublicSettings) -> Choice:
        """For the step after ``seen``; ``memory`` is what the choice before it remembered."""
        return Choice(sigma=public.sigma, clip=seen.clip)


@dataclass(frozen=True)
class SignalRule(AdaptiveRule):
    """dyn-adaptive: noise and bound follow the signal in the released gradients, and the budget that is left.

    The squared length of a released mean is that of the mean clipped gradient and, on average, (coordinates x noise
    variance) more. That known part taken off, in units of C^2 and averaged over some 1 / (1 - smoothing) steps, it is
    the signal: how far the examples' clipped gradients point the same way. Its share of its own peak

    - sets the bound: C share^clip_power, at least C clip_floor, under a ceiling that falls evenly from C to C clip_end.
      Gradients that agree less need a smaller bound.
    - sets the noise: what would spend the rest of the budget evenly, times 1 + spare share (share of the steps to
      come). There is more noise early, where there is signal to spare; what is saved makes the last steps less noisy.

    Until a signal is found (five standard deviations of its estimate), its share counts as 1 and the bound is the
    ceiling.
    Training stops where a signal that was there is below ``gone`` of them. By default that is far below zero, where it
    does not get by chance: steps whose signal does not show by itself still add up, and what is left of the budget when
    training stops is lost. 0 stops where nothing is seen.
    """

    smoothing: float = 0.95
    spare: float = 1.0
    clip_power: float = 0.25
    clip_floor: float = 0.5
    clip_end: float = 0.7
    gone: float = -3.0

    def after(self, seen: ReleasedStep, memory: tuple[float, ...], public: PublicSettings) -> Choice:
        mean, weight, peak, spread = memory or (0.0, 0.0, 0.0, 0.0)
        signal = variance = 0.0
        for square, size, std, clip in zip(seen.squares, public.sizes, seen.noise_std, seen.clip, strict=True):
            signal += (square - size * std * std) / (clip * clip)
            variance += 2.0 * size * (std / clip) ** 4
        keep = self.smoothing
        mean, weight = keep * mean + (1.0 - keep) * signal, keep * weight + (1.0 - keep)
        spread = keep * keep * spread + (1.0 - keep) ** 2 * variance
        smoothed, sure = mean / weight, math.sqrt(spread) / weight
        settled = weight > 1.0 - keep**5 and smoothed > 5.0 * sure
        peak = max(peak, smoothed) if settled else peak
        share = min(1.0, max(0.0, smoothed / peak)) if peak > 0.0 else 1.0
        remaining = public.steps - seen.step - 1
        even = public.sigma * math.sqrt(max(remaining, 1) / public.steps / max(seen.left, 1e-9))
        ceiling = 1.0 - (1.0 - self.clip_end) * (seen.step + 1) / public.steps
        bound = public.clip * max(self.clip_floor, min(ceiling, share**self.clip_power))
        gone = peak > 0.0 and smoothed < self.gone * sure
        return Choice(
            sigma=even * (1.0 + self.spare * share * remaining / public.steps),
            clip=(bound,) * len(seen.clip),
            memory=(mean, weight, peak, spread),
            stop="the signal in the released gradients is gone" if gone else None,
        )


# ---- that a rule reads nothing else

_BUILTINS = frozenset(
    {"abs", "all", "any", "bool", "enumerate", "float", "int", "len", "list", "max", "min", "pow", "range", "reversed"}
    | {"round", "sorted", "sum", "super", "tuple", "zip", "True", "False", "None", "ValueError", "ArithmeticError"}
)
_OURS = (Choice, PublicSettings, ReleasedStep, AdaptiveRule)
# Attributes that a rule may use, beside its own fields and methods: frames, code and classes are reached by others.
_ATTRIBUTES = frozenset(
    {field.name for kind in _OURS for field in dataclasses.fields(kind)}
    | {name for name in vars(math) if not name.startswith("_")}
    | {"append", "count", "extend", "first", "after", "index", "insert", "pop", "reverse", "sort"}
)


def check_rule(rule: AdaptiveRule) -> None:
    """Refuse a rule that could read something other than what it is given.

    It must be a frozen dataclass of numbers. Its methods may use ``math``, arithmetic builtins, constants, functions
    that do the same, and the attributes of what they are given; no closures, no imports, no other globals and no other
    attributes. What is checked is their code as it is when the strategy is made.
    """
    kind = type(rule)
    parameters = getattr(kind, "__dataclass_params__", None)
    if not isinstance(rule, AdaptiveRule) or parameters is None or not parameters.frozen:
        raise _refused(kind.__name__, "it is not a frozen dataclass of AdaptiveRule")
    fields = {field.name for field in dataclasses.fields(rule)}
    allowed = _ATTRIBUTES | fields | {name for name in dir(kind) if not name.startswith("_")}
    for name, value in vars(rule).items():
        if name not in fields or not (_is_number(value) or isinstance(value, str)):
            raise _refused(kind.__name__, f"its field {name!r} is {type(value).__name__}, not a number")
    for parent in kind.__mro__:
        if parent in (AdaptiveRule, object):
            continue
        for name, value in vars(parent).items():
            if isinstance(value, types.FunctionType) and not _is_generated(name):
                _check_function(value, kind.__name__, allowed, set())
            elif not name.startswith("__") and not (_is_number(value) or isinstance(value, str | types.FunctionType)):
                raise _refused(kind.__name__, f"its attribute {name!r} is {type(value).__name__}, not a number")


def _is_generated(name: str) -> bool:
    """By dataclass itself; ``__post_init__`` is not."""
    return name.startswith("__") and name not in ("__post_init__", "__new__", "__getattribute__", "__getattr__")


def _check_function(function: types.FunctionType, whose: str, allowed: Set[str], seen: set[Any]) -> None:
    if function in seen:
        return
    seen.add(function)
    where = f"{function.__name__}()"
    if set(function.__code__.co_freevars) - {"__class__"}:
        raise _refused(whose, f"{where} is a closure over {', '.join(function.__code__.co_freevars)}")
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(_is_constant(value) for value in given):
        raise _refused(whose, f"{where} has a default that is no number")
    for code in _codes(function.__code__):
        for found in dis.get_instructions(code):
            if found.opname.startswith("IMPORT"):
                raise _refused(whose, f"{where} imports {found.argval!r}")
            if found.opname.endswith(("_ATTR", "_METHOD")) and found.argval not in allowed:
                raise _refused(whose, f"{where} uses the attribute {found.argval!r}")
            if found.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise _refused(whose, f"{where} changes the global {found.argval!r}")
            if found.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                _check_global(function, str(found.argval), whose, allowed, seen)


def _check_global(function: types.FunctionType, name: str, whose: str, allowed: Set[str], seen: set[Any]) -> None:
    where = f"{function.__name__}()"
    value = function.__globals__.get(name, _MISSING)
    if value is _MISSING:
        if name not in _BUILTINS:
            raise _refused(whose, f"{where} uses {name!r}")
    elif isinstance(value, types.FunctionType):
        _check_function(value, whose, allowed, seen)
    elif not (value is math or value in _OURS or _is_constant(value)):
        raise _refused(whose, f"{where} uses the global {name!r}, a {type(value).__name__}")


_MISSING = object()


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or _is_number(value) or isinstance(value, str)


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _refused(rule: str, why: str) -> ConfigError:
    return ConfigError(
        f"the rule {rule} is refused: {why}. A rule may read what was released and public settings only, as they are "
        "given to it: otherwise the noise could follow private data, and no epsilon would hold. Use its arguments, "
        "numbers among its own fields, and math."
    )


# ---- what a run's ledger says of its choices


def public_settings(header: RunHeader) -> PublicSettings:
    """Those of a run, from its header."""
    plan = header.plan
    return PublicSettings(
        steps=header.steps,
        batch_size=float(header.expected_batch_size),
        clip=float(plan["clip"]["start"]),
        sigma=float(plan["sigma"]["start"]),
        sizes=tuple(int(n) for n in plan["group_sizes"]),
    )


def in_range(sigma: float, public: PublicSettings, raised: int = 0) -> float:
    """The sigma that is used: within the declared range, and raised so many times for the filter to grant it."""
    most = public.sigma * RANGE
    return min(min(max(sigma, public.sigma / RANGE), most) * _RAISE**raised, most)


def replay(rule: AdaptiveRule, header: RunHeader, releases: Sequence[Release]) -> int:
    """How many of a run's releases have the noise and the bounds that the rule gives for what the ledger says it saw.

    :class:`LedgerError` names the first that has others. Releases that a checkpoint brought along from another run,
    and those of a crash, do not say what they saw, and are not counted.
    """
    public, proved = public_settings(header), 0
    for release in releases:
        saw = release.chosen_from
        if saw is None:
            continue
        choice = chosen(rule, public, saw)
        expected = (in_range(choice.sigma, public, int(saw["raised"])), choice.clip)
        if (release.sigma, release.clip) != expected:
            raise LedgerError(
                f"step {release.step} was noised by sigma {release.sigma!r} at clip {release.clip!r}, and its rule "
                f"gives {expected!r} for what the ledger says it had seen: the noise is not a function of releases."
            )
        proved += 1
    return proved


def chosen(rule: AdaptiveRule, public: PublicSettings, saw: Mapping[str, Any]) -> Choice:
    """What the rule says to what a release's ``chosen_from`` holds."""
    if saw["seen"] is None:
        return rule.first(public)
    facts: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in saw["seen"].items()}
    return rule.after(ReleasedStep(**facts), tuple(saw["memory"]), public)
