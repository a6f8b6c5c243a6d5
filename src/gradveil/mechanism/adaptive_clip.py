"""Between a rule that is given numbers only (adaptive.py) and the engine: what it is told, and what it has chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from gradveil.clipping import Group
from gradveil.errors import ConfigError
from gradveil.mechanism import adaptive
from gradveil.mechanism.clip_bounds import BoundRule
from gradveil.mechanism.records import AuxiliaryRelease
from gradveil.mechanism.strategies import PrivacyPlan


class AdaptiveClip(BoundRule):
    """Noise and bounds by a rule that is given released numbers only (adaptive.py).

    ``left`` and ``grants`` are the privacy filter's, functions of the ledger: the share of the budget that is left, and
    whether a step at a sigma would be granted. A sigma that is not granted is raised until it is; where none is, the
    run ends. Without an engine, everything is granted and the budget is spent evenly.
    """

    reads_gradients = True

    def __init__(self, plan: PrivacyPlan, groups: Sequence[Group], *, batch_size: float, sizes: Sequence[int]) -> None:
        assert plan.strategy.rule is not None
        self.rule, self.groups = plan.strategy.rule, groups
        self.public = adaptive.PublicSettings(
            steps=plan.steps,
            batch_size=float(batch_size),
            clip=float(plan.clip.start),
            sigma=float(plan.sigma.start),
            sizes=tuple(sizes),
        )
        self.left: Callable[[int], float] = lambda step: 1.0 - (step + 1) / plan.steps
        self.grants: Callable[[float], bool] = lambda sigma: True
        self.learned = 0  # steps
        self.chosen_from: dict[str, Any] = {"seen": None, "memory": [], "raised": 0}
        self._choose()

    def with_options(self, options: Mapping[str, Any]) -> AdaptiveClip:
        """The fields of the rule, changed."""
        self.rule = replace(self.rule, **options)
        adaptive.check_rule(self.rule)
        self._choose()
        return self

    def to_plan(self) -> dict[str, Any]:
        return {"name": type(self.rule).__name__, **asdict(self.rule)}

    def _choose(self) -> None:
        choice = adaptive.chosen(self.rule, self.public, self.chosen_from)
        if len(choice.clip) != len(self.public.sizes):
            raise ConfigError(
                f"the rule {type(self.rule).__name__} chose {len(choice.clip)} clip bounds for "
                f"{len(self.public.sizes)} clipping groups. Give one for each: tuple(... for c in seen.clip)."
            )
        self.choice = choice

    def bounds(self, step: int) -> tuple[float, ...]:
        return self.choice.clip

    def sigma(self, step: int) -> float:
        return adaptive.in_range(self.choice.sigma, self.public, int(self.chosen_from["raised"]))

    def learn(
        self, side: tuple[AuxiliaryRelease, ...], noised: Mapping[str, Tensor], sigma: float, batch_size: float
    ) -> None:
        names = [name for group in self.groups for name in group.parameters]
        norms = torch._foreach_norm([noised[name] for name in names], 2.0, dtype=torch.float64)
        of_parameter = iter(torch.stack(list(norms)).square().tolist())
        seen = {
            "step": self.learned,
            "sigma": sigma,
            "clip": list(self.choice.clip),
            "noise_std": [sigma * bound / batch_size for bound in self.choice.clip],
            "squares": [sum(next(of_parameter) for _ in group.parameters) for group in self.groups],
            "left": self.left(self.learned),
        }
        self.chosen_from = {"seen": seen, "memory": list(self.choice.memory), "raised": 0}
        self._choose()
        self.learned += 1
        self._ask()

    def _ask(self) -> None:
        """Raise sigma until the filter grants it; the run ends where that does not help."""
        self.stop = self.choice.stop
        while self.stop is None and self.learned < self.public.steps and not self.grants(self.sigma(self.learned)):
            before = self.sigma(self.learned)
            self.chosen_from["raised"] += 1
            if self.sigma(self.learned) <= before:
                self.stop = "the budget of the privacy filter is spent"

    def state_dict(self) -> dict[str, Tensor]:
        text = json.dumps([self.learned, self.chosen_from, self.stop]).encode()
        return {"adaptive": torch.tensor(list(text), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.learned, self.chosen_from, self.stop = json.loads(bytes(state["adaptive"].tolist()))
        self._choose()
