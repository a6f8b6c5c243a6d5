"""Operations that are made of others which have rules.

Each takes the mode first, which is on while it runs: what it calls is looked at like the model's own operations.
NotImplemented: this call is not of the kind. Recurrent layers run without the mode, for they have many small steps, and
call what takes parameters through it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping.operations.table import named, transposed_linear
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.operations.mode import Operations

T = torch.Tensor
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]  # of a recurrent layer


def matmul(ops: Operations, a: Tensor, b: Tensor) -> Any:
    """A product with a matrix or a vector of parameters is a linear layer."""
    if ops.tracks(b) and not ops.tracks(a):
        if b.dim() == 2:
            return transposed_linear(a, b) if a.dim() > 1 else NotImplemented
        if b.dim() == 1:
            return F.linear(a, b.unsqueeze(0)).squeeze(-1)
    elif ops.tracks(a) and not ops.tracks(b):
        matrix = a if a.dim() == 2 else a.unsqueeze(0) if a.dim() == 1 else None
        if matrix is not None:
            found = F.linear(b.mT if b.dim() > 1 else b, matrix)
            found = found.mT if b.dim() > 1 else found
            return found.squeeze(-2 if b.dim() > 1 else -1) if a.dim() == 1 else found
    return NotImplemented


def addmm(ops: Operations, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    settled = ops.tracks(bias) or not bias.requires_grad
    if beta == alpha == 1 and ops.tracks(b) and not ops.tracks(a) and bias.dim() == 1 and settled:
        return transposed_linear(a, b, bias)
    scaled = bias * beta if beta != 1 else bias
    product = torch.matmul(a, b)
    return (product * alpha if alpha != 1 else product) + scaled


def bilinear(ops: Operations, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if ops.tracks(x) or ops.tracks(y) or not ops.tracks(weight):
        return NotImplemented
    products = (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
    return F.linear(products, weight.flatten(1), bias)


def embedding_bag(
    ops: Operations,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """An embedding of bags, padded where they have offsets, and a sum, mean or maximum over each."""
    if not ops.tracks(weight):
        return NotImplemented
    present = torch.ones_like(input, dtype=torch.bool)
    if offsets is not None:
        starts = offsets[:-1] if include_last_offset else offsets
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(input)])])
        steps = torch.arange(max(int((ends - starts).max()), 1), device=input.device)
        present = steps < (ends - starts).unsqueeze(1)
        places = (starts.unsqueeze(1) + steps).clamp(max=len(input) - 1)
        input = input[places].masked_fill(~present, 0)
        ops.own_in_order(input)
        per_sample_weights = per_sample_weights[places] if per_sample_weights is not None else None
    if padding_idx is not None:
        present = present & (input != padding_idx % len(weight))
    found = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    if mode == "max":
        found = found.masked_fill(~present.unsqueeze(-1), -torch.inf).amax(1)
        return found.masked_fill(~present.any(1, keepdim=True), 0.0)
    found = (found * present.unsqueeze(-1)).sum(1)
    return found / present.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else found


def batch_norm(
    ops: Operations,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """With the statistics it has: a scale and a shift of each channel."""
    if ops.tracks(input):  # a weight that is standardised
        return NotImplemented
    if training:
        raise UnsupportedModelError(
            "batch normalisation in training mode mixes examples: a per-example gradient is undefined. Keep it in eval "
            "mode, or replace it with GroupNorm: gradveil.fix(model)."
        )
    found = F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps)
    shape = (-1, *[1] * (input.dim() - 2))
    if weight is not None:
        found = found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)


def set_item(ops: Operations, x: Tensor, index: Any, value: Any) -> Any:
    """What a mask chooses is set to the same for all: a choice between two. Elsewhere, to copies of the value."""
    if ops.tracks(x) or not ops.tracks(value):
        return NotImplemented
    if not isinstance(index, Tensor) or index.dtype is not torch.bool:
        shape = x[index].shape
        if value.shape == shape:
            return NotImplemented
        x[index] = value.expand(shape)
        return None
    rest = x.dim() - index.dim()
    if value.dim() > rest + 1 or (value.dim() == rest + 1 and value.shape[0] != 1):
        return NotImplemented
    same = value.squeeze(0) if value.dim() == rest + 1 else value
    x.copy_(torch.where(index.view(*index.shape, *[1] * rest), same, x))
    return None


def get_item(ops: Operations, p: Tensor, index: Any) -> Any:
    """At places that are chosen by what is in the rows: a lookup."""
    if not ops.tracks(p) or not isinstance(index, Tensor) or index.dtype is torch.bool or ops.owners([index]) is None:
        return NotImplemented
    found = F.embedding(index % len(p), p.reshape(len(p), -1))
    return found.reshape(*index.shape, *p.shape[1:])


def masked_fill(ops: Operations, x: Tensor, mask: Tensor, value: Any) -> Any:
    return torch.where(mask, value, x) if ops.tracks(value) else NotImplemented


def to(ops: Operations, t: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of another tensor's type: its values do not matter."""
    if not ops.tracks(t) or not args or not isinstance(args[0], Tensor):
        return NotImplemented
    return t.to(device=args[0].device, dtype=args[0].dtype)


