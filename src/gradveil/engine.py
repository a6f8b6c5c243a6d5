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

import atexit
import hashlib
import json
import math
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradveil import bounds as bound_rules
from gradveil import ledger as ledgers
from gradveil.clipping import Clipper, Clipping, Group, Harvest, make_groups
from gradveil.clipping.clipper import _ModelHook
from gradveil.errors import (
    BudgetExhausted,
    ConfigError,
    PrivacyViolation,
    RunDirectoryError,
    UnknownNameError,
)
from gradveil.ledger import Ledger
from gradveil.randomness import NoiseSource, SecretKey
from gradveil.records import Release, RunHeader
from gradveil.release import release_gradients
from gradveil.sampling import Indices, PrivateLoader, Sampling, Ticket, check_loader
from gradveil.schedules import Schedule
from gradveil.strategies import Parameters, Strategy, parameters
from gradveil.version import __version__

if TYPE_CHECKING:
    from gradveil.accounting import Statement

LOSS_REDUCTIONS = ("mean", "sum")
STOPPINGS = ("none", "public", "private")

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class PrivacyEngine:
    """Trains a model under one strategy and records every release.

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
    budget          the largest proved epsilon to spend: the step that would exceed it is refused
    run_dir         where the ledger is kept; must not hold one already, unless ``resume``
    seed            makes the run repeatable; whoever knows it can take the noise off
    stopping        declares early stopping: "private" charges all declared steps, "public" only those taken
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
        if budget is not None and (not private or self._unproved(sampling, self.plan)) and not allow_unproved:
            raise ConfigError(
                f"budget={budget} was given, but strategy {self.plan.strategy.name!r} with {sampling} sampling has no "
                "proved epsilon that could be held to it. Choose a proved strategy, or leave the budget out."
            )
        self.delta, self.loss_reduction, self.budget = float(delta), loss_reduction, budget
        self.stopping, self.allow_unproved = stopping, allow_unproved
        self.clipping, self.options = clipping, dict(options or {})
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.step = 0
        self._sampling_name, self._resume = sampling, resume
        self._key = SecretKey(seed)
        self._handles: list[Any] = []
        self._clipper: Clipper | None = None
        self._ledger: Ledger | None = None
        self._affordable: int | None = None
        self._ticket: Ticket | None = None
        self._drawn_since_release: set[int] = set()
        self._parts: dict[nn.Parameter, Tensor] = {}
        self.not_finite_examples = 0
        if self.run_dir is not None and not resume and (self.run_dir / ledgers.FILE_NAME).exists():
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
        if self._ledger is not None:
            raise ConfigError("make_private was called already: one engine is one run. Make a new PrivacyEngine.")
        like: DataLoader[Any] | None = None
        if isinstance(data_loader, DataLoader):
            like, dataset = data_loader, data_loader.dataset
            size = check_loader(data_loader)
            if batch_size is not None and batch_size != size:
                raise ConfigError(f"batch_size={batch_size} was given, but the data loader's is {size}.")
        else:
            dataset = data_loader
            if batch_size is None:
                raise ConfigError("a Dataset was given without batch_size: the sampling rate is batch_size / N.")
            size = batch_size
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                "the data set has no length: the sampling rate is batch_size / N. Give a map-style Dataset."
            )
        population = len(dataset)
        self.sampling = Sampling(name=self._sampling_name, population=population, batch_size=size)
        if self.plan.strategy.is_private and self.delta >= 1.0 / population:
            raise ConfigError(
                f"delta is {self.delta:g}, not below 1/N = {1 / population:.3g} for {population} training examples: a "
                "mechanism that publishes one example outright would pass. Give a smaller delta."
            )
        self._check_optimizer(module, optimizer)
        self.module, self.optimizer = module, optimizer
        self.groups: tuple[Group, ...] = make_groups(module, self.clipping)
        self.parameters: dict[str, nn.Parameter] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if self.plan.strategy.is_private:
            self.rule = bound_rules.make_rule(
                self.plan,
                self.groups,
                parameters={n: p.detach() for n, p in self.parameters.items()},
                batch_size=float(size),
                options=self.options,
            )
            self._clipper = Clipper(module, self.groups, bounds=self.rule.bounds(0), loss_reduction=self.loss_reduction)
            self._clipper.whitening = self.rule.whitening
        self._open_ledger()
        self._handles += [
            optimizer.register_step_pre_hook(_ModelHook(self._before_step)),
            module.register_state_dict_pre_hook(_ModelHook(lambda *_: self.commit())),
        ]
        loader = PrivateLoader(
            dataset=dataset,
            batch_size=size,
            draw=self._draw,
            span=lambda: range(self.step, self.plan.steps),
            physical_batch_size=physical_batch_size,
            start=self._start_iteration,
            hand_out=self._hand_out,
            like=like,
        )
        return module, optimizer, loader

    def _check_optimizer(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for p in module.parameters()}
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in mine]
        if strangers and self.plan.strategy.is_private:
            raise ConfigError(
                f"the optimizer holds {len(strangers)} parameter(s) that the module does not (the first has shape "
                f"{tuple(strangers[0].shape)}): they would be updated from gradients that nobody clipped or noised. "
                "Give the optimizer module.parameters()."
            )

    def _header(self) -> RunHeader:
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
            plan=self.plan.to_plan() | {"side_inverse_square": self._side_inverse_square()},
            salt=self._salt(),
            stopping=self.stopping,
            gradveil_version=__version__,
        )

    def _open_ledger(self) -> None:
        header = self._header()
        if self.budget is not None and self.stopping == "private" and not self._affordable_steps(header, ()):
            raise ConfigError(
                f"the run may stop early on private data, so all {self.plan.steps} declared steps are charged, and "
                f"they cost more than the budget of epsilon = {self.budget:g} at delta = {self.delta:g}. Declare fewer "
                "steps, raise sigma or the budget, or declare the data it stops on public (stopping='public')."
            )
        path = None
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            path = self.run_dir / ledgers.FILE_NAME
        if path is not None and self._resume:
            self._ledger = Ledger.resume(path, header)
        else:
            self._ledger = Ledger(header, path)
        self._run_key = self._key.bound_to(self._ledger.header.salt)
        self._note_earlier_releases()
        atexit.register(_commit, weakref.ref(self._ledger))

    # ---- the loop

    def _draw(self, step: int) -> Indices:
        indices = self.sampling.draw(self._run_key, step)
        again = 0
        while not len(indices) and not self.plan.strategy.is_private:
            again += 1  # plain training has nothing to do with an empty batch, and nothing to hide: draw another
            indices = self.sampling.draw(self._run_key, step + again * (1 << 40))
        return indices

    def _hand_out(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._drawn_since_release.add(ticket.step)

    def _start_iteration(self) -> None:
        """A new loop over the loader starts clean: nothing of an abandoned batch may enter the next release."""
        self._ticket = None
        self._drawn_since_release.clear()
        self._parts.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._clipper is not None:
            self._clipper.harvest = Harvest(len(self.groups))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(a is not None and a is not optimizer for a in args):
            raise PrivacyViolation(
                "optimizer.step was called with a closure, which computes gradients anew after the noise was added: "
                "they would be used without noise. Call backward() first and step() without arguments."
            )
        if self._ticket is not None and not self._ticket.last:
            self._put_aside_part()
            return
        if self.plan.strategy.is_private:
            self._release()
        else:
            self._average_parts()
            self.step += 1
        self._drawn_since_release.clear()
        self._ticket = None

    def _put_aside_part(self) -> None:
        """A physical part of a batch: keep its sums, and leave the optimizer nothing to update with."""
        assert self._ticket is not None
        # Without clipping, .grad is that of the user's loss: the mean of parts weighs each by its size.
        weighs = not self.plan.strategy.is_private and self.loss_reduction == "mean"
        weight = float(self._ticket.size) if weighs else 1.0
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                grad = parameter.grad * weight if weight != 1.0 else parameter.grad
                before = self._parts.get(parameter)
                self._parts[parameter] = grad if before is None else before + grad
                parameter.grad = None

    def _take_up_parts(self) -> None:
        for parameter, kept in self._parts.items():
            parameter.grad = kept if parameter.grad is None else parameter.grad + kept
        self._parts.clear()

    def _average_parts(self) -> None:
        if not self._parts:
            return
        assert self._ticket is not None
        self._put_aside_part()
        self._take_up_parts()
        if self.loss_reduction == "mean":
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= self._ticket.drawn

    def _release(self) -> None:
        assert self._clipper is not None and self._ledger is not None
        if self.step >= self.plan.steps:
            raise BudgetExhausted(
                f"the run declared {self.plan.steps} steps and has taken them: schedules and accounting end there. "
                "Declare more steps from the start."
            )
        sampler = self._check_batch(self._clipper.harvest)
        self._check_budget(sampler)
        self._take_up_parts()
        release = release_gradients(
            step=self.step,
            plan=self.plan,
            rule=self.rule,
            groups=self.groups,
            parameters=self.parameters,
            harvest=self._clipper.harvest,
            noise=NoiseSource(self._run_key, self.step),
            sampler=sampler,
            sample_rate=self.sampling.rate,
            batch_size=float(self.sampling.batch_size),
        )
        if self._run_key.seeded:
            release = replace(release, digest=self._checked_digest())
        self._ledger.append(release)
        if self._clipper.harvest.not_finite is not None:
            self._report_not_finite(int(self._clipper.harvest.not_finite))
        self.step += 1
        self._clipper.harvest = Harvest(len(self.groups))
        self._clipper.whitening = self.rule.whitening
        if self.step < self.plan.steps:
            self._clipper.bounds = self.rule.bounds(self.step)

    def _salt(self) -> str:
        """A fingerprint of what makes this run another than one with the same seed: settings, weights, optimizer."""
        settings = [
            self.plan.strategy.name,
            self.plan.to_plan(),
            self.plan.steps,
            [(g.name, g.parameters) for g in self.groups],
            [self.sampling.name, self.sampling.population, self.sampling.batch_size],
            self.options,
            self.loss_reduction,
            type(self.optimizer).__name__,
            [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            _fingerprint(self.parameters.values()),
        ]
        return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()

    def _note_earlier_releases(self) -> None:
        """What a redone step has to repeat: the digests of the seeded releases in the ledger."""
        self._earlier = {r.step: r.digest for r in self._open().releases if r.digest is not None}

    def _checked_digest(self) -> str:
        """The digest of this step's noised gradients; refused if the step was released before and is another now.

        The same noise on two different gradients cancels in their difference. The same release twice tells
        nothing new.
        """
        digest = _fingerprint(p.grad for p in self.parameters.values() if p.grad is not None)
        if self._earlier.get(self.step, digest) != digest:
            for parameter in self.parameters.values():
                parameter.grad = None
            raise PrivacyViolation(
                f"step {self.step} was released before, by an earlier process of this seeded run or before going back "
                "to a checkpoint, and does not repeat itself bit for bit (other weights, data, device or versions). "
                "Its noise would be used twice and cancel in the difference, so the release was withheld. Go on with "
                "new noise: gradveil train --resume RUN --new-noise, or PrivacyEngine(resume=True) without the seed."
            )
        return digest

    def _check_batch(self, harvest: Harvest) -> str:
        """The sampler to record: gradveil's, or "unknown" where the batch did not come from the loader."""
        if len(self._drawn_since_release) > 1:
            raise PrivacyViolation(
                f"{len(self._drawn_since_release)} batches were drawn since the last optimizer.step(). Each step is "
                "accounted for one batch: an example that is in two of them would count twice, and skipping batches "
                "by their content (an empty one, say) is not accounted for at all. Call step() after every batch, "
                "also an empty one; for batches larger than memory use physical_batch_size."
            )
        if self._ticket is None:
            warnings.warn(
                "this step's batch did not come from the loader that make_private returned, so nothing is known of "
                "how it was sampled: the run's proved epsilon is infinite from here on.",
                stacklevel=4,
            )
            return "unknown"
        if harvest.examples > self._ticket.drawn:
            raise PrivacyViolation(
                f"{harvest.examples} examples went through backward() in this step, but the batch has "
                f"{self._ticket.drawn}: an example that contributes more than once is not bounded by its clip. Call "
                "the model and backward() once per batch."
            )
        return self.sampling.name

    def _report_not_finite(self, count: int) -> None:
        if count:
            if not self.not_finite_examples:
                warnings.warn(
                    f"{count} example(s) of step {self.step} had a gradient that is not finite; they count as zero. "
                    "engine.not_finite_examples keeps the count.",
                    stacklevel=5,
                )
            self.not_finite_examples += count

    def _check_budget(self, sampler: str) -> None:
        if self.budget is None:
            return
        assert self._ledger is not None
        if sampler == "unknown":
            raise BudgetExhausted(
                f"step {self.step} was fed a batch of unknown sampling, which no finite budget covers. Use the loader "
                "that make_private returned."
            )
        if self._affordable is None:
            done = tuple(self._ledger.releases)
            self._affordable = len(done) + self._affordable_steps(self._ledger.header, done)
        if len(self._ledger.releases) >= self._affordable:
            raise BudgetExhausted(
                f"step {self.step} of {self.plan.steps} would spend more than the budget of epsilon = {self.budget:g} "
                f"at delta = {self.delta:g}; {len(self._ledger.releases)} releases are within it. The step was not "
                "taken. Raise the budget or sigma, or declare fewer steps."
            )

    def _affordable_steps(self, header: RunHeader, done: tuple[Release, ...]) -> int:
        """How many more steps the budget allows, if they are released as planned."""
        from gradveil.accounting import affordable_steps

        assert self.budget is not None
        planned = [self._planned_multiplier(t) for t in range(self.step, self.plan.steps)]
        return affordable_steps(header, done, planned, budget=self.budget)

    def _planned_multiplier(self, step: int) -> float:
        """The noise multiplier that ``step`` will have; public before the run for every proved strategy."""
        ratio = self.plan.varsigma / self.plan.clip(step) if self.plan.fixed_variance else self.plan.sigma(step)
        return 1.0 / math.sqrt(len(self.groups) / ratio**2 + self._side_inverse_square())

    def _side_inverse_square(self) -> float:
        """What the side releases of a step add to 1/z^2."""
        return self.rule.side_inverse_square if self.plan.strategy.is_private else 0.0

    # ---- what is known of the run

    @property
    def header(self) -> RunHeader:
        return self._open().header

    @property
    def releases(self) -> tuple[Release, ...]:
        """Every release so far, those of an earlier process of the same run included."""
        return tuple(self._open().releases)

    @property
    def ledger(self) -> Ledger:
        return self._open()

    def _open(self) -> Ledger:
        if self._ledger is None:
            raise ConfigError("the engine has no run yet: call make_private first.")
        return self._ledger

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
        if self._ledger is not None:
            self._ledger.commit()

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
        ledger = self._open()
        rule = self.rule.state_dict() if self.plan.strategy.is_private else {}
        return {"step": self.step, "ledger_length": ledger.length, "ledger_head": ledger.head, "rule": rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Releases the ledger holds beyond it stay counted."""
        if not 0 <= int(state["step"]) <= self.plan.steps:
            raise ConfigError(f"the checkpoint is of step {state['step']}, the run has {self.plan.steps}.")
        self.step = int(state["step"])
        if not self._run_key.seeded:
            # Steps already released may come again: with a new key, noise and samples are independent of theirs.
            self._run_key = SecretKey()
        self._note_earlier_releases()
        if self._clipper is not None:
            self.rule.load_state_dict(state["rule"])
            self._clipper.whitening = self.rule.whitening
            if self.step < self.plan.steps:
                self._clipper.bounds = self.rule.bounds(self.step)
        self._affordable = None

    def close(self, reason: str = "finished") -> None:
        """Note the end of the run in the ledger, and detach."""
        if self._ledger is not None and self._ledger.is_open:
            self._ledger.end(reason)
        self.detach()

    def detach(self) -> None:
        """Give the user's model and optimizer back untouched; the ledger is brought to disk."""
        self.commit()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._clipper is not None:
            self._clipper.detach()


def _fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of some tensors: equal for equal tensors, on any device, with one transfer."""
    sums = []
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten().to(torch.int64)
        odd = (
            torch.arange(bits.numel(), device=bits.device, dtype=torch.int64) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
        )
        sums.append((bits * odd).sum())
    together = torch.stack(sums).tolist() if sums else []
    return hashlib.sha256(json.dumps(together).encode()).hexdigest()[:32]


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _commit(ledger: weakref.ref[Ledger]) -> None:
    found = ledger()
    if found is not None and (found.path is None or found.path.exists()):
        found.commit()
