"""Each row of the batched L-BFGS is torch's own, run by itself."""

import pytest
import torch

from gradveil.attacks.methods.lbfgs import BatchedLBFGS, CompactPairs, TwoLoops


def functions():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    quadratic = a @ a.T + torch.eye(6, dtype=torch.float64)
    centre = torch.randn(6, generator=generator, dtype=torch.float64)

    def bowl(x):
        return 0.5 * (x - centre) @ quadratic @ (x - centre)

    def banana(x):
        return (0.2 * (x[1:] - x[:-1] ** 2) ** 2 + 0.05 * (1 - x[:-1]) ** 2).sum()

    def waves(x):
        return (torch.sin(x) + 0.1 * x**2).sum()

    return bowl, banana, waves


def alone(function, start, steps):
    x = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x])

    def closure():
        optimizer.zero_grad()
        loss = function(x)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(steps)]
    return x.detach(), losses


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_every_row_is_torchs_lbfgs(steps):
    parts = functions()
    starts = torch.randn(len(parts) * 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def evaluate(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            losses = torch.stack([parts[i % len(parts)](row) for i, row in enumerate(x)])
            (gradient,) = torch.autograd.grad(losses.sum(), x)
        return losses.detach(), gradient

    x = starts.clone()
    optimizer = BatchedLBFGS(x, evaluate)
    losses = torch.stack([optimizer.step() for _ in range(steps)])
    for i, start in enumerate(starts):
        expected, path = alone(parts[i % len(parts)], start, steps)
        assert torch.allclose(x[i], expected, atol=1e-8), i
        assert torch.allclose(losses[:, i], torch.tensor(path, dtype=torch.float64), atol=1e-8), i


def test_rows_do_not_touch_each_other():
    def evaluate(x):
        return (x**4).sum(1), 4 * x**3

    generator = torch.Generator().manual_seed(2)
    starts = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    together, single = starts.clone(), starts[2:3].clone()
    both = [BatchedLBFGS(together, evaluate), BatchedLBFGS(single, evaluate)]
    for _ in range(4):
        for optimizer in both:
            optimizer.step()
    assert torch.allclose(together[2], single[0], atol=1e-12)


def test_a_row_that_is_not_finite_stands_still_and_the_others_go_on():
    def evaluate(x):
        losses = (x**2).sum(1)
        losses = torch.where(x[:, 0] < -5, float("nan"), losses)
        return losses, 2 * x

    x = torch.tensor([[-9.0, 1.0], [3.0, 4.0]])
    optimizer = BatchedLBFGS(x, evaluate)
    for _ in range(3):
        optimizer.step()
    assert x[0].tolist() == [-9.0, 1.0]
    assert float(x[1].abs().max()) < 1e-4


def test_rows_that_are_told_to_stop():
    def evaluate(x):
        return (x**2).sum(1), 2 * x

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    BatchedLBFGS(x, evaluate).step(torch.tensor([True, False]))
    assert x[1].tolist() == [3.0, 4.0] and float(x[0].abs().max()) < 1e-3


def test_the_compact_form_is_the_same_matrix_as_two_loops() -> None:
    """More pairs than are remembered, rows that leave some out, and a row that goes. One row's history is its own."""
    generator = torch.Generator().manual_seed(2)
    rows, size, history = 5, 12, 4
    curved = torch.eye(size, dtype=torch.float64) + torch.diag(torch.rand(size, generator=generator).double())
    loops = [TwoLoops(history) for _ in range(rows)]
    compact = CompactPairs(torch.zeros(rows, size, dtype=torch.float64), history)
    scale = torch.rand(rows, generator=generator).double() + 0.5
    v = torch.randn(rows, size, generator=generator).double()
    assert torch.equal(compact.times(v, scale), v * scale[:, None])
    for turn in range(11):
        good = torch.rand(len(v), generator=generator) > 0.3
        s = torch.where(good[:, None], torch.randn(len(v), size, generator=generator).double(), 0.0)
        compact.add(s @ curved, s, good)
        found = compact.times(v, scale)
        for i, pairs in enumerate(loops):
            pairs.add((s @ curved)[i : i + 1], s[i : i + 1], good[i : i + 1])
            expected = pairs.times(v[i : i + 1], scale[i : i + 1])
            torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-9, atol=1e-9)
        if turn == 7:
            kept = torch.tensor([True, True, False, True, True])
            compact.keep(kept)
            del loops[2]
            scale, v = scale[kept], v[kept]
