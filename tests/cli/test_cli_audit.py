"""``gradveil audit``: of a strategy or of a run, and where its result is shown."""

from __future__ import annotations

import json
import shutil

import pytest

from gradveil.mechanism.noise.streams import NoiseSource
from small_runs import trained

QUICK = ("--model", "linear", "--examples", "6")
SHORT = (*QUICK, "--steps", "40")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "baseline", model="linear")


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "baseline")


def test_a_strategy_that_holds(gradveil):
    done = gradveil("audit", "--strategy", "baseline", "--sigma", "2", *SHORT)
    assert done.code == 0, done.err
    assert "consistent with what is proved" in done.out
    assert "shared out among 6 tests" in " ".join(done.out.split())
    assert "a coin for every step" in done.err


def test_a_strategy_for_which_nothing_is_proved_and_which_leaks(gradveil, tmp_path):
    out = tmp_path / "found.json"
    done = gradveil(
        "audit", "--strategy", "dyn-s-l2max", "--reading", "batch", *QUICK, "--steps", 150, "--json", "--out", out
    )
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told == json.loads(out.read_text())
    assert told["verdict"] == "nothing is proved, and at least this much leaks"
    assert told["epsilon_lower_bound"] > 2 > told["epsilon_as_published"]
    assert told["epsilon_proved"] == "inf"
    assert told["statistic"] == "noise scale"


def test_a_bound_above_what_is_proved_is_exit_code_1(gradveil, monkeypatch):
    monkeypatch.setattr(NoiseSource, "add_to", lambda self, grads, stds, **rest: [g.div_(6) for g in grads])
    done = gradveil("audit", "--strategy", "baseline", "--clipping", "flat", *QUICK, "--steps", 200)
    assert done.code == 1
    assert "BROKEN: above what is proved" in done.out


def test_whole_runs_besides(gradveil):
    done = gradveil(
        "audit", "--strategy", "dyn-s-l2max", *SHORT, "--runs", 60, "--run-steps", 3, "--sample-rate", 1, "--json"
    )
    assert done.code == 0, done.err
    assert [one["unit"] for one in json.loads(done.out)["audits"]] == ["one step", "a whole run"]
    assert "whole runs" in done.err


def test_the_audit_of_a_run_lies_in_it_and_is_shown_everywhere(gradveil, run):
    before = json.loads(gradveil("compare", run, "--json").out)[0]
    assert before["epsilon_audited"] is None
    done = gradveil("audit", run, "--steps", 150)
    assert done.code == 0, done.err
    told = json.loads((run / "audit.json").read_text())
    assert told["strategy"] == "baseline"
    assert told["unit"] == "one step"
    row = json.loads(gradveil("compare", run, "--json").out)[0]
    assert row["epsilon_audited"] == told["epsilon_lower_bound"]
    assert row["audited_unit"] == "one step"
    assert row["epsilon_proved_of_audited"] == told["epsilon_proved"]
    assert "in one step (proved" in " ".join(gradveil("compare", run).out.split())
    assert gradveil("check", run, "--max-epsilon", "1000").code == 0
    gradveil("report", run)
    page = (run / "report.html").read_text()
    assert "consistent with what is proved" in page
    assert "epsilon of one step is at least" in page
    stated = gradveil("statement", run)
    assert "Audited" in stated.out and "not run" not in stated.out


def test_a_run_that_has_more_proved_than_a_step_leaks_is_judged_by_the_step(gradveil, run):
    """Amplification by sampling makes a run's epsilon small; a bound on one release, unsampled, is another thing."""
    told = {"unit": "one step", "epsilon_lower_bound": 1e5, "epsilon_proved": 1e6}
    (run / "audit.json").write_text(json.dumps(told))
    assert gradveil("check", run, "--max-epsilon", "1000").code == 0
    (run / "audit.json").write_text(json.dumps(told | {"epsilon_proved": 1.0}))
    done = gradveil("check", run, "--max-epsilon", "1000")
    assert done.code == 1
    assert "audited epsilon of one step is at least" in done.out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "nothing to audit"),
        (("--strategy", "dyn-s-l2mx"), "Did you mean 'dyn-s-l2max'"),
        (("--strategy", "non-private"), "adds no noise"),
        (("--strategy", "baseline", "--steps", 3), "too few"),
        (("--strategy", "baseline", "--examples", 1), "at least 2"),
        (("--strategy", "baseline", "--sigma", -1), "sigma is -1.0"),
        (("--strategy", "baseline", "--confidence", 2), "confidence"),
        (("--strategy", "baseline", "--dataset", "mnist"), "mnist"),
        (("--strategy", "quantile-clip", "--option", "quantile"), "NAME=NUMBER"),
        (("--strategy", "baseline", "--runs", 3), "at least 40"),
        (("--strategy", "baseline", "--out", "nowhere/audit.json"), "is not a directory"),
        (("nowhere",), "not a run directory"),
    ],
)
def test_bad_input_is_exit_code_2_with_the_fix(gradveil, arguments, why):
    done = gradveil("audit", *arguments)
    assert done.code == 2
    assert why in done.message


def test_a_run_has_its_own_settings(gradveil, run):
    done = gradveil("audit", run, "--sigma", 3)
    assert done.code == 2
    assert "leave --sigma out" in done.message


def test_a_damaged_audit_is_no_audit(gradveil, run):
    (run / "audit.json").write_text("{")
    done = gradveil("statement", run)
    assert done.code == 2
    assert "is damaged" in done.err
