"""The whole private step as CUDA graphs: forward, backward, clipping, noise and update, replayed without Python.

    step = gradveil.capture(engine, F.cross_entropy)          # a loss that takes reduction="none"
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
(adaclip) the step finishes eagerly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradveil.bounds import WhitenedBounds
from gradveil.clipping import Harvest
from gradveil.clipping.passes import Padding
from gradveil.errors import ConfigError
from gradveil.kernels import cuda, graphs
from gradveil.randomness import add_drawn_noise
from gradveil.records import Release, SideRelease
from gradveil.release import StepFacts, noise_scale, record

if TYPE_CHECKING:
    from gradveil.engine import PrivacyEngine

Loss = Callable[..., Tensor]

_ON = "cuda"
_WARM_UPS = 3  # eager rounds before a capture: libraries choose their algorithms, kernels are compiled
_RECAPTURES = 3  # of the update, when the optimizer's settings change; then it stays eager


def capture(engine: PrivacyEngine, loss: Loss, *, capacity: int | None = None) -> CapturedStep:
    """A step of a private run, captured as CUDA graphs at its first calls.

    loss       from (output, target) to one loss per example; one that takes ``reduction`` is called with "none"
    capacity   examples of the first graph (default: the batch size, and one standard deviation of its Poisson size)

    With several views of an example (see :class:`~gradveil.PrivacyEngine`) a batch and its losses have a row for each.
    The model must not look at values on the host (no ``.item()``), and its shapes must depend on those of the batch
    only. Call the result with each batch of the private loader, in place of zero_grad, backward and step.
    """
    return CapturedStep(engine, loss, capacity=capacity)


class CapturedStep:
    """What :func:`capture` returns: call it with a batch."""

    def __init__(self, engine: PrivacyEngine, loss: Loss, *, capacity: int | None = None) -> None:
        if engine.is_sharded:
            raise ConfigError("a model that fully_shard has cut over processes is not captured: train eagerly.")
        if engine.ranks.several and not engine.plan.strategy.is_private:
            raise ConfigError("plain training over several processes is not captured: train eagerly.")
        if not engine.is_set_up:
            raise ConfigError("the engine has no run yet: call make_private before gradveil.capture.")
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
        self._gathered = _Gathered(len(engine.groups), self.device)
        self._first = _Part(self, rows, self._gathered, adds=False)
        self._more = _Part(self, min(rows, _round_up(2.0 * spread)) or rows, self._gathered, adds=True)
        self._finish = _Finish(engine, self._gathered)
        self._graphs: dict[tuple[_Piece, ...], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._batch: tuple[int, int] | None = None  # of which loop and step there is a part in the gradients
        self._in_graph = False  # whether the gradients are those of a graph
        engine.count_lost_from(self._gathered.take_lost)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one batch (or physical part of one) through the model; the mean of its losses, on the device."""
        engine, views = self.engine, self.engine.views
        if len(x) != len(y):
            raise ConfigError(f"a batch of {len(x)} inputs has {len(y)} targets; give one for each example.")
        if len(x) % views:
            raise ConfigError(
                f"a batch of {len(x)} rows came, and views is {views}: an example has {views} rows, one after the "
                "other. Give all views of every example: torch.stack(views, dim=1).flatten(0, 1)."
            )
        count = len(x) // views
        ticket = engine.current_ticket
        last = ticket is None or ticket.last
        this = (engine.loops, engine.step)
        begun = self._batch == this
        self._batch = None if last else this
        self._gathered.examples = count + (self._gathered.examples if begun else 0)
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
        return _mean(totals, count) if totals else self._gathered.nothing.clone()

    def _go(self, pieces: tuple[_Piece, ...]) -> None:
        """Run these pieces: captured, where all of them have been run before and work on a graph's gradients."""
        fresh = pieces[0] is self._first
        if not (fresh or self._in_graph) or any(piece.rounds < _WARM_UPS for piece in pieces):
            self._in_graph = False
            self._eagerly(pieces)
            return
        self._in_graph = True
        graph = self._graphs.get(pieces)
        if graph is None or graph.stamp != self._finish.stamp:
            graph = self._graphs[pieces] = _Graph(pieces, self._finish.stamp, self._pool)
        graph.replay(self.engine.parameters.values() if fresh else ())

    def _eagerly(self, pieces: tuple[_Piece, ...]) -> None:
        side, here = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for piece in pieces:
                piece.work()
                piece.rounds += 1
        here.wait_stream(side)


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


