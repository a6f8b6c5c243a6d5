"""What a run is asked to be, checked before anything is read or written."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from torch import Tensor

from gradveil.accounting.ledger import Durability
from gradveil.clipping import Clipping
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism.records import why_unproved
from gradveil.mechanism.schedules import Schedule
from gradveil.mechanism.strategies import PrivacyPlan, Strategy, get, parameters

LOSS_REDUCTIONS = ("mean", "sum")
STOPPINGS = ("none", "public", "private")
NOISES = ("auto", "lattice", "float")
ACCOUNTANTS = ("PLD", "filter")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a :class:`~gradveil.PrivacyEngine`, which documents them."""

    strategy: str | Strategy
    clip: float | Schedule | None
    sigma: float | Schedule | None
    epsilon: float | None
    steps: int | None
    epochs: int | None
    delta: float
    sampling: str
    clipping: Clipping
    shape: Mapping[str, Any] = field(default_factory=dict)  # reading, decays, fixed variance: of the plan
    loss_reduction: str
    views: int
    budget: float | None
    allow_unproved: bool
    stopping: str
    accountant: str | None
    drops_examples: bool
    spot_checks: float
    durability: Durability
    noise: str = "auto"

    def __post_init__(self) -> None:
        for name in ("clip", "sigma", "epsilon", "steps", "epochs", "delta", "views", "budget", "spot_checks"):
            object.__setattr__(self, name, plain_number(name, getattr(self, name)))
        object.__setattr__(self, "shape", {name: plain_number(name, value) for name, value in self.shape.items()})
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"steps is {self.steps!r} and epochs is {self.epochs!r}. A run declares its length, since schedules "
                "and accounting span it: give one of the two."
            )
        for name in ("epochs", "views"):
            _check_whole_number(name, getattr(self, name))
        for name, known in (
            ("loss_reduction", LOSS_REDUCTIONS),
            ("stopping", STOPPINGS),
            ("accountant", (None, *ACCOUNTANTS)),
            ("durability", get_args(Durability)),
            ("noise", NOISES),
        ):
            if getattr(self, name) not in known:
                raise UnknownNameError(name, getattr(self, name), [word for word in known if word is not None])
        if not (isinstance(self.delta, float | int) and 0 < self.delta < 1):
            raise ConfigError(f"delta is {self.delta!r}. It is a probability: give a number in (0, 1), below 1/N.")
        object.__setattr__(self, "delta", float(self.delta))
        if not (isinstance(self.spot_checks, float | int) and 0 <= self.spot_checks <= 1):
            raise ConfigError(
                f"spot_checks is {self.spot_checks!r}. It is the share of the time in which the independence of "
                "examples is checked, after the first batches: give a number from 0 to 1."
            )
        for name in ("budget", "epsilon"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, float | int) and value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value!r}. It is the largest epsilon to spend: give a positive number.")
        if self.drops_examples and self.views > 1:
            raise ConfigError(
                f"drops_examples=True and views={self.views}: where rows are left out, which rows are views of which "
                "example cannot be known. Leave out one of the two."
            )
        self._check_provable()

    def _check_provable(self) -> None:
        plan = self.plan(sigma=self.any_sigma, steps=self.steps or 2)
        private, why = plan.strategy.is_private, self.why_unproved(plan)
        if private and self.sampling == "shuffle" and not self.allow_unproved:
            raise ConfigError(
                "sampling is 'shuffle': the amplification by sampling that the accounting rests on does not hold for "
                "shuffled batches, so no epsilon would be proved. Use sampling='poisson', or ask for it explicitly "
                "with allow_unproved=True (the statement will then say that nothing is proved)."
            )
        if self.accountant == "PLD" and self._adapts:
            raise ConfigError(
                f"accountant='PLD' was given for strategy {plan.strategy.name!r}, whose noise follows what was "
                "released: only a privacy filter covers that. Leave the accountant out."
            )
        if self.filters and (why is not None or self.sampling != "poisson" or not private):
            raise ConfigError(
                f"strategy {plan.strategy.name!r} with {self.sampling} sampling cannot be held to a privacy filter, "
                "which is proved for Poisson sampling and noise that depends on released values only. Choose a proved "
                "strategy and sampling='poisson', or leave accountant='filter' out."
            )
        if self.epsilon is not None and self.sigma is not None:
            raise ConfigError(
                f"epsilon={self.epsilon} and sigma were both given: sigma is calibrated so that the run spends "
                "epsilon. Give one of the two; to stop a run with its own sigma at an epsilon, use budget."
            )
        if self.epsilon is not None and why is not None:
            raise ConfigError(
                f"epsilon={self.epsilon} was asked for, but {why}. Choose a proved strategy and Poisson sampling, or "
                "give sigma."
            )
        if self.budget is not None and (not private or (why is not None and not self.allow_unproved)):
            raise ConfigError(
                f"budget={self.budget} was given, but strategy {plan.strategy.name!r} with {self.sampling} sampling "
                "has no proved epsilon that could be held to it. Choose a proved strategy, or leave the budget out"
                + ("; with allow_unproved=True the run is held to the published (MA) epsilon." if private else ".")
            )

    @property
    def filters(self) -> bool:
        """Whether the run is held to a privacy filter, so that its noise and its end may follow released values."""
        return self.accountant == "filter" or (self.accountant is None and self._adapts)

    @property
    def _adapts(self) -> bool:
        return get(self.strategy).noise == "adaptive"

    @property
    def target(self) -> float | None:
        """The largest epsilon to spend, where one was given."""
        return self.budget if self.budget is not None else self.epsilon

    def plan(self, *, steps: int, sigma: float | Schedule | None = None) -> PrivacyPlan:
        """The public plan of the run, over ``steps``; ``sigma`` where it is not among the settings."""
        chosen = sigma if self.sigma is None else self.sigma
        return parameters(self.strategy, steps=steps, clip=self.clip, sigma=chosen, **self.shape)

    @property
    def least_sigma(self) -> float:
        """The smallest starting sigma that makes sense: the given end of its decay."""
        return float(self.shape.get("sigma_end") or 0.0)

    @property
    def any_sigma(self) -> float | None:
        """Where sigma is still to be calibrated: one that the plan can be laid out with."""
        return None if self.epsilon is None else max(1.0, self.least_sigma)

    def why_unproved(self, plan: PrivacyPlan) -> str | None:
        """Why no finite epsilon is proved for such a run; None where one is."""
        return why_unproved(plan.strategy.guarantee, fixed_variance=plan.fixed_variance, sampling=self.sampling)


def plain_number(name: str, value: Any) -> Any:
    """A number of numpy, or in a tensor without dimensions, as Python's own; all else as it is.

    >>> plain_number("sigma", np.float32(2.0)), plain_number("steps", np.int64(3)), plain_number("clip", "1")
    (2.0, 3, '1')
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            raise ConfigError(f"{name} is an array of shape {tuple(value.shape)}; give one number.")
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _check_whole_number(name: str, value: Any) -> None:
    what = {"views": "rows that each example has in the model's input", "epochs": "passes over the training set"}
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} is {value!r}. It is the number of {what[name]}: give a whole number of at least 1.")
