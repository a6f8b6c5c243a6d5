"""The most probable input under a Gaussian prior, searched in whitened coordinates by L-BFGS: minus the log of what an
input is worth is its misfit plus |z|^2 / 2, with x = mean + L z. In these coordinates the prior is round, and a
hundred evaluations reach what thousands do not reach on pixels.

One iteration is one evaluation. The best point of each victim is kept, so nothing is lost where a step went wrong; the
start, z = 0, is the prior's own guess, so a result is never less probable than that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.methods.base import FRAMES, Reconstruction
from gradveil.attacks.methods.gaussian_prior import GaussianPrior
from gradveil.attacks.methods.lbfgs import BatchedLBFGS
from gradveil.attacks.observation.views import Observation

Objective = Callable[[Tensor], Tensor]  # from x (V, B, *shape) to losses (V,)
LossWatch = Callable[[int, Tensor, Tensor], None]

_OUTSIDE = 0.1  # inputs are in [0, 1], and the Gaussian does not know it: the std of what may stick out
_HISTORY = 20


def posterior(prior: GaussianPrior, misfit: Objective, x: Tensor) -> Tensor:
    """Minus the log posterior of inputs (V, B, *shape), up to a constant: (V,)."""
    return misfit(x) + outside(x) + prior.energy(x)


def outside(x: Tensor) -> Tensor:
    return 0.5 * ((x - x.clamp(0.0, 1.0)) / _OUTSIDE).square().flatten(1).sum(1)


def search(
    prior: GaussianPrior, misfit: Objective, z: Tensor, *, iterations: int, watch: LossWatch | None = None
) -> Reconstruction:
    """From z (V, B, latent); ``misfit`` is minus the log likelihood."""
    victims, shape = len(z), z.shape

    def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = flat.detach().requires_grad_()
            x = prior.to_input(at.view(shape))
            loss = misfit(x) + outside(x) + 0.5 * at.square().sum(1)
            (slope,) = torch.autograd.grad(loss.sum(), at)
        return loss.detach(), slope

    optimizer = BatchedLBFGS(z.flatten(1).clone(), evaluate, inner=1, history=_HISTORY)
    kept, least = optimizer.x.clone(), torch.full((victims,), float("inf"), device=z.device)
    frames, losses = {0: prior.to_input(z)}, []
    for iteration in range(1, iterations + 1):
        before = optimizer.x.clone()
        loss = optimizer.step()
        better = loss < least
        least = torch.where(better, loss, least)
        kept = torch.where(better[:, None], before, kept)
        losses.append(least.clone())
        if watch is not None:
            watch(iteration, prior.to_input(kept.view(shape)), least)
        if iteration in FRAMES:
            frames[iteration] = prior.to_input(kept.view(shape))
        if bool((optimizer.x == before).all()):
            break
    x = prior.to_input(kept.view(shape))
    failed = ~torch.isfinite(least)
    return Reconstruction(x=x, labels=prior.labels, loss=least, losses=losses, frames=frames, failed=failed)


def only(observation: Observation, rows: Tensor) -> Observation:
    """The same of some of the victims."""
    sights = tuple(
        replace(sight, gradients={n: g[rows] for n, g in sight.gradients.items()}) for sight in observation.sights
    )
    return replace(observation, sights=sights)
