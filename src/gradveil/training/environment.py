"""Where a run runs: what it notes of machine, versions and command, and how its steps are taken on a GPU."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradveil import __version__
from gradveil.clipping.backends import cuda as kernels
from gradveil.clipping.backends import native
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


def without_seed(command: Sequence[str]) -> list[str]:
    """A command line with the value of --seed taken out: anyone who knows the seed can subtract the noise.

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
