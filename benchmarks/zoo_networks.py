"""The networks of zoo.py: small configurations of torch.nn, timm, vit-pytorch, transformers and peft."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Made = tuple[nn.Module, Callable[[int, int], Batch]]  # a model, and its batch of n examples of a seed


MOST_PARAMETERS = 30_000_000


class NotRunnable(Exception):
    """Does not run without gradveil."""


def last_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:400]} ({Path(frame.filename).name}:{frame.lineno}, {frame.name})"


# ---- networks of torch.nn alone, as people write them


def floats(*shape: int) -> Callable[[int, int], Batch]:
    def batch(n: int, seed: int) -> Batch:
        return (torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),), {}

    return batch


def tokens(length: int = 8, words: int = 20) -> Callable[[int, int], Batch]:
    def batch(n: int, seed: int) -> Batch:
        return (torch.randint(3, words, (n, length - seed), generator=torch.Generator().manual_seed(seed)),), {}

    return batch


class Of(nn.Module):
    """Parts by name, and a forward that is a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


@dataclass
class Detection:
    boxes: Tensor
    logits: Tensor


def encoder(**settings: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **settings), 2, enable_nested_tensor=False)


def word_model(m: Of, x: Tensor) -> Tensor:
    """PyTorch's transformer tutorial: the sequence first, a position buffer, a causal mask."""
    h = m.embed(x.t()) * 4.0 + m.position[: x.shape[1]]
    return m.out(m.body(h, nn.Transformer.generate_square_subsequent_mask(len(h), dtype=h.dtype))).transpose(0, 1)


def detr(m: Of, x: Tensor) -> Detection:
    h = m.conv(x)
    p, q = m.rows[: h.shape[-1]], m.columns[: h.shape[-2]]
    side = [p[None].expand(len(q), -1, -1), q[:, None].expand(-1, len(p), -1)]
    place = torch.cat(side, -1).flatten(0, 1).unsqueeze(1)
    found = m.body(place + 0.1 * h.flatten(2).permute(2, 0, 1), m.query.unsqueeze(1).repeat(1, len(x), 1)).transpose(
        0, 1
    )
    return Detection(m.boxes(found).sigmoid(), m.classes(found))


def perceiver(m: Of, x: Tensor) -> Tensor:
    latents = m.latents.expand(len(x), -1, -1)
    for _ in range(2):
        latents = latents + m.cross(latents, x, x, need_weights=False)[0]
        latents = latents + m.mlp(m.norm(latents))
    return m.head(latents.mean(1))


def window_attention(m: Of, x: Tensor) -> Tensor:
    """Swin: windows folded into the batch, a table of biases for relative positions, a shift."""
    b, h, w, c = x.shape
    x = torch.roll(x, (-2, -2), (1, 2))
    windows = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
    q, k, v = m.qkv(windows).reshape(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
    at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    index = ((at[:, :, None] - at[:, None] + 3) * torch.tensor([7, 1])[:, None, None]).sum(0)
    bias = m.table[index.view(-1)].view(16, 16, 2).permute(2, 0, 1).contiguous()
    a = (q @ k.transpose(-2, -1) * 0.3 + bias.unsqueeze(0)).softmax(-1)
    out = m.proj((a @ v).transpose(1, 2).reshape(-1, 16, c))
    return out.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)


def experts(m: Of, x: Tensor) -> Tensor:
    """Routed: each expert gets the tokens that chose it."""
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = m.gate(flat).softmax(-1).topk(2)
    out = torch.zeros_like(flat)
    for i, expert in enumerate(m.experts):
        rows, which = (chosen == i).nonzero(as_tuple=True)
        if len(rows):
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, which, None])
    return m.head(out.view_as(x))


def cells(m: Of, x: Tensor) -> Tensor:
    h, c = torch.zeros(len(x), 8, dtype=x.dtype), torch.zeros(len(x), 8, dtype=x.dtype)
    for t in range(x.shape[1]):
        h, c = m.cell(x[:, t], (h, c))
    return m.head(h)


def packed(m: Of, x: Tensor) -> Tensor:
    lengths = (x[..., 0] > -1).sum(1).clamp(min=1)
    p = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, _ = nn.utils.rnn.pad_packed_sequence(m.rnn(p)[0], batch_first=True, total_length=x.shape[1])
    return m.head(out)


def dora(m: Of, x: Tensor) -> Tensor:
    weight = m.base.weight + m.b @ m.a
    return m.head(torch.tanh(F.linear(x, m.scale * weight / weight.norm(dim=1, keepdim=True), m.base.bias)))


def axial(m: Of, x: Tensor) -> Tensor:
    """Attention over rows, then over columns, each folded into the batch."""
    b, h, w, c = x.shape
    rows = x.reshape(b * h, w, c)
    x = x + m.one(rows, rows, rows)[0].view(b, h, w, c)
    columns = x.transpose(1, 2).reshape(b * w, h, c)
    return m.head(x + m.two(columns, columns, columns)[0].view(b, w, h, c).transpose(1, 2))


def seq2seq(m: Of, x: Tensor) -> Tensor:
    """Encoder and decoder GRU with additive attention, teacher forced."""
    states, h = m.encode(m.embed(x))
    h, outs = h[0], []
    for t in range(x.shape[1]):
        energy = torch.tanh(m.keys(states) + m.query(h).unsqueeze(1)) @ m.v
        context = (energy.softmax(1).unsqueeze(-1) * states).sum(1)
        h = m.decode(torch.cat([m.embed(x[:, t]), context], -1), h)
        outs.append(m.out(h))
    return torch.stack(outs, 1)


def crf(m: Of, x: Tensor) -> Tensor:
    """The forward algorithm: transitions between tags are broadcast over the batch."""
    emissions = m.emit(x)
    alpha = m.start + emissions[:, 0]
    for t in range(1, x.shape[1]):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + m.transitions + emissions[:, t].unsqueeze(1), 1)
    return alpha


