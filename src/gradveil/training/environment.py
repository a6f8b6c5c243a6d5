"""Where a run runs: what it notes of machine, versions and command, and how its steps are taken on a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from gradveil.clipping.backends import cuda as kernels
from gradveil.engine import run_files
from gradveil.engine.run_files import without_seed
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
