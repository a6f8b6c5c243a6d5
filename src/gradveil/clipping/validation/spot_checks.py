"""When it is checked that each example's loss depends on that example alone, and what came of it.

The first batches are checked, and after them batches that cannot be foreseen, for the whole run: a model may begin to
mix examples late. Three things are looked at:

    the model        example_independence.py (outputs) and rehearsal.py (gradients), in the mode training runs in,
                     before the user's own call
    the loss         loss_watch.py, when ``backward()`` is called
    the whole step   rehearsal.py; of a closed step: all that it computes of an example, with the others exchanged

What is found is refused before anything of the batch is released.
"""

from __future__ import annotations

import math
import secrets
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradveil.clipping.clipped_functions import is_refused
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.batch_arguments import BatchArguments, SharedArguments
from gradveil.clipping.validation.loss_watch import LossWatch
from gradveil.clipping.validation.mixing import check_model, model_refusal
from gradveil.clipping.validation.own_loss import OwnLosses
from gradveil.clipping.validation.rehearsal import Comparison, Rehearse, changes_with_rows, with_rows
from gradveil.clipping.validation.row_differences import are_masks
from gradveil.errors import ConfigError, UnsupportedModelError

FIRST = 2  # batches that are checked at the beginning
_SHAPES = 8  # of examples that are checked when they first come up: a model may do something else with them
_TRIES = 5  # batches whose loss is waited for: it may never be differentiated, or in a way that is not seen here


