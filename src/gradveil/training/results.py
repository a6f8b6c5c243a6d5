"""What training says of itself: on the way, and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.accounting import Statement


@dataclass(frozen=True)
class Epsilon:
    """An epsilon on the way, and what kind it is: "proved (PLD)" or "as published" (MA)."""

    kind: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a progress display is told now and then. ``loss`` and ``accuracy`` are of the latest look."""

    step: int
    steps: int
    loss: float
    accuracy: float | None
    epsilon: Epsilon | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    run_dir: Path
    steps: int
    accuracy: float
    seconds_per_step: float
    ended: str
    budget_exhausted: bool
    not_finite_examples: int
    statement: Statement
    noise_std_first: float | None
    noise_std_last: float | None
    accuracy_unaveraged: float | None = None  # of the last weights, where ``accuracy`` is that of averaged ones
    ledger_head: str | None = None  # the hash of the last line: who keeps it elsewhere notices a rewritten ledger

    def to_dict(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "steps": self.steps,
            "accuracy": self.accuracy,
            "seconds_per_step": self.seconds_per_step,
            "ended": self.ended,
            "not_finite_examples": self.not_finite_examples,
            "noise_std_first": self.noise_std_first,
            "noise_std_last": self.noise_std_last,
            "accuracy_unaveraged": self.accuracy_unaveraged,
            "ledger_head": self.ledger_head,
            "privacy": self.statement.to_dict(),
        }
