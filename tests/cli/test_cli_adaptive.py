"""``gradveil train --strategy dyn-adaptive``, and a filter on another strategy, from the command line."""

from __future__ import annotations

import json

SMALL = ("--dataset", "digits", "--steps", "12", "--batch-size", "64", "--clip", "1", "--sigma", "3", "--seed", "1")


def test_a_run_is_trained_stated_and_verified(gradveil, tmp_path):
    run = str(tmp_path / "run")
    got = gradveil("train", *SMALL, "--strategy", "dyn-adaptive", "--run-dir", run, "--json")
    assert got.code == 0, got.err
    privacy = json.loads(got.out)["privacy"]
    assert privacy["accountant"].startswith("Renyi filter of order")
    assert privacy["proved_if_fixed"]["accountant"] == "PLD"
    verified = gradveil("ledger", "verify", run)
    assert verified.code == 0
    assert "noise and bounds of 12 releases follow from earlier releases" in verified.out
    told = gradveil("statement", run)
    assert "Feldman & Zrnic 2021" in told.out


def test_a_ledger_whose_noise_is_not_its_rules_is_invalid(gradveil, tmp_path):
    from dataclasses import replace

    from gradveil.accounting.ledger import Ledger, read

    run = tmp_path / "run"
    assert gradveil("train", *SMALL, "--strategy", "dyn-adaptive", "--run-dir", str(run)).code == 0
    contents = read(run / "ledger.jsonl")
    forged = Ledger(contents.header, tmp_path / "forged.jsonl")  # the chain of hashes is whole: anyone can write one
    for release in contents.releases:
        forged.append(replace(release, sigma=release.sigma * 0.9) if release.step == 6 else release)
    forged.commit()
    got = gradveil("ledger", "verify", str(tmp_path / "forged.jsonl"))
    assert got.code == 4
    assert "step 6 was noised by sigma" in got.message


def test_a_filter_holds_a_run_to_its_budget(gradveil, tmp_path):
    run = str(tmp_path / "run")
    got = gradveil("train", *SMALL, "--accountant", "filter", "--budget", "0.4", "--run-dir", run, "--json")
    assert got.code == 3
    assert "budget of its privacy filter" in got.message
    assert json.loads(got.out)["privacy"]["proved"]["epsilon"] <= 0.4


def test_what_has_no_filter_is_refused(gradveil):
    for more in (
        ("--strategy", "dyn-adaptive", "--accountant", "PLD"),
        ("--accountant", "filter", "--sampling", "shuffle"),
    ):
        got = gradveil("train", *SMALL, *more)
        assert got.code == 2
        assert "Traceback" not in got.err


def test_the_report_names_the_filter_where_it_speaks_of_stopping(gradveil, tmp_path):
    run = tmp_path / "run"
    assert gradveil("train", *SMALL, "--strategy", "dyn-adaptive", "--run-dir", str(run)).code == 0
    assert gradveil("report", str(run)).code == 0
    page = (run / "report.html").read_text()
    assert "charged the whole budget of a Renyi filter" in page
    assert "declared steps are charged, taken or not" not in page
