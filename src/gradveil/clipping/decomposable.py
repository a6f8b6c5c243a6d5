"""Is the loss a sum over examples? Two checks on the first batch, where a mistake can still be seen.

Clipping bounds an example's influence only if the gradient of example i's loss depends on example i
alone. A model that mixes examples, or a loss that compares them (contrastive, ranking, batch-normalised
losses), breaks that silently.

- the model: the output for an example alone must be its output in the batch;
- the loss: the gradient with respect to example i's output must not depend on example j's output,
  seen from the mixed second derivative. (A loss that mixes examples with no curvature at all, such as
  a hinge between pairs, escapes.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from gradveil.clipping.plain_runs import tensors_in
from gradveil.clipping.refusals import refusal
from gradveil.errors import UnsupportedModelError


def check_buffers(module: nn.Module, of_batch: Mapping[str, Tensor], of_others: Mapping[str, Tensor]) -> None:
    """Refuse buffers that are computed from the examples: they leave with the model, and no noise covers them."""
    for name, before in module.named_buffers():
        after, other = of_batch.get(name), of_others.get(name)
        if after is None or other is None or torch.equal(after, before) or torch.equal(after, other):
            continue
        raise UnsupportedModelError(
            f"buffer {name!r} is computed from the examples of the batch (a running mean or a count, say): it is part "
            "of the model's state_dict, and nothing bounds or noises what it tells of them. Put its module into eval "
            "mode, or leave it out."
        )


def check_examples_apart(whole: list[Tensor], alone: list[Tensor], batch: int, row: int = 0) -> None:
    """Compare a row of the model's outputs on the whole batch with those on that example alone, both in eval mode."""
    if not examples_are_apart(whole, alone, row):
        raise UnsupportedModelError(
            "the model gives another output for an example alone than for the same example in a batch of "
            f"{batch}: it mixes examples, so a per-example gradient is undefined and no clipping bounds what one "
            "example does. Normalise within each example (GroupNorm, LayerNorm) instead of over the batch, and attend "
            "or add up along the sequence, not along the batch."
        )


def examples_are_apart(whole: list[Tensor], alone: list[Tensor], row: int = 0) -> bool:
    for of_batch, of_one in zip(whole, alone, strict=True):
        if of_batch.dim() == 0 or of_one.shape != (1, *of_batch.shape[1:]) or not of_batch.is_floating_point():
            continue  # a scalar (a loss inside the model), or something whose rows are not the examples
        if not outputs_agree(of_batch[row].unsqueeze(0), of_one):
            return False
    return True


def same_shapes_but_for_the_batch(whole: list[Tensor], alone: list[Tensor], batch: int) -> bool:
    """Whether outputs with the batch first have one row where the first example is alone."""
    pairs = [(a, b) for a, b in zip(whole, alone, strict=False) if a.dim() > 0 and a.shape[0] == batch]
    return len(whole) == len(alone) and all(b.shape == (1, *a.shape[1:]) for a, b in pairs)


SHARED_INPUT = (
    "An embedding whose input has no batch dimension (positions, say) is looked up for every example, as (batch, T, "
    "features): it can be added to what has that shape, but not summed, indexed or expanded along its first dimension. "
    "Give it the batch: embedding(positions.expand(len(x), -1))."
)


def check_same_output(followed: Any, plain: list[Tensor]) -> None:
    """Refuse a model that computes something else when it is followed."""
    found = tensors_in(followed)
    if len(found) == len(plain) and all(outputs_agree(a, b) for a, b in zip(found, plain, strict=True)):
        return
    raise UnsupportedModelError(
        "the model gives other outputs when its layers are followed than by itself, so its gradients would be those of "
        f"another model. {SHARED_INPUT}"
    )


def outputs_agree(a: Tensor, b: Tensor) -> bool:
    """Whether two computations of the same outputs differ by no more than rounding in another order would."""
    if a.shape != b.shape:
        return False
    exact = all(t.dtype in (torch.float32, torch.float64) or not t.is_floating_point() for t in (a, b))
    tolerance = 1e-3 if exact and not torch.is_autocast_enabled(a.device.type) else 5e-2
    if a.is_cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        tolerance = max(tolerance, 1e-2)  # factors are rounded there, and not the same ones for every batch size
    if a.is_complex() or b.is_complex():
        a, b = torch.view_as_real(a.to(torch.complex128)), torch.view_as_real(b.to(torch.complex128))
    a, b = a.detach().double(), b.detach().double()
    scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale + 1e-30, equal_nan=True)


