"""Releases made by hand."""

from __future__ import annotations

from typing import Any

from gradveil.mechanism.records import Release, RunHeader


def release_at(header: RunHeader, step: int, *, sigma: float, clip: float, **changes: Any) -> Release:
    """One whose noise is scaled to the clip bound, the same in all groups, but for the changes."""
    groups = len(header.groups)
    settings: dict[str, Any] = {
        "step": step,
        "sampler": header.sampling,
        "sample_rate": header.sample_rate,
        "expected_batch_size": header.expected_batch_size,
        "clip": (clip,) * groups,
        "sensitivity_rule": "clip",
        "sensitivity": (clip,) * groups,
        "sigma": sigma,
        "noise_std": (sigma * clip,) * groups,
        "scale_is_public": True,
    }
    return Release(**settings | changes)