class _Gathered(Harvest):
    """What the parts of a batch add up to, in buffers that graphs write to."""

    def __init__(self, groups: int, device: torch.device) -> None:
        super().__init__(groups)
        self._largest = torch.zeros(groups, device=device)
        self._beyond = torch.zeros(groups, dtype=torch.int64, device=device)
        self._lost = torch.zeros((), dtype=torch.int64, device=device)
        self.nothing = torch.zeros((), device=device)

    def sum_up(self, losses: Tensor, padding: Padding) -> Tensor:
        """The sum of one part's losses; its lost examples are counted."""
        if cuda.usable(losses):
            return cuda.sum_up(losses.contiguous(), padding.present, padding.lost, self._lost)
        self._lost.add_(padding.lost.sum())
        padding.lost.zero_()
        return torch.where(padding.present, losses, 0.0).sum()

    def take_in(self, harvest: Harvest, *, first: bool) -> None:
        """The norms of one part, where the strategy looks at them."""
        groups = range(len(self._largest))
        largest = torch.stack([self.nothing if (n := harvest.largest_norm(g)) is None else n.float() for g in groups])
        beyond = torch.stack([self.nothing.long() if (n := harvest.beyond(g)) is None else n for g in groups])
        self._largest.copy_(largest if first else torch.maximum(self._largest, largest))
        self._beyond.copy_(beyond if first else self._beyond + beyond)

    def largest(self, group: int) -> float:
        return float(self._largest[group])

    def largest_of_all(self) -> float:
        return float(self._largest.max())

    def counts_within(self) -> list[int]:
        return [self.examples - int(count) for count in self._beyond.tolist()]

    def take_lost(self) -> list[Tensor]:
        """The count of examples that were not finite since it was last taken."""
        count = self._lost.clone()
        self._lost.zero_()
        return [count]


class _Piece:
    """Some work on fixed buffers."""

    rounds = 0  # in which it was run eagerly

    def work(self) -> None:
        raise NotImplementedError

    def get_ready(self) -> None:
        """About to be captured."""

    def results(self) -> Any:
        """The tensors that the latest work has left, beside gradients."""
        return None

    def set_results(self, results: Any) -> None:
        """Those of a graph with this piece, which is about to be replayed."""


