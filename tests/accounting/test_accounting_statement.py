"""The statement says in plain words what is proved, and is safe to write as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accounting_records import make_header, make_release, make_run

import gradveil.accounting
from gradveil.accounting import ProvedEpsilon, statement
from gradveil.accounting._rounding import at_least, at_most, percent_at_most


def flat(text: str) -> str:
    return " ".join(text.split())


def test_proved_run_in_plain_words() -> None:
    result = statement(*make_run(seeded=True))
    text = str(result)
    words = flat(text)
    assert result.proved.epsilon == pytest.approx(0.601, rel=5e-3)
    assert result.proved_other.epsilon == pytest.approx(1.271, rel=5e-3)
    for part in (
        "Protected: one example",
        "N = 60000",
        "10000 taken of 10000 declared",
        f"Proved: epsilon = {at_most(result.proved.epsilon)} at delta = 1e-05 under add-remove",
        f"epsilon = {at_most(result.proved_other.epsilon)} at delta = 1e-05 under replace-one",
        "As published: not a guarantee: BaseC 123.5",
        "MA 0.8227",
        "really spend up to 0.00101",
        "Audited: not run",
        "Not covered: hyper-parameter search",
        "anyone who knows the seed can subtract the noise",
    ):
        assert part in words, part
    assert max(map(len, text.splitlines())) <= 100


def test_infinite_run_in_plain_words() -> None:
    header, _ = make_run(taken=3, strategy="dyn-s-l2max", guarantee="paper-only", seeded=True)
    releases = [make_release(header, t, scale_is_public=False, sensitivity_rule="l2max-batch") for t in range(3)]
    result = statement(header, releases)
    words = flat(str(result))
    assert "Proved: infinite under add-remove, because at step 0 the scale of the noise depends on the data" in words
    assert "anyone who knows the seed can subtract the noise" in words
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["proved"]["epsilon"] == "inf"
    assert "step 0" in data["proved"]["reason"]
    assert data["paper"]["MA"]["epsilon"] > 0
    assert data["audited"] is None


def test_no_releases_is_zero() -> None:
    result = statement(make_header(), [])
    assert result.proved.epsilon == result.proved_other.epsilon == 0.0
    assert "nothing was released yet" in flat(str(result))
    assert result.to_dict()["paper"]["MA"]["epsilon"] == 0.0


def test_non_private_strategy() -> None:
    header, _ = make_run(taken=2, strategy="non-private", guarantee="none", groups=())
    releases = [make_release(header, t, sigma=0.0) for t in range(2)]
    result = statement(header, releases)
    assert result.proved.epsilon == math.inf
    assert "not private" in flat(str(result))
    assert "there is no noise to account for" in flat(str(result))
    json.dumps(result.to_dict(), allow_nan=False)


def test_fixed_size_leads_with_replace_one() -> None:
    result = statement(*make_run(taken=100, sampling="without-replacement"))
    assert (result.proved.neighbours, result.proved.accountant) == ("replace-one", "PLD")
    assert math.isfinite(result.proved.epsilon)
    assert result.proved_other.epsilon == math.inf
    assert "without replacement" in flat(str(result))


def test_recovered_lines_and_failed_condition_are_said() -> None:
    header, _ = make_run(taken=2)
    words = flat(str(statement(header, [make_release(header, t, sigma=15.0, recovered=t == 1) for t in range(2)])))
    assert "1 line recovered" in words
    assert "q < 1/(16 sigma) fails" in words


def test_public_names_exist_and_import_is_light() -> None:
    module = importlib.import_module("gradveil.accounting")
    assert sorted(module.__all__) == list(module.__all__)
    assert all(hasattr(gradveil.accounting, name) for name in module.__all__)
    code = (
        "import sys, gradveil.accounting.proved as m; "
        "print([n for n in ('torch', 'dp_accounting', 'scipy') if n in sys.modules])"
    )
    # torch may come in through the top of the package; accounting itself must not ask for these.
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "dp_accounting" not in out


def test_the_code_in_the_document_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "accounting.md", "exec"), found)
    assert 0.1 < found["gamma"] < 0.3


def test_the_meaning_of_epsilon_is_the_largest_success_of_a_test() -> None:
    result = statement(*make_run(taken=100))
    success = result.membership_success
    assert success is not None
    # One test is as good as the two distributions are far apart; the bound has to be above it.
    assert 0.5 < success < 0.6
    assert success == pytest.approx((math.exp(result.proved.epsilon) + 1e-5) / (math.exp(result.proved.epsilon) + 1))
    header, _ = make_run(taken=0, guarantee="none")
    assert statement(header, []).membership_success is None
    assert statement(make_header(), []).membership_success == pytest.approx(0.5, abs=1e-5)


# --- rounding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [14.3507, 14.35, 5.8, 0.1, 1e-7, 0.99995, 9999.01, 123456.7, 2.0, 1 / 3])
def test_an_upper_bound_is_never_rounded_down_nor_a_lower_one_up(value: float) -> None:
    assert value <= float(at_most(value)) <= value * 1.001
    assert value * 0.999 <= float(at_least(value)) <= value
    if len(repr(value)) <= 5:
        assert float(at_most(value)) == float(at_least(value)) == value


def proved_at(epsilon: float, **changes: Any) -> gradveil.accounting.Statement:
    header, releases = make_run(taken=3, **changes)
    found = statement(header, releases)
    proved: ProvedEpsilon = dataclasses.replace(found.proved, epsilon=epsilon)
    return dataclasses.replace(found, proved=proved, proved_other=proved)


def test_the_printed_epsilon_is_proved_too() -> None:
    words = flat(str(proved_at(14.3507)))
    assert words.count("epsilon = 14.36 at delta") == 2
    assert "14.35 " not in words


def test_audited_and_proved_are_rounded_apart() -> None:
    audited = {"epsilon_lower_bound": 1.23456, "epsilon_proved": 1.23456}
    words = flat(str(statement(*make_run(taken=3), audited=audited)))
    assert "is at least 1.234." in words
    assert "Proved for the run: 1.235." in words


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 5.0, 6.9, 7.0, 8.0, 14.36, 40.0, 900.0])
def test_the_meaning_is_true_and_never_a_hundred_percent(epsilon: float) -> None:
    result = proved_at(epsilon)
    success = result.membership_success
    assert success is not None
    assert "100 %" not in result.meaning()
    (percent,) = re.findall(r"more than ([\d.]+) %", result.meaning())
    if "no test" in result.meaning():
        assert 100 * success <= float(percent) < 100
    else:
        assert "is not ruled out" in result.meaning()
        assert (percent, percent_at_most(success)) == ("99.9", None)
        assert success > 0.999


# --- what was checked ---------------------------------------------------------------------------

ALONE = "each example's loss depends on that example alone: "


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        (None, "not checked"),
        ({"batches": 0, "of": 600}, "not checked"),
        (
            {"batches": 41, "of": 600, "whole_step": 0, "model": 41, "loss": 39},
            "checked on 41 of 600 batches (model and loss only; not what happens before the model, targets, "
            "or outputs that reach the loss in other ways)",
        ),
        (
            {"batches": 41, "of": 600, "whole_step": 0, "model": 41, "loss": 0},
            "checked on 41 of 600 batches (model only; not the loss, what happens before the model, targets, "
            "or outputs that reach the loss in other ways)",
        ),
        ({"batches": 3, "of": 600, "whole_step": 3}, "checked on 3 of 600 batches (whole step)"),
        (
            {"batches": 5, "of": 600, "whole_step": 3, "model": 2, "loss": 2},
            "checked on 5 of 600 batches (the whole step on 3; on the others model and loss only; "
            "not what happens before the model, targets, or outputs that reach the loss in other ways)",
        ),
    ],
    ids=str,
)
def test_the_statement_says_what_was_checked(checks: dict[str, int] | None, said: str) -> None:
    result = statement(*make_run(taken=3), checks=checks)
    assert f"Assumes: {ALONE}{said} which examples were drawn" in flat(str(result))
    data = json.loads(json.dumps(result.to_dict()))
    assert data["checks"] == checks
    assert data["assumes"][0] == ALONE + said


def test_the_statement_says_what_a_power_cut_may_lose() -> None:
    header, releases = make_run(taken=3)
    lost = "a power cut may lose the records of the last second of training; durability='fsync' closes that"
    assert lost not in flat(str(statement(header, releases)))  # of a ledger in memory
    assert lost in flat(str(statement(header, releases, durability="write")))
    synced = dataclasses.replace(header, plan={**header.plan, "durability": "fsync"})
    for result in (statement(synced, releases), statement(header, releases, durability="fsync")):
        assert lost not in flat(str(result))
        assert "every record is on disk before its release is used" in flat(str(result))


def test_nothing_is_assumed_where_nothing_is_proved() -> None:
    header, releases = make_run(taken=2, strategy="dyn-s-l2max", guarantee="paper-only")
    result = statement(header, releases)
    assert result.assumptions == ()
    assert "Assumes" not in str(result)
