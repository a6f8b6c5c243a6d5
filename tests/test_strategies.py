"""Strategies: the table, what each guarantees, and the public plan they lay out."""

from __future__ import annotations

import math

import pytest

from gradveil.errors import ConfigError, ScheduleError, UnknownNameError
from gradveil.mechanism import strategies
from gradveil.mechanism.schedules import Constant, Exponential, Linear
from gradveil.mechanism.strategies import Strategy, get, names, parameters

TABLE = {
    "non-private": ("none", "none", "none", "none"),
    "baseline": ("constant", "clip", "constant", "proved"),
    "dyn-s-decay": ("decay", "clip", "constant", "proved"),
    "dyn-s-l2max": ("constant", "l2max", "constant", "paper-only"),
    "dyn-s": ("decay", "l2max", "constant", "paper-only"),
    "dyn-sigma": ("constant", "clip", "decay", "proved"),
    "dyn-sigma-decay": ("decay", "clip", "decay", "proved"),
    "dyn-sigma-l2max": ("constant", "l2max", "decay", "paper-only"),
    "dyn-s-sigma": ("decay", "l2max", "decay", "paper-only"),
    "quantile-clip": ("private-quantile", "clip", "constant", "proved"),
    "adaclip": ("per-coordinate", "clip", "constant", "proved"),
    "dyn-private": ("private-estimate", "clip", "constant", "proved"),
    "dyn-private-sigma": ("private-estimate", "clip", "decay", "proved"),
    "normalised": ("normalised", "clip", "constant", "proved"),
    "dyn-adaptive": ("adaptive", "clip", "adaptive", "proved"),
}


def test_the_table():
    assert {n: (s.bounds, s.sensitivity, s.noise, s.guarantee) for n in names() for s in [get(n)]} == TABLE


def test_a_user_extends_the_table_and_the_guarantee_is_derived():
    mine = strategies.register(
        Strategy(name="mine", bounds="private-quantile", sensitivity="l2max", noise="decay", summary="a bad idea")
    )
    try:
        assert get("mine").guarantee == "paper-only"  # noise scaled to the batch, whatever its author says
        with pytest.raises(ConfigError, match="registered already"):
            strategies.register(mine)
    finally:
        strategies.unregister("mine")
    with pytest.raises(UnknownNameError):
        get("mine")


def test_a_strategy_that_clips_without_noise_is_refused():
    with pytest.raises(ConfigError, match="neither private"):
        Strategy(name="x", bounds="constant", sensitivity="none", noise="none", summary="")
    with pytest.raises(UnknownNameError):
        Strategy(name="x", bounds="sometimes", sensitivity="clip", noise="constant", summary="")


def test_near_names():
    with pytest.raises(UnknownNameError, match=r"'dyn-s-sigma'"):
        get("dyn_s_sigma")


def test_plans():
    plan = parameters("dyn-sigma-decay", steps=101, clip=4.0, sigma=15.0)
    assert (plan.clip(0), plan.clip(100)) == (4.0, pytest.approx(2.0))
    assert (plan.sigma(0), plan.sigma(100)) == (15.0, pytest.approx(4.0))
    assert isinstance(plan.clip, Linear)
    assert isinstance(plan.sigma, Exponential)
    both = parameters("dyn-sigma-decay", steps=101, clip=4.0, sigma=15.0, decay="cyclic", sigma_end=5.0)
    assert both.clip.kind == both.sigma.kind == "cyclic"
    assert min(both.sigma(t) for t in range(101)) == pytest.approx(5.0)
    own = parameters("dyn-sigma", steps=10, clip=Constant(start=1.0), sigma=Exponential(start=3.0, rate=0.1))
    assert own.sigma(5) == pytest.approx(3 * math.exp(-0.5))
    assert parameters("dyn-s-l2max", steps=1, clip=1.0, sigma=1.0).sensitivity_rule == "l2max-example"
    assert parameters("dyn-s", steps=1, clip=1.0, sigma=1.0, reading="batch").sensitivity_rule == "l2max-batch"
    assert parameters("adaclip", steps=1, clip=9.0, sigma=1.0).clip(0) == 1.0
    fixed = parameters("dyn-s", steps=3, clip=4.0, sigma=6.0, fixed_variance=True)
    assert fixed.varsigma == 24.0


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"strategy": "baseline", "sigma": 0.0}, ScheduleError, "positive"),
        ({"strategy": "baseline", "sigma": -1.0}, ScheduleError, "positive"),
        ({"strategy": "baseline", "sigma": math.nan}, ScheduleError, "finite"),
        ({"strategy": "baseline", "clip": 0.0}, ScheduleError, "positive"),
        ({"strategy": "baseline", "clip": None}, ConfigError, "clip is missing"),
        ({"strategy": "baseline", "steps": 0}, ConfigError, "at least 1"),
        ({"strategy": "baseline", "steps": 2.5}, ConfigError, "whole number"),
        ({"strategy": "dyn-s", "reading": "layer"}, UnknownNameError, "example"),
        ({"strategy": "baseline", "fixed_variance": True}, ConfigError, "does not"),
        ({"strategy": "dyn-s-sigma", "fixed_variance": True}, ConfigError, "schedule of its own"),
        ({"strategy": "baseline", "decay": "liner"}, UnknownNameError, "linear"),
        ({"strategy": "baseline", "sigma_end": 1.0}, ConfigError, "does not move"),
        ({"strategy": "dyn-sigma", "sigma_end": 0.0}, ScheduleError, "above zero"),
        ({"strategy": "dyn-sigma", "sigma": Constant(start=2.0)}, ConfigError, "needs a decay"),
        ({"strategy": "baseline", "sigma": Linear(start=2.0, rate=0.1)}, ConfigError, "needs a constant"),
        ({"strategy": "dyn-sigma", "sigma": Linear(start=2.0, rate=0.1)}, ScheduleError, "at step 10 of 50"),
        ({"strategy": "dyn-s-decay", "decay": "liner"}, UnknownNameError, "linear"),
    ],
)
def test_refusals(settings, error, words):
    with pytest.raises(error, match=words):
        parameters(**{"steps": 50, "clip": 1.0, "sigma": 2.0} | settings)


def test_settings_without_effect_are_said_to_be_so():
    with pytest.warns(UserWarning, match="nothing decays under 'baseline'"):
        parameters("baseline", steps=5, clip=1.0, sigma=1.0, decay="linear")
    with pytest.warns(UserWarning, match="'baseline' has no l2-max"):
        parameters("baseline", steps=5, clip=1.0, sigma=1.0, reading="batch")
