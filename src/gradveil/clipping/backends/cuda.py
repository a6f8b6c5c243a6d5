"""Triton kernels for CUDA: per-example norms, clip weights and clipped sums in few launches, without waiting.

    clip_rows          gradients that are there per example (norm layers): norms and weights, then weighted sums
    clip_rank_one      a linear layer on one position: norms from the factors, and scaled copies of the factors
    clip_gram          a linear layer on a sequence: norms from products of positions, and scaled copies
    clip_convolution   per-example weight gradients by an implicit product, clipped on the way to the sum
    norm_moments       per-example gradients of a normalisation's scale and shift

What holds for all of them:

- ``bound`` is a tensor of one element on the device, read when the kernel runs: a captured graph follows a schedule.
- An example whose squared norm is not finite gets weight 0, adds exactly nothing (its numbers are left out, not
  multiplied by 0) and is flagged in ``lost``. So is one that ``present`` leaves out (padding), which is not flagged.
- No atomics: the same input gives the same bits, since a repeated step of a seeded run must repeat itself.
- Nothing is read back to the host and no shape depends on data, so every call can be captured in a CUDA graph.
- Sums of squares are accumulated in float32 in blocks; the Gram form adds a bound on its rounding error, so that a norm
  is never underestimated by more than the margin the clipper leaves below its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.clipping.backends import programs

try:
    from gradveil.clipping.backends import _triton
except ImportError:  # CPU builds of torch come without Triton
    _triton: Any = None  # type: ignore[no-redef]


@dataclass(frozen=True)
class Clip:
    """What the kernels need to know of a group's clipping in this pass, and where they flag what was lost."""

    bound: Tensor  # (1,) float32: the norm to clip to
    lost: Tensor  # (B,) int32: set to 1 where an example is not finite
    present: Tensor | None  # (B,) bool: False for padding


@dataclass(frozen=True)
class Clipped:
    """Clipped sums (one per parameter), norms before clipping and weights per example."""

    sums: list[Tensor]
    both: Tensor  # (2, B): norms, weights

    @property
    def norms(self) -> Tensor:
        return self.both[0]

    @property
    def weights(self) -> Tensor:
        return self.both[1]


def available() -> bool:
    """Whether Triton is installed."""
    return _triton is not None


