"""A forward and backward pass whose sums are thrown away: does what it tells of an example depend on the others?

Of every example are compared: the model's outputs, the gradient of its own loss with respect to them, and the norms of
its gradient in every group, while other examples of the batch are exchanged, and with half of the batch. That covers
what happens before the model, in it, in the loss and in the backward pass (hooks on activations, autograd functions).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.clipping._rng import rng_at, rng_state, same_rng
from gradveil.clipping.clipped_functions import is_refused
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.example_independence import check_state
from gradveil.clipping.validation.row_differences import Split, largest_difference, tolerance
from gradveil.clipping.validation.surroundings import Snapshot
from gradveil.errors import GradveilError

Rehearse = Callable[[Any], list[Tensor] | None]
"""From a batch to what its pass tells of each example, (examples, ...) each; None where it is not one whole pass."""


class Rehearsal:
    """What one pass has told of its examples."""

    def __init__(self, views: int) -> None:
        self._views = views
        self._of_outputs: dict[int, list[Tensor]] = {}  # outputs, and then their gradients
        self.passes: list[list[Tensor] | None] = []

    def watch(self, output: Any, rows: int) -> None:
        """Outputs of the model, before their gradients are scaled to those of each example's own loss."""
        self._of_outputs = {}
        for place, t in enumerate(tensors_in(output)):
            if t.requires_grad and t.dim() > 0 and t.shape[0] == rows and not is_refused(t):
                kept = self._of_outputs[place] = [t.detach().clone()]
                t.register_hook(lambda g, kept=kept: kept.append(g.detach().clone()))

    def end(self, norms: Tensor | None) -> None:
        """The pass has ended, with these norms (groups, examples)."""
        if norms is None:
            self.passes.append(None)
            return
        seen = [t for pair in self._of_outputs.values() for t in pair]
        of_examples = [t.reshape(len(t) // self._views, -1) for t in seen if len(t) % self._views == 0]
        self.passes.append([norms.T.contiguous(), *of_examples])


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Calls of the model in here leave nothing behind; gives a context in which generators and state are as now.

    The context gives a function that says whether random numbers were drawn, and what has changed in the model.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    rng, state = rng_state(device), Snapshot(module)
    grads = [(p, p.grad) for p in module.parameters()]

    def put_back() -> None:
        state.put_back()
        for parameter, grad in grads:
            parameter.grad = grad

    @contextmanager
    def from_here() -> Iterator[Callable[[], tuple[bool, dict[str, Any]]]]:
        with rng_at(rng, device):
            try:
                yield lambda: (not same_rng(rng, rng_state(device)), state.changed())
            finally:
                put_back()

    yield from_here


def with_rows(batch: Any, rows: int, index: Tensor) -> Any:
    """A batch with other rows: tensors with that many rows are taken to be of the examples."""

    def pick(t: Any) -> Any:
        if isinstance(t, Tensor):
            fits = t.dim() > 0 and t.shape[0] == rows
            return t.detach().index_select(0, index.to(t.device)) if fits else t
        if isinstance(t, Mapping) and not isinstance(t, dict):  # transformers' BatchEncoding, for one
            other = copy.copy(t)
            other.update({k: tree_map(pick, v) for k, v in t.items()})  # type: ignore[attr-defined]
            return other
        return t

    return tree_map(pick, batch)


def changes_with_rows(batch: Any, rows: int) -> bool:
    """Whether some tensor of a batch has a row for each example, so that examples can be exchanged."""
    leaves = [leaf for t in tree_leaves(batch) for leaf in (tree_leaves(dict(t)) if isinstance(t, Mapping) else [t])]
    return any(isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == rows for t in leaves)


class Comparison:
    """Passes on a batch with some of its examples exchanged, or left out."""

    def __init__(self, module: nn.Module, rehearse: Rehearse, exchanged: Callable[[Tensor], Any], rows: int) -> None:
        """``exchanged``: from indices to the batch of those rows."""
        self._module, self._rehearse, self._exchanged = module, rehearse, exchanged
        self._split = Split.random(rows)
        self.comparable = False

    def finding(self, *, sizes: bool) -> str:
        """How an example depends on the others, in words; empty where it does not, or where it cannot be seen.

        ``sizes``: also compare with half of the batch, where the step draws no random numbers.
        """
        if self._split is None:
            return ""
        with undisturbed(self._module) as from_here:
            self._from_here = from_here
            return self._compare(self._split, sizes=sizes)

    def _compare(self, split: Split, *, sizes: bool) -> str:
        base, drew, state = self._run(split.everything)
        if base is None:
            return ""
        for kept, index in split.replacements():
            changed, _, after = self._run(index)
            if changed is None:
                return ""
            check_state(state, after)
            if self._differ(base, changed, kept, kept):
                if self._is_repeatable(base, split.everything):
                    return "changes when the other examples of the batch are exchanged"
                return ""  # twice the same is not the same (a generator of its own, a counter): nothing was seen
        for side in split.sides if sizes and not drew else ():
            half, _, _ = self._run(side)
            if half is not None and self._differ(base, half, side, torch.arange(len(side)), least=1e-2):
                return (
                    "depends on how many examples are in the batch"
                    if self._is_repeatable(base, split.everything)
                    else ""
                )
        self.comparable = True
        return ""

    def _run(self, index: Tensor) -> tuple[list[Tensor] | None, bool, dict[str, Any]]:
        with self._from_here() as after:
            try:
                found = self._rehearse(self._exchanged(index))
            except GradveilError:
                raise
            except Exception:  # the user's code is particular about its batches
                found = None
            return found, *after()

    def _is_repeatable(self, base: list[Tensor], everything: Tensor) -> bool:
        again, _, _ = self._run(everything)
        return again is not None and not self._differ(base, again, everything, everything)

    @staticmethod
    def _differ(a: list[Tensor], b: list[Tensor], rows_a: Tensor, rows_b: Tensor, least: float = 0.0) -> bool:
        if len(a) != len(b):
            return False
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            x, y = one.index_select(0, rows_a.to(one.device)), other.index_select(0, rows_b.to(other.device))
            if x.shape != y.shape:
                continue
            limit = max(least, 1e-4, 10 * tolerance(one, autocast=torch.is_autocast_enabled(one.device.type)))
            if largest_difference(x, y, torch.arange(len(x))) <= limit:
                continue
            if place > 0 or not _shared(one, other, len(x), limit):  # the first are norms
                return True
        return False


def _shared(norms: Tensor, others: Tensor, number: int, limit: float) -> bool:
    """Whether so many norms of each group, (examples, groups), are in both: a model may sort its batch inside."""
    norms, others = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (norms, others))
    for of_group, there in zip(norms.T, others.T, strict=True):
        apart = (of_group.unsqueeze(1) - there).abs().amin(1)
        if int((apart <= limit * of_group.clamp(min=1e-6 * float(there.max()))).sum()) < number:
            return False
    return True
