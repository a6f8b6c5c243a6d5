"""Training from settings: data sets, models, recipes, the loop behind ``gradveil train``, and the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.training.loop import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded at first use: it imports torch, and settings and run directories are read without
        from gradveil.training import loop

        return getattr(loop, name)
    raise AttributeError(f"module 'gradveil.training' has no attribute {name!r}")
