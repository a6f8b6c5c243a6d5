"""The loop behind the command line: fit, evaluate, stop, checkpoint, resume.

Order of events at every point where something leaves the process: the ledger is committed first, then
the metric, the checkpoint or the progress line is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from gradveil import __version__
from gradveil.accounting import Statement, default_view, from_releases, manifest, proved_epsilon, statement_of
from gradveil.accounting.finite_precision import is_covered
from gradveil.accounting.ledger import Contents
from gradveil.engine import PrivacyEngine
from gradveil.engine.cuda_graph import cuda_graph_step
from gradveil.errors import BudgetExhausted, ConfigError, RunDirectoryError
from gradveil.mechanism.distributed import ranks as processes
from gradveil.mechanism.distributed.ranks import joined
from gradveil.mechanism.noise.streams import SecretKey
from gradveil.mechanism.records import why_unproved
from gradveil.mechanism.sampling import PrivateLoader
from gradveil.mechanism.strategies import PrivacyPlan, parameters
from gradveil.training import augment, checkpoints, data, features, models
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.environment import captures, differences, environment, numerics, said
from gradveil.training.inputs import Inputs, computed_ahead, device_of, inputs_of
from gradveil.training.recipes.average import AveragedModel
from gradveil.training.recipes.target import sigma_for
from gradveil.training.run_directory import RunDirectory, write_whole


@dataclass(frozen=True)
class Epsilon:
    """An epsilon on the way, and what kind it is: "proved (PLD)" or "as published" (MA)."""

    kind: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a progress display is told now and then. ``loss`` and ``accuracy`` are of the latest look."""

    step: int
    steps: int
    loss: float
    accuracy: float | None
    epsilon: Epsilon | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    run_dir: Path
    steps: int
    accuracy: float
    seconds_per_step: float
    ended: str
    budget_exhausted: bool
    not_finite_examples: int
    statement: Statement
    noise_std_first: float | None
    noise_std_last: float | None
    accuracy_unaveraged: float | None = None  # of the last weights, where ``accuracy`` is that of averaged ones
    ledger_head: str | None = None  # the hash of the last line: who keeps it elsewhere notices a rewritten ledger

    def to_dict(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "steps": self.steps,
            "accuracy": self.accuracy,
            "seconds_per_step": self.seconds_per_step,
            "ended": self.ended,
            "not_finite_examples": self.not_finite_examples,
            "noise_std_first": self.noise_std_first,
            "noise_std_last": self.noise_std_last,
            "accuracy_unaveraged": self.accuracy_unaveraged,
            "ledger_head": self.ledger_head,
            "privacy": self.statement.to_dict(),
        }


def train(
    config: RunConfig,
    *,
    run_dir: Path,
    seed: int | None = None,
    inputs: Inputs | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: Sequence[str] = (),
) -> Result:
    """Train one model as configured, into a new run directory. With a target epsilon, sigma is calibrated first.

    ``inputs``: those of an earlier run on the same data, from :func:`gradveil.training.inputs.prepare`.
    """
    if config.epsilon is not None:
        config = config.model_copy(update={"calibrated": False})  # a sigma found before may be of another plan
    with joined(config.device) as ranks, contextlib.ExitStack() as kept:
        session = _Session(config, seed, inputs)  # everything that can be wrong with the settings shows here
        config = session.config

        def begin() -> RunDirectory:
            run = RunDirectory.create(run_dir)
            kept.enter_context(run.lock())
            run.check_empty()  # another process may have begun there in between
            if seed is not None:
                run.write_seed(seed)  # before config.toml, which makes it a run that can be resumed: not without it
            write_whole(run.environment, json.dumps(environment(config, command), indent=1).encode())
            write_whole(run.config, config.to_toml().encode(), what="the settings")
            return run

        session.start(ranks.from_first(begin), resume=False)
        return session.fit(progress)


