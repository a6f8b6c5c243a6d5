"""PrivacyEngine: sampling, clipping, noise, ledger and accounting around a user's own loop (see docs/own-model.md).

User code never reaches the sums of clipped gradients; the release is made at the end of ``backward()`` (step.py). Model
and optimizer stay the same objects, with the same state_dict keys; ``detach`` removes every trace of the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradveil.accounting.ledger import Durability
from gradveil.clipping import Clipper, Clipping, Group, make_groups
from gradveil.clipping.clipped_functions import ModelHook, TrackedForward
from gradveil.clipping.validation.spot_checks import tensors_held_by
from gradveil.engine import resume, run_files, setup
from gradveil.engine.batches import Batches
from gradveil.engine.drawn import Drawn
from gradveil.engine.guards import check_optimizer
from gradveil.engine.layout import Layout
from gradveil.engine.loop import Loop
from gradveil.engine.plain import PlainStep
from gradveil.engine.release_log import ReleaseLog
from gradveil.engine.run_view import RunView
from gradveil.engine.settings import Settings, plain_number
from gradveil.engine.step import PrivateStep
from gradveil.errors import ConfigError, PrivacyViolation
from gradveil.mechanism.distributed import prepare
from gradveil.mechanism.distributed import ranks as processes
from gradveil.mechanism.noise.streams import SecretKey
from gradveil.mechanism.sampling import PrivateLoader, Sampling, check_no_repeats, source_of
from gradveil.mechanism.schedules import Schedule
from gradveil.mechanism.strategies import PrivacyPlan, Strategy

if TYPE_CHECKING:
    from gradveil.engine.record_gradients import Recorder

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class PrivacyEngine(RunView):
    """Trains a model with differential privacy: clips, records and adds noise inside ``backward()``.

    Guarantee: after :meth:`make_private`, ``.grad`` only ever holds released gradients. Each is clipped per example,
    noised and described by one record in the ledger, from which :meth:`statement` and :attr:`epsilon` are computed.

    Args:
        strategy: A name (``gradveil strategies`` lists them) or a :class:`gradveil.Strategy`.
        clip, sigma: Initial clip bound C_0 and noise scale sigma_0, or whole schedules.
        epsilon: Instead of sigma: ``make_private`` finds the sigma with which the whole run spends it.
        steps, epochs: What the run declares. With epochs, each pass over the loader is one epoch.
        delta: Must be below 1/N.
        sampling: "poisson", "without-replacement", "with-replacement"; "shuffle" needs ``allow_unproved``.
        clipping: "per-layer", "flat", or a mapping of group names to parameter names.
        reading: Interpretation of l2-max: "example" (the paper's text, default) or "batch".
        decay, clip_decay, clip_end, sigma_decay, sigma_end: Shape and end value of what decays
            (:func:`gradveil.mechanism.strategies.parameters`).
        fixed_variance: Constant noise: sigma_t = varsigma / S_t with varsigma = sigma_0 C_0.
        options: Settings of the strategy's own rule (quantile, learning_rate, count_noise; beta1, ...).
        loss_reduction: What your loss does over the batch: "mean" or "sum".
        views: Augmentation multiplicity K: each example has K consecutive rows, whose gradients are averaged before
            clipping, at no cost in privacy. ``torch.stack([x, x.flip(-1)], dim=1).flatten(0, 1)`` builds the rows.
        drops_examples: The loop leaves out examples of a batch, each by its own content alone.
        spot_checks: Share of the time for checking, at unpredictable steps, that examples are independent.
        budget: The largest proved epsilon to spend; the step that would exceed it is refused.
        allow_unproved: Allow settings without a proof; a budget is then of the published epsilon (MA).
        accountant: "PLD": noise and number of steps are declared in advance; "filter": a privacy filter, under which
            noise, bounds and the last step may depend on released values (docs/accounting.md).
        stopping: "public" declares that the end of training does not depend on private data: only the steps taken are
            charged. Otherwise all declared steps are, since the loop sees what was released.
        run_dir, resume: Directory of the ledger, settings, environment and logged metrics (:meth:`log`); must not
            contain a ledger, unless ``resume``.
        model_factory, data_factory: "module:function" that builds the model, and that returns inputs and labels: with
            them the weights are kept at the end, and ``gradveil attack RUN`` and ``audit RUN`` can rebuild the run.
        about: Texts about the run, shown in the report: purpose, data, unit, tuning, sign_off.
        durability: "write": a killed process has spent what its ledger says; "fsync": a power cut, too.
        noise: "lattice": private in floating point too (docs/noise.md); "float": in half the time, not
            proved down to the last bit; "auto": "lattice" where it costs at most 3 % of a step (batches from 500).
        seed: Makes the run reproducible. Anyone who knows it can subtract the noise.

    Raises:
        ConfigError: A setting is invalid or contradicts another.

    >>> PrivacyEngine(strategy="baseline", clip=1.0, sigma=3.0, steps=10)
    PrivacyEngine(baseline, not set up)
    """

    _run_key: SecretKey  # bound to the run
    _epoch: int  # batches of one

    def __init__(
        self,
        *,
        strategy: str | Strategy = "baseline",
        clip: float | Schedule | None = None,
        sigma: float | Schedule | None = None,
        epsilon: float | None = None,
        steps: int | None = None,
        epochs: int | None = None,
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
        drops_examples: bool = False,
        spot_checks: float = 0.02,
        budget: float | None = None,
        allow_unproved: bool = False,
        accountant: str | None = None,
        stopping: str = "none",
        run_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        model_factory: str | None = None,
        data_factory: str | None = None,
        about: Mapping[str, str] | None = None,
        durability: Durability = "write",
        noise: str = "auto",
        seed: int | None = None,
    ) -> None:
        self.settings = Settings(
            strategy=strategy,
            clip=clip,
            sigma=sigma,
            epsilon=epsilon,
            steps=steps,
            epochs=epochs,
            delta=delta,
            sampling=sampling,
            clipping=clipping,
            shape={
                "reading": reading,
                "decay": decay,
                "clip_decay": clip_decay,
                "clip_end": clip_end,
                "sigma_decay": sigma_decay,
                "sigma_end": sigma_end,
                "fixed_variance": fixed_variance,
            },
            loss_reduction=loss_reduction,
            views=views,
            budget=budget,
            allow_unproved=allow_unproved,
            stopping=stopping,
            accountant=accountant,
            drops_examples=drops_examples,
            spot_checks=spot_checks,
            durability=durability,
            noise=noise,
        )
        self.options = {name: plain_number(name, value) for name, value in (options or {}).items()}
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.model_factory, self.data_factory = model_factory, data_factory
        self.about = run_files.checked_about(about)
        self._began = time.perf_counter()
        self.ranks = processes.current()
        self._plan: PrivacyPlan | None = None
        if self.settings.epsilon is None and self.settings.steps is not None:
            self._plan = self.settings.plan(steps=self.settings.steps)
        self._resume, self._key = resume, SecretKey(plain_number("seed", seed))
        self._handles: list[Any] = []
        self._clipper: Clipper | None = None
        self._private: PrivateStep | None = None
        self._plain: PlainStep | None = None
        self._release_log: ReleaseLog | None = None
        self._stopped: str | None = None
        self._plain_steps = 0  # taken, of a run without privacy
        self._sharded = False
        self._recorder: Recorder | None = None
        self._in_graphs = False  # whether a CUDA-graph step was made (cuda_graph.py)
        self._in_update = False  # it takes the optimizer's step
        self._loop = Loop(self)
        self._pins: set[tuple[int, str]] = set()  # ledger lengths and heads that checkpoints of this process hold
        setup.check_run_directory(self)

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
        """Attach the engine to a model and replace the loader by one that draws the batches.

        Args:
            module, optimizer: The model and its optimizer; they stay the same objects. Make more optimizers at will.
            data_loader: A DataLoader, whose sampler is replaced, or a Dataset, which needs ``batch_size``.
            batch_size: Expected batch size.
            physical_batch_size: Microbatch size. Write the loop as usual: release and update happen at the last one.

        Returns:
            The same module and optimizer, and the private loader.

        Raises:
            ConfigError: A setting does not fit the data, such as delta >= 1/N.
            UnsupportedModelError: The model mixes examples or cannot be clipped per example.
        """
        if self._release_log is not None:
            raise ConfigError("make_private was called already: one engine is one run. Make a new PrivacyEngine.")
        inner = processes.unwrapped(module)
        physical_batch_size = plain_number("physical_batch_size", physical_batch_size)
        source = source_of(data_loader, plain_number("batch_size", batch_size))
        if any(isinstance(vars(child).get("forward"), TrackedForward) for child in inner.modules()):
            raise ConfigError(
                "this model is private already, under another engine. Call detach() on that engine first."
            )
        self.sampling = Sampling(
            name=self.settings.sampling, population=source.population, batch_size=source.batch_size
        )
        setup.declare_steps(self, source)
        private = self.plan.strategy.is_private
        if private and self.delta >= 1.0 / source.population:
            raise ConfigError(
                f"delta is {self.delta:g}, not below 1/N = {1 / source.population:.3g} for {source.population} "
                "training examples: a mechanism that publishes one example outright would pass. Give a smaller delta."
            )
        if private:
            check_optimizer(inner, optimizer)
            check_no_repeats(source.dataset)
        self._layout = Layout(source.dataset, source.like.collate_fn if private and source.like is not None else None)
        self.module, self.optimizer, self.physical_batch_size = inner, optimizer, physical_batch_size
        self._sharded = prepare.is_cut(inner, self.plan.strategy)
        if self.ranks.several:
            setup.join(self, module)
        self.groups: tuple[Group, ...] = make_groups(inner, self.settings.clipping)
        self.parameters: dict[str, nn.Parameter] = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        setup.calibrate(self)
        self._batches = Batches(
            self.sampling.name, views=self.settings.views, drops_examples=self.settings.drops_examples
        )
        self._drawn = Drawn(self._batches)
        if private:
            self.rule = setup.make_rule(self, self.plan)
            self._clipper = setup.make_clipper(self)  # before the ledger: a refused model leaves no run directory
        try:
            setup.open_log(self)
        except BaseException:
            self.detach()
            raise
        if private:
            setup.attach(self)
        else:
            self._plain = PlainStep(
                self.parameters,
                self._batches,
                self.ranks,
                loss_reduction=self.settings.loss_reduction,
                count=self._loop.count_plain_step,
            )
        if not private or physical_batch_size is not None or self._sharded:
            self._handles += [
                optimizer.register_step_pre_hook(ModelHook(self._loop.before_step)),
                optimizer.register_step_post_hook(ModelHook(self._loop.after_step)),
            ]
        commits = ModelHook(lambda *_: self.commit(), before_copy=self.commit)
        self._handles.append(inner.register_state_dict_pre_hook(commits))
        loader = PrivateLoader(
            dataset=source.dataset,
            batch_size=source.batch_size,
            draw=self._loop.draw,
            span=self._loop.coming_steps,
            physical_batch_size=physical_batch_size,
            start=self._loop.start,
            finish=self._loop.finish,
            hand_out=self._loop.hand_out,
            like=source.like,
            parts=self._loop.equal_parts if self._sharded else None,
            stopped=lambda: self.stopped is not None,
        )
        return module, optimizer, loader

    # ---- the loop

    @contextmanager
    def public_data(self, note: str = "") -> Iterator[None]:
        """Declare the passes of the model in this context public: no clipping, no noise, nothing charged.

        The ledger records it with ``note`` (for example, which data). Gradients go to ``.grad`` as in ordinary
        training. The statement lists it as an assumption: a private batch in here would be released as it is.
        """
        if self._clipper is None:
            yield
            return
        self.ledger.note("public", {"step": self.step, "note": note})
        with self._clipper.untracked():
            yield

    def run_step(self, loss_fn: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Take the whole step on one batch of the loader: zero_grad, loss, backward, update.

        The first batches, and some at unpredictable steps, are checked end to end: each example's gradient must stay
        the same when the other examples are exchanged. That covers what the engine cannot see in a loop of your own:
        centring or mixing inputs, masks and normalisers from the targets. It does not cover the collate_fn.

        Args:
            loss_fn: From a batch of the loader to the mean (or sum, by ``loss_reduction``) over its examples.
            batch: What the loader returned.

        Returns:
            The loss, detached.
        """
        clipper, ticket = self._clipper, self._batches.ticket
        if clipper is not None and ticket is not None and self._batches.is_open:
            rehearse = partial(_rehearse, clipper, loss_fn)
            clipper.checks.whole_step(rehearse, batch, ticket.size, holds=tensors_held_by(loss_fn))
        self.optimizer.zero_grad()
        loss = loss_fn(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def record_gradients(
        self, path: str | os.PathLike[str], *, steps: int | Iterable[int] = 1, view: str = "batch"
    ) -> Recorder:
        """Record what an adversary would see of coming steps, in a directory that only its owner can read.

        Written are the gradient, the weights it was taken at and what is public about its release; never the batch.
        Training and ledger do not change by a bit. ``gradveil attack --captured`` reads the directory.

        Args:
            steps: How many of the next steps, or which.
            view: "batch", what is released; "per-example" or "per-example-noised" with ``physical_batch_size=1``.
        """
        from gradveil.engine.record_gradients import Recorder

        self._recorder = Recorder(self, path, steps=steps, view=view)
        return self._recorder

    # ---- going on, and the end

    def __reduce__(self) -> str:
        raise PrivacyViolation(
            "a PrivacyEngine cannot be copied or pickled: the copy would have the same secret key and draw the same "
            "noise on other gradients, which cancels in the difference, and neither ledger would hold what the other "
            "has spent. To save a run, keep engine.state_dict(), which another engine loads. For a second run make a "
            "second PrivacyEngine; copy.deepcopy(model) gives the plain model."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: the step, the state of adaptive bounds, and what was spent.

        It contains no seed and no generator state. An engine with the run's ledger continues it; one with a new ledger
        takes over what was spent, so that budget and statement stay right.
        """
        return resume.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Releases that the ledger holds beyond it stay charged.

        Raises:
            LedgerError, PrivacyViolation: Steps that were taken or declared before would not be charged.
        """
        resume.load_state_dict(self, state)

    def log(self, **metrics: Any) -> None:
        """Write a record of the run so far to metrics.jsonl: ``engine.log(accuracy=0.93, loss=0.2)``.

        ``accuracy`` is what reports, comparisons and gates show. Measure it on other data than the training data: no
        epsilon covers what is computed from those.
        """
        run_files.log(self, metrics)

    def stop(self, reason: str = "stopped by the training loop") -> None:
        """End the run after the current step: the loader hands out no further batch.

        May be called because of anything that was released. With ``accountant="filter"`` that costs nothing;
        otherwise all declared steps stay charged, unless ``stopping="public"``.
        """
        self._stopped = reason

    @property
    def stopped(self) -> str | None:
        """Why the run ends before its declared steps; None while it goes on."""
        return self._stopped or (None if self._private is None else self.rule.stop)

    def close(self, reason: str | None = None) -> None:
        """Record the end of the run in the ledger, and detach. With a ``model_factory``, the weights are kept."""
        if self._release_log is not None:
            run_files.end(self)
            self._release_log.end(reason or self.stopped or "finished")
        self.detach()

    def detach(self) -> None:
        """Remove everything from the model and the optimizer; sync the ledger to disk."""
        self.commit()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._clipper is not None:
            self._clipper.detach()


def _rehearse(clipper: Clipper, loss_fn: Callable[..., Tensor], batch: Any) -> list[Tensor] | None:
    return clipper.rehearse(lambda: loss_fn(*batch).backward())
