"""Where a run runs: what it notes of machine, versions and command, and how its steps are taken on a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradveil.clipping.backends import cuda as kernels
from gradveil.clipping.backends import layers, native
from gradveil.engine import run_files
from gradveil.engine.run_files import without_seed
from gradveil.mechanism.distributed import ranks as processes
from gradveil.training.config import RunConfig

__all__ = ["captures", "environment", "without_seed"]


def captures() -> bool:
    """Whether steps on a GPU are captured as CUDA graphs; GRADVEIL_CAPTURE=0 runs them eagerly."""
    return os.environ.get("GRADVEIL_CAPTURE", "1") != "0"


def _cuda_status() -> str:
    return f"{kernels.status()}, {'captured' if captures() else 'eager'}"


def environment(config: RunConfig, command: Sequence[str]) -> dict[str, Any]:
    """Versions, machine, kernels and command of a run."""
    cuda = config.device.startswith("cuda")
    return run_files.environment(torch.device(config.device), command or sys.argv, _cuda_status() if cuda else None)


def numerics(device: torch.device) -> dict[str, Any]:
    """What the last bits of a result depend on: kept in every checkpoint, and compared on resume."""
    ranks = processes.current()
    cuda = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "kernels": _cuda_status() if cuda else f"{native.status()}; {layers.status()}",
        "processes": ranks.count,
    }


def differences(before: object, now: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Which of the numerics a checkpoint was written under are others now; nothing where it does not say.

    >>> differences({"threads": 2, "torch": "2.13.0"}, {"threads": 1, "torch": "2.13.0"})
    {'threads': {'before': 2, 'now': 1}}
    """
    if not isinstance(before, Mapping):
        return {}
    return {k: {"before": before[k], "now": v} for k, v in now.items() if k in before and before[k] != v}


def said(changes: Mapping[str, Mapping[str, Any]], *, seeded: bool) -> str:
    """The differences in words."""
    told = "; ".join(f"{name}: {c['now']} (at the checkpoint: {c['before']})" for name, c in changes.items())
    text = f"the run goes on under other conditions than it was interrupted in: {told}. Sums are rounded otherwise"
    if not seeded:
        return f"{text}. The ledger notes it."
    return (
        f"{text}, so this seeded run may end with other weights than one without interruption; the ledger notes it. "
        "A step that was released before and now differs will be refused: go on with --new-noise then, or resume under "
        "the conditions of before."
    )
