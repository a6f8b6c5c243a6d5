"""account, calibrate and statement: the contract of their JSON, their words, pictures, and what they load."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli_account_runs import flat, strict, write_l2max_run, write_run

MNIST = ("--sample-rate", "0.01", "--steps", "10000", "--delta", "1e-5")
# ---- account


def test_account_json_is_the_contract(gradveil: Callable[..., Any]) -> None:
    outcome = gradveil("account", "--sigma", 6, *MNIST, "--json")
    assert outcome.code == 0
    found = strict(outcome.out)
    assert list(found) == ["paper", "proved", "rero"]
    assert found["paper"] == pytest.approx(
        {"BaseC": 123.457, "AdvC": 7.450, "OptC": 6.740, "zCDP": 1.159, "MA": 0.823}, rel=1.5e-3
    )
    assert set(found["proved"]) == {"add_remove", "replace_one"}
    assert found["proved"]["add_remove"] == pytest.approx({"PLD": 0.601, "RDP": 0.659}, rel=5e-3)
    assert set(found["proved"]["replace_one"]) == {"PLD", "RDP"}
    assert found["proved"]["replace_one"]["PLD"] == pytest.approx(1.271, rel=5e-3)
    assert found["rero"]["whole_run"] == pytest.approx({"0.1": 0.1327, "0.01": 0.0155}, abs=6e-5)


@pytest.mark.parametrize(("layers", "add_remove"), [(3, 1.116), (6, 1.681)])
def test_account_counts_layers(gradveil: Callable[..., Any], layers: int, add_remove: float) -> None:
    found = strict(gradveil("account", "--sigma", 6, *MNIST, "--layers", layers, "--json").out)
    assert found["proved"]["add_remove"]["PLD"] == pytest.approx(add_remove, rel=5e-3)


def test_account_of_a_decay(gradveil: Callable[..., Any]) -> None:
    decay = ("--decay", "exponential", "--sigma-end", 4, "--json")
    outcome = gradveil("account", "--sigma", 15, *MNIST, *decay)
    found = strict(outcome.out)
    assert found["proved"]["add_remove"] == pytest.approx({"PLD": 0.5302, "RDP": 0.584}, rel=5e-3)
    assert "q < 1/(16 sigma) fails" in outcome.message
    assert found == strict(gradveil("account", "--sigma", 15, *MNIST, *decay[:2], "--json").out), "4/15 by default"
    for shape in ("linear", "cyclic", "step"):
        short = ("--sample-rate", 0.01, "--steps", 100, "--decay", shape, "--sigma-end", 4, "--json")
        assert gradveil("account", "--sigma", 15, *short).code == 0


def test_infinite_is_a_string_with_the_reason_beside_it(gradveil: Callable[..., Any]) -> None:
    short = ("--sigma", 6, "--sample-rate", 0.01, "--steps", 100, "--json", "--sampling")
    found = strict(gradveil("account", *short, "without-replacement").out)["proved"]
    assert (found["add_remove"]["PLD"], found["add_remove"]["RDP"]) == ("inf", "inf")
    assert "fix the number of examples" in found["add_remove"]["reason"]
    assert 0 < found["replace_one"]["PLD"] < found["replace_one"]["RDP"]
    assert "reason" not in found["replace_one"]
    found = strict(gradveil("account", *short, "with-replacement").out)["proved"]["replace_one"]
    assert found["PLD"] > 0
    assert found["RDP"] == "inf"
    assert "no RDP bound" in found["reason"]
    found = strict(gradveil("account", *short, "shuffle").out)
    assert {v for n in ("add_remove", "replace_one") for v in found["proved"][n].values() if len(str(v)) < 9} == {"inf"}
    assert found["rero"]["whole_run"] == {"0.1": None, "0.01": None}
    assert "shuffled" in found["rero"]["reason"]


def test_details_say_the_delta_really_spent(gradveil: Callable[..., Any]) -> None:
    found = strict(gradveil("account", "--sigma", 6, *MNIST, "--json", "--details").out)["details"]
    assert found["paper"]["BaseC"]["delta_total"] == pytest.approx(1e-3)
    assert found["paper"]["AdvC-printed"]["epsilon"] == pytest.approx(6.686, abs=1e-3)
    assert found["paper_is_a_guarantee"] is False
    assert any("one example" in note for note in found["proved"]["add_remove"]["PLD"]["assumptions"])


def test_the_table_names_what_is_a_guarantee_and_what_is_not(gradveil: Callable[..., Any]) -> None:
    words = flat(gradveil("account", "--sigma", 6, *MNIST, "--kappa", 0.2).out)
    for part in (
        "Proved epsilon at delta = 1e-05",
        "add or remove one 0.601 0.6592",
        "replace one 1.272",
        "As published, not a guarantee; quoted at delta = 1e-05",
        "AdvC 7.458 0.00101",
        "Reconstruction: no attack succeeds more often than this",
        "0.2 0.",
    ):
        assert part in words, part


def test_account_of_a_run_is_the_ledgers(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    same = ("--sigma", 6, "--layers", 3, "--sample-rate", 0.01, "--steps", 200, "--json")
    found = strict(gradveil("account", run, "--json").out)
    by_parameters = strict(gradveil("account", *same).out)
    assert found["paper"] == pytest.approx(by_parameters["paper"])
    for neighbours in ("add_remove", "replace_one"):
        assert found["proved"][neighbours] == pytest.approx(by_parameters["proved"][neighbours], rel=1e-9)
    assert found["rero"]["one_step"] == pytest.approx(by_parameters["rero"]["one_step"])
    assert found == strict(gradveil("account", run / "ledger.jsonl", "--json").out)
    smaller = strict(gradveil("account", run, "--delta", 1e-7, "--json").out)
    assert smaller["paper"]["MA"] > found["paper"]["MA"]
    assert smaller["proved"]["add_remove"]["PLD"] > found["proved"]["add_remove"]["PLD"]


# ---- calibrate


def test_calibrate_json_is_the_contract(gradveil: Callable[..., Any]) -> None:
    outcome = gradveil("calibrate", "--epsilon", 1, *MNIST, "--json")
    assert outcome.code == 0
    found = strict(outcome.out)
    assert list(found) == ["sigma", "epsilon"]
    assert 0.99 <= found["epsilon"] <= 1.0
    spent = strict(gradveil("account", "--sigma", found["sigma"], *MNIST, "--json").out)
    assert spent["proved"]["add_remove"]["PLD"] == pytest.approx(found["epsilon"], rel=1e-9)


def test_calibrate_a_decay_by_its_ratio(gradveil: Callable[..., Any]) -> None:
    short = ("--sample-rate", 0.01, "--steps", 50, "--accountant", "RDP", "--json")
    found = strict(gradveil("calibrate", "--epsilon", 1, *short, "--decay", "exponential", "--ratio", 0.5).out)
    assert list(found) == ["sigma", "epsilon"]
    shape = ("--decay", "exponential", "--sigma-end", found["sigma"] / 2)
    spent = strict(gradveil("account", "--sigma", found["sigma"], *short[:4], *shape, "--json").out)
    assert spent["proved"]["add_remove"]["RDP"] == pytest.approx(found["epsilon"], rel=1e-9)


def test_calibrate_finds_steps_and_decays(gradveil: Callable[..., Any]) -> None:
    found = strict(gradveil("calibrate", "--epsilon", 0.5, "--sample-rate", 0.01, "--sigma", 6, "--json").out)
    assert found["steps"] == pytest.approx(7_150, rel=0.02)
    assert found["epsilon"] <= 0.5
    like = ("--like-sigma", 6, "--sigma", 15, "--decay", "exponential", "--accountant", "zCDP", *MNIST)
    found = strict(gradveil("calibrate", *like, "--json").out)
    assert found["epsilon"] == pytest.approx(1.159, rel=0.01)
    assert 3 < found["sigma_end"] < 4
    assert found["kind"] == "as published, not a guarantee"
    words = flat(gradveil("calibrate", *like).out)
    assert "sigma 15 at the first step" in words
    assert "by zCDP as published, not a guarantee" in words
    words = flat(gradveil("calibrate", "--epsilon", 0.6, "--sample-rate", 0.01, "--steps", 100).out)
    assert "by PLD proved, under add-remove, for poisson sampling" in words


# ---- pictures, and what is loaded


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_drawn(
    gradveil: Callable[..., Any], tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.cli.calibrate._VIEW_STEPS", (100, 1_000))
    short = ("--sample-rate", 0.01, "--steps", 60)
    for name, arguments, words in (
        ("a", ("account", "--sigma", 6, *short), ("steps taken", "epsilon at delta", "proved, add-remove, PLD", "MA")),
        ("l", ("account", write_l2max_run(tmp_path / "l2max")), ("proved: infinite", "not a guarantee")),
        ("c", ("calibrate", "--epsilon", 1, *short), ("number of steps T", "noise std", "q = 0.01")),
    ):
        file = tmp_path / f"{name}{suffix}"
        outcome = gradveil(*arguments, "--plot", file)
        assert outcome.code == 0
        assert str(file) in outcome.message
        data = file.read_bytes()
        if suffix == ".png":
            assert data.startswith(b"\x89PNG")
            assert len(data) > 20_000
        else:
            for word in words:
                assert f"<!-- {word}" in data.decode() or word in data.decode(), word


@pytest.mark.parametrize(
    "arguments",
    [
        ["account", "--sigma", "6", *MNIST, "--json"],
        ["calibrate", "--epsilon", "1", *MNIST, "--json"],
        ["statement", "RUN"],
        ["account", "RUN"],
    ],
    ids=lambda a: " ".join(a[:2]),
)
def test_none_of_it_loads_torch_and_all_start_fast(tmp_path: Path, arguments: list[str]) -> None:
    run = str(write_run(tmp_path / "run", releases=20))
    given = [run if a == "RUN" else a for a in arguments]
    code = (
        "import sys; from gradveil.cli import cli; "
        f"cli({given!r}, standalone_mode=False); print('torch' in sys.modules, file=sys.stderr)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-1] == "False"
    assert time.perf_counter() - started < 8  # .6 s on an idle machine
