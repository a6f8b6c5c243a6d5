"""Recipes: settings that are accurate at a proved epsilon, as data. ``gradveil train --recipe NAME`` runs one.

Each is a TOML file in this folder: what it is, how its settings were chosen, and the settings. No torch is needed to
read them.

>>> get("mnist-0.8").settings["epsilon"]
0.823
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from gradveil.errors import UnknownNameError

_SUFFIX = ".toml"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``tried``: how many runs on the same data were looked at to choose the settings. That choice is declared.

    It is not in epsilon: a run spends its epsilon on the training data, and so did every run that was looked at.
    :func:`gradveil.training.recipes.selection.epsilon_of_search` says what all of them together cost.
    """

    name: str
    summary: str
    tried: int
    settings: Mapping[str, Any]
    chosen_by: str = "test accuracy"  # of those runs; "held-out accuracy": of training examples that were held out

    @property
    def dataset(self) -> str:
        return str(self.settings["dataset"])

    @property
    def epsilon(self) -> float:
        return float(self.settings["epsilon"])

    @property
    def declaration(self) -> str:
        """How the settings were chosen, in a sentence."""
        if not self.tried:
            return "the settings were chosen without looking at a run on these data"
        return (
            f"the settings were chosen by the {self.chosen_by} of {self.tried} runs on the same data; epsilon is of "
            "one run, and does not cover that choice"
        )


def names() -> list[str]:
    """The recipes, by data set and epsilon."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in resources.files(__name__).iterdir() if _is_recipe(file))


def get(name: str) -> Recipe:
    """The recipe of that name, or an error with the near names."""
    known = names()
    if name not in known:
        raise UnknownNameError("recipe", name, known)
    return Recipe(name=name, **tomllib.loads(resources.files(__name__).joinpath(name + _SUFFIX).read_text()))


def _is_recipe(file: Any) -> bool:
    return bool(file.name.endswith(_SUFFIX))
