"""The published tables agree with the accountants, with each other, and with the orderings they show."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gradveil.accounting import paper_epsilons
from gradveil.experiments import published
from gradveil.experiments.published import (
    ACCOUNTING,
    ADAPTIVE,
    CLIPS,
    FIXED_SIGMA,
    FIXED_VARIANCE,
    IMAGES,
    LAST_SCENARIO,
    LEAKAGE,
    METHODS,
    NOISE_DECAY,
    NOISE_DECAY_FIXED,
    NOISE_DECAY_TARGET,
    NON_PRIVATE,
    POLICIES,
    SECONDS,
    SENSITIVITY,
    SETS,
    TARGET_ACCURACY,
)
from gradveil.mechanism import strategies

ALL_VARIANCES = [*FIXED_VARIANCE.items(), *LAST_SCENARIO.items()]
# Rows whose sigma is constant: set, strategy, epsilons, iterations.
CONSTANT = [(name, s, *row) for name, target in TARGET_ACCURACY.items() for s, row in target.spent.items()]
# What the printed digits leave open. BaseC and AdvC use an eps0 cut to three digits: only the .15 % holds.
PRINTED = {"OptC": 1e-3, "zCDP": 6e-4, "MA": 6e-4}
# (set, C) where dyn-s is not the best of the four: dyn-s-l2max is, by .001 to .004.
DYN_S_SECOND = {("mnist", 1.0), ("mnist", 8.0), ("fashion-mnist", 1.0), ("cifar10", 1.0), ("lfw", 1.0)}


def rises(values) -> bool:
    return all(a <= b for a, b in pairwise(values))


def falls(values) -> bool:
    return all(a > b for a, b in pairwise(values))


# --- shapes -------------------------------------------------------------------------------------


def test_every_set_strategy_and_clip_is_there() -> None:
    assert SETS == ("mnist", "fashion-mnist", "cifar10", "lfw", "purchase-10", "purchase-50")
    assert METHODS == ("BaseC", "AdvC", "OptC", "zCDP", "MA")
    assert CLIPS == (1, 2, 4, 8, 16, 32)
    for table in (NON_PRIVATE, SENSITIVITY, ACCOUNTING, TARGET_ACCURACY):
        assert tuple(table) == SETS
    assert tuple(LEAKAGE) == IMAGES == SETS[:4]
    assert tuple(SECONDS) == (*IMAGES, "purchase")
    assert list(FIXED_VARIANCE) == [(name, clip) for name in ("mnist", "cifar10") for clip in (4.0, 8.0)]
    assert list(LAST_SCENARIO) == [("mnist", 4.0)]
    for name in SETS:
        assert tuple(SENSITIVITY[name]) == tuple(TARGET_ACCURACY[name].spent) == FIXED_SIGMA
        assert all(tuple(row) == CLIPS for row in SENSITIVITY[name].values())
    for _, block in ALL_VARIANCES:
        assert tuple(block.epsilons) == FIXED_SIGMA
    assert tuple(NOISE_DECAY) == tuple(NOISE_DECAY_TARGET) == POLICIES
    assert tuple(ADAPTIVE) == ("baseline", "quantile-clip", "adaclip", "dyn-s-sigma")
    assert all(tuple(row) == IMAGES for row in ADAPTIVE.values())


def test_every_row_of_epsilons_has_every_method() -> None:
    rows = [*ACCOUNTING.values(), *(row for *_, row, _ in CONSTANT)]
    rows += [row.epsilons for row in NOISE_DECAY_TARGET.values()]
    rows += [row for _, block in ALL_VARIANCES for row in block.epsilons.values()]
    assert all(tuple(row) == METHODS for row in rows)
    for decay in NOISE_DECAY.values():
        assert all(tuple(row) == METHODS for row in (*decay.accuracies.values(), decay.iterations))


def test_strategies_are_the_projects() -> None:
    used = {*published.FIXED_SIGMA, *published.DECAYING_SIGMA, *published.ATTACKED, *published.TIMED, *ADAPTIVE}
    assert used == set(strategies.names()) - {
        "dyn-private",
        "dyn-private-sigma",
        "normalised",
        "dyn-adaptive",
    }  # not in the paper


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        published._named(METHODS, 1.0, 2.0)


# --- against the accountants --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "strategy", "epsilons", "iterations"), CONSTANT)
def test_constant_sigma_is_what_the_accountants_say(name, strategy, epsilons, iterations) -> None:
    got = {m: e.epsilon for m, e in paper_epsilons([6.0] * iterations, 0.01, 1e-5).items()}
    for method in METHODS:
        assert epsilons[method] == pytest.approx(got[method], rel=1.5e-3), method
    for method, size in PRINTED.items():
        assert epsilons[method] == pytest.approx(got[method], abs=size), method
    # The cut of eps0 always takes something off.
    assert 0.99885 < epsilons["AdvC"] / got["AdvC"] < 0.9994
    assert 0.99903 < epsilons["BaseC"] / got["BaseC"] < 0.99945


@pytest.mark.parametrize("name", SETS)
def test_a_whole_run_spends_the_same_in_every_table(name) -> None:
    assert TARGET_ACCURACY[name].spent["baseline"].epsilons == ACCOUNTING[name]
    assert TARGET_ACCURACY[name].spent["baseline"].iterations == {"l": 6000, "p": 5000}.get(name[0], 10_000)
    assert falls(row.iterations for row in TARGET_ACCURACY[name].spent.values())


@pytest.mark.parametrize("key", FIXED_VARIANCE)
def test_a_fixed_variance_costs_the_baseline_a_whole_run(key) -> None:
    assert FIXED_VARIANCE[key].epsilons["baseline"] == ACCOUNTING[key[0]]


@pytest.mark.parametrize("block", [block for _, block in ALL_VARIANCES])
def test_a_fixed_variance_costs_less_from_row_to_row(block) -> None:
    for method in METHODS:
        assert falls(row[method] for row in block.epsilons.values()), method


def test_the_last_scenario_is_a_whole_run_of_its_own_strategy() -> None:
    block = LAST_SCENARIO["mnist", 4.0]
    assert block.epsilons["dyn-s-l2max"] == ACCOUNTING["mnist"]
    assert block.accuracy == NOISE_DECAY_FIXED["dyn-s-l2max"]


def test_decaying_noise_to_a_target() -> None:
    for row in NOISE_DECAY_TARGET.values():
        assert falls(row.epsilons[m] for m in METHODS)
        assert all(row.epsilons[m] < ACCOUNTING["mnist"][m] for m in METHODS)
    order = [NOISE_DECAY_TARGET[policy] for policy in ("cyclic", "linear", "exponential")]
    assert rises(row.iterations for row in order)
    assert all(falls(row.epsilons[m] for row in order) for m in METHODS)


# --- accuracies ---------------------------------------------------------------------------------


def test_accuracies_agree_between_tables() -> None:
    for name in SETS:
        assert TARGET_ACCURACY[name].accuracy == SENSITIVITY[name]["baseline"][4.0]
    for (name, clip), block in FIXED_VARIANCE.items():
        assert round(block.accuracy, 3) == SENSITIVITY[name]["baseline"][clip]
    for strategy, accuracy in NOISE_DECAY_FIXED.items():
        assert round(accuracy, 3) == SENSITIVITY["mnist"][strategy][4.0]
    assert FIXED_VARIANCE["mnist", 4.0].accuracy == NOISE_DECAY_FIXED["baseline"]
    for name in IMAGES:
        assert ADAPTIVE["baseline"][name][0] == SENSITIVITY[name]["baseline"][4.0]
        # Printed for both alike, though the noise decays in one of them only.
        assert ADAPTIVE["dyn-s-sigma"][name][0] == SENSITIVITY[name]["dyn-s"][4.0]


@pytest.mark.parametrize("name", SETS)
def test_accuracy_by_clip(name) -> None:
    table = SENSITIVITY[name]
    for strategy in ("baseline", "dyn-s-decay"):
        row = [table[strategy][clip] for clip in CLIPS]
        top = row.index(max(row))
        assert rises(row[: top + 1]) and rises(row[:top:-1]), strategy
    for clip in CLIPS:
        column = {s: table[s][clip] for s in FIXED_SIGMA}
        assert max(column.values()) < NON_PRIVATE[name]
        assert column["baseline"] < column["dyn-s-l2max"] > column["dyn-s-decay"]
        assert column["dyn-s"] > column["dyn-s-decay"]
        best = max(column.values())
        assert (column["dyn-s"] < best) == ((name, clip) in DYN_S_SECOND)
        assert best - column["dyn-s"] < 0.0045


@pytest.mark.parametrize("policy", POLICIES)
def test_decaying_noise(policy) -> None:
    accuracies, iterations = NOISE_DECAY[policy]
    for fixed, row in zip(NOISE_DECAY_FIXED.values(), accuracies.values(), strict=True):
        assert all(fixed <= accuracy <= fixed + 0.0043 for accuracy in row.values())
        assert max(row.values()) == row["BaseC"]
        assert min(row.values()) == row["OptC"]
    assert all(rises(row[m] for row in accuracies.values()) for m in METHODS)
    assert all(iterations["OptC"] < iterations[m] < iterations["zCDP"] for m in ("AdvC", "MA"))
    assert iterations["zCDP"] < iterations["BaseC"] < 10_000


def test_adaptive_clipping_lies_between() -> None:
    for name in IMAGES:
        order = ("baseline", "adaclip", "quantile-clip", "dyn-s-sigma")
        assert rises(ADAPTIVE[s][name][0] for s in order)
        assert ADAPTIVE["dyn-s-sigma"][name][0] < NON_PRIVATE[name]


# --- attacks and time ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_leakage(name) -> None:
    table = LEAKAGE[name]
    assert tuple(table) == published.ATTACKED
    order = [table[s] for s in ("non-private", "adaclip", "quantile-clip", "baseline", "dyn-s-sigma")]
    assert falls(leak.asr for leak in order)
    assert rises(leak.mse for leak in order)
    for leak in order[:-1]:
        assert 0 < leak.asr <= 1
        assert leak.mse < 0.7
        assert order[0].iterations <= leak.iterations < order[0].iterations + 2.3
    assert order[-1].iterations == 300
    assert order[-1].asr == 0
    assert order[-1].mse > 0.7


def test_seconds() -> None:
    for row in SECONDS.values():
        assert tuple(row) == published.TIMED
        assert rises(row.values())
    for strategy in ("baseline", "dyn-s-sigma"):
        assert {name: SECONDS[name][strategy] for name in IMAGES} == {n: ADAPTIVE[strategy][n][1] for n in IMAGES}
    for name in IMAGES:
        assert falls(ADAPTIVE[s][name][1] for s in ("quantile-clip", "adaclip", "dyn-s-sigma", "baseline"))
