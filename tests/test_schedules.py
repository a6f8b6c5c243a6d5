"""Schedules: formulas, end values, floors, refusals, and reading back."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.errors import ConfigError, ScheduleError, UnknownNameError
from gradveil.mechanism.schedules import DECAYS, KINDS, Constant, Cyclic, Exponential, Linear, Step, decay, from_dict

starts = st.floats(1e-3, 1e3)


@given(st.sampled_from(sorted(DECAYS)), starts, st.floats(0.01, 1.0), st.integers(1, 500))
def test_a_decay_starts_at_start_stays_above_its_end_and_is_positive(kind, start, ratio, steps):
    schedule = decay(kind, start, end=start * ratio, steps=steps)
    schedule.check(steps)
    values = [schedule(t) for t in range(steps)]
    assert values[0] == start
    assert min(values) >= start * ratio * (1 - 1e-9)
    assert max(values) <= start * (1 + 1e-12)


@given(st.sampled_from(["linear", "exponential", "step"]), starts, st.floats(0.01, 1.0), st.integers(10, 500))
def test_the_last_step_is_at_the_end_value_and_the_way_there_never_rises(kind, start, ratio, steps):
    schedule = decay(kind, start, end=start * ratio, steps=steps)
    values = [schedule(t) for t in range(steps)]
    assert values[-1] == pytest.approx(start * ratio, rel=1e-9)
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(values))


def test_formulas():
    assert Constant(start=4.0)(17) == 4.0
    assert Linear(start=4.0, rate=0.001)(250) == pytest.approx(4.0 * (1 - 0.001 * 250))
    assert Exponential(start=15.0, rate=1e-4)(5000) == pytest.approx(15.0 * math.exp(-0.5))
    assert Step(start=8.0, factor=0.5, every=100)(250) == 2.0


@given(st.integers(0, 400), st.integers(1, 40), st.floats(0, 0.02), st.floats(0, 0.1), st.floats(0.05, 0.5))
def test_cyclic_is_the_written_reading(t, length, g3, g4, floor):
    v, tau = divmod(t, length)
    k = v // 2
    expected = 4.0 * max(floor, 1 - 2 * g4 * k) * (1 - g3 * (tau if v % 2 == 0 else length - tau))
    wave = Cyclic(start=4.0, length=length, rate=g3, envelope_rate=g4, envelope_floor=floor)
    assert wave.raw(t) == pytest.approx(expected, abs=1e-12)


def test_cyclic_to_reaches_its_end_at_the_last_valley():
    wave = Cyclic.to(15.0, end=4.0, steps=10_000)
    values = [wave(t) for t in range(10_000)]
    assert min(values) == pytest.approx(4.0)
    assert values.index(min(values)) == 9_000


def test_a_schedule_that_reaches_zero_is_refused_with_the_step():
    with pytest.raises(ScheduleError, match=r"reaches 0 at step 100 of 200.*floor"):
        Linear(start=4.0, rate=0.01).check(200)
    with pytest.raises(ScheduleError, match=r"at step 51 of 60"):
        Cyclic(start=1.0, length=100, rate=1 / 50.5, envelope_rate=0.0).check(60)
    Linear(start=4.0, rate=0.01).check(100)  # ends just before zero
    Linear(start=4.0, rate=0.01, floor=0.5).check(200)
    assert Linear(start=4.0, rate=0.01, floor=0.5)(150) == 0.5


@pytest.mark.parametrize("start", [0.0, -1.0, math.nan, math.inf])
def test_a_start_that_is_not_positive_and_finite_is_refused(start):
    with pytest.raises(ScheduleError, match=r"positive|finite"):
        Constant(start=start)


@pytest.mark.parametrize("end", [0.0, -2.0, math.nan, math.inf, 5.0])
def test_an_end_that_is_not_a_decay_is_refused(end):
    for kind in DECAYS:
        with pytest.raises(ScheduleError):
            decay(kind, 4.0, end=end, steps=10)


def test_other_refusals():
    with pytest.raises(UnknownNameError, match="exponential"):
        decay("exponentail", 4.0, end=1.0, steps=10)
    with pytest.raises(UnknownNameError):
        from_dict({"kind": "spline", "start": 1.0})
    with pytest.raises(ScheduleError, match="rate"):
        from_dict({"kind": "linear", "start": 1.0})
    with pytest.raises(ScheduleError, match="floor"):
        Linear(start=1.0, rate=0.1, floor=2.0)
    with pytest.raises(ScheduleError, match="factor"):
        Step(start=1.0, factor=1.5, every=2)
    with pytest.raises(ScheduleError, match="whole"):
        Step(start=1.0, factor=0.5, every=0)
    with pytest.raises(ConfigError, match="negative"):
        Constant(start=1.0)(-1)
    with pytest.raises(ScheduleError, match="ramps"):
        Cyclic.to(4.0, end=1.0, steps=10, ramps=3)


@given(st.sampled_from(sorted(DECAYS)), starts, st.floats(0.01, 1.0), st.integers(1, 500), st.floats(0, 1))
def test_written_and_read_back_is_the_same(kind, start, ratio, steps, floor):
    schedule = decay(kind, start, end=start * ratio, steps=steps, floor=floor * start)
    assert from_dict(schedule.to_dict()) == schedule
    assert set(KINDS) == {"constant", "linear", "exponential", "cyclic", "step"}
