"""Which layers have their autograd node in C++ (backends/layers.py), and when a call may go there.

Only kinds that C++ knows, all of whose parameters train. A call goes there in plain float32, and on a GPU under
autocast: normalisations, which it leaves in float32, and linear layers, in half precision. Everything else goes
through :class:`~gradveil.clipping.clipped_functions.ClippedFunction`, with the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradveil.clipping import performance
from gradveil.clipping.backends import layers as kinds
from gradveil.clipping.backends.layers import Layers, NativeWatch
from gradveil.clipping.rules.conv import ConvRule
from gradveil.clipping.rules.linear import MULTIPLIES_HALVES, Conv1DRule, LinearRule
from gradveil.clipping.rules.norm import GroupNormRule, LayerNormRule

if TYPE_CHECKING:
    from gradveil.clipping.tracked_modules import TrackedModule


class NativeLayer:
    """One unit's layer in C++."""

    def __init__(self, library: Layers, unit: TrackedModule, number: int, in_cpp: Any, *, on_cpu: bool) -> None:
        self._rule: Any = unit.rule
        self._on_cpu, self._least_dims = on_cpu, unit.rule.least_dims if unit.rule is not None else 2
        self._in_halves = isinstance(unit.rule, (LinearRule, Conv1DRule))
        self._normalises = isinstance(unit.rule, (GroupNormRule, LayerNormRule))
        self._run, self._run_again = library.layer, library.layer_again
        self._number, self._in_cpp = number, in_cpp
        self._without_program: set[tuple[int, ...]] = set()

    def takes(self, x: Tensor) -> bool:
        """Whether this call is of the ordinary kind."""
        return (
            (self._takes_under_autocast(x) if torch.is_autocast_enabled(x.device.type) else x.dtype is torch.float32)
            and x.dim() >= self._least_dims
            and (self._on_cpu or x.is_cuda)
            and performance.settings().formula == "auto"
            and not torch._C._are_functorch_transforms_active()
        )

    def _takes_under_autocast(self, x: Tensor) -> bool:
        if not x.is_cuda or x.dtype not in (torch.float32, torch.get_autocast_dtype("cuda")):
            return False
        if self._in_halves:  # on a sequence: a single position is not multiplied in halves
            return MULTIPLIES_HALVES and x.dim() > 2
        return self._normalises  # in float32, which the rule makes of it

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """In the model's call."""
        return self._run(self._rule.prepare(x), weight, bias, self._number)

    def run_again(self, x: Tensor, weight: Tensor, bias: Tensor | None, current: int) -> Tensor:
        """In the backward pass, by a checkpoint."""
        return self._run_again(self._rule.prepare(x), weight, bias, self._number, current)

    def wait_for_others(self) -> None:
        """Its parameters have come up in another unit too: its gradients are no longer clipped by themselves."""
        self._in_cpp.share()

    def learn(self, x: Tensor, g: Tensor, program: list[int] | None) -> None:
        """What the kernels do for inputs of these shapes (backends/programs.py); None where that cannot be recorded."""
        if program is None:
            self._without_program.add(_key(x, g))
        else:
            self._in_cpp.learn(list(_key(x, g)), program)

    def has_no_program(self, x: Tensor, g: Tensor) -> bool:
        """True if recording failed before for these shapes."""
        return _key(x, g) in self._without_program


def _key(x: Tensor, g: Tensor) -> tuple[int, ...]:
    """As key_of in _layer.h."""
    return (*x.shape, *x.stride(), *g.shape, int(torch.backends.cudnn.allow_tf32), g.element_size())


def native_layer(
    library: Layers, unit: TrackedModule, watch: NativeWatch, weight: Tensor, bias: Tensor | None
) -> NativeLayer | None:
    """The layer in C++; None where it stays in Python."""
    rule = unit.rule
    trained = [p for p in (weight, bias) if p is not None]
    if rule is None or len(set(unit.group_of)) != 1:
        return None
    if len(trained) != len(unit.parameters) or any(a is not b for a, b in zip(trained, unit.parameters, strict=True)):
        return None
    if weight.dtype is not torch.float32:
        return None
    geometry = _geometry(rule, weight)
    if geometry is None:
        return None
    kind, on_cpu, numbers, many, eps = geometry
    number, in_cpp = library.make_layer(
        kind, unit.index, unit.group_of[0], unit.whole_groups, bias is not None, on_cpu, numbers, many, eps,
        watch.in_cpp, unit.slots,
    )  # fmt: skip
    return NativeLayer(library, unit, number, in_cpp, on_cpu=on_cpu)


def _geometry(rule: Any, weight: Tensor) -> tuple[int, bool, list[int], int, float] | None:
    """Kind, whether the CPU's kernels take it, and what there is to know of it besides its parameters."""
    m = rule.settings
    if type(rule) is LinearRule:
        return kinds.LINEAR, True, [], 1, 0.0
    if type(rule) is Conv1DRule:
        return kinds.TRANSPOSED_LINEAR, False, [], 1, 0.0
    if type(rule) is ConvRule and rule.dims == 2:
        # A larger gradient may have a shorter way than being formed (see choose_formula): Python knows it.
        formed = m.groups != 1 or weight.numel() <= performance.settings().cached_elements
        return kinds.CONVOLUTION, formed, [*m.stride, *rule.padding, *m.dilation], m.groups, 0.0
    if type(rule) is GroupNormRule:
        return kinds.GROUP_NORM, False, [], m.num_groups, m.eps
    if type(rule) is LayerNormRule:
        return kinds.LAYER_NORM, False, list(m.normalized_shape), 1, m.eps
    return None
