"""The pieces of a CUDA-graph step (cuda_graph.py): what each does on fixed buffers, and the graph of some of them.

Gathered   what the parts of a batch add up to
Part       forward and backward of a part
Finish     noise and update
Graph      pieces, captured one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gradveil.clipping import ClipStats
from gradveil.clipping.backends import cuda, graphs
from gradveil.clipping.backward_pass import Padding
from gradveil.engine.guards import fingerprint_sums
from gradveil.engine.step import PrivateStep, add_to_gradient
from gradveil.errors import ConfigError, PrivacyViolation
from gradveil.mechanism.noise.on_device import add_drawn_noise
from gradveil.mechanism.noise.streams import NoiseSource
from gradveil.mechanism.records import Release
from gradveil.mechanism.release import Measured

if TYPE_CHECKING:
    from gradveil.engine import PrivacyEngine

Loss = Callable[..., Tensor]
How = Literal["at once", "by itself", "again", "eagerly"]
"""A step finishes at once with its last part, in one graph; by itself after :meth:`Finish.look_at_batch`; again, as one
that was released before; or eagerly, without a graph."""

_RECAPTURES = 3  # of the update, when the optimizer's settings change; then it stays eager


class Gathered(ClipStats):
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

    def take_in(self, clip_stats: ClipStats, *, first: bool) -> None:
        """The norms of one part, where the strategy looks at them."""
        groups = range(len(self._largest))
        largest = torch.stack(
            [self.nothing if (n := clip_stats.largest_norm(g)) is None else n.float() for g in groups]
        )
        beyond = torch.stack([self.nothing.long() if (n := clip_stats.beyond(g)) is None else n for g in groups])
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


class Piece:
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


class Graph:
    """Pieces, captured one after the other. What they left in Python is then in the graph's own memory."""

    def __init__(self, pieces: Sequence[Piece], stamp: Any, pool: Any) -> None:
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


@contextmanager
def _captured_pass(engine: PrivacyEngine, padding: Padding) -> Iterator[Callable[[], ClipStats]]:
    """A pass of the model on padded rows, whose loss is a sum over all of them; gives its statistics.

    Its clipped sums go to ``.grad``, where the graph adds the noise before anything else runs. Those of a further
    part are added in place: a graph writes where the gradients were when it was captured.
    """
    clipper = engine._clipper
    if clipper is None:
        yield lambda: ClipStats(len(engine.groups))
        return

    def add_up() -> None:
        with torch.no_grad():
            for name, total in clipper.take_sums().items():
                add_to_gradient(engine.parameters[name], total)

    before = clipper.loss_reduction, clipper.on_end
    clipper.loss_reduction, clipper.padding, clipper.on_end = "sum", padding, add_up
    clipper.start_step()
    try:
        yield lambda: clipper.clip_stats
    finally:
        clipper.padding = None
        clipper.loss_reduction, clipper.on_end = before
        clipper.start_step()  # what was noted of this pass is in the graph's buffers, or nobody's


