"""What gradveil inspect finds out about a model."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gradveil.attacks.observation.model_structure import examine
from gradveil.attacks.preflight import KAPPA, inspect_model, made_up
from gradveil.errors import ConfigError, UnsupportedModelError

SHAPE = (1, 8, 8)


def mlp(bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=bias), nn.Sigmoid(), nn.Linear(16, 4))


def look(module, shape=SHAPE, classes=4):
    return examine(module, input_shape=shape, classes=classes)


def test_a_first_linear_layer_with_a_bias_gives_the_input_away():
    found = look(mlp())
    assert found.leaking("input") == ["1"] and found.leaking("labels") == ["3"]
    assert found.can_be_trained and found.groups == 2 and found.parameters == 64 * 16 + 16 + 16 * 4 + 4
    assert [part.clipped_by for part in found.parts] == ["rank-one", "rank-one"]


@pytest.mark.parametrize(
    "module",
    [
        mlp(bias=False),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 4)),
        nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Sigmoid(), nn.Linear(64, 4)),
    ],
    ids=["no bias", "not first", "rows of one example"],
)
def test_other_first_layers_do_not(module):
    found = look(module)
    assert not found.leaking("input")
    assert found.leaking("labels")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.sigmoid(self.b(torch.sigmoid(self.a(x.flatten(1))))))


def test_tied_weights_are_named_and_nothing_is_read_off_their_sum():
    found = look(Tied())
    assert found.tied == (("a.weight", "b.weight"),)
    assert not found.leaking("input") and found.leaking("features") == ["out"]
    together = "with the layers that share its weight"
    assert [part.clipped_by for part in found.parts] == [together, together, "rank-one"]


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        return self.out((x - x.mean(0)).flatten(1))


def batch_norm():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(64, 4),
    )  # fmt: skip


def test_every_layer_that_mixes_examples_is_named():
    found = look(batch_norm())
    assert len(found.mixes) == 2 and "'1'" in found.mixes[0] and "'4'" in found.mixes[1]
    assert [part.name for part in found.parts if part.refused] == ["1", "4"]
    assert found.can_be_mended and not found.can_be_trained
    assert {p.name: p.clipped_by for p in found.parts}["0"] in ("direct", "gram")


def test_a_model_that_mixes_examples_in_its_forward_is_found_out():
    found = look(Mixing())
    assert len(found.mixes) == 1 and not found.can_be_mended
    report = inspect_model(Mixing(), input_shape=SHAPE, clip=1.0, sigma=1.0, seconds=1.0)
    assert report.tried == () and "no example has a gradient of its own" in " ".join(report.verdict)


def test_what_is_unsupported_is_named():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten())
    module.append(nn.Linear(72, 4))
    found = look(module)
    assert len(found.unsupported) == 1 and "InstanceNorm2d '1'" in found.unsupported[0]


def test_embeddings_and_frozen_layers():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(10, 5), nn.Linear(5, 4)

        def forward(self, x):
            return self.out(self.embedding(x.mul(9).long()).mean(1))

    assert look(Tokens(), (6,)).leaking("tokens") == ["embedding"]
    frozen = mlp()
    frozen[1].requires_grad_(False)
    found = look(frozen)
    assert found.frozen == 64 * 16 + 16 and not found.leaking("input")


def test_the_model_is_left_as_it_is():
    module = batch_norm()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    inspect_model(module, input_shape=SHAPE, clip=1.0, sigma=1.0, seconds=0.5)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert module.training and all("forward" not in vars(m) for m in module.modules())
    assert not any(m._forward_hooks for m in module.modules())


def test_attacks_tell_an_undefended_model_from_a_defended_one():
    report = inspect_model(mlp(), input_shape=SHAPE, clip=1.0, sigma=8.0, batch_size=16, seconds=20.0)
    by_case = {}
    for t in report.tried:
        by_case.setdefault(t.seen, []).append(t)
    cases = list(by_case)
    assert cases == [
        "undefended",
        "clipped to 1",
        "clipped to 1, noise 8, B = 16, example alone",
        "clipped to 1, noise 8, all other examples known",
    ]
    for undefended in cases[:2]:
        assert {t.attack: t.success for t in by_case[undefended]}["analytic"] == 1.0
    last = by_case[cases[3]]
    assert all(t.success == 0.0 for t in last if t.success is not None)
    assert all(t.bound is not None and KAPPA < t.bound < 0.05 for t in last)
    words = " ".join(report.verdict)
    assert "the gradient of '1' divided by that of its bias is the input" in words
    assert "no attack succeeds in more than" in words
    json.dumps(report.to_dict())


def test_a_mended_model_is_what_is_attacked():
    report = inspect_model(batch_norm(), input_shape=SHAPE, seconds=0.5)
    assert "gradveil.fix(model) mends it, and is what was attacked." in report.verdict
    assert report.tried[0].success is not None


def test_the_time_is_kept():
    report = inspect_model(mlp(), input_shape=SHAPE, clip=1.0, sigma=1.0, seconds=1e-9)
    searches = [t for t in report.tried if t.attack == "map"]
    assert searches and any("the time was up" in t.note for t in searches)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"sigma": 1.0}, ConfigError, "Give clip too"),
        ({"clip": 0.0}, ConfigError, "clip is 0.0"),
        ({"seconds": -1.0}, ConfigError, "seconds is -1.0"),
        ({"batch_size": 0}, ConfigError, "batch size is 0"),
        ({"input_shape": (3, 8, 8)}, UnsupportedModelError, r"\(3, 8, 8\)"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, error, words):
    with pytest.raises(error, match=words):
        inspect_model(mlp(), **({"input_shape": SHAPE} | settings))


@pytest.mark.parametrize("shape", [(64,), (3, 10, 12), (4, 6)])
def test_made_up_examples_lie_in_the_unit_box_and_differ(shape):
    x = made_up(5, shape, seed=0)
    assert x.shape == (5, *shape) and float(x.min()) >= 0 and float(x.max()) <= 1
    assert float((x[0] - x[1]).abs().max()) > 0.1
