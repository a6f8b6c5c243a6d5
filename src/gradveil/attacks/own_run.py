"""A run of somebody's own model: the functions that make the model and the data again, as the run recorded them.

``module:function`` is called without arguments. The model's makes a ``torch.nn.Module``; the data's returns inputs and
labels, as two tensors, as a map-style data set of pairs, or as four tensors with test data after the training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gradveil.attacks.observation.from_files import called, load_factory
from gradveil.errors import ConfigError
from gradveil.training.data import DataSet

_HELD_OUT = 0.2  # share of the data that stands in for test data where the function returns none
_MOST = 20_000  # examples of a data set that are read


@dataclass(frozen=True)
class OwnRun:
    model_factory: str
    data_factory: str
    options: Mapping[str, float]
    lr: float

    @classmethod
    def of(cls, settings: Mapping[str, Any], model_factory: str | None, data_factory: str | None) -> OwnRun:
        """From the settings in a run's ledger; what the run did not record must be given, and nothing else."""
        engine, given = settings["engine"], {"model": model_factory, "data": data_factory}
        found: dict[str, str] = {}
        for name, said in given.items():
            recorded = engine.get(f"{name}_factory")
            if said is not None and recorded is not None and said != recorded:
                raise ConfigError(
                    f"--{name} {said} was given, and the run's ledger records {recorded}: leave --{name} out."
                )
            if said is None and recorded is None:
                raise ConfigError(
                    f"the run does not record how its {name} is made. Give --{name} module:function, or train with "
                    f"PrivacyEngine({name}_factory='module:function')."
                )
            found[name] = str(said or recorded)
        options = settings.get("options")
        rate = engine.get("lr")
        return cls(
            found["model"],
            found["data"],
            {str(k): float(v) for k, v in options.items()} if isinstance(options, Mapping) else {},
            float(rate) if isinstance(rate, int | float) else 0.05,
        )

    def model(self, seed: int = 0) -> nn.Module:
        return load_factory(self.model_factory, seed=seed)

    def data(self) -> DataSet:
        """Training examples, and others to compare with."""
        tensors = _tensors(called(self.data_factory, "data"), self.data_factory)
        if len(tensors) == 2:
            x, y = tensors
            kept = max(1, round(len(x) * (1 - _HELD_OUT)))
            tensors = (x[:kept], y[:kept], x[kept:], y[kept:])
        x_train, y_train, x_test, y_test = tensors
        return DataSet(
            name=self.data_factory,
            x_train=x_train.float(),
            y_train=y_train.long(),
            x_test=x_test.float(),
            y_test=y_test.long(),
            classes=int(max(y_train.max(), y_test.max() if len(y_test) else 0)) + 1,
            input_shape=tuple(x_train.shape[1:]),
            kind="image" if x_train.dim() == 4 else "tabular",
            note=f"made by {self.data_factory}",
        )


def _tensors(made: Any, spec: str) -> tuple[Tensor, ...]:
    if isinstance(made, Dataset):
        count = min(len(made), _MOST)  # type: ignore[arg-type]
        pairs = [made[i] for i in range(count)]
        made = (torch.stack([torch.as_tensor(x) for x, *_ in pairs]), torch.tensor([int(y) for _, y, *_ in pairs]))
    if not (
        isinstance(made, tuple | list)
        and len(made) in (2, 4)
        and all(isinstance(part, Tensor) for part in made)
        and all(len(made[i]) == len(made[i + 1]) > 0 for i in range(0, len(made), 2))
    ):
        raise ConfigError(
            f"{spec}() returned a {type(made).__name__}: return inputs and labels, as two tensors of the same length "
            "(four with test data), or as a data set of pairs."
        )
    return tuple(made)
