"""PrivacyEngine: puts sampling, clipping, noise, ledger and accounting around a user's own loop.

    engine = gradveil.PrivacyEngine(strategy="dyn-s-decay", clip=4.0, sigma=6.0, steps=1000, delta=1e-5)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()   # .grad is the sum of clipped per-example gradients
        optimizer.step()                          # noise, ledger, update; refuses before it overspends
    print(engine.statement())

The model and the optimizer that come back are the ones that went in: same objects, same classes, same
state_dict keys. :meth:`PrivacyEngine.detach` takes every trace of the engine off again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradveil import bounds as bound_rules
from gradveil import joining
from gradveil import ledger as ledgers
from gradveil import ranks as processes
from gradveil.book import Book
from gradveil.clipping import Clipper, Clipping, Group, Harvest, make_groups, sharding
from gradveil.clipping.passes import Padding
from gradveil.clipping.taps import Followed, ModelHook
from gradveil.errors import (
    BudgetExhausted,
    ConfigError,
    PrivacyViolation,
    RunDirectoryError,
    UnknownNameError,
)
from gradveil.guards import (
    BatchGuard,
    BudgetGuard,
    NotFiniteCount,
    check_optimizer,
    check_strangers,
    fingerprint,
    fingerprint_sums,
    salt,
)
from gradveil.ledger import Ledger
from gradveil.parts import PhysicalParts
from gradveil.randomness import NoiseSource, SecretKey
from gradveil.records import Release, RunHeader
from gradveil.release import release_gradients
from gradveil.sampling import Indices, PrivateLoader, Sampling, Ticket, source_of
from gradveil.schedules import Schedule
from gradveil.strategies import Parameters, Strategy, parameters
from gradveil.updates import PlainSGD, PutAside, Steps
from gradveil.version import __version__

if TYPE_CHECKING:
    from gradveil.accounting import Statement
    from gradveil.recording import Recorder

LOSS_REDUCTIONS = ("mean", "sum")
STOPPINGS = ("none", "public", "private")

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class PrivacyEngine:
    """Trains a model under one strategy and records every release.

    Its settings::

        strategy        a name (``gradveil strategies`` lists them) or a :class:`gradveil.Strategy`
        clip, sigma     starting values C_0 and sigma_0, or whole schedules
        steps           the number of steps the run declares; the schedules span them
        delta           must be below 1/N
        sampling        poisson (default), without-replacement, with-replacement; shuffle needs allow_unproved
        clipping        per-layer (default), flat, or a mapping of group names to parameter names
        reading         of the l2-max strategies: "example" (default, the paper's text) or "batch"
        decay, *_decay, *_end   shape and end value of what decays (see :func:`gradveil.strategies.parameters`)
        fixed_variance  sigma_t = varsigma / S_t with varsigma = sigma_0 C_0
        options         settings of the strategy's own rule (quantile, learning_rate, count_noise; beta1, ...)
        loss_reduction  what the user's loss does over the batch: "mean" or "sum"
        views           rows of one example, such as augmentations of an image; see below
        budget          the largest proved epsilon to spend: the step that would exceed it is refused; where nothing
                        is proved, with allow_unproved, the largest published one (MA), which guarantees nothing
        run_dir         where the ledger is kept; must not hold one already, unless ``resume``
        seed            makes the run repeatable; whoever knows it can take the noise off
        stopping        declares early stopping: "private" charges all declared steps, "public" only those taken

    With ``views=K`` an example of the batch has K rows, one after the other (rows i K to i K + K - 1 are those of
    example i); its gradient is the mean over them, and is clipped once. What one example can do, and what is spent, is
    the same for any K. The loss is a mean, or a sum, over all rows::

        rows = torch.stack([x, x.flip(-1)], dim=1).flatten(0, 1)   # not torch.cat: it would mix examples
        F.cross_entropy(model(rows), y.repeat_interleave(2)).backward()
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy = "baseline",
        clip: float | Schedule | None = None,
        sigma: float | Schedule | None = None,
        steps: int,
        delta: float = 1e-5,
        sampling: str = "poisson",
        clipping: Clipping = "per-layer",
        reading: str | None = None,
        decay: str | None = None,
        clip_decay: str | None = None,
        clip_end: float | None = None,
        sigma_decay: str | None = None,
        sigma_end: float | None = None,
        fixed_variance: bool = False,
        options: Mapping[str, Any] | None = None,
        loss_reduction: str = "mean",
        views: int = 1,
        budget: float | None = None,
        allow_unproved: bool = False,
        stopping: str = "none",
        run_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        seed: int | None = None,
    ) -> None:
        self.plan: Parameters = parameters(
            strategy,
            steps=steps,
            clip=clip,
            sigma=sigma,
            reading=reading,
            decay=decay,
            clip_decay=clip_decay,
            clip_end=clip_end,
            sigma_decay=sigma_decay,
            sigma_end=sigma_end,
            fixed_variance=fixed_variance,
        )
        if not (isinstance(delta, float | int) and 0 < delta < 1):
            raise ConfigError(f"delta is {delta!r}. It is a probability: give a number in (0, 1), below 1/N.")
        if loss_reduction not in LOSS_REDUCTIONS:
            raise UnknownNameError("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        if not isinstance(views, int) or isinstance(views, bool) or views < 1:
            raise ConfigError(
                f"views is {views!r}. It is the number of rows that each example has in the model's input, and their "
                "gradients are averaged: give a whole number of at least 1."
            )
        if stopping not in STOPPINGS:
            raise UnknownNameError("stopping", stopping, STOPPINGS)
        if budget is not None and not (isinstance(budget, float | int) and budget > 0 and math.isfinite(budget)):
            raise ConfigError(f"budget is {budget!r}. It is the largest epsilon to spend: give a positive number.")
        private = self.plan.strategy.is_private
        if private and sampling == "shuffle" and not allow_unproved:
            raise ConfigError(
                "sampling is 'shuffle': the amplification by sampling that the accounting rests on does not hold for "
                "shuffled batches, so no epsilon would be proved. Use sampling='poisson', or ask for it explicitly "
                "with allow_unproved=True (the statement will then say that nothing is proved)."
            )
        unproved = self._unproved(sampling, self.plan)
        if budget is not None and (not private or (unproved and not allow_unproved)):
            raise ConfigError(
                f"budget={budget} was given, but strategy {self.plan.strategy.name!r} with {sampling} sampling has no "
                "proved epsilon that could be held to it. Choose a proved strategy, or leave the budget out"
                + ("; with allow_unproved=True the run is held to the published (MA) epsilon." if private else ".")
            )
        self.delta, self.loss_reduction, self.budget = float(delta), loss_reduction, budget
        self.stopping, self.allow_unproved, self.views = stopping, allow_unproved, views
        self.clipping, self.options = clipping, dict(options or {})
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.step = 0
        self._sampling_name, self._resume = sampling, resume
        self._key = SecretKey(seed)
        self.ranks = processes.current()
        self._handles: list[Any] = []
        self._clipper: Clipper | None = None
        self._book: Book | None = None
        self._parts, self._put_aside = PhysicalParts(), PutAside()
        self._not_finite = NotFiniteCount()
        self._noised_already = False
        self._sharded = False
        self._recorder: Recorder | None = None
        self._in_graphs = False  # whether a captured step was made (captured.py)
        self.loops = 0  # over the loader
        self._generators: dict[torch.device, torch.Generator] = {}
        exists = self.run_dir is not None and self.ranks.is_first and (self.run_dir / ledgers.FILE_NAME).exists()
        if exists and not resume:
            raise RunDirectoryError(
                f"{self.run_dir} holds a ledger already: a run directory belongs to one run, and a ledger is never "
                "overwritten. Give another run_dir, or resume that run."
            )

    @staticmethod
    def _unproved(sampling: str, plan: Parameters) -> bool:
        if sampling == "shuffle":
            return True
        return plan.strategy.guarantee != "proved" and not plan.fixed_variance

    # ---- setting up

    def make_private(
        self,
        *,
        module: M,
        optimizer: O,
        data_loader: DataLoader[Any] | Dataset[Any],
        batch_size: int | None = None,
        physical_batch_size: int | None = None,
    ) -> tuple[M, O, PrivateLoader]:
        """The same module and optimizer, now private, and a loader that draws the batches.

        From a DataLoader, the batch size is its own and its sampler is replaced; from a Dataset, give
        ``batch_size``. A logical batch larger than ``physical_batch_size`` comes in parts; call zero_grad,
        backward and step for each part as usual, the update happens at the last, with the same result.
        """
        if self._book is not None:
            raise ConfigError("make_private was called already: one engine is one run. Make a new PrivacyEngine.")
        inner = processes.unwrapped(module)
        source = source_of(data_loader, batch_size)
        size = source.batch_size
        if any(isinstance(vars(child).get("forward"), Followed) for child in inner.modules()):
            raise ConfigError(
                "this model is private already, under another engine. Call detach() on that engine first."
            )
        population = source.population
        self.sampling = Sampling(name=self._sampling_name, population=population, batch_size=size)
        if self.plan.strategy.is_private and self.delta >= 1.0 / population:
            raise ConfigError(
                f"delta is {self.delta:g}, not below 1/N = {1 / population:.3g} for {population} training examples: a "
                "mechanism that publishes one example outright would pass. Give a smaller delta."
            )
        if self.plan.strategy.is_private:
            check_optimizer(inner, optimizer)
        self.module, self.optimizer, self.physical_batch_size = inner, optimizer, physical_batch_size
        self._sharded = joining.is_cut(inner, self.plan.strategy)
        if self.ranks.several:
            self._join(module)
        self.groups: tuple[Group, ...] = make_groups(inner, self.clipping)
        self.parameters: dict[str, nn.Parameter] = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self._in_noise_order = {name: self.parameters[name] for name in self.noise_order}
        self._sgd = PlainSGD(optimizer, list(self._in_noise_order.values()))
        self._followed = frozenset(map(id, self.parameters.values()))
        if self.plan.strategy.is_private:
            self.rule = bound_rules.make_rule(
                self.plan,
                self.groups,
                parameters={n: p.detach() for n, p in self.parameters.items()},
                batch_size=float(size),
                options=self.options,
            )
            self._clipper = Clipper(
                inner,
                self.groups,
                bounds=self.rule.bounds(0),
                loss_reduction=self.loss_reduction,
                views=self.views,
            )
            self._clipper.weighing.whitening, self._clipper.weighing.gamma = self.rule.whitening, self.rule.gamma
            if self._sharded:
                self._clipper.deliver, self._clipper.agree = joining.deliver_shard, self.ranks.all_agree
        self._open_book()
        self._batch = BatchGuard(self.sampling.name)
        self._handles += [
            optimizer.register_step_pre_hook(ModelHook(self._before_step)),
            optimizer.register_step_post_hook(ModelHook(self._after_step)),
            inner.register_state_dict_pre_hook(ModelHook(lambda *_: self.commit(), before_copy=self.commit)),
        ]
        loader = PrivateLoader(
            dataset=source.dataset,
            batch_size=size,
            draw=self._draw,
            span=lambda: range(self.step, self.plan.steps),
            physical_batch_size=physical_batch_size,
            start=self._start_iteration,
            finish=self.commit,
            hand_out=self._batch.hand_out,
            like=source.like,
            parts=self._equal_parts if self._sharded else None,
        )
        return module, optimizer, loader

    def _equal_parts(self, here: int) -> int:
        """Parts of a batch: as many on every rank, for the ranks call a model that is cut together."""
        return int(self.ranks.highest([here], torch.empty(0))[0])

    def _join(self, given: nn.Module) -> None:
        """Where there are several ranks: the same key on all, and the model one of several."""
        if not self._key.seeded:
            self._key = self._key.told(self.ranks.from_first)
        self.ranks.check_same("the seed", self._key.device_seed("same on all ranks").__repr__())
        self._handles += joining.join(given, self.ranks)

    def _header(self, side: float) -> RunHeader:
        return RunHeader(
            strategy=self.plan.strategy.name,
            guarantee=self.plan.strategy.guarantee,
            groups=tuple(g.name for g in self.groups),
            population=self.sampling.population,
            sampling=self.sampling.name,
            sample_rate=self.sampling.rate,
            expected_batch_size=float(self.sampling.batch_size),
            steps=self.plan.steps,
            delta=self.delta,
            seeded=self._key.seeded,
            plan=self.plan.to_plan()
            | {"side_inverse_square": side, "group_sizes": self._group_sizes()}
            | self._several_views(),
            salt=self._salt(),
            stopping=self.stopping,
            gradveil_version=__version__,
        )

    def _several_views(self) -> dict[str, int]:
        """Said where there are several: what a run with one writes stays what it was."""
        return {"views": self.views} if self.views > 1 else {}

    def _group_sizes(self) -> list[int]:
        return [sum(self.parameters[n].numel() for n in group.parameters) for group in self.groups]

    def _salt(self) -> str:
        settings = {
            "strategy": self.plan.strategy.name,
            "plan": self.plan.to_plan(),
            "steps": self.plan.steps,
            "groups": [(g.name, g.parameters) for g in self.groups],
            "sampling": [self.sampling.name, self.sampling.population, self.sampling.batch_size],
            "options": self.options,
            "loss_reduction": self.loss_reduction,
            **self._several_views(),
        }
        return salt(settings, self.parameters.values(), self.optimizer)

    def _open_book(self) -> None:
        side = self.rule.side_inverse_square if self.plan.strategy.is_private else 0.0
        published = self._unproved(self.sampling.name, self.plan)
        self._book = Book.open(
            self._header(side),
            self.run_dir,
            resume=self._resume,
            ranks=self.ranks,
            budget=BudgetGuard(self.budget, self.plan, len(self.groups), side, published=published),
            digest=partial(_digest, self.ranks if self._sharded else None),
            seeded=self._key.seeded,
        )
        self._run_key = self._key.bound_to(self._book.ledger.header.salt)

    # ---- the loop

    def _draw(self, step: int) -> Indices:
        if self.ranks.several:
            return self.sampling.draw(self._run_key, step, self.ranks.share(self.sampling.population))
        indices = self.sampling.draw(self._run_key, step)
        again = 0
        while not len(indices) and not self.plan.strategy.is_private:
            again += 1  # plain training has nothing to do with an empty batch, and nothing to hide: draw another
            indices = self.sampling.draw(self._run_key, step + again * (1 << 40))
        return indices

    def _start_iteration(self) -> None:
        """A new loop over the loader starts clean: nothing of an abandoned batch may enter the next release."""
        self.loops += 1
        self._batch.clear()
        self._parts.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._clipper is not None:
            self._clipper.start_step()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._noised_already:
            return
        if kwargs.get("closure") is not None or any(a is not None and a is not optimizer for a in args):
            raise PrivacyViolation(
                "optimizer.step was called with a closure, which computes gradients anew after the noise was added: "
                "they would be used without noise. Call backward() first and step() without arguments."
            )
        self._check_strangers()
        if self._batch.ticket is not None and not self._batch.ticket.last:
            self._put_aside_part()
            return
        if self.plan.strategy.is_private:
            self._release()
        else:
            self._average_parts()
            self.count_plain_step()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._put_aside.put_back()

    def _check_strangers(self) -> None:
        if self.plan.strategy.is_private:
            check_strangers(self._followed, self.optimizer)

    def _put_aside_part(self) -> None:
        """A physical part of a batch: keep its sums, and leave the optimizer nothing to update with."""
        if self._clipper is not None:
            self._clipper.check_untouched()
        assert self._batch.ticket is not None
        # Without clipping, .grad is that of the user's loss: the mean of parts weighs each by its size.
        weighs = not self.plan.strategy.is_private and self.loss_reduction == "mean"
        weight = float(self._batch.ticket.size) if weighs else 1.0
        if not weight:  # the mean loss of no example is not a number, and its gradient nothing to keep
            for parameter in self.parameters.values():
                parameter.grad = None
        self._parts.put_aside(self.parameters.values(), weight=weight)

    def _average_parts(self) -> None:
        """Of plain training: the gradient of the mean loss over the whole batch, its parts and ranks."""
        if not (self._parts or self.ranks.several):
            return
        if self._batch.ticket is None:
            raise ConfigError(
                "over several processes a batch must come from the loader that make_private returned: it says how many "
                "examples each process has."
            )
        self._put_aside_part()
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if self.ranks.several else None
        self._parts.take_up()
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        self.ranks.add_up(grads)
        if self.loss_reduction == "mean":
            (drawn,) = self.ranks.total([self._batch.ticket.drawn], next(iter(self.parameters.values())))
            torch._foreach_div_(grads, max(drawn, 1.0))

    def _release(self) -> None:
        """Noise on the gradients, and its record."""
        assert self._clipper is not None
        self._clipper.check_untouched()
        self._noise_and_record(self._clipper.harvest, inside_step=True)

    def _noise_and_record(self, harvest: Harvest, *, inside_step: bool = False) -> None:
        """``inside_step``: of the optimizer, which may then be taken with the noise."""
        sampler = self.check_step(harvest)
        self._parts.take_up()
        steps = self._plain_steps() if inside_step else None
        release = release_gradients(
            step=self.step,
            plan=self.plan,
            rule=self.rule,
            groups=self.groups,
            parameters=self._in_noise_order,
            harvest=self._of_all_ranks(harvest),
            noise=self.noise(),
            sampler=sampler,
            sample_rate=self.sampling.rate,
            batch_size=float(self.sampling.batch_size),
            ranks=self.ranks,
            before=None if self.is_seeded else self.book.note,
            steps=steps,
        )
        if self.is_seeded:
            self.book.note(self.book.compared(release, self.parameters.values()))
        if steps is not None and steps.taken:
            self._put_aside.take(steps.parameters)
        if self._clipper is not None:
            self._clipper.start_step()
        self.take_step(harvest)

    def _plain_steps(self) -> Steps | None:
        """The optimizer's step, where it can be taken as the noise is added.

        Not in a seeded run: its release must be seen, and may have to be withheld, before anything is made of it.
        """
        if self.is_seeded or self.ranks.several or self._sharded or self.rule.whitening is not None:
            return None
        return self._sgd.steps()

    def _of_all_ranks(self, harvest: Harvest) -> Harvest:
        if not self.looks_at_norms:
            return harvest
        return self.ranks.combined(harvest, len(self.groups), next(iter(self.parameters.values())))

    def noise(self) -> NoiseSource:
        """The noise of the current step."""
        return NoiseSource(self._run_key, self.step, generators=self._generators)

    def check_step(self, harvest: Harvest) -> str:
        """Refuse a step that the run may not take; the sampler to record."""
        if self.step >= self.plan.steps:
            raise BudgetExhausted(
                f"the run declared {self.plan.steps} steps and has taken them: schedules and accounting end there. "
                "Declare more steps from the start."
            )
        sampler = self._batch.check(harvest)
        self._check_views(harvest)
        self.book.check_budget(self.step, sampler)
        return sampler

    def _check_views(self, harvest: Harvest) -> None:
        """Where rows were left out, those of two examples may have been averaged: neither is bounded then."""
        ticket = self._batch.ticket
        if self.views > 1 and ticket is not None and harvest.examples != ticket.drawn:
            raise PrivacyViolation(
                f"{harvest.examples * self.views} rows went through backward() in this step, but the batch has "
                f"{ticket.drawn} examples with {self.views} views each. Rows of different examples would be averaged "
                f"as if they were one. Give the model all {ticket.drawn * self.views} rows: "
                "torch.stack(views, dim=1).flatten(0, 1)."
            )

    def take_step(self, harvest: Harvest) -> None:
        """The step's release is noted: make ready for the next."""
        assert self._clipper is not None
        self._not_finite.note(harvest.lost, step=self.step)
        self.step += 1
        self._batch.clear()
        self._clipper.weighing.whitening = self.rule.whitening
        if self.step < self.plan.steps:
            self._clipper.weighing.bounds = self.rule.bounds(self.step)

    @property
    def not_finite_examples(self) -> int:
        """How many examples had a gradient that is not finite and counted as zero, over all steps."""
        return self._not_finite.read(self.step)

    def capture(self, path: str | os.PathLike[str], *, steps: int | Iterable[int] = 1, view: str = "batch") -> Recorder:
        """Record what an adversary would see of coming steps, in a folder that only the owner can read.

        steps   how many of the next ones, or which
        view    "batch", what is released; "per-example", "per-example-noised" with physical_batch_size=1

        The gradient, the weights it was taken at and what is public of its release; never the batch. Training and
        ledger are the same bit for bit. ``gradveil attack --captured`` reads it; see recording.py.
        (``gradveil.capture`` is something else: a step as CUDA graphs, which cannot be recorded.)
        """
        from gradveil.recording import Recorder

        if self._in_graphs:
            raise ConfigError(
                "this engine's steps run in CUDA graphs (gradveil.capture), which update the weights as they make the "
                "release: there is no moment to record it. Record from an eager loop."
            )
        if self._recorder is not None and self._recorder.left:
            raise ConfigError(
                f"engine.capture is recording to {self._recorder.path}: wait for its steps, or stop() it."
            )
        self._recorder = Recorder(self, path, steps=steps, view=view)
        self._handles += self._recorder.attach()
        return self._recorder

    # ---- for a captured step (captured.py)

    @property
    def is_set_up(self) -> bool:
        """Whether make_private was called."""
        return self._book is not None

    @property
    def is_sharded(self) -> bool:
        """Whether the model's parameters are cut over processes."""
        return self._sharded

    @property
    def is_seeded(self) -> bool:
        return self._run_key.seeded

    @property
    def current_ticket(self) -> Ticket | None:
        """Which batch the loader has handed out."""
        return self._batch.ticket

    def count_lost_from(self, kept: Callable[[], list[Tensor]]) -> None:
        """Counts of examples that are not finite, kept on a GPU by a captured step."""
        if self._recorder is not None and self._recorder.left:
            raise ConfigError(
                "engine.capture has steps left to record, and a captured step updates the weights in the graph that "
                "makes the release: there is no moment to record it. Train eagerly until they are recorded."
            )
        self._not_finite.elsewhere, self._in_graphs = kept, True

    @property
    def noise_order(self) -> list[str]:
        """The parameters in the order in which they get their noise."""
        return [name for group in self.groups for name in group.parameters]

    @property
    def looks_at_norms(self) -> bool:
        """Whether the release depends on the norms of the batch's examples."""
        if not self.plan.strategy.is_private:
            return False
        return self.plan.sensitivity_rule == "l2max-example" or self.rule.counts_norms

    @contextmanager
    def captured_pass(self, padding: Padding) -> Iterator[Callable[[], Harvest]]:
        """A pass of the model on padded rows, whose loss is a sum over all of them; gives its harvest."""
        clipper = self._clipper
        if clipper is None:
            yield lambda: Harvest(len(self.groups))
            return
        before, clipper.loss_reduction, clipper.padding = clipper.loss_reduction, "sum", padding
        clipper.start_step()
        try:
            yield lambda: clipper.harvest
        finally:
            clipper.loss_reduction, clipper.padding = before, None
            clipper.start_step()  # what was noted of this pass is in the graph's buffers, or nobody's

    def release_gathered(self, harvest: Harvest) -> None:
        """Noise on gradients that a captured pass has left, and its record."""
        self._noise_and_record(harvest)

    def count_plain_step(self) -> None:
        """A step without privacy was taken."""
        self.step += 1
        self._batch.clear()

    def digest_of_gradients(self) -> Tensor:
        """On the device; see :class:`~gradveil.guards.RepeatGuard`."""
        return fingerprint_sums([p.grad for p in self.parameters.values() if p.grad is not None])

    def update(self) -> None:
        """The optimizer's step on gradients that are noised already."""
        self._check_strangers()
        self._noised_already = True
        try:
            self.optimizer.step()
        finally:
            self._noised_already = False

    # ---- what is known of the run

    @property
    def book(self) -> Book:
        """Where releases are written down."""
        if self._book is None:
            raise ConfigError("the engine has no run yet: call make_private first.")
        return self._book

    @property
    def ledger(self) -> Ledger:
        return self.book.ledger

    @property
    def header(self) -> RunHeader:
        return self.ledger.header

    @property
    def releases(self) -> tuple[Release, ...]:
        """Every release so far, those of an earlier process of the same run included."""
        return tuple(self.ledger.releases)

    @property
    def largest_norms(self) -> dict[str, float]:
        """The largest norm after clipping, per group, among the examples seen since the last release.

        A fact about the private batch, for looking at while developing: it is not noised, not released, and not
        recorded, except as S by the l2-max strategies.
        """
        if self._clipper is None:
            return {}
        return {g.name: self._clipper.harvest.largest(i) for i, g in enumerate(self.groups)}

    def commit(self) -> None:
        """Bring the ledger to disk; called by itself before weights or statements are handed out."""
        if self._book is not None:
            self.ledger.commit()

    def statement(self) -> Statement:
        """What is proved, what is only as published, what is not covered; ``print`` it."""
        from gradveil.accounting import statement

        self.commit()
        return statement(self.header, self.releases)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on: step, the bound rule's state, and the ledger's length and head.

        Holds no seed and no generator state.
        """
        self.commit()
        ledger = self.ledger
        rule = self.rule.state_dict() if self.plan.strategy.is_private else {}
        return {"step": self.step, "ledger_length": ledger.length, "ledger_head": ledger.head, "rule": rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Releases the ledger holds beyond it stay counted."""
        if not 0 <= int(state["step"]) <= self.plan.steps:
            raise ConfigError(f"the checkpoint is of step {state['step']}, the run has {self.plan.steps}.")
        self.step = int(state["step"])
        if not self._run_key.seeded:
            # Steps already released may come again: with a new key, noise and samples are independent of theirs.
            self._run_key = SecretKey().told(self.ranks.from_first)
        self.book.go_on()
        if self._clipper is not None:
            self.rule.load_state_dict(state["rule"])
            self._clipper.weighing.whitening = self.rule.whitening
            if self.step < self.plan.steps:
                self._clipper.weighing.bounds = self.rule.bounds(self.step)

    def close(self, reason: str = "finished") -> None:
        """Note the end of the run in the ledger, and detach."""
        if self._book is not None:
            self._book.end(reason)
        self.detach()

    def detach(self) -> None:
        """Give the user's model and optimizer back untouched; the ledger is brought to disk."""
        self.commit()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._clipper is not None:
            self._clipper.detach()


def _digest(ranks: processes.Ranks | None, grads: list[Tensor]) -> str:
    """Of gradients; ``ranks`` where each has a part of them. No method: a book outlives its engine."""
    here = fingerprint([sharding.local(grad) for grad in grads])
    return here if ranks is None else ranks.digest(here)
