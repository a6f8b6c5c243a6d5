"""What a run is trained and judged on: the examples of a data set, or fixed features of them, on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.mechanism.distributed import ranks
from gradveil.training import augment, data, features
from gradveil.training.config import RunConfig
from gradveil.training.data import DataSet


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What runs are trained and judged on, on their device: the examples of a data set, or fixed features of them.

    Features of several ``views`` of an example lie in a dimension of their own, after that of the examples.
    """

    data: DataSet
    features: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    views: int = 1  # that are computed ahead


def prepare(config: RunConfig) -> Inputs:
    """The inputs of a run; others on the same data set, features and device may share them."""
    return inputs_of(config, data.load(config.dataset, data_dir=config.data_dir))


def inputs_of(config: RunConfig, loaded: DataSet) -> Inputs:
    """The same, of a data set that is there already."""
    device = device_of(config.device)
    fixed = None if config.features == "none" else features.make(config.features, loaded.input_shape)
    views = computed_ahead(config)

    def given(x: Tensor) -> Tensor:
        if fixed is None:
            return x.to(device)
        if views == 1:
            return features.extract(fixed, x, device)
        found = torch.empty((len(x), views, *fixed.output_shape), device=device)
        for k, view in enumerate(augment.fixed_views(x, config.augment)):
            found[:, k] = features.extract(fixed, view, device)
        return found

    x_train, x_test = given(loaded.x_train), given(loaded.x_test)
    return Inputs(
        data=loaded,
        features=config.features,
        x_train=x_train,
        y_train=loaded.y_train.to(device),
        x_test=x_test,
        y_test=loaded.y_test.to(device),
        views=views,
    )


def computed_ahead(config: RunConfig) -> int:
    """Views whose features are computed before training: all of them, where there are features."""
    return 1 if config.features == "none" else config.views


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown. Give cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported. Give cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device here. Use --device cpu.")
    return ranks.own_device(device)
