"""The attacker who has a list: which of these candidates is the example behind the gradient?

By likelihood, with the noise known: the strongest attacker that the theory of reconstruction has in mind, and the one
whose success the reconstruction-robustness bound limits. With n equally likely candidates, guessing succeeds in 1/n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks.methods.base import Attack, Reconstruction, Watch
from gradveil.attacks.methods.inversion import precisions
from gradveil.attacks.observation.gradients import model_at
from gradveil.attacks.observation.views import Observation, StepObservation
from gradveil.errors import ConfigError

_AT_ONCE = 256


class Prior(Attack):
    """``x`` (n, *shape) and ``y`` (n): the candidates, one of which is each victim."""

    name = "prior"

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if len(x) != len(y) or not len(x):
            raise ConfigError(f"{len(x)} candidates with {len(y)} labels; give at least one, each with its label.")
        self.x, self.y = x, y

    def scores(self, observation: Observation) -> Tensor:
        """How badly each candidate fits each victim's gradients, (V, n): minus the log likelihood, up to a constant.

        All steps that are seen count together.
        """
        if observation.batch != 1:
            raise ConfigError("the prior attack tells single examples apart; each victim here is a batch.")
        parts = []
        for start in range(0, len(self.x), _AT_ONCE):
            x = self.x[start : start + _AT_ONCE].unsqueeze(1).to(observation.device)
            y = self.y[start : start + _AT_ONCE].unsqueeze(1).to(observation.device)
            fits = [_misfit(observation, sight, x, y) for sight in observation.sights]
            parts.append(torch.stack(fits).sum(0))
        return torch.cat(parts, 1)

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        scores = self.scores(observation)
        scores = torch.where(torch.isnan(scores), float("inf"), scores)  # a candidate without a gradient is not it
        best = scores.argmin(1).cpu()
        x = self.x[best].unsqueeze(1).to(observation.device)
        loss = scores.amin(1)
        return Reconstruction(
            x=x,
            labels=self.y[best].unsqueeze(1).to(observation.device),
            loss=loss,
            losses=[loss],
            frames={0: x.clone()},
            failed=~torch.isfinite(loss),
        )


def _misfit(observation: Observation, sight: StepObservation, x: Tensor, y: Tensor) -> Tensor:
    """Half the weighted squared distance of every candidate's gradient from every victim's, (V, n)."""
    with torch.no_grad():
        found = model_at(observation, sight).released(x, y, sight.defence)
    total = torch.zeros(observation.victims, len(x), dtype=torch.float64, device=x.device)
    for name, precision in precisions(sight).items():
        root = torch.as_tensor(precision).to(found[name]).sqrt()
        ours, theirs = (found[name] * root).flatten(1), (sight.gradients[name] * root).flatten(1)
        centre = ours.nanmean(0)  # taken off both: then little cancels in the difference of squares
        ours, theirs = ours - centre, theirs - centre
        squares = theirs.square().sum(1, keepdim=True) + ours.square().sum(1)
        total += 0.5 * (squares - 2.0 * theirs @ ours.T).clamp(min=0.0)
    return total
