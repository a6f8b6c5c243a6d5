"""Programs: what the CUDA kernels' wrappers do for one layer, written down once and done again in C++.

A wrapper (cuda.py) works out grids, block sizes and buffers in Python, and Triton looks up the compiled kernel for
its arguments: for a small layer that takes longer than the kernels. While a :class:`Recorder` is at work, each of
these steps is written down as numbers that _programs.h reads (struct Program there): the same kernels, with the
addresses of the call at hand. A program holds for the shapes it was recorded with, and for no other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_END, _EMPTY, _LAUNCH, _PRODUCT, _SUM, _HALVES, _SQUARES, _COLUMNS = range(8)  # as in _programs.h
_MOST_ARGUMENTS = 36  # a few less than there, for what Triton adds
_WARP = 32


class Recorder:
    """Writes a program. What cannot be said in one leaves it without a program, and the layer in Python."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._code: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}  # storage -> number of the tensor, its address
        self._held: list[Tensor] = []  # an address stays taken as long as its tensor lives
        self._given, self._aligned = len(given), 0
        self._possible = True
        self.program: list[int] | None = None
        self._launches: list[tuple[int, int, int]] = []
        for tensor in given:
            self._possible &= _storage(tensor) not in self._places
            self._number(tensor)

    def empty(self, made: Tensor) -> None:
        """A new float32 tensor."""
        self._code += [_EMPTY, made.dim(), *made.shape]
        self._number(made)

    def product(self, made: Tensor, g: Tensor, x: Tensor) -> None:
        """g^T x of two matrices."""
        self._code += [_PRODUCT, self._whole(g), self._whole(x), *g.shape, x.shape[1]]
        self._number(made)

    def sum(self, made: Tensor, rows: int, columns: int, dim: int, of: Tensor) -> None:
        """The sum over one dimension of a tensor seen as (rows, columns)."""
        self._code += [_SUM, self._whole(of), rows, columns, dim]
        self._number(made)

    def product_of_halves(self, made: Tensor, a: Tensor, b: Tensor) -> None:
        """a^T b of each example (B, T, ...), of factors in half precision."""
        self._code += [_HALVES, self._whole(a), self._whole(b), *a.shape, b.shape[2]]
        self._number(made)

    def squares(self, made: Tensor, of: Tensor) -> None:
        """The squared norms of the rows."""
        self._code += [_SQUARES, self._whole(of), len(of)]
        self._number(made)

    def columns(self, made: Tensor, of: Tensor) -> None:
        """The sum over the positions of each example, of a tensor (B, T, ...)."""
        self._code += [_COLUMNS, self._whole(of), *of.shape]
        self._number(made)

    def launch(self, compiled: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """A launch of a compiled Triton kernel: those of its arguments that are not built into it."""
        meta, source = compiled.metadata, compiled.src
        types = list(source.signature.values())
        if getattr(meta, "global_scratch_size", 0) or getattr(meta, "num_ctas", 1) != 1:
            self._possible = False
        found: list[int] = []
        for i, (kind, value) in enumerate(zip(types, arguments, strict=False)):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                aligned = any("divisibility" in str(name) for name, _ in source.attrs.get((i,), ()))
                found += self._address(value, aligned=aligned)
            elif kind.startswith("fp"):
                found += [-1, int(struct.unpack("<I", struct.pack("<f", value))[0])]
            else:
                found += [-1, int(value)]
        if len(found) > 2 * _MOST_ARGUMENTS or any(kind != "constexpr" for kind in types[len(arguments) :]):
            self._possible = False
        sizes = [*grid, 1, 1][:3]
        threads = _WARP * meta.num_warps
        self._launches.append((compiled.function, threads, meta.shared))
        self._code += [_LAUNCH, compiled.function, *sizes, threads, meta.shared, len(found) // 2, *found]

    @property
    def launches(self) -> list[tuple[int, int, int]]:
        """The kernels launched: handle, threads, shared memory. Empty where C++ could not launch them."""
        return self._launches if self._possible else []

    def finish(self, both: Tensor, sums: Sequence[Tensor]) -> None:
        """What comes out: norms and weights (2, B), and the sums."""
        self._code += [_END, self._whole(both), both.shape[1], len(sums)]
        for total in sums:
            self._code += [self._whole(total), total.dim(), *total.shape]
        if self._possible:
            self.program = [*self._code, self._aligned]

    def _number(self, tensor: Tensor) -> None:
        if not self._possible:  # there will be no program: hold on to nothing
            self._held.clear()
            return
        self._places[_storage(tensor)] = (len(self._held), tensor.data_ptr())
        self._held.append(tensor)

    def _address(self, tensor: Tensor, *, aligned: bool) -> list[int]:
        number, start = self._places.get(_storage(tensor), (-1, 0))
        offset = tensor.data_ptr() - start
        if number < 0 or offset < 0 or (aligned and offset % 16):
            self._possible = False
            return [0, 0]
        if aligned and number < self._given:
            self._aligned |= 1 << number
        return [number, offset]

    def _whole(self, tensor: Tensor) -> int:
        """The number of a tensor that is used from its beginning, in any shape."""
        number, start = self._places.get(_storage(tensor), (-1, 0))
        if number < 0 or tensor.data_ptr() != start or not tensor.is_contiguous():
            self._possible = False
            return 0
        return number


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_current: Recorder | None = None


def current() -> Recorder | None:
    """The recorder at work."""
    return _current


@contextmanager
def recording(given: Sequence[Tensor]) -> Iterator[Recorder]:
    """Record what the wrappers do with the tensors given; nested recordings are not meant to be."""
    global _current
    _current = recorder = Recorder(given)
    try:
        yield recorder
    finally:
        _current = None
