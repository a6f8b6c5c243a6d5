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

Noise on the CPU comes from ChaCha12 (clipping/_csrc/_noise.cpp), keyed by SHAKE-256 for one step, and turned into
normal values by Box-Muller. Without the compiled kernels it comes from numpy's SFC64 (numpy_normal.py).
Either way a value is a function of its place alone, so the result does not depend on the number of threads;
but the two differ, and a seeded run repeats only with the generator it began with. :func:`cpu_generator` names
the one in use. (A redone step with other noise is refused like any that is not the same bit for bit.)

The normal values are ordinary floating-point ones; the known attacks on floating-point noise are not defended
against, and the privacy statement says so.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from gradveil.clipping.backends import native
from gradveil.clipping.backends.layers import layers
from gradveil.errors import ConfigError
from gradveil.mechanism.noise.numpy_normal import NAME as NUMPYS_NAME
from gradveil.mechanism.noise.numpy_normal import NumpyNormals
from gradveil.mechanism.noise.on_device import add_device_noise


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

    def _derive(self, purpose: str, index: int | str, size: int) -> int:
        material = self._key + f"|{purpose}|{index}".encode()
        return int.from_bytes(hashlib.shake_256(material).digest(size), "little")

    def cipher_key(self, purpose: str, index: int | str = 0) -> bytes:
        """256 bits for one purpose and index."""
        return self._derive(purpose, index, 32).to_bytes(32, "little")

    def stream(self, purpose: str, index: int | str = 0) -> np.random.Generator:
        """A CPU generator for one purpose and index."""
        return np.random.Generator(np.random.Philox(key=self._derive(purpose, index, 16)))

    def fast_state(self, purpose: str, index: int | str = 0) -> bytes:
        """The whole state of numpy's SFC64, 192 bits, for one purpose and index."""
        return hashlib.shake_256(self._key + f"|{purpose}|{index}".encode()).digest(24)

    def torch_generator(
        self, purpose: str, index: int | str = 0, device: torch.device | str = "cpu"
    ) -> torch.Generator:
        """A torch generator for one purpose and index (63 bits on CUDA; torch's CPU generator uses 32)."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.device_seed(purpose, index))
        return generator

    def device_seed(self, purpose: str, index: int | str = 0) -> int:
        """The seed of a torch generator for one purpose and index."""
        return self._derive(purpose, index, 8) >> 1


def fresh_nonce() -> str:
    """Identifies the noise of one release: from the operating system, so that it never comes again."""
    return secrets.token_hex(16)


_BLOCKS_PER_STEP = 1 << 40  # more blocks of numpy's values than any step has


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
    return NUMPYS_NAME if native.kernels() is None else "native: ChaCha12, Box-Muller"


@dataclass(frozen=True)
class Shard:
    """The places of a tensor that a process holds: ``part`` of its ``whole`` elements, from ``start`` on."""

    start: int
    part: int
    whole: int


class NoiseSource:
    """Standard normal tensors for one step, drawn in a fixed order; on the tensor's own device."""

    def __init__(
        self, key: SecretKey, index: int | str, *, generators: dict[torch.device, torch.Generator] | None = None
    ) -> None:
        """``index``: which noise of the key. A nonce from :func:`fresh_nonce`, or the step in a seeded run.

        ``generators`` is kept by the caller from step to step: making one on a GPU takes longer than seeding it.
        """
        self._key = key
        self._generators = generators if generators is not None else {}
        self._index = index
        self.nonce = index if isinstance(index, str) else None
        self._tensors = 0  # noised so far, by the kernel
        self._cipher_key: bytes | None = None
        self._side: np.random.Generator | None = None
        self._cuda: dict[torch.device, torch.Generator] = {}

    @cached_property
    def by_numpy(self) -> NumpyNormals:
        """The sequence of values where there are no compiled kernels."""
        index = self._index
        if isinstance(index, int):
            return NumpyNormals(lambda block: self._key.fast_state("noise", index * _BLOCKS_PER_STEP + block))
        return NumpyNormals(lambda block: self._key.fast_state("noise", f"{index}|{block}"))

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
            draw = torch.from_numpy(self.by_numpy.next_values(tensor.numel(), dtype)).view(tensor.shape)
        else:
            generator = self._on_device(tensor.device)
            draw = torch.randn(tensor.shape, dtype=dtype, device=tensor.device, generator=generator)
        return draw

    def device_seed(self, device: torch.device) -> int:
        """What this step's generator on a GPU is seeded with; as secret as the key."""
        return self._key.device_seed(f"noise-{device.type}", self._index)  # the same on every GPU of a run

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
    ) -> None:
        """In place, each gradient g becomes (g + std z) / divide_by with z independent N(0, 1), drawn in order.

        ``owned``: only these get noise, the same as if all did; the others are divided.
        """
        if owned is not None and owned != slice(0, len(grads)):
            self._add_to_owned(grads, stds, divide_by, owned)
            return
        if _on_one_gpu(grads):
            generator = self._on_device(grads[0].device)
            add_device_noise(grads, stds, divide_by=divide_by, generator=generator)
            return
        kernels = native.kernels()
        if kernels is not None and all(_plain(grad) for grad in grads):
            self._add_by_kernel(kernels, grads, stds, divide_by=divide_by)
            return
        with torch.no_grad():
            self._add_by_torch(grads, stds, divide_by)

    def _add_by_torch(self, grads: Sequence[torch.Tensor], stds: Sequence[float], divide_by: float) -> None:
        if grads and all(_plain(grad) and grad.dtype == torch.float32 for grad in grads):
            self.by_numpy.add_to(grads, stds, divide_by=divide_by)
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
        generator = self._key.torch_generator(place, self._index, grad.device)
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
        start = self.by_numpy.take(shard.whole, dtype) + shard.start
        return torch.from_numpy(self.by_numpy.values(start, shard.part, dtype))

    def _step_key(self) -> bytes:
        if self._cipher_key is None:
            self._cipher_key = self._key.cipher_key("noise-key", self._index)
        return self._cipher_key

    def pass_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Others add these tensors' noise: what is drawn next is what would have been drawn after them."""
        for tensor in tensors:
            if tensor.is_cuda:
                self.wide_normal_like(tensor)  # a stream in order: drawn, and left out
            else:
                self._tensors += 1
                self.by_numpy.take(tensor.numel(), tensor.dtype)

    def _add_by_kernel(
        self,
        kernels: native.Kernels,
        grads: Sequence[torch.Tensor],
        stds: Sequence[float],
        *,
        divide_by: float,
    ) -> None:
        cipher_key = self._step_key()
        first = self._tensors
        self._tensors += len(grads)
        library = layers()
        if library is not None:
            key = list(struct.unpack("<4q", cipher_key))
            library.add_cipher_noise(list(grads), list(stds), divide_by, key, first)
            return
        numbered = [(grad, std, first + i) for i, (grad, std) in enumerate(zip(grads, stds, strict=True))]
        kernels.add_noise(cipher_key, numbered, divide_by=divide_by)
        torch.autograd.graph.increment_version(list(grads))  # written to behind torch's back

    def normals(self, count: int) -> list[float]:
        """``count`` independent N(0, 1) numbers, for side releases; a stream apart from the gradients'."""
        if self._side is None:
            self._side = self._key.stream("side-noise", self._index)
        return [float(value) for value in self._side.standard_normal(count)]
