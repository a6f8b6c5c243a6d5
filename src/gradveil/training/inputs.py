"""What a run is trained and judged on: the examples of a data set, or fixed features of them, on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.mechanism.distributed import ranks
from gradveil.training import augment, data, features
from gradveil.training.config import RunConfig
from gradveil.training.data import DataSet

_HELD_OUT_SEED = 5000


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


def hold_out(inputs: Inputs, count: int) -> Inputs:
    """The same with ``count`` training examples, always the same ones, in place of the test set.

    For choosing settings: the test set is then read once, for the figure that is published. What was held out takes
    no part in training, so the population is smaller by ``count``.
    """
    total = len(inputs.y_train)
    if not 0 < count < total:
        raise ConfigError(f"{count} examples cannot be held out of {total}. Give a number between 1 and {total - 1}.")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(_HELD_OUT_SEED))
    kept, out = order[count:].sort().values, order[:count].sort().values
    x, y, device = inputs.x_train, inputs.y_train, inputs.x_train.device
    loaded = replace(
        inputs.data,
        x_train=inputs.data.x_train[kept],
        y_train=inputs.data.y_train[kept],
        x_test=inputs.data.x_train[out],
        y_test=inputs.data.y_train[out],
        note=f"{inputs.data.note}; {count} training examples held out",
    )
    kept, out = kept.to(device), out.to(device)
    return replace(inputs, data=loaded, x_train=x[kept], y_train=y[kept], x_test=x[out], y_test=y[out])


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
