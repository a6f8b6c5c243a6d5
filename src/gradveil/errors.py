"""Every error gradveil raises on purpose, in one tree.

    GradveilError
    ├── ConfigError             a setting that cannot work (exit code 2)
    │   ├── ScheduleError       a schedule that reaches zero, is not finite, or is not positive
    │   └── UnknownNameError    an unknown strategy, data set, sampler ...: carries near names
    ├── DataError               a missing, truncated or foreign data file (exit code 2)
    ├── UnsupportedModelError   a model whose per-example gradient is undefined or out of reach (2)
    ├── PrivacyViolation        a use of the engine that would break the stated bound (2)
    ├── RunDirectoryError       a run directory that exists, is missing, or does not fit (2)
    ├── BudgetExhausted         the next step would overspend; raised before the step (3)
    ├── LedgerError             a ledger that cannot be trusted; carries the line number (4)
    └── RankLost                another process of the run does not answer (5)

A message states the fact (with the value), why it matters, and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradveilError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 2


class ConfigError(GradveilError, ValueError):
    """A setting that cannot work."""


class ScheduleError(ConfigError):
    """A schedule that would stop being a positive, finite number."""


class UnknownNameError(ConfigError):
    """An unknown name, with the near ones.

    >>> raise UnknownNameError("strategy", "dyn-s-sgima", ["baseline", "dyn-s-sigma"])
    Traceback (most recent call last):
        ...
    gradveil.errors.UnknownNameError: unknown strategy 'dyn-s-sgima'. Did you mean 'dyn-s-sigma'? \
Known: baseline, dyn-s-sigma.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


class DataError(GradveilError):
    """A missing, truncated or foreign data file."""


class UnsupportedModelError(GradveilError):
    """A model, or a use of one, whose per-example gradients are undefined or out of reach."""


class PrivacyViolation(GradveilError, RuntimeError):
    """A use of the engine that would break the bound the noise is scaled to."""


class RunDirectoryError(GradveilError):
    """A run directory that exists already, is missing, or does not belong to this run."""


class BudgetExhausted(GradveilError, RuntimeError):
    """The next step would spend more than was allowed. Raised before the step."""

    exit_code = 3


class RankLost(GradveilError, RuntimeError):
    """Another process of a run over several does not answer any more."""

    exit_code = 5


class LedgerError(GradveilError):
    """A ledger that cannot be trusted. ``line`` is the first bad line, counted from 1."""

    exit_code = 4

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
