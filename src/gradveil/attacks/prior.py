"""The attacker who has a list: which of these candidates is the example behind the gradient?

By likelihood, with the noise known: the strongest attacker that the theory of reconstruction has in mind, and the one
whose success the reconstruction-robustness bound limits. With n equally likely candidates, guessing succeeds in 1/n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks.attack import Attack, Reconstruction, squared_differences
from gradveil.attacks.gradients import model_at
from gradveil.attacks.inversion import precisions
from gradveil.attacks.observation import Observation
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
        """How badly each candidate fits each victim's gradients, (V, n): minus the log likelihood, up to a constant."""
        if observation.batch != 1:
            raise ConfigError("the prior attack tells single examples apart; each victim here is a batch.")
        parts = []
        for start in range(0, len(self.x), _AT_ONCE):
            x = self.x[start : start + _AT_ONCE].unsqueeze(1).to(observation.device)
            y = self.y[start : start + _AT_ONCE].unsqueeze(1).to(observation.device)
            total = torch.zeros(observation.victims, len(x), device=observation.device)
            for sight in observation.sights:
                with torch.no_grad():
                    found = model_at(observation, sight).released(x, y, sight.defence)
                weights = precisions(sight)
                for v in range(observation.victims):
                    seen = {n: g[v : v + 1] for n, g in sight.gradients.items()}
                    total[v] += 0.5 * squared_differences(found, seen, weights)
            parts.append(total)
        return torch.cat(parts, 1)

    def run(self, observation: Observation, *, iterations: int = 1, seed: int = 0) -> Reconstruction:
        scores = self.scores(observation)
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
