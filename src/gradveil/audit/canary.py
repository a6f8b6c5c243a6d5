"""The game behind every audit: a live private run, one canary in its data, and an auditor who looks at each release.

The run is a real one: :class:`~gradveil.PrivacyEngine` with its own loader, clipping, noise and ledger. At each step a
coin says whether the canary takes part. The auditor chooses the data; it knows every example, the weights and the code,
and sees what is released. Only the coin and the noise are hidden. So it takes off what the other examples contribute,
and looks in two ways at what is left:

    matched filter   what is left, along the canary's own contribution, in standard deviations of the noise
    noise scale      how large what is left is, across the canary, against what the strategy would have added

The canary is one of gradients, not of inputs: its loss weighs so much that its gradient is clipped in every group, and
should the model learn its label, it gets another. So it does not fade. The losses of the others are weighed down until
no gradient is longer than ``calm`` times C_0: one example stands out, and noise that follows the data tells most.
Differential privacy is a promise for any data, chosen anew at every step if need be.

Nothing of the engine's clipping is used to say what should have been released: per-example gradients come from
torch.func, as in the attacks, and are clipped by the attacks' own code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gradveil.attacks.observation.gradients import Gradients, VictimGradients, clip_groups
from gradveil.attacks.observation.views import ReleaseParams
from gradveil.audit.bounds import Array, Coins
from gradveil.clipping import ClipStats
from gradveil.engine import PrivacyEngine
from gradveil.errors import ConfigError
from gradveil.mechanism.noise.streams import NoiseSource, SecretKey
from gradveil.mechanism.records import Release, RunHeader
from gradveil.mechanism.release import StepFacts, noise_scale

_LOUD = 10.0  # how much longer than C_0 the canary's gradient is made, at least, in every group
_LEARNED = 0.99  # a label of this chance has next to no gradient left
_SMALLEST_SHARE = 1e-9  # of the clip bound: a smaller noise scale is taken for this


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is audited, on which data.

    engine               settings of the engine: strategy, clip, sigma, steps, delta, ...
    model                in the state in which each run starts; used without dropout
    x, y                 the examples; the last one becomes the canary
    sample_rate          with which the engine draws them, Poisson
    calm                 no gradient but the canary's is longer than this times C_0; None: as they are
    physical_batch_size  as in :meth:`~gradveil.PrivacyEngine.make_private`
    """

    engine: Mapping[str, Any]
    model: nn.Module
    x: Tensor
    y: Tensor
    sample_rate: float = 1.0
    calm: float | None = 0.1
    lr: float = 0.05
    physical_batch_size: int | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) < 2:
            raise ConfigError(
                f"{len(self.x)} inputs and {len(self.y)} labels: an audit needs as many of one as of the other, the "
                "canary and at least one example beside it."
            )
        if not 0 < self.sample_rate <= 1 or self.batch_size < 1:
            raise ConfigError(f"sample rate {self.sample_rate!r} of {len(self.x)} examples: give a number in (0, 1].")
        if self.calm is not None and not 0 < self.calm <= 1:
            raise ConfigError(f"calm is {self.calm!r}: give a share of the clip bound in (0, 1], or None.")

    @property
    def batch_size(self) -> int:
        return round(self.sample_rate * len(self.x))

    @property
    def threat_model(self) -> str:
        calm = "" if self.calm is None else f", gradients of at most {self.calm:g} C beside the canary"
        return f"chooses the data{calm}; knows every example, the weights and the code, but neither coin nor noise"


@dataclass(frozen=True, kw_only=True)
class Played:
    """One run and what the auditor made of it, step by step."""

    matched_filter: Array
    noise_scale: Array
    strength: Array  # length of the canary's contribution in standard deviations of the noise: 1 / multiplier at most
    header: RunHeader
    releases: tuple[Release, ...]
    first_canary: Tensor  # its contribution at the first step, all parameters in one vector
    moved: Tensor  # final weights less initial weights, in the same order

    @property
    def losses(self) -> Array:
        """log p(release | canary) / p(release | none), step by step, for noise of the scale that it has without it.

        The matched filter on a scale on which steps of different noise compare.
        """
        return self.matched_filter * self.strength - self.strength**2 / 2


