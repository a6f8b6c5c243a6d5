"""L-BFGS for many independent problems at once.

Each row of x is a problem of its own, with its own history, step and end; all rows share the calls of the function that
is minimised. One row does what torch.optim.LBFGS does without a line search: ``inner`` evaluations per step at most,
the first step shortened to length one in the l1 norm, pairs of little curvature left out, the same four reasons to
break off. A row that has broken off, or whose numbers are not finite, stands still while the others go on.

Legend: V problems, D numbers each, H remembered pairs.
"""

from __future__ import annotations

from collections.abc import Callable

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
        # Pairs by age; a row that leaves a pair out has 1/<y, s> = 0 there, which makes the pair do nothing.
        self._y: list[Tensor] = []
        self._s: list[Tensor] = []
        self._inverse: list[Tensor] = []

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
        for pairs in (self._y, self._s, self._inverse):
            pairs[:] = [t[rows] for t in pairs]

    def _choose_direction(self, gradient: Tensor, active: Tensor) -> None:
        """Two loops over the remembered pairs; steepest descent for a row that has none."""
        known = active & self._begun
        if bool(known.any()):
            self._remember(gradient, known)
        direction = -gradient
        factors: list[Tensor] = []
        for y, s, inverse in zip(reversed(self._y), reversed(self._s), reversed(self._inverse), strict=True):
            factor = _dot(s, direction) * inverse
            direction = direction - factor[:, None] * y
            factors.append(factor)
        direction = direction * self._scale[:, None]
        for y, s, inverse, factor in zip(self._y, self._s, self._inverse, reversed(factors), strict=True):
            direction = direction + (factor - _dot(y, direction) * inverse)[:, None] * s
        direction = torch.where(known[:, None], direction, -gradient)
        self._direction = torch.where(active[:, None], direction, self._direction)

    def _remember(self, gradient: Tensor, known: Tensor) -> None:
        y = gradient - self._before
        s = self._direction * self._length[:, None]
        curvature = _dot(y, s)
        good = known & (curvature > 1e-10)
        if not bool(good.any()):
            return
        if len(self._y) == self.history:
            del self._y[0], self._s[0], self._inverse[0]
        self._y.append(torch.where(good[:, None], y, 0.0))
        self._s.append(torch.where(good[:, None], s, 0.0))
        self._inverse.append(torch.where(good, 1.0 / curvature, 0.0))
        self._scale = torch.where(good, curvature / _dot(y, y), self._scale)
