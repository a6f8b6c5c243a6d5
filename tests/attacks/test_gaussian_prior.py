"""The Gaussian prior: what it is fitted to, that its coordinates are white, and what it adds to an attack."""

import pytest
import torch

from gradveil.attacks.methods import gaussian_prior as priors
from gradveil.attacks.methods.gaussian_prior import Component, GaussianPrior, fit_gaussian
from gradveil.attacks.methods.inversion import MAP
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.observation.views import Public
from gradveil.attacks.scoring.evaluate import best_guess
from gradveil.attacks.scoring.metrics import psnr
from gradveil.mechanism.strategies import parameters
from gradveil.training import data, models


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def _drawn(n, seed=0, classes=2):
    """Smooth images whose means differ by class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    coarse = torch.randn(n, 1, 3, 3, generator=generator)
    x = torch.nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear") * 0.1
    x = x + 0.05 * torch.randn(n, 1, 8, 8, generator=generator)
    return 0.3 + 0.3 * y.view(-1, 1, 1, 1) / classes + x, y


def test_coordinates_are_white_on_examples_it_has_not_seen():
    x, y = _drawn(3000)
    prior = fit_gaussian(Public(x[:2000], y[:2000]), (1, 8, 8), y[2000:].unsqueeze(1))
    z = prior.to_latent(x[2000:].unsqueeze(1))
    assert torch.allclose(prior.to_input(z), x[2000:].unsqueeze(1), atol=1e-4)
    variance = z[:, 0].var(0)
    assert float(variance.min()) > 0.7 and float(variance.max()) < 1.3 and "each class" in prior.chosen


def test_the_prior_is_chosen_on_held_out_examples():
    """Few examples of many numbers: shrunk. Labels that tell nothing: one Gaussian."""
    x, y = _drawn(60)
    few = priors._choose(x.flatten(1), None, 50, (1, 8, 8), [0])
    many = priors._choose(_drawn(4000)[0].flatten(1), None, 3400, (1, 8, 8), [0])
    assert few.shrinkage > many.shrinkage
    x, y = _drawn(1000)
    idle = torch.randint(2, (1000,), generator=torch.Generator().manual_seed(1))
    assert priors._choose(x.flatten(1), y, 850, (1, 8, 8), [0, 1]).by_class
    assert not priors._choose(x.flatten(1), idle, 850, (1, 8, 8), [0, 1]).by_class


def test_stationary_covariance_is_that_of_displacements_and_positive():
    x, _ = _drawn(500)
    flat = x.flatten(1)
    found = priors._stationary(priors._covariance(flat - flat.mean(0)), (1, 8, 8))
    grid = found.view(8, 8, 8, 8)
    assert torch.allclose(grid[0, 0, 2, 3], grid[4, 3, 6, 6]) and torch.allclose(found, found.T)
    assert float(torch.linalg.eigvalsh(found.double()).min()) > -1e-6


def test_large_inputs_have_a_covariance_of_low_rank():
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(5, 5000, generator=generator)
    x = torch.randn(300, 5, generator=generator) @ directions + 0.1 * torch.randn(300, 5000, generator=generator)
    prior = fit_gaussian(Public(x.view(300, 1, 50, 100)), (1, 50, 100), torch.zeros(300, 1, dtype=torch.int64))
    z = prior.to_latent(x.view(300, 1, 1, 50, 100))
    assert torch.allclose(prior.to_input(z).flatten(1), x, atol=1e-3)
    noise = torch.randn(300, 1, 1, 50, 100, generator=torch.Generator().manual_seed(9))
    within, across = prior.energy(x.view(300, 1, 1, 50, 100)), prior.energy(noise)
    assert float(within.max()) < float(across.min()) / 10


def test_shortest_coordinates_are_the_posterior_of_both_parts():
    component = Component(torch.zeros(3), torch.tensor([[2.0], [0.0], [0.0]]), tail=0.5)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    covariance = torch.diag(torch.tensor([4.5, 0.5, 0.5]))
    energy = float(component.to_latent(x).square().sum())
    assert energy == pytest.approx(float((x @ covariance.inverse() @ x.T).squeeze()), rel=1e-5)


def test_examples_of_several_classes_come_back_in_their_places():
    parts = {c: Component(torch.full((4,), float(c)), torch.eye(4)) for c in (1, 2)}
    labels = torch.tensor([[2, 1], [1, 2]])
    prior = GaussianPrior(parts, (4,), labels, "")
    assert torch.equal(prior.to_input(torch.zeros(2, 2, 4))[..., 0], labels.float())


@pytest.mark.parametrize("sigma", [6.0, 60.0])
def test_map_with_public_images_beats_total_variation_and_is_never_below_its_guess(digits, sigma):
    module = models.cpl_net(digits.input_shape, 10, generator=torch.Generator().manual_seed(1))
    x, y = digits.x_train[:12].unsqueeze(1), digits.y_train[:12].unsqueeze(1)
    public = Public(digits.x_train[200:], digits.y_train[200:])
    settings = {
        "plan": parameters("baseline", steps=10, clip=4.0, sigma=sigma),
        "view": "per-example-noised",
        "training_batch": 600,
        "classes": 10,
    }
    seen, secret = observe(module, x, y, public=public, generator=torch.Generator().manual_seed(2), **settings)
    bare, _ = observe(module, x, y, generator=torch.Generator().manual_seed(2), **settings)
    found = psnr(MAP(restarts=1).run(seen, iterations=100, seed=0).x, secret.x)
    mean = psnr(public.x.mean(0).expand_as(secret.x), secret.x)
    assert float(found.median()) > float(mean.median()) - 0.3
    if sigma == 6.0:
        floor = psnr(MAP(restarts=1).run(bare, iterations=100, seed=0).x, secret.x)
        assert float(found.median()) > float(floor.median()) + 2.0
        assert float((found - best_guess(secret.x, public.x.mean(0))).median()) > 4.0


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "least"), [("mnist", 19.2), ("fashion-mnist", 18.3)])
def test_the_figures_on_images_at_sigma_6(name, least):
    if not data.CATALOGUE[name].available():
        pytest.skip(f"{name} is not in the GRADVEIL_DATA directory")
    from gradveil.attacks.trial import AttackConfig, run

    settings = {"strategy": "baseline", "view": "per-example-noised", "attack": "map", "victims": 12}
    outcome = run(AttackConfig(**settings, iterations=200, seed=4242), data.load(name)).to_dict()["result"]
    assert outcome["psnr_median"] > least and outcome["retrieved_first"] > 0.7
