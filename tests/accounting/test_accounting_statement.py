"""The statement says in plain words what is proved, and is safe to write as JSON."""

from __future__ import annotations

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
from gradveil.accounting import statement


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
        f"Proved: epsilon = {result.proved.epsilon:.4g} at delta = 1e-05 under add-remove",
        f"epsilon = {result.proved_other.epsilon:.4g} at delta = 1e-05 under replace-one",
        "As published: not a guarantee: BaseC 123.5",
        "MA 0.8227",
        "really spend up to 0.00101",
        "Audited: not run",
        "Not covered: hyper-parameter search",
        "whoever knows the seed can take the noise off",
    ):
        assert part in words, part
    assert max(map(len, text.splitlines())) <= 100


def test_infinite_run_in_plain_words() -> None:
    header, _ = make_run(taken=3, strategy="dyn-s-l2max", guarantee="paper-only", seeded=True)
    releases = [make_release(header, t, scale_is_public=False, sensitivity_rule="l2max-batch") for t in range(3)]
    result = statement(header, releases)
    words = flat(str(result))
    assert "Proved: infinite under add-remove, because at step 0 the scale of the noise depends on the data" in words
    assert "whoever knows the seed can take the noise off" in words
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
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(block, "accounting.md", "exec"), found)
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
