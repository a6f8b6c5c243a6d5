"""A short campaign in the ordinary suite; ``python tests/fuzz/campaign.py`` is the long one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from targets import TARGETS, Samples, made_samples, outcome


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return made_samples(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", list(TARGETS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_nothing_but_a_refusal_comes_of_a_damaged_input(samples: Samples, name: str, seed: int) -> None:
    assert outcome(TARGETS[name], samples, seed) in ("refused", "taken")


def test_the_samples_are_taken_as_they_are(samples: Samples) -> None:
    """Otherwise everything would be refused, whatever the damage."""
    from gradveil.reports.facts import read_run

    facts = read_run(samples.scratch)
    assert not facts.problems and facts.ledger_problem is None and facts.attacks and facts.audit and facts.metrics
