"""Batches with some rows replaced, and by how much the rows that were kept differ."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGE = 1e4
_OWN_DRAWS = random.Random()  # the user's generators are left alone


@dataclass(frozen=True)
class Split:
    """The rows of a batch in two halves of whole examples, each in the order of the batch."""

    rows: int
    views: int
    sides: tuple[Tensor, Tensor]
    shifts: tuple[int, int]

    @classmethod
    def random(cls, rows: int, views: int = 1, seed: int | None = None) -> Split | None:
        """None: fewer than two examples."""
        examples = rows // views
        if examples < 2 or rows % views:
            return None
        draw = _OWN_DRAWS if seed is None else random.Random(seed)
        order = draw.sample(range(examples), examples)
        sides = sorted(order[: examples // 2]), sorted(order[examples // 2 :])
        first, second = (torch.tensor([e * views + v for e in side for v in range(views)]) for side in sides)
        return cls(rows, views, (first, second), (draw.randrange(len(sides[1])), draw.randrange(len(sides[0]))))

    @property
    def everything(self) -> Tensor:
        return torch.arange(self.rows)

    def replacements(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that are kept, and the index of the batch in which the others are replaced by those."""
        for (kept, replaced), shift in zip((self.sides, self.sides[::-1]), self.shifts[::-1], strict=True):
            sources = kept.view(-1, self.views).roll(shift, 0)
            targets = replaced.view(-1, self.views)
            index = self.everything
            index[targets] = sources[torch.arange(len(targets)) % len(sources)]
            yield kept, index

    def batch_dim(self, whole: Tensor, halves: Sequence[Tensor]) -> int | None:
        """The one dimension of an output that follows the number of rows; None: there is none, or it is unclear."""
        if len(halves) != 2 or any(half.dim() != whole.dim() for half in halves):
            return None
        differing = [d for d in range(whole.dim()) if any(half.shape[d] != whole.shape[d] for half in halves)]
        sizes = [whole, *halves]
        expected = [self.rows, *map(len, self.sides)]
        if len(differing) != 1 or [t.shape[differing[0]] for t in sizes] != expected:
            return None
        return differing[0]


def largest_difference(a: Tensor, b: Tensor, kept: Tensor, dim: int = 0) -> float:
    """The largest difference between kept rows of ``a`` and ``b``, each relative to the largest element of its row.

    Equal values that are not finite do not differ; a value that is finite in one only differs by infinity.
    """
    kept = kept.to(a.device)
    a, b = (t.detach().index_select(dim, kept).movedim(dim, 0) for t in (a, b))
    if torch.equal(a, b) or not a.numel():
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = (t.double().reshape(len(kept), -1) for t in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)
    sizes = torch.maximum(*(t.abs().nan_to_num(0.0, 0.0, 0.0) for t in (a, b)))
    masks = are_masks(sizes)
    if masks is None:
        return _relative(apart, sizes)
    return max(_relative(apart.where(part, 0.0), sizes.where(part, 0.0)) for part in (masks, ~masks))


def _relative(apart: Tensor, sizes: Tensor) -> float:
    scale = sizes.amax(1)
    # 1e-6 of the whole: a row of zeros has no size of its own.
    scale = scale.clamp(min=max(1e-6 * float(scale.max()), 1e-30))
    return float((apart.amax(1) / scale).max())


def are_masks(sizes: Tensor) -> Tensor | None:
    """Where values are so large, apart from all others, that they must be what masks others (-1e9 on a logit).

    Beside them any difference of the others would be below rounding. None: there are none.
    """
    large = sizes >= _LARGE
    if not bool(large.any()) or bool(large.all()):
        return None
    return large if float(sizes[large].min()) >= 100 * float(sizes[~large].max()) else None


def tolerance(t: Tensor, *, autocast: bool = False) -> float:
    """What rounding may change in a row when other rows change and nothing else does.

    Nothing, mostly: the same kernels run on the same shapes. But models that route rows (experts, packed sequences)
    multiply matrices of other sizes when other rows change.
    """
    if autocast or t.dtype in (torch.float16, torch.bfloat16):
        return 2e-2
    if t.is_cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        return 1e-3
    return 1e-10 if t.dtype in (torch.float64, torch.complex128) else 1e-5
