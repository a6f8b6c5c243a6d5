"""Where a run runs: what it notes of machine, versions and command, and how its steps are taken on a GPU."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradveil import __version__
from gradveil.clipping.backends import cuda as kernels
from gradveil.clipping.backends import layers, native
from gradveil.mechanism.distributed import ranks as processes
from gradveil.training.config import RunConfig


def captures() -> bool:
    """Whether steps on a GPU are captured as CUDA graphs; GRADVEIL_CAPTURE=0 runs them eagerly."""
    return os.environ.get("GRADVEIL_CAPTURE", "1") != "0"


def _cuda_status() -> str:
    return f"{kernels.status()}, {'captured' if captures() else 'eager'}"


def environment(config: RunConfig, command: Sequence[str]) -> dict[str, Any]:
    """Versions, machine, kernels and command of a run."""
    import dp_accounting
    import scipy

    cuda = config.device.startswith("cuda")
    return {
        "gradveil": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "dp_accounting": getattr(dp_accounting, "__version__", "unknown"),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        "clipping": _cuda_status() if cuda else native.status(),
        "command": without_seed(command or sys.argv),
    }


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


def without_seed(command: Sequence[str]) -> list[str]:
    """A command line with the value of --seed taken out: whoever knows the seed can take the noise off.

    >>> without_seed(["gradveil", "train", "--seed", "7", "--lr=1"])
    ['gradveil', 'train', '--seed', '(kept in secret.json)', '--lr=1']
    """
    kept: list[str] = []
    for word in command:
        if kept and kept[-1] == "--seed":
            kept.append("(kept in secret.json)")
        elif word.startswith("--seed="):
            kept.append("--seed=(kept in secret.json)")
        else:
            kept.append(word)
    return kept
