"""Gaussian noise on a lattice: the sampler in numpy, and how draws meet gradients. docs/noise.md has the proof.

A value x gets noise of standard deviation s in units of s / 2^32: x is rounded to a whole number of units, and a whole
number of them is added that was drawn with probability proportional to exp(-(n / 2^32)^2 / 2). The sum is exact.

_noise.cpp is the same sampler, and gives the same bits: no value depends on how a logarithm is rounded. Here it runs
where there is no compiler, some twenty times slower. The draws come from ChaCha12, see there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.errors import ConfigError

Array = np.ndarray[Any, Any]

UNITS = 2.0**32  # to a standard deviation
MARGIN = 2.0**-11  # by which float32 arithmetic may move the sum of clipped gradients, relative to the clip bound
_LIMIT = 2.0**51  # of units that a gradient may have: sums with a draw stay exact
_LAYERS = 2048
_WIDEST = 12 << 32
_AREA = 0x28291002 << 84  # of a layer, in units of 2^-92
_LN_2 = 0xB17217F7D1CF79ABC9E3B39803F2F6  # in units of 2^-120
_BATCH = 128  # values: of 16 blocks of the cipher, whose words are interleaved
_AT_ONCE = 256  # batches: their state stays in the cache
_ROLLED = [np.roll(np.arange(4), -by) for by in range(4)]
_FRACTION, _ONE = np.uint64(2**52 - 1), np.uint64(0x3FF0000000000000)


def widened(std: float, *, sensitivity: float, coordinates: int) -> float:
    """The standard deviation to draw with, so that noise on the rounded sum hides as much as ``std`` on the exact one.

    Rounding moves two neighbouring sums apart by at most 1.5 units in each coordinate, and float32 arithmetic before
    it by at most ``MARGIN`` times the sensitivity.

    >>> widened(6.0, sensitivity=1.0, coordinates=10**6) / 6.0 - 1.0 < 5e-4
    True
    """
    if std == 0.0:
        return 0.0
    if sensitivity <= 0.0:
        return std * (1.0 + MARGIN)
    apart = std / sensitivity * math.sqrt(coordinates) / UNITS
    if not apart <= 0.125:
        raise ConfigError(
            f"noise of {std:g} on {coordinates} coordinates clipped at {sensitivity:g} is too coarse: rounding to its "
            "lattice would move a sum further than an example does. Lower sigma, or train fewer parameters."
        )
    return std * (1.0 + MARGIN) * (1.0 + 2.0 * apart)


def noised(x: Tensor, draws: Tensor, std: float | Tensor, *, divide_by: float) -> Tensor:
    """(x + noise) / divide_by in float64, for ``draws`` in units; the same bits as by the kernel."""
    std = torch.as_tensor(std, dtype=torch.float64)
    units = (UNITS / std).clamp_max(1e300)
    whole = (x.double() * units).clamp(-_LIMIT, _LIMIT).round()
    return (whole + draws) * (std / UNITS / divide_by)


class Layers(NamedTuple):
    """The ziggurat: layer i holds n < width[i] at heights from bottom[i] on, ``height[i]`` of them (2^-92 each).

    Below inner[i] the whole layer is under the density. ``inside`` is inner / width, rounded down to 24 bits.
    """

    width: Array
    inner: Array
    inside: Array
    bottom: tuple[int, ...]
    height: tuple[int, ...]


@lru_cache(maxsize=1)
def layers() -> Layers:
    widths, inner, bottom, height = [], [], [], []
    wide, y = _WIDEST, 0
    for _ in range(_LAYERS):
        widths.append(wide)
        bottom.append(y)
        height.append(_AREA // wide)
        y += height[-1]
        top = y * 2.0**-92
        wide = (math.ceil(math.sqrt(-2.0 * math.log(top)) * 2.0**24) + 1) * 256 if top < 1.0 else 0
        inner.append(max(0, wide - 1024))
    shares = [1.0 + (i * 2**24 // w) * 2.0**-24 for i, w in zip(inner, widths, strict=True)]
    return Layers(
        np.array(widths, np.float64), np.array(inner, np.int64), np.array(shares), tuple(bottom), tuple(height)
    )


def chacha12(key: bytes, tensors: Array, counters: Array, attempt: int) -> Array:
    """(16, n) words, a block for each counter, of 64 bits. The nonce is tensor, the counter's upper half, attempt."""
    start = np.empty((4, 4, len(counters)), np.uint32)
    start[0].T[:] = np.frombuffer(b"expand 32-byte k", "<u4")
    start[1].T[:] = np.frombuffer(key[:16], "<u4")
    start[2].T[:] = np.frombuffer(key[16:], "<u4")
    start[3, 0], start[3, 1] = counters & np.uint64(0xFFFFFFFF), tensors
    start[3, 2], start[3, 3] = counters >> np.uint64(32), attempt
    a, b, c, d = (row.copy() for row in start)
    room = np.empty_like(a)

    def turn(x: Array, by: int) -> None:
        np.right_shift(x, np.uint32(32 - by), out=room)
        np.left_shift(x, np.uint32(by), out=x)
        np.bitwise_or(x, room, out=x)

    for half in range(12):
        for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x += y
            z ^= x
            turn(z, by)
        by_one, by_three = (_ROLLED[1], _ROLLED[3]) if half % 2 == 0 else (_ROLLED[3], _ROLLED[1])
        b, c, d = b[by_one], c[_ROLLED[2]], d[by_three]  # columns to diagonals, and back
    out: Array = np.stack((a, b, c, d)) + start
    return out.reshape(16, -1)


