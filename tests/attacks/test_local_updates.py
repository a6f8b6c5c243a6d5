"""Updates of several local steps: the simulation is SGD, attacks go through it, and unknown settings are found."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.attacks.methods.inversion import MAP
from gradveil.attacks.methods.matching import CPL
from gradveil.attacks.observation.from_files import state_of
from gradveil.attacks.observation.gradients import VictimGradients
from gradveil.attacks.observation.local_updates import LocalUpdates, load_update, unexplained
from gradveil.attacks.observation.views import LocalSteps
from gradveil.attacks.scoring.metrics import psnr
from gradveil.errors import ConfigError
from gradveil.training import data

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 10)).eval()


def trained(module, x, y, *, steps, lr, momentum=0.0, batch=None):
    """A client: torch's own SGD."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    size = batch or len(x)
    parts = itertools.cycle([slice(i, i + size) for i in range(0, len(x), size)])
    for _, part in zip(range(steps), parts, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(module(x[part]), y[part]).backward()
        optimizer.step()
    return {n: t.detach() for n, t in module.state_dict().items()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch", [None, 2])
def test_the_simulation_is_what_sgd_does(digits, momentum, batch):
    settings = {"steps": 5, "lr": 0.1, "momentum": momentum, "batch": batch}
    x, y = digits.x_train[:4], digits.y_train[:4]
    after, local = trained(net(), x, y, **settings), LocalSteps(**settings)
    with torch.no_grad():
        found = LocalUpdates(net(), state_of(net()), local).of_batch(x.unsqueeze(0), y.unsqueeze(0))
    for name, parameter in net().named_parameters():
        assert torch.allclose(parameter - local.scale * found[name][0], after[name], atol=1e-6)


def test_one_step_is_the_gradient(digits):
    x, y = digits.x_train[:3].unsqueeze(0), digits.y_train[:3].unsqueeze(0)
    local = LocalUpdates(net(), state_of(net()), LocalSteps(steps=1, lr=0.3)).of_batch(x, y)
    plain = VictimGradients(net(), state_of(net())).of_batch(x, y)
    assert all(torch.allclose(local[n], plain[n], atol=1e-6) for n in plain)


def test_five_local_steps_are_within_3_db_of_one(digits):
    reached = {}
    for steps in (1, 5):
        after = trained(net(), digits.x_train[:1], digits.y_train[:1], steps=steps, lr=0.1)
        seen = load_update(net(), after, LocalSteps(steps=steps, lr=0.1), input_shape=SHAPE)
        reached[steps] = float(psnr(CPL().run(seen, iterations=12).x, digits.x_train[:1].unsqueeze(0)))
        blind = load_update(net(), after, LocalSteps(steps=1, lr=0.1 * steps), input_shape=SHAPE)
        if steps == 5:  # who takes the update for one step's gradient gets nothing
            assert float(psnr(CPL().run(blind, iterations=12).x, digits.x_train[:1].unsqueeze(0))) < 15
    assert reached[1] > 60 and reached[5] > min(reached[1], 90) - 3


def test_a_clipped_and_noised_update_is_attacked_by_map(digits):
    x, y = digits.x_train[:1], digits.y_train[:1]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10)).eval()
    after = trained(module, x, y, steps=3, lr=0.1)
    update = {n: (p - after[n]).detach() for n, p in module.named_parameters()}
    clip = 0.5 * float(torch.cat([u.flatten() for u in update.values()]).norm())
    clipped = {n: p.detach() - 0.5 * update[n] for n, p in module.named_parameters()}
    local = LocalSteps(steps=3, lr=0.1)
    seen = load_update(module, clipped, local, input_shape=SHAPE, clip=clip, sigma=1e-4, clipping="flat")
    defence = seen.sights[0].defence
    assert defence.clip == pytest.approx((clip / local.scale,)) and defence.noise_std == pytest.approx(
        (1e-4 * clip / local.scale,)
    )
    assert float(psnr(MAP(restarts=1).run(seen, iterations=150).x, x.unsqueeze(0))) > 15


def test_unknown_steps_and_rates_are_told_apart(digits):
    after = trained(net(), digits.x_train[:1], digits.y_train[:1], steps=4, lr=0.2)
    left = {}
    for steps, lr in ((1, 0.2), (4, 0.2)):
        seen = load_update(net(), after, LocalSteps(steps=steps, lr=lr), input_shape=SHAPE)
        left[steps, lr] = unexplained(seen, CPL().run(seen, iterations=4))
    assert min(left, key=left.get) == (4, 0.2) and left[4, 0.2] < 1e-3


@pytest.mark.parametrize(
    "settings", [{"steps": 0, "lr": 1.0}, {"steps": 1, "lr": 0.0}, {"steps": 1, "lr": 1.0, "batch": 0}]
)
def test_steps_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="give"):
        LocalSteps(**settings)
    with pytest.raises(ConfigError, match="momentum 1"):
        LocalSteps(steps=1, lr=1.0, momentum=1.0)
