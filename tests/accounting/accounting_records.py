"""Short ways to make the records that accounting reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradveil.mechanism.records import AuxiliaryRelease, Release, RunHeader
from gradveil.mechanism.schedules import Constant
from made_records import release_at


def make_header(**changes: Any) -> RunHeader:
    settings: dict[str, Any] = {
        "strategy": "baseline",
        "guarantee": "proved",
        "groups": ("all",),
        "population": 60_000,
        "sampling": "poisson",
        "sample_rate": 0.01,  # the expected batch size follows, unless it is given
        "steps": 10_000,
        "delta": 1e-5,
        "seeded": False,
        "plan": {
            "clip": Constant(start=4.0).to_dict(),
            "sigma": Constant(start=6.0).to_dict(),
            "fixed_variance": False,
        },
    }
    settings.update(changes)
    if "expected_batch_size" not in changes:
        settings["expected_batch_size"] = settings["sample_rate"] * settings["population"]
    return RunHeader(**settings)


def make_release(header: RunHeader, step: int, *, sigma: float = 6.0, clip: float = 4.0, **changes: Any) -> Release:
    return release_at(header, step, sigma=sigma, clip=clip, **changes)


def make_run(
    *,
    sigmas: Sequence[float] | None = None,
    taken: int = 10_000,
    side: tuple[AuxiliaryRelease, ...] = (),
    **header: Any,
) -> tuple[RunHeader, list[Release]]:
    """A header and its releases: ``sigmas``, or ``taken`` steps at 6."""
    sigmas = [6.0] * taken if sigmas is None else sigmas
    head = make_header(**{"steps": max(len(sigmas), 1), **header})
    return head, [make_release(head, t, sigma=s, side=side) for t, s in enumerate(sigmas)]
