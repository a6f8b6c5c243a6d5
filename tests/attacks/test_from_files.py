"""A user's own files as a target: what loads, what it means, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from gradveil.attacks.methods.analytic import Analytic
from gradveil.attacks.methods.matching import CPL
from gradveil.attacks.observation.from_files import (
    count_classes,
    load_factory,
    load_observation,
    load_public,
    load_truth,
    load_weights,
    read_tensors,
)
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.scoring.metrics import psnr
from gradveil.errors import ConfigError, DataError, UnknownNameError, UnsupportedModelError
from gradveil.mechanism.strategies import parameters
from gradveil.training import data, models

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def net(seed=0):
    return models.cpl_net(SHAPE, 10, generator=torch.Generator().manual_seed(seed))


def gradients(module, x, y):
    found = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
    return {n: g for (n, _), g in zip(module.named_parameters(), found, strict=True)}


def test_a_plain_gradient_from_a_file_gives_the_digit_away(digits, tmp_path):
    save_file(gradients(net(), digits.x_train[:1], digits.y_train[:1]), tmp_path / "g.safetensors")
    seen = load_observation(net(), read_tensors(tmp_path / "g.safetensors"), input_shape=SHAPE)
    assert (seen.victims, seen.batch, seen.classes) == (1, 1, 10)
    assert seen.sights[0].defence.clip is None and seen.sights[0].defence.strategy == "non-private"
    stolen = CPL().run(seen, iterations=20, seed=0)
    truth = {"x": digits.x_train[0], "y": digits.y_train[:1]}
    assert float(psnr(stolen.x, load_truth(truth, seen, "truth").x)) > 30


def test_several_victims_lie_along_a_first_dimension(digits):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    each = [gradients(module, digits.x_train[i : i + 1], digits.y_train[i : i + 1]) for i in range(3)]
    stacked = {n: torch.stack([g[n] for g in each]) for n in each[0]}
    seen = load_observation(module, stacked, input_shape=SHAPE)
    assert seen.victims == 3
    assert float(psnr(Analytic().run(seen).x, digits.x_train[:3].unsqueeze(1)).min()) > 80


@pytest.mark.parametrize("view", ["per-example", "per-example-noised", "batch"])
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_the_facts_mean_what_they_mean_for_a_planned_release(digits, view, clipping):
    """The same numbers, given by hand and by the strategy, are the same defence."""
    batch = 3 if view == "batch" else 1
    x, y = digits.x_train[:batch].unsqueeze(0), digits.y_train[:batch].unsqueeze(0)
    plan = parameters("baseline", steps=5, clip=0.7, sigma=2.0)
    settings = {"view": view, "clipping": clipping, "classes": 10}
    planned, _ = observe(
        net(), x, y, plan=plan, training_batch=50, generator=torch.Generator().manual_seed(0), **settings
    )
    seen = planned.sights[0]
    given = load_observation(
        net(), seen.gradients, input_shape=SHAPE, clip=0.7, sigma=2.0, batch_size=50, batch=batch, **settings
    )
    ours, theirs = given.sights[0].defence, seen.defence
    assert (ours.clip, ours.normaliser, ours.groups) == (theirs.clip, theirs.normaliser, theirs.groups)
    assert (ours.noise_std is None) == (view == "per-example")
    if theirs.noise_std is not None:
        assert ours.noise_std == pytest.approx(theirs.noise_std)
    assert ours.sensitivity_rule == "clip" and given.batch == batch


def test_a_sensitivity_of_its_own_scales_the_noise_and_claims_no_bound(digits):
    found = gradients(net(), digits.x_train[:1], digits.y_train[:1])
    seen = load_observation(net(), found, input_shape=SHAPE, clip=4.0, sigma=2.0, sensitivity=0.5, batch_size=10)
    assert seen.sights[0].defence.noise_std == (pytest.approx(0.1),) * 5
    assert seen.sights[0].defence.sensitivity_rule is None


def test_weights_come_from_their_file(digits, tmp_path):
    save_file(net(seed=5).state_dict(), tmp_path / "w.safetensors")
    module = net()
    load_weights(module, tmp_path / "w.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), net(seed=5).parameters(), strict=True))
    save_file({"linear.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="do not belong to this model"):
        load_weights(module, tmp_path / "other.safetensors")


def test_tied_weights_are_attacked_too(digits):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Linear(64, 10))
    module[3].weight = module[1].weight
    seen = load_observation(module, gradients(module, digits.x_train[:1], digits.y_train[:1]), input_shape=SHAPE)
    assert CPL().run(seen, iterations=1, seed=0).x.shape == (1, 1, *SHAPE)


def without(found, name):
    return {n: g for n, g in found.items() if n != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: without(g, "linear.bias"), "no gradient for the parameter 'linear.bias'"),
        (lambda g: g | {"extra": torch.zeros(3)}, "'extra'"),
        (lambda g: g | {"linear.bias": torch.zeros(7)}, r"'linear.bias' has shape \(7,\).*\(10,\)"),
        (lambda g: {n: t.expand(2, *t.shape) for n, t in g.items()} | {"linear.bias": torch.zeros(3, 10)}, "3 victim"),
        (lambda g: g | {"linear.bias": g["linear.bias"] * float("nan")}, "10 of 10 values.*'linear.bias'.*not finite"),
        (lambda g: {n: t[None][:0] for n, t in g.items()}, "0 victim"),
        (lambda g: {}, "no gradient"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(digits, change, words):
    found = gradients(net(), digits.x_train[:1], digits.y_train[:1])
    with pytest.raises(ConfigError, match=words):
        load_observation(net(), change(found), input_shape=SHAPE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sigma": 1.0}, "sensitivity that was not given"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"clip": 1.0, "sigma": float("nan")}, "sigma is nan"),
        ({"batch": 0}, "batch is 0"),
        ({"view": "per-example", "batch": 3}, "of one example"),
        ({"view": "everything"}, "everything"),
        ({"clipping": "never"}, "never"),
    ],
)
def test_facts_that_make_no_sense_are_refused(digits, settings, words):
    found = gradients(net(), digits.x_train[:1], digits.y_train[:1])
    with pytest.raises(ConfigError, match=words):
        load_observation(net(), found, input_shape=SHAPE, **settings)


def test_a_model_and_a_shape_that_do_not_fit_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"inputs of shape \(3, 8, 8\)"):
        count_classes(net(), (3, 8, 8))
    with pytest.raises(UnsupportedModelError, match="not one row of logits"):
        count_classes(nn.Conv2d(1, 2, 3), SHAPE)
    with pytest.raises(ConfigError, match="no parameter"):
        count_classes(nn.ReLU(), SHAPE)


def test_files_that_are_not_there_or_not_safetensors_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_tensors(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        read_tensors(tmp_path)
    for content in (b"", b"hello", b"\x10" + bytes(7) + b"{" * 16):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(DataError, match=r"not a safetensors file.*pickles"):
            read_tensors(tmp_path / "bad")


def test_truth_and_public_examples_must_have_the_shape_of_the_victims(digits):
    seen = load_observation(net(), gradients(net(), digits.x_train[:1], digits.y_train[:1]), input_shape=SHAPE)
    with pytest.raises(DataError, match="x and y"):
        load_truth({"x": digits.x_train[:1]}, seen, "truth")
    with pytest.raises(ConfigError, match=r"\(1, 1, 1, 8, 8\)"):
        load_truth({"x": digits.x_train[:2], "y": digits.y_train[:2]}, seen, "truth")
    assert load_public({"x": digits.x_train[:5]}, SHAPE, "public").y is None
    for wrong in ({}, {"x": digits.x_train[:5, 0]}, {"x": digits.x_train[:5], "y": digits.y_train[:4]}):
        with pytest.raises(DataError, match="public"):
            load_public(wrong, SHAPE, "public")


FACTORIES = """
from torch import nn
import torch
made = nn.Linear(2, 2)
def make(): return nn.Linear(3, 2)
def number(): return 3
def needs(x): return x
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "factories_of_mine.py").write_text(FACTORIES)
    (tmp_path / "broken_of_mine.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    return "factories_of_mine"


def test_a_factory_in_the_working_directory_is_found_and_repeats_itself(factories):
    first, again, other = (load_factory(f"{factories}:make", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, other.weight)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("{}", ConfigError, "package.module:function"),
        ("{}:", ConfigError, "package.module:function"),
        ("nowhere_at_all:make", ConfigError, "'nowhere_at_all'.*cannot be found"),
        ("broken_of_mine:make", ConfigError, "importing 'broken_of_mine' failed with ZeroDivisionError"),
        ("{}:mkae", UnknownNameError, "Did you mean 'make'"),
        ("{}:made", ConfigError, "not a function"),
        ("{}:number", ConfigError, "returned a int, not a torch.nn.Module"),
        ("{}:needs", ConfigError, "failed with TypeError.*without arguments"),
    ],
)
def test_factories_that_make_no_model_are_refused(factories, spec, error, words):
    with pytest.raises(error, match=words):
        load_factory(spec.format(factories))
