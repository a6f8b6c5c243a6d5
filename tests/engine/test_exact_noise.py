"""The noise that reaches ``.grad`` has the recorded scale to within half a per cent, on every path that adds it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gradveil
from gradveil.clipping.backends import native
from gradveil.mechanism.noise import streams

PLACES = 400_000
TOLERANCE = 5.0 / math.sqrt(2 * PLACES)  # five standard errors of a standard deviation: .56 %


class Unused(nn.Module):
    """A large parameter that the data do not move: what its gradient holds is noise."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(PLACES, 1, dtype=dtype))
        self.last = nn.Linear(1, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.linear(x, self.large * 0).sum(1, keepdim=True))


def _released(strategy: str, dtype: torch.dtype, seed: int | None = 5) -> list[tuple[torch.Tensor, gradveil.Release]]:
    """The noise and the record of two steps."""
    data = TensorDataset(torch.ones(50, 1, dtype=dtype), torch.zeros(50, dtype=torch.int64))
    model = Unused(dtype)
    engine = gradveil.PrivacyEngine(strategy=strategy, clip=2.0, sigma=3.0, steps=2, delta=1e-3, seed=seed)
    model, _, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, batch_size=10
    )
    noises = []
    for x, y in loader:
        model.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        noises.append(model.large.grad.double())
    return list(zip(noises, engine.releases, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("strategy", ["baseline", "dyn-sigma"])
def test_the_released_noise_has_the_recorded_scale(strategy, compiled, dtype, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "kernels", lambda: None)
        monkeypatch.setattr(streams, "layers", lambda: None)
    elif native.kernels() is None:
        pytest.skip("no C++ compiler: the numpy path is tested")
    noise, release = _released(strategy, dtype)[0]
    found = float(noise.std()) * release.expected_batch_size  # the mean over B is released
    assert release.noise_std[0] == pytest.approx(3.0 * 2.0)
    assert found == pytest.approx(release.noise_std[0], rel=TOLERANCE)
    assert abs(0.98 * found / release.noise_std[0] - 1) > TOLERANCE  # 2 % too little would be seen
    assert abs(float(noise.mean())) * release.expected_batch_size < 5 * release.noise_std[0] / math.sqrt(PLACES)


@pytest.mark.parametrize("seed", [5, None], ids=["seeded", "not seeded"])
def test_no_two_steps_share_their_noise(seed):
    (first, _), (second, _) = _released("baseline", torch.float32, seed)
    correlation = float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(PLACES)
