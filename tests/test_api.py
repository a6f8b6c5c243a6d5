"""The commands as functions."""

from __future__ import annotations

import json
import math
import stat

import pytest

import gradveil
from gradveil.errors import ConfigError

TINY = {"dataset": "digits", "steps": 4, "batch_size": 64, "lr": 0.1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a"
    gradveil.train(run_dir=path, strategy="baseline", **TINY)
    return path


def test_a_run_is_attacked_and_what_is_found_is_kept_in_it(run):
    outcome = gradveil.attack(run, attack="map", victims=2, iterations=3)
    assert outcome.trial.strategy == "baseline"
    assert outcome.trial.training_batch == 64
    (folder,) = (run / "attacks").iterdir()
    assert json.loads((folder / "result.json").read_text())["dataset"] == "digits"
    for private in ("pictures.npz", "secret.json"):  # training examples, and which they are
        assert stat.S_IMODE((folder / private).stat().st_mode) == 0o600
    assert '"seed"' not in (folder / "result.json").read_text()
    (row,) = gradveil.compare(run)
    assert row["attack"] == "map"


def test_what_a_run_has_is_not_given_again(run):
    with pytest.raises(ConfigError, match="strategy"):
        gradveil.attack(run, strategy="dyn-s")


def test_accounts_of_a_run_and_of_its_parameters(run):
    found = gradveil.account(run)
    assert set(found.proved) == {"add-remove", "replace-one"}
    planned = gradveil.account(sigma=6.0, sample_rate=64 / 1347, steps=4, layers=3)
    assert found.proved["add-remove"].epsilon == pytest.approx(planned.proved["add-remove"].epsilon, rel=1e-6)
    assert found.as_published["MA"].epsilon == pytest.approx(planned.as_published["MA"].epsilon, rel=1e-9)


@pytest.mark.parametrize("given", [{}, {"sigma": 6.0}, {"sigma": 6.0, "steps": 10}])
def test_an_account_needs_a_run_or_all_parameters(given):
    with pytest.raises(ConfigError, match="needs"):
        gradveil.account(**given)


def test_a_run_and_parameters_do_not_go_together(run):
    with pytest.raises(ConfigError, match="ledger"):
        gradveil.account(run, sigma=3.0)


def test_gates(run):
    assert all(gate.passed for gate in gradveil.check(run, max_epsilon=100.0))
    assert not all(gate.passed for gate in gradveil.check(run, max_epsilon=1e-6))


def test_a_page(run, tmp_path):
    page = gradveil.report(run, out=tmp_path / "page.html")
    assert "baseline" in page.read_text()
    assert gradveil.report(run) == run / "report.html"
    with pytest.raises(ConfigError, match="no run"):
        gradveil.report()


def test_a_run_directory_is_made_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = gradveil.train(strategy="non-private", **TINY)
    assert result.run_dir.parent.name == "runs"
    assert math.isinf(result.statement.proved.epsilon)
