"""Weights that several layers share: clipped by the norm of the sum, from the layers' factors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.clipping import tied_weights as tied

TOKENS, VOCABULARY, SIZE, EXAMPLES = 6, 11, 5, 7


class LanguageModel(nn.Module):
    """Tokens in, the mean over positions of the logits out; the embedding is the last layer's weight."""

    def __init__(self, *, bias: bool = False, twice: bool = False, second: bool = False) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, VOCABULARY, bias=bias)
        self.head.weight = self.embed.weight
        self.twice = twice
        self.other = nn.Embedding(VOCABULARY, SIZE) if second else None
        if self.other is not None:
            self.other.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        if self.other is not None:
            h = h + self.other(x.flip(1))
        h = torch.tanh(self.mix(h))
        out = self.head(h)
        if self.twice:
            out = out + self.head(torch.sin(h))
        return out.mean(1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean(1)


def tokens():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, VOCABULARY // 2, (EXAMPLES, TOKENS), generator=generator)  # tokens repeat
    return x, torch.randint(0, VOCABULARY, (EXAMPLES,), generator=generator)


def vectors():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, TOKENS, SIZE, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, SIZE, (EXAMPLES,), generator=generator)


MODELS = {
    "embedding and head": (LanguageModel, tokens, True),
    "with a bias": (lambda: LanguageModel(bias=True), tokens, True),
    "head used twice": (lambda: LanguageModel(twice=True), tokens, True),
    "two embeddings and head": (lambda: LanguageModel(second=True), tokens, True),
    "two linear layers": (TwoHeads, vectors, True),
}


@pytest.mark.parametrize("gamma", [None, 0.1])
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", MODELS)
def test_shared_weights_are_clipped_by_the_norm_of_their_sum(name, clipping, gamma, monkeypatch):
    make, inputs, by_factors = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    x, y = inputs()
    groups = make_groups(model, clipping)
    for bound in (0.05, 1e3):
        bounds = (bound,) * len(groups)
        expected = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds, gamma=gamma)
        clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
        clipper.weighing.gamma = gamma
        assert all(unit.rule is not None for unit in clipper.units)  # no part goes through torch.func
        if by_factors:
            monkeypatch.setattr(tied.TiedGrads, "per_example", None)
        F.cross_entropy(model(x), y).backward()
        for name_, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, expected.sums[name_], rtol=1e-9, atol=1e-11)
        model.zero_grad()
        clipper.detach()


def test_whitened_shared_weights_go_by_their_gradients():
    torch.manual_seed(0)
    model = LanguageModel().double()
    x, y = tokens()
    groups = make_groups(model, "per-layer")
    clipper = Clipper(model, groups, bounds=(0.05,) * len(groups), loss_reduction="mean")
    clipper.weighing.whitening = {n: (torch.zeros_like(p), torch.ones_like(p)) for n, p in model.named_parameters()}
    F.cross_entropy(model(x), y).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    clipper.detach()
    expected = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=[0.05] * len(groups))
    for name, grad in found.items():
        assert torch.allclose(grad, expected.sums[name], rtol=1e-9, atol=1e-11)


def test_a_layer_below_one_that_is_followed_whole_is_followed_with_it():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.scale = nn.Linear(SIZE, VOCABULARY, bias=False), nn.Parameter(torch.ones(()))

        def forward(self, h):
            return self.scale * self.head(h)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inside = nn.Embedding(VOCABULARY, SIZE), Inside()
            self.inside.head.weight = self.embed.weight

        def forward(self, x):
            return self.inside(torch.tanh(self.embed(x))).mean(1)

    torch.manual_seed(0)
    model = Model().double()
    x, y = tokens()
    groups = make_groups(model, "per-layer")
    expected = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=[0.05] * len(groups))
    clipper = Clipper(model, groups, bounds=(0.05,) * len(groups), loss_reduction="mean")
    F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected.sums[name], rtol=1e-9, atol=1e-11)
    clipper.detach()