def expand_as(ops: Operations, t: Tensor, other: Tensor) -> Any:
    return t.expand(other.shape) if ops.tracks(t) else NotImplemented


def view_as(ops: Operations, t: Tensor, other: Tensor) -> Any:
    return t.view(other.shape) if ops.tracks(t) else NotImplemented


def stack(ops: Operations, tensors: Any, dim: int = 0) -> Any:
    """The same one several times over."""
    first = tensors[0]
    if not ops.tracks(first) or len(tensors) < 2 or any(t is not first for t in tensors):
        return NotImplemented
    dim = dim % (first.dim() + 1)
    return first.unsqueeze(dim).expand(*first.shape[:dim], len(tensors), *first.shape[dim:])


def cat(ops: Operations, tensors: Any, dim: int = 0) -> Any:
    first = tensors[0]
    if not ops.tracks(first) or len(tensors) < 2 or any(t is not first for t in tensors):
        return NotImplemented
    repeats = [1] * first.dim()
    repeats[dim] = len(tensors)
    return first.repeat(repeats)


def grouped_mm(
    ops: Operations, x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Any = None, **_: Any
) -> Any:
    """Rows sorted by expert, each with its expert's matrix."""
    if offs is None or bias is not None or x.dim() != 2 or weight.dim() != 3 or not ops.tracks(weight):
        return NotImplemented
    ends = [int(end) for end in offs.tolist()]
    parts = [
        x[start:end] @ weight[e] for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start
    ]
    if ends[-1] < len(x):
        parts.append(torch.zeros_like(x[ends[-1] :, :1]).expand(-1, weight.shape[-1]))
    return torch.cat(parts)


