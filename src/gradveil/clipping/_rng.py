"""The global generators (torch's on the CPU and one device, Python's, numpy's): read, compared, set for a run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RngState(NamedTuple):
    cpu: Tensor
    device: Tensor | None  # of a GPU
    python: tuple[Any, ...]
    numpy: Any


def rng_state(device: torch.device) -> RngState:
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RngState(torch.get_rng_state(), of_device, random.getstate(), np.random.get_state())  # noqa: NPY002


def same_rng(a: RngState, b: RngState) -> bool:
    if not torch.equal(a.cpu, b.cpu) or a.python != b.python:
        return False
    if a.device is not None and b.device is not None and not torch.equal(a.device, b.device):
        return False
    return a.numpy[2:] == b.numpy[2:] and np.array_equal(a.numpy[1], b.numpy[1])


@contextmanager
def rng_at(state: RngState, device: torch.device, leave_advanced: bool = False) -> Iterator[None]:
    """Run with the generators at ``state``; afterwards put them back, unless the advance is to stay."""
    before = rng_state(device)
    _set_rng(state, device)
    try:
        yield
    finally:
        if not leave_advanced:
            _set_rng(before, device)


def _set_rng(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device, device)
    random.setstate(state.python)
    np.random.set_state(state.numpy)  # noqa: NPY002
