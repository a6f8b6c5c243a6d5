"""train() and resume() from end to end on digits: repeatable, stopped where they should be, and nothing half-done."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from digits_runs import SEED, Killed, equal, interrupted, killed, settings, tensors
from gradveil.accounting import from_releases, proved_epsilon
from gradveil.accounting.ledger import Ledger
from gradveil.errors import BudgetExhausted, ConfigError
from gradveil.training import loop as training
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.loop import Result, resume, train
from gradveil.training.run_directory import RunDirectory

# ---- repeatable


VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "dyn-sigma": {"strategy": "dyn-sigma", "sigma": 40.0, "steps": 6},
    "dyn-s-sigma": {"strategy": "dyn-s-sigma", "steps": 6},
    "quantile-clip, momentum": {"strategy": "quantile-clip", "momentum": 0.9},
    "adaclip, adam": {"strategy": "adaclip", "optimizer": "adam", "lr": 0.01},
    "non-private": {"strategy": "non-private"},
    "dropout": {"dropout": 0.5},
    "without replacement": {"sampling": "without-replacement"},
    "flat": {"clipping": "flat"},
    "averaged weights": {"average": 0.9},
    "noise on a lattice": {"noise": "lattice"},
    "noise on a lattice, adaclip": {"noise": "lattice", "strategy": "adaclip"},
    "views": {"views": 2, "augment": "flip"},
    "views that are drawn, in parts": {"views": 3, "augment": "flip-shift", "physical_batch_size": 10},
    "scattering of views": {"features": "scattering", "model": "linear", "views": 2, "augment": "flip"},
    "scattering, a target": {"features": "scattering", "model": "linear", "sigma": None, "epsilon": 3.0},
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_two_runs_with_one_seed_are_bit_equal(tmp_path: Path, name: str) -> None:
    config = settings(**VARIANTS[name])
    results = [train(config, run_dir=tmp_path / run, seed=SEED) for run in "ab"]
    assert equal(tensors(tmp_path / "a"), tensors(tmp_path / "b"))
    assert results[0].accuracy == results[1].accuracy
    assert results[0].ended == "finished" and not results[0].budget_exhausted
    ledgers = [RunDirectory(tmp_path / run).verified_ledger() for run in "ab"]
    assert ledgers[0].releases == ledgers[1].releases
    assert len(ledgers[0].releases) == (0 if name == "non-private" else config.steps)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_an_interrupted_run_resumes_bit_equal_from_its_checkpoint(tmp_path: Path, name: str) -> None:
    config = settings(**VARIANTS[name])
    train(config, run_dir=tmp_path / "whole", seed=SEED)
    interrupted(config, tmp_path / "cut", after=4)
    result = resume(tmp_path / "cut")
    assert result.steps == config.steps
    assert equal(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


def test_another_seed_and_no_seed_give_other_models(tmp_path: Path) -> None:
    config = settings(steps=2)
    for name, seed in {"a": SEED, "b": SEED + 1, "c": None, "d": None}.items():
        train(config, run_dir=tmp_path / name, seed=seed)
    models = [tensors(tmp_path / name, "model.") for name in "abcd"]
    for i, one in enumerate(models):
        for other in models[i + 1 :]:
            assert not any(torch.equal(v, other[k]) for k, v in one.items())


@pytest.mark.parametrize("strategy", ["baseline", "quantile-clip", "non-private"])
def test_the_physical_batch_size_changes_nothing_beyond_rounding(tmp_path: Path, strategy: str) -> None:
    train(settings(strategy=strategy), run_dir=tmp_path / "whole", seed=SEED)
    train(settings(strategy=strategy, physical_batch_size=5), run_dir=tmp_path / "parts", seed=SEED)
    whole, parts = tensors(tmp_path / "whole", "model."), tensors(tmp_path / "parts", "model.")
    for key, value in whole.items():
        assert torch.allclose(value, parts[key], rtol=1e-3, atol=1e-4)
    mine, theirs = (RunDirectory(tmp_path / n).verified_ledger().releases for n in ("whole", "parts"))
    assert [(r.step, r.sigma) for r in mine] == [(r.step, r.sigma) for r in theirs]


def test_a_non_private_run_takes_all_its_steps_also_where_batches_are_empty(tmp_path: Path) -> None:
    """Poisson batches of expected size 1 are empty a third of the time."""
    result = train(settings(strategy="non-private", batch_size=1, steps=30), run_dir=tmp_path / "run", seed=SEED)
    assert result.steps == 30


# ---- stopping


def test_stopping_on_private_data_charges_all_declared_steps(tmp_path: Path) -> None:
    result = train(settings(stop_at_accuracy=0.01, steps=40), run_dir=tmp_path / "run", seed=SEED)
    assert result.steps == 4
    assert result.ended.startswith("stopped at test accuracy")
    assert result.statement.steps_taken == 4
    assert result.statement.proved.steps_charged == 40
    whole = train(settings(steps=40), run_dir=tmp_path / "whole", seed=SEED)
    assert result.statement.proved.epsilon == pytest.approx(whole.statement.proved.epsilon)


def test_stopping_on_public_data_charges_the_steps_taken(tmp_path: Path) -> None:
    result = train(settings(stop_at_accuracy=0.01, stop_data="public", steps=40), run_dir=tmp_path / "run", seed=SEED)
    assert result.steps == 4
    assert result.statement.proved.steps_charged == 4
    short = train(settings(steps=4), run_dir=tmp_path / "short", seed=SEED)
    assert result.statement.proved.epsilon == pytest.approx(short.statement.proved.epsilon)


def test_a_target_that_is_not_reached_stops_nothing(tmp_path: Path) -> None:
    result = train(settings(stop_at_accuracy=1.0), run_dir=tmp_path / "run", seed=SEED)
    assert (result.steps, result.ended) == (12, "finished")


def test_a_runkilled_after_it_reached_its_target_stops_there_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(stop_at_accuracy=0.01, stop_data="public")
    whole = train(config, run_dir=tmp_path / "whole", seed=SEED)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "end", killed)
        with pytest.raises(Killed):
            train(config, run_dir=tmp_path / "cut", seed=SEED)
    resumed = resume(tmp_path / "cut")
    assert resumed.steps == whole.steps == 4
    assert equal(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


def test_the_budget_stops_the_run_before_the_step_that_would_overspend(tmp_path: Path) -> None:
    config = settings(sigma=3.0, steps=60, evaluate_every=60, checkpoint_every=60)
    releases = train(config, run_dir=tmp_path / "free", seed=SEED)
    contents = RunDirectory(tmp_path / "free").verified_ledger()
    budget = proved_epsilon(contents.header, contents.releases[:20], charge="taken").epsilon * 1.0001
    assert budget < releases.statement.proved.epsilon

    result = train(config.model_copy(update={"budget": budget}), run_dir=tmp_path / "run", seed=SEED)
    assert result.budget_exhausted
    assert result.steps == 20
    assert "step 20 of 60" in result.ended and "budget" in result.ended
    spent = RunDirectory(tmp_path / "run").verified_ledger()
    assert len(spent.releases) == 20
    assert spent.ended == result.ended
    assert result.statement.proved.epsilon <= budget
    checkpoint = RunDirectory(tmp_path / "run").newest_checkpoint()
    assert checkpoint is not None and checkpoint.step == 20


def test_a_budget_too_small_for_one_step_takes_none(tmp_path: Path) -> None:
    result = train(settings(budget=1e-3), run_dir=tmp_path / "run", seed=SEED)
    assert result.budget_exhausted and result.steps == 0
    assert result.statement.proved.epsilon == 0
    assert result.noise_std_first is None
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_budget_holds_for_what_is_charged_when_stopping_on_private_data(tmp_path: Path) -> None:
    """All declared steps are charged from the start, so a plan that costs more than the budget cannot begin."""
    config = settings(sigma=2.0, steps=100, stop_at_accuracy=0.01, budget=1.0)
    free = train(settings(sigma=2.0, steps=100), run_dir=tmp_path / "free", seed=SEED)
    assert free.statement.proved.epsilon > 1.0
    try:
        result = train(config, run_dir=tmp_path / "run", seed=SEED)
    except (ConfigError, BudgetExhausted):
        return
    assert result.statement.proved.epsilon <= 1.0


def test_a_budget_holds_over_a_resumed_run_too(tmp_path: Path) -> None:
    config = settings(sigma=3.0, steps=40, evaluate_every=40)
    train(config, run_dir=tmp_path / "free", seed=SEED)
    contents = RunDirectory(tmp_path / "free").verified_ledger()
    budget = proved_epsilon(contents.header, contents.releases[:15], charge="taken").epsilon * 1.0001
    run = interrupted(config.model_copy(update={"budget": budget}), tmp_path / "run", after=8)
    with open(run.ledger, "ab") as file:
        file.write(b'{"n":')
    result = resume(tmp_path / "run")
    assert result.budget_exhausted
    assert result.statement.steps_recovered == 1
    assert len(run.verified_ledger().releases) == 15
    assert result.steps == 14, "the line that was lost is spent"
    assert result.statement.proved.epsilon <= budget


# ---- the run directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Result, RunConfig]:
    where = tmp_path_factory.mktemp("training") / "run"
    config = settings(strategy="quantile-clip", options={"quantile": 0.6}, momentum=0.5)
    command = ["gradveil", "train", "--seed", str(SEED), f"--seed={SEED}"]
    result = train(config, run_dir=where, seed=SEED, command=command)
    return RunDirectory(where), result, config


def test_a_run_directory_holds_what_it_should_and_nothing_else(
    finished: tuple[RunDirectory, Result, RunConfig],
) -> None:
    run, _, _ = finished
    assert sorted(str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()) == [
        "checkpoints/step-00000008.json",
        "checkpoints/step-00000008.safetensors",
        "checkpoints/step-00000012.json",
        "checkpoints/step-00000012.safetensors",
        "config.toml",
        "environment.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "secret.json",
    ]
    assert {"gradveil", "python", "torch", "device", "command"} <= json.loads(run.environment.read_text()).keys()


def test_the_seed_is_in_secret_json_alone_and_only_its_owner_may_read_that(
    finished: tuple[RunDirectory, Result, RunConfig],
) -> None:
    run, _, _ = finished
    holding = [p.name for p in run.path.rglob("*") if p.is_file() and str(SEED).encode() in p.read_bytes()]
    assert holding == ["secret.json"]
    assert stat.S_IMODE(run.secret.stat().st_mode) == 0o600
    assert run.read_seed() == SEED
    packed = [SEED.to_bytes(size, order) for size in (4, 8) for order in ("little", "big")]
    for path in run.checkpoints.iterdir():
        assert not any(p in path.read_bytes() for p in packed)


def test_a_run_without_a_seed_has_no_secret(tmp_path: Path) -> None:
    train(settings(steps=1), run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "secret.json").exists()
    assert not RunDirectory(tmp_path / "run").verified_ledger().header.seeded


def test_metrics_are_one_json_object_per_look_with_the_steps_in_order(
    finished: tuple[RunDirectory, Result, RunConfig],
) -> None:
    run, result, _ = finished
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [m["step"] for m in found] == [4, 8, 12]
    assert found == run.read_metrics()
    assert found[-1]["accuracy"] == result.accuracy
    for metric in found:
        assert math.isfinite(metric["loss"]) and 0 <= metric["accuracy"] <= 1
        assert metric["epsilon"] > 0 and metric["epsilon_kind"] == "proved (PLD)"
        assert metric["noise_std"] == pytest.approx(metric["sigma"] * metric["clip"])
    assert [m["epsilon"] for m in found] == sorted(m["epsilon"] for m in found)
    assert found[-1]["epsilon"] >= result.statement.proved.epsilon


def test_config_toml_is_the_configuration_again(finished: tuple[RunDirectory, Result, RunConfig]) -> None:
    run, _, config = finished
    again = RunConfig.check(read_toml(run.config))
    assert again == config
    assert again.digest() == config.digest()
    assert "seed" not in run.config.read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"delta": 1e-7, "lr": 1e-05, "clip": 3, "budget": 1e22},
        {"data_dir": 'C:\\data "x"\n\u00e4\u4e2d\U0001f600\x7f'},
        {"fixed_variance": True, "strategy": "dyn-s-decay", "clip_end": 0.1, "clip_decay": "cyclic"},
        {"options": {"quantile": 0.25, "learning_rate": 1.0, "count_noise": 1e16}},
        {"stop_at_accuracy": 1, "stop_data": "public", "physical_batch_size": 7},
    ],
)
def test_every_configuration_survives_config_toml(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = settings(**changes)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert RunConfig.check(read_toml(tmp_path / "config.toml")) == config


def test_the_result_is_what_the_ledger_says(finished: tuple[RunDirectory, Result, RunConfig]) -> None:
    run, result, _ = finished
    contents = run.verified_ledger()
    assert contents.ended == "finished"
    assert [r.step for r in contents.releases] == list(range(12))
    assert result.statement.proved == proved_epsilon(contents.header, contents.releases)
    assert dict(result.statement.paper) == from_releases(contents.header, contents.releases)
    assert result.noise_std_first == max(contents.releases[0].noise_std)
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_pin_of_every_checkpoint_covers_its_steps(finished: tuple[RunDirectory, Result, RunConfig]) -> None:
    run, _, _ = finished
    contents = run.verified_ledger()
    lines = run.ledger.read_text().splitlines()
    kinds = ["release" if line[0] == "[" else json.loads(line)["kind"] for line in lines]
    assert run.list_checkpoints()
    for path in run.list_checkpoints():
        facts = json.loads(path.read_text())
        assert kinds[: facts["ledger_length"]].count("release") == facts["step"]
        assert contents.hashes[facts["ledger_length"] - 1] == facts["ledger_head"]


def test_a_metric_cut_off_by_a_crash_costs_no_other_metric(tmp_path: Path) -> None:
    run = interrupted(settings(), tmp_path / "run", after=4)
    with open(run.metrics, "a") as file:
        file.write('{"step": 8, "lo')
    resume(tmp_path / "run")
    assert [m["step"] for m in run.read_metrics()] == [4, 8, 12]


def test_resuming_a_finished_run_gives_its_result_again_and_changes_nothing(
    finished: tuple[RunDirectory, Result, RunConfig],
) -> None:
    run, result, _ = finished
    before = run.ledger.read_bytes()
    again = resume(run.path)
    assert (again.steps, again.ended, again.accuracy) == (result.steps, result.ended, result.accuracy)
    assert again.statement.to_dict() == result.statement.to_dict()
    assert again.noise_std_last == result.noise_std_last
    assert run.ledger.read_bytes() == before


def test_the_progress_is_told_after_the_ledger_is_on_disk(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    told: list[tuple[int, int]] = []

    def tell(progress: training.Progress) -> None:
        told.append((progress.step, len(run.verified_ledger().releases)))

    train(settings(), run_dir=run.path, progress=tell)
    assert told[-1][0] == 12
    assert all(step <= releases for step, releases in told)
