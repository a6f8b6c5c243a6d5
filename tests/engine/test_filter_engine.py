"""An engine that is held to a privacy filter: it cannot overspend, and may stop at any released value."""

from __future__ import annotations

import math

import pytest
from torch.nn import functional as F

from gradveil.accounting import FilterAccountant, proved_epsilon
from gradveil.accounting.ledger import read
from gradveil.errors import BudgetExhausted, ConfigError, LedgerError, UnknownNameError
from loops import run, start


def steps_until_refused(engine, model, optimizer, loader) -> int:
    with pytest.raises(BudgetExhausted, match="budget of its privacy filter"):
        run(engine, model, optimizer, loader)
    return engine.step


def test_the_step_that_the_filter_does_not_grant_is_refused():
    engine, *rest = start(accountant="filter", budget=2.0, steps=200)
    taken = steps_until_refused(engine, *rest)
    assert 0 < taken < 200
    assert engine.epsilon == pytest.approx(2.0, rel=1e-6)
    assert engine.epsilon <= 2.0
    counted = FilterAccountant(engine.header).observe(engine.releases)
    z = engine.releases[0].multiplier
    assert (
        counted.granted[0]
        <= counted.filters[0].budget
        < counted.granted[0] + 1.0001 * counted.filters[0].cost(*one_charge(engine, z))
    )


def one_charge(engine, z):
    from gradveil.accounting._events import planned_mechanism

    return planned_mechanism(engine.header), z


def test_stopping_at_a_released_value_is_free():
    engine, model, optimizer, loader = start(accountant="filter", budget=2.0, steps=200)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.step == 4:
            engine.stop("the released gradient was short")
    assert engine.step == 4
    assert engine.epsilon <= 2.0
    assert engine.statement().proved.steps_charged == 4
    with pytest.raises(BudgetExhausted, match="the released gradient was short"):
        next(iter(loader))
    plain, model, optimizer, loader = start(steps=200)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        plain.stop()
    assert plain.step == 1
    assert plain.statement().proved.steps_charged == 200  # without a filter, all declared steps are charged


def test_a_stop_between_the_parts_of_a_batch_waits_for_its_release():
    engine, model, optimizer, loader = start(accountant="filter", budget=2.0, batch_size=20, physical=4)
    for x, y in loader:
        engine.stop()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="mean").backward()
        optimizer.step()
    assert engine.step == 1


def test_epsilon_calibrates_sigma_so_that_the_plan_just_fits():
    engine, *rest = start(accountant="filter", epsilon=2.0, sigma=None, steps=12)
    run(engine, *rest)
    assert engine.step == 12
    fixed = proved_epsilon(engine.header, engine.releases, charge="taken", accountant="RDP").epsilon
    assert 1.99 < fixed <= engine.epsilon <= 2.0
    pld, *_ = start(epsilon=2.0, sigma=None, steps=12)
    assert engine.plan.sigma(0) > pld.plan.sigma(0)  # the price


def test_the_end_of_a_stopped_run_is_in_its_ledger(tmp_path):
    engine, model, _optimizer, loader = start(accountant="filter", budget=2.0, run_dir=tmp_path / "run", steps=50)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        engine.stop("enough")
    engine.close()
    contents = read(tmp_path / "run" / "ledger.jsonl")
    assert (contents.ended, len(contents.releases)) == ("enough", 1)
    again, *_ = start(accountant="filter", budget=2.0, run_dir=tmp_path / "run", steps=50, resume=True)
    assert again.header.plan["filter"] == contents.header.plan["filter"]
    again.detach()


def test_a_checkpoint_goes_on_under_the_same_filter_only():
    engine, model, _optimizer, loader = start(accountant="filter", budget=2.0, steps=50)
    for _ in range(3):
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward()
    state = engine.state_dict()
    same, *_ = start(accountant="filter", budget=2.0, steps=50)
    same.load_state_dict(state)
    assert len(same.releases) == 3
    assert steps_until_refused(*start_from(state)) < 50
    for other in ({"accountant": "PLD"}, {"accountant": "filter", "budget": 1.0}):
        engine, *_ = start(**{"budget": 2.0, "steps": 50} | other)
        with pytest.raises(LedgerError, match="would charge less"):
            engine.load_state_dict(state)


def start_from(state):
    engine, *rest = start(accountant="filter", budget=2.0, steps=50)
    engine.load_state_dict(state)
    return engine, *rest


@pytest.mark.parametrize("wrong", [{"sampling": "without-replacement"}, {"strategy": "dyn-s", "allow_unproved": True}])
def test_what_a_filter_is_not_proved_for_is_refused(wrong):
    with pytest.raises(ConfigError, match="privacy filter"):
        start(accountant="filter", budget=2.0, **wrong)
    with pytest.raises(UnknownNameError):
        start(accountant="RDPP")


def test_without_a_budget_the_filter_affords_the_plan():
    engine, *rest = start(accountant="filter", steps=6)
    run(engine, *rest)
    assert engine.step == 6
    assert math.isfinite(engine.epsilon)
