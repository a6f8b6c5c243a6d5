"""A run directory is read as it is: finished, interrupted, damaged, attacked or not."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from gradveil.errors import RunDirectoryError
from gradveil.reports.comparison import HEADINGS, brief, row_of, shown
from gradveil.reports.facts import read_run
from small_runs import damaged, interrupted, trained, with_attack


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "baseline", strategy="baseline")


@pytest.fixture
def run(baseline, tmp_path):
    return shutil.copytree(baseline, tmp_path / "baseline")


def test_a_finished_run(run):
    facts = read_run(run)
    assert facts.state == "finished"
    assert facts.strategy == "baseline"
    assert facts.steps_taken == 6
    assert facts.accuracy == pytest.approx(facts.metrics[-1]["accuracy"])
    assert math.isfinite(facts.proved)
    assert facts.attacks == ()
    assert facts.strongest is None
    assert not facts.problems


def test_a_run_that_was_interrupted(run):
    interrupted(run, after=3)
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.unlink()
    facts = read_run(run)
    assert facts.state == "interrupted"
    assert facts.statement.steps_taken == 3
    assert row_of(facts)["state"] == "interrupted"


def test_a_ledger_that_does_not_hold_is_said_and_proves_nothing(run):
    facts = read_run(damaged(run))
    assert facts.state == "ledger invalid"
    assert "line" in facts.ledger_problem
    assert facts.statement is None
    assert facts.proved is None
    row = row_of(facts)
    assert row["epsilon_proved"] is None
    assert "infinite" not in shown(row)
    assert len(shown(row)) == len(HEADINGS)


def test_a_ledger_that_is_missing(run):
    (run / "ledger.jsonl").unlink()
    facts = read_run(run)
    assert "missing" in facts.ledger_problem


def test_an_engines_own_directory_has_a_ledger_alone(run, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(run / "ledger.jsonl", alone)
    facts = read_run(alone)
    assert facts.config is None
    assert facts.accuracy is None
    assert facts.proved == read_run(run).proved
    assert row_of(facts)["strategy"] == "baseline"


def test_the_strongest_attack_counts(run):
    with_attack(with_attack(run, psnr=12.0, attack="map"), psnr=3.0, attack="cpl")
    facts = read_run(run)
    assert len(facts.attacks) == 2
    assert facts.strongest.name == "map"
    assert row_of(facts)["attack_psnr"] == 12.0


def test_a_result_that_is_no_attack_is_a_problem_and_not_a_crash(run):
    folder = run / "attacks" / "x"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"trials": 3}')
    (run / "audit.json").write_text("{")
    facts = read_run(run)
    assert facts.attacks == ()
    assert len(facts.problems) == 2


def test_l2max_and_plain_training_prove_nothing(tmp_path):
    l2max = row_of(read_run(trained(tmp_path / "a", strategy="dyn-s-l2max")))
    assert l2max["epsilon_proved"] == "inf"
    assert l2max["epsilon_as_published"] > 0
    plain = row_of(read_run(trained(tmp_path / "b", strategy="non-private")))
    assert plain["epsilon_proved"] == "inf"
    assert plain["epsilon_as_published"] is None


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="neither"):
        read_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="neither"):
        read_run(tmp_path / "nowhere")


def test_an_audit_is_stated_beside_what_is_proved_for_the_same(run):
    told = {
        "unit": "one step",
        "epsilon_lower_bound": 5.8,
        "epsilon_proved": "inf",
        "delta": 1e-5,
        "confidence": 0.95,
        "statistic": "noise scale",
        "method": "one-run",
        "trials": 2000,
        "verdict": "nothing is proved, and at least this much leaks",
    }
    (run / "audit.json").write_text(json.dumps(told))
    facts = read_run(run)
    assert facts.audited == 5.8
    assert facts.audit_limit == math.inf
    text = " ".join(str(facts.statement).split())
    assert "Audited: epsilon of one step is at least 5.8 at delta = 1e-05 with confidence 0.95" in text
    assert "(noise scale, one-run, 2000 trials). Proved for one step: infinite." in text
    assert "at least this much leaks. A lower bound can refute, never prove." in text
    assert facts.statement.to_dict()["audited"] == told
    row = row_of(facts)
    assert (row["epsilon_audited"], row["audited_unit"], row["epsilon_proved_of_audited"]) == (5.8, "one step", "inf")
    assert ">= 5.8 in one step (proved infinite)" in brief(row)


def test_an_audit_that_says_little_is_of_the_whole_run(run):
    (run / "audit.json").write_text(json.dumps({"epsilon_lower_bound": 0.5}))
    facts = read_run(run)
    assert facts.audit_limit == facts.proved
    assert "epsilon of the run is at least 0.5." in str(facts.statement)
    assert ">= 0.5" in brief(row_of(facts))
    (run / "audit.json").write_text(json.dumps({"epsilon_lower_bound": "much", "delta": "small"}))
    facts = read_run(run)
    assert facts.audited is None and facts.audit is None
    assert facts.problems == (f"{run / 'audit.json'} cannot be read: epsilon_lower_bound is not a number.",)
    assert "Audited:        not run." in str(facts.statement)