class _Graph:
    """Pieces, captured one after the other. What they left in Python is then in the graph's own memory."""

    def __init__(self, pieces: Sequence[_Piece], stamp: Any, pool: Any) -> None:
        self.stamp = stamp  # of the settings that are part of it
        self._pieces = pieces
        self._graph = torch.cuda.CUDAGraph()
        for piece in pieces:
            piece.get_ready()
        with graphs.capturing(self._graph, pool):
            for piece in pieces:
                piece.work()
        self._results = [piece.results() for piece in pieces]
        self._grads: list[Tensor | None] | None = None

    def replay(self, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters`` get the gradients that the graph writes, whatever was done to their ``.grad`` in between."""
        if self._grads is None:
            self._grads = [p.grad for p in parameters]
        else:
            for parameter, grad in zip(parameters, self._grads, strict=True):
                parameter.grad = grad
        for piece, results in zip(self._pieces, self._results, strict=True):
            piece.set_results(results)
        self._graph.replay()


class _Part(_Piece):
    """Forward and backward of up to ``rows`` examples, each with its views."""

    def __init__(self, step: CapturedStep, rows: int, gathered: _Gathered, *, adds: bool) -> None:
        self.step, self.rows, self.gathered, self.device = step, rows, gathered, step.device
        self.views = step.engine.views
        self.adds = adds  # to the gradients that are there
        self._places = torch.arange(rows, device=step.device)
        self._padding = Padding(
            present=torch.zeros(rows, dtype=torch.bool, device=step.device),
            lost=torch.zeros(rows, dtype=torch.int32, device=step.device),
        )
        self._weights = torch.zeros(rows * self.views, device=step.device)  # of the losses: 1 where there is an example
        self._shown = 0
        self.total = torch.zeros((), device=step.device)  # of the losses
        self._x: Tensor | None = None
        self._y: Tensor | None = None

    def load(self, x: Tensor, y: Tensor) -> None:
        """Examples into the buffers; the rows beyond them are padding."""
        if self._x is None or self._y is None:
            self._x = torch.zeros((self.rows * self.views, *x.shape[1:]), dtype=x.dtype, device=self.device)
            self._y = torch.zeros((self.rows * self.views, *y.shape[1:]), dtype=y.dtype, device=self.device)
        elif (self._x.shape[1:], self._x.dtype) != (x.shape[1:], x.dtype):
            raise ConfigError(
                f"a batch of shape {tuple(x.shape)} and type {x.dtype} came to a step captured for examples of shape "
                f"{tuple(self._x.shape[1:])} and type {self._x.dtype}: a graph has one shape. Train eagerly, or pad."
            )
        count = len(x)
        if count:
            (self._x if count == len(self._x) else self._x[:count]).copy_(x, non_blocking=True)
            (self._y if count == len(self._y) else self._y[:count]).copy_(y, non_blocking=True)
        if count != self._shown:
            torch.lt(self._places, count // self.views, out=self._padding.present)
            self._weights.view(self.rows, self.views).copy_(self._padding.present.unsqueeze(1))
            self._shown = count

    def work(self) -> None:
        engine, step = self.step.engine, self.step
        parameters = engine.parameters.values()
        if not self.adds:
            for parameter in parameters:
                parameter.grad = None
        with engine.captured_pass(self._padding) as harvest:
            losses = step.loss(engine.module(self._x), self._y)
            if losses.shape != (self.rows * self.views,):
                raise ConfigError(
                    f"the loss gave shape {tuple(losses.shape)} for {self.rows * self.views} rows: a captured step "
                    "masks padding by example, so it needs one loss per example (reduction='none', averaged over "
                    "everything but the batch)."
                )
            losses.backward(gradient=self._weights.to(losses.dtype))
        of_examples = losses.detach() if self.views == 1 else losses.detach().view(self.rows, self.views).mean(1)
        self.total = self.gathered.sum_up(of_examples, self._padding)
        if engine.looks_at_norms:
            self.gathered.take_in(harvest(), first=not self.adds)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def results(self) -> Tensor:
        return self.total

    def set_results(self, results: Tensor) -> None:
        self.total = results


class _Finish(_Piece):
    """Noise and update."""

    def __init__(self, engine: PrivacyEngine, gathered: _Gathered) -> None:
        self.engine, self.gathered = engine, gathered
        self.device = next(iter(engine.parameters.values())).device
        self.stamp: Any = None  # settings of the optimizer that are part of a graph
        self._generator = torch.Generator(device=self.device)
        self._draw = torch.empty(sum(p.numel() for p in engine.parameters.values()), device=self.device)
        self._scale = torch.zeros((), device=self.device)  # std of the noise, or 1 / rows where there is none
        self._set: float | None = None
        self._digest: Tensor | None = None
        self._table: tuple[Tensor, Tensor] | None = None  # where the gradients are: on the host, on the device
        self._own_table: Tensor | None = None  # of the graph about to be captured
        self._changes = 0
        self._how = "eagerly"  # the current step finishes: see prepare
        self._sampler = ""
        self._redone: Release | None = None
        self._learned_from: tuple[tuple[SideRelease, ...], float] | None = None  # side releases and sigma

    def prepare(self) -> str:
        """Before the last part: check the step, draw its noise and, where it is known, write its release down.

        The graph updates the weights, so its release is in the ledger before it runs: a run that is broken off in
        between has counted too much, never too little. How the step finishes:

            at once    with its last part, in one graph
            by itself  after :meth:`look_at_batch`
            again      as a step that was released before
            eagerly    without a graph
        """
        self._how = self._prepared()
        return self._how

    def _prepared(self) -> str:
        engine, plan = self.engine, self.engine.plan
        self._note_settings()
        if engine.ranks.several:
            return "eagerly"  # gradients are added up over the ranks first
        if not plan.strategy.is_private:
            self._set_scale(1.0 / (max(self.gathered.examples, 1) * engine.views))
            return "at once"
        if isinstance(engine.rule, WhitenedBounds):
            return "eagerly"
        self._sampler = engine.check_step(self.gathered)
        self._generator.manual_seed(engine.noise().device_seed(self.device))
        torch.randn(len(self._draw), device=self.device, generator=self._generator, out=self._draw)
        if plan.sensitivity_rule != "clip" or engine.rule.counts_norms:
            return "by itself"
        return "at once" if self._write_down() else "again"

    def look_at_batch(self) -> bool:
        """After the last part: what the host reads of it, and the release. Whether the noise and update may follow."""
        return self._how == "by itself" and self._write_down()

    def _write_down(self) -> bool:
        """The scale of the noise is set, and the release noted; False where it was released before."""
        engine, plan = self.engine, self.engine.plan
        rate, size = engine.sampling.rate, float(engine.sampling.batch_size)
        grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
        bounds = engine.rule.bounds(engine.step)
        scale = noise_scale(plan, engine.step, StepFacts(bounds, self.gathered, engine.groups, grads, size))
        side = engine.rule.side_releases(self.gathered, engine.noise())
        release = record(engine.step, plan, scale, side=side, sampler=self._sampler, sample_rate=rate, batch_size=size)
        self._set_stds(scale.stds)
        self._learned_from = (side, scale.sigma)
        if engine.book.knows(engine.step):
            self._redone = release  # compared with what was released before, and only then used
            return False
        engine.book.note(release, digest_follows=engine.is_seeded)
        return True

    def _set_stds(self, stds: Sequence[float]) -> None:
        """Of the noise of each group."""
        if len(set(stds)) == 1:
            self._set_scale(stds[0])
            return
        parameters, groups = self.engine.parameters, self.engine.groups
        sizes = [sum(parameters[name].numel() for name in group.parameters) for group in groups]
        torch._foreach_mul_(list(self._draw.split(sizes)), list(stds))
        self._set_scale(1.0)

    def conclude(self) -> None:
        """After the last part: make ready for the next step, and do what was not captured."""
        engine = self.engine
        if self._redone is not None:
            self._redo(self._redone)
            return
        if self._how == "eagerly":
            engine.release_gathered(self.gathered)
            engine.update()
            return
        if engine.plan.strategy.is_private:
            if self._digest is not None:
                engine.book.give_digest(self._digest)
            self._learn()
            engine.take_step(self.gathered)
        else:
            engine.count_plain_step()
        if not self._updates():
            engine.update()

    def _learn(self) -> None:
        assert self._learned_from is not None
        side, sigma = self._learned_from
        self.engine.rule.learn(side, {}, sigma, float(self.engine.sampling.batch_size))

    def _redo(self, release: Release) -> None:
        """A step that was released before, noised as a graph does it: it must be the same bit for bit."""
        self._redone = None
        with torch.no_grad():
            self._add_noise(self._gradients(), float(self.engine.sampling.batch_size))
        self.engine.book.note(self.engine.book.compared(release, self.engine.parameters.values()))
        self._learn()
        self.engine.take_step(self.gathered)
        self.engine.update()

    def _gradients(self) -> list[Tensor]:
        return [self.engine.parameters[name].grad for name in self.engine.noise_order]  # type: ignore[misc]

    def _set_scale(self, value: float) -> None:
        if value != self._set:
            self._scale.fill_(value)
            self._set = value

    def work(self) -> None:
        engine = self.engine
        grads = self._gradients()
        with torch.no_grad():
            if engine.plan.strategy.is_private:
                self._add_noise(grads, float(engine.sampling.batch_size))
                if engine.is_seeded:
                    self._digest = engine.digest_of_gradients()
            else:
                torch._foreach_mul_(grads, self._scale)
        if self._updates():
            engine.update()

    def _add_noise(self, grads: list[Tensor], size: float) -> None:
        if not cuda.usable(*grads) or not all(g.dtype == torch.float32 and g.is_contiguous() for g in grads):
            add_drawn_noise(grads, self._draw, self._scale, divide_by=size)
            return
        host = cuda.noise_table(grads)
        if torch.cuda.is_current_stream_capturing():
            assert self._own_table is not None
            self._table = (host, self._own_table)  # filled in when the graph is whole
        else:  # gradients of an eager round lie elsewhere: a graph's table stays as it is
            self._table = (host, host.to(self.device, non_blocking=True))
        cuda.add_noise(self._table[1], self._draw, self._scale, divide_by=size)

    def get_ready(self) -> None:
        # A new one, and not in the graph's memory, which it uses for other things before.
        if self._table is not None:
            self._own_table = torch.empty_like(self._table[1])

    def results(self) -> Any:
        if self._table is not None:
            self._table[1].copy_(self._table[0], non_blocking=True)
        return self._digest, self._table

    def set_results(self, results: Any) -> None:
        self._digest, self._table = results

    # ---- the optimizer: captured where it can be, and captured anew when its settings change

    def _updates(self) -> bool:
        groups = self.engine.optimizer.param_groups
        able = type(self.engine.optimizer) is torch.optim.SGD or all(group.get("capturable") for group in groups)
        return able and self._changes <= _RECAPTURES

    def _note_settings(self) -> None:
        """Settings such as the learning rate are part of a graph, unless they are tensors."""
        if self._changes > _RECAPTURES:
            return
        stamp = [
            [id(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"]
            for group in self.engine.optimizer.param_groups
        ]
        if stamp != self.stamp:
            self._changes += self.stamp is not None
            self.stamp = "eager" if self._changes > _RECAPTURES else stamp
