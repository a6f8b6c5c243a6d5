"""Features and labels read off gradients: after a LayerNorm, without a bias, of trained networks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.attacks.methods.features import layer_inputs, read_features, vector_layers
from gradveil.attacks.methods.inversion import MAP
from gradveil.attacks.methods.labels import infer_labels
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.observation.views import Public
from gradveil.attacks.scoring.metrics import psnr
from gradveil.mechanism.strategies import parameters
from gradveil.training import data


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def see(digits, module, n=12, **settings):
    x, y = digits.x_train[:n].unsqueeze(1), digits.y_train[:n].unsqueeze(1)
    public = Public(digits.x_train[200:], digits.y_train[200:])
    settings = {"classes": 10, "view": "per-example", **settings}
    return observe(module, x, y, public=public, generator=torch.Generator().manual_seed(3), **settings)


def normed(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.LayerNorm(40), nn.Linear(40, 10, bias=bias))


def convnet(bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10, bias=bias)
    )


def trained(digits, module, steps=150):
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for i in range(steps):
        rows = slice(200 + 50 * (i % 20), 250 + 50 * (i % 20))
        optimizer.zero_grad()
        F.cross_entropy(module(digits.x_train[rows]), digits.y_train[rows]).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("bias", [True, False])
def test_labels_after_a_layer_norm(digits, bias):
    """Features of both signs: the smallest row sum is the wrong class as often as not."""
    seen, secret = see(digits, normed(bias), 40)
    assert torch.equal(infer_labels(seen), secret.y)
    sums = seen.sights[0].gradients["3.weight"].sum(2).argmin(1, keepdim=True)
    assert not torch.equal(sums, secret.y)


def test_labels_under_noise(digits):
    plan = parameters("baseline", steps=10, clip=4.0, sigma=6.0)
    for module in (normed(), convnet()):
        seen, secret = see(digits, module, 40, plan=plan, view="per-example-noised", training_batch=600)
        assert float((infer_labels(seen) == secret.y).double().mean()) > 0.9


def test_two_classes_without_a_bias(digits):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 2, bias=False))
    x, y = digits.x_train[:20].unsqueeze(1), (digits.y_train[:20] % 2).unsqueeze(1)
    seen, _ = observe(module, x, y, classes=2, generator=torch.Generator())
    assert torch.equal(infer_labels(seen), y)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_what_the_last_layer_was_fed_with(digits, bias, clip):
    """By the quotient, or up to a length that the softmax settles; clipping takes that length away and no more."""
    module = trained(digits, convnet(bias))
    plan = None if clip is None else parameters("baseline", steps=10, clip=clip, sigma=1.0)
    seen, secret = see(digits, module, plan=plan)
    ((sight, read),) = read_features(seen, "3", secret.y)
    fed = layer_inputs(module, sight.weights, secret.x[:, 0], ["3"])["3"]
    assert read.scaled is (bias or clip is None)
    if read.scaled:
        assert float(((read.values - fed).norm(dim=1) / fed.norm(dim=1)).median()) < 1e-3
    assert float(F.cosine_similarity(read.values, fed, dim=1).abs().median()) > 1 - 1e-5


def test_layers_fed_with_sequences_or_twice_are_left_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.again, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            x = self.tokens(x.flatten(1).unflatten(1, (-1, 4))).mean(1)
            return self.head(self.again(self.again(x)))

    assert vector_layers(Twice(), (1, 4, 4)) == ["head"]


@pytest.mark.parametrize("bias", [True, False])
def test_trained_networks_leak_through_their_features(digits, bias):
    """Examples that the network gets right have gradients of next to nothing: what is in them does not shrink."""
    module = trained(digits, convnet(bias))
    seen, secret = see(digits, module, 8)
    assert float((module(secret.x[:, 0]).argmax(1) == secret.y[:, 0]).double().mean()) > 0.8
    found = psnr(MAP(restarts=1).run(seen, iterations=25, seed=0).x, secret.x)
    assert float((found > 25.0).double().mean()) >= 0.8


class Transformer(nn.Module):
    """Patches of 2, one block, mean pooling, a LayerNorm before the logits."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, 2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.block(x).mean(1)))


def test_a_vision_transformer_leaks_image_and_label(digits):
    torch.manual_seed(0)
    seen, secret = see(digits, Transformer().eval(), 4)
    found = MAP(restarts=1).run(seen, iterations=25, seed=0)
    assert torch.equal(found.labels, secret.y)
    assert float(psnr(found.x, secret.x).min()) > 20.0
