"""gradveil: train PyTorch models with differential privacy that withstands gradient leakage, and show it."""

from __future__ import annotations

__version__ = "0.1.0"  # the one place; pyproject.toml reads it

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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
from gradveil.mechanism.records import AuxiliaryRelease, Release, RunHeader
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
    "AuxiliaryRelease",
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


# Modules that moved in 0.2: their old paths still work, with a DeprecationWarning.
_MOVED = {
    "bounds": "mechanism.clip_bounds",
    "captured": "engine.cuda_graph",
    "config": "training.config",
    "data": "training.data",
    "features": "training.features",
    "kernels": "clipping.backends",
    "ledger": "accounting.ledger",
    "models": "training.models",
    "randomness": "mechanism.noise.streams",
    "recipes": "training.recipes",
    "records": "mechanism.records",
    "rundir": "training.run_directory",
    "sampling": "mechanism.sampling",
    "schedules": "mechanism.schedules",
    "strategies": "mechanism.strategies",
}


class _MovedModules(MetaPathFinder, Loader):
    """Imports ``gradveil.<old path>`` as the module that it has become."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        first, _, inside = rest.partition(".")
        if package != __name__ or first not in _MOVED:
            return None
        new = ".".join(part for part in (__name__, _MOVED[first], inside) if part)
        warnings.warn(f"{fullname} has moved to {new}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run under its own name; the import system has only exchanged its spec."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _MovedModules())  # first: a moved package must not be loaded again under its old name


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "SideRelease":
        warnings.warn("gradveil.SideRelease is now gradveil.AuxiliaryRelease", DeprecationWarning, stacklevel=2)
        return AuxiliaryRelease
    if name in _MOVED:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'gradveil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
