"""Ledgers made by hand, and by a few steps of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gradveil.accounting.ledger import Ledger
from gradveil.engine import PrivacyEngine
from gradveil.mechanism.records import AuxiliaryRelease, Release, RunHeader
from gradveil.mechanism.schedules import from_dict
from gradveil.mechanism.strategies import parameters
from made_records import release_at

COUNTS = AuxiliaryRelease(name="within-bound counts", values=(1.25, -7.5e-3), sensitivity=2**-0.5, noise_std=15.0)


def make_header(strategy: str = "baseline", *, steps: int = 20, groups: int = 2, **plan: Any) -> RunHeader:
    made = parameters(strategy, steps=steps, **{"clip": 4.0, "sigma": 6.0} | plan)
    return RunHeader(
        strategy=strategy,
        guarantee=made.strategy.guarantee,
        groups=tuple(f"layer{g}" for g in range(groups)),
        population=1000,
        sampling="poisson",
        sample_rate=0.05,
        expected_batch_size=50.0,
        steps=steps,
        delta=1e-5,
        seeded=False,
        plan=made.to_plan(),
        gradveil_version="0.1.0",
    )


def make_release(header: RunHeader, step: int, **changes: Any) -> Release:
    """The release that the header's plan makes at ``step``."""
    clip, sigma = from_dict(header.plan["clip"])(step), from_dict(header.plan["sigma"])(step)
    if header.plan["fixed_variance"]:
        sigma = header.plan["varsigma"] / clip
    rule = {"sensitivity_rule": header.plan["sensitivity_rule"]}
    return release_at(header, step, **{"sigma": sigma, "clip": clip} | rule | changes)


def write(path: Path, header: RunHeader, count: int, *, first: int = 0, **changes: Any) -> Ledger:
    ledger = Ledger(header, path)
    for step in range(first, first + count):
        ledger.append(make_release(header, step, **changes))
    ledger.commit()
    return ledger


def live_engine(run_dir: Path, **settings: Any) -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(
        **{"strategy": "baseline", "clip": 1.0, "sigma": 8.0, "steps": 10, "delta": 1e-3} | settings, run_dir=run_dir
    )
    data = TensorDataset(torch.randn(50, 4), torch.arange(50) % 3)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=data, batch_size=10)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, count: int) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        count -= 1
        if not count:
            return
