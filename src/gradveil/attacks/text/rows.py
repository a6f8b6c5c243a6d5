"""Which tokens were used, from the rows of the embedding's gradient.

A row of an embedding that only looks tokens up is zero unless its token occurred. With noise of known std s the squared
length of an empty row is s^2 chi^2 with d degrees of freedom; a used row has the signal's variance t^2 on top, and the
logarithm of the likelihood ratio is (|g|^2 / s^2) r / 2 - d log(1 + t^2 / s^2) / 2 with r = t^2 / (s^2 + t^2). t^2 is
estimated from the excess of all rows, for as many of them as there are tokens.

Where the table is also the output layer (tied weights), every row has a share of the softmax, much the same in each:
their median is taken off, and what is left of an ordinary row counts as noise. Labels stand out there as inputs do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MOST_OFTEN = 16.0  # times that a token is taken to occur
_NOT_MORE = 1e12  # of a log likelihood ratio: certainty


@dataclass(frozen=True)
class TokenEvidence:
    """``ratio`` (vocabulary,): log likelihood ratios of "occurs" against "does not"; ``certain``: rows were zero.

    ``counts`` (vocabulary,): how often each occurs if it does, by the length of its row next to that of other tokens.
    """

    ratio: Tensor
    certain: bool
    counts: Tensor

    @property
    def tokens(self) -> Tensor | None:
        """The tokens that occurred, where that is certain."""
        return (self.ratio > 0).nonzero().flatten() if self.certain else None


def token_evidence(gradient: Tensor, std: float | None, places: int) -> TokenEvidence:
    """From the gradient (vocabulary, d) of a table of embeddings. ``places``: how many tokens there are at most."""
    rows = gradient.double()
    lengths = rows.square().sum(1)
    if std is None and bool((lengths == 0).any()):
        ratio = torch.where(lengths > 0, _NOT_MORE, -_NOT_MORE)
        return TokenEvidence(ratio, certain=True, counts=_counts(lengths, ratio))
    if bool((lengths > 0).all()):
        rows = rows - rows.median(0).values
        lengths = rows.square().sum(1)
    features = rows.shape[1]
    ordinary = float(lengths.median()) / features
    noise = max(ordinary if std is None else max(std**2, ordinary), 1e-300)
    excess = float((lengths - features * noise).sum()) / (places * features * noise)
    # Less two standard errors: what noise alone would give is no evidence.
    signal = excess - 2.0 * math.sqrt(2.0 * features * len(lengths)) / (places * features)
    if signal <= 0:
        return TokenEvidence(torch.zeros_like(lengths), certain=False, counts=torch.ones_like(lengths))
    ratio = 0.5 * lengths / noise * signal / (1.0 + signal) - 0.5 * features * math.log1p(signal)
    counts = _counts(lengths - features * noise, ratio)
    return TokenEvidence(ratio.clamp(-_NOT_MORE, _NOT_MORE), certain=False, counts=counts)


def _counts(lengths: Tensor, ratio: Tensor) -> Tensor:
    """Squared lengths in units of the median of those that occur; at least 1."""
    used = lengths[ratio > 0]
    if not len(used):
        return torch.ones_like(lengths)
    return (lengths / used.median().clamp(min=1e-300)).clamp(1.0, _MOST_OFTEN)


def token_table(module: nn.Module, vocabulary: int) -> str | None:
    """The name of the trained table that ids are looked up in: the first of that many rows; None: it is frozen."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.num_embeddings == vocabulary:
            return names.get(id(layer.weight))
    return None
