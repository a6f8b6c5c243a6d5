"""L-BFGS for many independent problems at once.

Each row of x is a problem of its own, with its own history, step and end; all rows share the calls of the function that
is minimised. One row does what torch.optim.LBFGS does without a line search: ``inner`` evaluations per step at most,
the first step shortened to length one in the l1 norm, pairs of little curvature left out, the same four reasons to
break off. A row that has broken off, or whose numbers are not finite, stands still while the others go on.

Legend: V problems, D numbers each, H remembered pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gradveil.attacks.observation.replay import Replay

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From x (V, D) to losses (V,) and gradients (V, D)."""


def _dot(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(a, b)
    return product


class BatchedLBFGS:
    """``step()`` is one call of torch.optim.LBFGS.step for every row of ``x``, which is changed in place.

    On CUDA each part of a step is replayed as a graph, and so must ``evaluate`` be such as can be: see replay.py.
    """

    def __init__(
        self,
        x: Tensor,
        evaluate: Evaluate,
        *,
        lr: float = 1.0,
        inner: int = 20,
        history: int = 100,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
    ) -> None:
        if x.dim() != 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be (problems, numbers)")
        self._evaluate = evaluate
        self.lr, self.inner, self.history = lr, inner, history
        self.tolerance_grad, self.tolerance_change = tolerance_grad, tolerance_change
        self._state = _State(x)
        self._pairs: Pairs = CompactPairs(x, history) if x.is_cuda else TwoLoops(history)
        self._make_parts()

    @property
    def x(self) -> Tensor:
        return self._state.x

    def step(self, going: Tensor | None = None) -> Tensor:
        """At most ``inner`` evaluations of each row in ``going`` (default: all); losses at the start of the step."""
        state = self._state
        with torch.no_grad():
            self._look()
            first = state.new_loss.clone()
            state.active.fill_(True) if going is None else state.active.copy_(going)
            self._open()
            for turn in range(1, self.inner + 1):
                if not bool(state.active.any()):
                    break
                self._move()
                if turn < self.inner:
                    self._look()
                    self._judge()
            return first

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (a mask) only; ``x`` is a new tensor then."""
        self._state.keep(rows)
        self._pairs.keep(rows)
        self._make_parts()

    def _make_parts(self) -> None:
        """The parts of a step, each from tensors that stay in place to tensors that stay in place."""
        device = self.x.device
        self._look = Replay(self._evaluate_into_new, device)
        self._open = Replay(self._take_new_of_active, device)
        self._move = Replay(self._move_active, device)
        self._judge = Replay(self._judge_move, device)

    def _evaluate_into_new(self) -> None:
        loss, gradient = self._evaluate(self.x)
        self._state.new_loss.copy_(loss)
        self._state.new_gradient.copy_(gradient)

    def _take_new_of_active(self) -> None:
        s = self._state
        s.loss.copy_(s.new_loss)
        s.gradient.copy_(s.new_gradient)
        s.active &= torch.isfinite(s.loss) & torch.isfinite(s.gradient).all(1)
        s.active &= s.gradient.abs().amax(1) > self.tolerance_grad

    def _move_active(self) -> None:
        s = self._state
        self._choose_direction()
        put(s.before, s.active, s.gradient)
        put(s.loss_before, s.active, s.loss)
        start = torch.clamp(1.0 / s.gradient.abs().sum(1), max=1.0) * self.lr
        put(s.length, s.active, torch.where(s.begun, torch.full_like(start, self.lr), start))
        s.begun |= s.active
        s.active &= _dot(s.gradient, s.direction) <= -self.tolerance_change
        s.moved.copy_(torch.where(s.active[:, None], s.direction * s.length[:, None], 0.0))
        s.x += s.moved

    def _judge_move(self) -> None:
        s = self._state
        finite = torch.isfinite(s.new_loss) & torch.isfinite(s.new_gradient).all(1)
        s.x -= torch.where((s.active & ~finite)[:, None], s.moved, 0.0)  # a step into nowhere is taken back
        s.active &= finite
        put(s.loss, s.active, s.new_loss)
        put(s.gradient, s.active, s.new_gradient)
        s.active &= s.gradient.abs().amax(1) > self.tolerance_grad
        s.active &= s.moved.abs().amax(1) > self.tolerance_change
        s.active &= (s.loss - s.loss_before).abs() >= self.tolerance_change

    def _choose_direction(self) -> None:
        """By the remembered pairs; steepest descent for a row that has none."""
        s = self._state
        known = s.active & s.begun
        y = s.gradient - s.before
        step = s.direction * s.length[:, None]
        curvature = _dot(y, step)
        good = known & (curvature > 1e-10)
        self._pairs.add(torch.where(good[:, None], y, 0.0), torch.where(good[:, None], step, 0.0), good)
        put(s.scale, good, curvature / _dot(y, y))
        found = torch.where(known[:, None], self._pairs.times(s.gradient, s.scale), s.gradient)
        put(s.direction, s.active, -found)


class _State:
    """What a row of x carries from one evaluation to the next. Tensors stay in place, as graphs need them to."""

    def __init__(self, x: Tensor) -> None:
        numbers = x.new_zeros(len(x))
        self.x = x
        self.begun = torch.zeros_like(numbers, dtype=torch.bool)  # rows that have taken an inner step
        self.active = torch.zeros_like(self.begun)  # rows that have not broken off in this step
        self.new_loss, self.loss, self.loss_before = numbers.clone(), numbers.clone(), numbers.clone()
        self.new_gradient, self.gradient, self.before = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
        self.direction, self.moved = torch.zeros_like(x), torch.zeros_like(x)
        self.length = numbers.clone()
        self.scale = torch.ones_like(numbers)  # of the first guess at the inverse Hessian

    def keep(self, rows: Tensor) -> None:
        for name, tensor in vars(self).items():
            setattr(self, name, tensor[rows])


def put(to: Tensor, where: Tensor, values: Tensor) -> None:
    """Set the rows of ``to`` in ``where`` (V,), in place; the other values may be anything."""
    to.copy_(torch.where(where.view(-1, *[1] * (to.dim() - 1)), values, to))


class Pairs(Protocol):
    """Changes of the gradient y and of x, s, over the latest steps, and the inverse Hessian that they stand for."""

    def add(self, y: Tensor, s: Tensor, good: Tensor) -> None:
        """One more pair of each row (V, D); zero for the rows that leave it out, those that are not ``good``."""

    def times(self, v: Tensor, scale: Tensor) -> Tensor:
        """The inverse Hessian, begun with ``scale`` (V,) times the identity, times v (V, D)."""

    def keep(self, rows: Tensor) -> None: ...


class TwoLoops:
    """As torch.optim.LBFGS does it: over the pairs by age and back. A few numbers at a time, as a CPU likes it."""

    def __init__(self, history: int) -> None:
        self.history = history
        self._y: list[Tensor] = []
        self._s: list[Tensor] = []
        self._inverse: list[Tensor] = []  # 1 / <y, s>; 0 where a row leaves the pair out, which then does nothing

    def add(self, y: Tensor, s: Tensor, good: Tensor) -> None:
        if not bool(good.any()):
            return
        if len(self._y) == self.history:
            del self._y[0], self._s[0], self._inverse[0]
        self._y.append(y)
        self._s.append(s)
        self._inverse.append(torch.where(good, 1.0 / _dot(y, s), 0.0))

    def times(self, v: Tensor, scale: Tensor) -> Tensor:
        factors: list[Tensor] = []
        for y, s, inverse in zip(reversed(self._y), reversed(self._s), reversed(self._inverse), strict=True):
            factor = _dot(s, v) * inverse
            v = v - factor[:, None] * y
            factors.append(factor)
        v = v * scale[:, None]
        for y, s, inverse, factor in zip(self._y, self._s, self._inverse, reversed(factors), strict=True):
            v = v + (factor - _dot(y, v) * inverse)[:, None] * s
        return v

    def keep(self, rows: Tensor) -> None:
        for pairs in (self._y, self._s, self._inverse):
            pairs[:] = [t[rows] for t in pairs]


class CompactPairs:
    """The same matrix in its compact form (Byrd, Nocedal and Schnabel 1994): a few products for all pairs at once.

    With S and Y the pairs as columns, R the upper triangle of S^T Y by age, D its diagonal and c the scale,

        H = c I + S R^-T (D + c Y^T Y) R^-1 S^T - c (S R^-T Y^T + Y R^-1 S^T).

    Two loops over a hundred pairs are eight hundred launches on a GPU, this is twenty, of shapes that never change: a
    row without so many pairs has zeros for the oldest. In float64: the triangle is badly conditioned where steps are
    alike.
    """

    def __init__(self, x: Tensor, history: int) -> None:
        rows, size = x.shape
        self.history = history
        self._row = torch.arange(rows, device=x.device)
        self._count = torch.zeros_like(self._row)  # pairs that a row has ever had
        self._y = x.new_zeros((rows, history, size), dtype=torch.float64)
        self._s = torch.zeros_like(self._y)
        self._sy = x.new_zeros((rows, history, history), dtype=torch.float64)  # <s_i, y_j>
        self._yy = torch.zeros_like(self._sy)

    def add(self, y: Tensor, s: Tensor, good: Tensor) -> None:
        row, place = self._row, self._count % self.history  # the oldest is written over
        for pairs, new in ((self._y, y), (self._s, s)):
            pairs[row, place] = torch.where(good[:, None], new.double(), pairs[row, place])
        latest_y, latest_s = self._y[row, place], self._s[row, place]
        self._sy[row, :, place] = torch.einsum("vhd,vd->vh", self._s, latest_y)
        self._sy[row, place] = torch.einsum("vhd,vd->vh", self._y, latest_s)
        products = torch.einsum("vhd,vd->vh", self._y, latest_y)
        self._yy[row, :, place] = products
        self._yy[row, place] = products
        self._count += good

    def times(self, v: Tensor, scale: Tensor) -> Tensor:
        by_age = (torch.arange(self.history, device=v.device) + self._count[:, None]) % self.history
        row = self._row[:, None]
        sy = self._sy[row[:, :, None], by_age[:, :, None], by_age[:, None, :]]
        yy = self._yy[row[:, :, None], by_age[:, :, None], by_age[:, None, :]]
        diagonal = sy.diagonal(dim1=1, dim2=2)
        # A pair that a row does not have is zero throughout: a one on the diagonal lets it solve to zero.
        triangle = torch.triu(sy) + torch.diag_embed((diagonal == 0).double())
        wide, c = v.double(), scale.double()[:, None]
        of_s = torch.einsum("vhd,vd->vh", self._s, wide)[row, by_age]
        of_y = torch.einsum("vhd,vd->vh", self._y, wide)[row, by_age]
        inner = torch.linalg.solve_triangular(triangle, of_s[:, :, None], upper=True)  # R^-1 S^T v
        middle = diagonal[:, :, None] * inner + c[:, :, None] * (yy @ inner - of_y[:, :, None])
        outer = torch.linalg.solve_triangular(triangle.mT, middle, upper=False)
        along_s, along_y = torch.empty_like(of_s), torch.empty_like(of_y)
        along_s[row, by_age], along_y[row, by_age] = outer[:, :, 0], inner[:, :, 0]
        found = c * wide + torch.einsum("vhd,vh->vd", self._s, along_s)
        found = found - c * torch.einsum("vhd,vh->vd", self._y, along_y)
        return found.to(v.dtype)

    def keep(self, rows: Tensor) -> None:
        for name in ("_count", "_y", "_s", "_sy", "_yy"):
            setattr(self, name, getattr(self, name)[rows])
        self._row = torch.arange(len(self._count), device=self._count.device)
