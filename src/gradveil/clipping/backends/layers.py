"""Autograd nodes of followed layers in C++ (_layers.cpp): compiled at first use against this torch, and cached.

Small layers spend more time in Python than in arithmetic. The same work is always done in Python where this library
cannot be built or is turned off (``GRADVEIL_NATIVE=0``, ``GRADVEIL_LAYERS=0``), with the same result.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gradveil.clipping.backends import build, native

_HERE = Path(__file__).parents[1] / "_csrc"
_SOURCE = _HERE / "_layers.cpp"
_HEADERS = [_HERE / name for name in ("_passes.h", "_programs.h", "_layer.h", "_on_gradients.h")]
_FLAGS = ("-O2", "-std=c++20", "-fPIC")
LINEAR, CONVOLUTION, GROUP_NORM, LAYER_NORM, TRANSPOSED_LINEAR = range(5)  # as in _layer.h


class Owner(Protocol):
    """Who made the layers: the clipper, to which the C++ code hands over what is not the ordinary case."""

    def collect_elsewhere(
        self, current: int, unit: int, x: Tensor, weight: Tensor, kept: list[Tensor], g: Tensor
    ) -> list[Tensor]: ...

    def finish_pass(self, current: int) -> None: ...

    def pass_ended(self, current: int) -> None: ...

    def look_at_leaves(self, leaves: list[Tensor]) -> None: ...

    def refuse(self, place: int, why: str) -> None: ...


Gathered = tuple[int, int, list[int], list[Tensor], list[Tensor]]
"""Of finished passes: how many, how many examples, groups, (norms, weights) of each, flags of who was not finite."""


Sums = tuple[list[int], list[Tensor]]
"""Slots of parameters, and their clipped sums; a slot comes once for every pass, or use, that has left one."""


Waiting = tuple[list[int], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Units, inputs, gradients of outputs; of convolutions also gradients of weight and bias, and norms of the former."""


class NativeWatch:
    """Clipped sums on their way to the engine, in C++; see clipping/parameter_guard.py."""

    own_hooks = 0

    def __init__(self, library: Layers, number: int, in_cpp: Any) -> None:
        self.number, self.in_cpp = number, in_cpp
        self.follow: Callable[[Tensor], int] = in_cpp.follow
        self.forget: Callable[[Tensor, int], None] = in_cpp.forget
        self.start_step: Callable[[], None] = partial(library.start_step, number)
        self.other_leaves: Callable[[], list[Tensor]] = partial(library.other_leaves, number)
        self.lenient: Callable[[bool], None] = partial(library.lenient, number)
        self.take_sums: Callable[[], Sums] = partial(library.take_sums, number)
        self.differentiating: Callable[[], int] = partial(library.differentiating, number)
        self.gathered: Callable[[], Gathered] = partial(library.gathered, number)


class Layers:
    """The loaded library. Owners, passes and layers are known to it by number; see _layers.cpp for each function."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self._classes: Any = torch.classes.gradveil
        for name in Layers.__annotations__:  # the functions declared below
            setattr(self, name, getattr(torch.ops.gradveil, name).default._op)
        self._owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._implementation = torch.library.Library("gradveil", "IMPL")
        for name, function in (
            ("collect", self._collect),
            ("finish", self._finish),
            ("ended", self._ended),
            ("look_at_leaves", self._look_at_leaves),
            ("refuse", self._refuse),
        ):
            self._implementation.impl(name, function, "CompositeExplicitAutograd")

    begin: Callable[..., None]
    set_settings: Callable[..., None]
    layer: Callable[..., Tensor]
    layer_again: Callable[..., Tensor]
    output: Callable[..., Tensor]
    count: Callable[..., None]
    uses: Callable[..., int]
    started: Callable[..., bool]
    was_clipped: Callable[..., bool]
    set_clipped: Callable[..., None]
    claim: Callable[..., bool]
    flags: Callable[..., Tensor]
    keeps_uses: Callable[..., None]
    take_waiting: Callable[..., Waiting]
    gathered: Callable[..., Gathered]
    deliver: Callable[..., None]
    take_sums: Callable[..., Sums]
    lenient: Callable[..., None]
    other_leaves: Callable[..., list[Tensor]]
    start_step: Callable[..., None]
    differentiating: Callable[..., int]
    learn_noise: Callable[..., None]
    add_noise: Callable[..., None]
    add_cipher_noise: Callable[..., None]

    def next_number(self) -> int:
        return next(self._numbers)

    def watch_for(self, owner: Owner) -> NativeWatch:
        """A watch over gradients, whose number is also the one by which the C++ code calls ``owner`` back."""
        number = self.next_number()
        self._owners[number] = owner
        return NativeWatch(self, number, self._classes.Watch(number))

    def make_layer(self, *args: Any) -> tuple[int, Any]:
        """A layer's number, and the layer, which lives as long as it is held."""
        number = self.next_number()
        return number, self._classes.Layer(number, *args)

    def _collect(
        self, clipper: int, current: int, unit: int, x: Tensor, weight: Tensor, kept: list[Tensor], g: Tensor
    ) -> list[Tensor]:
        return self._owners[clipper].collect_elsewhere(current, unit, x, weight, kept, g)

    def _finish(self, clipper: int, current: int) -> None:
        self._owners[clipper].finish_pass(current)

    def _ended(self, clipper: int, current: int) -> None:
        self._owners[clipper].pass_ended(current)

    def _look_at_leaves(self, clipper: int, leaves: list[Tensor]) -> None:
        self._owners[clipper].look_at_leaves(leaves)

    def _refuse(self, clipper: int, place: int, why: str) -> None:
        self._owners[clipper].refuse(place, why)


_LOADED: dict[Path, Layers] = {}  # a library is loaded once, and for good: what it registers with torch stays


def _abi() -> tuple[str, ...]:
    """As this torch was compiled: older wheels (2.6) have the older strings of C++."""
    return (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",)


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
            headers=_HEADERS,
            compile_with=(*_FLAGS, *_abi(), f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
            link_with=(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", str(kernels)),
            depends_on=(torch.__version__,),
            trial="import sys, torch; torch.ops.load_library(sys.argv[1])",
        )
        if library not in _LOADED:
            _LOADED[library] = Layers(library)
        return _LOADED[library], "C++"
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        return None, f"Python (the C++ layers could not be built: {build.why(error)})"


def layers() -> Layers | None:
    """The library, or None where layers are followed in Python."""
    return _load()[0]


def status() -> str:
    """One line: where the autograd nodes of followed layers run."""
    return f"layers: {_load()[1]}"
