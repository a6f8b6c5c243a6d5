"""Autograd nodes of followed layers in C++ (_layers.cpp): compiled at first use against this torch, and cached.

Small layers spend more time in Python than in arithmetic. The same work is always done in Python where this library
cannot be built or is turned off (``GRADVEIL_NATIVE=0``, ``GRADVEIL_LAYERS=0``), with the same result.
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gradveil.kernels import build, native

_SOURCE = Path(__file__).parent / "_layers.cpp"
_FLAGS = ("-O2", "-std=c++20", "-fPIC")
LINEAR, CONVOLUTION, GROUP_NORM, LAYER_NORM = range(4)  # as in _layers.cpp


class Owner(Protocol):
    """Who made the layers: the clipper, to which the C++ code hands over what is not the ordinary case."""

    def collect_elsewhere(
        self, current: int, unit: int, x: Tensor, weight: Tensor, kept: list[Tensor], g: Tensor
    ) -> list[Tensor]: ...

    def differentiated(self, current: int, done: bool) -> None: ...

    def refuse(self, place: int, why: str) -> None: ...


class Layers:
    """The loaded library."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self._classes: Any = torch.classes.gradveil
        self.run: Callable[..., Tensor] = torch.ops.gradveil.layer.default._op
        self.output: Callable[..., Tensor] = torch.ops.gradveil.output.default._op
        self.add_noise: Callable[..., None] = torch.ops.gradveil.add_noise.default._op
        self._owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
        self._next = 0
        self._implementation = torch.library.Library("gradveil", "IMPL")
        self._implementation.impl("collect", self._collect, "CompositeExplicitAutograd")
        self._implementation.impl("refuse", self._refuse, "CompositeExplicitAutograd")
        self._implementation.impl("differentiated", self._differentiated, "CompositeExplicitAutograd")

    def enter(self, owner: Owner) -> int:
        """A number by which the C++ code calls ``owner`` back."""
        self._next += 1
        self._owners[self._next] = owner
        return self._next

    def watch(self, owner: int) -> Any:
        return self._classes.Watch(owner)

    def layer(self, *args: Any) -> Any:
        return self._classes.Layer(*args)

    def start_pass(
        self, number: int, owner: int, batch: int, units: int, bounds: list[float], device_bounds: Tensor | None
    ) -> Any:
        return self._classes.Pass(number, owner, batch, units, bounds, device_bounds)

    def _collect(
        self, clipper: int, current: int, unit: int, x: Tensor, weight: Tensor, kept: list[Tensor], g: Tensor
    ) -> list[Tensor]:
        return self._owners[clipper].collect_elsewhere(current, unit, x, weight, kept, g)

    def _differentiated(self, clipper: int, current: int, done: bool) -> None:
        self._owners[clipper].differentiated(current, done)

    def _refuse(self, clipper: int, place: int, why: str) -> None:
        self._owners[clipper].refuse(place, why)


@lru_cache(maxsize=1)
def _load() -> tuple[Layers | None, str]:
    compiler, kernels = build.compiler(), native.library()
    if compiler is None or kernels is None or os.environ.get("GRADVEIL_LAYERS", "1") == "0":
        return None, "Python"
    home = Path(torch.__file__).parent
    include = home / "include"
    try:
        library = build.library(
            compiler,
            "layers",
            [_SOURCE],
            compile_with=(*_FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
            link_with=(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", str(kernels)),
            depends_on=(torch.__version__,),
            trial="import sys, torch; torch.ops.load_library(sys.argv[1])",
        )
        return Layers(library), "C++"
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        return None, f"Python (the C++ layers could not be built: {build.why(error)})"


def layers() -> Layers | None:
    """The library, or None where layers are followed in Python."""
    return _load()[0]


def status() -> str:
    """One line: where the autograd nodes of followed layers run."""
    return f"layers: {_load()[1]}"
