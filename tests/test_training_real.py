"""Short private training runs on the real data sets, from their public files."""

from __future__ import annotations

import math

import pytest

from gradveil.training.config import RunConfig
from gradveil.training.data import CATALOGUE
from gradveil.training.loop import train

pytestmark = pytest.mark.realdata

# Steps, batch size, learning rate, and an accuracy that guessing does not reach.
SETTINGS = {
    "mnist": (60, 600, 0.5, 0.5),
    "fashion-mnist": (60, 600, 0.5, 0.4),
    "cifar10": (40, 500, 0.2, 0.13),
    "lfw": (60, 220, 0.5, 0.03),
    "location": (60, 400, 1.0, 0.08),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_real_data_set_trains_privately(name, tmp_path):
    if not CATALOGUE[name].available():
        pytest.skip(f"{name} is not in the GRADVEIL_DATA directory")
    steps, batch, lr, least = SETTINGS[name]
    config = RunConfig.check(
        {"dataset": name, "strategy": "dyn-s-decay", "steps": steps, "batch_size": batch, "lr": lr}
        | {"clip": 1.0, "sigma": 0.7, "evaluate_every": steps, "checkpoint_every": steps}
    )
    result = train(config, run_dir=tmp_path / "run", seed=1)
    assert result.accuracy > least
    assert 0 < result.statement.proved.epsilon < math.inf
    assert result.statement.proved.steps_charged == steps
