"""gradveil: train PyTorch models with differential privacy that withstands gradient leakage, and show it."""

from __future__ import annotations

__version__ = "0.1.0"  # the one place; pyproject.toml reads it

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradveil.errors import (
    BudgetExhausted,
    ConfigError,
    DataError,
    GradveilError,
    LedgerError,
    PrivacyViolation,
    RunDirectoryError,
    ScheduleError,
    UnknownNameError,
    UnsupportedModelError,
)
from gradveil.mechanism.records import Release, RunHeader, SideRelease
from gradveil.mechanism.strategies import Strategy

if TYPE_CHECKING:
    from gradveil.api import account, attack, check, compare, report, train
    from gradveil.clipping import fix
    from gradveil.engine import PrivacyEngine
    from gradveil.engine.cuda_graph import cuda_graph_step

# Loaded at first use: they import torch, which a command like `gradveil strategies` does not need.
_LAZY = {
    "PrivacyEngine": "gradveil.engine",
    "cuda_graph_step": "gradveil.engine.cuda_graph",
    "fix": "gradveil.clipping",
}
_LAZY |= dict.fromkeys(("account", "attack", "check", "compare", "report", "train"), "gradveil.api")

__all__ = [
    "BudgetExhausted",
    "ConfigError",
    "DataError",
    "GradveilError",
    "LedgerError",
    "PrivacyEngine",
    "PrivacyViolation",
    "Release",
    "RunDirectoryError",
    "RunHeader",
    "ScheduleError",
    "SideRelease",
    "Strategy",
    "UnknownNameError",
    "UnsupportedModelError",
    "__version__",
    "account",
    "attack",
    "check",
    "compare",
    "cuda_graph_step",
    "fix",
    "report",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gradveil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
