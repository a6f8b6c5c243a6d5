"""Batches behind a ReLU are told apart exactly; where they cannot be, analytic says so and returns no blend."""

import pytest
import torch
from torch import nn

from gradveil.attacks.methods.analytic import Analytic
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.scoring.metrics import matched, psnr
from gradveil.errors import UnsupportedModelError
from gradveil.mechanism.strategies import parameters

SHAPE = (1, 12, 12)


def net(activation=nn.ReLU, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(144, 150), activation(), nn.Linear(150, 60), nn.ReLU(), nn.Linear(60, 10)
    )


def see(module, batch, victims=2, **settings):
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(victims, batch, *SHAPE, generator=generator)
    y = torch.randint(10, (victims, batch), generator=generator)
    return observe(module, x, y, view="batch", classes=10, generator=generator, **settings)


@pytest.mark.parametrize(("batch", "clip"), [(2, None), (5, None), (5, 0.01), (9, None)])
def test_every_example_of_a_batch_exactly(batch, clip):
    """With clipping too, which scales each example's part by a factor of its own. Classes may repeat."""
    plan = None if clip is None else parameters("baseline", steps=1, clip=clip, sigma=1.0)
    if plan is not None:  # seen before the noise
        from dataclasses import replace

        from gradveil.attacks.observation.gradients import model_at

        seen, secret = see(net(), batch, plan=plan)
        (sight,) = seen.sights
        defence = replace(sight.defence, noise_std=None)
        clean = model_at(seen, sight).released(secret.x, secret.y, defence)
        seen = replace(
            seen, sights=(replace(sight, gradients={n: g.detach() for n, g in clean.items()}, defence=defence),)
        )
    else:
        seen, secret = see(net(), batch)
    found = Analytic().run(seen)
    order = matched(found.x, secret.x)
    x = torch.stack([row[picked] for row, picked in zip(found.x, order, strict=True)])
    assert float(psnr(x, secret.x).min()) > 60.0
    assert torch.equal(torch.gather(found.labels, 1, order), secret.y) and not bool(found.failed.any())


def test_no_blend_without_a_word():
    with pytest.raises(UnsupportedModelError, match="told apart"):
        Analytic().run(see(net(nn.Sigmoid), 4)[0])
    with pytest.raises(UnsupportedModelError, match="one blend"):
        Analytic().run(see(net(), 4, plan=parameters("baseline", steps=1, clip=1.0, sigma=1.0))[0])
