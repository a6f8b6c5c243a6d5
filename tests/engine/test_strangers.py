"""What a reviewer who had not seen the tests got past the engine, and no longer does."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.errors import ConfigError, PrivacyViolation, UnsupportedModelError
from loops import dataset, network, start


def train(loss, *, late=0, steps=8, prepare=None, **settings):
    """A loop with ``loss(model, x, y)`` from step ``late`` on, and an ordinary one before."""
    engine, model, _, loader = start(steps=steps, **settings)
    if prepare is not None:
        prepare(model)
    for i, (x, y) in enumerate(loader):
        of_batch = loss if i >= late else plain
        torch.autograd.backward(of_batch(model, x, y)) if i % 2 else of_batch(model, x, y).backward()
    return engine


def plain(model, x, y):
    return F.cross_entropy(model(x), y)


# ---- parameters outside the model


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("where", ["before", "after", "prompt"])
def test_a_trainable_parameter_outside_the_model_is_refused_in_every_pass(where, late):
    outside = {"before": nn.Conv2d(1, 1, 3, padding=1), "after": nn.Linear(3, 3), "prompt": nn.Linear(1, 1)}[where]
    losses = {
        "before": lambda m, x, y: F.cross_entropy(m(outside(x)), y),
        "after": lambda m, x, y: F.cross_entropy(outside(m(x)), y),
        "prompt": lambda m, x, y: F.cross_entropy(m(x + outside.bias), y),
    }
    with pytest.raises(PrivacyViolation, match="not part of the private model"):
        train(losses[where], late=late, spot_checks=0.0)
    assert all(p.grad is None for p in outside.parameters())


def test_a_parameter_that_the_forward_finds_elsewhere_is_refused():
    held = [nn.Parameter(torch.ones(3))]

    class Finds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(25, 3)

        def forward(self, x):
            return self.layer(x.flatten(1)) * held[0]

    with pytest.raises(PrivacyViolation, match="not part of the private model"):
        train(plain, model=Finds())


def test_an_input_that_needs_a_gradient_is_fine():
    assert train(lambda m, x, y: F.cross_entropy(m(x.requires_grad_()), y)).step == 8


def test_weights_that_are_swapped_for_a_call_are_refused():
    with pytest.raises(PrivacyViolation, match="is not the parameter that it had at make_private"):
        train(lambda m, x, y: F.cross_entropy(torch.func.functional_call(m, tripled(m), (x,)), y), late=3)


def tripled(model):
    return {name: 3 * p for name, p in model.named_parameters()}


# ---- mixing in the backward pass, and buffers


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


class ThroughAFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(25, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(Normalised.apply(self.first(x.flatten(1))))


def normalise_activations(model):
    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda g: g / g.norm())

    model[0].register_forward_hook(hook)


def normalise_modules(model):
    model[2].register_full_backward_hook(lambda module, to_inputs, _: tuple(g / g.norm() for g in to_inputs))


@pytest.mark.parametrize("prepare", [normalise_activations, normalise_modules])
def test_hooks_that_mix_gradients_of_examples_are_refused(prepare):
    with pytest.raises(UnsupportedModelError, match="backward pass"):
        train(plain, prepare=prepare)


def test_an_autograd_function_that_mixes_gradients_is_refused():
    with pytest.raises(UnsupportedModelError, match="backward pass"):
        train(plain, model=ThroughAFunction())


class Remembers(nn.Module):
    """Keeps a running mean of the examples, only where gradients are computed."""

    def __init__(self, after=0):
        super().__init__()
        self.layer, self.after, self.calls = nn.Linear(25, 3), after, 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        h = self.layer(x.flatten(1))
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls > self.after:
                self.mean.lerp_(h.detach().mean(0), 0.1)
        return h


@pytest.mark.parametrize("after", [0, 4])
def test_a_buffer_that_is_computed_from_the_examples_is_refused(after):
    with pytest.raises(UnsupportedModelError, match="'mean' is computed from the examples"):
        train(plain, model=Remembers(after), spot_checks=1.0, steps=12)


class MixesInTrainMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(25, 3)

    def forward(self, x):
        h = self.layer(x.flatten(1))
        return h - h.mean(0) if self.training else h


def test_a_model_is_checked_again_when_its_mode_changes():
    model = MixesInTrainMode().eval()
    engine, model, _, loader = start(model=model, spot_checks=0.0, steps=12)
    batches = iter(loader)
    for _ in range(6):
        x, y = next(batches)
        plain(model, x, y).backward()
    model.train()
    x, y = next(batches)
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        model(x)
    assert engine.step == 6


# ---- losses


def test_a_sum_that_is_divided_by_what_the_labels_count_is_refused():
    def masked(m, x, y):
        mask = (y > 0).float()
        return (F.cross_entropy(m(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    with pytest.raises(UnsupportedModelError, match="divided by a tensor"):
        train(masked, loss_reduction="sum")


def test_weights_that_went_through_numpy_do_not_count_as_checked():
    def weighted(m, x, y):
        each = F.cross_entropy(m(x), y, reduction="none")
        weights = each.detach().numpy()
        return (torch.from_numpy(weights / weights.max()) * each).mean()

    with pytest.warns(UserWarning, match="could not be checked"):
        engine = train(weighted)
    assert not any(body.get("loss") for kind, body in engine.ledger.notes if kind == "check")
    assert "not the loss" in " ".join(str(engine.statement()).split())


def test_a_loss_that_is_never_seen_is_warned_of():
    def unseen(model, loader):
        for x, y in loader:
            torch.autograd.backward(plain(model, x, y))

    engine, model, _, loader = start(steps=8)
    with pytest.warns(UserWarning, match="could not be checked"):
        unseen(model, loader)
    assert len(engine.releases) == 8


# ---- the closed step


def test_a_closed_step_without_a_batch_is_refused():
    engine, model, _, loader = start()
    x, y = next(iter(loader))
    with pytest.raises(ConfigError, match="no tensor with the"):
        engine.run_step(lambda: F.cross_entropy(model(x - x.mean(0)), y))
    assert not engine.releases


def test_a_closed_step_looks_into_mappings_and_at_signs():
    def centred(model):
        return lambda batch: F.cross_entropy(model(batch["x"] - batch["x"].mean(0)), batch["y"])

    engine, model, _, loader = start()
    x, y = next(iter(loader))
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        engine.run_step(centred(model), UserDict(x=x, y=y))
    assert not engine.releases


def test_a_closed_step_in_which_only_the_sign_depends_on_the_others_is_refused():
    def train_with_signs():
        engine, model, _, loader = start(spot_checks=1.0)
        for batch in loader:
            engine.run_step(lambda x, y: (model(x)[:, 0] * torch.sign(torch.sin(1e4 * x.sum()))).mean(), *batch)

    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        train_with_signs()


def test_a_closed_step_in_parts_is_checked_and_counted_once():
    engine, model, _, loader = start(batch_size=24, physical=8, steps=3, spot_checks=1.0)
    for batch in loader:
        engine.run_step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert len(engine.releases) == 3
    assert "on 3 of 3 batches" in " ".join(str(engine.statement()).split())


# ---- sentences


def test_the_statement_says_what_was_declared_public():
    engine, model, optimizer, loader = start(steps=2)
    x, y = dataset().tensors
    with engine.public_data():
        plain(model, x, y).backward()
    optimizer.zero_grad()
    for x, y in loader:
        plain(model, x, y).backward()
    text = " ".join(str(engine.statement()).split())
    assert "engine.public_data() was public: declared 1 time" in text
    assert "earlier batches" in text and "power cut" not in text


def test_an_output_may_be_fed_back_and_inputs_attacked():
    def attacked(m, x, y):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(m(x), y), x)
        return F.cross_entropy(m((x + 0.1 * g.sign()).detach()), y)

    assert train(attacked, model=network()).step == 8
