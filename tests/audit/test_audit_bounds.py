"""Lower bounds are lower bounds: not above the truth more often than they say, and near it where they can be."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq, linprog
from scipy.special import expit
from scipy.stats import binom, norm

from gradveil.accounting import Setting, planned_epsilon
from gradveil.audit import _guesses
from gradveil.audit._guesses import SHARES, WEIGHTS, classes, one_run_p_value, planned_share, spare, weights
from gradveil.audit.bounds import (
    Trials,
    clopper_pearson,
    fdp_rejects,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_family,
    one_run,
    one_run_fdp,
)
from gradveil.errors import ConfigError

DELTA = 1e-5
FEW = {"shares": (0.02,)}  # one test: the hundred most extreme scores on either side, of ten thousand
SEEDS = range(20)
METHODS = {
    "Gaussian family": (gaussian_family, {}),
    "one-run": (one_run, {}),
    "one-run f-DP": (one_run_fdp, FEW),
    "Clopper-Pearson": (clopper_pearson, {}),
}


def trials(scores, present, public=True):
    return Trials(
        scores=np.asarray(scores, dtype=float),
        present=np.asarray(present, dtype=bool),
        statistic="the output",
        threat_model="sees it",
        scale_is_public=public,
    )


def gaussian_trials(sigma, seed, count):
    """Sensitivity 1, a fair coin for each trial."""
    rng = np.random.default_rng(seed)
    coins = rng.random(count) < 0.5
    return trials(coins + sigma * rng.standard_normal(count), coins)


@pytest.mark.parametrize("mu", [0.05, 1 / 6, 0.5, 1.0, 3.0])
def test_the_gaussian_mechanisms_epsilon_is_the_accountants(mu):
    exact = gaussian_epsilon(mu, DELTA)
    assert gaussian_delta(mu, exact) == pytest.approx(DELTA, rel=1e-6)
    bound = planned_epsilon([1 / mu], Setting(sample_rate=1.0), delta=DELTA).epsilon
    assert exact <= bound * (1 + 1e-9)
    assert bound == pytest.approx(exact, rel=1e-3)


def test_the_gaussian_mechanism_without_a_shift_or_with_too_large_a_one():
    assert gaussian_epsilon(0.0, DELTA) == 0.0
    assert gaussian_epsilon(1e-7, DELTA) == 0.0
    assert gaussian_epsilon(100.0, DELTA) == math.inf
    assert gaussian_epsilon(1.0, 0.0) == math.inf


@pytest.mark.parametrize(
    ("sigma", "truth", "asked"),
    [
        (1.0, 4.38, {"Gaussian family": 3.8, "one-run": 2.0, "one-run f-DP": 2.8, "Clopper-Pearson": 1.4}),
        # One-run: test_no_bound_without_assumptions_can_be_much_larger says what there is to be had.
        (2.0, 1.99, {"Gaussian family": 1.3, "one-run": 1.05, "one-run f-DP": 1.1, "Clopper-Pearson": 0.5}),
    ],
)
def test_the_plain_gaussian_mechanism_in_ten_thousand_trials(sigma, truth, asked):
    """The median reaches what is asked, and no more seeds are above the truth than the confidence allows."""
    exact = gaussian_epsilon(1 / sigma, DELTA)
    assert exact == pytest.approx(truth, abs=0.005)
    seeds = [gaussian_trials(sigma, seed, 10_000) for seed in range(10_000, 10_100)]
    for name, (method, settings) in METHODS.items():
        found = [method(made, delta=DELTA, **settings) for made in seeds]
        epsilons = np.array([bound.epsilon for bound in found])
        assert np.median(epsilons) >= asked[name], name
        assert (epsilons > exact).sum() <= 5, name
        assert {(b.method, b.tests, b.trials, b.confidence) for b in found} == {(name, 1, 10_000, 0.95)}


def test_twenty_seeds_of_the_plain_gaussian_mechanism_in_one_run():
    """At sigma 2. The median of twenty is known to .05 only; the next test is about the same without chance."""
    assert np.median([one_run(gaussian_trials(2.0, seed, 10_000), delta=DELTA).epsilon for seed in SEEDS]) >= 1.1


@pytest.mark.parametrize(("sigma", "asked"), [(1.0, 2.4), (2.0, 1.1), (3.0, 0.65)])
def test_as_many_right_guesses_as_are_expected_show_what_is_asked(sigma, asked):
    """No seed: the scores are quantiles of the two Gaussians, and as many guesses are right as there should be."""
    bits, grid = 10_000, np.linspace(-8 * sigma, 1 + 8 * sigma, 100_001)
    both = (norm.cdf(grid, 0, sigma) + norm.cdf(grid, 1, sigma)) / 2
    scores = np.interp((np.arange(bits) + 0.5) / bits, both, grid)
    share = planned_share(scores, 0.05)
    assert share == SHARES[0]
    each = round(share * bits / 2)
    count = int(2 * weights(each) @ expit((scores[::-1][:each] - 0.5) / sigma**2))
    others = [classes(round(other * bits / 2)) for other in SHARES]
    assert one_run_p_value(bits, classes(each), count, asked, DELTA, others=others) < 0.05


def test_no_bound_without_assumptions_can_be_much_larger():
    """Sigma 2, epsilon 1.15: half of all seeds cannot show that.

    Take a Gaussian mechanism and bits that fit its output a little less: posteriors are e^epsilon / (e^epsilon + 1) at
    most. This is epsilon-differentially private. The best test between the two, that of the likelihood ratio, at the
    level .05, finds the Gaussian out in less than half of all cases: no sound bound has a median above 1.15.
    """
    epsilon, sigma, rng = 1.15, 2.0, np.random.default_rng(3)
    ratios = {"Gaussian": [], "capped": []}
    for _ in range(1000):
        coins = rng.random(10_000) < 0.5
        loss = np.abs(coins + sigma * rng.standard_normal(10_000) - 0.5) / sigma**2
        chance, most = expit(loss[loss > epsilon]), expit(epsilon)
        for name, actual in (("Gaussian", chance), ("capped", most)):
            right = rng.random(len(chance)) < actual
            ratios[name].append(np.where(right, np.log(chance / most), np.log((1 - chance) / (1 - most))).sum())
    assert np.mean(ratios["Gaussian"] > np.quantile(ratios["capped"], 0.95)) < 0.5


@pytest.mark.parametrize("confidence", [0.95, 0.6])
@pytest.mark.parametrize("name", METHODS)
def test_a_bound_is_above_the_truth_no_more_often_than_it_says(name, confidence):
    """At a confidence of .6 as well: where a bound could be wrong, it is wrong often enough to be seen."""
    method, settings = METHODS[name]
    repeats, above = 300, 0
    for seed in range(repeats):
        made = gaussian_trials(0.6, seed, 400)
        above += method(made, delta=1e-3, confidence=confidence, **settings).epsilon > gaussian_epsilon(1 / 0.6, 1e-3)
    assert binom.sf(above - 1, repeats, 1 - confidence) > 1e-4, above
    if (name, confidence) == ("Gaussian family", 0.6):
        assert above > 0


@pytest.mark.parametrize("confidence", [0.95, 0.6])
def test_guesses_of_randomised_response_hold_their_confidence_closely(confidence):
    """Where the theorem is tight: every guess is right with chance e^epsilon / (e^epsilon + 1), independently."""
    epsilon, bits, repeats = 1.2, 200, 400
    rng = np.random.default_rng(0)
    above = 0
    for _ in range(repeats):
        coins = np.tile([True, False], bits // 2)
        right = rng.random(bits) < expit(epsilon)
        # Scores that make every guess the response: all called present above all called absent, evenly split.
        scores = np.where(coins == right, 1.0, -1.0) + 1e-3 * rng.random(bits)
        found = one_run(trials(scores, coins), delta=0.0, confidence=confidence, shares=(0.5,))
        above += found.epsilon > epsilon
    assert binom.sf(above - 1, repeats, 1 - confidence) > 1e-4
    assert above > 0


@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.parametrize("apart", [0.5, 2.0, 6.0])
def test_guesses_that_are_as_good_as_epsilon_allows_hold_their_confidence(apart, delta):
    """Scores of two Gaussians, posteriors of q at most: whatever number of guesses the scores lead to."""
    epsilon, bits, repeats, confidence = 0.7, 1000, 400, 0.8
    rng = np.random.default_rng(int(10 * apart))
    above = 0
    for _ in range(repeats):
        scores = apart * (rng.random(bits) < 0.5) + rng.standard_normal(bits)
        loss = apart * (scores - apart / 2)
        coins = rng.random(bits) < expit(np.clip(loss, -epsilon, epsilon))
        above += one_run(trials(scores, coins), delta=delta, confidence=confidence).epsilon > epsilon
    assert binom.sf(above - 1, repeats, 1 - confidence) > 1e-3, above
    if apart == 6.0 and delta == 0:
        assert binom.cdf(above, repeats, 1 - confidence) > 1e-3, above  # nor is there anything to gain


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.02])
def test_the_p_value_bounds_a_mechanism_that_spends_its_delta(delta):
    """Each bit is given away with chance delta, and answered by randomised response otherwise."""
    epsilon, bits = 0.8, 60
    chance = delta + (1 - delta) * expit(epsilon)
    alike = ((1, bits),)
    for right in range(bits + 1):
        assert binom.sf(right - 1, bits, chance) <= one_run_p_value(bits, alike, right, epsilon, delta) + 1e-12
    if delta == 0:
        assert one_run_p_value(bits, alike, 50, epsilon, 0.0) == pytest.approx(binom.sf(49, bits, chance))
    else:
        assert one_run_p_value(bits, alike, 50, epsilon, delta) > one_run_p_value(bits, alike, 50, epsilon, 0.0)


def largest_count(counts, count, epsilon, budget):
    """max P[count of right guesses >= v] for any law of them that is (epsilon, .)-private in each, by linear programs.

    P[r] <= e^epsilon P[r, but the i-th wrong] + x_i(r) where the i-th is right in r; all x add up to ``budget``.
    """
    made = len(counts)
    outcomes = list(itertools.product((0, 1), repeat=made))
    row_of = {r: n for n, r in enumerate(outcomes)}
    pairs = [(r, i) for r in outcomes for i in range(made) if r[i]]
    unequal = np.zeros((len(pairs) + 1, len(outcomes) + len(pairs)))
    for n, (r, i) in enumerate(pairs):
        unequal[n, row_of[r]] = 1.0
        unequal[n, row_of[(*r[:i], 0, *r[i + 1 :])]] = -math.exp(epsilon)
        unequal[n, len(outcomes) + n] = -1.0
    unequal[-1, len(outcomes) :] = 1.0
    total = np.append(np.ones(len(outcomes)), np.zeros(len(pairs)))[None]
    goal = np.append([-float(np.dot(r, counts) >= count) for r in outcomes], np.zeros(len(pairs)))
    found = linprog(goal, A_ub=unequal, b_ub=np.append(np.zeros(len(pairs)), budget), A_eq=total, b_eq=[1.0])
    return -found.fun


@pytest.mark.parametrize(("each", "epsilon"), [(1, 0.5), (2, 0.0), (2, 1.0), (3, 0.7), (3, 2.0), (4, 1.0)])
def test_what_delta_adds_covers_the_worst_law_of_right_guesses(each, epsilon):
    bits, delta = 20, 1e-3
    counts = np.repeat(weights(each), 2)
    for count in np.unique([np.dot(right, counts) for right in itertools.product((0, 1), repeat=len(counts))])[1:]:
        worst = largest_count(counts, count, epsilon, bits * delta)
        bound = one_run_p_value(bits, classes(each), count, epsilon, delta)
        assert worst <= bound + 1e-9
        assert bound - worst <= bits * delta * spare([classes(each)], epsilon) + 1e-9


def test_what_delta_adds_to_a_single_guess_is_what_some_mechanism_does():
    assert one_run_p_value(1, ((1, 1),), 1, 0.75, 0.1) == pytest.approx(0.1 + 0.9 * expit(0.75))


@pytest.mark.parametrize("each", [1, 4, 30, 150])
def test_what_delta_adds_falls_with_epsilon_and_with_more_guesses(each):
    added = [spare([classes(each)], 0.05 * n + 1e-9) for n in range(120)]
    assert all(np.diff(added) <= 1e-3 * np.array(added[1:]))  # bounded from above, so not exactly
    assert (
        spare([classes(4 * each)], 1.0) < spare([classes(each)], 1.0) == spare([classes(each), classes(4 * each)], 1.0)
    )


def test_what_delta_adds_is_bounded_closely_where_it_is_not_computed_at_every_point(monkeypatch):
    each, found = 150, []
    for cells in (10_000_000, 50_000, 10_000, 0):
        monkeypatch.setattr(_guesses, "_CELLS", cells)
        found.append(_guesses._spare.__wrapped__(classes(each), 1.0))
    exact, close, coarse, crude = found
    assert exact <= close <= coarse < crude
    assert close < 1.2 * exact


def test_the_number_of_guesses_is_fixed_where_delta_is_large():
    """Ten thousand bits and a delta of 1e-3: ten of them may be given away."""
    found = one_run(gaussian_trials(0.5, 0, 10_000), delta=1e-3)
    assert found.tests == 3
    assert "surer" not in found.evidence
    assert 0 < found.epsilon < gaussian_epsilon(2.0, 1e-3)


def test_surer_guesses_count_more():
    once, twice, thrice, four, five = WEIGHTS
    assert weights(8).tolist() == [four, thrice, twice, twice, once, once, once, once]
    assert classes(160) == ((once, 160), (twice, 80), (thrice, 40), (four, 20), (five, 20))
    assert weights(1).tolist() == [once]


def test_hardly_any_two_ways_to_be_right_come_to_the_same_count():
    """The level is then used up: with weights 1 to 5 a single count holds a tenth of it."""

    def held_by_one_count(counted):
        law = np.ones(1)
        for weight, size in counted:
            law = _guesses._law(law, weight, size, expit(1.1))
        return law[np.argmax(law.cumsum() > 0.95)] / 0.05

    whole = tuple((number, size) for number, (_, size) in enumerate(classes(150), 1))
    assert held_by_one_count(whole) > 0.1
    assert held_by_one_count(classes(150)) < 0.03


def test_theorem_5_2_is_for_guesses_that_count_once():
    """Counted in tenths, its windows would be ten times too wide."""
    bits, made, right = 1000, 100, 90
    once = one_run_p_value(bits, ((1, made),), right, 1.0, 1e-3)
    assert one_run_p_value(bits, ((WEIGHTS[0], made),), WEIGHTS[0] * right, 1.0, 1e-3) >= once


def test_the_number_of_guesses_follows_from_how_far_scores_are_apart():
    rng = np.random.default_rng(4)
    coins = rng.random(2000) < 0.5
    chosen = [planned_share(apart * coins + rng.standard_normal(2000), 0.05) for apart in (0.5, 2.5, 4.0, 100.0)]
    assert chosen == sorted(chosen)
    assert chosen[0] <= SHARES[2] and chosen[-1] == SHARES[-1]
    assert planned_share(np.zeros(10), 0.05) in SHARES


def largest_tail(bits, made, right, mu, tangents=200):
    """max P[right guesses >= v] under the inequalities of fdp_rejects, by linear programming.

    1 - f is concave: it lies below all its tangents, and these are the constraints.
    """
    at = norm.cdf(np.linspace(-6, 6, tangents))
    height = norm.cdf(norm.ppf(at) + mu)
    slope = np.exp(-mu * norm.ppf(at) - mu**2 / 2)
    rows, limits = [], []
    for j in range(1, made + 1):
        count = np.arange(made + 1)
        reached = np.where(count >= j, count, 0) / bits
        missed = np.where((count >= j - 1) & (count < made), made - count, 0) / bits
        rows += [reached - s * missed for s in slope]
        limits += list(height - slope * at)
    goal = -(np.arange(made + 1) >= right).astype(float)
    found = linprog(goal, A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, made + 1)), b_eq=[1.0])
    return -found.fun


@pytest.mark.parametrize(
    ("bits", "made", "right", "mu"), [(10, 10, 9, 1.0), (20, 20, 15, 0.5), (30, 10, 10, 0.5), (12, 6, 6, 2.0)]
)
def test_the_recursion_of_the_f_dp_bound_is_the_best_that_its_inequalities_allow(bits, made, right, mu):
    p_value = brentq(lambda level: fdp_rejects(bits, made, right, mu, level), 1e-9, 1 - 1e-9)
    assert p_value == pytest.approx(largest_tail(bits, made, right, mu), rel=2e-3)


@pytest.mark.parametrize("method", [gaussian_family, one_run_fdp])
def test_gaussian_bounds_are_refused_where_the_noise_follows_the_data(method):
    made = trials(np.arange(40.0), np.arange(40) % 2 == 0, public=False)
    with pytest.raises(ConfigError, match="scaled to the data"):
        method(made, delta=DELTA)
    assert clopper_pearson(made, delta=DELTA).epsilon == 0.0


@pytest.mark.parametrize("method", [clopper_pearson, gaussian_family, one_run, one_run_fdp])
def test_scores_that_know_nothing_show_nothing(method):
    rng = np.random.default_rng(5)
    made = trials(rng.standard_normal(1000), rng.random(1000) < 0.5)
    assert method(made, delta=DELTA).epsilon == 0.0
    assert method(trials(np.zeros(1000), made.present), delta=DELTA).epsilon == 0.0


def test_scores_that_know_everything_show_what_so_many_trials_can():
    coins = np.random.default_rng(1).random(1000) < 0.5
    made = trials(np.where(coins, 3.0, -3.0) + 0.1 * np.arange(1000) / 1000, coins)
    judged = [int(0.8 * n) for n in (coins.sum(), (~coins).sum())]
    assert clopper_pearson(made, delta=0.0).epsilon == pytest.approx(math.log(max(judged) / math.log(40)), abs=0.1)
    found = one_run(made, delta=0.0, shares=(0.9,))
    assert found.evidence.startswith("900 of 900 guesses right") and found.evidence.endswith("1000 bits")
    assert expit(found.epsilon) ** 900 == pytest.approx(0.05, rel=1e-2)


def test_both_directions_of_a_test_count():
    """Few are called present, all of them rightly; or few absent."""
    rng = np.random.default_rng(2)
    coins = np.arange(4000) % 2 == 1
    rare = rng.random(4000) < 0.2
    for towards in (1.0, -1.0):
        scores = np.where(rare & (coins == (towards > 0)), towards * 5.0, 0.0) + rng.standard_normal(4000) * 0.1
        assert clopper_pearson(trials(scores, coins), delta=DELTA).epsilon > 3.0


@pytest.mark.parametrize("method", [clopper_pearson, gaussian_family, one_run, one_run_fdp])
def test_more_tests_more_delta_or_more_confidence_make_a_bound_smaller(method):
    made = gaussian_trials(0.5, 0, 2000)
    bound = method(made, delta=DELTA)
    assert bound.epsilon > 0
    assert method(made, delta=DELTA, tests=20).epsilon < bound.epsilon
    assert method(made, delta=DELTA, confidence=0.999).epsilon < bound.epsilon
    assert method(made, delta=1e-2).epsilon < bound.epsilon
    assert method(made, delta=DELTA, tests=20).tests == 20 * bound.tests
    assert bound.tests == (3 if method is one_run_fdp else 1)
    assert bound.to_dict()["statistic"] == "the output"


def test_a_threshold_is_not_judged_by_the_trials_that_chose_it():
    (a, b), (c, d) = gaussian_trials(1.0, 0, 1000).parts()
    assert not set(a) & set(c) and not set(b) & set(d)
    assert len(c) == pytest.approx(4 * len(a), abs=4)


@pytest.mark.parametrize(
    ("scores", "present", "why"),
    [([1.0, 2.0], [True], "one of each"), ([1.0, math.nan], [True, False], "diverged"), ([[1.0]], [[True]], "one of")],
)
def test_trials_that_cannot_be_ranked_are_refused(scores, present, why):
    with pytest.raises(ConfigError, match=why):
        trials(scores, present)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"confidence": 1.0}, "confidence"),
        ({"delta": -1.0}, "delta"),
        ({"tests": 0}, "tests"),
        ({"shares": ()}, "shares"),
        ({"shares": (1.5,)}, "shares"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        one_run(gaussian_trials(1.0, 0, 100), **{"delta": DELTA} | settings)
    with pytest.raises(ConfigError, match="at least two of each"):
        clopper_pearson(trials([1.0, 2.0, 3.0], [True, True, False]), delta=DELTA)
