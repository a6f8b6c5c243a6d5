"""Weights that no initialisation and no training makes: a model that a server has prepared to leak.

    imprint        rows of a linear layer that are multiples of each other, with biases like the marks of a ruler: each
                   example falls between two marks, and the difference of two rows' gradients is that example (Fowl et
                   al. 2022, "Robbing the Fed"; in blocks for each client: Zhao et al. 2024, "Loki")
    trap weights   rows whose positive part is their negative part, mirrored and scaled: few examples activate a unit,
                   and their inputs stand alone in its gradient (Boenisch et al. 2023)
    fishing        one class, or one feature, of the last layer far out of the range of all others: the gradient of one
                   example outweighs those of its batch (Wen et al. 2022)

A check of one's own client: what is found was put there. What is not found proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_FEWEST = 8  # rows and features that tell something
_PARALLEL = 0.9995  # cosine of two rows that are multiples of each other
_SHARE = 0.5  # of the rows that are so
_MARKS = 0.8  # of the biases of parallel rows that differ
_MIRROR = 1e-3  # relative spread of the ratio of mirrored weights
_FAR = 25.0  # times the median: a class or a feature that is out of range
_AT_ONCE = 2048


@dataclass(frozen=True)
class MadeToLeak:
    layer: str
    kind: str
    words: str


def made_to_leak(module: nn.Module) -> list[MadeToLeak]:
    """Every linear layer whose weights were made to leak, with the reason; empty for an ordinary model."""
    found = []
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    for name, layer in layers:
        weight = layer.weight.detach().double().cpu()
        bias = None if layer.bias is None else layer.bias.detach().double().cpu()
        if not bool(torch.isfinite(weight).all()) or min(weight.shape) < 2:
            continue
        checks = {"imprint": _imprint(weight, bias), "trap weights": _trap(weight)}
        if name == layers[-1][0] and len(layers) > 1:
            checks = {"fishing": _fishing(weight, bias)}
        found += [MadeToLeak(name, kind, words) for kind, words in checks.items() if words is not None]
    return found


def _imprint(weight: Tensor, bias: Tensor | None) -> str | None:
    if bias is None or min(weight.shape) < _FEWEST:
        return None
    norms = weight.norm(dim=1)
    used = (norms > 0).nonzero().flatten()
    if len(used) < _FEWEST:
        return None
    rows, marks = weight[used] / norms[used].unsqueeze(1), bias[used] / norms[used]
    partner = torch.zeros(len(used), dtype=torch.bool)
    staggered = torch.zeros(len(used), dtype=torch.bool)
    for start in range(0, len(used), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        cosine = rows[part] @ rows.T
        parallel = cosine.abs() > _PARALLEL
        parallel[torch.arange(len(cosine)), torch.arange(start, start + len(cosine))] = False
        partner[part] = parallel.any(1)
        apart = (cosine.sign() * marks - marks[part].unsqueeze(1)).abs() > 1e-9 + 1e-7 * marks.abs().max()
        staggered[part] = ((parallel & apart).sum(1) >= _MARKS * parallel.sum(1)) & parallel.any(1)
    share = float((partner & staggered).double().mean())
    if share < _SHARE:
        return None
    return (
        f"{share:.0%} of its {len(used)} rows are multiples of another one, with different biases: it sorts examples "
        "into bins, and each that is alone in its bin can be read off exactly"
    )


def _trap(weight: Tensor) -> str | None:
    if len(weight) < _FEWEST or weight.shape[1] < 4 * _FEWEST:
        return None
    ordered = weight.sort(1).values
    half = weight.shape[1] // 2
    negative, positive = -ordered[:, :half].flip(1), ordered[:, -half:]
    negative, positive = negative.sort(1).values, positive.sort(1).values
    large = negative > 0.1 * negative.amax(1, keepdim=True)
    signs = (positive.amin(1) > 0) & (negative.amin(1) > 0) & (large.sum(1) >= _FEWEST)
    ratio = positive / negative.clamp(min=1e-300)
    count = large.sum(1).clamp(min=1)
    mean = (ratio * large).sum(1) / count
    spread = (((ratio - mean.unsqueeze(1)).square() * large).sum(1) / count).sqrt() / mean.clamp(min=1e-300)
    share = float((signs & (spread < _MIRROR)).double().mean())
    if share < _SHARE:
        return None
    return f"in {share:.0%} of its rows the positive weights are the negative ones, mirrored and scaled"


def _fishing(weight: Tensor, bias: Tensor | None) -> str | None:
    classes, features = weight.norm(dim=1), weight.norm(dim=0)
    sized = [("the weights of class", classes, _FAR, 3), ("the weights of feature", features, 4 * _FAR, _FEWEST)]
    for what, sizes, far, least in sized:
        usual, most = float(sizes.median()), float(sizes.max())
        if len(sizes) >= least and most > far * max(usual, 1e-12):
            return f"{what} {int(sizes.argmax())} are {most:.3g} long, the median is {usual:.3g}"
    usual, least_size = float(classes.median()), float(classes.min())
    if len(classes) > 2 and usual > 0 and int((classes < usual / 1e3).sum()) == 1:
        return f"the weights of class {int(classes.argmin())} are {least_size:.3g} long, the median is {usual:.3g}"
    if bias is not None and len(bias) > 2:
        away = (bias - bias.median()).abs()
        first = int(away.argmax())
        if float(away[first]) > _FAR + _FAR * float(away.median()):
            return f"the bias of class {first} is {float(bias[first]):.3g}, the median is {float(bias.median()):.3g}"
    return None
