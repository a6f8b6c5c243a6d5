"""The examples of a small batch, exactly, from the gradient of a first linear layer that a ReLU follows.

With X (B, n) the inputs and D (m, B) the gradients of the layer's outputs, the weight's gradient is D X, of rank B, and
the bias' is the sum of D's columns. Any basis U (m, B) of its columns has D = U Q for some Q. A ReLU that is closed for
an example leaves a zero in its column of D: so the columns are the sparse ones among all U q (Dimitrov et al. 2024,
"SPEAR"). Rows of U are drawn, B - 1 at a time; the q that is 0 on them all is a column of Q if it is 0 on many more
rows than those. These rows give q once more, to the last digit, and the bias its length. Clipping scales the columns
and changes nothing else; noise leaves no exact zeros.

Legend: V victims, B examples, n numbers of an input, m outputs of the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DRAWS = 20_000  # of B - 1 rows, at once
_ROUNDS = 60
_ROWS = 128  # that one round draws from
_ZERO = 1e-3  # the cosine of a row and q that counts as 0: gradients are float32
_SMALL = 1e-2  # rows of the basis that are shorter than this share of the longest are lost in rounding
_SAME = 0.9999
_KEPT = 8  # times B vectors
_INDEPENDENT = 1e-4
_AGREE = 0.985  # of the ReLUs
LARGEST = 24  # examples; draws that hit grow as 2^B


def separate(
    weight: Tensor, bias: Tensor, layer: tuple[Tensor, Tensor], batch: int, *, seed: int
) -> tuple[Tensor, Tensor] | None:
    """Inputs (B, n) and the gradients D' (B, m) of their outputs, from gradients (m, n) and (m); None: not found.

    ``layer``: the layer's own weight and bias. What is found is right if its ReLUs are open where D is not zero.
    """
    weight, bias = weight.double(), bias.double()
    if batch > min(LARGEST, *weight.shape):
        return None
    left, values, _ = torch.linalg.svd(weight, full_matrices=False)
    if not float(values[batch - 1]) > 1e-6 * float(values[0]):  # fewer than B directions
        return None
    basis = left[:, :batch]
    norms = basis.norm(dim=1)
    unit = basis[norms > _SMALL * norms.max()]  # outputs that no example reaches are 0 for all
    unit = unit / unit.norm(dim=1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[int, Tensor]] = []
    for _ in range(_ROUNDS):
        if not _extended(found, unit, batch, generator):
            continue
        columns = _sparsest(found, batch)
        if columns is None:
            continue
        slopes = basis @ columns.T
        slopes = slopes * torch.linalg.lstsq(slopes, bias.unsqueeze(1)).solution.squeeze(1)
        x = torch.linalg.lstsq(slopes, weight).solution
        if _consistent(x, slopes, layer):
            return x, slopes.T
    return None


def _consistent(x: Tensor, slopes: Tensor, layer: tuple[Tensor, Tensor]) -> bool:
    if not bool(torch.isfinite(x).all()):
        return False
    open_ = x @ layer[0].double().T + layer[1].double() > 0
    passed = slopes.T.abs() > _ZERO * slopes.T.abs().amax(1, keepdim=True)
    return float((open_ == passed).double().mean()) > _AGREE


def _extended(found: list[tuple[int, Tensor]], unit: Tensor, batch: int, generator: torch.Generator) -> bool:
    """New vectors q, each with the number of rows on which it is 0; whether there were any. The sparsest are kept."""
    enough = batch + max(3, len(unit) // 20)
    if len(unit) < enough:
        return False
    new = False
    for q in _candidates(unit, batch, enough, generator):
        q, zeros = _sharpened(q, unit)
        known = bool(found) and float((torch.stack([other for _, other in found]) @ q).abs().max()) > _SAME
        if zeros >= enough and not known:
            found.append((zeros, q))
            new = True
    found.sort(key=lambda pair: -pair[0])
    del found[_KEPT * batch :]
    return new


def _sharpened(q: Tensor, unit: Tensor) -> tuple[Tensor, int]:
    """What is least on all rows on which q is about 0, again while there are more; and on how many it is 0."""
    zeros, more = -1, int(((unit @ q).abs() < _ZERO).sum())
    while more > zeros:
        best, zeros = q, more
        near = unit[(unit @ q).abs() < 3 * _ZERO]
        q = torch.linalg.eigh(near.T @ near)[1][:, 0]
        more = int(((unit @ q).abs() < _ZERO).sum())
    return best, zeros


def _sparsest(found: list[tuple[int, Tensor]], batch: int) -> Tensor | None:
    """B independent ones with the most zeros: a sum of two columns is 0 only where both are, so it comes later."""
    chosen: list[Tensor] = []
    for _, q in found:
        if len(chosen) == batch:
            break
        span = torch.stack([*chosen, q])
        if float(torch.linalg.svdvals(span)[-1]) > _INDEPENDENT:
            chosen.append(q)
    return torch.stack(chosen) if len(chosen) == batch else None


def _candidates(unit: Tensor, batch: int, enough: int, generator: torch.Generator) -> list[Tensor]:
    """Vectors that are 0 on B - 1 drawn rows and on many more."""
    if batch == 1:
        return [torch.ones(1).to(unit)]
    some = unit[torch.randperm(len(unit), generator=generator)[:_ROWS]]
    drawn = torch.rand(_DRAWS if batch > 8 else _DRAWS // 10, len(some), generator=generator)
    rows = some[drawn.topk(batch - 1, dim=1).indices.to(unit.device)]  # (draws, B - 1, B)
    # A row that is random as well makes them square: what is 0 on the others is unique up to its length.
    extra = torch.randn(len(rows), 1, batch, generator=generator).to(unit)
    wanted = torch.zeros(len(rows), batch, 1).to(unit)
    wanted[:, -1] = 1.0
    solved, info = torch.linalg.solve_ex(torch.cat([rows, extra], 1), wanted)
    good = (info == 0) & torch.isfinite(solved).flatten(1).all(1)
    q = solved[good].squeeze(2)
    q = q / q.norm(dim=1, keepdim=True)
    zeros = ((q @ unit.T).abs() < _ZERO).sum(1)
    good = zeros >= enough
    q = q[good][zeros[good].argsort(descending=True)]
    distinct: list[Tensor] = []
    while len(q) and len(distinct) < _KEPT * batch:
        distinct.append(q[0])
        q = q[(q @ q[0]).abs() < _SAME]
    return distinct
