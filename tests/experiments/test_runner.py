"""Cells are run once, those that were broken off begin anew, and results are the same however they are spread."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gradveil.errors import ConfigError
from gradveil.experiments import cells, runner
from gradveil.experiments.cells import RESULT, Cell, Place, run_cell
from gradveil.experiments.plan import Plan
from gradveil.experiments.runner import Store, Workers
from gradveil.training import loop as training
from gradveil.training.config import RunConfig
from gradveil.training.run_directory import RunDirectory

TINY = {"dataset": "digits", "strategy": "baseline", "steps": 4, "batch_size": 32, "lr": 0.1, "evaluate_every": 2}
ALONE = Workers(jobs=1)


def tiny(**settings):
    return Cell("train", {**TINY, "seed": 0, **settings})


@pytest.fixture
def counted(monkeypatch):
    """A kind of cell that only counts, and breaks off at a given one."""
    ran = []

    def count(settings, folder, place):
        if settings.get("breaks") and not ran.count("broken"):
            ran.append("broken")
            raise KeyboardInterrupt
        ran.append(settings["n"])
        return {"n": settings["n"]}

    monkeypatch.setitem(cells.KINDS, "count", count)
    return ran


def test_a_cells_name_is_its_settings():
    assert tiny().key == tiny().key
    assert tiny(sigma=6.0).key != tiny(sigma=5.0).key
    assert tiny().key.startswith("train-digits-baseline-")
    assert Cell("attack", tiny().settings).key != tiny().key
    assert Cell("train", dict(reversed(tiny().settings.items()))).key == tiny().key


def test_a_command_that_was_broken_off_repeats_no_cell(tmp_path, counted):
    wanted = [Cell("count", {"n": n, "breaks": n == 3}) for n in range(6)]
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).run(wanted, ALONE)
    assert counted == [0, 1, 2, "broken"]
    told = []
    found = Store(tmp_path).run(wanted, ALONE, lambda done, of, result: told.append((done, of)))
    assert counted == [0, 1, 2, "broken", 3, 4, 5]
    assert told == [(4, 6), (5, 6), (6, 6)]
    assert [found[cell.key]["n"] for cell in wanted] == list(range(6))


def test_cells_in_common_are_run_once(tmp_path, counted):
    store = Store(tmp_path)
    store.run([Cell("count", {"n": 1}), Cell("count", {"n": 1}), Cell("count", {"n": 2})], ALONE)
    store.run([Cell("count", {"n": 2}), Cell("count", {"n": 3})], ALONE)
    assert counted == [1, 2, 3]


def test_a_half_written_result_is_never_seen(tmp_path, counted, monkeypatch):
    cell = Cell("count", {"n": 1})

    def dies(path, data):
        raise OSError("the disk is full")

    monkeypatch.setattr(cells, "write_whole", dies)
    with pytest.raises(OSError, match="full"):
        run_cell(cell, tmp_path / "cell", Place())
    assert Store(tmp_path).get(cell) is None


def test_a_training_cell_tells_what_tables_need(tmp_path):
    result = run_cell(tiny(), tmp_path, Place())
    assert [look["step"] for look in result["trace"]] == [2, 4]
    assert result["trace"][-1]["as_published"]["MA"] == pytest.approx(result["as_published"]["MA"])
    assert result["trace"][0]["as_published"]["MA"] < result["as_published"]["MA"]
    assert result["proved"]["epsilon"] > 0
    assert 0 <= result["accuracy"] <= 1
    assert result["trace"][-1]["noise_std"] == pytest.approx(24.0)
    assert json.loads((tmp_path / RESULT).read_text()) == result
    plain = run_cell(tiny(strategy="non-private"), tmp_path / "plain", Place())
    assert plain["as_published"] == {}
    assert plain["proved"]["epsilon"] == "inf"


def test_a_run_that_was_killed_begins_anew_and_is_charged_once(tmp_path, monkeypatch):
    whole = run_cell(tiny(checkpoint_every=1), tmp_path / "whole", Place())
    config = RunConfig.check({**TINY, "checkpoint_every": 1})
    seen = []

    class Killed(Exception):
        pass

    original = training.Session._save

    def save(self):
        original(self)
        seen.append(1)
        if len(seen) == 2:
            raise Killed

    monkeypatch.setattr(training.Session, "_save", save)
    with pytest.raises(Killed):
        training.train(config, run_dir=tmp_path / "cell" / "run", seed=0)
    monkeypatch.setattr(training.Session, "_save", original)
    resumed = run_cell(tiny(checkpoint_every=1), tmp_path / "cell", Place())
    assert resumed["accuracy"] == whole["accuracy"]
    assert [look["loss"] for look in resumed["trace"]][-1] is not None
    assert resumed["as_published"] == whole["as_published"]
    assert resumed["proved"] == whole["proved"]


def test_spread_over_processes_the_results_are_the_same(tmp_path):
    wanted = [tiny(sigma=sigma) for sigma in (2.0, 3.0, 4.0)]
    here = Store(tmp_path / "here").run(wanted, ALONE)
    there = Store(tmp_path / "there").run(wanted, Workers(jobs=2))
    for cell in wanted:
        assert here[cell.key]["accuracy"] == pytest.approx(there[cell.key]["accuracy"], abs=0.01)
        assert here[cell.key]["as_published"] == there[cell.key]["as_published"]


def test_over_a_dask_cluster(tmp_path):
    pytest.importorskip("dask.distributed", reason="needs the extra cluster")
    wanted = [tiny(sigma=sigma) for sigma in (2.0, 3.0)]
    found = Store(tmp_path).run(wanted, Workers(jobs=2, backend="dask"))
    assert [found[cell.key]["settings"]["sigma"] for cell in wanted] == [2.0, 3.0]


def test_time_is_measured_with_nothing_beside(tmp_path, monkeypatch):
    spread = []
    monkeypatch.setattr(runner, "_spread", lambda tasks, count, workers: spread.extend(tasks) or ())
    ran = []
    monkeypatch.setitem(cells.KINDS, "time", lambda settings, folder, place: ran.append(place.threads) or {})
    Store(tmp_path).run([Cell("time", {"n": n}) for n in range(3)], Workers(jobs=2))
    assert not spread
    assert ran == [None] * 3


def test_a_timed_cell(tmp_path):
    settings = {k: v for k, v in TINY.items() if k not in ("evaluate_every", "strategy")}
    rows = [{"strategy": "non-private"}, {"strategy": "baseline"}]
    cell = Cell("time", {**settings, "seed": 0, "device": "cpu", "repeats": 2, "warm_up": 1, "rows": rows})
    result = run_cell(cell, tmp_path, Place())
    assert [len(took) for took in result["seconds_per_step"]] == [2, 2]
    assert all(seconds > 0 for took in result["seconds_per_step"] for seconds in took)
    assert not list(tmp_path.glob("run*"))


def test_strategies_are_timed_in_turn_after_a_warm_up(tmp_path, monkeypatch):
    begun = []

    def train(config, *, run_dir, seed, inputs):
        begun.append(config.strategy)
        run_dir.mkdir()
        looks = [{"seconds": 50.0}, {"seconds": 100.0}, {"seconds": 100.0 + len(begun)}]
        assert (config.steps, config.evaluate_every) == (12, 4)
        monkeypatch.setattr(RunDirectory, "open", lambda path: SimpleNamespace(read_metrics=lambda: looks))

    monkeypatch.setattr(training, "train", train)
    rows = [{"strategy": "non-private"}, {"strategy": "baseline"}]
    shared = {"dataset": "digits", "steps": 4, "batch_size": 8, "lr": 0.1, "seed": 0, "device": "cpu"}
    result = run_cell(Cell("time", {**shared, "repeats": 2, "warm_up": 2, "rows": rows}), tmp_path, Place())
    assert begun == ["non-private", "baseline", "baseline", "non-private"]  # another is first each time
    assert result["seconds_per_step"] == [[0.25, 1.0], [0.5, 0.75]]


def test_a_plan_is_quick_or_the_papers():
    quick, full = Plan(), Plan(scale="full")
    assert quick.sets_of("mnist", "lfw") == ("digits",)
    assert full.sets_of("mnist", "lfw") == ("mnist", "lfw")
    assert Plan(sets=("location", "mnist")).sets_of("lfw", kind="image") == ("mnist",)
    assert full.length("mnist") == {"steps": 10_000, "batch_size": 600, "lr": 0.05}
    assert full.length("lfw")["steps"] == 6_000
    assert Plan(scale="full", lr=0.2).length("mnist")["lr"] == 0.2
    assert list(full.seeds_of(3)) == [0, 1, 2]
    assert list(quick.seeds_of(3)) == [0]
    assert list(Plan(seeds=2).seeds_of(3)) == [0, 1]


def test_a_backend_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="cluster"):
        Store(tmp_path).run([tiny(), tiny(sigma=2.0)], Workers(jobs=2, backend="ray"))
