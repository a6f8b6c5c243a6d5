"""What choosing settings costs: the epsilon of all runs that were looked at, not of the last one alone."""

from __future__ import annotations

from gradveil.accounting import Setting, Target, calibrate_sigma, planned_epsilon
from gradveil.training.data import CATALOGUE
from gradveil.training.recipes import Recipe


def epsilon_of_search(epsilon: float, runs: int, *, sample_rate: float, steps: int, delta: float = 1e-5) -> float:
    """The epsilon, at ``delta``, of ``runs`` runs together, each calibrated to ``epsilon`` at ``delta`` by itself.

    Plain composition, by PLD, of everything that all of them release (Poisson sampling, constant noise, add or remove
    one): it holds for any way of choosing among them, and for publishing every one of them. A search that draws the
    number of its runs at random and publishes the best alone can be bounded by less (Papernot & Steinke,
    "Hyperparameter Tuning with Renyi Differential Privacy", 2022); one over a fixed grid, as here, cannot.

    >>> round(epsilon_of_search(0.823, 1, sample_rate=0.01, steps=1000), 2)
    0.82
    >>> 2.8 < epsilon_of_search(0.823, 10, sample_rate=0.01, steps=1000) < 2.9
    True
    """
    setting = Setting(sample_rate=sample_rate)
    sigma = calibrate_sigma(Target(epsilon=epsilon, delta=delta), setting, steps=steps).sigma
    return planned_epsilon([sigma] * (steps * runs), setting, delta=delta).epsilon


def epsilon_with_search(recipe: Recipe) -> float:
    """Of a run of the recipe together with all runs that were looked at to choose its settings."""
    settings = recipe.settings
    return epsilon_of_search(
        recipe.epsilon,
        recipe.tried + 1,
        sample_rate=settings["batch_size"] / CATALOGUE[recipe.dataset].train,
        steps=settings["steps"],
        delta=settings["delta"],
    )
