"""The whole private step as CUDA graphs: forward, backward, clipping, noise and update, replayed without Python.

    step = gradveil.cuda_graph_step(engine, F.cross_entropy)  # a loss that takes reduction="none"
    for x, y in loader:
        loss = step(x, y)                                     # in place of zero_grad, backward, optimizer.step

Small models leave a GPU waiting for Python; a captured step does not. What it computes is what the eager loop
computes, up to the order of sums: the same samples, the same noise, the same releases in the ledger.

Batches of different sizes (Poisson sampling) run in graphs of fixed size. Examples are copied into the graph's own
input; rows beyond them are padding: masked out of the loss, of the clipped sums, of the norms and of every count. A
batch larger than the first graph runs on through a second, smaller one, as often as needed; an empty one through
the first, masked entirely.

    first    forward and backward of the first part of a batch; its gradients are new
    more     forward and backward of a further part, added to the gradients
    finish   noise, and the optimizer's update where it can be captured

A graph is a sequence of these: (first, finish) is the whole step of a batch that fits. Each piece runs eagerly a few
times before a graph with it is captured. Where the release tells something of the batch itself (l2-max, quantile-clip,
dyn-private) the host reads it in between, and (finish) is a graph by itself; where noise has a shape of its own
(adaclip), or its scale follows the gradients that were released (dyn-adaptive), the step finishes eagerly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradveil.accounting.finite_precision import is_covered
from gradveil.engine.cuda_graph_pieces import Finish, Gathered, Graph, Loss, Part, Piece
from gradveil.engine.plain import HiddenGradients
from gradveil.errors import ConfigError

if TYPE_CHECKING:
    from gradveil.engine import PrivacyEngine

_ON = "cuda"
_WARM_UPS = 3  # eager rounds before a capture: libraries choose their algorithms, kernels are compiled


def cuda_graph_step(engine: PrivacyEngine, loss: Loss, *, capacity: int | None = None) -> CapturedStep:
    """The training step as CUDA graphs, captured at the first calls: same samples, noise and releases as eagerly.

    The model must not read values on the host (no ``.item()``), and its shapes must depend on the batch's only.

    Args:
        engine: An engine after ``make_private``, with its model on a GPU.
        loss: From (output, target) to one loss per example; one that takes ``reduction`` is called with "none". With
            ``views=K`` it gets, and returns, K rows per example.
        capacity: Examples in the first graph. By default the batch size plus one standard deviation of its Poisson
            size.

    Returns:
        A function of a batch of the private loader, to be called instead of zero_grad, backward and step.

    Raises:
        ConfigError: The run cannot be captured: no GPU, a sharded model, or plain training on several processes.
    """
    return CapturedStep(engine, loss, capacity=capacity)


class CapturedStep:
    """What :func:`cuda_graph_step` returns: call it with a batch."""

    def __init__(self, engine: PrivacyEngine, loss: Loss, *, capacity: int | None = None) -> None:
        if not engine.is_set_up:
            raise ConfigError("the engine has no run yet: call make_private before gradveil.cuda_graph_step.")
        if engine._sharded:
            raise ConfigError("a model that fully_shard has cut over processes is not captured: train eagerly.")
        if engine.ranks.several and not engine.plan.strategy.is_private:
            raise ConfigError("plain training over several processes is not captured: train eagerly.")
        if is_covered(engine.header):
            raise ConfigError(
                "noise='lattice' is drawn on the CPU, which a CUDA graph cannot do. Train eagerly (backward() and "
                "optimizer.step()), or take noise='float'."
            )
        self.engine, self.loss = engine, _per_example(loss)
        self.device = next(iter(engine.parameters.values())).device
        if self.device.type != _ON:
            raise ConfigError(
                f"the model is on {self.device}: a captured step is a CUDA graph. Move the model to a GPU before "
                "make_private, or train eagerly (backward() and optimizer.step())."
            )
        if capacity is not None and capacity < 1:
            raise ConfigError(f"capacity is {capacity}; it is the number of rows of the graph, at least 1.")
        size, rate = engine.sampling.batch_size, engine.sampling.rate
        spread = math.sqrt(size * (1.0 - rate)) if engine.sampling.name == "poisson" else 0.0
        rows = capacity if capacity is not None else _round_up(size + spread) if spread else size
        self._gathered = Gathered(len(engine.groups), self.device)
        self._first = Part(engine, self.loss, rows, self._gathered, adds=False)
        self._more = Part(engine, self.loss, min(rows, _round_up(2.0 * spread)) or rows, self._gathered, adds=True)
        self._finish = Finish(engine, self._gathered)
        self._graphs: dict[tuple[Piece, ...], Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._batch: tuple[int, int] | None = None  # of which loop and step there is a part in the gradients
        self._in_graph = False  # whether the gradients are those of a graph
        self._hidden = HiddenGradients()  # between the parts of a batch: sums without noise
        _take_steps_of(engine, self._gathered)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one batch (or physical part of one) through the model; the mean of its losses, on the device."""
        given, views = x.shape[0], self.engine.settings.views
        if given != y.shape[0]:
            raise ConfigError(f"a batch of {given} inputs has {y.shape[0]} targets; give one for each example.")
        if given % views:
            raise ConfigError(
                f"a batch of {given} rows came, and views is {views}: an example has {views} rows, one after the "
                "other. Give all views of every example: torch.stack(views, dim=1).flatten(0, 1)."
            )
        self._check_independence(x, y)
        try:
            return self._take(x, y, given // views)
        except BaseException:
            self._give_up()
            raise

    def _take(self, x: Tensor, y: Tensor, count: int) -> Tensor:
        engine, views = self.engine, self.engine.settings.views
        ticket = engine._batches.ticket
        last = ticket is None or ticket.last
        this = (engine._batches.loop, engine.step)
        begun = self._batch == this
        self._hidden.show()
        self._batch = None if last else this
        self._gathered.examples = count + (self._gathered.examples if begun else 0)
        if engine._private is not None:
            engine._batches.count(self._gathered.examples)
        finishing = last and self._finish.prepare() == "at once"
        totals: list[Tensor] = []
        start = 0
        while start < count or not begun:
            part = self._more if begun else self._first
            stop = min(start + part.rows, count)
            whole = stop - start == count
            rows = slice(start * views, stop * views)
            part.load(x if whole else x[rows], y if whole else y[rows])
            self._go((part, self._finish) if finishing and stop == count else (part,))
            totals.append(part.total if whole else part.total.clone())  # the next part may overwrite it
            start, begun = stop, True
        # After an empty last part of a batch that came in parts, or when the batch was looked at.
        if (finishing and not totals) or (last and not finishing and self._finish.look_at_batch()):
            self._go((self._finish,))
        if last:
            self._finish.conclude()
        else:
            self._hidden.hide(list(engine.parameters.values()))
        return _mean(totals, count) if totals else self._gathered.nothing.clone()

    def _give_up(self) -> None:
        """A step that was refused or broken off: what stands in ``.grad`` may lack its noise."""
        self._batch, self._in_graph = None, False
        self.engine._batches.give_up()
        self._hidden = HiddenGradients()
        for parameter in self.engine.parameters.values():
            parameter.grad = None
        if self.engine._private is not None:
            self.engine._private.prepare()

    def _check_independence(self, x: Tensor, y: Tensor) -> None:
        """Of the first batches, and of some that cannot be foreseen: as :meth:`PrivacyEngine.run_step` does it."""
        engine, views = self.engine, self.engine.settings.views
        clipper, examples = engine._clipper, x.shape[0] // views
        if clipper is None or engine.ranks.several or examples < 2:
            return

        def gradients(batch: Sequence[Tensor]) -> None:
            rows, targets = (t.flatten(0, 1).to(self.device) for t in batch)
            losses = self.loss(engine.module(rows), targets)
            (losses.mean() if engine.settings.loss_reduction == "mean" else losses.sum()).backward()

        batch = [t.unflatten(0, (examples, views)) for t in (x, y)]
        clipper.checks.whole_step(lambda some: clipper.rehearse(lambda: gradients(some)), batch, examples)
        clipper.checks.backward_ended()  # a graph does not say when its backward pass ends

    def _go(self, pieces: tuple[Piece, ...]) -> None:
        """Run these pieces: captured, where all of them have been run before and work on a graph's gradients."""
        fresh = pieces[0] is self._first
        if not (fresh or self._in_graph) or any(piece.rounds < _WARM_UPS for piece in pieces):
            self._in_graph = False
            self._eagerly(pieces)
            return
        self._in_graph = True
        graph = self._graphs.get(pieces)
        if graph is None or graph.stamp != self._finish.stamp:
            graph = self._graphs[pieces] = Graph(pieces, self._finish.stamp, self._pool)
        graph.replay(self.engine.parameters.values() if fresh else ())

    def _eagerly(self, pieces: tuple[Piece, ...]) -> None:
        side, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for piece in pieces:
                piece.work()
                piece.rounds += 1
        here.wait_stream(side)


def _take_steps_of(engine: PrivacyEngine, gathered: Gathered) -> None:
    """From here on the engine's steps run in CUDA graphs, which count examples that are not finite on the GPU."""
    if engine._recorder is not None and engine._recorder.left:
        raise ConfigError(
            "record_gradients has steps left to record, and a CUDA-graph step updates the weights in the graph that "
            "makes the release: there is no moment to record it. Train eagerly until they are recorded."
        )
    engine._in_graphs = True
    if engine._private is not None:
        engine._private.not_finite.elsewhere = gathered.take_lost


def _per_example(loss: Loss) -> Loss:
    try:
        names = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return loss
    if "reduction" in names:
        return lambda output, target: loss(output, target, reduction="none")
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "none") != "none":
        raise ConfigError(
            f"{type(loss).__name__} averages over the batch: a captured step needs one loss per example. Make it with "
            "reduction='none'."
        )
    return loss


def _mean(totals: Sequence[Tensor], count: int) -> Tensor:
    total = totals[0] if len(totals) == 1 else torch.stack(list(totals)).sum()
    return total / max(count, 1)  # a tensor of its own: the graph's is overwritten by its next replay


def _round_up(rows: float) -> int:
    return 8 * math.ceil(rows / 8.0)
