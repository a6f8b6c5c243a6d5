"""kappa: no guesser does better than it says, and so no attack better than the limit that follows from it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.accounting.reconstruction_robustness import one_step_bound
from gradveil.attacks.scoring import guessing
from gradveil.attacks.scoring.guessing import guessing_chance, successes, upper_limit
from gradveil.training import data


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def class_means(x, y):
    return torch.stack([x[y == c].mean(0) for c in range(10)])


def test_class_means_are_among_the_guesses(digits):
    """The planted case: the best of single digits succeeds for 1.3 %, which made the limit at z = 1 .135; the best
    class mean succeeds for more, and the limit is for that too."""
    x, y, mean = digits.x_train, digits.y_train, digits.x_train.mean(0)
    single = float(successes(x[:500], x[500:], mean).double().mean(1).max())
    means = float(successes(class_means(x[:500], y[:500]), x[500:], mean).double().mean(1).max())
    kappa = guessing_chance(x, y, mean)
    assert single < means < kappa < 0.2
    assert one_step_bound(1.0, kappa) > max(0.234, one_step_bound(1.0, means))


def test_the_limit_is_never_below_the_success_of_an_adversarial_guesser(digits):
    """1 000 trials: in each, kappa is estimated on some examples, and somebody who knows all examples, those that he is
    judged on among them, makes the one guess that succeeds for most of these."""
    mean = digits.x_train.mean(0)
    generator = torch.Generator().manual_seed(0)
    above = beaten = 0
    for _ in range(10):
        order = torch.randperm(len(digits.x_train), generator=generator)
        x, y = digits.x_train[order], digits.y_train[order]
        kappa = guessing_chance(x[:800], y[:800], mean)
        every = torch.cat([class_means(x, y), guessing._guesses(x, y, mean)[len(x) :]])
        table = successes(every, x, mean)
        best = table[int(table.double().mean(1).argmax())]
        for _ in range(100):  # victims drawn from all
            victims = torch.randint(len(x), (1000,), generator=generator)
            success = float(best[victims].double().mean())
            above += success > kappa
            beaten += success > one_step_bound(1.0, kappa)
    assert beaten == 0
    assert above <= 100  # kappa itself is a limit of 95 %


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 6), spread=st.floats(0.0, 0.3))
def test_kappa_covers_whoever_knows_the_distribution(seed, groups, spread):
    """Images around a few centres, which the guesser knows; kappa is from 200 of them alone."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.rand(groups, 1, 6, 6, generator=generator)
    which = torch.randint(groups, (2000,), generator=generator)
    x = (centres[which] + spread * torch.randn(2000, 1, 6, 6, generator=generator)).clamp(0, 1)
    mean = x[:200].mean(0)
    kappa = guessing_chance(x[:200], which[:200], mean)
    success = float(successes(centres, x[200:], mean).double().mean(1).max())
    assert success <= min(1.0, kappa + 0.02) or success <= one_step_bound(1.0, min(kappa, 1 - 1e-9))


def test_batches_are_held_against_as_many_guesses(digits):
    x, y, mean = digits.x_train[:600], digits.y_train[:600], digits.x_train.mean(0)
    one, four = guessing_chance(x, y, mean), guessing_chance(x, y, mean, batch=4)
    assert one < four


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 50), (50, 50), (0, 1)])
def test_the_confidence_limit_is_that_of_clopper_and_pearson(hits, trials):
    """With the limit as the probability, so few hits are as rare as 5 %."""
    from scipy.stats import binom

    limit = upper_limit(hits, trials, 0.95)
    assert limit == 1.0 if hits == trials else binom.cdf(hits, trials, limit) == pytest.approx(0.05)
