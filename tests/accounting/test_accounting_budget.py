"""The affordable number of steps is exact: n fit, n + 1 do not."""

from __future__ import annotations

import math
import time

import pytest
from accounting_records import make_header, make_release, make_run

from gradveil.accounting import affordable_steps, proved_epsilon
from gradveil.errors import ConfigError
from gradveil.mechanism.schedules import Cyclic, Exponential


def after(header, releases, planned, n: int, **view) -> float:
    future = [make_release(header, len(releases) + i, sigma=z) for i, z in enumerate(planned[:n])]
    return proved_epsilon(header, [*releases, *future], charge="taken", **view).epsilon


@pytest.mark.parametrize("done", [0, 700])
@pytest.mark.parametrize("accountant", ["PLD", "RDP"])
def test_constant_plan_is_exact(done: int, accountant: str) -> None:
    header, releases = make_run(taken=done, steps=10_000)
    planned = [6.0] * (10_000 - done)
    n = affordable_steps(header, releases, planned, budget=0.5, accountant=accountant)
    assert 0 < n < len(planned)
    assert after(header, releases, planned, n, accountant=accountant) <= 0.5
    assert after(header, releases, planned, n + 1, accountant=accountant) > 0.5


@pytest.mark.parametrize(
    ("schedule", "budget"),
    [
        (Exponential.to(15.0, end=4.0, steps=10_000), 0.4),
        (Cyclic.to(12.0, end=5.0, steps=400, ramps=4), 0.06),
    ],
    ids=["exponential", "cyclic"],
)
def test_varying_plan_is_exact_and_fast(schedule, budget: float) -> None:
    steps = 10_000 if isinstance(schedule, Exponential) else 400
    header, planned = make_header(steps=steps), [schedule(t) for t in range(steps)]
    start = time.perf_counter()
    n = affordable_steps(header, [], planned, budget=budget)
    assert time.perf_counter() - start < 25  # under 10 s on one idle core
    assert 0 < n < steps
    assert after(header, [], planned, n) <= budget < after(header, [], planned, n + 1)


def test_without_replacement_counts_under_replace_one() -> None:
    header = make_header(sampling="without-replacement")
    for accountant, budget in (("PLD", 1.122), ("RDP", 2.338)):
        view = {"neighbours": "replace-one", "accountant": accountant}
        n = affordable_steps(header, [], [6.0] * 10_000, budget=budget, **view)
        assert n == pytest.approx(6_000, rel=5e-3)
        assert n == affordable_steps(header, [], [6.0] * 10_000, budget=budget) or accountant == "RDP"
        assert after(header, [], [6.0] * 10_000, n, **view) <= budget
        assert after(header, [], [6.0] * 10_000, n + 1, **view) > budget


def test_enough_for_all_or_for_none() -> None:
    header, releases = make_run(taken=100)
    assert affordable_steps(header, releases, [6.0] * 50, budget=1.0) == 50
    assert affordable_steps(header, releases, [], budget=1.0) == 0
    assert affordable_steps(header, releases, [6.0] * 50, budget=1e-6) == 0


def test_nothing_is_affordable_where_nothing_is_proved() -> None:
    header, releases = make_run(taken=3)
    releases[1] = make_release(header, 1, scale_is_public=False, sensitivity_rule="l2max-batch")
    assert affordable_steps(header, releases, [6.0], budget=100.0) == 0
    assert affordable_steps(make_header(guarantee="none"), [], [6.0], budget=100.0) == 0
    assert affordable_steps(make_header(sampling="shuffle"), [], [6.0], budget=100.0) == 0


@pytest.mark.parametrize(("planned", "budget"), [([6.0], 0.0), ([6.0], math.nan), ([6.0, 0.0], 1.0)])
def test_bad_settings_are_refused(planned: list[float], budget: float) -> None:
    with pytest.raises(ConfigError):
        affordable_steps(make_header(), [], planned, budget=budget)
