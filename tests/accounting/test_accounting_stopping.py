"""A run is charged for every step it declared, unless it stops without looking at released values, or has a budget."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from accounting_records import make_header, make_release, make_run

from gradveil.accounting import affordable_steps, proved_epsilon, reconstruction_bound, statement
from gradveil.errors import UnknownNameError
from gradveil.mechanism.records import AuxiliaryRelease, Release, RunHeader
from gradveil.mechanism.schedules import Constant, Exponential, Linear


def flat(text: object) -> str:
    return " ".join(str(text).split())


def with_plan(header: RunHeader, **plan: Any) -> RunHeader:
    return dataclasses.replace(header, plan={**header.plan, **plan})


def side(sensitivity: float = 0.5, noise_std: float = 1.0) -> tuple[AuxiliaryRelease, ...]:
    return (AuxiliaryRelease(name="counts", values=(0.0,), sensitivity=sensitivity, noise_std=noise_std),)


# --- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stopping", ["none", "private"])
def test_a_loop_that_breaks_early_is_charged_for_all_declared_steps(stopping: str) -> None:
    whole = proved_epsilon(*make_run(taken=1_000))
    header, releases = make_run(taken=600, steps=1_000, stopping=stopping)
    got = proved_epsilon(header, releases)
    assert (got.steps_charged, got.at_budget) == (1_000, False)
    assert got.epsilon == pytest.approx(whole.epsilon, rel=1e-12)
    assert any("may stop on released values: every declared step is charged" in note for note in got.assumptions)


def test_one_release_is_enough_to_be_charged_for_all() -> None:
    header, releases = make_run(taken=1, steps=1_000)
    assert proved_epsilon(header, releases).epsilon == pytest.approx(
        proved_epsilon(*make_run(taken=1_000)).epsilon, rel=1e-12
    )


def test_a_run_that_stops_without_looking_is_charged_for_the_steps_taken() -> None:
    header, releases = make_run(taken=600, steps=1_000, stopping="public")
    got = proved_epsilon(header, releases)
    assert got.steps_charged == 600
    assert got.epsilon == pytest.approx(proved_epsilon(*make_run(taken=600)).epsilon, rel=1e-12)
    assert any("without looking at anything computed from the private data" in note for note in got.assumptions)


@pytest.mark.parametrize("stopping", ["none", "public", "private"])
def test_a_run_that_took_all_its_steps_is_charged_for_them(stopping: str) -> None:
    header, releases = make_run(taken=300, stopping=stopping)
    taken = proved_epsilon(header, releases, charge="taken")
    for budget in (None, taken.epsilon * 1.01, taken.epsilon * 0.5):  # what was released is charged, whatever it costs
        got = proved_epsilon(with_plan(header, budget=budget), releases)
        assert (got.epsilon, got.steps_charged) == (taken.epsilon, 300)
    assert statement(header, releases).proved_if_fixed is None


@pytest.mark.parametrize("stopping", ["none", "public", "private"])
def test_no_release_costs_nothing(stopping: str) -> None:
    got = proved_epsilon(make_header(stopping=stopping), [])
    assert (got.epsilon, got.steps_charged, got.reason) == (0.0, 0, None)


def test_what_is_spent_so_far_is_exactly_what_was_released() -> None:
    header, releases = make_run(taken=60, steps=100)
    got = proved_epsilon(header, releases, charge="taken")
    assert got.steps_charged == 60
    assert got.epsilon == pytest.approx(proved_epsilon(*make_run(taken=60)).epsilon, rel=1e-12)
    assert any("fixed in advance" in note for note in got.assumptions)
    assert not any("fixed in advance" in note for note in proved_epsilon(*make_run(taken=60)).assumptions)
    with pytest.raises(UnknownNameError):
        proved_epsilon(header, releases, charge="some")


def test_steps_that_will_be_repeated_are_charged_too() -> None:
    """Back at a checkpoint of step 50, a run of 100 that stops at 55 would have gone on from there."""
    header, releases = make_run(taken=60, steps=100)
    again = [*releases, *(make_release(header, t) for t in range(50, 55))]
    got = proved_epsilon(header, again)
    assert got.steps_charged == 65 + 45
    assert got.epsilon == pytest.approx(proved_epsilon(*make_run(taken=110)).epsilon, rel=1e-12)


def test_a_reconstruction_bound_covers_the_declared_steps() -> None:
    whole = reconstruction_bound(*make_run(taken=1_000), kappa=0.1)
    assert reconstruction_bound(*make_run(taken=10, steps=1_000), kappa=0.1) == whole
    public = reconstruction_bound(*make_run(taken=10, steps=1_000, stopping="public"), kappa=0.1)
    assert public.whole_run is not None and whole.whole_run is not None
    assert public.whole_run < whole.whole_run


# --- a budget -----------------------------------------------------------------------------------


def half_spent(taken: int = 60) -> tuple[RunHeader, list[Release], float]:
    """A run of 300 declared steps, held to the epsilon of 100."""
    budget = proved_epsilon(*make_run(taken=100)).epsilon * 1.0001
    header, releases = make_run(taken=taken, steps=300)
    return with_plan(header, budget=budget), releases, budget


@pytest.mark.parametrize("taken", [1, 60, 99, 100])
def test_with_a_budget_the_charge_ends_where_the_budget_does(taken: int) -> None:
    header, releases, budget = half_spent(taken)
    got = proved_epsilon(header, releases)
    assert (got.steps_charged, got.at_budget) == (100, True)
    assert budget * 0.99 < got.epsilon <= budget
    assert any("as far as the budget of epsilon" in note for note in got.assumptions)


def test_a_budget_that_affords_all_declared_steps_changes_nothing() -> None:
    header, releases = make_run(taken=60, steps=100)
    whole = proved_epsilon(header, releases)
    roomy = proved_epsilon(with_plan(header, budget=whole.epsilon * 1.01), releases)
    assert (roomy.epsilon, roomy.steps_charged, roomy.at_budget) == (whole.epsilon, 100, False)


def test_the_steps_charged_do_not_depend_on_the_view_that_is_asked_for() -> None:
    """The budget is that of the run, at its own delta; other views are of the same steps."""
    header, releases, _ = half_spent()
    for view in (
        {"neighbours": "replace-one"},
        {"accountant": "RDP"},
        {"delta": 1e-7},
        {"neighbours": "replace-one", "accountant": "RDP"},
    ):
        got = proved_epsilon(header, releases, **view)
        assert got.steps_charged == 100
        exact = proved_epsilon(*make_run(taken=100), **view)
        assert got.epsilon == pytest.approx(exact.epsilon, rel=1e-12)


def test_a_run_within_its_budget_keeps_to_it_with_steps_repeated() -> None:
    header, releases, budget = half_spent(80)
    again = [*releases, *(make_release(header, t) for t in range(70, 75))]
    got = proved_epsilon(header, again)
    assert (got.steps_charged, got.at_budget) == (100, True)
    assert got.epsilon <= budget


def test_what_was_released_is_charged_even_over_the_budget() -> None:
    header, releases, budget = half_spent(120)
    got = proved_epsilon(header, releases)
    assert got.steps_charged == 120
    assert got.epsilon > budget


@pytest.mark.parametrize("budget", [None, 0, -1.0, math.nan, "much", True])
def test_a_budget_that_is_none_limits_nothing(budget: Any) -> None:
    header, releases = make_run(taken=6, steps=100)
    got = proved_epsilon(with_plan(header, budget=budget), releases)
    assert (got.steps_charged, got.at_budget) == (100, False)


@pytest.mark.parametrize("stopping", ["none", "public", "private"])
def test_the_affordable_steps_are_those_that_are_charged(stopping: str) -> None:
    header, releases, budget = half_spent()
    header = dataclasses.replace(header, stopping=stopping)
    assert affordable_steps(header, releases, [6.0] * 240, budget=budget) == 40


# --- steps not taken are noised as planned ------------------------------------------------------


def test_steps_not_taken_follow_the_plan() -> None:
    sigma = Exponential.to(8.0, end=4.0, steps=50)
    plan = {"clip": Constant(start=4.0).to_dict(), "sigma": sigma.to_dict(), "fixed_variance": False}
    counts = (AuxiliaryRelease(name="counts", values=(0.1,) * 3, sensitivity=math.sqrt(3) / 2, noise_std=30.0),)
    header, releases = make_run(sigmas=[sigma(t) for t in range(50)], plan=plan, groups=("a", "b", "c"), side=counts)
    assert proved_epsilon(header, releases[:7]).epsilon == pytest.approx(
        proved_epsilon(header, releases).epsilon, rel=1e-9
    )


def test_steps_not_taken_in_fixed_variance_mode() -> None:
    clip = Linear.to(4.0, end=2.0, steps=40)
    plan = {"clip": clip.to_dict(), "fixed_variance": True, "varsigma": 24.0}
    header = make_header(steps=40, plan=plan, groups=("a", "b"), guarantee="paper-only")
    releases = [make_release(header, t, clip=clip(t), sigma=24 / clip(t), noise_std=(24.0, 24.0)) for t in range(40)]
    got, whole = proved_epsilon(header, releases[:3]), proved_epsilon(header, releases)
    assert got.steps_charged == whole.steps_charged == 40
    assert got.epsilon == pytest.approx(whole.epsilon, rel=1e-9)


def test_side_releases_of_steps_not_taken_are_the_plans_or_the_costliest_so_far() -> None:
    header = make_header(steps=200, strategy="quantile-clip")
    planned = with_plan(header, side_inverse_square=0.25)
    releases = [make_release(header, t, side=side(0.5, 1.0)) for t in range(200)]
    whole = proved_epsilon(header, releases).epsilon
    assert proved_epsilon(planned, releases[:3]).epsilon == pytest.approx(whole, rel=1e-9)
    costly = [make_release(header, 0, side=side(0.5, 0.5))]
    assert proved_epsilon(planned, costly).epsilon > whole
    cheap = [make_release(header, 0, side=side(0.5, 50.0))]
    assert proved_epsilon(planned, cheap).epsilon == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, "much", None])
def test_a_plan_that_does_not_say_how_is_infinite(wrong: Any) -> None:
    header, releases = make_run(taken=3, steps=5)
    got = proved_epsilon(with_plan(header, side_inverse_square=wrong), releases)
    assert got.epsilon == math.inf
    assert "the plan does not say how the 2 steps not taken would have been noised" in (got.reason or "")
    empty = dataclasses.replace(header, plan={})
    assert "does not say how" in (proved_epsilon(empty, releases).reason or "")
    assert proved_epsilon(empty, releases, charge="taken").reason is None
    assert proved_epsilon(dataclasses.replace(empty, stopping="public"), releases).reason is None


# --- in words -----------------------------------------------------------------------------------


def test_the_statement_says_why_more_is_charged_than_was_taken() -> None:
    header, releases = make_run(taken=60, steps=100)
    result = statement(header, releases)
    assert result.proved_if_fixed == proved_epsilon(header, releases, charge="taken")
    words = flat(result)
    assert "Steps: 60 taken of 100 declared" in words
    assert (
        "charged: 100 steps: all declared steps, because training may have stopped on released values; 60 were taken. "
        "Had it been fixed in advance to stop at step 60: epsilon = 0.03768." in words
    )
    data = json.loads(json.dumps(result.to_dict()))
    assert data["proved"]["steps_charged"] == 100
    assert data["proved_if_fixed"]["steps_charged"] == 60


def test_the_statement_of_a_run_with_a_budget() -> None:
    header, releases, budget = half_spent()
    words = flat(statement(header, releases))
    assert f"charged: 100 steps: as many as the budget of epsilon = {budget:g} affords, because training" in words
    assert "60 were taken. Had it been fixed in advance to stop at step 60: epsilon = 0.03768." in words
    header, releases, budget = half_spent(100)
    words = flat(statement(header, releases))
    assert f"charged: 100 steps: as many as the budget of epsilon = {budget:g} affords, of 300 declared." in words


def test_a_statement_with_nothing_to_explain_explains_nothing() -> None:
    for run in (make_run(taken=60), make_run(taken=60, steps=100, stopping="public"), (make_header(), [])):
        assert "charged:" not in str(statement(*run))
