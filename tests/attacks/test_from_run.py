"""A run as a target: its model, its plan, and where its bounds have moved to."""

import pytest

import gradveil
from gradveil.attacks.from_run import load_target
from gradveil.cli import cli
from gradveil.errors import ConfigError


@pytest.mark.parametrize(("strategy", "state"), [("quantile-clip", {"current"}), ("baseline", set())])
def test_bounds_that_a_run_has_moved_are_where_it_left_them(tmp_path, capsys, strategy, state):
    where = tmp_path / "run"
    few = ["--steps", "4", "--batch-size", "16", "--clip", "2", "--sigma", "4", "--seed", "1"]
    cli(["train", "--strategy", strategy, *few, "--run-dir", str(where)], standalone_mode=False)
    target = load_target(where)
    assert set(target.rule_state) == state and target.step == 3
    if state:
        assert not (target.rule_state["current"] == 2.0).any()
    out = str(tmp_path / "out")
    few = ["--attack", "map", "--victims", "2", "--iterations", "1", "--out", out]
    cli(["attack", str(where), *few], standalone_mode=False)
    assert strategy in capsys.readouterr().out


def test_an_adaclip_run_is_attacked_in_its_own_coordinates(tmp_path, capsys):
    where = tmp_path / "run"
    few = ["--steps", "3", "--batch-size", "16", "--sigma", "4", "--seed", "1"]
    cli(["train", "--strategy", "adaclip", *few, "--run-dir", str(where)], standalone_mode=False)
    state = load_target(where).rule_state
    assert any(name.startswith("mean.") for name in state) and any(name.startswith("spread.") for name in state)
    few = ["--attack", "map", "--victims", "2", "--iterations", "1", "--out", str(tmp_path / "out")]
    cli(["attack", str(where), *few], standalone_mode=False)
    assert "adaclip" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"features": "scattering", "model": "linear"}, "features 'scattering'"),
        ({"views": 2, "augment": "flip"}, "2 views of every example"),
    ],
)
def test_a_run_on_features_or_views_is_refused(tmp_path, settings, what):
    gradveil.train(dataset="digits", steps=2, batch_size=64, run_dir=tmp_path / "run", seed=0, **settings)
    with pytest.raises(ConfigError, match=f"was trained on {what}"):
        load_target(tmp_path / "run")
