"""The attack on tables of mixed types: numbers in [0, 1], every category on its simplex (the idea of TabLeak).

The most probable rows given what was seen: candidates are clipped as the defence does, each layer is weighed by its
known noise, categories are expected as often as they are among public rows, numbers around their mean. Categories are
softmax of free numbers, and end at their likeliest value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.attacks.methods.base import Attack, Reconstruction, Watch, squared_differences
from gradveil.attacks.methods.inversion import precisions
from gradveil.attacks.methods.labels import infer_labels
from gradveil.attacks.observation.gradients import model_at
from gradveil.attacks.observation.views import Observation
from gradveil.attacks.tables import Column, groups_of
from gradveil.errors import ConfigError

_LEAST_SPREAD = 0.05


class TableAttack(Attack):
    """``columns``: what the features are, see tables.py."""

    name = "table"

    def __init__(self, columns: Sequence[Column], *, restarts: int = 4, lr: float = 0.1) -> None:
        self.columns, self.restarts, self.lr = tuple(columns), restarts, lr
        self.groups = groups_of(columns)

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        if observation.input_shape != (self.groups[-1].stop,):
            raise ConfigError(
                f"the columns have {self.groups[-1].stop} features, and an example has shape "
                f"{observation.input_shape}: give the columns that the model was trained on."
            )
        generator = torch.Generator().manual_seed(seed)
        labels = infer_labels(observation)
        shape = (observation.victims, observation.batch, *observation.input_shape)
        best, least = torch.full(shape, 0.5), torch.full((shape[0],), float("inf"))
        losses = []
        for _ in range(self.restarts):
            z = torch.randn(shape, generator=generator).to(observation.device).requires_grad_()
            optimizer = torch.optim.Adam([z], lr=self.lr)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations, self.lr / 100)
            for _ in range(iterations):
                optimizer.zero_grad()
                loss = self._loss(observation, labels, self.relaxed(z))
                loss.sum().backward()
                z.grad = torch.nan_to_num(z.grad, 0.0, 0.0, 0.0) if z.grad is not None else None
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
            with torch.no_grad():
                x = self.rounded(self.relaxed(z))
                loss = torch.nan_to_num(self._loss(observation, labels, x), nan=float("inf"))
            better = loss < least.to(loss)
            best = torch.where(better.view(-1, 1, 1), x, best.to(x))
            least = torch.where(better, loss, least.to(loss))
        failed = ~torch.isfinite(least)
        return Reconstruction(x=best, labels=labels, loss=least, losses=losses, frames={0: best.clone()}, failed=failed)

    def relaxed(self, z: Tensor) -> Tensor:
        """Free numbers as rows: categories inside their simplex, numbers in [0, 1]."""
        parts = [
            torch.softmax(z[..., group], -1) if column.values else torch.sigmoid(z[..., group])
            for column, group in zip(self.columns, self.groups, strict=True)
        ]
        return torch.cat(parts, -1)

    def rounded(self, x: Tensor) -> Tensor:
        """Every category at its likeliest value."""
        x = x.clone()
        for column, group in zip(self.columns, self.groups, strict=True):
            if column.values:
                x[..., group] = torch.nn.functional.one_hot(x[..., group].argmax(-1), column.width).to(x)
        return x

    def _loss(self, observation: Observation, labels: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for sight in observation.sights:
            made = model_at(observation, sight).released(x, labels, sight.defence)
            total = total + 0.5 * squared_differences(made, sight.gradients, precisions(sight))
        if observation.public is None:
            return total
        public = observation.public.x.to(x)
        for column, group in zip(self.columns, self.groups, strict=True):
            if column.values:
                often = (public[:, group].sum(0) + 0.5) / (len(public) + 0.5 * column.width)
                total = total - (x[..., group] * often.log()).sum((-1, -2))
            else:
                centre, spread = public[:, group].mean(), public[:, group].std().clamp(min=_LEAST_SPREAD)
                total = total + 0.5 * ((x[..., group] - centre) / spread).square().sum((-1, -2))
        return total