def repeat_interleave(ops: Operations, t: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> Any:
    if not ops.tracks(t) or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    dim = dim % t.dim()
    apart = t.unsqueeze(dim + 1).expand(*t.shape[: dim + 1], repeats, *t.shape[dim + 1 :])
    return apart.flatten(dim, dim + 1)


def einsum(ops: Operations, equation: Any, *operands: Any) -> Any:
    """A product of batch data with parameters as a linear layer, where no index of the parameters is kept apart."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    tracked = [i for i, t in enumerate(operands) if ops.tracks(t)]
    if not isinstance(equation, str) or len(operands) != 2 or len(tracked) != 1:
        return NotImplemented
    x, p = operands[1 - tracked[0]], operands[tracked[0]]
    parsed = _parse(equation, [operands[0].dim(), operands[1].dim()])
    if parsed is None:
        return NotImplemented
    terms, out = parsed
    of_x, of_p = terms[1 - tracked[0]], terms[tracked[0]]
    summed = [i for i in of_p if i in of_x and i not in out]
    made = [i for i in of_p if i not in of_x]
    kept = [i for i in of_x if i not in of_p]
    plain = len(set(of_x)) == len(of_x) and len(set(of_p)) == len(of_p)
    if not plain or not summed or any(i not in out for i in (*made, *kept)) or len(summed) + len(made) != len(of_p):
        return NotImplemented  # some index of the parameters stands beside the batch, or is summed away by itself
    rows = x.permute([of_x.index(i) for i in (*kept, *summed)]).flatten(len(kept))
    order = [of_p.index(i) for i in (*made, *summed)]
    matrix = p.permute(order).reshape(-1, rows.shape[-1])
    found = F.linear(rows, matrix)
    found = found.unflatten(-1, [p.shape[of_p.index(i)] for i in made]) if made else found.squeeze(-1)
    return found.permute([[*kept, *made].index(i) for i in out])


def _parse(equation: str, dims: Sequence[int]) -> tuple[list[str], str] | None:
    """Terms and result, with letters in place of dots."""
    left, _, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or "->" not in equation:
        return None
    free = [c for c in string.ascii_letters if c not in equation]
    widths = [n - len(t) + 3 for t, n in zip(terms, dims, strict=True) if "..." in t]
    dots = "".join(free[: max(widths)]) if widths and max(widths) > 0 else ""
    filled = []
    for term, n in zip(terms, dims, strict=True):
        width = n - len(term) + 3
        filled.append(term.replace("...", dots[len(dots) - width :] if width else "") if "..." in term else term)
    return filled, out.replace("...", dots)


# ---- recurrent layers


def _lstm_cell(gates: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = gates.chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_cell(of_x: Tensor, of_h: Tensor, h: Tensor) -> Tensor:
    reset, update, new = of_x.chunk(3, -1)
    reset_h, update_h, new_h = of_h.chunk(3, -1)
    z = torch.sigmoid(update + update_h)
    n = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
    return n + z * (h - n)


def _sum_step(kind: str, gates: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if kind == "lstm":
        return _lstm_cell(gates, state)
    return ((torch.tanh if kind == "tanh" else torch.relu)(gates),)


def _step(kind: str, of_x: Tensor, of_h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_gru_cell(of_x, of_h, state[0]),) if kind == "gru" else _sum_step(kind, of_x + of_h, state)


def _cell(kind: str) -> Callable[..., Any]:
    def run(
        ops: Operations,
        x: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        state = tuple(hx) if kind == "lstm" else (hx,)
        found = _step(kind, ops.call(F.linear, x, w_ih, b_ih), ops.call(F.linear, state[0], w_hh, b_hh), state)
        return found if kind == "lstm" else found[0]

    return run


def _layers(kind: str) -> Callable[..., Any]:
    def run(ops: Operations, *args: Any) -> Any:
        packed = isinstance(args[3], list | tuple)
        if packed:
            x, sizes, hx, weights, biases, layers, dropout, training, both = args
            scan = partial(_scan_packed, ops, kind, sizes=sizes.tolist(), owners=ops.owners([x]))
        else:
            x, hx, weights, biases, layers, dropout, training, both, batch_first = args
            scan = partial(_scan, ops, kind, time=1 if batch_first else 0)
        states = [tuple(h) for h in zip(*hx, strict=True)] if kind == "lstm" else [(h,) for h in hx]
        directions = 2 if both else 1
        per = len(weights) // (layers * directions)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            outs = []
            for direction in range(directions):
                place = layer * directions + direction
                own = list(weights[place * per : (place + 1) * per])
                b_ih, b_hh = own[2:4] if biases else (None, None)
                shrink = own[-1] if per in (3, 5) else None
                out, end = scan(x, states[place], direction == 1, (own[0], own[1], b_ih, b_hh, shrink))
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, -1) if both else outs[0]
            if dropout and training and layer < layers - 1:
                x = F.dropout(x, dropout, True)
        found = [torch.stack(parts) for parts in zip(*ends, strict=True)]
        if packed:
            ops.own(x, args[0], 0)
            for state in found:
                ops.own(state, args[0], 1)
        return (x, *found)

    return run


def _scan_packed(
    ops: Operations,
    kind: str,
    x: Tensor,
    start: tuple[Tensor, ...],
    backwards: bool,
    weights: Weights,
    *,
    sizes: list[int],
    owners: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Steps of several sequences one after the other, the longest sequence first: ``sizes`` of them at each step."""
    w_ih, w_hh, b_ih, b_hh, shrink = weights
    given = None if owners is None else owners[0]
    if given is not None:
        ops.own(x, given, 0)
    steps = list(ops.call(F.linear, x, w_ih, b_ih).split(sizes))
    outs: list[Tensor] = []
    state = tuple(h[:0] for h in start) if backwards else start
    ended: list[tuple[Tensor, ...]] = []
    for of_x in reversed(steps) if backwards else steps:
        n, before = len(of_x), len(state[0])
        if n < before:
            ended.append(tuple(h[n:] for h in state))
            state = tuple(h[:n] for h in state)
        elif n > before:
            state = tuple(torch.cat([h, first[before:n]]) for h, first in zip(state, start, strict=True))
        hidden = state[0]
        if given is not None:
            ops.own(hidden, given, 0)
        state = _step(kind, of_x, ops.call(F.linear, hidden, w_hh, b_hh), state)
        if shrink is not None:
            wide = state[0]
            if given is not None:
                ops.own(wide, given, 0)
            state = (ops.call(F.linear, wide, shrink), *state[1:])
        outs.append(state[0])
    ends = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outs[::-1] if backwards else outs), ends