def resume(
    run_dir: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    new_noise: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Go on with an interrupted run from its newest checkpoint; ``settings`` must be those it began with.

    A seeded run repeats the steps after its checkpoint bit for bit, or refuses. ``new_noise`` gives the rest of
    the run fresh noise instead.
    """
    device = RunConfig.check(read_toml(RunDirectory.open(run_dir).config)).device
    with joined(device) as ranks, contextlib.ExitStack() as kept:

        def begin() -> tuple[RunDirectory, RunConfig, int | None, Contents | None]:
            kept.enter_context(RunDirectory.open(run_dir).lock())
            return _begun(run_dir, settings, seed, new_noise=new_noise)

        run, stored, stored_seed, contents = ranks.from_first(begin)
        if contents is not None and contents.ended is not None:
            return _finished(run, contents)
        session = _Session(stored, None if new_noise else stored_seed)
        session.start(run, resume=contents is not None)
        return session.fit(progress)


def _begun(
    run_dir: Path, settings: Mapping[str, Any] | None, seed: int | None, *, new_noise: bool
) -> tuple[RunDirectory, RunConfig, int | None, Contents | None]:
    """What is there of a run that is to go on."""
    run = RunDirectory.open(run_dir)
    stored = RunConfig.check(read_toml(run.config))
    for name, value in (settings or {}).items():
        if getattr(stored, name, None) != value:
            raise RunDirectoryError(
                f"the run in {run_dir} was started with {name} = {getattr(stored, name, None)!r} and cannot continue "
                f"with {value!r}: a run keeps its settings. Resume it without that setting, or start a new run."
            )
    stored_seed = None if new_noise and seed is None else run.read_seed()
    if seed is not None and seed != stored_seed:
        raise RunDirectoryError(f"the run in {run_dir} was not started with that seed. Resume it without --seed.")
    if not run.list_checkpoints() and not run.metrics.exists() and _has_no_whole_line(run.ledger):
        run.ledger.unlink()  # killed before the header was whole: nothing was released
    begun = bool(run.list_checkpoints()) or run.metrics.exists()
    contents = run.verified_ledger() if run.ledger.exists() or begun else None
    if contents is not None:
        _check_files(run, contents)
    if contents is not None and contents.header.seeded and stored_seed is None and not new_noise:
        raise RunDirectoryError(
            f"the run in {run_dir} was started with a seed, but secret.json is missing. Restore it, with mode 0600."
        )
    return run, stored, stored_seed, contents


def _check_files(run: RunDirectory, contents: Contents) -> None:
    bad = [str(file) for file in manifest.file_states(run.path, contents) if file.state in manifest.BAD]
    if bad:
        raise RunDirectoryError(
            f"{run.path} is not as its ledger says: {'; '.join(bad)}. A run keeps its settings and checkpoints as they "
            "were written. Put the files back, or start a new run."
        )


def _finished(run: RunDirectory, contents: Contents) -> Result:
    """The result of a run that is complete already, from what it left."""
    checkpoint, metrics = run.newest_checkpoint(), run.read_metrics()
    looked = [m for m in metrics if m.get("accuracy") is not None]
    releases = contents.releases
    return Result(
        run_dir=run.path,
        steps=checkpoint.step if checkpoint is not None else 0,
        accuracy=float(looked[-1]["accuracy"]) if looked else float("nan"),
        seconds_per_step=float(looked[-1]["seconds"]) / max(1, int(looked[-1]["step"])) if looked else float("nan"),
        ended=contents.ended or "",
        budget_exhausted="more than the budget" in (contents.ended or ""),
        not_finite_examples=0,
        statement=statement_of(contents),
        noise_std_first=max(releases[0].noise_std) if releases else None,
        noise_std_last=max(releases[-1].noise_std) if releases else None,
        accuracy_unaveraged=looked[-1].get("accuracy_unaveraged") if looked else None,
        ledger_head=contents.head,
    )


def _has_no_whole_line(ledger: Path) -> bool:
    return ledger.exists() and b"\n" not in ledger.read_bytes()


class _Session:
    """One process's part of a run."""

    def __init__(self, config: RunConfig, seed: int | None, inputs: Inputs | None = None) -> None:
        self.config, self.seed, self.inputs = config, seed, inputs
        self.take_step: Callable[[Tensor, Tensor], Tensor] = self._eager_step
        self._saved = -1  # the step of the newest checkpoint
        self.device = device_of(config.device)
        # A wrong setting is refused before any data is read. Where sigma is still to be found, any will do for that.
        any_noise = {"sigma": config.sigma_end or 1.0, "budget": config.budget} if config.awaits_sigma else {}
        plan = self._engine(**any_noise).plan
        if config.epsilon is not None:
            _check_provable(config, plan)
        self.key = SecretKey(seed)
        ahead = computed_ahead(config)
        if inputs is not None and (inputs.data.name, inputs.features, inputs.views) != (
            config.dataset,
            config.features,
            ahead,
        ):
            raise ConfigError(
                f"the inputs are of {inputs.data.name} with features {inputs.features!r} of {inputs.views} view(s), "
                f"and the run is on {config.dataset} with {config.features!r} of {ahead}. Prepare them from its "
                "configuration."
            )
        if config.dataset in data.CATALOGUE:  # refused before files are looked for
            shape = data.CATALOGUE[config.dataset].input_shape
            augment.check_shape(config.augment, config.dataset, shape)
            if config.features != "none":
                features.make(config.features, shape)
        self.data = data.load(config.dataset, data_dir=config.data_dir) if inputs is None else inputs.data
        model = models.build(
            config.model,
            self.data,
            features=config.features,
            dropout=config.dropout,
            activation=config.activation,
            generator=self.key.torch_generator("initial weights"),
        )
        self.model: nn.Module = models.trained_part(model).to(self.device)
        self.average = AveragedModel(self.model, config.average) if config.average else None
        self.optimizer = self._optimizer()
        if config.awaits_sigma:
            self.config = config.model_copy(update={"sigma": self._sigma(any_noise), "calibrated": True})
        else:
            self._dry_run()

    def _sigma(self, any_noise: Mapping[str, Any]) -> float:
        """The sigma that meets the target epsilon, from one dry run with any other."""
        config = self.config
        assert config.epsilon is not None
        engine = self._dry_run(**{**any_noise, "budget": None})
        settings = config.plan_settings()
        sigma = sigma_for(
            config.epsilon,
            engine.header,
            lambda sigma: parameters(**settings | {"sigma": sigma}),
            groups=engine.groups,
            options=config.options,
            least=config.sigma_end or 0.0,
        )
        if config.budget is not None and config.budget < config.epsilon and engine.header.stopping == "private":
            raise ConfigError(
                f"the run is to stop early on private data, so all of epsilon = {config.epsilon:g} is charged, and the "
                f"budget is {config.budget:g}. Leave the budget out, or ask for a smaller epsilon."
            )
        return sigma

    def _engine(self, **changes: Any) -> PrivacyEngine:
        config = self.config
        settings: dict[str, Any] = {
            **config.plan_settings(),
            "delta": config.delta,
            "sampling": config.sampling,
            "clipping": config.clipping,
            "options": config.options,
            "noise": config.noise,
            "views": config.views,
            # A run that was interrupted is charged for the steps it repeats: it still keeps to its target.
            "budget": config.budget if config.budget is not None else config.epsilon,
            "allow_unproved": config.allow_unproved,
            "accountant": config.accountant,
            "stopping": "none" if config.stop_at_accuracy is None else config.stop_data,
            "seed": self._noise_seed(),
        }
        return PrivacyEngine(**settings | changes)

    def _noise_seed(self) -> int | None:
        """The engine tells runs of one seed apart by their settings, weights and optimizer, and is not told of these.

        On other data, or other views or features of them, they would share their noise: it would cancel out.
        """
        c = self.config
        if self.seed is None:
            return None
        told = f"{self.seed}|{c.dataset}|{c.features}|{c.augment}".encode()
        return int.from_bytes(hashlib.shake_256(told).digest(16), "little")

    def _make_private(self, engine: PrivacyEngine, train: Dataset[Any]) -> PrivateLoader:
        _, _, loader = engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=train,
            batch_size=self.config.batch_size,
            physical_batch_size=self.config.physical_batch_size,
        )
        return loader

    def _dry_run(self, **changes: Any) -> PrivacyEngine:
        """What make_private checks (delta, batch size, groups), before anything is written."""
        engine = self._engine(**changes)
        self._make_private(engine, self.data.train)
        engine.detach()
        return engine

    def _optimizer(self) -> torch.optim.Optimizer:
        c = self.config
        if c.optimizer == "adam":
            return torch.optim.Adam(self.model.parameters(), lr=c.lr, weight_decay=c.weight_decay)
        return torch.optim.SGD(self.model.parameters(), lr=c.lr, momentum=c.momentum, weight_decay=c.weight_decay)

    def start(self, run: RunDirectory, *, resume: bool) -> None:
        self.run = run
        self.ranks = processes.current()
        checkpoint = self.ranks.from_first(run.newest_checkpoint) if resume else None
        if checkpoint is not None and checkpoint.facts.get("config_digest") != self.config.digest():
            raise RunDirectoryError(
                f"checkpoint {checkpoint.path.name} was written under other settings than config.toml now holds: a run "
                "keeps its settings. Put config.toml back, or start a new run."
            )
        tensors = b"" if checkpoint is None else self.ranks.from_first(lambda: run.read_tensors(checkpoint))
        self.engine = self._engine(run_dir=run.path, resume=resume)
        if self.inputs is None:
            self.inputs = inputs_of(self.config, self.data)
        known = [self.inputs.x_train, self.inputs.y_train]
        if self.config.views > self.inputs.views:  # drawn in every step, for each example by its number
            known.append(torch.arange(len(known[0]), device=self.device))
        self.loader = self._make_private(self.engine, TensorDataset(*known))
        if checkpoint is not None:
            self._load(tensors, checkpoint.facts)
            self._note_changes(checkpoint.facts.get("environment"))
        if self.ranks.is_first:
            self._bind_settings()
        plain_together = self.ranks.several and not self.engine.plan.strategy.is_private
        if self.device.type == "cuda" and captures() and not (plain_together or is_covered(self.engine.header)):
            self.take_step = cuda_graph_step(self.engine, F.cross_entropy, capacity=self.config.physical_batch_size)

    def _note_changes(self, before: object) -> None:
        """Say, and write into the ledger, under which other conditions the run goes on."""
        changes = self.ranks.from_first(lambda: differences(before, numerics(self.device)))
        if changes:
            self.engine.ledger.note("environment", changes)
            if self.ranks.is_first:
                warnings.warn(said(changes, seeded=self.seed is not None), stacklevel=2)

    def _bind_settings(self) -> None:
        """Into the ledger, before the first step: the settings, and the files that were written already."""
        ledger = self.engine.ledger
        if not any(kind == "settings" for kind, _ in ledger.notes):
            ledger.note("settings", self.config.settings())
        for path in (self.run.config, self.run.environment):
            if path.exists():
                manifest.bind(ledger, path.name, path.read_bytes())

    # ---- the loop

    def _eager_step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _rows(self, x: Tensor, y: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The batch as the model is given it: all views of the first example, of the second, ..."""
        views = self.config.views
        if views == 1:
            return x, y
        if index is None:
            x = x.flatten(0, 1)
        else:
            seed = self.key.device_seed("views", self.engine.step)
            x = augment.views_of(x, index, augment=self.config.augment, views=views, seed=seed)
        return x, y.repeat_interleave(views)

    def fit(self, progress: Callable[[Progress], None] | None) -> Result:
        config, engine = self.config, self.engine
        assert config.steps is not None and config.evaluate_every is not None and config.checkpoint_every is not None
        started, first_step = time.perf_counter(), engine.step
        away = 0.0  # seconds spent outside the steps themselves
        total_loss, losses = torch.zeros((), device=self.device), 0
        accuracy: float | None = None
        loss_shown, epsilon, last_told = float("nan"), self._epsilon_so_far(), 0.0
        ended, exhausted = "finished", False
        step = engine.step
        self.model.train()
        self._seed_forward(step)
        if config.stop_at_accuracy is not None and step and step % config.evaluate_every == 0:
            accuracy = self.accuracy()  # the run may have been killed between reaching its target and saying so
        try:
            for batch in self._batches(accuracy):
                x, y = self._rows(*batch)
                loss = self.take_step(x, y)
                if len(x):
                    total_loss, losses = total_loss + loss, losses + 1
                if engine.step == step:
                    continue  # a physical part of a batch
                step = engine.step
                if self.average is not None:
                    self.average.follow(step)
                self._seed_forward(step)
                looks = step % config.evaluate_every == 0 or step == config.steps
                if looks and self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # what the GPU still owes belongs to the steps
                now = time.perf_counter()
                if looks:
                    accuracy, loss_shown = self.accuracy(), float(total_loss) / max(losses, 1)
                    total_loss, losses = torch.zeros((), device=self.device), 0
                    epsilon = self._epsilon_so_far()
                    self._note(step, loss_shown, accuracy, epsilon, now - started - away)
                if step % config.checkpoint_every == 0 or step == config.steps:
                    self._save()
                if progress is not None and (now - last_told > 0.5 or step == config.steps):
                    engine.commit()
                    last_told = now
                    shown = float(total_loss) / losses if losses else loss_shown
                    progress(Progress(step=step, steps=config.steps, loss=shown, accuracy=accuracy, epsilon=epsilon))
                if self._reached(accuracy):
                    break
                away += time.perf_counter() - now
        except BudgetExhausted as reason:
            ended, exhausted = str(reason), True
        if engine.stopped is not None:
            ended = engine.stopped
        if not exhausted and self._reached(accuracy):
            ended = f"stopped at test accuracy {accuracy:.4f}, step {step} of {config.steps}"
        seconds = time.perf_counter() - started - away
        if self._saved != step:
            self._save()
        engine.close(ended)
        taken = max(1, step - first_step)
        releases = engine.releases
        return Result(
            run_dir=self.run.path,
            steps=step,
            accuracy=self.accuracy(),
            seconds_per_step=seconds / taken,
            ended=ended,
            budget_exhausted=exhausted,
            not_finite_examples=int(self.ranks.total([engine.non_finite_examples], total_loss)[0]),
            statement=engine.statement(),
            noise_std_first=max(releases[0].noise_std) if releases else None,
            noise_std_last=max(releases[-1].noise_std) if releases else None,
            accuracy_unaveraged=None if self.average is None else self._accuracy_of(self.model),
            ledger_head=engine.ledger.head,
        )

    def _reached(self, accuracy: float | None) -> bool:
        """Whether the target accuracy is reached."""
        target = self.config.stop_at_accuracy
        return target is not None and accuracy is not None and accuracy >= target

    def _batches(self, accuracy: float | None) -> Iterable[Any]:
        return () if self._reached(accuracy) or self.engine.step >= self.engine.plan.steps else self.loader

    def _seed_forward(self, step: int) -> None:
        """Dropout of a seeded run is a function of the step, like everything else."""
        if self.seed is None:
            return
        seed = self.key.torch_generator("forward", step).initial_seed()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace for unused devices
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _epsilon_so_far(self) -> Epsilon | None:
        """Of the steps taken, by the statement's accountant; as published where nothing is proved.

        A run that stops before its last declared step is charged for more than this.
        """
        engine = self.engine
        if not engine.plan.strategy.is_private or not engine.releases:
            return None
        if engine.header.plan.get("filter") is not None:  # charged from the first release on
            return Epsilon("proved (filter)", proved_epsilon(engine.header, engine.releases).epsilon)
        neighbours, accountant = default_view(engine.header.sampling)
        proved = proved_epsilon(
            engine.header, engine.releases, neighbours=neighbours, accountant=accountant, charge="taken"
        )
        if math.isfinite(proved.epsilon):
            return Epsilon(f"proved ({proved.accountant})", proved.epsilon)
        return Epsilon("as published", from_releases(engine.header, engine.releases)["MA"].epsilon)

    def accuracy(self) -> float:
        """Share of the test set that is classified right, by the averaged weights where there are such."""
        return self._accuracy_of(self.model if self.average is None else self.average.module)

    def _accuracy_of(self, model: nn.Module) -> float:
        return self.ranks.from_first(lambda: self._share_right(model))

    @torch.no_grad()
    def _share_right(self, model: nn.Module) -> float:
        assert self.inputs is not None
        x_test, y_test = self.inputs.x_test, self.inputs.y_test
        model.eval()
        right = 0
        for x, y in zip(x_test.split(2000), y_test.split(2000), strict=True):
            right += int((self._logits(model, x).argmax(1) == y).sum())
        model.train()
        return right / len(y_test)

    def _logits(self, model: nn.Module, x: Tensor) -> Tensor:
        """The mean over the views of an example that are not drawn."""
        assert self.inputs is not None
        views = list(x.unbind(1)) if self.inputs.views > 1 else augment.fixed_views(x, self.config.augment)
        return torch.stack([model(view) for view in views]).mean(0)

    def _note(self, step: int, loss: float, accuracy: float, epsilon: Epsilon | None, seconds: float) -> None:
        self.engine.commit()
        record: dict[str, Any] = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "accuracy": accuracy,
            "epsilon": epsilon.value if epsilon is not None else None,
            "epsilon_kind": epsilon.kind if epsilon is not None else None,
            "seconds": round(seconds, 4),
        }
        if self.average is not None:
            record["accuracy_unaveraged"] = self._accuracy_of(self.model)
        if self.engine.releases:
            last = self.engine.releases[-1]
            record |= {"clip": max(last.clip), "sigma": last.sigma, "noise_std": max(last.noise_std)}
        if self.ranks.is_first:
            self.run.append_metrics(record)

    # ---- checkpoints

    @property
    def _kept(self) -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, nn.Module | None]:
        return self.engine, self.model, self.optimizer, None if self.average is None else self.average.module

    def _save(self) -> None:
        whole, facts = checkpoints.pack(*self._kept)
        facts |= {"config_digest": self.config.digest(), "gradveil": __version__}
        facts["environment"] = numerics(self.device)
        self._saved = int(facts["step"])
        if self.ranks.is_first:
            bind = partial(manifest.bind, self.engine.ledger)
            self.run.save_checkpoint(int(facts["step"]), whole, facts, bind)
            if self.run.metrics.exists():
                bind(self.run.metrics.name, self.run.metrics.read_bytes())
            self.engine.commit()

    def _load(self, whole: bytes, facts: Mapping[str, Any]) -> None:
        checkpoints.unpack(whole, facts, *self._kept)


def _check_provable(config: RunConfig, plan: PrivacyPlan) -> None:
    """A target epsilon needs a strategy and a sampler that have one."""
    why = why_unproved(
        plan.strategy.guarantee,
        fixed_variance=plan.fixed_variance,
        sampling=config.sampling,
        strategy=config.strategy,
    )
    if why is not None:
        raise ConfigError(
            f"epsilon = {config.epsilon:g} was asked for, but {why}. Choose a proved strategy (gradveil strategies "
            "lists them) and Poisson sampling, or give sigma instead of epsilon."
        )
