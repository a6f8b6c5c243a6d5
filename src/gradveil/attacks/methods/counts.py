"""How many examples of each class a batch has, from the gradient of its last layer.

With cross entropy an example of class c with features h and softmax output p gives the last layer's weight the gradient
(p - e_c) h' and its bias p - e_c. A batch's gradient is linear in the counts n_c, given what an example of each class
gives on average. The literature (Zhao et al. 2020 for one example; Wainakh et al. 2022, "LLG", and Ma et al. 2023 for
batches) reads the counts off the bias, or off the sums of the weight's rows, with the average output estimated from the
model itself at inputs the attacker has, or at random ones. So here, with two numbers for every class, the bias'
gradient and the weight's along the average features, each clipped as the defence does: a regression, weighted by how
much examples of one class differ, by the known noise and by how counts spread when labels are drawn, with counts that
are not negative and add up to the batch.

Legend: V victims, K classes, S = 2K (or K) statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from gradveil.attacks.observation.gradients import Gradients, clip_groups, model_at
from gradveil.attacks.observation.views import Observation, ReleaseParams, StepObservation

_RANDOM = 48  # random inputs, each with every label, where the attacker has no examples
_PUBLIC = 2000  # public examples that are looked at
_FEW = 5  # public examples of a class, below which those of all classes stand in, with its label
_AT_ONCE = 256
_RIDGE = 1e-6
_SUM_WEIGHT = 1e4  # of the constraint that counts add up, against rows of about unit variance


@dataclass(frozen=True)
class _Layer:
    """The last layer of one sight; ``along`` (features) is what its weight's rows are projected on."""

    name: str
    has_bias: bool
    along: Tensor

    def statistics(self, gradients: Gradients) -> Tensor:
        """(..., S) of gradients (..., *P)."""
        found = gradients[f"{self.name}.weight"] @ self.along
        if not self.has_bias:
            return found
        return torch.cat([gradients[f"{self.name}.bias"], found], -1)

    def noise(self, defence: ReleaseParams, classes: int) -> Tensor:
        """The variance of the noise on each statistic, (S,)."""
        stds = defence.noise_of_parameter()
        size = (2 if self.has_bias else 1) * classes
        if stds is None:
            return torch.zeros(size, dtype=torch.float64)
        shape = (classes, len(self.along))
        weight = torch.as_tensor(stds[f"{self.name}.weight"]).to(self.along).expand(shape)
        found = weight.square() @ self.along.square()
        if self.has_bias:
            bias = torch.as_tensor(stds[f"{self.name}.bias"]).to(self.along).expand(classes)
            found = torch.cat([bias.square(), found])
        return found.double().cpu()


def label_counts(observation: Observation, layer: str) -> Tensor:
    """Counts (V, K) of whole numbers that add up to the batch, from all sights. ``layer``: the one with the logits.

    Where the model's gradients are not finite, nothing is known and the counts are those that are expected anyway.
    """
    rows, targets = [], []
    for sight in observation.sights:
        a, b = _equations(observation, sight, layer)
        rows.append(a)
        targets.append(b)
    matrix, target = np.concatenate(rows), np.concatenate(targets, 1)
    drawn = observation.batch * _frequencies(observation)  # expected counts, and about their variances
    matrix = np.concatenate([matrix, np.diag(drawn**-0.5), np.full((1, observation.classes), _SUM_WEIGHT)])
    known = [*drawn**0.5, _SUM_WEIGHT * observation.batch]
    found = [_whole(_fit(matrix, np.append(seen, known), drawn), observation.batch) for seen in target]
    return torch.as_tensor(np.stack(found), device=observation.device)


def expected_counts(observation: Observation) -> Tensor:
    """The counts (K) that the attacker would guess without looking at a gradient."""
    found = _whole(_frequencies(observation), observation.batch)
    return torch.as_tensor(found, device=observation.device)


def _frequencies(observation: Observation) -> np.ndarray:
    """How often the attacker expects each class: as often as it has seen it, or all alike."""
    if observation.public is None or observation.public.y is None:
        return np.full(observation.classes, 1.0 / observation.classes)
    held = torch.bincount(observation.public.y.cpu(), minlength=observation.classes).double().numpy() + 1.0
    return np.asarray(held / held.sum())


