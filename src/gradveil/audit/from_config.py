"""From the settings of a training run to what is audited: its strategy and numbers, its network, data of its kind.

The examples are of the test set: an audit of a strategy needs no training example, and so its figures tell of none.
"""

from __future__ import annotations

import torch
from torch import nn

from gradveil.audit.canary import Setting
from gradveil.errors import ConfigError
from gradveil.training import data, models
from gradveil.training.config import RunConfig


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


def _parts(network: nn.Sequential) -> tuple[nn.Module, nn.Module]:
    """What comes before the first layer that trains, the same at every step (a feature map, say), and the rest."""
    trains = [any(p.requires_grad for p in child.parameters()) for child in network.children()]
    first = trains.index(True)
    return network[:first], network[first:]