def play(setting: Setting, coins: Coins, *, seed: int, progress: Callable[[int], None] | None = None) -> Played:
    """Train once, the canary taking part in step t only where ``coins[t]``, and score every release."""
    # Whether the canary is dropped depends on nothing but its coin.
    engine = PrivacyEngine(**{**setting.engine, "steps": len(coins), "drops_examples": True}, seed=seed)
    if not engine.plan.strategy.is_private:
        raise ConfigError(
            f"strategy {engine.plan.strategy.name!r} adds no noise: there is no epsilon to audit. Choose a private one."
        )
    model = copy.deepcopy(setting.model).eval()
    auditor = _Auditor(setting, engine, plain=copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
    canary = len(setting.x) - 1
    rows = TensorDataset(setting.x, setting.y, torch.arange(len(setting.x)))
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=rows,
        batch_size=setting.batch_size,
        physical_batch_size=setting.physical_batch_size,
    )
    start = _flat({name: p.detach() for name, p in engine.parameters.items()})
    scores: list[tuple[float, float, float]] = []
    beside: list[Tensor] = []  # who else is in this step's batch
    first_canary = torch.empty(0)
    try:
        for x, _, row in loader:
            if not beside:
                auditor.look()
            taken = (row != canary) | bool(coins[engine.step])
            beside.append(row[row != canary])
            step = engine.step
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x[taken]), auditor.labels[row[taken]], reduction="none")
            total = (losses * auditor.weights[row[taken]]).sum()
            (total / max(len(losses), 1)).backward()  # the mean, also of none
            optimizer.step()
            if engine.step == step:
                continue  # a physical part of the batch
            scores.append(auditor.score(torch.cat(beside)))
            if step == 0:
                first_canary = _flat(auditor.canary)
            beside = []
            if progress is not None:
                progress(engine.step)
    finally:
        engine.detach()
    matched, scale, strength = np.array(scores, dtype=np.float64).T
    return Played(
        matched_filter=matched,
        noise_scale=scale,
        strength=strength,
        header=engine.header,
        releases=engine.releases,
        first_canary=first_canary,
        moved=_flat({name: p.detach() for name, p in engine.parameters.items()}) - start,
    )


class _Silence(NoiseSource):
    """Noise that is none: what a rule would release beside the gradients, exactly."""

    def __init__(self) -> None:
        super().__init__(SecretKey(), 0)

    def noised(self, values: Sequence[float], std: float, *, sensitivity: float) -> tuple[float, ...]:
        return tuple(values)


@dataclass(frozen=True)
class _World:
    """What a step would release if the canary took part, or if it did not: without the noise, and the noise's scale."""

    sums: Gradients  # in the coordinates in which noise is added
    stds: tuple[float, ...]  # of each group
    side: tuple[float, ...]  # what is released beside the gradients


