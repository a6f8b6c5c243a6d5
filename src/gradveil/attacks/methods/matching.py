"""Attacks that match the gradient in the l2 norm by L-BFGS. They take it as it is: they know of no clipping or noise.

    cpl    the paper's: from a patterned seed, the label read from the last layer first
    idlg   the same from a random start (Zhao et al. 2020)
    dlg    input and label found jointly, from random starts (Zhu et al. 2019)

One iteration is one outer step of L-BFGS, of 20 evaluations at most.

An example that the model gets right has a small gradient, and the slightest change of the input changes all of it. Two
things would end its descent far too early: the thresholds of L-BFGS, which are absolute, so the loss of a small
gradient is scaled up; and the digits of float32, so gradients are matched in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.methods.base import FRAMES, Attack, Reconstruction, Watch, squared_differences
from gradveil.attacks.methods.labels import infer_labels
from gradveil.attacks.methods.lbfgs import BatchedLBFGS
from gradveil.attacks.observation.gradients import Gradients, VictimGradients, model_at
from gradveil.attacks.observation.views import Observation, StepObservation
from gradveil.attacks.seeds import start_of

_STALLED = 10  # iterations without a change, after which a victim is left as it is
_DONE = 1e-12  # a loss that is zero to float32
_ORDINARY = 1000.0  # the squared norm of an untrained network's gradient, if it gets the example wrong

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

    def _gradients(self, model: VictimGradients, x: Tensor, y: Tensor, sight: StepObservation) -> Gradients:
        """What the attacker expects to see of these inputs."""
        return model.of_batch(x, y)

    def _sights(self, observation: Observation) -> tuple[StepObservation, ...]:
        """The steps that are matched: of several, the first, for these attacks were published for one gradient."""
        return observation.sights[:1]

    def _scale(self, sight: StepObservation) -> Tensor:
        """What each victim's loss is multiplied by at one step, (V,): 1 where the gradient is not small."""
        return (_ORDINARY / _squared_norms(sight)).clamp(min=1.0)

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
        precise = _in_double(observation)
        known = [(model_at(precise, s), s, self._scale(s)) for s in self._sights(precise)]
        rows = everyone = torch.arange(victims, device=device)  # which victims are still worked on
        going = torch.ones(victims, dtype=torch.bool, device=device)  # which of these rows have not ended

        def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                wide = flat.detach().to(known[0][2].dtype).requires_grad_()
                x, y = unpack(wide, rows)
                parts = []
                for model, sight, scale in known:
                    seen = {name: g[rows] for name, g in sight.gradients.items()}
                    parts.append(scale[rows] * squared_differences(self._gradients(model, x, y, sight), seen))
                loss = torch.stack(parts).sum(0)
                (gradient,) = torch.autograd.grad(loss.sum(), wide)
            return loss.detach().to(flat.dtype), gradient.to(flat.dtype)

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


def _squared_norms(sight: StepObservation) -> Tensor:
    squares = torch.stack([g.square().flatten(1).sum(1) for g in sight.gradients.values()]).sum(0)
    return squares.clamp(min=1e-20)


def _in_double(observation: Observation) -> Observation:
    """The same in float64; as it is where the model does not run in that, such as one that casts its input itself."""

    def wide(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}

    sights = tuple(replace(s, gradients=wide(s.gradients), weights=wide(s.weights)) for s in observation.sights)
    found = replace(observation, module=copy.deepcopy(observation.module).double(), sights=sights)
    grey = torch.full((1, 1, *observation.input_shape), 0.5, dtype=torch.float64, device=observation.device)
    try:
        model_at(found, sights[0]).of_batch(grey, torch.zeros(1, 1, dtype=torch.int64, device=grey.device))
    except RuntimeError:
        return observation
    return found


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

    def _sights(self, observation: Observation) -> tuple[StepObservation, ...]:
        return observation.sights

    def _gradients(self, model: VictimGradients, x: Tensor, y: Tensor, sight: StepObservation) -> Gradients:
        return model.released(x, y, sight.defence)

    def _scale(self, sight: StepObservation) -> Tensor:
        """A clipped gradient is as small as its bound; the thresholds of L-BFGS are for losses of ordinary size."""
        return 100.0 / _squared_norms(sight)
