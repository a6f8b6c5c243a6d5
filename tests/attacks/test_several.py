"""Several steps seen jointly: what one step hides in noise, more of them give away."""

import pytest
import torch

from gradveil.accounting.reconstruction_robustness import one_step_bound
from gradveil.attacks.methods.base import squared_differences
from gradveil.attacks.methods.inversion import MAP, precisions
from gradveil.attacks.methods.prior import Prior
from gradveil.attacks.observation.gradients import model_at
from gradveil.attacks.observation.multi_step import observe_steps
from gradveil.attacks.scoring.metrics import psnr
from gradveil.attacks.trial import AttackConfig, run
from gradveil.errors import ConfigError
from gradveil.mechanism.strategies import parameters
from gradveil.training import data, models


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def see(digits, count, *, victims=8, batch=1, strategy="baseline", clip=1.0, sigma=6.0, seed=7, **settings):
    module = models.cpl_net((1, 8, 8), 10, generator=torch.Generator().manual_seed(0))
    total = victims * batch
    x, y = (t[:total].unflatten(0, (victims, batch)) for t in (digits.x_train, digits.y_train))
    plan = None if strategy is None else parameters(strategy, steps=50, clip=clip, sigma=sigma)
    chosen = {"view": "per-example-noised" if batch == 1 else "batch", "training_batch": 100, "lr": 0.5} | settings
    return observe_steps(
        module,
        x,
        y,
        count=count,
        others=(digits.x_train[500:], digits.y_train[500:]),
        plan=plan,
        classes=10,
        generator=torch.Generator().manual_seed(seed),
        **chosen,
    )


def test_each_step_has_its_own_state_and_noise_and_the_same_examples(digits):
    seen, secret = see(digits, 3)
    assert [sight.step for sight in seen.sights] == [0, 1, 2]
    first, second, third = (sight.weights["linear.weight"] for sight in seen.sights)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert torch.equal(seen.module.get_parameter("linear.weight"), first)  # the user's model has not moved
    for sight in seen.sights:  # at the truth, what is left is noise of the known strength
        with torch.no_grad():
            found = model_at(seen, sight).released(secret.x, secret.y, sight.defence)
        count = sum(g.numel() for g in sight.gradients.values())
        total = float(squared_differences(found, sight.gradients, precisions(sight)).sum())
        assert total / count == pytest.approx(1.0, abs=0.05)


def test_more_steps_give_a_better_reconstruction(digits):
    one, secret = see(digits, 1, victims=5)
    many, _ = see(digits, 8, victims=5)
    attack = MAP(public=digits.x_train[500:], restarts=1)
    reached = [psnr(attack.run(seen, iterations=100, seed=0).x, secret.x).mean() for seen in (one, many)]
    assert float(reached[1]) > float(reached[0]) + 1.0


def test_more_steps_tell_candidates_apart(digits):
    """The truth gains likelihood over the best other candidate with every step."""
    candidates = Prior(digits.x_train[:60], digits.y_train[:60])
    hits, leads = [], []
    for count in (1, 8):
        seen, secret = see(digits, count, victims=30, sigma=60.0)
        scores = candidates.scores(seen)
        own = scores[torch.arange(30), torch.arange(30)]
        scores[torch.arange(30), torch.arange(30)] = float("inf")
        leads.append(float((scores.amin(1) - own).mean()))
        hits.append(int((candidates.run(seen).x == secret.x).flatten(1).all(1).sum()))
    assert hits[1] >= hits[0] + 5 and leads[1] > leads[0] + 1.0


def test_without_noise_all_steps_are_matched_together(digits):
    seen, secret = see(digits, 3, victims=4, view="per-example", clip=0.05)
    assert seen.sights[0].defence.noise_std is None
    stolen = MAP(restarts=1).run(seen, iterations=60, seed=0)
    assert float(psnr(stolen.x, secret.x).median()) > 25.0


def test_plain_gradients_and_batches(digits):
    seen, secret = see(digits, 2, victims=2, batch=3, strategy=None)
    assert len(seen.sights) == 2 and seen.batch == 3
    assert MAP(restarts=1).run(seen, iterations=3, seed=0).x.shape == secret.x.shape


@pytest.mark.parametrize("strategy", ["quantile-clip", "adaclip"])
def test_rules_that_learn_do_so_between_the_steps(digits, strategy):
    seen, _ = see(digits, 3, strategy=strategy, sigma=1.0)
    defences = [sight.defence for sight in seen.sights]
    if strategy == "quantile-clip":
        assert len({d.clip for d in defences}) == 3
        assert defences[1].clip != (defences[1].clip[0],) * 5  # every layer has its own
        assert all(d.noise_std == pytest.approx([c * 1.0 / 100 for c in d.clip]) for d in defences)
    else:
        scales = [d.whitening["linear.weight"][1] for d in defences]
        assert not torch.equal(scales[0], scales[1]) and not torch.equal(scales[1], scales[2])
        assert len(scales[1].unique()) > 100  # by coordinate
    MAP(restarts=1).run(seen, iterations=2, seed=0)


def test_the_bound_is_of_all_that_is_seen(digits):
    settings = {"strategy": "baseline", "attack": "prior", "victims": 2, "view": "batch", "sigma": 40.0}
    one = run(AttackConfig(training_batch=1, **settings), digits)
    four = run(AttackConfig(training_batch=1, steps_seen=4, **settings), digits)
    z = 40.0 / 5**0.5  # five layers
    assert one.bound == pytest.approx(one_step_bound(z, one.kappa))
    assert four.bound == pytest.approx(one_step_bound(z / 2.0, four.kappa))
    counted = run(AttackConfig(training_batch=1, **(settings | {"strategy": "quantile-clip"})), digits)
    assert counted.bound > one.bound  # the released counts tell something too


def test_what_makes_no_sense_is_refused(digits):
    with pytest.raises(ConfigError, match="at least one"):
        see(digits, 0)
    with pytest.raises(ConfigError, match="has 50"):
        see(digits, 3, step=48)
