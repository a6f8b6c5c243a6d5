"""Attacks that match the gradient in the l2 norm by L-BFGS. They take it as it is: they know of no clipping or noise.

    cpl    the paper's: from a patterned seed, the label read from the last layer first
    idlg   the same from a random start (Zhao et al. 2020)
    dlg    input and label found jointly, from random starts (Zhu et al. 2019)

One iteration is one outer step of L-BFGS, of 20 evaluations at most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.attacks.attack import FRAMES, Attack, Reconstruction, Watch, squared_differences
from gradveil.attacks.gradients import Gradients, VictimGradients, model_at
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.lbfgs import BatchedLBFGS
from gradveil.attacks.observation import Observation, Sight
from gradveil.attacks.seeds import start_of

_STALLED = 10  # iterations without a change, after which a victim is left as it is
_DONE = 1e-12  # a loss that is zero to float32

Unpack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From numbers (v, D) and which victims they are of to inputs (v, B, *shape) and labels."""


class _Matching(Attack):
    start = "random"

    def __init__(self, *, start: str | None = None, image: Tensor | None = None, inner: int = 20) -> None:
        self.start, self.image, self.inner = start or type(self).start, image, inner

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        generator = torch.Generator().manual_seed(seed)
        x = start_of(observation, self.start, generator, image=self.image)
        numbers, unpack = self._unknowns(observation, x, generator)
        return self._descend(observation, numbers, unpack, x.shape, iterations, watch)

    def _gradients(self, model: VictimGradients, x: Tensor, y: Tensor, sight: Sight) -> Gradients:
        """What the attacker expects to see of these inputs."""
        return model.of_batch(x, y)

    def _sights(self, observation: Observation) -> tuple[Sight, ...]:
        """The steps that are matched: of several, the first, for these attacks were published for one gradient."""
        return observation.sights[:1]

    def _scale(self, sight: Sight) -> Tensor:
        """What each victim's loss is multiplied by at one step, (V,)."""
        first = next(iter(sight.gradients.values()))
        return torch.ones(len(first), dtype=first.dtype, device=first.device)

    def _unknowns(self, observation: Observation, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Unpack]:
        """What is searched for, as one row of numbers per victim; here the input, its labels being known."""
        labels = infer_labels(observation)

        def unpack(numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return numbers.view(-1, *x.shape[1:]), labels[rows]

        return x.flatten(1), unpack

    def _descend(
        self,
        observation: Observation,
        numbers: Tensor,
        unpack: Unpack,
        shape: torch.Size,
        iterations: int,
        watch: Watch | None,
    ) -> Reconstruction:
        device, victims = observation.device, observation.victims
        known = [(model_at(observation, s), s, self._scale(s)) for s in self._sights(observation)]
        rows = everyone = torch.arange(victims, device=device)  # which victims are still worked on
        going = torch.ones(victims, dtype=torch.bool, device=device)  # which of these rows have not ended

        def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                flat = flat.detach().requires_grad_()
                x, y = unpack(flat, rows)
                parts = []
                for model, sight, scale in known:
                    seen = {name: g[rows] for name, g in sight.gradients.items()}
                    parts.append(scale[rows] * squared_differences(self._gradients(model, x, y, sight), seen))
                loss = torch.stack(parts).sum(0)
                (gradient,) = torch.autograd.grad(loss.sum(), flat)
            return loss.detach(), gradient

        optimizer = BatchedLBFGS(numbers.clone(), evaluate, inner=self.inner)
        final, last = numbers.clone(), torch.full((victims,), float("inf"), device=device)
        frames, losses = {0: unpack(final, everyone)[0].clone()}, []
        unchanged = torch.zeros(victims, dtype=torch.int64, device=device)
        for iteration in range(1, iterations + 1):
            before = optimizer.x.clone()
            loss = optimizer.step(going)
            final[rows] = optimizer.x
            still = (optimizer.x == before).all(1) | ~torch.isfinite(loss)
            unchanged[rows] = torch.where(still, unchanged[rows] + 1, 0)
            last[rows] = torch.where(torch.isfinite(loss), loss, last[rows])
            losses.append(last.clone())
            if watch is not None:
                watch(iteration, unpack(final, everyone)[0])
            if iteration in FRAMES:
                frames[iteration] = unpack(final, everyone)[0].clone()
            going &= (unchanged[rows] < _STALLED) & ~(loss <= _DONE)
            left = int(going.sum())
            if not left:
                break
            # Fewer rows are less work, but other shapes are other graphs.
            if left <= len(rows) // 2 or (left < len(rows) and device.type != "cuda"):
                optimizer.keep(going)
                rows, going = rows[going], going[going]
        x, labels = unpack(final, everyone)
        failed = ~torch.isfinite(final).all(1) | ~torch.isfinite(last)
        classes = labels if labels.dim() == 2 else labels.argmax(2)
        return Reconstruction(x=x.view(shape), labels=classes, loss=last, losses=losses, frames=frames, failed=failed)


class CPL(_Matching):
    """``start``: see seeds.py; the paper's is "half"."""

    name = "cpl"
    start = "half"


class IDLG(_Matching):
    name = "idlg"


class DLG(_Matching):
    """Labels are searched for as probabilities, the softmax of free numbers."""

    name = "dlg"

    def _unknowns(self, observation: Observation, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Unpack]:
        size = x[0].numel()
        logits = torch.randn(*x.shape[:2], observation.classes, generator=generator).to(x)

        def unpack(numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            free = numbers[:, size:].reshape(-1, *logits.shape[1:])
            return numbers[:, :size].reshape(-1, *x.shape[1:]), torch.softmax(free, 2)

        return torch.cat([x.flatten(1), logits.flatten(1)], 1), unpack


class ClipAwareMatching(_Matching):
    """CPL that clips its own gradient as the defence does, at every step that is seen: part of map, without noise."""

    name = "clip-aware matching"
    start = "half"

    def _sights(self, observation: Observation) -> tuple[Sight, ...]:
        return observation.sights

    def _gradients(self, model: VictimGradients, x: Tensor, y: Tensor, sight: Sight) -> Gradients:
        return model.released(x, y, sight.defence)

    def _scale(self, sight: Sight) -> Tensor:
        """A clipped gradient is as small as its bound; the thresholds of L-BFGS are for losses of ordinary size."""
        squares = torch.stack([g.square().flatten(1).sum(1) for g in sight.gradients.values()]).sum(0)
        return 100.0 / squares.clamp(min=1e-20)
