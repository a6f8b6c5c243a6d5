"""Is the loss a sum over examples? Its operations are recorded and run again with other outputs for some rows.

The gradient of the loss with respect to the output of an example must not change when outputs of other examples are
replaced. Where the loss cannot be run again (values were read into Python and used, say), the mixed second derivative
is looked at instead, which shows only losses with curvature.

Then the loss is run again on half of the rows: the gradient of an example's own loss must not depend on how many
others there are. That finds a normaliser that counts labels, and a mean that was declared a sum.

What this cannot see: a loss declared a sum with a normaliser computed from targets alone, outside the recorded
operations, and losses whose constants cannot be cut to half of the rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.clipping.outputs import map_tensors
from gradveil.clipping.validation.example_independence import _FOLLOWED, _OUTPUT, _check_operation, _mixes
from gradveil.clipping.validation.loss_replay import AnotherBranch, CannotReplay, SomeRows, Tape
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.row_differences import Split, largest_difference, tolerance
from gradveil.errors import GradveilError, PrivacyViolation, UnsupportedModelError

Status = Literal["checked", "not comparable", "not seen", "refused"]


class _Recorded(torch.Tensor):
    """A model's output, or something computed from it: operations on it are recorded until ``backward()``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled loss runs as one piece: it cannot be recorded
            return super().__torch_function__(func, types, args, kwargs)
        if func in _AS_A_TENSOR:
            return func(*tree_map(unmarked, args), **kwargs)
        if func is Tensor.__iter__:  # an iterator would hide the rows that it gives
            return iter(args[0].unbind(0))
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.backward:
                for watch in tuple(_WAITING):
                    watch.check_loss(*_backward_arguments(*args, **kwargs))
                return func(*tree_map(unmarked, args), **tree_map(unmarked, kwargs))
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, _Recorded)]
            watches = [w for w in _WAITING if w.tape is not None and any(map(w.tape.knows, given))]
            if not watches:
                return func(*args, **kwargs)  # of a batch that is over: its results are ordinary tensors
            try:
                if func in _PRODUCTS:
                    _refuse_scaler(sys._getframe(1))
                _check_operation(func, args, kwargs)
            except GradveilError:
                for watch in watches:
                    watch.status = "refused"
                raise
            return _record_on([w.tape for w in watches if w.tape is not None], func, args, kwargs)


def _record_on(tapes: list[Tape], func: Any, args: Any, kwargs: Any) -> Any:
    if not tapes:
        return func(*args, **kwargs)
    return tapes[0].record(func, args, kwargs, lambda: _record_on(tapes[1:], func, args, kwargs), _marked)


def _marked(t: Tensor) -> Tensor:
    return t if type(t) is not Tensor else t.as_subclass(_Recorded)


def is_marked(t: Any) -> bool:
    return isinstance(t, _Recorded)


def unmarked(t: Any) -> Any:
    return t.as_subclass(Tensor) if isinstance(t, _Recorded) else t


_AS_A_TENSOR = {Tensor.__format__, Tensor.__repr__, Tensor.__deepcopy__, Tensor.__reduce_ex__}
_PRODUCTS = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.mul_, Tensor.__imul__}
_WAITING: list[LossWatch] = []
_SMALL = 1_000_000  # elements of the outputs


def _backward_arguments(
    loss: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, *rest: Any, **others: Any
) -> tuple[Tensor, Tensor | None, bool]:
    return loss, gradient, bool(retain_graph)


def _refuse_scaler(frame: Any) -> None:
    for _ in range(2):
        if frame is not None and isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            raise PrivacyViolation(
                "the loss is scaled by a GradScaler: per-example gradients would be clipped after scaling, so the loss "
                "scale, which changes during training, would decide how many of them exceed the clip bound. Leave the "
                "scaler out: under torch.autocast(dtype=torch.bfloat16) none is needed."
            )
        frame = frame.f_back if frame is not None else None


