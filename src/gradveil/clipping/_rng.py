"""torch's global generators, on the CPU and one device: read, compare, and run from a given state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def same_rng(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> bool:
    return torch.equal(a[0], b[0]) and (a[1] is None or b[1] is None or torch.equal(a[1], b[1]))


@contextmanager
def rng_at(state: tuple[Tensor, Tensor | None], device: torch.device, leave_advanced: bool = False) -> Iterator[None]:
    """Run with the generators at ``state``; afterwards put them back, unless the advance is to stay."""
    before = rng_state(device)
    _set_rng(state, device)
    try:
        yield
    finally:
        if not leave_advanced:
            _set_rng(before, device)


def _set_rng(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
