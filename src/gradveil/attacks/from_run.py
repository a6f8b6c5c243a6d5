"""A trained run as a target: its model at its newest checkpoint, and the step that would come next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from gradveil.errors import ConfigError, RunDirectoryError
from gradveil.mechanism.strategies import PrivacyPlan, parameters
from gradveil.training import data, models
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.data import DataSet
from gradveil.training.run_directory import RunDirectory


@dataclass(frozen=True)
class Target:
    """What is attacked: a model in the state that a run left it in, on the data it was trained on."""

    model: nn.Module
    data: DataSet
    config: RunConfig
    plan: PrivacyPlan
    step: int  # the next to be released; the last one where the run is complete
    rule_state: Mapping[str, Tensor]  # where quantile-clip and adaclip have moved their bounds to


def load_target(run_dir: Path, *, data_dir: str | None = None) -> Target:
    """Read a run directory; refused where it has no checkpoint."""
    run = RunDirectory.open(run_dir)
    config = RunConfig.check(read_toml(run.config))
    checkpoint = run.newest_checkpoint()
    if checkpoint is None:
        raise RunDirectoryError(
            f"the run in {run_dir} has no checkpoint, so there is no model to attack. Let it get to its first one "
            "(gradveil train --checkpoint-every), or attack an untrained network (leave the run out)."
        )
    if config.features != "none" or config.views > 1:
        what = (
            f"features {config.features!r}" if config.features != "none" else f"{config.views} views of every example"
        )
        raise ConfigError(
            f"the run in {run_dir} was trained on {what}, and attacks are written for models on the examples "
            "themselves: what they found would say nothing about that run. Attack one without features and views."
        )
    loaded = data.load(config.dataset, data_dir=data_dir or config.data_dir)
    model = models.build(config.model, loaded, dropout=config.dropout, activation=config.activation)
    tensors = safetensors.torch.load(run.read_tensors(checkpoint))
    state, rule_state = (
        {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        for part in ("model.", "rule.")
    )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunDirectoryError(f"the checkpoint is of another model than config.toml names: {error}") from None
    model.eval()  # gradients as the attacker can compute them: no dropout
    assert config.steps is not None
    plan = parameters(**config.plan_settings())
    return Target(model, loaded, config, plan, min(checkpoint.step, config.steps - 1), rule_state)
