"""What an audit says, in words and in its file."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gradveil import audit
from gradveil.audit.result import BROKEN, CONSISTENT, LEAKS, NOTHING_FOUND
from gradveil.errors import ConfigError
from gradveil.training.config import RunConfig


def made(epsilon, proved, unit="one step"):
    bound = audit.Bound(
        epsilon=epsilon,
        delta=1e-5,
        confidence=0.95,
        method="one-run",
        statistic="noise scale",
        tests=6,
        trials=100,
        threat_model="sees it",
        evidence="90 of 90 guesses right",
    )
    weaker = replace(bound, epsilon=epsilon / 2, statistic="matched filter")
    return audit.Audit(
        unit=unit,
        strategy="some",
        settings={"steps": 100},
        bounds=(weaker, bound),
        proved=proved,
        reason=None if math.isfinite(proved) else "it follows the data",
        as_published=0.6,
    )


@pytest.mark.parametrize(
    ("epsilon", "proved", "verdict", "broken"),
    [
        (1.0, 2.0, CONSISTENT, False),
        (2.0, 2.0, CONSISTENT, False),
        (2.1, 2.0, BROKEN, True),
        (5.0, math.inf, LEAKS, False),
        (0.0, math.inf, NOTHING_FOUND, False),
    ],
)
def test_verdicts(epsilon, proved, verdict, broken):
    found = made(epsilon, proved)
    assert found.verdict() == verdict
    assert found.is_broken == broken
    assert found.strongest.epsilon == epsilon
    assert found.tests == 6


def test_a_weaker_bound_has_a_verdict_of_its_own():
    found = made(3.0, 2.0)
    assert [found.verdict(bound) for bound in found.bounds] == [CONSISTENT, BROKEN]


def test_the_file_leads_with_what_is_broken_and_holds_all():
    told = audit.audit_json([made(9.0, math.inf), made(3.0, 2.0, unit="a whole run")])
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert (told["unit"], told["epsilon_lower_bound"], told["epsilon_proved"]) == ("a whole run", 3.0, 2.0)
    assert [one["epsilon_proved"] for one in told["audits"]] == ["inf", 2.0]
    assert told["audits"][0]["reason"] == "it follows the data"
    assert told["bounds"][1]["evidence"] == "90 of 90 guesses right"


def test_what_is_audited_follows_from_the_settings_of_a_run():
    config = RunConfig.check({"dataset": "digits", "model": "linear", "strategy": "dyn-s-decay", "clip": 2.0})
    found = audit.setting_of(config, examples=5)
    assert found.engine["strategy"] == "dyn-s-decay"
    assert found.engine["clip"] == 2.0
    assert "steps" not in found.engine
    assert found.x.shape == (5, 64)  # what comes before the first layer that trains was applied
    assert found.lr == pytest.approx(0.05 * 5 / 64)  # the run's batches are of 64
    with pytest.raises(ConfigError, match="at least 2"):
        audit.setting_of(config, examples=1)
    with pytest.raises(ConfigError, match="at least 2"):
        audit.setting_of(config, examples=10_000)


def test_everything_public_is_there():
    for name in audit.__all__:
        assert getattr(audit, name) is not None
