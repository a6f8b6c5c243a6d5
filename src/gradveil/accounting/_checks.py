"""The few checks that every accountant makes at its door, with one wording; and trust in what a ledger says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from gradveil.errors import ConfigError, LedgerError

T = TypeVar("T")


def check_rate(sample_rate: float) -> float:
    """``sample_rate`` if it is in (0, 1]; otherwise refused."""
    if not 0 < sample_rate <= 1:
        raise ConfigError(
            f"sample rate {sample_rate!r} is not in (0, 1]: it is the chance that one example is in a batch. "
            "Give expected batch size / number of examples."
        )
    return float(sample_rate)


def check_delta(delta: float) -> float:
    """``delta`` if it is in (0, 1); otherwise refused."""
    if not 0 < delta < 1:
        raise ConfigError(
            f"delta {delta!r} is not in (0, 1): no Gaussian mechanism has a finite epsilon at delta 0, and "
            "at delta 1 nothing is promised. Give a value well below 1 / number of examples, such as 1e-5."
        )
    return float(delta)


def check_noise(value: float, *, what: str = "sigma", step: int | None = None) -> float:
    """``value`` if it is a positive, finite noise scale; otherwise refused, with the step."""
    if not (value > 0 and math.isfinite(value)):
        where = "" if step is None else f" at step {step}"
        raise ConfigError(
            f"{what} is {value!r}{where}, which is not a positive finite number. Without noise there is no "
            "epsilon to account for. Give a noise scale above zero."
        )
    return float(value)


def trusted(compute: Callable[[], T]) -> T:
    """What ``compute`` gives; records that are whole but make no sense are a ledger error, not a crash.

    What the user gave must be checked before: here every value that is refused came from the ledger.
    """
    try:
        return compute()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LedgerError(
            f"the ledger's lines are whole, but what they say does not fit together ({error}): nothing can be "
            "said about this run's privacy."
        ) from None
