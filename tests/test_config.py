"""The settings of a run: what earlier runs wrote still means the same, and a target epsilon excludes a sigma."""

from __future__ import annotations

import pytest

from gradveil.errors import ConfigError
from gradveil.training.config import RunConfig

# Digests that checkpoints of earlier versions carry.
EARLIER = {
    "e72c31bafe4c10d5e75765b96f45500b802cad8f8564a0738a7e86741f5cc3ff": {},
    "59348771e1bc21d0c32229659953d7fcde51736a941e2410950e97363d2022b3": {
        "dataset": "mnist",
        "strategy": "quantile-clip",
        "options": {"quantile": 0.6},
        "momentum": 0.5,
    },
    "2c192b4d53df3e73a79b1be2120c2e2a9e8a0710485dc79d6aea7480c9aaa3c2": {
        "dataset": "cifar10",
        "strategy": "dyn-sigma",
        "sigma": 15,
        "sigma_end": 4.0,
        "model": "paper-cnn",
        "budget": 3.0,
    },
}


@pytest.mark.parametrize("digest", EARLIER)
def test_the_digest_of_an_earlier_run_is_what_it_was(digest):
    assert RunConfig.check(EARLIER[digest]).digest() == digest


@pytest.mark.parametrize("digest", EARLIER)
def test_later_settings_at_their_defaults_are_not_written(digest):
    text = RunConfig.check(EARLIER[digest]).to_toml()
    for name in ("features", "average", "epsilon", "calibrated", "views", "augment"):
        assert name not in text


@pytest.mark.parametrize(
    "changes", [{"features": "scattering"}, {"average": 0.99}, {"epsilon": 1.0}, {"views": 2, "augment": "flip"}]
)
def test_later_settings_change_the_digest(changes):
    assert RunConfig.check(changes).digest() != RunConfig.check({}).digest()


def test_sigma_is_unknown_until_it_is_calibrated():
    config = RunConfig.check({"epsilon": 1.0})
    assert config.awaits_sigma
    assert config.plan_settings()["sigma"] is None
    assert "sigma" not in config.settings()
    assert RunConfig.check(config.settings()) == config
    found = config.model_copy(update={"sigma": 3.5, "calibrated": True})
    assert not found.awaits_sigma
    assert found.plan_settings()["sigma"] == 3.5
    assert RunConfig.check(found.settings()) == found


def test_sigma_and_epsilon_exclude_each_other():
    with pytest.raises(ConfigError, match=r"sigma = 6\.0 and epsilon = 1\.0 are both given.*Give one of them"):
        RunConfig.check({"sigma": 6.0, "epsilon": 1.0})
    with pytest.raises(ConfigError, match="calibrated says"):
        RunConfig.check({"sigma": 6.0, "calibrated": True})


@pytest.mark.parametrize("epsilon", [0, -1.0, float("inf"), float("nan")])
def test_a_target_is_a_positive_number(epsilon):
    with pytest.raises(ConfigError, match="epsilon"):
        RunConfig.check({"epsilon": epsilon})


@pytest.mark.parametrize("changes", [{"average": 1.0}, {"average": -0.1}, {"features": "pixels"}])
def test_other_refusals(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        RunConfig.check(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"views": 0},
        {"views": 1.5},
        {"views": 2},
        {"augment": "flip"},
        {"augment": "rotate", "views": 2},
        {"features": "scattering", "augment": "flip", "views": 3},
        {"features": "scattering", "augment": "flip-shift", "views": 2},
    ],
)
def test_views_and_what_they_are_go_together(changes):
    with pytest.raises(ConfigError, match=r"views|augment"):
        RunConfig.check(changes)
