"""What docs/from-opacus.md says of accounting: the same run costs the same in Opacus and in gradveil.

pip install "gradveil[peers]" && pytest tests/integrations/test_from_opacus.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.accounting import proved_epsilon

opacus = pytest.importorskip("opacus", reason="opacus is not installed: pip install 'gradveil[peers]'")

# Opacus on its random numbers, torch on Opacus's hooks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),
]

N, BATCH, DELTA = 640, 64, 1e-4


def parts():
    data = TensorDataset(torch.randn(N, 20), torch.randint(0, 3, (N,)))
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=BATCH, shuffle=True)


def loop(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def of_opacus(accountant, epochs, z, clipping="flat"):
    engine = opacus.PrivacyEngine(accountant=accountant)
    module, optimizer, loader = parts()
    bound = 1.0 if clipping == "flat" else [1.0] * len(list(module.parameters()))
    model, optimizer, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=z,
        max_grad_norm=bound,
        clipping=clipping,
    )
    for _ in range(epochs):
        loop(model, optimizer, loader)
    return engine.get_epsilon(delta=DELTA)


def of_gradveil(epochs, sigma, clipping="flat"):
    model, optimizer, loader = parts()
    engine = gradveil.PrivacyEngine(sigma=sigma, clip=1.0, clipping=clipping, steps=epochs * len(loader), delta=DELTA)
    loop(*engine.make_private(module=model, optimizer=optimizer, data_loader=loader))
    rdp = proved_epsilon(engine.header, engine.releases, accountant="RDP").epsilon
    return engine.statement().proved.epsilon, rdp


@pytest.mark.parametrize(("epochs", "z"), [(1, 1.0), (3, 2.0), (6, 4.0)])
def test_the_same_run_costs_the_same(epochs, z):
    pld, rdp = of_gradveil(epochs, z)
    assert pld == pytest.approx(of_opacus("prv", epochs, z), rel=0.02)
    assert rdp == pytest.approx(of_opacus("rdp", epochs, z), rel=0.02)


def test_clipping_per_layer_costs_the_same_where_sigma_is_z_times_the_root_of_the_layers():
    layers = 2
    pld, _ = of_gradveil(2, 2.0 * math.sqrt(layers), clipping="per-layer")
    assert pld == pytest.approx(of_opacus("prv", 2, 2.0, clipping="per_layer"), rel=0.02)
