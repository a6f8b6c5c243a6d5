"""The whole-run audit: many short runs, from their trajectory or from their final weights alone."""

from __future__ import annotations

import math

import pytest
from audited import layers, setting

from gradveil import audit
from gradveil.accounting import Setting, planned_epsilon
from gradveil.errors import ConfigError


def audited(runs=160, steps=4, **made):
    return audit.audit_runs(setting(model=layers(64, 10), lr=0.1, **made), runs=runs, steps=steps)


def rows(found):
    return {(bound.statistic, bound.method): bound.epsilon for bound in found.bounds}


def test_l2max_leaks_over_a_whole_run_from_the_trajectory_and_from_the_final_weights():
    found = audited(strategy="dyn-s-l2max", sigma=6.0, sample_rate=0.75)
    assert found.proved == math.inf
    assert found.verdict() == "nothing is proved, and at least this much leaks"
    assert rows(found)["noise scale, trajectory", "Clopper-Pearson"] > 2
    assert rows(found)["noise scale, final weights", "Clopper-Pearson"] > 2


def test_a_proved_strategy_is_consistent_and_its_epsilon_is_that_of_the_ledger():
    found = audited(sigma=1.0, sample_rate=0.5)
    assert found.verdict() == "consistent with what is proved"
    expected = planned_epsilon([1.0] * 4, Setting(sample_rate=0.5), delta=1e-5).epsilon
    assert found.proved == pytest.approx(expected)
    assert {bound.method for bound in found.bounds} == {"Clopper-Pearson"}  # sampled: no longer one Gaussian
    assert found.tests == 4


def test_with_every_example_in_every_batch_a_run_is_one_gaussian_mechanism():
    found = audited(sigma=0.7)
    assert found.proved == pytest.approx(audit.gaussian_epsilon(math.sqrt(4) / 0.7, 1e-5), rel=1e-3)
    assert found.verdict() == "consistent with what is proved"
    seen = rows(found)
    assert 4 < seen["matched filter, trajectory", "Gaussian family"] <= found.proved
    assert 1 < seen["matched filter, final weights", "Gaussian family"] <= found.proved
    assert seen["matched filter, trajectory", "Clopper-Pearson"] < 4


def test_the_result_does_not_depend_on_the_number_of_processes():
    made = setting(model=layers(64, 10), sample_rate=0.5)
    alone, together = (audit.audit_runs(made, runs=40, steps=2, jobs=jobs) for jobs in (1, 2))
    assert alone == together


def test_batches_may_be_empty():
    found = audited(runs=40, examples=3, sample_rate=0.34, strategy="quantile-clip")
    assert found.verdict() == "consistent with what is proved"


def test_too_few_runs_are_refused():
    with pytest.raises(ConfigError, match="at least 40"):
        audited(runs=10)


def test_noise_that_follows_releases_stays_below_its_proved_epsilon():
    """dyn-adaptive at a small n: the filter's epsilon is above what a canary shows, which is not nothing."""
    found = audited(runs=120, strategy="dyn-adaptive", sigma=0.7)
    assert found.proved > audit.gaussian_epsilon(math.sqrt(4) / 0.7, 1e-5)  # what the plan costs, by a filter
    assert found.verdict() == "consistent with what is proved"
    assert {bound.method for bound in found.bounds} == {"Clopper-Pearson"}  # adaptive noise: no longer one Gaussian
    assert 1 < rows(found)["matched filter, trajectory", "Clopper-Pearson"] < found.proved
