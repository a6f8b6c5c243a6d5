"""Small networks for the clipping tests, and the comparison of engine and oracle."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, clipped_sums, make_groups


def compare(model, x, y, *, clipping="per-layer", reduction="mean", bound=0.05, tolerance=1e-9, call=None, views=1):
    """Clip with the engine and with the oracle: sums, largest norm and counts must agree."""
    groups = make_groups(model, clipping)
    bounds = [bound * (1 + 0.1 * i) for i in range(len(groups))]
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds, views=views)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction=reduction, views=views)
    out = model(x) if call is None else call(model, x)
    F.cross_entropy(out, y, reduction=reduction).backward()
    agree(model, clipper, reference, bounds, len(x), tolerance)
    clipper.detach()


def agree(model, clipper, reference, bounds, n, tolerance):
    scale = max([1e-30, *(float(v.abs().max()) for v in reference.sums.values())])
    for name, p in model.named_parameters():
        if p.requires_grad:
            got = torch.zeros_like(p) if p.grad is None else p.grad
            assert torch.isfinite(got).all()
            assert float((got - reference.sums[name]).abs().max()) <= tolerance * max(1.0, scale), name
    if not n:
        return
    limit = torch.tensor(bounds, dtype=torch.float64)
    expected = torch.minimum(reference.norms, limit).amax(0)
    got = torch.tensor([clipper.clip_stats.largest(g) for g in range(len(bounds))], dtype=torch.float64)
    assert torch.allclose(got, expected, rtol=10 * tolerance, atol=tolerance * float(limit.max()))
    clear = ((reference.norms - limit).abs() > 10 * tolerance * limit).all()  # no norm lies on its bound
    if clear:
        within = (reference.norms <= limit).sum(0).tolist()
        assert clipper.clip_stats.counts_within() == within


class Attention(nn.Module):
    """Owns a bare parameter beside its children, so that it is followed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.embed = nn.Linear(6, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        z = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], dim=1)
        a, _ = self.attend(z, z, z, need_weights=False)
        return self.head(self.norm(z + a)[:, 0])


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.shared(self.norm(torch.tanh(self.shared(x)))))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedEmbedding(nn.Module):
    """A language model's tied input and output embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.embed(x))).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **settings) -> None:
        super().__init__()
        self.cell = kind(6, 5, batch_first=True, **settings)
        self.head = nn.Linear(10 if settings.get("bidirectional") else 5, 3)

    def forward(self, x):
        out, _ = self.cell(x)
        return self.head(out[:, -1])


class Tokens(nn.Module):
    def __init__(self, layer, reduce=True) -> None:
        super().__init__()
        self.embed = layer
        self.reduce = reduce
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        z = self.embed(x)
        return self.head(z.flatten(1, -2).mean(1) if self.reduce else z)


class Positions(nn.Module):
    """Position embeddings looked up without a batch dimension, as many as there may be examples."""

    def __init__(self, leading: bool) -> None:
        super().__init__()
        self.leading = leading
        self.embed = nn.Linear(6, 8)
        self.position = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        index = torch.arange(x.shape[1])
        return self.head(torch.tanh(self.embed(x) + self.position(index[None] if self.leading else index)).mean(1))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(144, 3)

    def forward(self, x):
        return self.head(input=self.conv(input=x).flatten(1))


class BareParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for w in self.layers:
            x = torch.tanh(x @ w * self.scale)
        return self.head(x)


def frozen_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    return model


def frozen_bias() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(108, 3))
    model[0].bias.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    return model


def seq(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


IMAGES = (2, 8, 8)
FLOATS: dict[str, tuple] = {
    "mlp": (lambda: seq(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "sequence, direct": (lambda: seq(nn.Linear(6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)), (5, 6)),
    "sequence, gram": (lambda: seq(nn.Linear(16, 24), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)), (3, 16)),
    "sequence of one": (lambda: seq(nn.Linear(6, 8), nn.Flatten(), nn.Linear(8, 3)), (1, 6)),
    "two sequence dimensions": (lambda: seq(nn.Linear(4, 2), nn.Flatten(), nn.Linear(12, 3)), (2, 3, 4)),
    "conv stride, padding": (
        lambda: seq(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        IMAGES,
    ),
    "conv groups, dilation, same": (
        lambda: seq(nn.Conv2d(2, 4, (3, 2), groups=2, dilation=2, padding="same"), nn.Flatten(), nn.Linear(256, 3)),
        IMAGES,
    ),
    "conv circular": (
        lambda: seq(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", bias=False), nn.Flatten(), nn.Linear(256, 3)
        ),
        IMAGES,
    ),
    "conv reflect": (
        lambda: seq(nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"), nn.Flatten(), nn.Linear(320, 3)),
        IMAGES,
    ),
    "conv replicate, same": (
        lambda: seq(nn.Conv2d(2, 2, 4, padding="same", padding_mode="replicate"), nn.Flatten(), nn.Linear(128, 3)),
        IMAGES,
    ),
    "conv 1x1": (lambda: seq(nn.Conv2d(2, 4, 1), nn.Flatten(), nn.Linear(256, 3)), IMAGES),
    "conv1d": (lambda: seq(nn.Conv1d(2, 4, 3, dilation=2, groups=2), nn.Flatten(), nn.Linear(16, 3)), (2, 8)),
    "conv3d": (
        lambda: seq(nn.Conv3d(2, 2, (2, 3, 2), stride=(1, 2, 1), padding=1), nn.Flatten(), nn.Linear(100, 3)),
        (2, 4, 4, 4),
    ),
    "conv transpose 1d": (
        lambda: seq(nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1), nn.Flatten(), nn.Linear(64, 3)),
        (2, 8),
    ),
    "conv transpose 2d, groups": (
        lambda: seq(
            nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2, bias=False), nn.Flatten(), nn.Linear(6 * 121, 3)
        ),
        (4, 4, 4),
    ),
    "conv transpose, output padding beyond the stride": (
        lambda: seq(nn.ConvTranspose2d(2, 3, 2, dilation=3, output_padding=2), nn.Flatten(), nn.Linear(3 * 81, 3)),
        (2, 4, 4),
    ),
    "conv transpose 3d": (lambda: seq(nn.ConvTranspose3d(2, 2, 2), nn.Flatten(), nn.Linear(54, 3)), (2, 2, 2, 2)),
    "group norm, prelu": (
        lambda: seq(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(), nn.Flatten(), nn.Linear(144, 3)),
        IMAGES,
    ),
    "group norm on rows": (lambda: seq(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.PReLU(8), nn.Linear(8, 3)), (6,)),
    "instance norm": (
        lambda: seq(
            nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.Flatten(), nn.Linear(144, 3)
        ),
        IMAGES,
    ),
    "layer norm": (lambda: seq(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (6,)),
    "layer norm of several dimensions": (lambda: seq(nn.LayerNorm((5, 6)), nn.Flatten(), nn.Linear(30, 3)), (5, 6)),
    "layer norm without bias": (
        lambda: seq(nn.Linear(6, 8), nn.LayerNorm(8, bias=False), nn.Flatten(), nn.Linear(40, 3)),
        (5, 6),
    ),
    "rms norm": (lambda: seq(nn.Linear(6, 8), nn.RMSNorm(8), nn.Flatten(), nn.Linear(40, 3)), (5, 6)),
    "bilinear parent": (BareParameter, (6,)),
    "attention": (Attention, (5, 6)),
    "called twice": (CalledTwice, (6,)),
    "tied": (Tied, (6,)),
    "lstm": (Recurrent, (5, 6)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2), (5, 6)),
    "rnn, both ways": (lambda: Recurrent(nn.RNN, bidirectional=True), (5, 6)),
    "keyword calls": (Keywords, IMAGES),
    "positions": (lambda: Positions(leading=False), (5, 6)),
    "positions, as many as examples": (lambda: Positions(leading=False), (7, 6)),
    "positions with a leading one": (lambda: Positions(leading=True), (5, 6)),
    "frozen weight, live bias": (frozen_weight, (6,)),
    "frozen bias, frozen scale": (frozen_bias, IMAGES),
    "parametrised": (
        lambda: seq(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)),
        (6,),
    ),
    "transformer layer": (
        lambda: seq(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(30, 3)),
        (5, 6),
    ),
}
TOKENS: dict[str, tuple] = {
    "embedding": (lambda: Tokens(nn.Embedding(5, 6)), (8,)),
    "embedding with padding": (lambda: Tokens(nn.Embedding(5, 6, padding_idx=0)), (8,)),
    "embedding of several dimensions": (lambda: Tokens(nn.Embedding(5, 6, padding_idx=2)), (3, 4)),
    "one token": (lambda: Tokens(nn.Embedding(5, 6), reduce=False), ()),
    "bag, sum": (lambda: Tokens(nn.EmbeddingBag(5, 6, mode="sum"), reduce=False), (8,)),
    "bag, mean with padding": (lambda: Tokens(nn.EmbeddingBag(5, 6, mode="mean", padding_idx=1), reduce=False), (8,)),
    "tied embedding": (TiedEmbedding, (4,)),
}
