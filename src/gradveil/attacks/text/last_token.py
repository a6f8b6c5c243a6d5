"""The last token of each sentence of a language model: no loss depends on it as an input, but it is a label.

The output layer's weight has the gradient sum over places of (p - e_label) h' / N. With all tokens but the last known,
h and p are too, and what they do not explain is -h / N in the row of the last token. Where the output layer is the
table of embeddings as well, inputs have rows there too, which depend on the labels a little: so the gradient is taken
with the tokens as they are guessed, and what it does not explain corrects the guess. Of the likeliest tokens, the one
is taken whose gradient, in the other layers, is the observed one.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.observation.task import logits_of, plain_attention
from gradveil.attacks.text.reader import Reader, output_layer

_LIKELY = 8  # tokens for each sentence whose gradients are compared
_CORRECTIONS = 4  # of the guess, at most
_NUMBERS = 400_000  # of the gradient that are compared


def last_tokens(reader: Reader, begun: Tensor) -> tuple[Tensor, Tensor]:
    """From sentences (B, T - 1) to their last tokens (B,), and whether the gradient names them (B,)."""
    found = output_layer(reader.model.module, reader.vocabulary)
    unknown = torch.full((len(begun),), -1), torch.zeros(len(begun), dtype=torch.bool)
    if found is None or found[0] not in reader.gradients:
        return unknown
    name, layer = found
    fed: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: fed.append(args[0].detach()))
    try:
        logits = reader.model.logits(begun)
    finally:
        handle.remove()
    if fed[0].shape[:2] != begun.shape:
        return unknown
    hidden, places = fed[0].double().cpu(), begun.numel()
    part = torch.softmax(logits.double(), 2).cpu()
    part[:, :-1].scatter_add_(2, begun[:, 1:].unsqueeze(2), -torch.ones(*begun[:, 1:].shape, 1, dtype=part.dtype))
    expected = part.flatten(0, 1).T @ hidden.flatten(0, 1) / places
    seen, from_last = reader.gradients[name].double().cpu(), places * torch.linalg.pinv(hidden[:, -1])
    named = -_unexplained(seen, expected) @ from_last  # (vocabulary, B): 1 in the row of the label
    guess = named.argmax(0)
    for _ in range(_CORRECTIONS if name == reader.table else 0):
        expected = _table_gradient(reader, name, torch.cat([begun, guess.unsqueeze(1)], 1))
        named = F.one_hot(guess, len(named)).T - _unexplained(seen, expected) @ from_last
        before, guess = guess, named.argmax(0)
        if torch.equal(before, guess):
            break
    if name == reader.table:
        likely = named.topk(min(_LIKELY, len(named)), dim=0).indices.T  # (B, likely)
        return _by_gradient(reader, begun, likely), torch.ones(len(begun), dtype=torch.bool)
    return guess, named.amax(0) > 0.5


def _unexplained(seen: Tensor, expected: Tensor) -> Tensor:
    """What is left of a gradient, which may have been scaled (clipped), beside an expected one."""
    scale = float((seen * expected).sum() / expected.square().sum().clamp(min=1e-300))
    return seen / scale - expected if scale > 0 else -expected


def _table_gradient(reader: Reader, name: str, ids: Tensor) -> Tensor:
    module, ids = reader.model.module, ids.to(reader.model.device)
    with torch.enable_grad(), plain_attention():
        loss = F.cross_entropy(logits_of(module(ids))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        (found,) = torch.autograd.grad(loss, [dict(module.named_parameters())[name]])
    return found.double().cpu()


def _by_gradient(reader: Reader, begun: Tensor, likely: Tensor) -> Tensor:
    """Of each sentence's likely tokens, those with which all sentences together have the observed gradient."""
    module = reader.model.module
    small = sorted((p.numel(), n) for n, p in module.named_parameters() if p.requires_grad and n != reader.table)
    sizes = list(itertools.accumulate(size for size, _ in small))
    names = [n for (_, n), total in zip(small, sizes, strict=True) if total <= _NUMBERS] or [small[0][1]]
    parameters = dict(module.named_parameters())
    chosen = [parameters[n] for n in names]
    seen = torch.cat([reader.gradients[n].flatten() for n in names]).double().cpu()
    each = []
    for beginning, tokens in zip(begun, likely, strict=True):
        for token in tokens:
            ids = torch.cat([beginning, token.view(1)]).unsqueeze(0).to(reader.model.device)
            with torch.enable_grad(), plain_attention():
                loss = F.cross_entropy(logits_of(module(ids))[0, :-1], ids[0, 1:])
                found = torch.autograd.grad(loss, chosen, allow_unused=True)
            parts = [torch.zeros_like(p) if g is None else g for p, g in zip(chosen, found, strict=True)]
            each.append(torch.cat([g.flatten() for g in parts]).double().cpu())
    gradients = torch.stack(each).view(*likely.shape, -1) / len(begun)  # (B, likely, numbers)
    picked = torch.zeros(len(begun), dtype=torch.int64)
    for _ in range(3):
        before = picked.clone()
        for s in range(len(begun)):
            others = [gradients[i, picked[i]] for i in range(len(begun)) if i != s]
            picked[s] = torch.stack([_left(seen, torch.stack([*others, g])) for g in gradients[s]]).argmin()
        if torch.equal(picked, before):
            break
    return likely[torch.arange(len(begun)), picked]


def _left(seen: Tensor, gradients: Tensor) -> Tensor:
    """How much of a gradient sentences' gradients (B, numbers) do not explain; each may have been scaled (clipped)."""
    shares = torch.linalg.lstsq(gradients.T, seen.unsqueeze(1)).solution
    left: Tensor = (seen - (gradients.T @ shares).squeeze(1)).square().sum()
    return left
