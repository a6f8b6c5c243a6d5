"""The recipes as an experiment: quickly on digits, and what is said of made-up results at full length."""

from __future__ import annotations

import pytest
from made_up import result

from gradveil.experiments import proved_accuracy, published
from gradveil.experiments.experiment import Found
from gradveil.experiments.plan import Plan
from gradveil.experiments.runner import Store, Workers
from gradveil.training import recipes

FULL = Plan(scale="full")


def test_quickly_it_runs_a_recipe_and_shows_the_epsilon_of_its_ledger(tmp_path):
    store = Store(tmp_path)
    cells = proved_accuracy.cells(Plan())
    assert [cell.settings["dataset"] for cell in cells] == ["digits"]
    results = store.run(cells, Workers(jobs=1))
    report = proved_accuracy.report(Plan(), Found(results, tmp_path, store.folder))
    (entry,) = report.entries
    assert entry.mean > 0.9
    assert 2.98 < float(entry.beside["proved epsilon"]) <= 3.0
    assert entry.verdict == "nothing published"
    assert not report.claims


def test_at_full_length_every_recipe_has_three_seeds():
    cells = proved_accuracy.cells(FULL)
    assert len(cells) == 3 * 6
    assert {cell.settings["seed"] for cell in cells} == {0, 1, 2}
    assert {cell.settings["epsilon"] for cell in cells} == {0.823, 3.0}
    assert len({cell.key for cell in cells}) == len(cells)


def test_a_learning_rate_that_is_given_is_that_of_all_runs():
    assert {cell.settings["lr"] for cell in proved_accuracy.cells(Plan(scale="full", lr=0.7))} == {0.7}


def test_the_papers_best_comes_from_its_table():
    assert proved_accuracy.paper_best("mnist", *published.FIXED_SIGMA) == 0.983
    assert proved_accuracy.paper_best("cifar10", "baseline", "dyn-s-decay") == 0.610
    assert proved_accuracy.paper_best("digits", *published.FIXED_SIGMA) is None


@pytest.mark.parametrize(("accuracy", "verdict", "claim"), [(0.99, "higher", "holds"), (0.5, "lower", "does not hold")])
def test_measured_accuracies_stand_beside_the_papers(tmp_path, accuracy, verdict, claim):
    cells = proved_accuracy.cells(FULL)
    found = Found({c.key: result(c, lambda _: accuracy) for c in cells}, tmp_path, lambda c: tmp_path)
    report = proved_accuracy.report(FULL, found)
    by = {entry.where["recipe"]: entry for entry in report.entries}
    assert by.keys() == {name for name in recipes.names() if not name.startswith("digits")}
    for name, entry in by.items():
        assert entry.measured == [accuracy] * 3
        assert entry.verdict == (verdict if name.endswith("-0.8") else "nothing published")
    assert [c.verdict for c in report.claims] == [claim]
