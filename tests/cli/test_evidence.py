"""A run directory as an auditor gets it: forged, cut, edited and mixed-up ones are caught, or said to be unbound."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import replace

import pytest

import gradveil
from forged import cut, louder, rehash
from gradveil.accounting import ledger as ledgers
from gradveil.accounting import manifest
from gradveil.accounting._rounding import at_least, at_most
from gradveil.attacks.from_run import load_target
from gradveil.cli._output import lower, upper
from gradveil.errors import ConfigError, LedgerError
from gradveil.mechanism import strategies
from gradveil.reports.charts import _spent
from gradveil.reports.comparison import BRIEF, HEADINGS, brief, row_of, shown
from gradveil.reports.facts import read_run
from gradveil.reports.gates import Limits, judge
from gradveil.training.recorded import contradictions
from small_runs import TINY, trained, with_attack

FEW = {"victims": 2, "iterations": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = trained(tmp_path_factory.mktemp("runs") / "run")
    gradveil.attack(run, attack="map", **FEW)
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def gate(run, **limits):
    found = judge(read_run(run), Limits(max_epsilon=1000.0, **limits))
    return found[0]


def states(run):
    found = manifest.file_states(run, ledgers.read(run / "ledger.jsonl"))
    return {file.path: file.state for file in found}


def test_every_file_of_a_run_is_bound(run):
    found = states(run)
    held = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} - {"ledger.jsonl"}
    assert held == {path for path, state in found.items() if state != "left out"}
    assert {found[path] for path in held if not path.endswith("secret.json")} == {"bound"}
    assert gate(run).passed, gate(run)
    assert "no --signed-by and no --head was given" in gate(run).reason


def files_of(run):
    return sorted(path for path, state in states(run).items() if state == "bound")


def test_a_changed_byte_in_any_bound_file_is_named(made, tmp_path):
    names = files_of(made)
    assert {"config.toml", "environment.json", "metrics.jsonl"} < set(names) and len(names) == 10
    for name in names:
        run = shutil.copytree(made, tmp_path / name.replace("/", "-"))
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 1
        (run / name).write_bytes(data)
        with pytest.raises(LedgerError, match=name):
            manifest.check_files(run, ledgers.read(run / "ledger.jsonl"))
        shutil.rmtree(run)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "attacks"])
def test_evidence_that_was_removed_is_named(run, name):
    if name == "attacks":
        shutil.rmtree(run / name)
    else:
        (run / name).unlink()
    assert not gate(run).passed
    assert name in gate(run).reason and "missing" in gate(run).reason


def test_private_files_and_old_checkpoints_may_be_left_out(run):
    for path in run.glob("attacks/*/*"):
        if path.name != "result.json":
            path.unlink()
    assert gate(run).passed


def test_lines_added_to_the_metrics_of_an_ended_run_are_noticed(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 6, "accuracy": 1.0}) + "\n")
    assert "metrics.jsonl: changed" in gate(run).reason


@pytest.mark.parametrize("header", [True, False])
def test_noise_that_was_forged_and_hashed_again_contradicts_the_files_beside_it(run, header):
    louder(run, header=header)
    ledgers.read(run / "ledger.jsonl")  # the chain holds
    assert not gate(run).passed
    assert ("config.toml says sigma = 3" if header else "the header declares sigma = 3") in gate(run).reason


def test_forged_noise_with_the_config_edited_too_contradicts_the_metrics(run):
    config = (run / "config.toml").read_text().replace("sigma = 3.0", "sigma = 30.0")
    (run / "config.toml").write_text(config)
    louder(run)
    assert "metrics.jsonl says that step 1 had noise of 3, the ledger 30" in gate(run).reason


@pytest.mark.parametrize("end", [True, False])
def test_a_ledger_that_was_cut_to_its_header_fails(gradveil, run, end):
    cut(run, releases=0, end=end)
    assert "metrics.jsonl tells of step 6, and the ledger's releases end after 0" in gate(run).reason
    assert "metrics.jsonl tells of step 6" in gradveil("statement", run).err
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "attacks")
    told = gate(run)
    assert not told.passed
    assert ("holds no release" if end else "has not ended") in told.reason
    assert gate(run, unfinished=True).passed


def test_files_of_another_run_are_noticed(run, tmp_path):
    other = trained(tmp_path / "other", sigma=8.0)
    for name in ("config.toml", "metrics.jsonl", "ledger.jsonl"):
        mixed = shutil.copytree(run, tmp_path / f"mixed-{name}")
        shutil.copy(other / name, mixed / name)
        assert not judge(read_run(mixed), Limits(max_epsilon=1000.0))[0].passed, name


def test_an_attack_that_nothing_binds_is_said_to_be_unbound(run):
    shutil.rmtree(run / "attacks")
    rehash(run, lambda kind, body: None if kind == "file" and "attacks" in body["path"] else body)
    with_attack(run, psnr=9.0)
    limits = {"max_attack_psnr": 20.0, "max_epsilon": 1000.0}
    found = {gate.name: gate for gate in judge(read_run(run), Limits(**limits))}
    assert found["attack PSNR"].passed and "is not bound to the ledger" in found["attack PSNR"].reason
    assert "not bound: attacks/map-made-up/result.json" in found["ledger"].reason
    found = {gate.name: gate for gate in judge(read_run(run), Limits(bound=True, **limits))}
    assert not found["attack PSNR"].passed


def test_an_attack_at_other_noise_is_no_evidence(run):
    (result,) = run.glob("attacks/*/result.json")
    whole = json.loads(result.read_text())
    whole["trials"][0]["settings"]["sigma"] = 6.0
    result.write_text(json.dumps(whole))
    found = {gate.name: gate for gate in judge(read_run(run), Limits(max_attack_psnr=99.0))}
    assert not found["attack PSNR"].passed
    assert "tried with sigma = 6.0, and the run has 3.0" in found["attack PSNR"].reason


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_an_attack_takes_what_the_run_did_from_its_ledger_and_records_it(tmp_path, clipping):
    run = trained(tmp_path / "run", clipping=clipping, sigma=1.865, strategy="dyn-s-decay")
    target = load_target(run)
    groups = len(read_run(run).contents.header.groups)
    assert (groups == 1) == (clipping == "flat")
    found = gradveil.attack(run, attack="map", **FEW).to_dict()
    said = {name: found["settings"][name] for name in ("clip", "sigma", "clipping", "strategy", "steps")}
    assert said == {"clip": 1.0, "sigma": 1.865, "clipping": clipping, "strategy": "dyn-s-decay", "steps": 6}
    clip, noise = target.plan.clip(5), 1.865 * target.plan.clip(5) / 64
    assert found["used"]["clip"] == pytest.approx([clip] * groups)
    assert found["used"]["noise_std_of_the_mean"] == pytest.approx([noise] * groups)
    with pytest.raises(ConfigError, match=r"sigma = 6.0 \(the run: 1.865\)"):
        gradveil.attack(run, sigma=6.0, **FEW)
    gradveil.attack(run, sigma=1.865, **FEW)  # the same is no contradiction


def test_an_edited_config_stops_attack_and_audit(run, gradveil):
    config = (run / "config.toml").read_text().replace("sigma = 3.0", "sigma = 30.0")
    (run / "config.toml").write_text(config)
    for command in (("attack", run, "--victims", 2), ("audit", run, "--steps", 20), ("ledger", "verify", run)):
        done = gradveil(*command)
        assert done.code == 4
        assert "config.toml" in done.err


def test_an_old_run_without_bound_files_still_reads_and_says_so(run, gradveil):
    rehash(run, lambda kind, body: None if kind in ("file", "settings") else body)
    assert "no file is bound to it" in gate(run).reason and gate(run).passed
    done = gradveil("ledger", "verify", run)
    assert done.code == 0 and "not bound:   " in done.out and "the ledger binds no file" in done.out
    config = (run / "config.toml").read_text().replace("sigma = 3.0", "sigma = 30.0")
    (run / "config.toml").write_text(config)
    assert "config.toml says sigma = 30, the ledger 3" in gate(run).reason


@pytest.mark.parametrize("command", [("ledger", "verify"), ("statement",), ("account",), ("check", "--max-delta", "1")])
def test_a_mistyped_path_is_bad_input(gradveil, tmp_path, command):
    done = gradveil(*command, tmp_path / "nowhere")
    assert done.code == 2 and "nowhere is not a run directory" in done.err


@pytest.mark.parametrize("name", [name for name in strategies.names() if name != "non-private"])
def test_no_strategy_contradicts_itself(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trained(tmp_path / "run", strategy=name, steps=3)
        facts = read_run(run)
    assert facts.contradictions == []


@pytest.mark.parametrize(
    "body",
    [
        {"path": "../outside", "bytes": 1, "sha256": "0" * 64},
        {"path": "/etc/hosts", "bytes": 1, "sha256": "0" * 64},
        {"path": "a", "bytes": -1, "sha256": "0" * 64},
        {"path": "a", "bytes": 1, "sha256": "x"},
        {"path": 3},
        {},
    ],
)
def test_a_line_that_names_no_file_of_the_run_makes_the_ledger_invalid(run, body):
    rehash(run, lambda kind, old: body if kind == "file" and old["path"] == "config.toml" else old)
    assert "makes no sense" in gate(run).reason


def test_an_interrupted_run_is_bound_as_far_as_it_got(tmp_path):
    run = trained(tmp_path / "run", **{**TINY, "steps": 6})
    contents = ledgers.read(run / "ledger.jsonl")
    # As if killed after the line for the last metrics and before the end was written.
    rehash(run, lambda kind, body: None if kind == "end" else body)
    for path in run.glob("checkpoints/*.json"):  # rehash has written new pins into them
        path.unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write("{}\n")
    found = states(run)
    assert found["metrics.jsonl"] == "bound" and contents.ended == "finished"
    assert contradictions(ledgers.read(run / "ledger.jsonl")) == []


def test_bar_metrics_chart_and_statement_are_by_one_accountant(gradveil, tmp_path):
    done = gradveil("train", "--epsilon", 2, "--steps", 20, "--batch-size", 64, "--run-dir", tmp_path / "run")
    assert done.code == 0
    facts = read_run(tmp_path / "run")
    assert facts.metrics[-1]["epsilon"] == facts.proved <= 2
    assert facts.metrics[-1]["epsilon_kind"] == "proved (PLD)"
    assert f"eps {at_most(facts.proved)} proved (PLD)" in done.err
    assert _spent(facts).proved[1][-1] == facts.proved
    assert facts.contents.head in done.out


@pytest.mark.parametrize("epsilon", [14.3507, 7.10001, 0.99999, 1.116000001])
def test_nothing_proved_is_printed_smaller_than_it_is(made, epsilon):
    facts = read_run(made)
    proved = replace(facts.statement.proved, epsilon=epsilon)
    vars(facts)["statement"] = replace(facts.statement, proved=proved, proved_other=proved)
    row = row_of(facts)
    _, gate = judge(facts, Limits(max_epsilon=100.0))
    printed = [
        shown(row)[list(HEADINGS).index("epsilon_proved")],
        brief(row)[BRIEF.index("eps proved")],
        gate.reason.split("epsilon = ")[1].split()[0],
        str(facts.statement).split("epsilon = ")[1].split()[0],
        upper(epsilon),
    ]
    assert len({float(text) for text in printed}) == 1
    assert epsilon <= float(printed[0]) <= epsilon * 1.001
    assert "more than 100 %" not in str(facts.statement)
    assert lower(epsilon) == at_least(epsilon) and float(lower(epsilon)) <= epsilon


@pytest.mark.parametrize("epsilon", [5.0, 8.0, 20.0, 700.0])
def test_no_test_is_said_to_be_right_in_more_than_all_cases(made, epsilon):
    facts = read_run(made)
    told = replace(facts.statement, proved=replace(facts.statement.proved, epsilon=epsilon)).meaning()
    (share,) = re.findall(r"([\d.]+) % of cases", told)
    assert float(share) < 100
    assert ("is not ruled out" in told) == (epsilon > 6.9)
