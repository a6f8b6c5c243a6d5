"""Where noise and samples come from: one secret key, and streams derived from it.

A run has one 256-bit key: from the operating system's entropy, or, for a repeatable run, from the
user's seed. Every use (the noise of step 7, the sample of step 7, the initial weights) has its own
generator, keyed by SHAKE-256 of (key, purpose, index). So

- step t's randomness is a function of the key and of t alone: an interrupted run resumes bit for bit
  without any generator state in a file (and the engine refuses a redone step that is not the same bit
  for bit: the same noise on another gradient would cancel out);
- seeing one stream tells nothing of another, since the derivation is one-way;
- the key never leaves the process. Whoever knows the *seed* of a seeded run can derive it, and take
  the noise off: a seed must be kept as secret as the data.

Noise on the CPU comes from ChaCha12 (kernels/_noise.cpp), keyed by SHAKE-256 for one step, and turned into
normal values by Box-Muller. Without the compiled kernels it comes from numpy: SFC64, which is statistically
sound but no cipher, its whole state derived from the key for every block of 262144 values, and Box-Muller; the values
of a step are one sequence over all its tensors, for the smallest of them would pay for a block of its own. One thread
draws them: torch's idle threads spin for a while, and numpy's would have to share their cores with them.
Either way a value is a function of its place alone, so the result does not depend on the number of threads;
but the two differ, and a seeded run repeats only with the generator it began with. :func:`cpu_generator` names
the one in use. (A redone step with other noise is refused like any that is not the same bit for bit.)

The normal values are ordinary floating-point ones; the known attacks on floating-point noise are not defended
against, and the privacy statement says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradveil.device_noise import add_device_noise
from gradveil.errors import ConfigError
from gradveil.kernels import native
from gradveil.kernels.layers import layers
from gradveil.updates import Steps


class SecretKey:
    """The one secret of a run. ``seed=None`` draws it from the operating system."""

    __slots__ = ("_key", "seeded")

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            self._key = secrets.token_bytes(32)
        elif isinstance(seed, int) and not isinstance(seed, bool):
            self._key = hashlib.shake_256(b"gradveil seed " + str(seed).encode()).digest(32)
        else:
            raise ConfigError(f"seed is of type {type(seed).__name__}; give a whole number, or None for OS entropy.")
        self.seeded = seed is not None

    def __repr__(self) -> str:
        return f"SecretKey(seeded={self.seeded})"  # never the key

    def __reduce__(self) -> str:
        raise TypeError("a SecretKey is not written to files; a seeded run keeps its seed in secret.json (mode 0600)")

    def told(self, tell: Callable[[Callable[[], bytes]], bytes]) -> SecretKey:
        """The key of several processes: ``tell`` gives every one of them what it is called with on the first."""
        same = SecretKey.__new__(SecretKey)
        same._key, same.seeded = tell(lambda: self._key), self.seeded
        return same

    def bound_to(self, salt: str) -> SecretKey:
        """The key of one run: two runs with one seed, but other settings, share neither noise nor samples.

        Were they to share them, the difference of their releases would be free of noise.
        """
        bound = SecretKey.__new__(SecretKey)
        bound._key = hashlib.shake_256(self._key + f"|run|{salt}".encode()).digest(32)
        bound.seeded = self.seeded
        return bound

    def _derive(self, purpose: str, index: int, size: int) -> int:
        material = self._key + f"|{purpose}|{index}".encode()
        return int.from_bytes(hashlib.shake_256(material).digest(size), "little")

    def cipher_key(self, purpose: str, index: int = 0) -> bytes:
        """256 bits for one purpose and index."""
        return self._derive(purpose, index, 32).to_bytes(32, "little")

    def stream(self, purpose: str, index: int = 0) -> np.random.Generator:
        """A CPU generator for one purpose and index."""
        return np.random.Generator(np.random.Philox(key=self._derive(purpose, index, 16)))

    def fast_bits(self, purpose: str, index: int = 0) -> np.random.SFC64:
        """A quicker generator (SFC64), its whole 192-bit state derived from the key: valid until the thread's next.

        The first :data:`_SETTLE` words are to be passed over.
        """
        material = self._key + f"|{purpose}|{index}".encode()
        own = _own_bits()
        own.set(struct.unpack("<3Q", hashlib.shake_256(material).digest(24)))
        return own.bits

    def torch_generator(self, purpose: str, index: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator for one purpose and index (63 bits on CUDA; torch's CPU generator uses 32)."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.device_seed(purpose, index))
        return generator

    def device_seed(self, purpose: str, index: int = 0) -> int:
        """The seed of a torch generator for one purpose and index."""
        return self._derive(purpose, index, 8) >> 1


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


def _own_bits() -> _Bits:
    """A generator of this thread."""
    if not hasattr(_of_thread, "bits"):
        _of_thread.bits = _Bits()
    own: _Bits = _of_thread.bits
    return own


def _own_room(count: int) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """Room for so many values in float32, or more, of this thread: until the next that is asked for. The same twice."""
    room: tuple[np.ndarray[Any, Any], torch.Tensor] | None = getattr(_of_thread, "room", None)
    if room is None or len(room[0]) < count:
        values = np.empty(count, dtype=np.float32)
        room = _of_thread.room = values, torch.from_numpy(values)
    return room


_BLOCK = 1 << 18  # values of one stream
_SETTLE = 12  # words to pass over after setting a state: the generator's own advice
_AT_ONCE = 1 << 19  # values that are drawn before they are added to gradients
_LEAST_PART, _MOST_PART = 1 << 14, 1 << 16
_BLOCKS_PER_STEP = 1 << 40  # more blocks than any step has


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


def _plain(grad: torch.Tensor) -> bool:
    """Whether the kernel takes it."""
    return grad.is_cpu and (grad.dtype == torch.float32 or grad.dtype == torch.float64) and grad.is_contiguous()


def _on_one_gpu(grads: Sequence[torch.Tensor]) -> bool:
    """Whether they get their noise in a few launches."""
    return (
        len(grads) > 0
        and grads[0].is_cuda
        and all(g.dtype == torch.float32 and g.device == grads[0].device for g in grads)
    )


def cpu_generator() -> str:
    """The generator of noise on the CPU: a seeded run repeats bit for bit only with the same one."""
    return "numpy: SFC64, Box-Muller, parts of 65536" if native.kernels() is None else "native: ChaCha12, Box-Muller"


def _box_muller(bits: Any, out: np.ndarray[Any, Any], scale: float = 1.0, *, skip: int = 0) -> None:
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


@dataclass(frozen=True)
class Shard:
    """The places of a tensor that a process holds: ``part`` of its ``whole`` elements, from ``start`` on."""

    start: int
    part: int
    whole: int


class NoiseSource:
    """Standard normal tensors for one step, drawn in a fixed order; on the tensor's own device."""

    def __init__(
        self, key: SecretKey, step: int, *, generators: dict[torch.device, torch.Generator] | None = None
    ) -> None:
        """``generators`` is kept by the caller from step to step: making one on a GPU takes longer than seeding it."""
        self._key = key
        self._generators = generators if generators is not None else {}
        self._step = step
        self._place = 0  # in the sequence of numpy's values
        self._wide = False  # whether the latest of them were in float64
        self._part: tuple[range, Any, np.ndarray[Any, Any]] | None = None  # the last that was drawn by itself
        self._tensors = 0  # noised so far, by the kernel
        self._cipher_key: bytes | None = None
        self._side: np.random.Generator | None = None
        self._cuda: dict[torch.device, torch.Generator] = {}

    def normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Independent N(0, 1) of the shape, device and dtype of ``tensor`` (drawn in float32 or better)."""
        return self.wide_normal_like(tensor).to(tensor.dtype)

    def wide_normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in float64 where the tensor is, and in float32 otherwise: a draw is not rounded to half."""
        dtype = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32
        if tensor.device.type == "cpu":
            kernels = native.kernels()
            if kernels is not None:
                draw = torch.zeros(tensor.shape, dtype=dtype)
                self._add_by_kernel(kernels, [draw], [1.0], divide_by=1.0)
                return draw
            draw = torch.from_numpy(self._next_values(tensor.numel(), dtype)).view(tensor.shape)
        else:
            generator = self._on_device(tensor.device)
            draw = torch.randn(tensor.shape, dtype=dtype, device=tensor.device, generator=generator)
        return draw

    def device_seed(self, device: torch.device) -> int:
        """What this step's generator on a GPU is seeded with; as secret as the key."""
        return self._key.device_seed(f"noise-{device.type}", self._step)  # the same on every GPU of a run

    def _on_device(self, device: torch.device) -> torch.Generator:
        generator = self._cuda.get(device)
        if generator is None:
            if device not in self._generators:
                self._generators[device] = torch.Generator(device=device)
            generator = self._generators[device]
            generator.manual_seed(self.device_seed(device))
            self._cuda[device] = generator
        return generator

    def add_to(
        self,
        grads: Sequence[torch.Tensor],
        stds: Sequence[float],
        *,
        divide_by: float,
        owned: slice | None = None,
        steps: Steps | None = None,
    ) -> None:
        """In place, each gradient g becomes (g + std z) / divide_by with z independent N(0, 1), drawn in order.

        ``owned``: only these get noise, the same as if all did; the others are divided.
        ``steps``: taken in the same pass, where the C++ library does it.
        """
        if owned is not None and owned != slice(0, len(grads)):
            self._add_to_owned(grads, stds, divide_by, owned)
            return
        if _on_one_gpu(grads):
            generator = self._on_device(grads[0].device)
            add_device_noise(grads, stds, divide_by=divide_by, generator=generator, steps=steps)
            return
        kernels = native.kernels()
        if kernels is not None and all(_plain(grad) for grad in grads):
            self._add_by_kernel(kernels, grads, stds, divide_by=divide_by, steps=steps)
            return
        with torch.no_grad():
            self._add_by_torch(grads, stds, divide_by)

    def _add_by_torch(self, grads: Sequence[torch.Tensor], stds: Sequence[float], divide_by: float) -> None:
        if grads and all(_plain(grad) and grad.dtype == torch.float32 for grad in grads):
            self._add_by_parts(grads, stds, divide_by=divide_by)
            return
        for grad, std in zip(grads, stds, strict=True):
            draw = self.wide_normal_like(grad)
            if grad.dtype in (torch.float32, torch.float64):
                grad.add_(draw, alpha=std).div_(divide_by)
            else:  # add in float32, round once
                grad.copy_((grad.float() + std * draw) / divide_by)

    @torch.no_grad()
    def _add_to_owned(
        self, grads: Sequence[torch.Tensor], stds: Sequence[float], divide_by: float, owned: slice
    ) -> None:
        if grads[0].is_cuda:  # one stream for all: the others' noise is drawn too, and left out
            mine = range(len(grads))[owned]
            self.add_to(grads, [std if i in mine else 0.0 for i, std in enumerate(stds)], divide_by=divide_by)
            return
        before, after = grads[: owned.start], grads[owned.stop :]
        self.pass_over(before)
        self.add_to(grads[owned], stds[owned], divide_by=divide_by)
        self.pass_over(after)
        for grad in (*before, *after):
            grad.div_(divide_by)

    @torch.no_grad()
    def add_to_shards(
        self, grads: Sequence[torch.Tensor], stds: Sequence[float], shards: Sequence[Shard], *, divide_by: float
    ) -> None:
        """As :meth:`add_to`, for the parts of tensors that this process holds: the noise of their places.

        On a GPU a shard has a stream of its own instead, so noise depends on how tensors are cut.
        """
        for grad, std, shard in zip(grads, stds, shards, strict=True):
            if shard.part == shard.whole:
                self.add_to([grad], [std], divide_by=divide_by)
                continue
            draw = self._shard_normals(shard, grad) if grad.is_cpu else self._device_shard(shard, grad)
            wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
            grad.copy_((wide + std * draw.view_as(grad)) / divide_by)

    def _device_shard(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor:
        place = f"noise-{grad.device.type}-{self._tensors}-{shard.start}"
        self._tensors += 1
        generator = self._key.torch_generator(place, self._step, grad.device)
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        return torch.randn(grad.shape, dtype=dtype, device=grad.device, generator=generator)

    def _shard_normals(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor:
        """The normal values of some places of a tensor."""
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        kernels = native.kernels()
        if kernels is not None:
            number, self._tensors = self._tensors, self._tensors + 1
            draw = torch.zeros(shard.part, dtype=dtype)
            kernels.add_noise(self._step_key(), [(draw, 1.0, number)], divide_by=1.0, starts=[shard.start])
            return draw
        start = self._take(shard.whole, dtype) + shard.start
        return torch.from_numpy(self._values(start, shard.part, dtype))

    def _step_key(self) -> bytes:
        if self._cipher_key is None:
            self._cipher_key = self._key.cipher_key("noise-key", self._step)
        return self._cipher_key

    def pass_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Others add these tensors' noise: what is drawn next is what would have been drawn after them."""
        for tensor in tensors:
            if tensor.is_cuda:
                self.wide_normal_like(tensor)  # a stream in order: drawn, and left out
            else:
                self._tensors += 1
                self._take(tensor.numel(), tensor.dtype)

    def _add_by_kernel(
        self,
        kernels: native.Kernels,
        grads: Sequence[torch.Tensor],
        stds: Sequence[float],
        *,
        divide_by: float,
        steps: Steps | None = None,
    ) -> None:
        cipher_key = self._step_key()
        first = self._tensors
        self._tensors += len(grads)
        library = layers()
        if library is not None:
            key = list(struct.unpack("<4q", cipher_key))
            parameters, rates = ([], []) if steps is None else (list(steps.parameters), steps.rates)
            library.add_cipher_noise(list(grads), list(stds), divide_by, key, first, parameters, rates)
            if steps is not None:
                steps.taken = True
            return
        numbered = [(grad, std, first + i) for i, (grad, std) in enumerate(zip(grads, stds, strict=True))]
        kernels.add_noise(cipher_key, numbered, divide_by=divide_by)
        torch.autograd.graph.increment_version(list(grads))  # written to behind torch's back

    def _take(self, count: int, dtype: torch.dtype) -> int:
        """Where the next ``count`` values lie. Those in float32 and in float64 have no block in common."""
        wide = dtype == torch.float64
        if wide != self._wide:
            self._place, self._wide = -(-self._place // _BLOCK) * _BLOCK, wide
        start, self._place = self._place, self._place + count
        return start

    def _next_values(self, count: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
        return self._values(self._take(count, dtype), count, dtype)

    def _values(self, start: int, count: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
        """Values of the step's sequence, for the caller to do with as he likes.

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

    def _parts(self, places: range, wanted: Any) -> np.ndarray[Any, Any]:
        """Some whole parts, one after the other."""
        out = np.empty(len(places), dtype=wanted)
        self._draw_parts(places, out)
        return out

    def _draw_parts(self, places: range, out: np.ndarray[Any, Any], scale: float = 1.0) -> None:
        """Some whole parts, one after the other, drawn into ``out`` and scaled. Each block has its own stream."""
        place, bits, skip = places.start, None, 0
        while place < places.stop:
            part = _part_at(place)
            if bits is None or place % _BLOCK == 0:
                bits = self._key.fast_bits("noise", self._step * _BLOCKS_PER_STEP + place // _BLOCK)
                skip = _SETTLE
                if passed := place % _BLOCK:  # one word for two values in float32, one for each in float64
                    bits.random_raw(skip + (passed if out.dtype == np.float64 else passed // 2), output=False)
                    skip = 0
            _box_muller(bits, out[place - places.start : part.stop - places.start], scale, skip=skip)
            place, skip = part.stop, 0

    def _add_by_parts(self, grads: Sequence[torch.Tensor], stds: Sequence[float], *, divide_by: float) -> None:
        """As :meth:`add_to`, some parts after the other: the values of a whole model would leave the cache.

        As std z / divide_by + g / divide_by, with the noise scaled as it is drawn: a gradient is written once.
        """
        scales, share = [std / divide_by for std in stds], 1.0 / divide_by
        common = scales[0] if len(set(scales)) == 1 else 1.0
        sizes = [grad.numel() for grad in grads]
        start = self._take(sum(sizes), torch.float32)
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

    def normals(self, count: int) -> list[float]:
        """``count`` independent N(0, 1) numbers, for side releases; a stream apart from the gradients'."""
        if self._side is None:
            self._side = self._key.stream("side-noise", self._step)
        return [float(value) for value in self._side.standard_normal(count)]