def graph(m: Of, x: Tensor) -> Tensor:
    """Graph convolutions with a learned adjacency matrix, and one of the features."""
    a = (m.left @ m.left.t()).softmax(-1)
    h = torch.relu(torch.einsum("vw,bwc->bvc", a, m.first(x)))
    own = (h @ h.transpose(1, 2)).softmax(-1)
    return m.second(own @ h + torch.matmul(a, h))


def lin(a: int = 6, b: int = 3) -> nn.Linear:
    return nn.Linear(a, b)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape)


def networks() -> dict[str, Callable[[], Made]]:
    seq, par = nn.Sequential, nn.utils.parametrizations
    found: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {}
    steps, picture, words = floats(7, 6), floats(3, 16, 16), tokens()
    wide = floats(8, 16)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for name, settings in {
            "": {},
            " two layers, both ways": {"num_layers": 2, "bidirectional": True},
            " no bias": {"bias": False},
        }.items():
            size = 16 if settings.get("bidirectional") else 8
            for first in (True, False):

                def recur(m: Of, x: Tensor, first: bool = first) -> Tensor:
                    out, state = m.rnn(x if first else x.transpose(0, 1))
                    state = state[0] if isinstance(state, tuple) else state
                    return m.head(out if first else out.transpose(0, 1)) + m.other(state[-1]).unsqueeze(1)

                def made(
                    kind: Any = kind, settings: Any = settings, first: bool = first, size: int = size, f: Any = recur
                ) -> Of:
                    return Of(f, rnn=kind(6, 8, batch_first=first, **settings), head=lin(size), other=lin(8))

                found[f"{kind.__name__}{name}{'' if first else ', sequence first'}"] = made, steps
    found |= {
        "LSTM with projection": (
            lambda: Of(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(6, 8, proj_size=4, batch_first=True), head=lin(4)),
            steps,
        ),
        "LSTM with a learned first state": (
            lambda: Of(
                lambda m, x: m.head(m.rnn(x, (m.h.expand(-1, len(x), -1).contiguous(), m.c.repeat(1, len(x), 1)))[0]),
                rnn=nn.LSTM(6, 8, batch_first=True), h=r(1, 1, 8), c=r(1, 1, 8), head=lin(8),
            ),
            steps,
        ),
        "LSTM packed": (lambda: Of(packed, rnn=nn.LSTM(6, 8, batch_first=True), head=lin(8)), steps),
        "GRU packed": (lambda: Of(packed, rnn=nn.GRU(6, 8, batch_first=True, bidirectional=True), head=lin(16)), steps),
        "LSTMCell loop": (lambda: Of(cells, cell=nn.LSTMCell(6, 8), head=lin(8)), steps),
        "GRU with attention, seq2seq": (
            lambda: Of(
                seq2seq, embed=nn.Embedding(20, 8), encode=nn.GRU(8, 8, batch_first=True), keys=lin(8, 8),
                query=lin(8, 8), v=r(8), decode=nn.GRUCell(16, 8), out=lin(8, 20),
            ),
            words,
        ),
        "CRF": (lambda: Of(crf, emit=lin(6, 4), start=r(4), transitions=r(4, 4)), steps),
        "TransformerEncoder": (lambda: Of(lambda m, x: m.b(x), b=encoder(batch_first=True)), wide),
        "TransformerEncoder norm first, gelu": (
            lambda: Of(lambda m, x: m.b(x), b=encoder(batch_first=True, norm_first=True, activation="gelu")), wide,
        ),
        "TransformerEncoder, sequence first": (
            lambda: Of(lambda m, x: m.b(x.transpose(0, 1)).transpose(0, 1), b=encoder()), wide,
        ),
        "TransformerEncoder with padding": (
            lambda: Of(lambda m, x: m.b(m.e(x), src_key_padding_mask=x < 5), b=encoder(batch_first=True), e=nn.Embedding(20, 16)),
            words,
        ),
        "transformer tutorial": (
            lambda: Of(word_model, embed=nn.Embedding(20, 16), position=nn.Buffer(r(8, 1, 16)), body=encoder(), out=lin(16, 20)),
            words,
        ),
        "Transformer": (lambda: Of(lambda m, x: m.b(x, x + m.p), b=nn.Transformer(16, 2, 2, 2, 32, batch_first=True), p=r(8, 16)), wide),
        "Transformer, sequence first": (
            lambda: Of(
                lambda m, x: m.b(x.transpose(0, 1), m.p.expand(-1, len(x), -1)).transpose(0, 1),
                b=nn.Transformer(16, 2, 2, 2, 32), p=r(5, 1, 16),
            ),
            wide,
        ),
        "DETR": (
            lambda: Of(
                detr, conv=nn.Conv2d(3, 16, 4, 4), rows=torch.rand(8, 8), columns=torch.rand(8, 8), query=torch.rand(5, 16),
                body=nn.Transformer(16, 2, 1, 1, 32), boxes=lin(16, 4), classes=lin(16, 7),
            ),
            picture,
        ),
        "MultiheadAttention bias_kv, kdim": (
            lambda: Of(
                lambda m, x: m.a(x, x[..., :8], x[..., 8:], need_weights=False)[0],
                a=nn.MultiheadAttention(16, 2, kdim=8, vdim=8, add_bias_kv=True, add_zero_attn=True, batch_first=True),
            ),
            wide,
        ),
        "MultiheadAttention, its weights": (
            lambda: Of(lambda m, x: m.a(x.transpose(0, 1), m.k(x.transpose(0, 1)), x.transpose(0, 1))[1], a=nn.MultiheadAttention(16, 2), k=lin(16, 16)), wide,
        ),
        "Perceiver": (
            lambda: Of(
                perceiver, latents=r(1, 4, 16), cross=nn.MultiheadAttention(16, 2, batch_first=True),
                norm=nn.LayerNorm(16), mlp=seq(lin(16, 16), nn.GELU(), lin(16, 16)), head=lin(16),
            ),
            wide,
        ),
        "attention pooling by a query": (
            lambda: Of(lambda m, x: m.h((torch.softmax(m.k(x) @ m.q, 1).unsqueeze(1) @ x).squeeze(1)), k=lin(16, 8), q=r(8), h=lin(16)),
            wide,
        ),
        "window attention": (
            lambda: Of(window_attention, qkv=lin(16, 48), proj=lin(16, 16), table=r(49, 2)), floats(8, 8, 16),
        ),
        "axial attention": (
            lambda: Of(
                axial, one=nn.MultiheadAttention(8, 2, batch_first=True), two=nn.MultiheadAttention(8, 2, batch_first=True),
                head=lin(8),
            ),
            floats(4, 5, 8),
        ),
        "experts by routing": (
            lambda: Of(experts, gate=lin(6, 3), experts=nn.ModuleList(seq(lin(6, 8), nn.ReLU(), lin(8, 6)) for _ in range(3)), head=lin()),
            steps,
        ),
        "soft experts, bmm": (
            lambda: Of(
                lambda m, x: (torch.einsum("btd,edf->btef", x, m.w) * m.gate(x).softmax(-1).unsqueeze(-1)).sum(2),
                w=r(3, 6, 5), gate=lin(6, 3),
            ),
            steps,
        ),
        "weight_norm": (
            lambda: seq(par.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), par.weight_norm(lin(784, 3))), picture,
        ),
        "spectral_norm discriminator": (
            lambda: seq(
                par.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), par.spectral_norm(nn.Conv2d(8, 1, 8)),
                nn.Flatten(),
            ),
            picture,
        ),
        "orthogonal": (lambda: seq(par.orthogonal(lin(6, 6)), nn.Tanh(), lin()), steps),
        "standardised convolution": (
            lambda: Of(
                lambda m, x: m.h(F.conv2d(x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / m.w.std((1, 2, 3), keepdim=True) * m.g).mean((2, 3))),
                w=r(4, 3, 3, 3), g=r(4, 1, 1, 1), h=lin(4),
            ),
            picture,
        ),
        "LoRA merged": (
            lambda: Of(lambda m, x: m.h(torch.relu(F.linear(x, m.l.weight + 2 * (m.b @ m.a), m.l.bias))), l=lin(6, 8), a=r(2, 6), b=r(8, 2), h=lin(8)),
            steps,
        ),
        "LoRA beside": (lambda: Of(lambda m, x: m.h(m.l(x) + x @ m.a @ m.b * 0.5), l=lin(6, 8), a=r(6, 2), b=r(2, 8), h=lin(8)), steps),
        "DoRA merged": (lambda: Of(dora, base=lin(6, 8), a=r(2, 6), b=r(8, 2), scale=r(8, 1), head=lin(8)), steps),
        "tied embedding": (
            lambda: Of(lambda m, x: F.linear(m.r(m.e(x))[0], m.e.weight), e=nn.Embedding(20, 8), r=nn.GRU(8, 8, batch_first=True)), words,
        ),
        "tied embedding, matmul and scale": (
            lambda: Of(lambda m, x: torch.tanh(m.l(m.e(x) * 8**0.5)) @ m.e.weight.t() + m.b, e=nn.Embedding(20, 8), l=lin(8, 8), b=r(20)), words,
        ),
        "class token, positions, layer scale": (
            lambda: Of(
                lambda m, x: m.h((lambda z: z + m.s * m.b(z))(torch.cat([m.c.expand(len(x), -1, -1), x], 1) + m.p)[:, 0]),
                c=r(1, 1, 16), p=r(1, 9, 16), s=r(16), b=encoder(batch_first=True), h=lin(16),
            ),
            wide,
        ),
        "class token by repeat and stack": (
            lambda: Of(lambda m, x: m.h(m.b(torch.cat([m.c.repeat(x.size(0), 1, 1), x], 1))), c=r(1, 2, 16), b=encoder(batch_first=True), h=lin(16)),
            wide,
        ),
        "positions by index, sequence first": (
            lambda: Of(
                lambda m, x: m.h(m.b(m.e(x.t()) + m.p(torch.arange(x.shape[1])).unsqueeze(1))).transpose(0, 1),
                e=nn.Embedding(20, 16), p=nn.Embedding(9, 16), b=encoder(), h=lin(16),
            ),
            words,
        ),
        "video folded": (
            lambda: Of(
                lambda m, x: m.h(m.r(m.c(x.flatten(0, 1)).mean((2, 3)).view(len(x), x.shape[1], -1))[0][:, -1]),
                c=seq(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3)), r=nn.LSTM(8, 8, batch_first=True), h=lin(8),
            ),
            floats(3, 3, 8, 8),
        ),
        "video folded, time first": (
            lambda: Of(
                lambda m, x: m.h(m.c(x.transpose(0, 1).flatten(0, 1)).mean((2, 3)).view(x.shape[1], len(x), -1).mean(0)),
                c=seq(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3)), h=lin(8),
            ),
            floats(3, 3, 8, 8),
        ),
        "frozen BatchNorm, head trained": (
            lambda: seq(seq(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).requires_grad_(False), nn.Flatten(), lin(1568, 3)), picture,
        ),
        "hypernetwork of the example": (
            lambda: Of(lambda m, x: torch.bmm(x, m.hyper(x.mean(1)).view(-1, 6, 4)) + m.b, hyper=lin(6, 24), b=r(4)), steps,
        ),
        "hypernetwork of a code": (
            lambda: Of(lambda m, x: m.h(torch.tanh(F.linear(x, m.hyper(m.code).view(5, 6)))), hyper=lin(4, 30), code=r(4), h=lin(5)), steps,
        ),
        "FiLM": (
            lambda: Of(lambda m, x: m.h(m.c(x) * (1 + m.f(x.mean((2, 3)))[:, :4, None, None]) + m.f(x.mean((2, 3)))[:, 4:, None, None]), c=nn.Conv2d(3, 4, 3), f=lin(3, 8), h=nn.Conv2d(4, 2, 1)),
            picture,
        ),
        "einsum heads": (
            lambda: Of(
                lambda m, x: torch.einsum("bhqd,hde->bqe", torch.einsum("btd,hde->bhte", x, m.a).tanh() * m.s[:, None, None], m.b),
                a=r(2, 6, 4), b=r(2, 4, 6), s=r(2),
            ),
            steps,
        ),
        "factorised bilinear einsum": (lambda: Of(lambda m, x: torch.einsum("bti,ijk,btj->btk", x, m.w, x), w=r(6, 6, 3)), steps),
        "FNet by FFT": (lambda: Of(lambda m, x: m.h(m.n(torch.fft.fft2(x).real + m.l(x))), l=lin(6, 6), n=nn.LayerNorm(6), h=lin()), steps),
        "learned Fourier filter": (
            lambda: Of(
                lambda m, x: m.h(torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=7, dim=1)), w=r(4, 6, 2), h=lin(),
            ),
            steps,
        ),
        "Fourier neural operator": (
            lambda: Of(
                lambda m, x: m.h(torch.fft.irfft(torch.einsum("bti,tio->bto", torch.fft.rfft(m.l(x), dim=1), torch.complex(m.re, m.im)), n=7, dim=1)),
                l=lin(6, 6), re=r(4, 6, 5), im=r(4, 6, 5), h=lin(5),
            ),
            steps,
        ),
        "U-Net": (
            lambda: Of(
                lambda m, x: m.o(torch.cat([m.a(x), F.interpolate(m.u(m.b(F.max_pool2d(m.a(x), 2))), scale_factor=1)], 1)),
                a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 8, 3, padding=1), u=nn.ConvTranspose2d(8, 4, 2, 2), o=nn.Conv2d(8, 2, 1),
            ),
            picture,
        ),
        "graph layers": (lambda: Of(graph, left=r(7, 3), first=lin(6, 6), second=lin()), steps),
        "Gaussian kernel layer": (lambda: Of(lambda m, x: m.h(torch.exp(-torch.cdist(x, m.c) ** 2 * m.w.exp())), c=r(5, 6), w=r(5), h=lin(5)), steps),
        "prototypes, cosine": (lambda: Of(lambda m, x: F.normalize(m.l(x), dim=-1) @ F.normalize(m.c, dim=0) * m.s, l=lin(6, 5), c=r(5, 4), s=torch.tensor(3.0)), steps),
        "cosine_similarity to prototypes": (lambda: Of(lambda m, x: F.cosine_similarity(x.unsqueeze(2), m.c, dim=-1), c=r(4, 6)), steps),
        "vector quantiser": (
            lambda: Of(lambda m, x: m.h((lambda z: m.e(torch.cdist(z, m.e.weight).argmin(-1)) + z)(m.l(x))), l=lin(6, 4), e=nn.Embedding(5, 4), h=lin(4)), steps,
        ),
        "spline network (KAN)": (
            lambda: Of(lambda m, x: torch.einsum("btig,oig->bto", torch.exp(-((x.unsqueeze(-1) - m.g) ** 2)), m.w) + F.silu(x) @ m.b, w=r(3, 6, 5), g=r(5), b=r(6, 3)), steps,
        ),
        "diagonal state space": (
            lambda: Of(
                lambda m, x: m.h(torch.fft.irfft(torch.fft.rfft(x, 16, 1) * torch.fft.rfft(torch.exp(-m.a.exp() * torch.arange(7)[:, None]) * m.c, 16, 0), 16, 1)[:, :7]) + m.d * x[..., :3],
                a=r(6), c=r(6), d=r(3), h=lin(),
            ),
            steps,
        ),
        "DeepSets": (lambda: Of(lambda m, x: m.o(torch.cat([m.a(x).sum(1), m.a(x).amax(1)], -1)), a=seq(lin(6, 8), nn.ReLU(), lin(8, 8)), o=lin(16)), steps),
        "EmbeddingBag and wide and deep": (
            lambda: Of(lambda m, x: m.d(m.e(x)) + m.w(x).sum(1) + m.b, e=nn.EmbeddingBag(20, 8), w=nn.Embedding(20, 3), d=lin(8), b=r(3)), words,
        ),
        "factorisation machine": (lambda: Of(lambda m, x: m.l(x) + 0.5 * ((x @ m.v) ** 2 - (x**2) @ (m.v**2)).sum(-1, keepdim=True), l=lin(6, 1), v=r(6, 4)), steps),
        "Bilinear": (lambda: Of(lambda m, x: m.b(x, x), b=nn.Bilinear(6, 6, 3)), steps),
        "PReLU, InstanceNorm, LocalResponseNorm": (
            lambda: seq(nn.Conv2d(3, 6, 3), nn.PReLU(6), nn.InstanceNorm2d(6, affine=True), nn.LocalResponseNorm(2), nn.Flatten(), lin(1176, 3)), picture,
        ),
        "masked autoencoder token": (
            lambda: Of(lambda m, x: m.h(torch.where((x[..., :1] > 0), m.l(x), m.t)), l=lin(6, 8), t=r(8), h=lin(8)), steps,
        ),
        "mask token by assignment": (
            lambda: Of(lambda m, x: (lambda z: (z.__setitem__(x[..., 0] > 0, m.t), m.h(z))[1])(m.l(x).clone()), l=lin(6, 8), t=r(8), h=lin(8)), steps,
        ),
        "learned temperature, Parameter scalar": (lambda: Of(lambda m, x: m.l(x) / m.t.exp(), l=lin(), t=torch.tensor(0.3)), steps),
        "batch statistic (mixes)": (lambda: Of(lambda m, x: m.h(m.l(x) - m.l(x).mean(0)), l=lin(6, 6), h=lin()), steps),
        "SimCLR similarity (mixes)": (lambda: Of(lambda m, x: m.l(x).mean(1) @ m.l(x).mean(1).t(), l=lin(6, 6)), steps),
        "memory with a checkpoint": (
            lambda: Of(lambda m, x: m.h(torch.utils.checkpoint.checkpoint(m.l, x, use_reentrant=False)), l=seq(lin(6, 8), nn.Tanh(), lin(8, 6)), h=lin()), steps,
        ),
        "deep equilibrium, shared layer": (
            lambda: Of(lambda m, x: m.h([z := torch.zeros_like(x)] and [z := torch.tanh(m.l(z) + m.u(x)) for _ in range(5)][-1]), l=lin(6, 6), u=lin(6, 6), h=lin()), steps,
        ),
    }  # fmt: skip
    return {f"torch/{name}": (lambda make=make, batch=batch: (make(), batch)) for name, (make, batch) in found.items()}


