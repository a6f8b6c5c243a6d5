"""From the settings of a training run to what is audited: its strategy and numbers, its network, data of its kind.

The examples are of the test set: an audit of a strategy needs no training example, and so its figures tell of none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradveil.accounting.ledger import Contents
from gradveil.attacks.own_run import OwnRun
from gradveil.audit.canary import Setting
from gradveil.errors import ConfigError
from gradveil.training import data, models
from gradveil.training.config import RunConfig
from gradveil.training.recorded import clipping_of, plan_of


def setting_of(
    config: RunConfig, *, examples: int = 16, sample_rate: float = 1.0, calm: float | None = 0.1, seed: int = 0
) -> Setting:
    """The strategy of ``config`` on ``examples`` examples, of which one is the canary. Without dropout.

    The learning rate is that of the run for a batch of its size: the noise on the mean is larger in a small one.
    """
    loaded = data.load(config.dataset, data_dir=config.data_dir)
    if not 2 <= examples <= len(loaded.x_test):
        raise ConfigError(
            f"{examples} examples of the {len(loaded.x_test)} in the test set of {config.dataset}: give at least 2, "
            "the canary and one beside it."
        )
    network = models.build(
        config.model,
        loaded,
        features=config.features,
        activation=config.activation,
        generator=torch.Generator().manual_seed(seed),
    )
    fixed, model = _parts(network)
    with torch.no_grad():
        x = fixed.eval()(loaded.x_test[:examples])
    assert config.batch_size is not None
    settings = config.plan_settings()
    del settings["steps"]  # an audit has its own number, over which schedules span
    return Setting(
        engine=settings | {"delta": config.delta, "clipping": config.clipping, "options": config.options},
        model=model,
        x=x,
        y=loaded.y_test[:examples],
        sample_rate=sample_rate,
        calm=calm,
        lr=config.lr * min(1.0, round(sample_rate * examples) / config.batch_size),
    )


def setting_of_own(
    contents: Contents,
    own: OwnRun,
    *,
    examples: int = 16,
    sample_rate: float = 1.0,
    calm: float | None = 0.1,
    seed: int = 0,
) -> Setting:
    """The same for a run of somebody's own model: strategy and numbers of its ledger, examples that it held out."""
    loaded, header = own.data(), contents.header
    plan = plan_of(header)
    if not 2 <= examples <= len(loaded.x_test):
        raise ConfigError(
            f"{examples} examples of the {len(loaded.x_test)} that {own.data_factory} holds out: give at least 2, the "
            "canary and one beside it, and no more than there are."
        )
    settings: dict[str, Any] = {"strategy": plan.strategy, "reading": plan.reading, "delta": header.delta}
    for name, schedule in (("clip", plan.clip), ("sigma", plan.sigma)):
        settings[name] = schedule.start
        if not schedule.is_constant:  # an audit has its own number of steps, over which it spans
            settings |= {f"{name}_decay": schedule.kind, f"{name}_end": schedule(header.steps - 1)}
    if not plan.strategy.is_private:
        del settings["clip"], settings["sigma"]
    return Setting(
        engine=settings
        | {"fixed_variance": plan.fixed_variance, "clipping": clipping_of(contents), "options": dict(own.options)},
        model=own.model(seed=seed),
        x=loaded.x_test[:examples],
        y=loaded.y_test[:examples],
        sample_rate=sample_rate,
        calm=calm,
        lr=own.lr * min(1.0, round(sample_rate * examples) / header.expected_batch_size),
    )


def _parts(network: nn.Sequential) -> tuple[nn.Module, nn.Module]:
    """What comes before the first layer that trains, the same at every step (a feature map, say), and the rest."""
    trains = [any(p.requires_grad for p in child.parameters()) for child in network.children()]
    first = trains.index(True)
    return network[:first], network[first:]
