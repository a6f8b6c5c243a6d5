"""The autograd functions a followed model goes through, and what stands in for its forward."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradveil.clipping.rules.layer import LayerRule
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.surroundings import no_autocast

if TYPE_CHECKING:
    from gradveil.clipping.backward_pass import BackwardPass, Call
    from gradveil.clipping.clipper import Clipper


class OutputFunction(torch.autograd.Function):
    """The model's output: its backward begins the pass, and turns the gradient of a mean into that of each loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clipper: Clipper, current: BackwardPass, scale: float) -> Tensor:
        ctx.clipper, ctx.current, ctx.scale = clipper, current, scale
        return x.detach()  # not a view, which others could not change in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clipper.start_backward(ctx.current)
        return g if ctx.scale == 1.0 else g * ctx.scale, None, None, None


class RefusedFunction(torch.autograd.Function):
    """An output that no loss may be computed from, and why (refusals.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, why: str, what: str) -> Tensor:
        ctx.why = why, what
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        raise refusal(*ctx.why)


def is_refused(t: Tensor) -> bool:
    return t.grad_fn is not None and t.grad_fn.name() == "RefusedFunctionBackward"


class InputFunction(torch.autograd.Function):
    """An input that needs a gradient: undoes what the output's tap has multiplied the gradient by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g * ctx.scale, None


def tap_input(x: Tensor, scale: float) -> Tensor:
    """InputFunction.apply, where there is something to do."""
    tapped: Tensor = InputFunction.apply(x, scale) if x.requires_grad and scale != 1.0 else x
    return tapped


class ClippedFunction(torch.autograd.Function):
    """A layer with a rule."""

    @staticmethod
    def forward(
        ctx: Any, clipper: Clipper, call: Call, rule: LayerRule, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.clipper, ctx.call, ctx.rule = clipper, call, rule
        out, kept = rule.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, *kept)
        # Not a view, which others could not change in place.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() and out.is_contiguous() else out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph, what is computed here must not be differentiated again; that is refused, at some cost.
        return _differentiated_once(ctx, g) if torch.is_grad_enabled() else _layer_backward(ctx, g)


def _layer_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *kept = ctx.saved_tensors
    with no_autocast():
        to_x, use = ctx.rule.backward(x, weight, tuple(kept), g, ctx.needs_input_grad[3:])
        ctx.clipper.collect(ctx.call, use, ctx.next_functions[1:])
    return None, None, None, to_x, None, None


_differentiated_once: Callable[..., Any] = once_differentiable(_layer_backward)
# The way past checks that matter only under torch.func's transforms: small layers feel every call.
_apply_layer: Callable[..., Tensor] = super(torch.autograd.Function, ClippedFunction).apply
_apply_output: Callable[..., Tensor] = super(torch.autograd.Function, OutputFunction).apply


def tap_layer(*args: Any) -> Tensor:
    """ClippedFunction.apply."""
    apply: Callable[..., Tensor] = (
        ClippedFunction.apply if torch._C._are_functorch_transforms_active() else _apply_layer
    )
    return apply(*args)


def tap_output(*args: Any) -> Tensor:
    """OutputFunction.apply."""
    apply: Callable[..., Tensor] = (
        OutputFunction.apply if torch._C._are_functorch_transforms_active() else _apply_output
    )
    return apply(*args)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of the followed layers: they run as they are, between compiled parts.

    Only where the compiler is loaded: loading it takes seconds, and a model is compiled after that anyway.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


_is_compiling = torch.compiler.is_compiling
_watching = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def _compiler_at_work() -> bool:
    """Whether a compiled model is running or being traced: only then is it worth what keeping it out costs."""
    return _is_compiling() or _watching is None or _watching() is not None


class TrackedForward:
    """The model's forward while it is followed. Copies and pickles of the model get its plain forward back."""

    def __init__(self, clipper: Clipper, own: Any) -> None:
        self.clipper, self._own = clipper, own
        self.plain = own if own is not None else types.MethodType(type(clipper.module).forward, clipper.module)
        self.run = _uncompiled(self._run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs) if _compiler_at_work() else self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        call = self.clipper.call
        return call.run(self.plain, args, kwargs) if call.is_under_way else self.plain(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _plain_forward, (self.clipper.module, self._own)


def _plain_forward(module: nn.Module, own: Any) -> Any:
    return types.MethodType(type(module).forward, module) if own is None else own


class ModelHook:
    """A hook on the model that copies and pickles do not carry along."""

    def __init__(self, hook: Callable[..., Any], before_copy: Callable[[], None] | None = None) -> None:
        self.before_copy = before_copy
        self.plain, self.hook = hook, _uncompiled(hook)

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args) if _compiler_at_work() else self.plain(*args)

    def __reduce__(self) -> Any:
        if self.before_copy is not None:
            self.before_copy()
        return _inert_hook, ()


def _inert_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    return None