# ---- libraries


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class NoTorchvision:
    """Finds empty modules under the name of torchvision."""

    def find_spec(self, name: str, *_: Any) -> Any:
        found = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def library(name: str) -> Any:
    """Imported, in a process that ends with the network: torchvision may be empty in it."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(NoTorchvision())  # type: ignore[arg-type]
    return importlib.import_module(name)


_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
_D4, _W4 = (1, 1, 1, 1), (16, 32, 32, 64)
TIMM: dict[str, tuple[int, dict[str, Any]]] = {  # side of the image, settings; without img_size: it takes any
    "beit_base_patch16_224": (32, {"img_size": 32, **_VIT}),
    "beitv2_base_patch16_224": (32, {"img_size": 32, **_VIT}),
    "lambda_resnet26t": (64, {"img_size": 64}),
    "botnet26t_256": (64, {"img_size": 64}),
    "test_byobnet": (64, {}),
    "mobileone_s0": (32, {}),
    "repvgg_a0": (64, {}),
    "cait_xxs24_224": (32, {"img_size": 32, **_VIT}),
    "coat_tiny": (64, {"img_size": 64, "serial_depths": (1, 1, 1, 1)}),
    "coat_lite_tiny": (64, {"img_size": 64, "serial_depths": (1, 1, 1, 1)}),
    "convit_tiny": (32, {"img_size": 32, "embed_dim": 32, "depth": 3, "local_up_to_layer": 2, "num_heads": 4}),
    "convmixer_768_32": (28, {}),
    "test_convnext": (64, {}),
    "test_convnext2": (64, {}),
    "cpubone_nano": (64, {}),
    "crossvit_tiny_240": (240, {"depth": ((1, 1, 0), (1, 1, 0), (1, 1, 0))}),
    "csatv2": (64, {}),
    "cs3darknet_focus_s": (64, {}),
    "cspnext_tiny": (64, {}),
    "davit_tiny": (64, {"depths": _D4, "embed_dims": _W4, "num_heads": (2, 2, 2, 2)}),
    "deit_tiny_distilled_patch16_224": (32, {"img_size": 32, **_VIT}),
    "deit3_small_patch16_224": (32, {"img_size": 32, **_VIT}),
    "densenet121": (64, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    "dla46x_c": (64, {}),
    "dpn48b": (64, {}),
    "edgenext_xx_small": (64, {}),
    "efficientformer_l1": (224, {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 32, 32)}),
    "efficientformerv2_s0": (224, {}),
    "test_efficientnet": (64, {}),
    "test_efficientnet_evos": (64, {}),
    "tinynet_e": (64, {}),
    "mixnet_s": (64, {}),
    "efficientvim_m1": (64, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (224, {}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, **_VIT}),
    "vit_base_patch16_rope_reg1_gap_256": (32, {"img_size": 32, **_VIT}),
    "fasternet_t0": (64, {}),
    "fastvit_t8": (64, {}),
    "focalnet_tiny_srf": (32, {}),
    "gcvit_xxtiny": (224, {}),
    "ghostnet_050": (64, {}),
    "ghostnetv2_100": (64, {}),
    "hardcorenas_b": (64, {}),
    "hgnetv2_b0": (64, {}),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1), "mask_unit_size": (8, 8)}),
    "sam2_hiera_tiny": (64, {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1), "global_att_blocks": (2, 3)}),
    "hrnet_w18_small": (32, {}),
    "iformer_t": (64, {}),
    "inception_next_atto": (64, {}),
    "inception_v3": (80, {}),
    "lcnetv2_small": (64, {}),
    "levit_128s": (224, {}),
    "levit_conv_128s": (224, {}),
    "lowformer_b0": (32, {}),
    "test_mambaout": (64, {}),
    "test_coatnet": (64, {"img_size": 64}),
    "test_maxvit": (64, {"img_size": 64}),
    "coatnext_nano_rw_224": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "poolformer_s12": (32, {}),
    "poolformerv2_s12": (32, {}),
    "caformer_s18": (32, {}),
    "convformer_s18": (32, {}),
    "gmlp_ti16_224": (32, {"img_size": 32}),
    "mixer_s16_224": (32, {"img_size": 32}),
    "resmlp_12_224": (32, {"img_size": 32}),
    "gmixer_12_224": (32, {"img_size": 32}),
    "lcnet_035": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_035": (64, {}),
    "mobilenetv4_hybrid_medium_075": (32, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "mvitv2_tiny": (32, {"img_size": 32}),
    "naflexvit_base_patch16_gap": (32, {**_VIT, "pos_embed_grid_size": (2, 2)}),
    "nest_tiny": (32, {"img_size": 32}),
    "nextvit_small": (32, {}),
    "test_nfnet": (64, {}),
    "nf_resnet26": (64, {}),
    "pit_ti_distilled_224": (224, {"base_dims": (8, 8, 8), "depth": (1, 1, 1)}),
    "pvt_v2_b0": (64, {}),
    "pvt_v2_b2_li": (64, {"depths": _D4, "embed_dims": _W4, "num_heads": (1, 2, 2, 4)}),
    "rdnet_tiny": (32, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "regnetz_005": (64, {}),
    "repghostnet_050": (64, {}),
    "repvit_m0_9": (64, {}),
    "res2net50_14w_8s": (64, {"layers": _D4}),
    "resnest14d": (64, {}),
    "test_resnet": (64, {}),
    "resnet18": (32, {}),
    "seresnet18": (32, {}),
    "ecaresnet26t": (32, {"layers": _D4}),
    "gcresnet33ts": (64, {}),
    "resnetv2_18": (64, {}),
    "resnetv2_50x1_bit": (64, {"layers": _D4, "channels": (16, 32, 32, 64), "stem_chs": 16}),
    "rexnet_100": (64, {}),
    "legacy_seresnet18": (64, {}),
    "sequencer2d_s": (224, {"layers": _D4, "embed_dims": (16, 32, 32, 32), "hidden_sizes": (8, 8, 8, 8)}),
    "shvit_s1": (64, {}),
    "skresnet18": (64, {}),
    "selecsls42": (32, {}),
    "starnet_s050": (64, {}),
    "swiftformer_xs": (224, {}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2)}),
    "swinv2_cr_tiny_224": (56, {"img_size": 56, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2), "window_size": 7}),
    "tiny_vit_5m_224": (64, {}),
    "tnt_s_patch16_224": (32, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads_outer": 2}),
    "twins_svt_small": (64, {"img_size": 64, "depths": _D4, "embed_dims": _W4, "num_heads": (1, 2, 2, 4)}),
    "twins_pcpvt_small": (64, {"img_size": 64, "depths": _D4, "embed_dims": _W4, "num_heads": (1, 2, 2, 4)}),
    "visformer_tiny": (64, {"img_size": 64}),
    "test_vit": (32, {"img_size": 32}),
    "test_vit2": (32, {"img_size": 32}),
    "test_vit3": (32, {"img_size": 32}),
    "test_vit4": (32, {"img_size": 32}),
    "vit_tiny_r_s16_p8_224": (64, {"img_size": 64, "embed_dim": 48, "depth": 1}),
    "vit_base_patch16_xp_224": (32, {"img_size": 32, **_VIT}),
    "vit_small_patch16_36x1_224": (32, {"img_size": 32, **_VIT}),
    "vit_small_patch16_18x2_224": (32, {"img_size": 32, **_VIT}),
    "vit_little_patch16_reg1_gap_256": (32, {"img_size": 32, **_VIT}),
    "vit_base_patch16_siglip_224": (32, {"img_size": 32, **_VIT}),
    "vit_small_patch14_dinov2": (28, {"img_size": 28, **_VIT}),
    "vit_base_patch16_clip_224": (32, {"img_size": 32, **_VIT}),
    "test_vit_relpos": (32, {"img_size": 32}),
    "vit_srelpos_small_patch16_224": (32, {"img_size": 32, **_VIT}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "global_attn_indexes": (1,), "window_size": 2, **_VIT}),
    "vitamin_small_224": (64, {"img_size": 64}),
    "volo_d1_224": (64, {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (32, 32, 32, 32), "num_heads": (2, 2, 2, 2)}),
    "ese_vovnet19b_slim_dw": (64, {}),
    "legacy_xception": (40, {}),
    "xcit_nano_12_p8_224": (32, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}),
}  # fmt: skip


def of_timm(name: str, side: int, settings: dict[str, Any]) -> Made:
    made = library("timm").create_model(name, num_classes=5, **settings)
    return made, floats(3, side, side)


SMALL: dict[str, Any] = {  # of a configuration of transformers', where it has the setting
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("hidden_dim", "projection_dim", "hidden_size_per_layer_input", "bottleneck_size", "d_embed"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_inner", "d_ff", "ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "vocab_size", "max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "state_size"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "type_vocab_size", "bos_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("vocab_size_per_layer_input", "pad_token_id"), 0),
    **dict.fromkeys(("image_size", "img_size"), 32),
    "patch_size": 8, "use_cache": False, "num_labels": 5, "conv_dim": (16, 16), "conv_stride": (5, 2),
    "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_mel_bins": 16,
    "max_source_positions": 16, "max_target_positions": 16, "attention_window": 4, "block_size": 4, "n_ctx": 64,
    "vocab_size_per_layer_input": 64, "max_2d_position_embeddings": 64, "position_buckets": 4, "rotary_dim": 4,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False, "is_decoder": True, "num_frames": 2,
}  # fmt: skip
VARIANTS: tuple[dict[str, Any], ...] = (  # tried in turn, until the model runs; None: as it is by default
    {}, {"num_key_value_heads": 4}, {"head_dim": None}, {"head_dim": None, "num_key_value_heads": None, "v_head_dim": None},
    {"conv_kernel": None}, {"num_hidden_layers": 4}, {"num_hidden_layers": None, "head_dim": None},
    {"intermediate_size": 32, "moe_intermediate_size": 32}, {"max_position_embeddings": None, "head_dim": 16},
    {"rotary_dim": 8}, {"patch_size": 2}, {"patch_size": 4, "image_size": 64}, {"patch_size": None, "image_size": 64},
    {"pad_token_id": None, "hidden_size": None, "head_dim": None}, {"hidden_size": None, "num_attention_heads": None},
)  # fmt: skip
KINDS = {  # a mapping of transformers', and which of its inputs to give
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING", "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "AudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", "Semantic": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING",
    "Detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING", "Video": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING",
    "Depth": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING", "Classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}  # fmt: skip


def configuration(of: Any, kind: str, variant: Mapping[str, Any]) -> Any:
    """Small, by the settings it has; the configurations inside it likewise."""
    plain = of()
    inside = {
        name: configuration(type(getattr(plain, name)), kind, variant)
        for name in getattr(of, "sub_configs", {})
        if hasattr(getattr(plain, name, None), "to_dict")
    }
    has: dict[str, Any] = {}
    for name, value in (SMALL | dict(variant)).items():
        default = vars(plain).get(name)
        if default is None or value is None or (name == "is_decoder" and kind != "CausalLM"):
            continue
        has[name] = value
        if isinstance(default, list | tuple) and isinstance(value, int):
            has[name] = type(default)([1 if "layers" in name else 2 if "heads" in name else value] * len(default))
    for name, default in vars(plain).items():
        if "drop" in name and isinstance(default, float):
            has[name] = 0.0
        elif name in ("depths", "hidden_sizes", "embed_dims") and isinstance(default, list | tuple):
            has[name] = [1 if name == "depths" else 32] * len(default)
    return of(**(has | inside))


def of_transformers(kind: str, name: str, experts: str = "eager") -> Made:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    errors: list[str] = []
    for variant in VARIANTS:
        torch.manual_seed(0)
        try:
            config = configuration(mapping[name], kind, variant)
            config._experts_implementation = experts
            model = getattr(auto, KINDS[kind])[type(config)](config)
            if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
                raise NotRunnable("too large")
            batch = inputs_for(kind, name, config)
            model.double().train()(**batch(2, 0)[1])
            return model, batch
        except Exception as error:
            errors.append(last_line(error))
    raise NotRunnable(errors[0])


def inputs_for(kind: str, name: str, config: Any) -> Callable[[int, int], Batch]:
    side = getattr(config, "image_size", 32)
    side = side if isinstance(side, int) else side[0]
    words = min(getattr(config.get_text_config(), "vocab_size", None) or 64, 64)

    def batch(n: int, seed: int) -> Batch:
        (ids,), _ = tokens(8, words)(n, seed)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if kind == "Seq2SeqLM":
            given["decoder_input_ids"] = tokens(6, words)(n, seed)[0][0]
        if kind in ("ImageClassification", "Semantic", "Detection", "Depth"):
            given = {"pixel_values": floats(3, side, side)(n, seed)[0][0]}
        if kind == "Video":
            key = (
                "pixel_values_videos" if name.startswith("v") and name not in ("vivit", "videomae") else "pixel_values"
            )
            given = {key: floats(getattr(config, "num_frames", 2), 3, side, side)(n, seed)[0][0]}
        if kind == "AudioClassification":
            given = {"input_values": floats(400)(n, seed)[0][0]}
            if name.startswith("audio-"):
                given = {"input_values": floats(config.max_length, config.num_mel_bins)(n, seed)[0][0]}
            if name in ("whisper", "wav2vec2-bert"):
                shape = (16, 32) if name == "whisper" else (20, config.feature_projection_input_dim)
                given = {"input_features": floats(*shape)(n, seed)[0][0]}
        return (), given

    return batch


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 4, "target_modules": ["c_attn", "c_proj"]},
    "LoRA, rsLoRA and biases": {"r": 4, "target_modules": ["c_fc"], "use_rslora": True, "bias": "all"},
    "DoRA": {"r": 4, "target_modules": ["c_attn"], "use_dora": True},
    "LoRA of the embedding": {"r": 4, "target_modules": ["wte", "c_attn"]},
    "IA3": {"target_modules": ["c_attn", "c_proj"], "feedforward_modules": ["c_proj"]},
    "PrefixTuning": {"num_virtual_tokens": 3},
    "PrefixTuning, projected": {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 16},
    "PromptTuning": {"num_virtual_tokens": 3},
    "PromptEncoder": {"num_virtual_tokens": 3, "encoder_hidden_size": 16},
    "AdaLora": {"target_modules": ["c_attn"], "init_r": 4, "total_step": 10},
    "LoHa": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "LoKr": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "OFT": {"r": 0, "oft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
    "BOFT": {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
    "VeRA": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "FourierFT": {"n_frequency": 10, "target_modules": ["q_proj", "v_proj"]},
    "HRA": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "VBLoRA": {"r": 4, "target_modules": ["q_proj"], "num_vectors": 8, "vector_length": 8, "topk": 2},
    "Bone": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "Miss": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "RandLora": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "Shira": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "C3A": {"block_size": 8, "target_modules": ["q_proj"]},
    "RoadConfig": {"target_modules": ["q_proj"], "group_size": 8},
}  # fmt: skip


def of_peft(name: str, settings: dict[str, Any]) -> Made:
    peft = importlib.import_module("peft")
    kind = name.split(",")[0].split(" ")[0].replace("DoRA", "Lora").replace("LoRA", "Lora").replace("VeRA", "Vera")
    kind = kind.replace("VBLora", "VBLoRA").replace("RoadConfig", "Road")
    model, batch = of_transformers(
        "CausalLM",
        "llama"
        if "proj" in str(settings.get("target_modules", "")).replace("c_proj", "") or "norm" in str(settings)
        else "gpt2",
    )
    return peft.get_peft_model(model, getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **settings)), batch


_VIT_PYTORCH = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 32}
_MORE = {"jumbo_vit": {"num_jumbo_cls": 1, "jumbo_ff_mult": 1}, "xcit": {"cls_depth": 1}, "cait": {"cls_depth": 1},
         "ats_vit": {"max_tokens_per_depth": (12, 8)}, "simple_uvit": {"num_register_tokens": 2}}  # fmt: skip
VIT: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    path: (path, _VIT_PYTORCH | _MORE.get(path.split(":")[0], {}), (3, 32, 32))
    for path in ["vit:ViT", "simple_vit:SimpleViT", "deepvit:DeepViT", "simple_vit_with_register_tokens:SimpleViT", "simple_vit_with_qk_norm:SimpleViT", "simple_vit_with_fft:SimpleViT", "simple_vit_with_value_residual:SimpleViT", "simple_vit_with_hyper_connections:SimpleViT", "parallel_vit:ViT", "vit_for_small_dataset:ViT", "rvt:RvT", "local_vit:LocalViT", "learnable_memory_vit:ViT", "normalized_vit:nViT", "vit_with_patch_merger:ViT", "vit_with_decorr:ViT", "simple_flash_attn_vit:SimpleViT", "look_vit:LookViT", "jumbo_vit:JumboViT", "xcit:XCiT", "cait:CaiT", "simple_uvit:SimpleUViT", "ats_vit:ViT", "simple_vit_with_sparse_gating:SimpleViT", "looped_vit:LoopedViT", "vit_detpool:ViT", "simple_vit_with_relative_proj_pos_bias:SimpleViT", "simple_vit_attn_residual:SimpleViT", "vit_5:ViT", "simple_vit_with_specialized_cls:SimpleViT"]
} | {
    "cct": ("cct:CCT", {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 2, "mlp_ratio": 1.0, "num_classes": 5}, (3, 32, 32)),
    "crossformer": ("crossformer:CrossFormer", {"num_classes": 5, "dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "global_window_size": (4, 4, 2, 1), "local_window_size": (4, 2, 2, 1)}, (3, 64, 64)),
    "cvt": ("cvt:CvT", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32, "s3_depth": 1, "s3_heads": 2}, (3, 32, 32)),
    "levit": ("levit:LeViT", {"image_size": 64, "num_classes": 5, "dim": (16, 16, 32), "depth": 1, "heads": (2, 2, 2), "mlp_mult": 2}, (3, 64, 64)),
    "max_vit": ("max_vit:MaxViT", {"num_classes": 5, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}, (3, 32, 32)),
    "mobile_vit": ("mobile_vit:MobileViT", {"image_size": (64, 64), "dims": [16, 16, 16], "channels": [8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32], "num_classes": 5}, (3, 64, 64)),
    "nest": ("nest:NesT", {"image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)}, (3, 32, 32)),
    "pit": ("pit:PiT", {"image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": (1, 1), "heads": 2, "mlp_dim": 16}, (3, 32, 32)),
    "regionvit": ("regionvit:RegionViT", {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 5}, (3, 64, 64)),
    "scalable_vit": ("scalable_vit:ScalableViT", {"num_classes": 5, "dim": 16, "heads": (2, 2, 2, 2), "depth": (1, 1, 1, 1), "ssa_dim_key": (8, 8, 8, 8), "reduction_factor": (2, 2, 1, 1), "window_size": (4, 2, None, None)}, (3, 64, 64)),
    "sep_vit": ("sep_vit:SepViT", {"num_classes": 5, "dim": 16, "dim_head": 8, "heads": (1, 2), "depth": (1, 1), "window_size": 4}, (3, 64, 64)),
    "t2t": ("t2t:T2TViT", {"image_size": 32, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 32}, (3, 32, 32)),
    "twins_svt": ("twins_svt:TwinsSVT", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 16, "s4_emb_dim": 16, "s1_local_patch_size": 4, "s2_local_patch_size": 4, "s3_local_patch_size": 2, "s3_depth": 1, "s4_local_patch_size": 1, "s4_depth": 1}, (3, 64, 64)),
    "cross_vit": ("cross_vit:CrossViT", {"image_size": 32, "num_classes": 5, "depth": 1, "sm_dim": 16, "lg_dim": 32, "sm_patch_size": 8, "lg_patch_size": 16, "sm_enc_depth": 1, "lg_enc_depth": 1, "sm_enc_heads": 2, "lg_enc_heads": 2}, (3, 32, 32)),
    "vit_1d": ("vit_1d:ViT", {"seq_len": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 32}, (3, 32)),
    "vit_3d": ("vit_3d:ViT", {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 32}, (3, 4, 16, 16)),
    "vivit": ("vivit:ViT", {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 32, "spatial_depth": 1, "temporal_depth": 1, "heads": 2, "mlp_dim": 32}, (3, 4, 16, 16)),
    "vivit factorised": ("vivit:ViT", {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 32, "spatial_depth": 1, "temporal_depth": 1, "heads": 2, "mlp_dim": 32, "variant": "factorized_self_attention"}, (3, 4, 16, 16)),
}  # fmt: skip


def of_vit_pytorch(path: str, settings: dict[str, Any], shape: tuple[int, ...]) -> Made:
    module, cls = path.split(":")
    return getattr(library(f"vit_pytorch.{module}"), cls)(**settings), floats(*shape)


def all_of_transformers() -> dict[str, Callable[[], Made]]:
    try:
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return {}
    found: dict[str, Callable[[], Made]] = {
        f"transformers/{kind}/{name}": (lambda kind=kind, name=name: of_transformers(kind, name))
        for kind, mapping in KINDS.items()
        if kind != "Classification"
        for name in getattr(auto, f"{mapping}_NAMES")
    }
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"):
        for experts in ("batched_mm", "grouped_mm"):
            found[f"transformers/CausalLM/{name}, {experts}"] = partial(of_transformers, "CausalLM", name, experts)
    return found | {f"peft/{name}": (lambda name=name, how=how: of_peft(name, how)) for name, how in ADAPTERS.items()}


def everything() -> dict[str, Callable[[], Made]]:
    found = networks()
    found |= {f"timm/{name}": (lambda name=name, how=how: of_timm(name, *how)) for name, how in TIMM.items()}
    found |= {f"vit-pytorch/{name}": (lambda how=how: of_vit_pytorch(*how)) for name, how in VIT.items()}
    return found | all_of_transformers()
