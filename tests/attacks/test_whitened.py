"""adaclip and quantile-clip as targets: clipped and noised in their own coordinates, and attacked there."""

import pytest
import torch
from torch.nn import functional as F

from gradveil.attacks.methods.base import squared_differences
from gradveil.attacks.methods.inversion import MAP, precisions
from gradveil.attacks.observation.gradients import model_at
from gradveil.attacks.observation.observe import observe, starting_rule
from gradveil.attacks.scoring.metrics import psnr
from gradveil.attacks.trial import AttackConfig, run
from gradveil.clipping import make_groups
from gradveil.mechanism.strategies import parameters
from gradveil.training import data, models
from loops import CLASSES, start


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def learned_rule(module, plan, batch):
    """adaclip after a few releases whose coordinates differ much in size."""
    rule = starting_rule(plan, module, make_groups(module, "per-layer"), batch, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        made = {
            n: torch.randn(p.shape, generator=generator) * torch.rand(p.shape, generator=generator) ** 4
            for n, p in module.named_parameters()
        }
        rule.learn((), made, 0.0, batch)
    return rule


def see(digits, *, victims=6, batch=1, sigma=1.0, view="per-example-noised", training_batch=600, strategy="adaclip"):
    module = models.cpl_net((1, 8, 8), 10, generator=torch.Generator().manual_seed(0))
    plan = parameters(strategy, steps=20, clip=1.0, sigma=sigma)
    rule = learned_rule(module, plan, float(training_batch)) if strategy == "adaclip" else None
    x, y = (t[: victims * batch].unflatten(0, (victims, batch)) for t in (digits.x_train, digits.y_train))
    return observe(
        module,
        x,
        y,
        plan=plan,
        view=view,
        step=4,
        training_batch=training_batch,
        classes=10,
        generator=torch.Generator().manual_seed(3),
        rule=rule,
    )


@pytest.mark.parametrize("strategy", ["adaclip", "quantile-clip", "baseline"])
def test_what_an_attacker_computes_is_what_the_engine_sums(strategy, monkeypatch):
    """At every step of a live engine, its bounds and coordinates as they are: same sum, same noise."""
    engine, model, opt, loader = start(strategy=strategy, steps=5, seed=4, sigma=0.5, clip=0.3)
    sums = {}
    release_with_noise = engine._private.release

    def noting(clipped, stats):
        sums.update({name: total.clone() for name, total in clipped.items()})
        return release_with_noise(clipped, stats)

    monkeypatch.setattr(engine._private, "release", noting)
    for x, y in loader:
        bare = {n: p.detach().clone() for n, p in model.named_parameters()}
        plain = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten())
        plain.append(torch.nn.Linear(18, CLASSES))
        plain.load_state_dict(bare)
        seen, _ = observe(
            plain,
            x.unsqueeze(0),
            y.unsqueeze(0),
            plan=engine.plan,
            view="batch",
            step=engine.step,
            training_batch=10,
            classes=CLASSES,
            generator=torch.Generator(),
            rule=engine.rule,
        )
        sight = seen.sights[0]
        found = model_at(seen, sight).released(x.unsqueeze(0), y.unsqueeze(0), sight.defence)
        centres = {name: engine.rule.shift(name) for name, _ in model.named_parameters()}
        centres = {name: 0.0 if centre is None else centre.clone() for name, centre in centres.items()}
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, centre in centres.items():
            assert torch.allclose(found[name][0], sums[name] / 10.0 + centre, atol=1e-6), name
        opt.step()
        release = engine.releases[-1]
        assert sight.defence.clip == release.clip
        assert sight.defence.noise_std == pytest.approx([std / 10.0 for std in release.noise_std])
    assert engine.step == 5


@pytest.mark.parametrize(("view", "batch"), [("per-example-noised", 1), ("batch", 4)])
def test_the_likelihood_knows_the_noise_of_every_coordinate(digits, view, batch):
    seen, secret = see(digits, view=view, batch=batch)
    (sight,) = seen.sights
    with torch.no_grad():
        found = model_at(seen, sight).released(secret.x, secret.y, sight.defence)
    weights = precisions(sight)
    ratios = {}
    for name, gradient in sight.gradients.items():
        one = squared_differences({name: found[name]}, {name: gradient}, {name: weights[name]})
        ratios[name] = float(one.sum()) / gradient.numel()
        assert isinstance(weights[name], torch.Tensor) and weights[name].shape == gradient.shape[1:]
    assert ratios["linear.weight"] == pytest.approx(1.0, abs=0.05)
    assert all(0.6 < r < 1.5 for r in ratios.values())
    # One std for all coordinates would be far off for most of them.
    stds = weights["linear.weight"].rsqrt()
    assert float(stds.quantile(0.95) / stds.quantile(0.05)) > 3.0


def test_each_example_is_clipped_in_the_whitened_space(digits):
    seen, _ = see(digits, view="per-example")
    (sight,) = seen.sights
    whitening = sight.defence.whitening
    for group in sight.defence.groups:
        parts = [(sight.gradients[n] - whitening[n][0]) / whitening[n][1] for n in group.parameters]
        norms = torch.cat([p.flatten(1) for p in parts], 1).norm(dim=1)
        assert float(norms.max()) <= 1.0 + 1e-4


@pytest.mark.parametrize("strategy", ["adaclip", "quantile-clip"])
def test_one_who_knows_the_coordinates_gets_the_digits(digits, strategy):
    seen, secret = see(digits, strategy=strategy)
    public = digits.x_train[200:]
    stolen = MAP(public=public, restarts=1).run(seen, iterations=150, seed=0)
    mean = psnr(public.mean(0).expand_as(secret.x), secret.x).median()
    assert float(psnr(stolen.x, secret.x).median()) > float(mean) + 3.0
    bare, _ = see(digits, strategy=strategy, view="per-example")
    assert float(psnr(MAP(restarts=1).run(bare, iterations=60, seed=0).x, secret.x).median()) > 25.0


@pytest.mark.parametrize("strategy", ["quantile-clip", "adaclip", "dyn-s-sigma"])
@pytest.mark.parametrize(("view", "batch"), [("per-example", 1), ("per-example-noised", 1), ("batch", 4)])
def test_a_trial_of_every_view(digits, strategy, view, batch):
    outcome = run(
        AttackConfig(strategy=strategy, view=view, batch=batch, attack="map", victims=2, iterations=2), digits
    )
    bounded = view != "per-example" and strategy != "dyn-s-sigma"
    assert (outcome.bound is not None) == bounded


def test_a_run_goes_on_from_where_its_rule_was(digits):
    module = models.cpl_net((1, 8, 8), 10, generator=torch.Generator().manual_seed(0))
    plan = parameters("adaclip", steps=20, sigma=1.0)
    state = learned_rule(module, plan, 600.0).state_dict()
    trial = AttackConfig(
        strategy="adaclip", attack="map", view="per-example-noised", victims=2, iterations=1, sigma=1.0
    )
    at_start, later = (run(trial, digits, model=module, rule_state=s).reconstruction for s in (None, state))
    assert not torch.equal(at_start.loss, later.loss)
