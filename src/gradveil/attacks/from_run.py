"""A trained run as a target: its model at its newest checkpoint, and the step that would come next.

How its gradients are clipped, noised and averaged is read from its ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from gradveil.attacks.own_run import OwnRun
from gradveil.attacks.trial import AttackConfig, AttackResult, run
from gradveil.clipping.groups import Clipping, make_groups
from gradveil.errors import ConfigError, RunDirectoryError
from gradveil.mechanism.strategies import PrivacyPlan
from gradveil.training import data, models
from gradveil.training.config import RunConfig
from gradveil.training.data import DataSet
from gradveil.training.recorded import clipping_of, plan_of, read_recorded
from gradveil.training.run_directory import RunDirectory


@dataclass(frozen=True)
class Target:
    """What is attacked: a model in the state that a run left it in, on the data it was trained on."""

    model: nn.Module
    data: DataSet
    network: str  # its name
    batch_size: int
    plan: PrivacyPlan
    step: int  # the next to be released; the last one where the run is complete
    rule_state: Mapping[str, Tensor]  # where quantile-clip and adaclip have moved their bounds to
    clipping: Clipping = "per-layer"
    options: Mapping[str, float] = field(default_factory=dict)

    def recorded(self) -> dict[str, Any]:
        """The settings of an attack that are the run's own."""
        found: dict[str, Any] = {
            "strategy": self.plan.strategy.name,
            "steps": self.plan.steps,
            "step": self.step,
            "training_batch": self.batch_size,
            "clipping": self.clipping,
        }
        if self.plan.strategy.is_private:
            found |= {"clip": self.plan.clip.start, "sigma": self.plan.sigma.start, "reading": self.plan.reading}
        return found

    def settings(self, given: Mapping[str, Any]) -> AttackConfig:
        """An attack on this run; refused where ``given`` contradicts what the run did."""
        theirs = self.recorded()
        wrong = [name for name in theirs.keys() & given.keys() if given[name] != theirs[name]]
        if wrong or given.get("network") is not None:
            told = ", ".join(f"{name} = {given[name]!r} (the run: {theirs[name]!r})" for name in sorted(wrong))
            raise ConfigError(
                f"{told or 'a network'} was given, and the run's ledger records its own: an attack on anything else "
                "would say nothing about the run. Leave it out, or attack an untrained network (leave the run out)."
            )
        return AttackConfig(**{"view": "per-example-noised", **given, **theirs})

    def attack(self, tried: AttackConfig, progress: Callable[[int], None] | None = None) -> AttackResult:
        private = self.plan.strategy.is_private
        return run(
            tried,
            self.data,
            model=self.model,
            plan=self.plan if private else None,
            rule_state=self.rule_state if private else None,
            options=self.options,
            progress=progress,
        )


def load_target(
    run_dir: Path, *, data_dir: str | None = None, model_factory: str | None = None, data_factory: str | None = None
) -> Target:
    """Read a run directory; refused where it has no checkpoint, or its files contradict its ledger.

    Of a run of somebody's own model the functions that make model and data are those that the run recorded, or these.
    """
    run = RunDirectory.open(run_dir)
    contents, recorded = read_recorded(run)
    checkpoint = run.newest_checkpoint()
    if checkpoint is None:
        raise RunDirectoryError(
            f"the run in {run_dir} has no checkpoint, so there is no model to attack. Let it get to its first one "
            "(gradveil train --checkpoint-every; PrivacyEngine(model_factory=...) and close() of an engine), or attack "
            "an untrained network (leave the run out)."
        )
    if isinstance(recorded, RunConfig):
        if model_factory is not None or data_factory is not None:
            raise ConfigError(f"the run in {run_dir} names its own network and data set: leave --model and --data out.")
        (model, loaded), options, network = _of_config(run_dir, recorded, data_dir), recorded.options, recorded.model
    else:
        own = OwnRun.of(recorded, model_factory, data_factory)
        model, loaded, options, network = own.model(), own.data(), dict(own.options), own.model_factory
    tensors = safetensors.torch.load(run.read_tensors(checkpoint))
    state, rule_state = (
        {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        for part in ("model.", "rule.")
    )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunDirectoryError(f"the checkpoint is of another model than the run records: {error}") from None
    model.eval()  # gradients as the attacker can compute them: no dropout
    clipping, plan = clipping_of(contents), plan_of(contents.header)
    groups = tuple(group.name for group in make_groups(model, clipping))
    if groups != contents.header.groups:
        raise RunDirectoryError(
            f"the model has the clipping groups {', '.join(groups)}, and the ledger's are "
            f"{', '.join(contents.header.groups)}: it is not the model of this run."
        )
    step, batch_size = min(checkpoint.step, plan.steps - 1), round(contents.header.expected_batch_size)
    return Target(model, loaded, network, batch_size, plan, step, rule_state, clipping, options)


def _of_config(run_dir: Path, config: RunConfig, data_dir: str | None) -> tuple[nn.Module, DataSet]:
    if config.features != "none" or config.views > 1:
        what = (
            f"features {config.features!r}" if config.features != "none" else f"{config.views} views of every example"
        )
        raise ConfigError(
            f"the run in {run_dir} was trained on {what}, and attacks are written for models on the examples "
            "themselves: what they found would say nothing about that run. Attack one without features and views."
        )
    loaded = data.load(config.dataset, data_dir=data_dir or config.data_dir)
    return models.build(config.model, loaded, dropout=config.dropout, activation=config.activation), loaded
