"""What every attack is: from an observation, a number of iterations and a seed to reconstructions and their history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.observation.views import Observation

Watch = Callable[[int, Tensor], None]
"""Told the iteration and the reconstructions (V, B, *shape) as they are then. Whoever knows the truth may look on; the
attack is told nothing in return."""

FRAMES = (0, 1, 5, 10, 20, 50, 100, 300)  # iterations at which a reconstruction is kept, to be shown


@dataclass(kw_only=True)
class Reconstruction:
    """What an attack made of every victim, by its own judgement: it has not seen the truth.

    ``losses`` and ``frames`` are of the attempt that was chosen among several, by the attack's own loss.
    """

    x: Tensor  # (V, B, *shape), not clamped
    labels: Tensor  # (V, B)
    loss: Tensor  # (V,): the attack's own, at the end
    losses: list[Tensor]  # (V,) after each iteration
    frames: dict[int, Tensor]  # by iteration: (V, B, *shape)
    failed: Tensor  # (V,): ended in numbers that are not finite
    attempts: tuple[Tensor, ...] = ()  # (V, B, *shape) of each attempt, where there were several
    facts: Mapping[str, float] = field(default_factory=dict)


class Attack:
    """One way to reconstruct inputs from gradients: ``reconstruct``. Settings are its attributes; it keeps no state."""

    name: str

    def run(
        self, observation: Observation, *, iterations: int = 300, seed: int = 0, watch: Watch | None = None
    ) -> Reconstruction:
        with full_precision():
            return self.reconstruct(observation, iterations=iterations, seed=seed, watch=watch)

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        raise NotImplementedError


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 numbers as such. On a GPU torch rounds those of convolutions to ten bits unless told not to,
    and gradients that are right to three digits cannot be matched any closer."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def squared_differences(
    found: Mapping[str, Tensor], seen: Mapping[str, Tensor], weights: Mapping[str, float | Tensor] | None = None
) -> Tensor:
    """Sum over parameters of squared differences (V,), each weighted by a number or by one for every coordinate."""
    parts = []
    for name, gradient in seen.items():
        part = (found[name] - gradient).square()
        weight = 1.0 if weights is None else weights[name]
        if isinstance(weight, Tensor):
            parts.append((weight * part).flatten(1).sum(1))
        else:
            parts.append(weight * part.flatten(1).sum(1))
    return torch.stack(parts).sum(0)
