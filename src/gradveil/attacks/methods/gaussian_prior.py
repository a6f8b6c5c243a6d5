"""What an attacker expects of an input before looking at a gradient: Gaussians with full covariance, from public data.

Searched in whitened coordinates: x = mean + L z with L L' the covariance, so that minus the log prior is |z|^2 / 2. One
Gaussian for all classes, one mean for each class, or one Gaussian for each: whichever makes held-out public examples
most likely. A sample covariance is shrunk towards a stationary one (equal for all pairs of pixels at the same
displacement), by as much as the same held-out examples ask for; the covariance of a class towards the pooled one.
Images count mirrored too where that makes held-out ones more likely. Victims are never looked at.

Legend: n public examples, D numbers of an input, K classes, V victims, B examples of one victim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.observation.views import Public

ENOUGH = 20  # public examples; below this there is no covariance worth the name
_FULL = 4096  # numbers of an input up to which the covariance is kept whole
_MOST = 5000  # public examples that are used
_HELD_OUT = 0.15
_FLOOR = 1e-4  # variance that every direction has: a pixel that never changed may yet
_SHRINKAGE = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_TO_POOLED = (1.0, 0.5, 0.3, 0.1, 0.03)  # of a class' covariance, towards the pooled one
_CLASS_SHARE = 4  # a class with D / 4 examples may have a covariance of its own
_RANK = 500  # of the covariance where it is not kept whole


@dataclass(frozen=True)
class Component:
    """N(mean, tail I + factor factor'): ``factor`` is (D, D) and lower triangular where ``tail`` is 0."""

    mean: Tensor
    factor: Tensor
    tail: float = 0.0

    @property
    def latent(self) -> int:
        return self.factor.shape[1] + (len(self.mean) if self.tail else 0)

    def to_input(self, z: Tensor) -> Tensor:
        """(m, latent) to (m, D)."""
        rank = self.factor.shape[1]
        x = self.mean + z[:, :rank] @ self.factor.T
        return x + self.tail**0.5 * z[:, rank:] if self.tail else x

    def to_latent(self, x: Tensor) -> Tensor:
        """The shortest z that gives x: (m, D) to (m, latent)."""
        off = (x - self.mean).T
        if not self.tail:
            white: Tensor = torch.linalg.solve_triangular(self.factor, off, upper=False)
            return white.T
        rank = self.factor.shape[1]
        inner = self.factor.T @ self.factor + self.tail * torch.eye(rank).to(off)
        weights = torch.linalg.solve(inner, self.factor.T @ off)  # F' (F F' + tail I)^-1 (x - mean)
        return torch.cat([weights, (off - self.factor @ weights) / self.tail**0.5]).T


class GaussianPrior:
    """Of examples with labels (V, B): a component for every class, or one for all (key None).

    ``chosen`` says in words which it was.
    """

    def __init__(
        self, components: Mapping[int | None, Component], shape: tuple[int, ...], labels: Tensor, chosen: str
    ) -> None:
        self.shape, self.labels, self.chosen = shape, labels, chosen
        classes = labels.flatten()
        every = {
            label: torch.arange(len(classes)).to(classes) if label is None else (classes == label).nonzero()[:, 0]
            for label in components
        }
        self._parts = [(components[label], rows) for label, rows in every.items() if len(rows)]
        self._back = torch.cat([rows for _, rows in self._parts]).argsort()
        self.latent = self._parts[0][0].latent
        # Of an ordinary input, |z|^2 is about D; images have heavier tails than a Gaussian.
        self.plausible = 2.0 * labels.shape[1] * math.prod(shape)

    def to_input(self, z: Tensor) -> Tensor:
        """z (V, B, latent) to inputs (V, B, *shape)."""
        flat = z.flatten(0, 1)
        found = torch.cat([component.to_input(flat[rows]) for component, rows in self._parts])
        return found[self._back].view(*self.labels.shape, *self.shape)

    def to_latent(self, x: Tensor) -> Tensor:
        """The shortest z (V, B, latent) that gives inputs (V, B, *shape)."""
        flat = x.flatten(2).flatten(0, 1)
        found = torch.cat([component.to_latent(flat[rows]) for component, rows in self._parts])
        return found[self._back].view(*self.labels.shape, -1)

    def energy(self, x: Tensor) -> Tensor:
        """Minus the log prior of inputs (V, B, *shape), up to a constant of their labels: (V,)."""
        found: Tensor = 0.5 * self.to_latent(x).square().flatten(1).sum(1)
        return found


def fit_gaussian(public: Public, shape: tuple[int, ...], labels: Tensor) -> GaussianPrior | None:
    """The prior that the public examples allow, for victims with these labels; None where there are too few of them."""
    order = torch.randperm(len(public.x), generator=torch.Generator().manual_seed(0))[:_MOST].to(public.x.device)
    x = public.x[order].flatten(1).float()
    y = None if public.y is None else public.y[order].to(x.device)
    wanted = sorted(set(labels.flatten().tolist()))
    if len(x) < ENOUGH:
        return None
    if x.shape[1] > _FULL:
        return GaussianPrior({None: _low_rank(x)}, shape, labels, f"one Gaussian of low rank from {len(x)} examples")
    cut = len(x) - max(4, int(_HELD_OUT * len(x)))
    components, words = _fitted(x, y, _choose(x, y, cut, shape, wanted), shape, wanted)
    return GaussianPrior(components, shape, labels, f"{words} from {len(x)} examples")


@dataclass(frozen=True)
class _Choice:
    """``shrinkage`` towards the stationary covariance; every image also the other way round (``mirrored``); means
    by class; a class' covariance ``pooled`` so far."""

    shrinkage: float
    mirrored: bool = False
    by_class: bool = False
    pooled: float = 1.0


def _choose(x: Tensor, y: Tensor | None, cut: int, shape: tuple[int, ...], wanted: list[int]) -> _Choice:
    """By the likelihood of the last examples under what the first ``cut`` give."""
    train, held = x[:cut], x[cut:]
    labels = None if y is None else y[:cut]
    shrinkage, best = _shrink(_covariance(train - train.mean(0)), held - train.mean(0), shape)
    choice = _Choice(shrinkage)
    if len(shape) == 3:  # faces and things are as likely the other way round, digits are not
        both = torch.cat([train, _mirrored(train, shape)])
        shrinkage, found = _shrink(_covariance(both - both.mean(0)), held - both.mean(0), shape)
        if found > best:
            choice, best, train = _Choice(shrinkage, mirrored=True), found, both
            labels = None if labels is None else torch.cat([labels, labels])
    counts = None if labels is None else torch.bincount(labels, minlength=max(wanted) + 1)
    if y is None or labels is None or counts is None or min(int(counts[c]) for c in wanted) < ENOUGH:
        return choice
    means = _means(train, labels, int(y.max()) + 1)
    within = _covariance(train - means[labels])
    shrunk, found = _shrink(within, held - means[y[cut:]], shape)
    if found > best:
        choice = replace(choice, shrinkage=shrunk, by_class=True)
    if min(int(counts[c]) for c in wanted) < x.shape[1] // _CLASS_SHARE:
        return choice
    target = _shrunk(within, shrunk, shape)
    before = float("-inf")
    for pooled in _TO_POOLED:
        total = 0.0
        for c in wanted:
            own = _covariance(train[labels == c] - means[c])
            total += _likelihood((1 - pooled) * own + pooled * target, held[y[cut:] == c] - means[c])[0]
        if total <= before:
            break
        before = total
        if pooled < 1.0:
            choice = replace(choice, shrinkage=shrunk, by_class=True, pooled=pooled)
    return choice


def _fitted(
    x: Tensor, y: Tensor | None, choice: _Choice, shape: tuple[int, ...], wanted: list[int]
) -> tuple[dict[int | None, Component], str]:
    """All public examples, as was chosen on some of them; and that in words."""
    if choice.mirrored:
        x, y = torch.cat([x, _mirrored(x, shape)]), None if y is None else torch.cat([y, y])
    if y is None or not choice.by_class:
        mean = x.mean(0)
        factor = _factor(_shrunk(_covariance(x - mean), choice.shrinkage, shape))
        return {None: Component(mean, factor)}, "one Gaussian"
    means = _means(x, y, int(y.max()) + 1)
    target = _shrunk(_covariance(x - means[y]), choice.shrinkage, shape)
    if choice.pooled == 1.0:
        factor = _factor(target)
        return {c: Component(means[c], factor) for c in wanted}, "a mean for each class and one covariance"
    found: dict[int | None, Component] = {}
    for c in wanted:
        own = _covariance(x[y == c] - means[c])
        found[c] = Component(means[c], _factor((1 - choice.pooled) * own + choice.pooled * target))
    return found, "a Gaussian for each class"


def _mirrored(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.view(-1, *shape).flip(-1).flatten(1)


def _means(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """The mean of every class (K, D); of a class without examples, that of all."""
    return torch.stack([x[y == c].mean(0) if bool((y == c).any()) else x.mean(0) for c in range(classes)])


def _covariance(off: Tensor) -> Tensor:
    return off.T @ off / len(off)


def _shrink(covariance: Tensor, held: Tensor, shape: tuple[int, ...]) -> tuple[float, float]:
    """The shrinkage with the greatest likelihood of held-out differences from the mean, and that likelihood."""
    target = _stationary(covariance, shape)
    best, at = float("-inf"), _SHRINKAGE[-1]
    falls = False
    for weight in _SHRINKAGE:
        found, proper = _likelihood((1 - weight) * covariance + weight * target, held)
        if found > best:
            best, at = found, weight
        elif proper and falls:
            break
        falls = proper and found < best
    return at, best


def _shrunk(covariance: Tensor, weight: float, shape: tuple[int, ...]) -> Tensor:
    return (1 - weight) * covariance + weight * _stationary(covariance, shape) if weight else covariance


def _stationary(covariance: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The covariance averaged over all pairs of pixels with the same displacement; of rows, over the diagonal alone.

    Pairs of which one lies outside count as 0, which keeps it positive.
    """
    if len(shape) != 3:
        return covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    channels, height, width = shape
    down, right = torch.arange(height), torch.arange(width)
    rows = (down[None, :] - down[:, None] + height - 1).view(height, 1, height, 1)
    columns = (right[None, :] - right[:, None] + width - 1).view(1, width, 1, width)
    index = (rows * (2 * width - 1) + columns).flatten().to(covariance.device)
    of = covariance.view(channels, height, width, channels, height, width)
    found = torch.empty_like(of)
    for a in range(channels):
        for b in range(channels):
            sums = covariance.new_zeros((2 * height - 1) * (2 * width - 1)).index_add_(
                0, index, of[a, :, :, b].flatten()
            )
            found[a, :, :, b] = (sums / (height * width))[index].view(height, width, height, width)
    return found.view_as(covariance)


def _with_floor(covariance: Tensor) -> Tensor:
    return covariance + _FLOOR * torch.eye(len(covariance)).to(covariance)


def _likelihood(covariance: Tensor, off: Tensor) -> tuple[float, bool]:
    """The mean log density of differences (n, D) from the mean, up to a constant; whether the covariance is proper."""
    factor, info = torch.linalg.cholesky_ex(_with_floor(covariance))
    if int(info) or not len(off):
        return float("-inf"), False
    white = torch.linalg.solve_triangular(factor, off.T, upper=False)
    return float(-0.5 * white.square().sum(0).mean() - factor.diagonal().log().sum()), True


def _factor(covariance: Tensor) -> Tensor:
    """L with L L' the covariance and a floor, which is raised where float32 does not resolve it."""
    lifted = _with_floor(covariance)
    for _ in range(6):
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(lifted)
        if not int(info):
            return factor
        lifted = lifted + 10.0 * _FLOOR * torch.eye(len(lifted)).to(lifted)
    return torch.diag(lifted.diagonal().clamp(min=_FLOOR).sqrt())


def _low_rank(x: Tensor) -> Component:
    """The first directions of variance; in all others, what held-out examples have outside them."""
    cut = len(x) - max(4, int(_HELD_OUT * len(x)))
    mean = x[:cut].mean(0)
    off, held = x[:cut] - mean, x[cut:] - mean
    rank = min(_RANK, cut - 1)
    values, vectors = torch.linalg.eigh(off @ off.T / cut)
    values, vectors = values[-rank:].clamp(min=1e-12), vectors[:, -rank:]
    directions = off.T @ vectors / (cut * values).sqrt()
    outside = held - (held @ directions) @ directions.T
    tail = max(_FLOOR, float(outside.square().mean()))
    return Component(mean, directions * (values - tail).clamp(min=0.0).sqrt(), tail)
