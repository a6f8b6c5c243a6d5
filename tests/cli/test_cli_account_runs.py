"""Runs made of nothing but a ledger; what statement and account say of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradveil.accounting.ledger import Ledger
from gradveil.mechanism.records import Release, RunHeader
from gradveil.mechanism.schedules import Constant

HEADER = RunHeader(
    strategy="baseline",
    guarantee="proved",
    groups=("a", "b", "c"),
    population=60_000,
    sampling="poisson",
    sample_rate=0.01,
    expected_batch_size=600.0,
    steps=200,
    delta=1e-5,
    seeded=False,
    plan={
        "clip": Constant(start=4.0).to_dict(),
        "sigma": Constant(start=6.0).to_dict(),
        "fixed_variance": False,
        "sensitivity_rule": "clip",
    },
)


def strict(text: str) -> Any:
    """JSON as others read it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def flat(text: str) -> str:
    return " ".join(text.split())


def write_run(path: Path, *, releases: int = 200, rule: str = "clip", **header: Any) -> Path:
    """A run directory with nothing in it but its ledger."""
    path.mkdir()
    ledger = Ledger(dataclasses.replace(HEADER, **header), path / "ledger.jsonl")
    for step in range(releases):
        ledger.append(
            Release(
                step=step,
                sampler=ledger.header.sampling,
                sample_rate=0.01,
                expected_batch_size=600.0,
                clip=(4.0,) * 3,
                sensitivity_rule=rule,
                sensitivity=(4.0 if rule == "clip" else 1.5,) * 3,
                sigma=6.0,
                noise_std=(24.0 if rule == "clip" else 9.0,) * 3,
                scale_is_public=rule == "clip",
            )
        )
    ledger.end("finished")
    return path


def write_l2max_run(path: Path) -> Path:
    return write_run(path, rule="l2max-batch", strategy="dyn-s-l2max", guarantee="paper-only")


# ---- l2-max: infinite, everywhere


def test_l2max_is_infinite_in_the_statement_the_table_and_json(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    l2max = write_l2max_run(tmp_path / "l2max")
    why = "the scale of the noise depends on the data (sensitivity rule 'l2max-batch')"
    words = flat(gradveil("statement", l2max).out)
    assert "Proved: infinite under add-remove, because at step 0 " + why in words
    assert "infinite under replace-one too, for the same reason" in words
    assert "As published: not a guarantee: BaseC" in words
    assert "no proved limit" in words
    data = strict(gradveil("statement", l2max, "--json").out)
    assert data["proved"]["epsilon"] == data["proved_other"]["epsilon"] == "inf"
    assert why in data["proved"]["reason"] and why in data["proved_other"]["reason"]
    assert data["largest_success_of_a_membership_test"] is None
    table = flat(gradveil("account", l2max).out)
    assert "add or remove one infinite infinite" in table
    assert why in table
    assert "no bound" in table
    found = strict(gradveil("account", l2max, "--json").out)
    for neighbours in ("add_remove", "replace_one"):
        assert {found["proved"][neighbours][a] for a in ("PLD", "RDP")} == {"inf"}
        assert why in found["proved"][neighbours]["reason"]
    assert found["paper"]["MA"] > 0
    assert found["rero"]["one_step"] == {"0.1": None, "0.01": None}


# ---- statement


def test_the_statement_says_all_that_a_reader_must_know(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seeded=True)
    words = flat(gradveil("statement", run).out)
    data = strict(gradveil("statement", run, "--json").out)
    success = 100 * data["largest_success_of_a_membership_test"]
    for part in (
        "Protected: one example; neighbouring data sets differ by one example added or removed",
        "Trust: central",
        "Covers: every noised gradient",
        "Sampling: Poisson",
        "N = 60000; 3 clipping groups",
        "Delta: 1e-05",
        "under add-remove (PLD, 200 steps charged)",
        "under replace-one (PLD, 200 steps charged)",
        f"right in more than {success:.3g} % of cases",
        "As published: not a guarantee",
        "Assumes:",
        "Not covered: hyper-parameter search",
        "a seed that becomes known",
        "floating point",
        "anyone who knows the seed can subtract the noise",
    ):
        assert part in words, part
    assert 50 < success < 60
    assert (data["neighbours"], data["accountant"], data["delta"]) == ("add-remove", "PLD", 1e-5)
    assert (data["population"], data["sampler"], data["unit"]) == (60_000, "poisson", "one example")
    assert len(data["not_covered"]) >= 4
    assert data["paper_is_a_guarantee"] is False


@pytest.mark.parametrize(("releases", "stopping"), [(20, "public"), (200, "none")])
def test_a_half_written_line_is_counted(
    releases: int, stopping: str, gradveil: Callable[..., Any], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", releases=releases, stopping=stopping)
    whole = strict(gradveil("statement", run, "--json").out)
    with open(run / "ledger.jsonl", "a") as file:
        file.write(f'{{"n":{releases + 2},"kind":"rel')
    assert whole["proved"]["steps_charged"] == releases
    torn = strict(gradveil("statement", run, "--json").out)
    assert torn["proved"]["steps_charged"] == whole["proved"]["steps_charged"] + 1
    assert torn["proved"]["epsilon"] > whole["proved"]["epsilon"]
    found = strict(gradveil("account", run, "--json").out)
    assert found["proved"]["add_remove"]["PLD"] == torn["proved"]["epsilon"]