def draws(key: bytes, pieces: Sequence[tuple[int, int, int]]) -> list[Array]:
    """Whole numbers in float64, for each (tensor, start, count) those of the tensor's places from ``start`` on.

    All pieces together: for a small one the cipher's calls to numpy take longer than its work.
    """
    batches = [range(start // _BATCH, -(-(start + count) // _BATCH) if count else 0) for _, start, count in pieces]
    first = np.concatenate([np.arange(0), *(np.arange(r.start, r.stop) for r in batches)]).astype(np.uint64)
    tensors = np.repeat([tensor for tensor, _, _ in pieces], [len(r) for r in batches]).astype(np.uint32)
    values = np.empty((len(first), _BATCH))
    words: dict[int, int] = {}  # of places that are not decided yet
    for at in range(0, len(first), _AT_ONCE):
        here = slice(at, at + _AT_ONCE)
        values[here], left = _by_first_words(key, tensors[here], first[here])
        words |= {at * _BATCH + place: word for place, word in left.items()}
    flat = values.reshape(-1)
    for attempt in itertools.count(1):
        if not words:
            break
        places = np.fromiter(words, np.intp, len(words))
        batch = places // _BATCH
        counters = first[batch] * np.uint64(_BATCH) + (places % _BATCH).astype(np.uint64)
        further = chacha12(key, tensors[batch], counters, attempt)[:8].T.copy().view(np.uint64).tolist()
        for (place, word), more in zip(tuple(words.items()), further, strict=True):
            found = decided(word, more)
            if found is None:
                words[place] = more[3]
            else:
                flat[place] = found
                del words[place]
    ends = itertools.accumulate((len(r) * _BATCH for r in batches), initial=0)
    begins = [end + start % _BATCH for end, (_, start, _) in zip(ends, pieces, strict=False)]
    return [flat[begin : begin + count] for begin, (_, _, count) in zip(begins, pieces, strict=True)]


def _by_first_words(key: bytes, tensors: Array, batches: Array) -> tuple[Array, dict[int, int]]:
    """The values of some batches, (n, 128); place and word of those that one word does not decide."""
    counters = (batches[:, None] * np.uint64(16) + np.arange(16, dtype=np.uint64)).reshape(-1)
    words = chacha12(key, np.repeat(tensors, 16), counters, 0)
    bits = np.ascontiguousarray(words.reshape(16, -1, 16).swapaxes(0, 1)).reshape(-1).view(np.uint64)
    table, layer = layers(), (bits & np.uint64(_LAYERS - 1)).view(np.int64)
    share = (bits >> np.uint64(11) & _FRACTION | _ONE).view(np.float64)
    left = share >= table.inside[layer]
    product = (share - 1.0) * table.width[layer]
    values = np.rint(product)
    left |= np.abs(product - values) > 0.5 - 2.0**-15
    places = np.flatnonzero(left)
    signed = np.copysign(values, bits.view(np.float64)).reshape(-1, _BATCH)
    return signed, dict(zip(places.tolist(), bits[places].tolist(), strict=True))


def decided(word: int, more: list[int]) -> int | None:
    """What a word and the four after it decide; None where it is rejected, and the last of them takes its place."""
    table, layer = layers(), word & (_LAYERS - 1)
    width, share = int(table.width[layer]), word >> 11 & (2**52 - 1)
    n = (((share << 64 | more[0]) * width >> 64) + 2**51) >> 52
    if n < table.inner[layer] or _below_density(n, layer, more[1] << 64 | more[2]):
        return -n if word >> 63 else n
    return None


def _below_density(n: int, layer: int, uniform: int) -> bool:
    y = (layers().bottom[layer] << 28) + ((layers().height[layer] << 28) * uniform >> 128)
    near, height = math.exp(-0.5 * (n / UNITS) ** 2), y * 2.0**-120
    if abs(near - height) > 2.0**-40:  # nearly always; otherwise to the last bit
        return height < near
    return y < density(n * n)


def density(square: int) -> int:
    """exp(-square / 2^65) in units of 2^-120, wrong by less than 2^-113."""
    halvings, rest = divmod(square << 55, _LN_2)
    total = one = 1 << 120
    for k in range(34, 0, -1):
        total = one - (rest * total >> 120) // k
    return total >> halvings
