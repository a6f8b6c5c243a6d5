"""What an audit found, beside what is proved and what is published for the same; in words and as JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.audit.bounds import Bound

CONSISTENT = "consistent with what is proved"
BROKEN = "BROKEN: above what is proved"
LEAKS = "nothing is proved, and at least this much leaks"
NOTHING_FOUND = "nothing is proved; this test found nothing"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Lower bounds on the epsilon of ``unit``, and the upper bound that is proved for it, infinite where there is none.

    The confidence of all ``bounds`` together is that of each: it is shared out among their tests.
    """

    unit: str  # "one step" or "a whole run"
    strategy: str
    settings: Mapping[str, Any]
    bounds: tuple[Bound, ...]
    proved: float
    reason: str | None  # why nothing is proved, where it is so
    as_published: float

    @property
    def strongest(self) -> Bound:
        return max(self.bounds, key=lambda bound: bound.epsilon)

    @property
    def tests(self) -> int:
        """How many tests were made: each bound counts its own once for every bound that shares the confidence."""
        return sum(bound.tests for bound in self.bounds) // len(self.bounds)

    @property
    def is_broken(self) -> bool:
        """Whether a lower bound is above the upper one: the code, the accounting or the audit is at fault."""
        return self.strongest.epsilon > self.proved

    def verdict(self, bound: Bound | None = None) -> str:
        """Of one bound, or of the strongest."""
        epsilon = (bound or self.strongest).epsilon
        if not math.isfinite(self.proved):
            return LEAKS if epsilon > 0 else NOTHING_FOUND
        return BROKEN if epsilon > self.proved else CONSISTENT

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite epsilon is the string "inf", with its reason beside it."""
        best = self.strongest
        return {
            "unit": self.unit,
            "strategy": self.strategy,
            "verdict": self.verdict(),
            "epsilon_lower_bound": best.epsilon,
            "epsilon_proved": _safe(self.proved),
            "reason": self.reason,
            "epsilon_as_published": _safe(self.as_published),
            "neighbours": "add-remove",
            "delta": best.delta,
            "confidence": best.confidence,
            "method": best.method,
            "statistic": best.statistic,
            "tests": self.tests,
            "trials": best.trials,
            "threat_model": best.threat_model,
            "settings": dict(self.settings),
            "bounds": [bound.to_dict() for bound in self.bounds],
        }


def audit_json(audits: Sequence[Audit]) -> dict[str, Any]:
    """The contents of audit.json: the audit that matters most, and all of them under "audits".

    That is a broken one; else the one with the largest bound.
    """
    first = max(audits, key=lambda audit: (audit.is_broken, audit.strongest.epsilon))
    return first.to_dict() | {"audits": [audit.to_dict() for audit in audits]}


def _safe(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
