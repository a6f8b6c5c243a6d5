"""What the ledger holds of checks that each example's loss depends on that example alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KINDS = ("whole_step", "model", "loss")


def checks_of(notes: Iterable[tuple[str, Mapping[str, Any]]], *, batches: int) -> dict[str, int]:
    """How many of a run's ``batches`` were checked, and in which way; how often data was declared public.

    >>> checks_of([("check", {"step": 0, "model": True, "loss": True}), ("public", {})], batches=600)
    {'batches': 1, 'of': 600, 'whole_step': 0, 'model': 1, 'loss': 1, 'public': 1}
    """
    seen: dict[Any, set[str]] = {}  # by step: parts of a batch count once
    public = 0
    for kind, body in notes:
        public += kind == "public"
        if kind == "check":
            seen.setdefault(body.get("step"), set()).update(k for k in KINDS if body.get(k))
    counts = {kind: sum(kind in found for found in seen.values()) for kind in KINDS}
    return {"batches": sum(map(bool, seen.values())), "of": batches, **counts, "public": public}