class _Auditor:
    """What is known before a step and seen after it. :meth:`look`, then the step, then :meth:`score`."""

    def __init__(self, setting: Setting, engine: PrivacyEngine, *, plain: nn.Module) -> None:
        self.setting, self.engine, self.plain = setting, engine, plain
        self.labels = setting.y.clone()
        self.weights = torch.ones(len(setting.y), dtype=setting.x.dtype)
        self.canary: Gradients = {}  # what it adds, or would have added, to the sums of the step that was scored last
        self._silence = _Silence()

    def look(self) -> None:
        """Before a step: choose the canary's label and the weights of all losses, at the weights of the model."""
        engine, setting = self.engine, self.setting
        live = {name: p.detach() for name, p in engine.parameters.items()}
        state = {**dict(self.plain.state_dict()), **live}
        with torch.no_grad():
            chances = functional_call(self.plain, state, (setting.x[-1:],))[0].softmax(0)
            if engine.step == 0 or chances[self.labels[-1]] > _LEARNED:
                self.labels[-1] = chances.argmin()
            raw = VictimGradients(self.plain, state).per_example(setting.x.unsqueeze(0), self.labels.unsqueeze(0))
        norms = torch.stack(
            [_group_norms([raw[name][0] for name in group.parameters]) for group in engine.groups], dim=1
        )
        clip = engine.plan.clip.start
        if setting.calm is not None:
            self.weights = (setting.calm * clip / norms.max(1).values).clamp(max=1.0)
        shortest = norms[-1][norms[-1] > 0]
        self.weights[-1] = max(1.0, _LOUD * clip / float(shortest.min())) if len(shortest) else 1.0
        self._gradients = {name: g * self.weights.view(1, -1, *[1] * (g.dim() - 2)) for name, g in raw.items()}
        whitening = engine.rule.whitening
        self._step, self._sigma = engine.step, engine.rule.sigma(engine.step)  # before the rule learns from the release
        self._defence = ReleaseParams(
            groups=engine.groups,
            clip=engine.rule.bounds(engine.step),
            # Cloned: the rule learns from the release, in place.
            whitening=whitening and {name: (m.clone(), b.clone()) for name, (m, b) in whitening.items()},
            gamma=engine.rule.gamma,
        )

    def _worlds(self, beside: Tensor) -> tuple[_World, _World]:
        """Without the canary, and with it."""
        clip_stats = ClipStats(len(self._defence.groups))
        others = self._clipped_sums(beside, clip_stats)
        without = self._world(others, clip_stats)
        more = copy.deepcopy(clip_stats)
        self.canary = self._clipped_sums(torch.tensor([len(self.labels) - 1]), more)
        return without, self._world({name: g + self.canary[name] for name, g in others.items()}, more)

    def _clipped_sums(self, rows: Tensor, clip_stats: ClipStats) -> Gradients:
        clipped = clip_groups({name: g[:, rows] for name, g in self._gradients.items()}, self._defence, clip_stats)
        return {name: g[0].sum(0) for name, g in clipped.items()}

    def _world(self, sums: Gradients, clip_stats: ClipStats) -> _World:
        defence, engine = self._defence, self.engine
        assert defence.clip is not None
        facts = StepFacts(defence.clip, clip_stats, defence.groups, sums, float(engine.sampling.batch_size))
        scale = noise_scale(engine.plan, self._step, facts, self._sigma)
        side = engine.rule.side_releases(clip_stats, self._silence)
        return _World(self._noise_coordinates(sums), scale.stds, tuple(v for s in side for v in s.values))

    def _noise_coordinates(self, sums: Gradients) -> Gradients:
        whitening = self._defence.whitening
        return sums if whitening is None else {name: g / whitening[name][1] for name, g in sums.items()}

    def _released(self) -> Gradients:
        """The noised sum, from the gradients that the optimizer was given."""
        size, whitening = float(self.engine.sampling.batch_size), self._defence.whitening
        found = {}
        for name, parameter in self.engine.parameters.items():
            assert parameter.grad is not None
            shift = 0.0 if whitening is None else whitening[name][0]
            found[name] = (parameter.grad - shift) * size
        return self._noise_coordinates(found)

    def score(self, beside: Tensor) -> tuple[float, float, float]:
        """After a step in whose batch the examples ``beside`` were: matched filter, noise scale, canary's strength."""
        without, with_it = self._worlds(beside)
        assert self._defence.clip is not None
        # In standard deviations of the noise without the canary; under l2-max that may be none at all.
        stds = [max(std, _SMALLEST_SHARE * bound) for std, bound in zip(without.stds, self._defence.clip, strict=True)]
        of_parameter = self._defence.of_parameter(stds)
        released, canary = self._released(), self._noise_coordinates(self.canary)
        left = _flat({name: (released[name] - sums) / of_parameter[name] for name, sums in without.sums.items()})
        expected = _flat({name: canary[name] / of_parameter[name] for name in without.sums})
        scale = self._scale_score(left, expected, stds, with_it.stds)
        side_left, side_expected = self._side(without, with_it)
        strength = math.hypot(float(expected.norm()), float(side_expected.norm()))
        along = float(left @ expected) + float(side_left @ side_expected)
        return along / strength if strength > 0 else 0.0, scale, strength

    def _side(self, without: _World, with_it: _World) -> tuple[Tensor, Tensor]:
        """Of what is released beside the gradients, in standard deviations: what is left, and what the canary adds."""
        seen = self.engine.ledger.releases[-1].side
        values = torch.tensor([value for side in seen for value in side.values], dtype=torch.float64)
        stds = torch.tensor([side.noise_std for side in seen for _ in side.values], dtype=torch.float64)
        there, more = (torch.tensor(world.side, dtype=torch.float64) for world in (without, with_it))
        return (values - there) / stds, (more - there) / stds

    def _scale_score(self, left: Tensor, expected: Tensor, stds: list[float], with_it: tuple[float, ...]) -> float:
        """The logarithm of the mean square of what is left, in standard deviations of its own chance.

        Where the strategy lets the noise differ without and with the canary, it is measured from half-way between the
        two, towards the latter; otherwise from the noise as it should be.
        """
        sizes = [sum(self.engine.parameters[name].numel() for name in g.parameters) for g in self.engine.groups]
        size = sum(sizes)
        length = float(expected.norm())
        across = left - expected * (float(left @ expected) / length**2) if length > 0 else left
        mean_square = max(float(across.square().sum()) / max(size - 1, 1), 1e-300)
        ratio = sum(n * (w / s) ** 2 for n, s, w in zip(sizes, stds, with_it, strict=True)) / size
        towards = -1.0 if ratio < 1.0 else 1.0
        return towards * (math.log(mean_square) - math.log(max(ratio, 1e-300)) / 2) * math.sqrt(size / 2)


def _group_norms(gradients: list[Tensor]) -> Tensor:
    """(rows,) from gradients (rows, *shape) of the parameters of one group."""
    norms: Tensor = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    return norms


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()]).double()
