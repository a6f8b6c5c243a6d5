"""Where noise and samples come from: one secret key, and streams derived from it.

A run has one 256-bit key: from the operating system's entropy, or, for a repeatable run, from the
user's seed. Every use (the noise of step 7, the sample of step 7, the initial weights) has its own
generator, keyed by SHAKE-256 of (key, purpose, index). So

- step t's randomness is a function of the key and of t alone: an interrupted run resumes bit for bit
  without any generator state in a file (and the engine refuses a redone step that is not the same bit
  for bit: the same noise on another gradient would cancel out);
- seeing one stream tells nothing of another, since the derivation is one-way;
- the key never leaves the process. Anyone who knows the *seed* of a seeded run can derive it, and subtract
  the noise: a seed must be kept as secret as the data.

Noise on the CPU comes from ChaCha12, keyed by SHAKE-256 for one step; a value is a function of its place alone, so
the result does not depend on the number of threads. There are two kinds:

- "lattice" (lattice.py): what is released lies on a public lattice, and is differentially private in floating point
  too; docs/noise.md has the proof. From the compiled kernel or from numpy, bit for bit the same.
- "float": ordinary floating-point values by Box-Muller (_noise.cpp), in less than half the time. The known attacks on
  floating-point noise are not defended against, and the privacy statement says so. Without the compiled kernels the
  values are numpy's draws on the lattice, so a seeded run repeats only with kernels or only without.

On a GPU noise is by default torch's, of the second kind, and its generator has a seed of 63 bits. That on a lattice is
drawn on the CPU and added on the GPU: the same bits.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradveil.clipping.backends import native
from gradveil.clipping.backends.layers import layers
from gradveil.clipping.per_sample_grads import at_least_float32
from gradveil.errors import ConfigError
from gradveil.mechanism.noise import lattice
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


@dataclass(frozen=True)
class Shard:
    """The places of a tensor that a process holds: ``part`` of its ``whole`` elements, from ``start`` on."""

    start: int
    part: int
    whole: int


class NoiseSource:
    """The noise of one step, drawn in a fixed order; on the tensor's own device."""

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
        self._tensors = 0  # noised so far
        self._keys: dict[str, bytes] = {}
        self._cuda: dict[torch.device, torch.Generator] = {}

    def normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Independent N(0, 1) of the shape, device and dtype of ``tensor`` (drawn in float32 or better)."""
        return self.wide_normal_like(tensor).to(tensor.dtype)

    def wide_normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in float64 where the tensor is, and in float32 otherwise: a draw is not rounded to half."""
        dtype = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32
        if not tensor.is_cpu:
            generator = self._on_device(tensor.device)
            return torch.randn(tensor.shape, dtype=dtype, device=tensor.device, generator=generator)
        return self._normals(Shard(0, tensor.numel(), tensor.numel()), dtype).view(tensor.shape)

    def lattice_draws(self, shape: Sequence[int]) -> torch.Tensor:
        """The next tensor's noise in units of its lattice, on the CPU: whole numbers in float64."""
        return _draws(self._key_for("lattice-noise"), [(self._next(), 0, math.prod(shape))])[0].view(tuple(shape))

    def _next(self, tensors: int = 1) -> int:
        """The number of the next tensor, where so many are noised."""
        self._tensors += tensors
        return self._tensors - tensors

    def _key_for(self, purpose: str) -> bytes:
        if purpose not in self._keys:
            self._keys[purpose] = self._key.cipher_key(purpose, self._index)
        return self._keys[purpose]

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
        for grad, std in zip(grads, stds, strict=True):  # in float32 at least, rounded once
            grad.copy_((at_least_float32(grad) + std * self.wide_normal_like(grad)) / divide_by)

    @torch.no_grad()
    def add_on_lattice(
        self,
        grads: Sequence[torch.Tensor],
        stds: Sequence[float],
        *,
        divide_by: float,
        shards: Sequence[Shard] | None = None,
    ) -> None:
        """As :meth:`add_to`, with g rounded to a lattice and std z drawn on it, on the CPU; 0 stays without noise.

        ``stds`` must allow for the rounding: see :func:`gradveil.mechanism.noise.lattice.widened`. ``shards``: the
        gradients are parts of tensors, and get the noise of their places.
        """
        kernels = native.kernels()
        if kernels is not None and shards is None and all(stds) and all(_plain(grad) for grad in grads):
            self._add_by_kernel(kernels, grads, stds, divide_by=divide_by, on_lattice=True)
            return
        first, starts = self._next(len(grads)), [0] * len(grads) if shards is None else [s.start for s in shards]
        pieces = [(first + i, start, grad.numel()) for i, (grad, start) in enumerate(zip(grads, starts, strict=True))]
        for grad, std, units in zip(grads, stds, _draws(self._key_for("lattice-noise"), pieces), strict=True):
            if std:
                units = units.view(grad.shape).to(grad.device)
                grad.copy_(lattice.noised(grad, units, std, divide_by=divide_by))
            else:
                grad.div_(divide_by)

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
            wide = at_least_float32(grad)
            draw = self._normals(shard, wide.dtype) if grad.is_cpu else self._device_shard(shard, grad)
            grad.copy_((wide + std * draw.view_as(grad)) / divide_by)

    def _device_shard(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor:
        place = f"noise-{grad.device.type}-{self._tensors}-{shard.start}"
        self._tensors += 1
        generator = self._key.torch_generator(place, self._index, grad.device)
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        return torch.randn(grad.shape, dtype=dtype, device=grad.device, generator=generator)

    def _normals(self, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        """The normal values of some places of the next tensor, on the CPU."""
        kernels, number = native.kernels(), self._next()
        if kernels is None:
            units = lattice.draws(self._key_for("lattice-noise"), [(number, shard.start, shard.part)])[0]
            return torch.from_numpy(units / lattice.UNITS).to(dtype)
        draw = torch.zeros(shard.part, dtype=dtype)
        key = self._key_for("noise-key")
        kernels.add_noise(key, [(draw, 1.0, number)], divide_by=1.0, starts=[shard.start])
        return draw

    def pass_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Others add these tensors' noise: what is drawn next is what would have been drawn after them."""
        for tensor in tensors:
            if tensor.is_cuda:
                self.wide_normal_like(tensor)  # a stream in order: drawn, and left out
            else:
                self._tensors += 1

    def _add_by_kernel(
        self,
        kernels: native.Kernels,
        grads: Sequence[torch.Tensor],
        stds: Sequence[float],
        *,
        divide_by: float,
        on_lattice: bool = False,
    ) -> None:
        cipher_key = self._key_for("lattice-noise" if on_lattice else "noise-key")
        first = self._next(len(grads))
        library = layers()
        if library is not None:
            key = list(struct.unpack("<4q", cipher_key))
            library.add_cipher_noise(list(grads), list(stds), divide_by, key, first, on_lattice)
            return
        numbered = [(grad, std, first + i) for i, (grad, std) in enumerate(zip(grads, stds, strict=True))]
        kernels.add_noise(cipher_key, numbered, divide_by=divide_by, lattice=on_lattice)
        torch.autograd.graph.increment_version(list(grads))  # written to behind torch's back

    def noised(self, values: Sequence[float], std: float, *, sensitivity: float) -> tuple[float, ...]:
        """Numbers that are released beside the gradients, with noise of their own, on a lattice.

        ``sensitivity``: of all of them together, in l2 norm.
        """
        units = _draws(self._key_for("side-noise"), [(0, 0, len(values))])[0]
        wide = lattice.widened(std, sensitivity=sensitivity, coordinates=len(values))
        return tuple(lattice.noised(torch.tensor(values, dtype=torch.float64), units, wide, divide_by=1.0).tolist())


def _draws(key: bytes, pieces: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """For each (tensor, start, count) the noise of these places in units of the lattice: whole numbers in float64."""
    kernels = native.kernels()
    if kernels is None:
        return [torch.from_numpy(units) for units in lattice.draws(key, pieces)]
    out = [torch.zeros(count, dtype=torch.float64) for _, _, count in pieces]
    targets = [(units, lattice.UNITS, tensor) for units, (tensor, _, _) in zip(out, pieces, strict=True)]
    kernels.add_noise(key, targets, divide_by=1.0, starts=[start for _, start, _ in pieces], lattice=True)
    return out
