"""Recipes: they are valid, they say how they were chosen, and a run keeps to the epsilon that it was asked for."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from gradveil.cli.train import command as train_command
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism import strategies
from gradveil.training import recipes
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.data import CATALOGUE
from gradveil.training.inputs import inputs_of, prepare
from gradveil.training.loop import resume, train
from gradveil.training.recipes.average import AveragedModel
from gradveil.training.recipes.selection import epsilon_of_search, epsilon_with_search
from gradveil.training.recipes.target import TOLERANCE
from gradveil.training.run_directory import RunDirectory

SEED = 5
PROVED = [name for name in strategies.names() if strategies.get(name).guarantee == "proved"]
UNPROVED = [name for name in strategies.names() if name not in PROVED]


# ---- recipes as data


def test_every_promised_recipe_is_there():
    promised = {f"{name}-{epsilon}" for name in ("mnist", "fashion-mnist", "cifar10") for epsilon in ("0.8", "3")}
    assert promised <= set(recipes.names())


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_a_valid_run_with_a_target(name):
    recipe = recipes.get(name)
    config = RunConfig.check(recipe.settings)
    assert config.awaits_sigma
    assert recipe.dataset in CATALOGUE
    assert config.delta < 1 / CATALOGUE[recipe.dataset].train
    assert name == f"{recipe.dataset}-{recipe.epsilon:.1g}"
    assert recipe.summary
    assert recipe.tried >= 0
    # What epsilon_with_search takes for granted.
    assert strategies.get(config.strategy).noise == "constant"
    assert strategies.get(config.strategy).guarantee == "proved"
    assert config.sampling == "poisson"


def test_an_unknown_recipe_names_the_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown recipe 'mnist-0\.9'\. Did you mean 'mnist-0\.8'"):
        recipes.get("mnist-0.9")


# ---- what choosing costs


def test_one_run_costs_what_it_was_calibrated_to_and_more_cost_more():
    shared = {"sample_rate": 0.04, "steps": 300}
    spent = [epsilon_of_search(0.823, runs, **shared) for runs in (1, 4, 25)]
    assert 0.81 < spent[0] <= 0.823
    # Nearly Gaussian: epsilon grows a little faster than the root of the number of runs.
    assert 2 * spent[0] < spent[1] < 2.3 * spent[0]
    assert 5 * spent[0] < spent[2] < 7 * spent[0]


def test_a_recipe_says_how_it_was_chosen():
    chosen = recipes.Recipe(name="x", summary="y", tried=7, settings=recipes.get("digits-3").settings)
    assert "the test accuracy of 7 runs" in chosen.declaration
    assert "does not cover that choice" in chosen.declaration
    assert epsilon_with_search(chosen) > 2 * chosen.epsilon


# ---- averaged weights


def test_the_average_follows_the_weights_and_forgets_where_they_began():
    model = nn.Linear(3, 2)
    average = AveragedModel(model, 0.9)
    begun = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    expected = 0.0  # share of the new weights
    for step in range(1, 30):
        average.follow(step)
        expected += (1 - expected) * (1 - min(0.9, (1 + step) / (10 + step)))
    assert expected > 0.99
    for name, value in average.module.state_dict().items():
        assert torch.allclose(value, begun[name] + expected, atol=1e-5)


def test_training_is_the_same_with_and_without_an_average(tmp_path):
    plain = {"dataset": "digits", "steps": 6, "batch_size": 64, "sigma": 5.0}
    without = train(RunConfig.check(plain), run_dir=tmp_path / "without", seed=SEED)
    with_one = train(RunConfig.check(plain | {"average": 0.9}), run_dir=tmp_path / "with", seed=SEED)
    assert without.accuracy_unaveraged is None
    assert with_one.accuracy_unaveraged == without.accuracy
    assert with_one.statement.proved == without.statement.proved
    look = RunDirectory(tmp_path / "with").read_metrics()[-1]
    assert (look["accuracy"], look["accuracy_unaveraged"]) == (with_one.accuracy, with_one.accuracy_unaveraged)
    assert resume(tmp_path / "with").accuracy_unaveraged == without.accuracy  # finished: from what it left


# ---- a target epsilon


def tiny(**changes):
    made = {"dataset": "digits", "model": "auto", "steps": 8, "batch_size": 64, "epsilon": 2.0, "clip": 1.0}
    return RunConfig.check(made | changes)


VARIANTS = [
    *({"strategy": name} for name in PROVED),
    {"clipping": "flat"},
    {"strategy": "quantile-clip", "options": {"count_noise": 30.0}},
    {"strategy": "dyn-s-decay", "fixed_variance": True},
    {"strategy": "dyn-s-l2max", "reading": "batch", "fixed_variance": True},
    {"strategy": "dyn-sigma", "sigma_decay": "linear", "sigma_end": 1.5},
    {"sampling": "without-replacement"},
    {"epsilon": 0.05},
    {"epsilon": 200.0},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: " ".join(f"{v}" for v in c.values()))
def test_a_run_spends_the_epsilon_that_was_asked_for_and_no_more(changes, tmp_path):
    config = tiny(**changes)
    result = train(config, run_dir=tmp_path / "run", seed=SEED)
    assert result.ended == "finished"
    spent = result.statement.proved.epsilon
    assert (1 - 3 * TOLERANCE) * config.epsilon <= spent <= config.epsilon
    kept = RunConfig.check(read_toml(tmp_path / "run" / "config.toml"))
    assert kept.calibrated and kept.epsilon == config.epsilon
    releases = RunDirectory(tmp_path / "run").verified_ledger().releases
    if not config.fixed_variance:
        assert releases[0].sigma == kept.sigma


@pytest.mark.parametrize("name", UNPROVED)
def test_a_target_is_refused_where_nothing_is_proved(name, tmp_path):
    with pytest.raises(ConfigError, match=r"epsilon = 2 was asked for, but strategy .* Choose a proved strategy"):
        train(tiny(strategy=name), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="shuffled batches"):
        train(tiny(sampling="shuffle", allow_unproved=True), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_target_that_no_noise_meets_is_refused(tmp_path):
    config = tiny(strategy="quantile-clip", options={"count_noise": 0.5}, epsilon=0.5)
    with pytest.raises(ConfigError, match="out of reach"):
        train(config, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be spent: at sigma = 2"):
        train(tiny(strategy="dyn-sigma", sigma_end=2.0), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_interrupted_keeps_to_its_target(tmp_path, monkeypatch):
    """Steps that it repeats are charged again, so the last ones are not taken."""

    class Killed(BaseException):
        pass

    save = RunDirectory.save_checkpoint

    def killed_later(self, step, *args):
        if step == 6:
            raise Killed
        save(self, step, *args)

    config = tiny(checkpoint_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", killed_later)
        with pytest.raises(Killed):
            train(config, run_dir=tmp_path / "run", seed=SEED)
    result = resume(tmp_path / "run")
    assert result.budget_exhausted and result.steps < 8
    assert result.statement.proved.epsilon <= 2.0


def test_a_sigma_that_was_found_for_another_plan_is_not_used_again(tmp_path):
    train(tiny(), run_dir=tmp_path / "first", seed=SEED)
    stored = read_toml(tmp_path / "first" / "config.toml")
    longer = RunConfig.check(stored | {"steps": 32})
    again = train(longer, run_dir=tmp_path / "second", seed=SEED)
    assert again.statement.proved.epsilon <= 2.0
    assert read_toml(tmp_path / "second" / "config.toml")["sigma"] > 1.1 * stored["sigma"]


# ---- the command


@pytest.fixture
def gradveil(tmp_path, monkeypatch, capsys):
    from gradveil.cli import main

    def call(*args):
        monkeypatch.setattr("sys.argv", ["gradveil", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def test_a_recipe_is_one_command(gradveil, tmp_path):
    where = tmp_path / "run"
    code, out, err = gradveil("train", "--recipe", "digits-3", "--steps", 20, "--seed", 1, "--run-dir", where, "--json")
    assert code == 0, err
    assert "recipe digits-3" in err
    told = json.loads(out)
    assert told["steps"] == 20
    assert 2.98 < told["privacy"]["proved"]["epsilon"] <= 3.0
    assert told["accuracy"] > 0.7
    code, out, err = gradveil("train", "--resume", where, "--recipe", "digits-3", "--steps", 20, "--json")
    assert code == 0, err
    code, _, err = gradveil("train", "--resume", where, "--recipe", "digits-3")
    assert code == 2 and "started with steps = 20" in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--recipe", "minst-0.8"), "mnist-0.8"),
        (("--recipe", "digits-3", "--sigma", "4"), "are both given"),
        (("--epsilon", "1", "--sigma", "4"), "are both given"),
        (("--epsilon", "1", "--strategy", "dyn-s"), "was asked for"),
        (("--epsilon", "0"), "greater than 0"),
        (("--model", "scatter-cnn"), "give features"),
        (("--model", "tempered-cnn"), "not bounded"),
        (("--dataset", "location", "--features", "scattering"), "Leave the features out"),
        (("--average", "1"), "less than 1"),
    ],
)
def test_bad_input_is_refused_with_nothing_written(gradveil, tmp_path, args, said):
    code, _, err = gradveil("train", *args, "--run-dir", tmp_path / "run")
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_the_config_of_a_calibrated_run_starts_a_new_one_but_not_with_another_sigma(gradveil, tmp_path):
    train(tiny(), run_dir=tmp_path / "first", seed=SEED)
    stored = tmp_path / "first" / "config.toml"
    code, out, err = gradveil("train", "--config", stored, "--steps", 16, "--run-dir", tmp_path / "b", "--json")
    assert code == 0, err
    assert json.loads(out)["privacy"]["proved"]["epsilon"] <= 2.0
    code, _, err = gradveil("train", "--config", stored, "--sigma", 1, "--run-dir", tmp_path / "c")
    assert code == 2 and "are both given" in err


def test_the_list(gradveil):
    code, out, _ = gradveil("recipes")
    assert code == 0
    for name in recipes.names():
        assert name in out
    code, out, _ = gradveil("recipes", "--json")
    assert [row["name"] for row in json.loads(out)] == recipes.names()
    code, _, err = gradveil("recipes", "digts-3")
    assert code == 2 and "digits-3" in err


def test_a_recipe_is_shown_as_a_file_for_config(gradveil, tmp_path):
    code, out, _ = gradveil("recipes", "digits-3")
    assert code == 0
    (tmp_path / "mine.toml").write_text(out)
    assert RunConfig.check(read_toml(tmp_path / "mine.toml")) == RunConfig.check(recipes.get("digits-3").settings)


def test_every_option_of_a_recipe_is_an_option_of_the_command():
    known = {parameter.name for parameter in train_command.params}
    assert set().union(*(recipes.get(name).settings for name in recipes.names())) <= known


# ---- inputs that runs share


def test_runs_on_shared_inputs_are_the_runs_that_they_would_be(tmp_path):
    config = RunConfig.check({**recipes.get("digits-3").settings, "steps": 5})
    inputs = prepare(config)
    assert inputs.x_train.shape[1:] == (81, 2, 2)
    shared = train(config, run_dir=tmp_path / "a", seed=SEED, inputs=inputs)
    alone = train(config, run_dir=tmp_path / "b", seed=SEED)
    assert shared.accuracy == alone.accuracy
    ledgers = [RunDirectory(tmp_path / name).verified_ledger().releases for name in "ab"]
    assert ledgers[0] == ledgers[1]
    with pytest.raises(ConfigError, match="Prepare them from its configuration"):
        train(RunConfig.check({"steps": 5}), run_dir=tmp_path / "c", inputs=inputs)


# ---- real data


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "least"), [("mnist-0.8", 0.93), ("fashion-mnist-0.8", 0.8)])
def test_a_recipe_is_accurate_after_a_few_large_steps(name, least, tmp_path):
    """The noise of the whole recipe, a fortieth of its steps, on its first test examples."""
    recipe = recipes.get(name)
    if not CATALOGUE[recipe.dataset].available():
        pytest.skip(f"{recipe.dataset} is not in the GRADVEIL_DATA directory")
    from dataclasses import replace

    from gradveil.training import data

    whole = data.load(recipe.dataset)
    few = replace(whole, x_train=whole.x_train[:3000], y_train=whole.y_train[:3000], x_test=whole.x_test[:1000],
                  y_test=whole.y_test[:1000])  # fmt: skip
    config = RunConfig.check(
        {**recipe.settings, "epsilon": 30.0, "batch_size": 300, "steps": 60, "lr": 2.0, "model": "linear"}
    )
    result = train(config, run_dir=tmp_path / "run", seed=SEED, inputs=inputs_of(config, few))
    assert result.accuracy > least
    assert math.isfinite(result.statement.proved.epsilon)