class SpotChecks:
    """Of one model. ``share``: of the time of training, which checks after the first may take."""

    def __init__(self, module: nn.Module, *, views: int = 1, share: float = 0.0) -> None:
        self._module, self._views, self.share = module, views, share
        self._loss = LossWatch(module, views=views)
        self.own_losses = OwnLosses()  # that the model computes itself
        self._shared = SharedArguments()
        self._first, self._tries = FIRST, _TRIES
        self._countdown: float | None = None  # batches until the next check; None: still to be drawn
        self._batches = self._checks = 0
        self._seconds, self._begun = 0.0, time.perf_counter()  # in checks; since when
        self._shapes: set[Any] = set()  # of examples, seen so far
        self._waiting = False  # for the loss of the batch that is under way
        self.not_batch_first: list[Tensor] = []  # of the loader's batch: the examples are along another dimension
        self._modes: tuple[Any, ...] | None = None  # of the modules, in the last call
        self._parts: list[tuple[Any, Any]] | None = None  # of the model: attributes and hooks of each module
        self._whole = False  # the batch under way was checked as a whole step
        self._model_seen = False
        self._warned_of_closure = False
        self.rehearse: Callable[[Callable[[], None]], list[Tensor] | None] | None = None  # a pass that keeps no sums
        self.report: Callable[[dict[str, bool]], None] = _unreported  # what was checked of a batch

    def _chance(self) -> float:
        """With which a batch is checked, so that checks take their share of the time."""
        if self.share in (0, 1):
            return float(self.share)
        checks = self._seconds + self._loss.seconds
        step = max(time.perf_counter() - self._begun - checks, 0.0) / max(self._batches, 1)
        return min(1.0, self.share * step * self._checks / max(checks, 1e-9))

    def _drawn(self) -> float:
        """How many batches until the next check: geometric, by numbers from the operating system."""
        chance = self._chance()
        if chance >= 1:
            return 1
        uniform = (secrets.randbits(53) + 1) / (1 << 53)
        return 1 + math.floor(math.log(uniform) / math.log1p(-chance)) if chance > 0 else math.inf

    def _is_new(self, given: Any) -> bool:
        """Whether examples of these shapes come up for the first time, and few others have."""
        if len(self._shapes) >= _SHAPES:
            return False
        shapes = tuple([t.shape[1:] for t in tree_leaves(given) if isinstance(t, Tensor)])
        new = shapes not in self._shapes
        if new:
            self._shapes.add(shapes)
        return new

    def _is_due(self, *, new: bool) -> bool:
        self._batches += 1
        if new:
            return True
        if self._first > 0 and self._tries > 0:
            return True
        if self._countdown is None:
            self._countdown = self._drawn()
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = None
        return True

    def _look_again(self) -> None:
        """Something was refused: whoever goes on regardless is refused again."""
        self._first, self._tries = FIRST, _TRIES

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started
            self._checks += 1

    # ---- the open loop

    def before_call(
        self, args: Any, kwargs: Any, rows: int, *, quietly: Callable[[], AbstractContextManager[None]], alone: bool
    ) -> None:
        """Before the user's own call of the model: refuse a model that mixes examples.

        ``alone=False``: other processes must call the model as often as this one does, so it is not called here.
        """
        if len(args) + len(kwargs) > 1:  # one argument alone is of the examples
            self._shared.note(args, kwargs, rows)
        self._waiting, self._model_seen = self._whole, False
        self._look_at_modes()
        if self._loss.status == "refused":
            self._look_again()
        new = rows >= 2 * self._views and self._is_new((args, kwargs) if len(args) != 1 or kwargs else args[0])
        if self._whole or rows < 2 * self._views or not self._is_due(new=new):
            return
        self._waiting, self._tries = True, self._tries - 1
        self._check_layout(args, kwargs)
        if not alone:
            return
        with self._timed(), quietly():
            verdict = check_model(self._module, args, kwargs, rows, views=self._views, shared=self._shared.positions)
        if verdict.mixes:
            self._look_again()
            raise model_refusal(verdict)
        apart = self._backward_is_apart(args, kwargs, rows)
        self._model_seen = verdict.comparable and apart
        self.own_losses.used = False

    def note_registration(self) -> None:
        """Some module has got a child: the model may have other parts than it had."""
        self._parts = None

    def _look_at_modes(self) -> None:
        """Check again where modes or hooks are not as they were: the model may do something else now."""
        if self._parts is None:
            self._parts = [
                (vars(m), (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks))
                for m in self._module.modules()
            ]
        modes = tuple([(own.get("training"), *map(len, hooks)) for own, hooks in self._parts])
        if modes != self._modes:
            if self._modes is not None:
                self._look_again()
            self._modes = modes

    def _backward_is_apart(self, args: Any, kwargs: Any, rows: int) -> bool:
        """Whether it was seen that gradients of an example do not depend on the others; refused where they do."""
        arguments = BatchArguments(args, kwargs, rows)
        arguments.leave_out(self._shared.positions)
        if self.rehearse is None or self._views != 1 or not arguments.shapes():
            return True

        scalars: set[int] = set()  # places among the outputs

        def passed(given: Any) -> list[Tensor] | None:
            def step() -> None:
                output = self._module(*given[0], **given[1])
                scalars.update(i for i, t in enumerate(tensors_in(output)) if t.dim() == 0 and t.requires_grad)
                _any_loss(output, rows).backward()

            return self.rehearse(step) if self.rehearse is not None else None

        finding = ""
        for batched in arguments.readings():  # in one of which the examples are independent, as in check_model
            with_rows_of = partial(arguments.with_rows, batched)
            comparison = Comparison(self._module, passed, with_rows_of, rows)
            with self._timed():
                finding = comparison.finding(sizes=False)
            self._checks -= 1  # one with that of the outputs
            if not finding:
                if scalars:
                    with self._timed():
                        self.own_losses.look(scalars, self._module, self.rehearse, with_rows_of, rows)
                    self._checks -= 1
                return comparison.comparable
        self._look_again()
        raise UnsupportedModelError(
            f"the model mixes examples in its backward pass: the gradient of one example {finding}. Look for hooks on "
            "activations or modules that change gradients by statistics of the batch, and for autograd functions of "
            "your own that do; normalise within each example instead. (It is also seen where the model arranges its "
            "examples otherwise than in the first batch, by their length, say.)"
        )

    def _check_layout(self, args: Any, kwargs: Any) -> None:
        for given in (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            for other in self.not_batch_first:
                if given.shape == other.shape and torch.equal(given.detach().cpu(), other.detach().cpu()):
                    raise UnsupportedModelError(
                        f"the model was given a batch of shape {tuple(given.shape)} as the loader's collate_fn makes "
                        "it, with the examples along another dimension than the first: rows would be clipped that are "
                        "not examples. Put the examples first (batch_first=True, or transpose before the model)."
                    )

    def after_call(self, output: Any, rows: int, *, scaled: bool, mean: bool) -> Any:
        """The model's output, marked where the loss computed from it is to be looked at."""
        if not self._waiting:
            self._loss.forget()
            return output
        return self._loss.wrap(output, rows, scaled=scaled, mean=mean)

    def backward_ended(self) -> None:
        """The backward pass has ended: note what was seen of its batch."""
        if not (self._waiting or self._whole):
            return
        whole, self._whole, self._waiting = self._whole, False, False
        loss = self._loss.status == "checked" or self.own_losses.used
        if whole:
            self.report({"whole_step": True})
        elif self._model_seen or loss:
            self.report({"model": self._model_seen, "loss": loss})
        if loss and not whole:
            self._first -= 1
        if not loss and not whole and self._tries == 0 and self._first == FIRST:
            warnings.warn(
                f"the loss of the first {_TRIES} batches could not be checked ({self._loss.reason or 'not seen'}): "
                "that it is a mean or a sum over the examples is then an assumption, and the statement says so. Call "
                "loss.backward() on a loss computed from the model's output by torch's own operations, or use "
                "engine.run_step.",
                stacklevel=2,
            )

    # ---- the closed step

    def whole_step(self, rehearse: Rehearse, batch: Any, rows: int, *, holds: Sequence[Tensor] = ()) -> None:
        """Refuse a step in which the gradient of an example changes when the other examples of its batch do.

        The loss of the step itself is looked at as in an open loop: where the step draws random numbers, half a batch
        draws others, and only a loss that is run again tells whether it depends on the number of examples.

        ``rows`` is the number of examples; tensors of the batch with that size first are taken to be of the examples.
        ``holds``: tensors that the step holds besides. One with a row for each example may be part of the batch, and is
        not exchanged with it: then the step counts as checked in the model and the loss only.
        """
        if not changes_with_rows(batch, rows):
            raise ConfigError(
                f"run_step was given no tensor with the {rows} examples of the batch along its first dimension, so "
                "what the step does with other examples cannot be checked. Pass the batch as arguments: "
                "engine.run_step(loss_fn, *batch), with a loss_fn that computes everything from them."
            )
        if rows < 2 or not self._is_due(new=self._is_new(batch)):
            return
        comparison = Comparison(self._module, rehearse, lambda index: with_rows(batch, rows, index), rows)
        with self._timed():
            finding = comparison.finding(sizes=True)
        if finding:
            self._look_again()
            raise UnsupportedModelError(
                f"the step mixes examples: what it computes of one example {finding}. A per-example gradient is then "
                "undefined, and clipping does not bound the influence of one example. Look for statistics over the "
                "batch in preprocessing (centring, mixup), in the model (batch norm, attention along the batch) and in "
                "the loss (a normaliser or mask computed from all targets)."
            )
        beside = any(t.dim() > 0 and t.shape[0] == rows for t in holds)
        if beside and not self._warned_of_closure:
            self._warned_of_closure = True
            warnings.warn(
                f"the function given to run_step holds a tensor with {rows} rows, as many as the batch has examples. "
                "If it is part of the batch (targets, weights), pass it as an argument: it is not exchanged with the "
                "examples, so the step does not count as checked as a whole.",
                stacklevel=3,
            )
        self._whole = self._waiting = comparison.comparable and not beside
        self._first -= 1


def tensors_held_by(function: Any) -> list[Tensor]:
    """In its closure, its defaults, or bound to it by functools.partial."""
    if isinstance(function, partial):
        return [*_tensors((function.args, function.keywords)), *tensors_held_by(function.func)]
    function = getattr(function, "__func__", function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != types.CellType()]
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    return _tensors((cells, defaults))


def _tensors(held: Any) -> list[Tensor]:
    return [t for t in tree_leaves(held) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]


def _unreported(what: dict[str, bool]) -> None:
    pass


def _any_loss(output: Any, rows: int) -> Tensor:
    """Of an output, with weights that are the same for a row in every call of the same size."""
    draw = torch.Generator().manual_seed(rows)
    total = torch.zeros(())
    for t in tensors_in(output):
        if t.requires_grad and t.dim() > 0 and t.shape[0] == rows and not is_refused(t):
            weights = torch.randn(t.shape, generator=draw).to(t.device, t.dtype)
            masks = are_masks(t.detach().abs().double().nan_to_num(0.0, 0.0, 0.0))
            t = t if masks is None else t.masked_fill(masks, 0.0)
            total = total.to(t.device) + ((t + t.square()) * weights).sum()  # a gradient of its own for each example
    return total
