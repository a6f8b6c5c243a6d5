"""Ways in which people use their layers: checkpointing, mixed precision, memory formats, compilation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from networks import agree, compare
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradveil.clipping import Clipper, clipped_sums, make_groups


class Checkpointed(nn.Module):
    def __init__(self, reentrant, twice=False):
        super().__init__()
        self.reentrant, self.twice = reentrant, twice
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.recompute = True

    def forward(self, x):
        z = torch.tanh(self.first(x))
        for _ in range(2 if self.twice else 1):
            z = checkpoint(self.block, z, use_reentrant=self.reentrant) if self.recompute else self.block(z)
        return self.head(z)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, clipping):
    model = Checkpointed(reentrant).double()
    x, y = torch.randn(7, 6).double(), torch.randint(0, 3, (7,))
    compare(model, x, y, clipping=clipping)
    model.zero_grad()
    compare(model, x, y, clipping=clipping, reduction="sum")


def test_a_checkpoint_of_the_whole_model_body():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    for clipping in ("per-layer", "flat"):
        compare(copy.deepcopy(Whole()), torch.randn(7, 6).double(), torch.randint(0, 3, (7,)), clipping=clipping)


def test_a_module_in_two_checkpoints_is_the_sum_of_its_uses():
    x, y = torch.randn(7, 6).double(), torch.randint(0, 3, (7,))
    compare(Checkpointed(False, twice=True).double(), x, y)
    compare(Checkpointed(True, twice=True).double(), x, y, clipping="flat")
    compare(Checkpointed(True, twice=True).double(), x, y)


def _halves(clipping, *, inside, inputs, bound=0.1):
    """The clipped sums of a model under autocast, with backward() in the block or after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Tanh(), nn.Linear(8, 3))
    groups = make_groups(model, clipping)
    clipper = Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(inputs).float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    clipper.detach()
    return {name: p.grad for name, p in model.named_parameters()}, groups


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's own, of an RMSNorm under autocast
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("positions", [(), (5,)])
def test_backward_inside_an_autocast_block_is_the_same_and_keeps_to_the_bound(clipping, positions):
    for seed in range(20):
        x = torch.randn(1, *positions, 6, generator=torch.Generator().manual_seed(seed))
        inside, groups = _halves(clipping, inside=True, inputs=x)
        outside, _ = _halves(clipping, inside=False, inputs=x)
        assert all(torch.equal(inside[name], outside[name]) for name in inside)
        for group in groups:
            assert math.hypot(*(float(inside[name].norm()) for name in group.parameters)) <= 0.1 * (1 + 1e-6)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_rms_norm_of_halves_has_the_gradient_of_plain_autograd():
    x = 0.01 * torch.randn(4, 6)  # small beside the eps of half precision
    found, _ = _halves("per-layer", inside=False, inputs=x, bound=1e9)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Tanh(), nn.Linear(8, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = plain(x)
    out.float().square().sum().backward()
    for name, p in plain.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=0.05, atol=0.02 * float(p.grad.abs().max())), name


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_bfloat16_autocast_stays_close_to_float32_and_within_the_bound(clipping):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )
    x, y = torch.randn(9, 1, 8, 8), torch.randint(0, 3, (9,))
    groups = make_groups(model, clipping)
    bounds = [0.1] * len(groups)
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    F.cross_entropy(out.float(), y).backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        assert float((p.grad - reference.sums[name]).norm()) < 0.05 * 9 * 0.1
    assert all(clipper.clip_stats.largest(g) <= 0.1 for g in range(len(groups)))
    clipper.detach()


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_channels_last(clipping):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(144, 3),
    ).double()
    x, y = torch.randn(7, 3, 8, 8).double(), torch.randint(0, 3, (7,))
    compare(
        copy.deepcopy(model).to(memory_format=torch.channels_last),
        x.to(memory_format=torch.channels_last),
        y,
        clipping=clipping,
    )
    compare(model, x.transpose(2, 3).contiguous().transpose(2, 3), y, clipping=clipping)


def test_gradient_accumulation_over_several_batches_adds_up():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(12, 6).double(), torch.randint(0, 3, (12,))
    groups = make_groups(model, "flat")
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=[0.3])
    clipper = Clipper(model, groups, bounds=[0.3], loss_reduction="mean")
    for part in (slice(0, 5), slice(5, 12)):
        F.cross_entropy(model(x[part]), y[part]).backward()
    agree(model, clipper, reference, [0.3], 12, 1e-9)
    clipper.detach()


def test_several_passes_may_be_open_at_once():
    """Two forward passes, then their backward passes in any order."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(12, 6).double(), torch.randint(0, 3, (12,))
    for clipping in ("per-layer", "flat"):
        groups = make_groups(model, clipping)
        bounds = [0.3] * len(groups)
        reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds)
        clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
        first, second = F.cross_entropy(model(x[:5]), y[:5]), F.cross_entropy(model(x[5:]), y[5:])
        second.backward()
        first.backward()
        agree(model, clipper, reference, bounds, 12, 1e-9)
        model.zero_grad()
        clipper.detach()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_torch_compile(clipping):
    """A compiled model: the followed layers run eagerly between compiled parts; the sums are the same."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x, y = torch.randn(7, 6).double(), torch.randint(0, 3, (7,))
    groups = make_groups(model, clipping)
    bounds = [0.1] * len(groups)
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        clipper.clip_stats.__init__(len(groups))
        F.cross_entropy(compiled(x), y).backward()
        agree(model, clipper, reference, bounds, 7, 1e-9)
    clipper.detach()
