"""An attack that diverges is a failed attack and not a crash; one seed, one result."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.methods.prior import Prior
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.scoring.evaluate import score
from gradveil.attacks.trial import ATTACKS, NAMES
from gradveil.mechanism.strategies import parameters
from gradveil.training import data

ONE_BY_ONE = ("prior", "analytic")  # analytic refuses a batch that no ReLU tells apart
CASES = [(name, batch) for name in NAMES for batch in (1, 3) if batch == 1 or name not in ONE_BY_ONE]


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def attack_named(name, digits):
    return Prior(digits.x_train[:20], digits.y_train[:20]) if name == "prior" else ATTACKS[name]()


def see(digits, *, noisy=False, batch=1, victims=2):
    """Through an MLP with biases, on which every attack works."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10))
    x, y = (t[: victims * batch].unflatten(0, (victims, batch)) for t in (digits.x_train, digits.y_train))
    view = "batch" if batch > 1 else "per-example-noised" if noisy else "per-example"
    plan = parameters("baseline", steps=5, clip=1.0, sigma=0.1) if noisy else None
    return observe(module, x, y, classes=10, generator=torch.Generator().manual_seed(1), plan=plan, view=view)


def with_weights(seen, change):
    sights = tuple(replace(s, weights={n: change(w) for n, w in s.weights.items()}) for s in seen.sights)
    return replace(seen, sights=sights)


def with_gradients(seen, change):
    sights = tuple(replace(s, gradients={n: change(g) for n, g in s.gradients.items()}) for s in seen.sights)
    return replace(seen, sights=sights)


def judged(found, secret, digits):
    """A summary without a number that is not finite: JSON has none."""
    summary = score(found, secret, mean_image=digits.x_train.mean(0)).summary()
    json.dumps(summary, allow_nan=False)
    return summary


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_a_loss_that_is_no_number_is_a_failed_attack(digits, name, noisy, batch):
    seen, secret = see(digits, noisy=noisy, batch=batch)
    # The model's own gradients are NaN everywhere; analytic looks at the seen ones only, and fails where they are 0.
    nowhere = (
        with_gradients(seen, torch.zeros_like) if name == "analytic" else with_weights(seen, lambda w: w * float("nan"))
    )
    found = attack_named(name, digits).run(nowhere, iterations=3, seed=0)
    assert bool(found.failed.all())
    assert found.x.shape == secret.x.shape and found.labels.shape == secret.y.shape
    summary = judged(found, secret, digits)
    assert summary["failed"] == secret.y.numel() and summary["success_rate"] == 0.0


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_absurd_size_are_no_crash(digits, name, size):
    for noisy in (False, True):
        seen, secret = see(digits, noisy=noisy)
        found = attack_named(name, digits).run(with_gradients(seen, lambda g: g * size), iterations=3, seed=0)
        judged(found, secret, digits)


def test_one_victim_that_diverges_leaves_the_others_alone(digits):
    seen, _ = see(digits, victims=3)
    wild = with_gradients(seen, lambda g: torch.cat([g[:1] * 1e30, g[1:]]))
    found = ATTACKS["cpl"]().run(wild, iterations=60, seed=0)
    alone = ATTACKS["cpl"]().run(seen, iterations=60, seed=0)
    assert found.failed.tolist() == [True, False, False]
    assert torch.allclose(found.x[1:], alone.x[1:], atol=1e-3)


def test_what_is_no_number_is_judged_as_a_failure(digits):
    """Also by an attack that does not say so itself; a batch is put in order all the same."""
    seen, secret = see(digits, batch=3)
    found = ATTACKS["cpl"]().run(seen, iterations=1)
    found.x[0, 1] = float("nan")
    found.x[1, 0, 0, 0] = float("inf")
    summary = judged(found, secret, digits)
    assert summary["failed"] == 6 and summary["success_rate"] == 0.0


def test_a_candidate_without_a_gradient_is_passed_over(digits):
    seen, secret = see(digits)
    x = torch.cat([torch.full_like(digits.x_train[:1], float("nan")), digits.x_train[:20]])
    found = Prior(x, torch.cat([digits.y_train[:1], digits.y_train[:20]])).run(seen)
    assert torch.equal(found.x, secret.x) and not bool(found.failed.any())


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_one_seed_one_result(digits, name, noisy, batch):
    seen, _ = see(digits, noisy=noisy, batch=batch)
    first = attack_named(name, digits).run(seen, iterations=4, seed=5)
    torch.manual_seed(77)  # what the program drew elsewhere does not matter
    torch.rand(3)
    second = attack_named(name, digits).run(seen, iterations=4, seed=5)
    assert torch.equal(first.x, second.x) and torch.equal(first.labels, second.labels)
    assert torch.equal(first.loss, second.loss)


@pytest.mark.parametrize("name", ["cpl", "dlg", "idlg", "inverting", "map"])
def test_another_seed_another_start(digits, name):
    seen, _ = see(digits, noisy=name == "map")  # without noise it computes this network's input, from no start
    starts = [attack_named(name, digits).run(seen, iterations=1, seed=s).frames[0] for s in (1, 2)]
    assert not torch.equal(*starts)
