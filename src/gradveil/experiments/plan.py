"""How much of an experiment is run: quickly on digits, or at the paper's length on its data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.experiments.cells import Cell
from gradveil.training.config import DEFAULTS
from gradveil.training.data import CATALOGUE

Scale = Literal["quick", "full"]

# Digits has 1347 training examples. A batch of a fifth of them keeps the noise on the mean in proportion.
_QUICK_DIGITS: dict[str, Any] = {"steps": 60, "batch_size": 256, "lr": 0.2}
_QUICK_SHARE = 100  # of the paper's steps, on other sets
_LOOKS = {"quick": 12, "full": 200}  # evaluations in a run: how finely it shows when a target is reached


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``sets``, ``seeds`` and ``lr`` left out are the experiment's own, and the paper's."""

    scale: Scale = "quick"
    sets: tuple[str, ...] | None = None
    seeds: int | None = None
    lr: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in self.sets or ():
            if name not in CATALOGUE:
                raise UnknownNameError("data set", name, CATALOGUE)
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; give how many runs of each cell, at least 1.")

    def sets_of(self, *full: str, kind: str | None = None) -> tuple[str, ...]:
        """The data sets: those asked for, or digits, or those of the paper's table."""
        chosen = self.sets or (full if self.scale == "full" else ("digits",))
        return tuple(name for name in chosen if kind is None or CATALOGUE[name].kind == kind)

    def seeds_of(self, full: int = 1) -> range:
        """One seed for a quick run; otherwise what the experiment asks for."""
        return range(self.seeds if self.seeds is not None else full if self.scale == "full" else 1)

    def length(self, dataset: str) -> dict[str, Any]:
        """Steps, batch size and learning rate."""
        steps, batch_size = DEFAULTS[dataset]
        found: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "lr": 0.05}
        if self.scale == "quick":
            found |= _QUICK_DIGITS if dataset == "digits" else {"steps": max(20, steps // _QUICK_SHARE)}
        return found if self.lr is None else found | {"lr": self.lr}

    def train(self, dataset: str, strategy: str, *, seed: int = 0, **settings: Any) -> Cell:
        """One training run: the paper's network and settings but for those given."""
        length = self.length(dataset) | {k: v for k, v in settings.items() if k in ("steps", "batch_size", "lr")}
        every = max(1, length["steps"] // _LOOKS[self.scale])
        shared = {"dataset": dataset, "strategy": strategy, "seed": seed, "evaluate_every": every}
        if strategy == "non-private":
            settings = {k: v for k, v in settings.items() if k in length}
        return Cell("train", {**shared, **length, **{k: v for k, v in settings.items() if v is not None}})