def _fit(matrix: np.ndarray, wanted: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Least squares without negative numbers; what is expected anyway where there are none."""
    if not (np.isfinite(matrix).all() and np.isfinite(wanted).all()):
        return drawn
    try:
        counts = np.asarray(nnls(matrix, wanted)[0])
    except RuntimeError:  # no end within its iterations
        return drawn
    return counts if counts.sum() > 0 else drawn


def _whole(counts: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion that add up to ``total``: the largest remainders are rounded up."""
    exact = counts * (total / counts.sum())
    found = np.floor(exact).astype(np.int64)
    missing = total - int(found.sum())
    found[np.argsort(found - exact, kind="stable")[:missing]] += 1
    return np.asarray(found)


def _equations(observation: Observation, sight: StepObservation, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A (S, K) and b (V, S), so that A n is b up to errors of unit variance."""
    layer, samples, classes = _samples(observation, sight, name)
    averages = torch.stack([samples[classes == c].mean(0) for c in range(observation.classes)], 1)
    within = samples - averages.T[classes]
    defence = sight.defence
    covariance = within.T @ within / len(within) * (observation.batch / defence.normaliser**2)
    covariance += torch.diag(layer.noise(defence, observation.classes))
    covariance += (_RIDGE * covariance.diagonal().mean() + 1e-30) * torch.eye(len(covariance))
    seen = {n: sight.gradients[f"{name}.{n}"] for n in ("weight", "bias") if f"{name}.{n}" in sight.gradients}
    if defence.whitening is not None:
        seen = {n: g - defence.whitening[f"{name}.{n}"][0] for n, g in seen.items()}
    statistics = layer.statistics({f"{name}.{n}": g for n, g in seen.items()}).double().cpu()
    if not bool(torch.isfinite(covariance).all()):
        blank = np.full(averages.shape, np.nan)
        return blank, np.full(statistics.shape, np.nan)
    values, vectors = torch.linalg.eigh(covariance)
    whiten = vectors.T / values.clamp(min=1e-30).sqrt().unsqueeze(1)
    return (whiten @ averages / defence.normaliser).numpy(), (statistics @ whiten.T).numpy()


def _samples(observation: Observation, sight: StepObservation, name: str) -> tuple[_Layer, Tensor, Tensor]:
    """What single examples give: the layer with its direction, statistics (n, S) and their classes (n)."""
    model = model_at(observation, sight)
    x, y = _inputs(observation)
    along: Tensor | None = None
    kept: list[Gradients] = []
    for part in _parts(len(x)):
        with torch.no_grad():
            gradients = model.per_example(x[part].unsqueeze(1), y[part].unsqueeze(1))
            if sight.defence.clip is not None:
                gradients = clip_groups(gradients, sight.defence)
        kept.append({n: g.squeeze(1) for n, g in gradients.items() if n.rpartition(".")[0] == name})
    last = {n: torch.cat([g[n] for g in kept]) for n in kept[0]}
    weight = last[f"{name}.weight"]
    # The row of the label is - (1 - p) h: features, as large as the gradient makes them.
    own = -weight[torch.arange(len(y), device=y.device), y]
    along = own.mean(0)
    along = along / along.norm().clamp(min=1e-30)
    layer = _Layer(name, f"{name}.bias" in last, along)
    return layer, layer.statistics(last).double().cpu(), y.cpu()


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE))


def _inputs(observation: Observation) -> tuple[Tensor, Tensor]:
    """Inputs and labels that are looked at: public examples, or random inputs with every label."""
    classes, device, public = observation.classes, observation.device, observation.public
    if public is None:
        random = torch.rand(_RANDOM, *observation.input_shape, generator=torch.Generator().manual_seed(0)).to(device)
        return _with_every_label(random, list(range(classes)))
    x = public.x[:_PUBLIC].to(device)
    if public.y is None:
        return _with_every_label(x[:_RANDOM], list(range(classes)))
    y = public.y[:_PUBLIC].to(device)
    held = torch.bincount(y, minlength=classes)
    rare = [c for c in range(classes) if int(held[c]) < _FEW]
    more_x, more_y = _with_every_label(x[:_RANDOM], rare)
    return torch.cat([x, more_x]), torch.cat([y, more_y])


def _with_every_label(x: Tensor, classes: list[int]) -> tuple[Tensor, Tensor]:
    labels = torch.tensor(classes, dtype=torch.int64, device=x.device)
    return x.repeat(len(classes), *[1] * (x.dim() - 1)), labels.repeat_interleave(len(x))