def _scan(
    ops: Operations,
    kind: str,
    x: Tensor,
    state: tuple[Tensor, ...],
    backwards: bool,
    weights: Weights,
    *,
    time: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    w_ih, w_hh, b_ih, b_hh, shrink = weights
    of_inputs = ops.call(F.linear, x, w_ih, b_ih)
    outs = []
    # Where the two sums are only added, the second one's gradient is that of their sum: see RecurrentFunction.
    tapped = ops.tap_steps(of_inputs, w_hh, b_hh, time, backwards) if kind != "gru" else None
    if tapped is not None:
        of_inputs, fed = of_inputs + tapped[0], tapped[1]
        matrix = w_hh.detach().t()
    steps = of_inputs.unbind(time)
    for of_x in reversed(steps) if backwards else steps:
        if tapped is None:
            of_h = ops.call(F.linear, state[0], w_hh, b_hh)
            state = _step(kind, of_x, of_h, state)
        else:
            fed.append(state[0].detach())
            state = _sum_step(kind, torch.addmm(of_x, state[0], matrix), state)
        if shrink is not None:
            state = (ops.call(F.linear, state[0], shrink), *state[1:])
        outs.append(state[0])
    return torch.stack(outs[::-1] if backwards else outs, time), state


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _cell("lstm"),
    torch.gru_cell: _cell("gru"),
    torch.rnn_tanh_cell: _cell("tanh"),
    torch.rnn_relu_cell: _cell("relu"),
    torch.lstm: _layers("lstm"),
    torch.gru: _layers("gru"),
    torch.rnn_tanh: _layers("tanh"),
    torch.rnn_relu: _layers("relu"),
}
DECOMPOSED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.mv, T.mv), matmul),
    torch.addmm: addmm,
    T.addmm: addmm,
    torch.einsum: einsum,
    F.bilinear: bilinear,
    torch.bilinear: bilinear,
    F.batch_norm: batch_norm,
    F.embedding_bag: embedding_bag,
    T.__setitem__: set_item,
    T.__getitem__: get_item,
    **dict.fromkeys((torch.masked_fill, T.masked_fill), masked_fill),
    T.to: to,
    T.type_as: to,
    T.expand_as: expand_as,
    T.view_as: view_as,
    T.reshape_as: view_as,
    torch.stack: stack,
    torch.cat: cat,
    torch.concat: cat,
    torch.repeat_interleave: repeat_interleave,
    T.repeat_interleave: repeat_interleave,
    torch.batch_norm: batch_norm,
    **dict.fromkeys((named("grouped_mm", F) | named("_grouped_mm", torch)), grouped_mm),
    **RECURRENT,
}
