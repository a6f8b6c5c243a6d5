"""Observations from what ``engine.record_gradients`` recorded of a live run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gradveil.attacks.observation.from_files import check_gradients, check_state, count_classes, state_of
from gradveil.attacks.observation.views import Observation, Public, ReleaseParams, StepObservation
from gradveil.engine.record_gradients import Recorded, read
from gradveil.errors import ConfigError


def load_capture(
    path: Path,
    module: nn.Module,
    *,
    input_shape: tuple[int, ...],
    classes: int | None = None,
    batch: int | None = None,
    step: int | None = None,
    joint: bool = False,
    public: Public | None = None,
    device: str | torch.device = "cpu",
) -> list[Observation]:
    """One observation for every recorded step: a run draws other examples for each.

    module    the architecture; its weights are taken from the record, and what has no gradient there is frozen
    classes   default: as many as the model has outputs
    batch     how many examples the attack looks for (default: the expected batch size, or 1 for single examples)
    step      this one only
    joint     the steps are known to be of the same examples: one observation of them all
    public    what the adversary knows of such data beforehand
    """
    steps = [r for r in read(path) if step is None or r.step == step]
    if not steps:
        raise ConfigError(f"step {step} is not recorded in {path}. Recorded: {[r.step for r in read(path)]}.")
    module = module.to(device).eval()  # gradients as the attacker can compute them: no dropout
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in steps[0].gradients)
    count = classes or count_classes(module, input_shape)
    sights = [_sight(record, module, str(path), device) for record in steps]
    if joint and len({next(iter(s.gradients.values())).shape[0] for s in sights}) > 1:
        raise ConfigError("the recorded steps show different numbers of examples: they are not of the same ones.")
    size = batch or (round(steps[0].batch_size) if steps[0].view == "batch" else 1)
    return [
        Observation(module=module, sights=together, input_shape=input_shape, classes=count, batch=size, public=public)
        for together in ([tuple(sights)] if joint else [(s,) for s in sights])
    ]


def _sight(record: Recorded, module: nn.Module, where: str, device: str | torch.device) -> StepObservation:
    gradients = {n: t.to(device) for n, t in record.gradients.items()}
    weights = {n: t.to(device) for n, t in record.weights.items()}
    check_state(module, weights, where)
    check_gradients(module, gradients, where)
    return StepObservation(
        step=record.step, gradients=gradients, weights=state_of(module, weights), defence=defence_of(record, device)
    )


def defence_of(record: Recorded, device: str | torch.device = "cpu") -> ReleaseParams:
    """What is public of a recorded release, as attacks take it."""
    release = record.release
    if release is None:
        return ReleaseParams(groups=record.groups, normaliser=record.batch_size if record.view == "batch" else 1.0)
    noised = record.view != "per-example"
    whitening = {n: (centre.to(device), scale.to(device)) for n, (centre, scale) in record.whitening.items()}
    return ReleaseParams(
        groups=record.groups,
        clip=release.clip,
        noise_std=tuple(std / record.batch_size for std in release.noise_std) if noised else None,
        normaliser=record.batch_size if record.view == "batch" else 1.0,
        strategy=record.strategy,
        sensitivity_rule=release.sensitivity_rule,
        whitening=whitening or None,
        gamma=record.gamma,
        side_inverse_square=release.side_inverse_square,
    )
