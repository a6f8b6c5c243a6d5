"""Runs of the model beside the user's own: nothing is followed, and nothing is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradveil.clipping._rng import rng_at, rng_state, same_rng
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.surroundings import Attributes, Snapshot
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.operations.tracing import Tracing


@dataclass(frozen=True)
class PlainRun:
    """What one call of the model gave: its outputs, whether it drew random numbers, and what it changed."""

    outputs: list[Tensor]
    drew: bool
    changed: dict[str, Any]


class Moment:
    """A model and the generators as they are now: a run can start from here later."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes, self.rng = Attributes(module), rng_state(_device_of(module))


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def plain_run(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    evaluate: bool,
    starting_from: Moment | None = None,
    mode: Tracing | None = None,
    moved: bool = False,
    gradients: bool = False,
) -> PlainRun:
    """A call that leaves nothing behind: modes, attributes, buffers, parameters and generators are as they were.

    ``starting_from``: attributes and generators as they were at an earlier moment. ``mode`` sees its operations, with
    gradients where it asks for them; otherwise there are none, unless the model insists. ``moved``: parameters are
    moved a little, the same in every run, so that none is at a value that hides what it does (0, say).
    """
    children = list(module.modules())
    at_first = state = Snapshot(module)
    device = _device_of(module)
    before = rng_state(device) if starting_from is None else starting_from.rng
    try:
        if starting_from is not None:
            starting_from.attributes.put_back()
        if moved:
            _move(module)
            state = Snapshot(module)
        grad = torch.set_grad_enabled(gradients or (mode is not None and mode.needs_grad))
        with grad, rng_at(before, device), _no_fast_path(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint without gradients warns; nobody asked for this call
            if evaluate:
                for child in children:  # not module.eval(): a module may do more than that in its own
                    child.training = False
            with mode or nullcontext():
                output = module(*args, **kwargs)
            outputs = [t.detach() for t in tensors_in(output)]
            drew = not same_rng(before, rng_state(device))
            changed = state.changed()
    except RuntimeError as error:
        if "that doesn't require gradient" in str(error) and not gradients:  # a hook on an activation
            at_first.put_back()
            again = {"starting_from": starting_from, "mode": mode, "moved": moved, "gradients": True}
            return plain_run(module, args, kwargs, evaluate=evaluate, **again)  # type: ignore[arg-type]
        if "does not require grad" not in str(error):
            raise
        raise UnsupportedModelError(
            "the model differentiates inside its own forward (torch.autograd.grad, as for forces or penalties on "
            "gradients): its layers would be differentiated twice, and what each example adds to their gradients is "
            "not known. Compute the derivative with torch.func inside a module of its own, or leave it out."
        ) from error
    finally:
        at_first.put_back()
    return PlainRun(outputs, drew, changed)


def _move(module: nn.Module) -> None:
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=draw).to(parameter.device, parameter.dtype)
            # Through .data: a graph of the user's that holds the parameter finds it as it was, in its version too.
            parameter.data.add_(noise, alpha=0.02 * max(1.0, float(parameter.detach().abs().mean())))


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Attention as it is with gradients: without them torch has another way in eval mode, with zeros for padding."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Arguments:
    """The arguments of a call, and which of their tensors follow the batch: those that have its size first.

    What is the same for all examples may have that size by chance. Positions 0, 1, 2, ... and masks of what comes
    before and after are known by their values, and :meth:`readings` has the call without them too. Whatever else has
    the batch's size is taken to be of the examples: it may be private.
    """

    def __init__(self, args: Any, kwargs: Any, batch: int) -> None:
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._batched = [
            i for i, t in enumerate(self._leaves) if isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == batch
        ]

    def readings(self) -> list[list[int]]:
        """Those that follow the batch: all; or the same without what may be the same for all examples."""
        fewer = [i for i in self._batched if i == self._batched[0] or not _tells_nothing(self._leaves[i])]
        return [self._batched] if fewer == self._batched else [self._batched, fewer]

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self._leaves[i].shape) for i in self._batched]

    def some(self, batched: list[int], size: int, replaced: int | None, *, in_order: bool, noisy: bool) -> Any:
        """The same arguments with so many rows, from the first on and over again; one of them replaced by another.

        ``noisy``: what is not a whole number gets noise there, so that it is another one where all examples are alike.

        ``in_order``: no row comes before one that is before it in the batch (some models insist: pack_padded_sequence).
        """
        rows = len(self._leaves[batched[0]]) if batched else 1
        chosen = [i % rows for i in range(size)]
        if in_order:
            chosen.sort()
        if replaced is not None:
            others = [*chosen[replaced + 1 : replaced + 2], *chosen[:replaced][::-1]] if in_order else [size % rows]
            others += [(chosen[replaced] + 1) % rows]
            chosen[replaced] = next((row for row in others if row != chosen[replaced]), chosen[replaced])

        def change(t: Tensor) -> Tensor:
            found = t.detach()[chosen]
            if noisy and replaced is not None and t.is_floating_point():
                draw = torch.Generator().manual_seed(size)
                noise = torch.randn(found[replaced].shape, generator=draw).to(found.device, found.dtype)
                found[replaced] += noise * (0.1 + 0.1 * found[replaced].abs().nan_to_num(0.0, 0.0, 0.0).mean())
            return found.requires_grad_(t.requires_grad)

        return self._changed(batched, change)

    def _changed(self, batched: list[int], change: Callable[[Tensor], Tensor]) -> Any:
        leaves = [change(leaf) if i in batched else leaf for i, leaf in enumerate(self._leaves)]
        return tree_unflatten(leaves, self._spec)


def _tells_nothing(t: Tensor) -> bool:
    """Whether its values are positions in their order, or depend on which of two positions is the earlier only."""
    if t.dim() == 1 and not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool):
        return torch.equal(t, torch.arange(len(t), dtype=t.dtype, device=t.device))
    if t.dim() != 2 or t.shape[0] != t.shape[1] or len(t) < 2:
        return False
    ones = torch.ones(t.shape, dtype=torch.bool, device=t.device)
    parts = ones.tril(-1), ones.triu(1), torch.eye(len(t), dtype=torch.bool, device=t.device)
    return all(bool((t[part] == t[part][0]).all()) for part in parts)