class Part(Piece):
    """Forward and backward of up to ``rows`` examples, each with its views."""

    def __init__(self, engine: PrivacyEngine, loss: Loss, rows: int, gathered: Gathered, *, adds: bool) -> None:
        self.engine, self.loss, self.rows, self.gathered = engine, loss, rows, gathered
        self.device = device = next(iter(engine.parameters.values())).device
        self.views = engine.settings.views
        self.adds = adds  # to the gradients that are there
        self._places = torch.arange(rows, device=device)
        self._padding = Padding(
            present=torch.zeros(rows, dtype=torch.bool, device=device),
            lost=torch.zeros(rows, dtype=torch.int32, device=device),
        )
        self._weights = torch.zeros(rows * self.views, device=device)  # of the losses: 1 where there is an example
        self._shown = 0
        self.total = torch.zeros((), device=device)  # of the losses
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
        count = x.shape[0]
        if count:
            full = count == self.rows * self.views
            (self._x if full else self._x[:count]).copy_(x, non_blocking=True)
            (self._y if full else self._y[:count]).copy_(y, non_blocking=True)
        if count != self._shown:
            torch.lt(self._places, count // self.views, out=self._padding.present)
            self._weights.view(self.rows, self.views).copy_(self._padding.present.unsqueeze(1))
            self._shown = count

    def work(self) -> None:
        engine = self.engine
        parameters = engine.parameters.values()
        if not self.adds:
            for parameter in parameters:
                parameter.grad = None
        with _captured_pass(engine, self._padding) as clip_stats:
            losses = self.loss(engine.module(self._x), self._y)
            if losses.shape != (self.rows * self.views,):
                raise ConfigError(
                    f"the loss gave shape {tuple(losses.shape)} for {self.rows * self.views} rows: a captured step "
                    "masks padding by example, so it needs one loss per example (reduction='none', averaged over "
                    "everything but the batch)."
                )
            losses.backward(gradient=self._weights.to(losses.dtype))
            if engine._private is not None and engine._private.looks_at_norms:
                self.gathered.take_in(clip_stats(), first=not self.adds)
        of_examples = losses.detach() if self.views == 1 else losses.detach().view(self.rows, self.views).mean(1)
        self.total = self.gathered.sum_up(of_examples, self._padding)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def results(self) -> Tensor:
        return self.total

    def set_results(self, results: Tensor) -> None:
        self.total = results


class Finish(Piece):
    """Noise and update."""

    def __init__(self, engine: PrivacyEngine, gathered: Gathered) -> None:
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
        self._how: How = "eagerly"  # the current step finishes
        self._sampler = ""
        self._noise: NoiseSource | None = None  # of the current step
        self._redone: Release | None = None
        self._measured: Measured | None = None  # of the current step

    @property
    def _step(self) -> PrivateStep:
        assert self.engine._private is not None
        return self.engine._private

    def prepare(self) -> How:
        """Before the last part: check the step, draw its noise and, where it is known, write its release down.

        The graph updates the weights, so its release is in the ledger before it runs: a run that is broken off in
        between has counted too much, never too little.
        """
        self._redone = self._measured = None  # of a step that was broken off
        self._how = self._prepared()
        return self._how

    def _prepared(self) -> How:
        engine, plan = self.engine, self.engine.plan
        self._note_settings()
        if engine.ranks.several:
            return "eagerly"  # gradients are added up over the ranks first
        if not plan.strategy.is_private:
            self._set_scale(1.0 / (max(self.gathered.examples, 1) * engine.settings.views))
            return "at once"
        if engine.rule.reads_gradients:
            return "eagerly"
        self._sampler = self._step.check(self.gathered)
        self._noise = self._step.fresh_noise()
        self._generator.manual_seed(self._noise.device_seed(self.device))
        self._draw.normal_(generator=self._generator)  # what torch.randn draws, with less of the host's time
        if plan.sensitivity_rule != "clip" or engine.rule.counts_norms:
            return "by itself"
        return "at once" if self._write_down(self._noise) else "again"

    def look_at_batch(self) -> bool:
        """After the last part: what the host reads of it, and the release. Whether the noise and update may follow."""
        return self._how == "by itself" and self._noise is not None and self._write_down(self._noise)

    def _write_down(self, noise: NoiseSource) -> bool:
        """The scale of the noise is set, and the release noted; False where it was released before."""
        engine, step = self.engine, self._step
        looked_at = engine.parameters.items() if engine.plan.sensitivity_rule == "l2max-batch" else ()
        grads = {name: p.grad for name, p in looked_at if p.grad is not None}
        self._measured = step.releaser.measure(step.index, grads, self.gathered, noise, sampler=self._sampler)
        self._set_stds(self._measured.scale.stds)
        if step.log.knows(step.index):
            self._redone = self._measured.release  # compared with what was released before, and only then used
            return False
        step.log.note(self._measured.release, digest_follows=step.key.seeded)
        step.count()
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
            self._release_eagerly()
            return
        if engine._private is not None:
            if self._digest is not None:
                self._step.log.give_digest(self._digest)
            self._learn()
        else:
            engine._loop.count_plain_step()
        if not self._updates():
            self._update()

    def _release_eagerly(self) -> None:
        """What has no graph: several ranks, or noise with a shape of its own."""
        parameters = self.engine.parameters
        sums = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        self._step.release(sums, self.gathered)
        self._update()

    def _update(self) -> None:
        """The optimizer's step, past the engine's hooks where a batch without privacy is whole already."""
        self.engine._in_update = True
        try:
            self.engine.optimizer.step()
        finally:
            self.engine._in_update = False

    def _learn(self) -> None:
        assert self._measured is not None
        self._step.releaser.learn(self._measured, {})
        self._step.prepare()

    def _redo(self, release: Release) -> None:
        """A step that was released before, noised as a graph does it: it must be the same bit for bit."""
        self._redone = None
        with torch.no_grad():
            self._add_noise(self._gradients(), float(self.engine.sampling.batch_size))
        try:
            checked = self._step.log.compared(release, self._gradients())
        except PrivacyViolation:
            for parameter in self.engine.parameters.values():
                parameter.grad = None
            raise
        self._step.log.note(checked)
        self._step.count()
        self._learn()
        self._update()

    def _gradients(self) -> list[Tensor]:
        """In the order of the noise."""
        names = (name for group in self.engine.groups for name in group.parameters)
        return [self.engine.parameters[name].grad for name in names]  # type: ignore[misc]

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
                if self._step.key.seeded:
                    self._digest = fingerprint_sums(grads)
            else:
                torch._foreach_mul_(grads, self._scale)
        if self._updates():
            self._update()

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