def status() -> str:
    """One line: which clipping path is in use on a GPU."""
    return f"clipping on CUDA: {'Triton kernels' if available() else 'PyTorch (Triton is not installed)'}"


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: on a GPU, not empty, of float32 or less."""
    return _triton is not None and all(t.is_cuda and t.dtype != torch.float64 and t.numel() > 0 for t in tensors)


# Elements of per-example convolution gradients held at a time: 64 MiB.
GRADIENT_ELEMENTS = 1 << 24


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    compiled = kernel[grid](*arguments, **constants)
    recorder = programs.current()
    if recorder is not None:
        recorder.launch(compiled, grid, arguments)


def _empty(*shape: int, device: torch.device) -> Tensor:
    made = torch.empty(shape, dtype=torch.float32, device=device)
    recorder = programs.current()
    if recorder is not None:
        recorder.empty(made)
    return made


def _sum(of: Tensor, rows: int, columns: int, dim: int) -> Tensor:
    """The sum over one dimension of a tensor seen as (rows, columns), in float32."""
    made = of.view(rows, columns).sum(dim, dtype=torch.float32)
    recorder = programs.current()
    if recorder is not None:
        recorder.sum(made, rows, columns, dim, of)
    return made


def product_of_halves(a_BTD: Tensor, b_BTO: Tensor) -> Tensor:
    """a^T b of each example, of factors in half precision, added up in float32."""
    made: Tensor = torch.bmm(a_BTD.mT, b_BTO, out_dtype=torch.float32)
    recorder = programs.current()
    if recorder is not None:
        recorder.product_of_halves(made, a_BTD, b_BTO)
    return made


def sum_over_positions(g_BTO: Tensor) -> Tensor:
    """In float32."""
    made = g_BTO.sum(1, dtype=torch.float32)
    recorder = programs.current()
    if recorder is not None:
        recorder.columns(made, g_BTO)
    return made


def _squares(rows: Tensor) -> Tensor:
    made: Tensor = torch.linalg.vector_norm(rows.view(len(rows), -1), dim=1).square_()
    recorder = programs.current()
    if recorder is not None:
        recorder.squares(made, rows)
    return made


def _pieces(size: int, block: int) -> int:
    return -(-size // block)


def _block(size: int, largest: int) -> int:
    return max(16, min(largest, 1 << max(0, size - 1).bit_length()))


def _add_weighted(
    rows: Sequence[Tensor],
    weights: Tensor,
    out: Sequence[Tensor],
    *,
    add: bool,
    turned: tuple[int, int] | None = None,
) -> None:
    first, second = rows[0], rows[-1]
    examples, size1, size2 = len(first), first[0].numel(), second[0].numel()
    block = _block(size1, 128)
    blocks1, two = _pieces(size1, block), len(rows) == 2
    _launch(
        _triton.weighted_columns, (blocks1 + (_pieces(size2, block) if two else 0),),
        first, second, weights, out[0], out[-1], examples, size1, size2, blocks1, *(turned or (1, 1)),
        TWO=two, ADD=add, TURN=turned is not None, BLOCK_B=_block(examples, 32), BLOCK_P=block, num_warps=4,
    )  # fmt: skip


def clip_rows(grads: Sequence[Tensor], clip: Clip) -> Clipped:
    """Per-example gradients (B, *P) of one or two parameters, clipped together."""
    first, second, two = grads[0].contiguous(), grads[-1].contiguous(), len(grads) == 2
    examples, size1, size2 = len(first), first[0].numel(), second[0].numel()
    both = _empty(2, examples, device=first.device)
    _launch(
        _triton.row_weights, (examples,),
        first, second, size1, size2, clip.bound, clip.present, both[0], both[1], clip.lost,
        TWO=two, HAS_PRESENT=clip.present is not None, BLOCK=_block(size1, 2048), num_warps=4,
    )  # fmt: skip
    rows = [first, second] if two else [first]
    sums = [_empty(*g.shape[1:], device=g.device) for g in rows]
    _add_weighted(rows, both[1], sums, add=False)
    return Clipped(sums, both)


def clip_in_chunks(gradients: Callable[[slice], list[Tensor]], chunks: Sequence[slice], clip: Clip) -> Clipped:
    """Per-example gradients (b, *P) of one or two parameters, formed some examples at a time, in float32."""
    examples = chunks[-1].stop
    both = _empty(2, examples, device=clip.lost.device)
    sums: list[Tensor] = []
    for part in chunks:
        rows = gradients(part)
        count, size = part.stop - part.start, rows[-1][0].numel()
        squares = _squares(rows[0])
        present = None if clip.present is None else clip.present[part]
        _launch(
            _triton.partial_weights, (count,), squares, rows[-1], 1, size,
            clip.bound, present, both[0][part], both[1][part], clip.lost[part],
            HAS_ROWS=len(rows) == 2, HAS_PRESENT=present is not None, BLOCK=_block(size, 1024), num_warps=4,
        )  # fmt: skip
        if not sums:
            sums = [_empty(*r.shape[1:], device=r.device) for r in rows]
        _add_weighted(rows, both[1][part], sums, add=part.start > 0)
    return Clipped(sums, both)


def clip_rank_one(x_BD: Tensor, g_BO: Tensor, clip: Clip, *, weight: bool, bias: bool) -> Clipped:
    """A linear layer on one position per example."""
    x, g = x_BD.contiguous(), g_BO.contiguous()
    examples, inputs, outputs = len(x), x.shape[1], g.shape[1]
    both = _empty(2, examples, device=x.device)
    g_out = _empty(*g.shape, device=g.device)
    x_out = _empty(*x.shape, device=x.device) if weight else g_out
    _launch(
        _triton.rank_one, (examples,),
        x, g, x_out, g_out, inputs, outputs, clip.bound, clip.present, both[0], both[1], clip.lost,
        HAS_WEIGHT=weight, HAS_BIAS=bias, HAS_PRESENT=clip.present is not None,
        BLOCK=_block(max(inputs, outputs), 1024), num_warps=4,
    )  # fmt: skip
    return Clipped(_contracted(x_out, g_out, weight=weight, bias=bias), both)


def clip_gram(x_BTD: Tensor, g_BTO: Tensor, clip: Clip, *, weight: bool, bias: bool) -> Clipped:
    """A linear layer on T positions per example."""
    x, g = x_BTD.contiguous(), g_BTO.contiguous()
    examples, positions, inputs = x.shape
    outputs = g.shape[2]
    tile = 64 if positions > 256 else 32 if positions > 16 else 16
    tiles = _pieces(positions, tile)
    partials = _empty(examples * tiles * (tiles + 1), device=x.device)
    shares, lengths = partials[: examples * tiles * tiles], partials[examples * tiles * tiles :]
    _launch(
        _triton.gram_partials, (examples, tiles, tiles),
        x, g, shares, lengths, positions, inputs, outputs, tiles,
        HAS_WEIGHT=weight, HAS_BIAS=bias, BLOCK_T=tile, BLOCK_D=32, num_warps=4,
    )  # fmt: skip
    both = _empty(2, examples, device=x.device)
    g_out = _empty(*g.shape, device=g.device)
    x_out = _empty(*x.shape, device=x.device) if weight else g_out
    x_size, g_size = positions * inputs, positions * outputs
    pieces = min(64, _pieces(max(x_size, g_size), 4096))
    _launch(
        _triton.gram_scale, (examples, pieces),
        x, g, x_out, g_out, shares, lengths, x_size, g_size, tiles, 32.0 * torch.finfo(torch.float32).eps,
        clip.bound, clip.present, both[0], both[1], clip.lost,
        HAS_WEIGHT=weight, HAS_PRESENT=clip.present is not None,
        TILES=_block(tiles, 1 << 20), PAIRS=_block(tiles * tiles, 1 << 20), BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return Clipped(_contracted(x_out.flatten(0, 1), g_out.flatten(0, 1), weight=weight, bias=bias), both)


def _contracted(x: Tensor, g: Tensor, *, weight: bool, bias: bool) -> list[Tensor]:
    """g^T x and the column sums of g, in full float32: with rounded factors a contribution could exceed its bound."""
    found = []
    if weight:
        rounds = torch.backends.cuda.matmul.allow_tf32
        if rounds:
            torch.backends.cuda.matmul.allow_tf32 = False
        found.append(torch.mm(g.t(), x))
        if rounds:
            torch.backends.cuda.matmul.allow_tf32 = True
        recorder = programs.current()
        if recorder is not None:
            recorder.product(found[0], g, x)
    return found + ([_sum(g, len(g), g.shape[1], 0)] if bias else [])


def clip_convolution(
    field: Tensor,
    map_: Tensor,
    clip: Clip,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
) -> Clipped:
    """A two-dimensional convolution of field (B, C, H, W), whose output gradient is map_ (B, O, H', W').

    The product runs on tensor cores where the user lets convolutions do so (torch.backends.cudnn.allow_tf32), as the
    ordinary gradient does; norms are of the gradients that came out, so nothing is underestimated.
    """
    examples, all_channels = field.shape[:2]
    all_outputs, map_height, map_width = map_.shape[1:]
    channels, outputs, taps = all_channels // groups, all_outputs // groups, math.prod(kernel)
    size, pixels = channels * taps, map_height * map_width
    tile = _tile(outputs, size, pixels)
    tiles_o, tiles_n = _pieces(outputs, tile.outputs), _pieces(size, tile.columns)
    tiles = tiles_o * tiles_n
    both = _empty(2, examples, device=field.device)
    norms, weights = both[0], both[1]
    sums = [_empty(all_outputs, channels, *kernel, device=field.device)]
    if bias:
        sums.append(_empty(all_outputs, device=field.device))
    at_once = max(1, min(examples, GRADIENT_ELEMENTS // (all_outputs * size)))
    padded, g = _padded_channels_last(field, padding), map_.contiguous()
    biases = _sum(g, examples * all_outputs, pixels, 1).view(examples, all_outputs) if bias else None
    all_grads = _empty(at_once, all_outputs, size, device=field.device)
    partials = _empty(at_once, groups * tiles, device=field.device)
    for start in range(0, examples, at_once):
        part = slice(start, min(start + at_once, examples))
        count = part.stop - part.start
        grads = all_grads[:count]
        _launch(
            _triton.conv_gradients, (count * tiles, groups), padded[part], g[part], grads, partials,
            channels, outputs, padded.shape[1], padded.shape[2], map_width, pixels, taps, kernel[1],
            *stride, *dilation, tiles_o, tiles_n,
            PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
            BLOCK_O=tile.outputs, BLOCK_N=tile.columns, BLOCK_L=tile.pixels, num_warps=tile.warps, num_stages=3,
        )  # fmt: skip
        rows = [grads] if biases is None else [grads, biases[part]]
        present = None if clip.present is None else clip.present[part]
        _launch(
            _triton.partial_weights, (count,), partials, rows[-1], groups * tiles, all_outputs,
            clip.bound, present, norms[part], weights[part], clip.lost[part],
            HAS_ROWS=bias, HAS_PRESENT=clip.present is not None, BLOCK=_block(groups * tiles, 1 << 20), num_warps=1,
        )  # fmt: skip
        _add_weighted(rows, weights[part], sums, add=start > 0, turned=(channels, taps))
    return Clipped(sums, both)


@dataclass(frozen=True)
class _Tile:
    """How much of a gradient one program of conv_gradients makes, and from how many pixels at a time."""

    outputs: int
    columns: int
    pixels: int
    warps: int


def _tile(outputs: int, columns: int, pixels: int) -> _Tile:
    """Few outputs and many columns: larger tiles of TF32 ran at half the speed on the GPU they were tried on."""
    return _Tile(_block(outputs, 32), _block(columns, 128), _block(pixels, 32), 4)


def _padded_channels_last(x: Tensor, padding: Sequence[int]) -> Tensor:
    count, channels, height, width = x.shape
    shape = (count, height + 2 * padding[0], width + 2 * padding[1], channels)
    out = _empty(*shape, device=x.device)
    block_c, block_w = _block(channels, 32), _block(shape[2], 32)
    _launch(
        _triton.padded_channels_last, (count * shape[1], _pieces(shape[2], block_w), _pieces(channels, block_c)),
        x, out, channels, height, width, shape[1], shape[2], *x.stride(), *padding,
        BLOCK_C=block_c, BLOCK_W=block_w, num_warps=4,
    )  # fmt: skip
    return out


def noise_table(grads: Sequence[Tensor]) -> Tensor:
    """The blocks of some gradients, for :func:`add_noise`: valid as long as they stay where they are."""
    rows, place = [], 0
    for grad in grads:
        assert grad.is_contiguous() and grad.dtype == torch.float32
        for start in range(0, grad.numel(), _NOISE_BLOCK):
            length = min(_NOISE_BLOCK, grad.numel() - start)
            rows.append([grad.data_ptr() + 4 * start, place, length, 0])
            place += length
    # Not pinned: whoever lets go of pinned memory has an event recorded on the streams that read it. A new table takes
    # the place of an old one during a capture, and PyTorch's few streams are shared: an event recorded on the very
    # stream that captures is never done, and the next request for pinned memory fails on it.
    return torch.tensor(rows, dtype=torch.int64)


_NOISE_BLOCK = 1024


def add_noise(table: Tensor, noise: Tensor, std: Tensor, *, divide_by: float) -> None:
    """g becomes (g + std z) / divide_by for all gradients of a table on the device, in one launch."""
    _launch(
        _triton.noise_on_gradients, (len(table),), table, noise, std, divide_by, 0.0,
        STEP=False, BLOCK=_NOISE_BLOCK, num_warps=4,
    )  # fmt: skip


def noise_kernels(device: torch.device) -> list[tuple[int, int, int]]:
    """Handle, threads and shared memory of the kernel behind :func:`add_noise`; empty where C++ cannot launch it."""
    if not available():
        return []
    grad, std = torch.zeros(_NOISE_BLOCK, device=device), torch.ones(1, device=device)
    host, noise = noise_table([grad]), torch.zeros_like(grad)
    table = host.to(device)
    with torch.cuda.device(device), programs.recording([table, noise, std]) as recorder:
        add_noise(table, noise, std, divide_by=2.0)
    return recorder.launches


def sum_up(losses: Tensor, present: Tensor, flags: Tensor, lost: Tensor) -> Tensor:
    """The sum of the losses that are present. The number of flags is added to ``lost``, and they are cleared."""
    total = torch.empty((), dtype=torch.float32, device=losses.device)
    _launch(_triton.sum_up, (1,), losses, present, flags, total, lost, flags.numel(), BLOCK=1024, num_warps=4)
    return total


def channel_moments(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Per-example gradients (B, C) of a group norm's scale and shift; x and g are (B, C, ...), mean (B, groups)."""
    x, g = x.contiguous(), g.contiguous()
    examples, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    both = _empty(2, examples, channels, device=x.device)
    _launch(
        _triton.channel_moments, (examples * channels,),
        x, g, mean, rstd, both[0], both[1], pixels, channels, channels // mean.shape[1],
        BLOCK=_block(pixels, 1024), num_warps=4 if pixels > 256 else 1,
    )  # fmt: skip
    return both[0], both[1]


def feature_moments(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Per-example gradients (B, D) of a layer norm's scale and shift; x and g are (B, ..., D), mean (B, ..., 1)."""
    x, g = x.contiguous(), g.contiguous()
    examples, features = len(x), x.shape[-1]
    positions = x.numel() // max(1, examples * features)
    both = _empty(2, examples, features, device=x.device)
    _launch(
        _triton.feature_moments,
        (examples, _pieces(features, 64)),
        x,
        g,
        mean,
        rstd,
        both[0],
        both[1],
        positions,
        features,
        BLOCK_T=_block(positions, 32),
        BLOCK_D=64,
        num_warps=4,
    )
    return both[0], both[1]
