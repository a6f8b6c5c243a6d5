"""Examples that the model already gets right: small gradients, matched as closely as any."""

import pytest
import torch
from torch import nn

from gradveil.attacks.methods.matching import CPL
from gradveil.attacks.observation.gradients import VictimGradients
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.scoring.metrics import psnr
from gradveil.attacks.seeds import start_of
from gradveil.training import data, models


@pytest.fixture(scope="module")
def threes():
    digits = data.load("digits")
    return digits.x_train[digits.y_train == 3][:3].unsqueeze(1)


def net(favour=0.0, shape=(1, 8, 8)):
    """By ``favour`` surer that everything is a three."""
    module = models.cpl_net(shape, 10, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module.linear.bias[3] += favour
    return module


def see(module, x):
    y = torch.full(x.shape[:2], 3)
    return observe(module, x, y, classes=10, generator=torch.Generator())[0]


def squared_norms(seen):
    return sum(g.square().flatten(1).sum(1) for g in seen.sights[0].gradients.values())


@pytest.mark.parametrize("favour", [4.0, 8.0])
def test_they_are_found_too(threes, favour):
    seen = see(net(favour), threes)
    assert float(squared_norms(seen).max()) < 1.0
    found = CPL().run(seen, iterations=100, seed=0)
    assert float(psnr(found.x, threes).min()) > 30.0
    assert found.x.dtype == threes.dtype


def test_others_are_matched_as_torch_does_it():
    """The plain squared difference, by torch.optim.LBFGS as it comes, one victim by itself."""
    images = torch.rand(2, 1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    module = net(-4.0, (3, 32, 32))
    seen = see(module, images)
    assert float(squared_norms(seen).min()) > 1000.0
    found = CPL().run(seen, iterations=3, seed=0)
    module.double()
    model = VictimGradients(module, dict(module.state_dict()))
    for v in range(2):
        x = start_of(seen, "half", torch.Generator().manual_seed(0))[v : v + 1].requires_grad_()
        optimizer = torch.optim.LBFGS([x])

        def closure(x=x, v=v):
            gradients = model.of_batch(x.double(), torch.full((1, 1), 3))
            loss = sum((gradients[n] - g[v : v + 1]).square().sum() for n, g in seen.sights[0].gradients.items())
            x.grad = torch.autograd.grad(loss, x)[0]
            return loss.detach()

        for losses in found.losses:
            assert float(losses[v]) == pytest.approx(float(optimizer.step(closure)), rel=1e-3)


class CastsItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return self.inner(x.float())


def test_a_model_that_knows_one_precision_only_is_attacked_in_it(threes):
    found = CPL().run(see(CastsItsInput(), threes), iterations=3, seed=0)
    assert found.x.dtype == torch.float32 and not bool(found.failed.any())
    assert bool((found.losses[-1] < found.losses[0]).all())
