"""Records that are wrong, inconsistent or extreme are answered with infinity and a reason, never with a guess."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from accounting_records import make_header, make_release, make_run

from gradveil.accounting import affordable_steps, proved_epsilon, statement
from gradveil.mechanism.records import AuxiliaryRelease, Release

NAN, INF = math.nan, math.inf
FIXED = {"guarantee": "paper-only", "strategy": "dyn-s-l2max"}


def reason(header, releases, **view: Any) -> str:
    got = proved_epsilon(header, releases, **view)
    assert got.epsilon == INF
    assert got.reason
    return got.reason


def side(sensitivity: float = 0.5, noise_std: float = 1.0) -> tuple[AuxiliaryRelease, ...]:
    return (AuxiliaryRelease(name="counts", values=(0.0,), sensitivity=sensitivity, noise_std=noise_std),)


# --- numbers that are no numbers ----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": (NAN,)},
        {"clip": (INF,), "noise_std": (INF,)},
        {"clip": (INF,)},
        {"clip": (-1.0,)},
        {"clip": ("4",)},
        {"noise_std": (NAN,)},
        {"noise_std": (INF,)},
        {"noise_std": (-24.0,)},
        {"noise_std": (0.0,)},
        {"noise_std": (24.0, 24.0)},
        {"sensitivity": (NAN,)},
        {"side": side(sensitivity=NAN)},
        {"side": side(sensitivity=INF)},
        {"side": side(sensitivity=-1.0)},
        {"side": side(noise_std=NAN)},
        {"side": side(noise_std=INF)},
        {"side": side(noise_std=0.0)},
    ],
    ids=str,
)
def test_a_number_that_is_none_is_no_protection(changes: dict[str, Any]) -> None:
    header, releases = make_run(taken=2)
    releases[1] = dataclasses.replace(releases[1], **changes)
    assert releases[1].multiplier == 0.0
    assert "step 1" in reason(header, releases)


@pytest.mark.parametrize("std", [0.0, 24.0, NAN, INF])
def test_a_group_clipped_to_nothing_contributes_nothing(std: float) -> None:
    header, plain = make_run(taken=50)
    two = [dataclasses.replace(r, clip=(4.0, 0.0), noise_std=(24.0, std), sensitivity=(4.0, 0.0)) for r in plain]
    assert two[0].multiplier == plain[0].multiplier == 6.0
    assert proved_epsilon(header, two).epsilon == proved_epsilon(header, plain).epsilon
    nothing = [dataclasses.replace(r, clip=(0.0,), noise_std=(std,), sensitivity=(0.0,)) for r in plain]
    assert nothing[0].multiplier == INF
    assert proved_epsilon(header, nothing).epsilon == 0.0
    counted = [dataclasses.replace(r, side=side(noise_std=3.0)) for r in nothing]
    assert proved_epsilon(header, counted).epsilon == proved_epsilon(header, plain).epsilon


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
@pytest.mark.parametrize("accountant", ["PLD", "RDP"])
@pytest.mark.parametrize("sampling", ["poisson", "without-replacement", "with-replacement"])
@pytest.mark.parametrize("z", [1e-300, 1e-160, 1e-12, 1e-4, 1e-3, 0.01, 1e4, 1e12, 1e200, 1e300])
def test_extreme_noise_neither_crashes_nor_takes_for_ever(z, sampling, accountant, neighbours) -> None:
    header, _ = make_run(taken=3, sampling=sampling)
    releases = [make_release(header, t, clip=1.0, sigma=z) for t in range(3)]
    got = proved_epsilon(header, releases, neighbours=neighbours, accountant=accountant)
    assert (got.reason is None) == math.isfinite(got.epsilon)
    bounded = (sampling == "poisson" or neighbours == "replace-one") and (sampling, accountant) != (
        "with-replacement",
        "RDP",
    )
    if z < 1e-3:
        assert got.epsilon == INF
    elif bounded:
        assert got.epsilon < 1e-2 if z > 1 else got.epsilon > 50


def test_no_noise_multiplier_is_large_enough_to_be_free() -> None:
    huge = [make_release(make_header(), t, clip=1.0, sigma=1e200) for t in range(3)]
    at_the_limit = [make_release(make_header(), t, clip=1.0, sigma=1e6) for t in range(3)]
    for delta in (1e-5, 1e-9, 1e-12):
        got = proved_epsilon(make_header(), huge, delta=delta).epsilon
        assert got == proved_epsilon(make_header(), at_the_limit, delta=delta).epsilon
    assert got > 0


def test_extreme_plans_are_refused_or_not_afforded() -> None:
    for sigma in (1e-160, 1e200):
        plan = {"clip": {"kind": "constant", "start": 1.0}, "sigma": {"kind": "constant", "start": sigma}}
        header = make_header(steps=5, plan=plan)
        taken = [make_release(header, 0)]
        found = proved_epsilon(header, taken)
        if sigma < 1:
            assert "all 5 declared steps are charged" in reason(header, taken)
        else:
            once = proved_epsilon(header, taken, charge="taken").epsilon
            assert once <= found.epsilon <= once * 1.01
    assert affordable_steps(make_header(), [], [6.0, 6.0, 1e-160, 6.0], budget=5.0) == 2
    assert affordable_steps(make_header(), [], [1e200] * 7, budget=5.0) == 7


# --- words that are not known, rates that do not fit --------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"stopping": "Private"}, "'Private'"),
        ({"guarantee": "None"}, "'None'"),
        ({"guarantee": "Proved"}, "'Proved'"),
        ({"sampling": "Poisson"}, "'Poisson'"),
        ({"expected_batch_size": 6000.0}, "6000.0"),
        ({"sample_rate": 0.001, "expected_batch_size": 600.0}, "0.001"),
        ({"sample_rate": 2.0}, "2.0"),
        ({"sample_rate": NAN}, "nan"),
        ({"population": 0}, "out of 0"),
    ],
    ids=str,
)
def test_a_header_that_cannot_be_relied_on(changes: dict[str, Any], named: str) -> None:
    for taken in (0, 2):
        header, releases = make_run(taken=taken, **changes)
        assert named in reason(header, releases)
        assert affordable_steps(header, releases, [6.0], budget=100.0) == 0


@pytest.mark.parametrize("sampling", ["poisson", "without-replacement"])
@pytest.mark.parametrize(
    "changes",
    [
        {"sample_rate": 0.001},
        {"sample_rate": 0.5},
        {"sample_rate": 2.0},
        {"sample_rate": 0.01 * (1 + 1e-11)},
        {"expected_batch_size": 60.0},
        {"sample_rate": 0.001, "expected_batch_size": 60.0},
    ],
    ids=str,
)
def test_a_release_sampled_otherwise_than_declared(sampling: str, changes: dict[str, Any]) -> None:
    header, releases = make_run(taken=2, sampling=sampling)
    releases[1] = make_release(header, 1, **changes)
    why = reason(header, releases, neighbours="replace-one")
    assert "step 1" in why
    assert "do not describe the sampling" in why


def test_rounding_of_the_rate_is_not_a_difference() -> None:
    header, releases = make_run(taken=2, population=59_999, sample_rate=601 / 59_999, expected_batch_size=601.0)
    releases[1] = make_release(header, 1, sample_rate=601 / 59_999 * (1 + 3e-16))
    assert proved_epsilon(header, releases).reason is None


# --- a scale that is said to be public ----------------------------------------------------------


def l2max(header, **changes: Any) -> Release:
    settings = {"sensitivity_rule": "l2max-batch", "sensitivity": (1.0,), "sigma": 24.0, "noise_std": (24.0,)}
    return make_release(header, 0, **{**settings, **changes})


def fixed_header(**plan: Any):
    header = make_header(**FIXED, steps=5)
    return dataclasses.replace(header, plan={**header.plan, "fixed_variance": True, "varsigma": 24.0, **plan})


def test_l2max_is_public_in_fixed_variance_mode_only() -> None:
    header = fixed_header()
    assert proved_epsilon(header, [l2max(header)]).reason is None
    for plan in ({"fixed_variance": False}, {"varsigma": 25.0}, {"varsigma": None}):
        other = fixed_header(**plan)
        assert "l2max-batch" in reason(other, [l2max(other)])
    for std in (23.9, 24.1, 240.0):
        assert "l2max-batch" in reason(header, [l2max(header, noise_std=(std,))])
    lost = l2max(header, noise_std=(6.0,), recovered=True)  # as ledger.recovered_release writes it
    assert proved_epsilon(header, [lost]).epsilon > proved_epsilon(header, [l2max(header)]).epsilon
    assert "l2max-batch" in reason(header, [l2max(header, noise_std=(25.0,), recovered=True)])


def test_a_strategy_without_a_proof_has_no_finite_epsilon_whatever_its_releases_say() -> None:
    header = make_header(**FIXED)
    assert "dyn-s-l2max" in reason(header, [make_release(header, 0)])
    assert affordable_steps(header, [], [6.0] * 100, budget=5.0) == 0
    assert affordable_steps(fixed_header(), [], [6.0] * 100, budget=5.0) == 100


# --- what add-remove takes for granted ----------------------------------------------------------


def test_add_remove_says_that_the_rate_is_taken_as_fixed() -> None:
    run = make_run(taken=5)
    said = [n for n in proved_epsilon(*run).assumptions if "fixed and public" in n]
    assert len(said) == 1
    for words in ("rate 0.01", "N = 60000", "removing one example"):
        assert words in said[0]
    assert not any("fixed and public" in n for n in proved_epsilon(*run, neighbours="replace-one").assumptions)
    assert "taken as fixed and public" in " ".join(str(statement(*run)).split())
