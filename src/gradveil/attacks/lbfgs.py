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

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From x (V, D) to losses (V,) and gradients (V, D)."""


def _dot(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(a, b)
    return product


class BatchedLBFGS:
    """``step()`` is one call of torch.optim.LBFGS.step for every row of ``x``, which is changed in place."""

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
        self.x, self._evaluate = x, evaluate
        self.lr, self.inner, self.history = lr, inner, history
        self.tolerance_grad, self.tolerance_change = tolerance_grad, tolerance_change
        rows = len(x)
        self._begun = torch.zeros(rows, dtype=torch.bool, device=x.device)  # rows that have taken an inner step
        self._direction = torch.zeros_like(x)
        self._length = torch.zeros(rows, dtype=x.dtype, device=x.device)
        self._before = torch.zeros_like(x)  # gradient before the latest step
        self._loss_before = torch.full((rows,), float("inf"), dtype=x.dtype, device=x.device)
        self._scale = torch.ones(rows, dtype=x.dtype, device=x.device)  # of the first guess at the inverse Hessian
        self._pairs: Pairs = CompactPairs(x, history) if x.is_cuda else TwoLoops(history)

    def step(self, going: Tensor | None = None) -> Tensor:
        """At most ``inner`` evaluations of each row in ``going`` (default: all); losses at the start of the step."""
        with torch.no_grad():
            loss, gradient = self._evaluate(self.x)
            first = loss.clone()
            active = torch.ones_like(self._begun) if going is None else going.clone()
            active &= torch.isfinite(loss) & torch.isfinite(gradient).all(1)
            active &= gradient.abs().amax(1) > self.tolerance_grad
            for turn in range(1, self.inner + 1):
                if not bool(active.any()):
                    break
                self._choose_direction(gradient, active)
                self._before = torch.where(active[:, None], gradient, self._before)
                self._loss_before = torch.where(active, loss, self._loss_before)
                start = torch.clamp(1.0 / gradient.abs().sum(1), max=1.0) * self.lr
                length = torch.where(self._begun, torch.full_like(start, self.lr), start)
                self._length = torch.where(active, length, self._length)
                self._begun |= active
                active = active & (_dot(gradient, self._direction) <= -self.tolerance_change)
                moved = self._direction * self._length[:, None]
                self.x += torch.where(active[:, None], moved, 0.0)
                if turn == self.inner:
                    break
                new_loss, new_gradient = self._evaluate(self.x)
                finite = torch.isfinite(new_loss) & torch.isfinite(new_gradient).all(1)
                self.x -= torch.where((active & ~finite)[:, None], moved, 0.0)  # a step into nowhere is taken back
                active = active & finite
                loss = torch.where(active, new_loss, loss)
                gradient = torch.where(active[:, None], new_gradient, gradient)
                active = active & (gradient.abs().amax(1) > self.tolerance_grad)
                active = active & (moved.abs().amax(1) > self.tolerance_change)
                active = active & ((loss - self._loss_before).abs() >= self.tolerance_change)
            return first

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows (a mask) only; ``x`` is a new tensor then."""
        for name in ("x", "_begun", "_direction", "_length", "_before", "_loss_before", "_scale"):
            setattr(self, name, getattr(self, name)[rows])
        self._pairs.keep(rows)

    def _choose_direction(self, gradient: Tensor, active: Tensor) -> None:
        """By the remembered pairs; steepest descent for a row that has none."""
        known = active & self._begun
        if bool(known.any()):
            self._remember(gradient, known)
        direction = torch.where(known[:, None], -self._pairs.times(gradient, self._scale), -gradient)
        self._direction = torch.where(active[:, None], direction, self._direction)

    def _remember(self, gradient: Tensor, known: Tensor) -> None:
        y = gradient - self._before
        s = self._direction * self._length[:, None]
        curvature = _dot(y, s)
        good = known & (curvature > 1e-10)
        if not bool(good.any()):
            return
        self._pairs.add(torch.where(good[:, None], y, 0.0), torch.where(good[:, None], s, 0.0), good)
        self._scale = torch.where(good, curvature / _dot(y, y), self._scale)


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

    Two loops over a hundred pairs are eight hundred launches on a GPU, this is twenty. In float64: the triangle is
    badly conditioned where steps are alike.
    """

    def __init__(self, x: Tensor, history: int) -> None:
        rows, size = x.shape
        self.history, self._count = history, 0
        self._y = x.new_zeros((rows, history, size), dtype=torch.float64)
        self._s = torch.zeros_like(self._y)
        self._sy = x.new_zeros((rows, history, history), dtype=torch.float64)  # <s_i, y_j>
        self._yy = torch.zeros_like(self._sy)

    def add(self, y: Tensor, s: Tensor, good: Tensor) -> None:
        place = self._count % self.history  # the oldest is written over
        self._count += 1
        y, s = y.double(), s.double()
        self._y[:, place], self._s[:, place] = y, s
        self._sy[:, :, place] = torch.einsum("vhd,vd->vh", self._s, y)
        self._sy[:, place, :] = torch.einsum("vhd,vd->vh", self._y, s)
        products = torch.einsum("vhd,vd->vh", self._y, y)
        self._yy[:, :, place] = products
        self._yy[:, place, :] = products

    def times(self, v: Tensor, scale: Tensor) -> Tensor:
        known = min(self._count, self.history)
        if not known:
            return v * scale[:, None]
        first = self._count % self.history if self._count > self.history else 0
        by_age = (torch.arange(known, device=v.device) + first) % self.history
        sy = self._sy[:, by_age][:, :, by_age]
        yy = self._yy[:, by_age][:, :, by_age]
        diagonal = sy.diagonal(dim1=1, dim2=2)
        # A pair that a row leaves out is zero throughout: a one on the diagonal lets it solve to zero.
        triangle = torch.triu(sy) + torch.diag_embed((diagonal == 0).double())
        wide, c = v.double(), scale.double()[:, None]
        of_s = torch.einsum("vhd,vd->vh", self._s, wide)[:, by_age]
        of_y = torch.einsum("vhd,vd->vh", self._y, wide)[:, by_age]
        inner = torch.linalg.solve_triangular(triangle, of_s[:, :, None], upper=True)  # R^-1 S^T v
        middle = diagonal[:, :, None] * inner + c[:, :, None] * (yy @ inner - of_y[:, :, None])
        outer = torch.linalg.solve_triangular(triangle.mT, middle, upper=False)
        back = torch.argsort(by_age) if known == self.history else by_age
        along_s, along_y = outer[:, back, 0], inner[:, back, 0]
        found = c * wide + torch.einsum("vhd,vh->vd", self._s[:, :known], along_s)
        found = found - c * torch.einsum("vhd,vh->vd", self._y[:, :known], along_y)
        return found.to(v.dtype)

    def keep(self, rows: Tensor) -> None:
        for name in ("_y", "_s", "_sy", "_yy"):
            setattr(self, name, getattr(self, name)[rows])