class _Watched(torch.Tensor):
    """The model's first output, marked so that the loss computed from it is recognised at ``backward()``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_A_TENSOR:
            return func(*tree_map(_unmarked, args), **(kwargs or {}))
        if func is torch.Tensor.backward:
            for watch in tuple(_WAITING):
                watch.check_loss(args[0])
        else:
            with torch._C.DisableTorchFunctionSubclass():
                _check_operation(func, args, kwargs or {})
        found = super().__torch_function__(func, types, args, kwargs or {})
        # What is not differentiated is no loss: users print it, copy it, write it to files.
        plain = isinstance(found, _Watched) and not found.requires_grad and all(found is not a for a in args)
        return _unmarked(found) if plain else found


def _unmarked(t: Any) -> Any:
    return t.as_subclass(Tensor) if isinstance(t, _Watched) else t


_AS_A_TENSOR = {Tensor.__format__, Tensor.__repr__, Tensor.__deepcopy__, Tensor.__reduce_ex__}
_LOSSES_WITH_A_COUNT = (F.cross_entropy, F.nll_loss)


def _check_operation(func: Any, args: Any, kwargs: Any) -> None:
    """Two ways in which targets mix examples without any curvature: broadcasting, and a normaliser that counts."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    for a in tensors:
        for b in tensors:
            column = a.dim() == 2 and a.shape[1] == 1 and a.shape[0] > 1
            if column and b.dim() == 1 and b.shape[0] == a.shape[0] and b.is_floating_point():
                raise UnsupportedModelError(
                    f"an output of shape {tuple(a.shape)} meets a target of shape {tuple(b.shape)}: they broadcast to "
                    f"{(a.shape[0], a.shape[0])}, every example with every other, so no clipping bounds what one "
                    "example does. Give both the same shape: target.unsqueeze(1), or output.squeeze(1)."
                )
    if func not in _LOSSES_WITH_A_COUNT or kwargs.get("reduction", "mean") != "mean" or len(args) < 2:
        return
    ignored = kwargs.get("ignore_index", -100)
    target = args[1]
    if kwargs.get("weight") is not None or (not target.is_floating_point() and bool((target == ignored).any())):
        raise UnsupportedModelError(
            "the loss is a mean over class weights, or over the targets that are not ignored: its normaliser depends "
            "on the labels of all examples, so one label changes every example's gradient. Use reduction='sum' with "
            "loss_reduction='sum', or average each example's own losses first."
        )


class OutputWatch:
    """Watches the outputs of a model with more than one example until a loss of theirs was looked at."""

    def __init__(self) -> None:
        self._left = _TRIES  # outputs that may still be marked
        self._scaled = False
        self._outputs: list[Tensor] = []

    def wrap(self, output: Any, batch: int, *, scaled: bool) -> Any:
        """The output, marked until a loss was looked at, which is when its ``backward`` is called.

        ``scaled``: the gradient of the output is multiplied on its way into the model.
        """
        self._forget()
        if not self._left or batch < 2:
            return output
        self._left -= 1
        self._scaled = scaled

        def mark(t: Any) -> Any:
            if type(t) is not Tensor or not t.requires_grad or t.dim() == 0 or t.shape[0] != batch:
                return t
            marked = t.as_subclass(_Watched)
            self._outputs.append(marked)
            return marked

        marked = tree_map(mark, output)
        _WAITING.append(self)
        return marked

    def _forget(self) -> list[Tensor]:
        outputs, self._outputs = self._outputs, []
        _WAITING[:] = [watch for watch in _WAITING if watch is not self]
        return outputs

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss in which the outputs of different examples interact."""
        with torch._C.DisableTorchFunctionSubclass():
            nodes = _nodes_behind(loss)
            if not any(output.grad_fn in nodes for output in self._outputs):
                return  # another model's
            self._left = _TRIES  # after one that is refused the next is looked at again
            outputs = self._forget()
            if self._scaled and any(node.name() in _FOLLOWED for node in nodes):
                raise refusal("beside", "")
            for output in outputs:
                if _mixes(loss, output):
                    raise UnsupportedModelError(
                        "the loss mixes examples: its gradient for one example's output depends on another's, so no "
                        "clipping bounds what one example does. Use a loss that is a mean or sum of per-example losses "
                        "(contrastive, ranking and batch-normalised losses are not)."
                    )
            self._left = 0


_WAITING: list[OutputWatch] = []
_TRIES = 5  # passes whose loss is waited for: it may never be differentiated, or in a way that is not seen here


# The names of autograd nodes, in C++ and in Python: of followed layers, and of what a followed model returns.
_FOLLOWED = ("gradveil::layer", "LayerTapBackward", "FunctionTapBackward")
_OUTPUT = ("gradveil::output", "OutputTapBackward")


def _nodes_behind(loss: Tensor) -> set[Any]:
    """Of the graph of a loss, up to the outputs of followed models."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen and node.name() not in _OUTPUT:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return seen


def _mixes(loss: Tensor, output: Tensor) -> bool:
    """Whether d(loss)/d(output of example 0) changes with the output of another example."""
    try:
        grad = _derivative(loss.sum(), output, create_graph=True)
        if grad is None or not grad.requires_grad:
            return False  # unused, or linear in the outputs: nothing to mix
        direction = torch.linspace(0.5, 1.5, grad[0].numel(), dtype=grad.dtype, device=grad.device)
        curvature = _derivative((grad[0] * direction.view_as(grad[0])).sum(), output, retain_graph=True)
    except (RuntimeError, NotImplementedError):
        return False  # an operation without a second derivative: not detectable here
    if curvature is None or not curvature.numel():
        return False
    own, others = curvature[:1].abs().max(), curvature[1:].abs().max()
    return bool(others > 1e-5 * own + 1e-30) and bool(torch.isfinite(others))


def _derivative(of: Tensor, by: Tensor, **settings: Any) -> Tensor | None:
    return torch.autograd.grad(of, by, allow_unused=True, **settings)[0]
