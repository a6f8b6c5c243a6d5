"""Settings are chosen by training examples that are held out; the test set is read for what is published."""

from __future__ import annotations

import pytest
import torch

from gradveil.errors import ConfigError
from gradveil.training import inputs
from gradveil.training import loop as training
from gradveil.training.config import RunConfig


def test_settings_are_judged_by_training_examples_that_are_held_out(tmp_path):
    """What is held out takes no part in training, the test set is not there, and the population is smaller."""
    config = RunConfig.check({"dataset": "digits", "steps": 3, "batch_size": 32, "epsilon": 3.0, "delta": 1e-4})
    whole = inputs.prepare(config)
    held = inputs.hold_out(whole, 200)
    assert (len(held.y_train), len(held.y_test)) == (len(whole.y_train) - 200, 200)
    rows = {tuple(x.flatten().tolist()) for x in held.x_train}
    assert sum(tuple(x.flatten().tolist()) in rows for x in held.x_test) <= 2  # digits that are drawn alike
    assert torch.equal(held.x_test, inputs.hold_out(whole, 200).x_test)
    run = training.train(config, run_dir=tmp_path / "run", seed=1, inputs=held)
    assert run.statement.header.population == len(whole.y_train) - 200
    assert 2.9 < run.statement.proved.epsilon <= 3.0
    for count in (0, len(whole.y_train)):
        with pytest.raises(ConfigError, match="cannot be held out"):
            inputs.hold_out(whole, count)