class LossWatch:
    """Watches the outputs of the batches that are to be checked until a loss of theirs is differentiated.

    ``module``: its parameters have a refusal of their own when they are used outside their modules. ``views``: so many
    consecutive rows are one example. ``seed``: of the random splits; by default every batch is split differently.
    """

    def __init__(self, module: nn.Module | None = None, *, views: int = 1, seed: int | None = None) -> None:
        self.status: Status = "not seen"  # of the batch that was wrapped last
        self.reason = ""  # why it was not comparable
        self.tape: Tape | None = None
        self._module, self._views, self._seed = module, views, seed
        self._rows, self._scaled = 0, False
        self._mean: bool | None = None
        self._divided = False  # whether the loss is divided by a tensor that is not computed from outputs
        self._counted: set[int] = set()  # rows of batches in whose loss their number may or may not have been
        self.seconds = 0.0  # that checks of losses have taken
        self._outputs: list[Tensor] = []
        self._edges: list[GradientEdge] = []

    def wrap(self, output: Any, rows: int, *, scaled: bool, mean: bool | None = None) -> Any:
        """The output, marked until a loss computed from it is differentiated, or :meth:`forget` is called.

        ``scaled``: the gradient of the output is multiplied on its way into the model. ``mean``: the loss was declared
        a mean over the rows, or else a sum; None: not known.
        """
        self.forget()
        self._mean = mean
        self.status, self.reason, self._rows, self._scaled = "not seen", "", rows, scaled
        if rows < 2 * self._views:
            return output

        detached: list[Tensor] = []  # a statistic of theirs in the loss mixes examples too

        def mark(t: Any) -> Any:
            if type(t) is not Tensor or t.dim() == 0 or t.shape[0] != rows:
                return t
            marked = t.as_subclass(_Recorded)
            if not t.requires_grad:
                if t.is_floating_point():
                    detached.append(marked)
                return marked if t.is_floating_point() else t
            self._outputs.append(marked)
            self._edges.append(get_gradient_edge(t))  # stays what it is when the output is changed in place
            return marked

        marked = map_tensors(mark, output)
        if self._outputs:
            with torch._C.DisableTorchFunctionSubclass():
                self.tape = Tape(self._outputs, detached)
            _WAITING.append(self)
        return marked

    def forget(self) -> None:
        """Let go of the outputs, and of the graph behind them."""
        self.tape, self._outputs, self._edges = None, [], []
        _WAITING[:] = [watch for watch in _WAITING if watch is not self]

    def check_loss(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Refuse a loss in which the outputs of different examples interact, or that trains something unclipped."""
        own = {edge.node for edge in self._edges}
        nodes, reached = _nodes_before(loss, own)
        if not reached:
            return  # another model's
        tape, outputs, self.status = self.tape, self._outputs, "refused"  # unless nothing is found below
        if not retain_graph:
            self.forget()
        if self._scaled and any(node.name() in _FOLLOWED for node in nodes):
            raise refusal("beside", "")
        self._check_leaves(nodes)
        if tape is None or (gradient is None and loss.numel() != 1):
            self.status = "not seen"
            return  # backward() will say what is wrong
        try:
            if any(isinstance(node, BackwardCFunction) for node in nodes):
                raise CannotReplay("an autograd function of the user's own has a gradient of its own")
            if any(node.name() in (*_FOLLOWED, *_OUTPUT) for node in nodes):
                raise CannotReplay("it uses an output without the examples first, or an activation that was kept")
            started = time.perf_counter()
            if gradient is not None and not tape.knows(gradient) and bool((gradient != gradient.flatten()[0]).any()):
                raise CannotReplay("backward() was given a gradient that was not computed from the outputs by torch")
            replays = _Replays(tape, loss, gradient, self._splits(outputs))
            mixes = replays.differ()
            self._divided = tape.divides_by_a_tensor(loss)
            if not mixes and self._mean is not None and gradient is None:
                self._check_half(replays.factors_of_half(mean=self._mean), mean=self._mean)
            self.status = "checked"
            self.seconds += time.perf_counter() - started
        except CannotReplay as failure:
            self.status, self.reason = "not comparable", str(failure)
            mixes = any(_mixes(loss, output) for output in outputs)
        if mixes:
            self.status = "refused"
            raise loss_refusal()

    def _check_half(self, factors: list[float | None], *, mean: bool) -> None:
        """Refuse a loss whose normaliser is not the number of examples.

        Whether a number in the loss counts examples is not known, so one reading in which nothing changes is enough.
        But a number that was the number of rows in batches of different sizes counts them.
        """
        if not mean and self._divided:
            self.status = "refused"
            raise UnsupportedModelError(
                "the loss was declared a sum over the examples (loss_reduction='sum'), and it is divided by a tensor "
                "that was computed outside of it, such as how many labels of the batch count: one example then changes "
                "the gradients of the others. Use a plain sum, or divide by a Python number that is fixed in advance."
            )
        if not factors or 1.0 in factors[:2]:
            return
        if factors[0] is None:
            raise CannotReplay("it does not run on half of the batch")
        if factors[2] == 1.0:
            self._counted.add(self._rows)
            if len(self._counted) < 2:
                return
        self.status = "refused"
        raise _factor_refusal(factors[0], mean=mean)

    def _splits(self, outputs: list[Tensor]) -> list[Split]:
        """Two, unless the outputs are large: fixed pairs of examples may fall on the same side of one."""
        number = 2 if sum(t.numel() for t in outputs) <= _SMALL else 1
        seeds = [None if self._seed is None else self._seed + i for i in range(number)]
        splits = [Split.random(self._rows, self._views, seed) for seed in seeds]
        return [split for split in splits if split is not None]

    def _check_leaves(self, nodes: Iterable[Any]) -> None:
        own = set() if self._module is None else {id(p) for p in self._module.parameters()}
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is None or id(leaf) in own:
                continue
            if not isinstance(leaf, nn.Parameter) and leaf.dim() > 0 and leaf.shape[0] == self._rows:
                continue  # an input that a gradient is wanted for
            raise unclipped(leaf)


def loss_refusal() -> UnsupportedModelError:
    return UnsupportedModelError(
        "the loss mixes examples: its gradient for one example's output depends on another's, so clipping does not "
        "bound the influence of one example. Use a loss that is a mean or sum of per-example losses (contrastive, "
        "ranking and batch-normalised losses are not)."
    )


def unclipped(leaf: Tensor) -> GradveilError:
    kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
    return PrivacyViolation(
        f"the loss depends on a trainable {kind} of shape {tuple(leaf.shape)} that is not part of the private model (a "
        "separate head or encoder, or a learnable temperature, say): its gradient would be neither clipped nor noised. "
        "Make it part of the module given to make_private, as a module that its forward calls; or detach it, or call "
        "requires_grad_(False)."
    )


def leaves_behind(t: Tensor) -> Iterator[Tensor]:
    """The leaves of a tensor's graph; the tensor itself, where it is one."""
    if t.requires_grad and t.grad_fn is None:
        yield t
    nodes, seen = [t.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
            nodes += [following for following, _ in node.next_functions]


def _nodes_before(loss: Tensor, own: set[Any]) -> tuple[set[Any], bool]:
    """The nodes of the loss's graph up to the outputs of followed models, and whether one of ``own`` is reached."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    reached = False
    while nodes:
        node = nodes.pop()
        if node in own:
            reached = True
        elif node is not None and node not in seen:
            seen.add(node)
            if node.name() not in _OUTPUT:
                nodes += [following for following, _ in node.next_functions]
    return seen, reached


@dataclass(frozen=True)
class _Replays:
    """The loss of a batch, run again with other outputs."""

    tape: Tape
    loss: Tensor
    gradient: Tensor | None  # given to backward()
    splits: list[Split]

    def differ(self) -> bool:
        """Whether gradients of rows that were kept change when outputs of other rows are replaced."""
        self.tape.check_complete(self.loss, self.gradient)
        outputs = self.tape.originals
        again, base = self._run(outputs)
        close = tolerance(self.loss)
        if not torch.allclose(again, self.loss.detach(), rtol=close, atol=1e-8, equal_nan=True):
            raise CannotReplay("the recorded operations do not give the same loss again")
        worst = self._worst(outputs, base)
        if 0 < worst <= 1 and any(t.dtype in (torch.float16, torch.bfloat16) for t in outputs):
            with suppress(CannotReplay):  # what half precision may hide; not every loss runs without
                outputs = [t.float() for t in outputs]
                worst = self._worst(outputs, self._run(outputs, autocast=False)[1], autocast=False)
        return worst > 1

    def factors_of_half(self, *, mean: bool) -> list[float | None]:
        """By which the gradient of an example's own loss changes when half of the batch is left out; 1.0: it does not.

        One for each reading of the numbers in the loss: those that are the number of rows count them; so do their
        multiples; none do. None where a reading cannot be run, and nothing at all where it cannot be seen.
        """
        outputs, rows, side = self.tape.originals, len(self.tape.originals[0]), self.splits[0].sides[0]
        whole = [g.index_select(0, side.to(g.device)) for g in self._run(outputs)[1]]
        found: list[float | None] = []
        for numbers, multiples in ((True, False), (True, True), (False, False)):
            only = SomeRows(rows, side, numbers=numbers, multiples=multiples)
            half = [t.index_select(0, side.to(t.device)) for t in outputs]
            try:
                _, grads = self.tape.replay(half, self.loss, None, only=only)
            except CannotReplay:
                found.append(None)
                continue
            factor = _common_factor(whole, grads)
            if factor is None:
                return []
            factor *= len(side) / rows if mean else 1.0
            found.append(1.0 if abs(factor - 1) < max(1e-2, 4 * tolerance(whole[0])) else factor)
        return found

    def _run(self, outputs: list[Tensor], *, autocast: bool = True) -> tuple[Tensor, list[Tensor]]:
        return self.tape.replay(outputs, self.loss, self.gradient, autocast=autocast)

    def _worst(self, outputs: list[Tensor], base: list[Tensor], *, autocast: bool = True) -> float:
        """The largest change of the gradient in rows that were kept, in units of what rounding may do.

        Other rows are replaced by rows of the batch, and by far larger values: a hinge between two examples is flat on
        either side. Those may lie outside the domain of the loss, so what fails or overflows there shows nothing. And
        by values that make the loss smaller, which may take it past a threshold.
        """
        worst = 0.0
        for kept, index in chain.from_iterable(split.replacements() for split in self.splits):
            changed = [t.index_select(0, index.to(t.device)) for t in outputs]
            worst = max(worst, _difference(base, self._run(changed, autocast=autocast)[1], kept))
            slopes = [*base, *map(torch.ones_like, outputs[len(base) :])]
            lower = [_far(t, kept, -1, torch.where(g < 0, -1, 1)) for t, g in zip(outputs, slopes, strict=True)]
            by = (1, -1, 100, -100)
            for far in (*([_far(t, kept, factor) for t in outputs] for factor in by), lower):
                try:
                    _, grads = self._run(far, autocast=autocast)
                except AnotherBranch:
                    raise
                except CannotReplay:
                    continue
                if all(bool(g[kept.to(g.device)].isfinite().all()) for g in grads):
                    worst = max(worst, _difference(base, grads, kept))
            if worst > 1:
                break
        if worst <= 1:
            return worst
        # Atomic additions on a GPU: twice the same is not the same.
        noise = _difference(base, self._run(outputs, autocast=autocast)[1], torch.arange(len(outputs[0])))
        return worst if worst > 8 * noise else 0.0


def _common_factor(a: list[Tensor], b: list[Tensor]) -> float | None:
    """The r with b = r a; None where there is none."""
    one, other = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (a, b))
    square = float(one @ one)
    if not square or not torch.isfinite(one).all() or not torch.isfinite(other).all():
        return None
    factor = float(one @ other) / square
    close = (other - factor * one).abs().max() <= 100 * tolerance(a[0]) * other.abs().max()
    return factor if factor and bool(close) else None


def _factor_refusal(factor: float, *, mean: bool) -> UnsupportedModelError:
    declared = "a mean" if mean else "a sum"
    return UnsupportedModelError(
        f"the loss was declared {declared} over the examples (loss_reduction={'mean' if mean else 'sum'!r}), but when "
        f"half of the batch is left out, the gradient of an example's own loss changes by a factor of {factor:.3g}: "
        f"its normaliser is not the number of examples. If it is a plain {'sum' if mean else 'mean'}, say so: "
        f"PrivacyEngine(loss_reduction={'sum' if mean else 'mean'!r}). If it is divided by something counted over the "
        "batch (labels, tokens, weights), one example changes the gradients of the others: average each example's own "
        "losses first, and then over the examples."
    )


def _difference(base: list[Tensor], other: list[Tensor], kept: Tensor) -> float:
    return max(largest_difference(a, b, kept) / tolerance(a) for a, b in zip(base, other, strict=True))


def _far(t: Tensor, kept: Tensor, factor: int, signs: Tensor | None = None) -> Tensor:
    """Large values of both signs in the rows that are not kept."""
    if signs is None:
        draw = torch.Generator().manual_seed(len(kept))  # the user's generators are left alone
        signs = torch.randint(0, 2, t.shape, generator=draw).to(t.device) * 2 - 1
    far = (factor * signs * (8 + 4 * t.abs())).to(t.dtype)
    kept = kept.to(t.device)
    far[kept] = t[kept]
    return far
