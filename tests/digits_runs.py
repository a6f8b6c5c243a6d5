"""Short runs on digits, whole and interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gradveil.training.config import RunConfig
from gradveil.training.loop import train
from gradveil.training.run_directory import RunDirectory

SEED = 918273645


def settings(**changes: Any) -> RunConfig:
    made: dict[str, Any] = {"dataset": "digits", "steps": 12, "batch_size": 32, "sigma": 12.0, "lr": 0.2}
    made |= {"evaluate_every": 4, "checkpoint_every": 4} | changes
    return RunConfig.check({name: value for name, value in made.items() if value is not None})


def tensors(where: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    run = RunDirectory(where)
    checkpoint = run.newest_checkpoint()
    assert checkpoint is not None
    loaded = safetensors.torch.load(run.read_tensors(checkpoint))
    return {k: v for k, v in loaded.items() if k.startswith(prefix)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


class Killed(BaseException):
    """Stands for a kill: nothing in gradveil may catch it."""


def killed(*args: Any, **kwargs: Any) -> Any:
    raise Killed


def interrupted(config: RunConfig, where: Path, *, after: int, seed: int | None = SEED) -> RunDirectory:
    """A run that ends, without a word, after its checkpoint of step ``after``."""
    with pytest.MonkeyPatch.context() as patch:
        save = RunDirectory.save_checkpoint

        def last_save(self: RunDirectory, step: int, *args: Any) -> None:
            save(self, step, *args)
            if step >= after:
                raise Killed

        patch.setattr(RunDirectory, "save_checkpoint", last_save)
        with pytest.raises(Killed):
            train(config, run_dir=where, seed=seed)
    return RunDirectory(where)
