"""Normal values on the CPU where there are no compiled kernels: numpy's SFC64 and Box-Muller.

SFC64 is statistically sound but no cipher: its whole state is derived from the run's key for every block of 262144
values. The values of a step are one sequence over all its tensors, for the smallest of them would pay for a block of
its own. One thread draws them: torch's idle threads spin for a while, and numpy's would have to share their cores.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

NAME = "numpy: SFC64, Box-Muller, parts of 65536"
_BLOCK = 1 << 18  # values of one stream
_SETTLE = 12  # words to pass over after setting a state: the generator's own advice
_AT_ONCE = 1 << 19  # values that are drawn before they are added to gradients
_LEAST_PART, _MOST_PART = 1 << 14, 1 << 16

_of_thread = threading.local()


class _Bits:
    """A generator whose state is set again and again: making one takes longer than a small tensor's noise.

    numpy's own setter takes longer than the hash that the state comes from; the state is therefore written where numpy
    keeps it, once that has been seen to be the place.
    """

    def __init__(self) -> None:
        self.bits = np.random.SFC64(0)
        self._state: Any = self.bits.state
        words = (ctypes.c_uint64 * 4).from_address(self.bits.ctypes.state_address)
        self._by_setter((1 << 63 | 5, 6, 7))
        self._words = words if tuple(words) == (1 << 63 | 5, 6, 7, 1) else None

    def set(self, state: tuple[int, ...]) -> None:
        if self._words is None:
            self._by_setter(state)
        else:
            self._words[:] = [*state, 1]

    def _by_setter(self, state: tuple[int, ...]) -> None:
        self._state["state"]["state"][:] = (*state, 1)
        self.bits.state = self._state


def fast_bits(state: bytes) -> np.random.SFC64:
    """A generator of this thread with the given 192 bits of state: valid until the thread's next.

    The first :data:`_SETTLE` words are to be passed over.
    """
    if not hasattr(_of_thread, "bits"):
        _of_thread.bits = _Bits()
    own: _Bits = _of_thread.bits
    own.set(struct.unpack("<3Q", state))
    return own.bits


def _own_room(count: int) -> tuple[Array, torch.Tensor]:
    """Room for so many values in float32, or more, of this thread: until the next that is asked for. The same twice."""
    room: tuple[Array, torch.Tensor] | None = getattr(_of_thread, "room", None)
    if room is None or len(room[0]) < count:
        values = np.empty(count, dtype=np.float32)
        room = _of_thread.room = values, torch.from_numpy(values)
    return room


def _part_at(place: int) -> range:
    """The places that are drawn together with this one: few at the start of a sequence, for small models; then many.

    >>> _part_at(0), _part_at(20000), _part_at(40000)
    (range(0, 16384), range(16384, 32768), range(32768, 65536))
    >>> _part_at(70000) == _part_at(131071) == range(65536, 131072)
    True
    """
    if place < _LEAST_PART:
        return range(_LEAST_PART)
    size = min(_MOST_PART, 1 << place.bit_length() - 1)
    return range(place // size * size, (place // size + 1) * size)


def box_muller(bits: Any, out: Array, scale: float = 1.0, *, skip: int = 0) -> None:
    """Fill ``out``, of even length, with N(0, scale^2), in a third of the ziggurat's time: all is on whole vectors.

    u = (k + 1/2) / 2^31 from 31 bits (53 in float64): the radius sqrt(-2 log u) is at most 6.66 (8.57), and a float
    holds small u as finely as it should; next to u = 1 they are 2^-24 apart, so radii below 1e-3 lie on a grid.
    """
    pairs = len(out) // 2
    radius, angle = out[:pairs], out[pairs:]
    if out.dtype == np.float32:
        words = bits.random_raw(pairs + skip)[skip:].view(np.uint32)
        words[:pairs] >>= np.uint32(1)
        radius[:], angle[:] = words[:pairs].view(np.int32), words[pairs:].view(np.int32)
        grain, turn = 2.0**-31, 2.0 * np.pi / 2**32
    else:
        words = bits.random_raw(2 * pairs + skip)[skip:]
        words >>= np.uint64(11)
        radius[:], angle[:] = words[:pairs], words[pairs:]
        grain, turn = 2.0**-53, 2.0 * np.pi / 2**53
    radius += out.dtype.type(0.5)
    radius *= out.dtype.type(grain)
    np.log(radius, out=radius)
    radius *= out.dtype.type(-2.0)
    np.sqrt(radius, out=radius)
    if scale != 1.0:
        radius *= out.dtype.type(scale)
    angle *= out.dtype.type(turn)
    cosine = words.view(out.dtype)[:pairs]  # room that is done with: fresh memory costs more to get than to fill
    np.cos(angle, out=cosine)
    np.sin(angle, out=angle)
    angle *= radius
    radius *= cosine


class NumpyNormals:
    """The standard normal values of one step, in their order."""

    def __init__(self, state_of: Callable[[int], bytes]) -> None:
        """``state_of`` gives a block's 192 bits, by the number of the block."""
        self._state_of = state_of
        self.place = 0  # in the sequence
        self._wide = False  # whether the latest values were in float64
        self._part: tuple[range, Any, Array] | None = None  # the last that was drawn by itself

    def take(self, count: int, dtype: torch.dtype) -> int:
        """Where the next ``count`` values lie. Those in float32 and in float64 have no block in common."""
        wide = dtype == torch.float64
        if wide != self._wide:
            self.place, self._wide = -(-self.place // _BLOCK) * _BLOCK, wide
        start, self.place = self.place, self.place + count
        return start

    def next_values(self, count: int, dtype: torch.dtype) -> Array:
        return self.values(self.take(count, dtype), count, dtype)

    def values(self, start: int, count: int, dtype: torch.dtype) -> Array:
        """Values of the sequence, for the caller to do with as he likes.

        Whole parts are drawn: what a value is must not depend on what else is asked for.
        """
        wanted: Any = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        part = _part_at(start)
        if start + count <= part.stop:
            if self._part is None or self._part[:2] != (part, wanted):
                self._part = (part, wanted, self._parts(part, wanted))
            return self._part[2][start - part.start : start - part.start + count].copy()
        last = _part_at(start + count - 1)
        return self._parts(range(part.start, last.stop), wanted)[start - part.start : start - part.start + count]

    def _parts(self, places: range, wanted: Any) -> Array:
        """Some whole parts, one after the other."""
        out = np.empty(len(places), dtype=wanted)
        self._draw_parts(places, out)
        return out

    def _draw_parts(self, places: range, out: Array, scale: float = 1.0) -> None:
        """Some whole parts, one after the other, drawn into ``out`` and scaled. Each block has its own stream."""
        place, bits, skip = places.start, None, 0
        while place < places.stop:
            part = _part_at(place)
            if bits is None or place % _BLOCK == 0:
                bits = fast_bits(self._state_of(place // _BLOCK))
                skip = _SETTLE
                if passed := place % _BLOCK:  # one word for two values in float32, one for each in float64
                    bits.random_raw(skip + (passed if out.dtype == np.float64 else passed // 2), output=False)
                    skip = 0
            box_muller(bits, out[place - places.start : part.stop - places.start], scale, skip=skip)
            place, skip = part.stop, 0

    def add_to(self, grads: Sequence[torch.Tensor], stds: Sequence[float], *, divide_by: float) -> None:
        """In place, each gradient g, contiguous and in float32, becomes (g + std z) / divide_by.

        Some parts after the other: the values of a whole model would leave the cache. As std z / divide_by + g /
        divide_by, with the noise scaled as it is drawn: a gradient is written once.
        """
        scales, share = [std / divide_by for std in stds], 1.0 / divide_by
        common = scales[0] if len(set(scales)) == 1 else 1.0
        sizes = [grad.numel() for grad in grads]
        start = self.take(sum(sizes), torch.float32)
        edges = list(itertools.accumulate(sizes, initial=start))  # of the tensors in the sequence
        tensor, place = 0, start
        while place < edges[-1]:
            first = _part_at(place).start
            last = _part_at(min(edges[-1], first + _AT_ONCE) - 1).stop
            values, drawn = _own_room(last - first)
            self._draw_parts(range(first, last), values[: last - first], common)
            stop = min(last, edges[-1])
            while edges[tensor + 1] <= place:
                tensor += 1
            after = next(i for i in range(tensor, len(grads) + 1) if i == len(grads) or edges[i] >= stop)
            for i in range(tensor, after):
                begin, end = max(place, edges[i]), min(stop, edges[i + 1])
                noise, grad = drawn.narrow(0, begin - first, end - begin), grads[i]
                if scales[i] != common:
                    noise.mul_(scales[i])
                if end - begin == sizes[i]:
                    torch.add(noise.view(grad.shape), grad, alpha=share, out=grad)
                else:  # a tensor that reaches beyond what was drawn
                    part = grad.view(-1).narrow(0, begin - edges[i], end - begin)
                    torch.add(noise, part, alpha=share, out=part)
            place = stop
