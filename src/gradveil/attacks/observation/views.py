"""What an adversary sees of a training step, and nothing more.

An :class:`Observation` holds the gradient, the weights it was taken at, and what is public about how it was released.
The examples themselves are in a :class:`GroundTruth`, which attacks are never given: it is for scoring only.

Legend: V victims (independent gradients that are attacked side by side), B examples behind one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.clipping.clip_factors import Whitening
from gradveil.clipping.groups import Group
from gradveil.errors import ConfigError, UnknownNameError

VIEWS = ("per-example", "per-example-noised", "batch")


@dataclass(frozen=True, kw_only=True)
class ReleaseParams:
    """What is public about a released gradient. Lists run over ``groups``; None: not clipped, not noised.

    With ``whitening`` (adaclip), a gradient g is clipped as (g - m) / b, the noise on a coordinate is ``noise_std``
    times its b, and m is added to what is seen.
    """

    groups: tuple[Group, ...]
    clip: tuple[float, ...] | None = None  # every example's gradient was scaled down to this norm
    noise_std: tuple[float, ...] | None = None  # of the noise on the gradient that is seen, after its division
    normaliser: float = 1.0  # what the sum over examples was divided by
    strategy: str = "non-private"
    sensitivity_rule: str | None = None
    whitening: Whitening | None = None  # by parameter: centre m and scale b of its coordinates
    gamma: float | None = None  # where given, gradients were normalised: clip * g / (|g| + gamma)
    side_inverse_square: float = 0.0  # what is released beside the gradient (counts) adds to 1/z^2 of the step

    def __post_init__(self) -> None:
        for name in ("clip", "noise_std"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.groups):
                raise ConfigError(f"{name} has {len(values)} values for {len(self.groups)} groups.")

    def of_parameter(self, values: Sequence[float]) -> dict[str, float]:
        """A value per group as a value per parameter."""
        return {name: v for group, v in zip(self.groups, values, strict=True) for name in group.parameters}

    def noise_of_parameter(self) -> dict[str, float | Tensor] | None:
        """The std of the noise on each parameter's gradient, a number or one for every coordinate; None: no noise."""
        if self.noise_std is None:
            return None
        stds = self.of_parameter(self.noise_std)
        if self.whitening is None:
            return dict(stds)
        return {name: std * self.whitening[name][1] for name, std in stds.items()}


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """What a client did before its update was seen: SGD for some steps (FedAvg), and how its examples were used.

    ``batch``: examples of a step, in turn; None: all of them in every step.
    """

    steps: int
    lr: float
    momentum: float = 0.0
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or (self.batch is not None and self.batch < 1):
            raise ConfigError(f"{self.steps} local steps of {self.batch} examples; give at least 1.")
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"the local learning rate is {self.lr!r} and momentum {self.momentum!r}; give a positive rate and a "
                "momentum of at least 0 and below 1."
            )

    @property
    def scale(self) -> float:
        """By what an update is divided to be like a gradient: the sum of its gradients' weights."""
        total = velocity = 0.0
        for _ in range(self.steps):
            velocity = self.momentum * velocity + 1.0
            total += velocity
        return self.lr * total


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """One step: gradients (V, *shape) per parameter, at one state of the model.

    With ``local``, updates of several steps that a client made from that state, divided by ``local.scale``.
    """

    step: int
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    defence: ReleaseParams
    local: LocalSteps | None = None


@dataclass(frozen=True)
class Public:
    """Examples of the same kind that anyone may have: inputs (n, *shape) and, where they are known, labels (n)."""

    x: Tensor
    y: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that an attack is given. Inputs are known to lie in [0, 1].

    Several sights are of several steps with the same examples behind each: what they tell adds up.
    """

    module: nn.Module  # its architecture; weights are those of each sight
    sights: tuple[StepObservation, ...]
    input_shape: tuple[int, ...]
    classes: int
    batch: int = 1
    public: Public | None = None  # what the adversary knows of such data beforehand

    def __post_init__(self) -> None:
        if not self.sights:
            raise ConfigError("an observation without a single step: there is nothing to attack.")
        names = {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}
        for sight in self.sights:
            _check_fit(names, sight, self.victims)

    @property
    def victims(self) -> int:
        return len(next(iter(self.sights[0].gradients.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.sights[0].gradients.values())).device


def _check_fit(shapes: Mapping[str, torch.Size], sight: StepObservation, victims: int) -> None:
    for name, shape in shapes.items():
        gradient = sight.gradients.get(name)
        if gradient is None:
            raise UnknownNameError("parameter of the model without a gradient:", name, sight.gradients)
        if gradient.shape[1:] != shape or len(gradient) != victims:
            raise ConfigError(
                f"the gradient of {name!r} has shape {tuple(gradient.shape)}; for this model and {victims} victim(s) "
                f"it is {(victims, *shape)}: model and gradients do not belong together."
            )
        if not bool(torch.isfinite(gradient).all()):
            raise ConfigError(
                f"the gradient of {name!r} has values that are not finite: nothing can be matched to them. Leave out "
                "the victims whose gradients are not finite."
            )
        if name not in sight.weights or sight.weights[name].shape != shape:
            raise ConfigError(f"the observed weights of {name!r} are missing or of another shape than the model's.")
    strange = [name for name in sight.gradients if name not in shapes]
    if strange:
        raise UnknownNameError("gradient", strange[0], shapes)


@dataclass(frozen=True)
class GroundTruth:
    """The examples behind an observation: inputs (V, B, *shape) and labels (V, B). Never given to an attack."""

    x: Tensor
    y: Tensor
