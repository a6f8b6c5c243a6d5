"""The C++ kernels for the CPU: compiled at first use where there is a compiler, and cached.

The pure PyTorch path is always there and gives the same sums up to rounding; ``GRADVEIL_NATIVE=0`` chooses it.
:func:`status` says in one line which is in use.

Threads are those of torch: the kernels are compiled for OpenMP but not linked to any, so that they find the runtime
that torch has loaded. A second pool of threads would fight torch's for the cores. Where that does not load, they start
threads of their own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_long, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.clipping.backends import build
from gradveil.clipping.backends.clipped import Clipped as Clipped

_HERE = Path(__file__).parents[1] / "_csrc"
SOURCES = tuple(_HERE / name for name in ("_native.cpp", "_grams.cpp", "_norms.cpp", "_noise.cpp", "_lattice.cpp"))
_HEADERS = [_HERE / "_native.h", _HERE / "_noise.h"]
# No fast-math: sums and norms stay IEEE. Without errno, square roots are one instruction; their values are the same.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-std=c++17")
_THREADS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # for compiling, for linking
    "torch's threads": (("-fopenmp",), ()),
    "threads of its own": (("-pthread",), ("-pthread",)),
}
_LANES = 16
_WORTH_A_THREAD = 1 << 16  # elements: below, waking another thread costs more than it does

_SHAPE_NAMES = ("C", "H", "W", "O", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW", "G")


class _Shape(ctypes.Structure):
    _fields_ = [(name, c_int) for name in _SHAPE_NAMES]


class _Target(ctypes.Structure):
    """A gradient that gets noise."""

    _fields_ = [
        ("grad", c_void_p),
        ("count", c_int64),
        ("std", c_double),
        ("doubles", c_int32),
        ("index", c_uint32),
        ("start", c_int64),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gradveil_conv2d": (
        c_long,
        [c_void_p, c_void_p, c_long, POINTER(_Shape), c_int, c_double, c_int, *[c_void_p] * 6],
    ),
    "gradveil_conv2d_fold": (None, [c_void_p, c_long, c_long, c_long, c_long, c_void_p]),
    "gradveil_linear_clip": (
        c_long,
        [c_void_p, c_void_p, c_long, c_long, c_int, c_int, c_int, c_double, c_int, *[c_void_p] * 4],
    ),
    "gradveil_rank_one_clip": (
        c_long,
        [c_void_p, c_void_p, c_long, c_long, c_long, c_int, c_int, c_double, c_int, *[c_void_p] * 4],
    ),
    "gradveil_gram_squares": (None, [c_void_p, c_void_p, c_long, c_long, c_long, c_long, c_int, c_void_p, c_void_p]),
    "gradveil_row_squares": (None, [c_void_p, c_long, c_long, c_int, c_void_p]),
    "gradveil_weighted_rows": (None, [c_void_p, c_long, c_long, c_void_p, c_int, c_void_p]),
    "gradveil_group_norm_backward": (None, [*[c_void_p] * 5, *[c_long] * 4, c_int, *[c_void_p] * 3]),
    "gradveil_layer_norm_backward": (None, [*[c_void_p] * 5, *[c_long] * 3, c_int, *[c_void_p] * 3]),
    "gradveil_noise": (None, [c_void_p, c_void_p, c_long, c_double, c_int]),
    "gradveil_lattice_noise": (None, [c_void_p, c_void_p, c_long, c_double, c_int]),
    "gradveil_lattice_layers": (None, [c_void_p]),
    "gradveil_chacha_block": (None, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "gradveil_vector_bits": (c_int, []),
    "gradveil_openmp": (c_int, []),
}


def _workers(elements: int, most: int) -> int:
    """Threads for this much work, which falls into ``most`` parts."""
    return max(1, min(torch.get_num_threads(), most, elements // _WORTH_A_THREAD))


def _workers_for_products(examples: int, size: int, positions: int) -> int:
    """Threads for gradients of ``size`` elements, each a sum over positions: a vector of products is an element."""
    return _workers(examples * size * max(1, positions // _LANES), examples)


class ConvGeometry:
    """What a two-dimensional convolution does, as the kernel wants to know it."""

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        self.kernel, self.groups = tuple(kernel), groups
        self.channels, self.outputs = x.shape[1], g.shape[1]
        self.rows = self.channels // groups * kernel[0] * kernel[1]
        padded = -(-(self.outputs // groups) // _LANES) * _LANES
        self.size = groups * self.rows * padded  # elements of one example's gradient, as it is kept
        self.pixels = g.shape[2] * g.shape[3]
        shape = (*x.shape[1:], *g.shape[1:], *kernel, *stride, *padding, *dilation, groups)
        self.shape = _Shape(*shape)


class Kernels:
    """The compiled functions. All tensors are float32 on the CPU, see :func:`usable`."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._library = ctypes.CDLL(str(library))
        for name, (returns, takes) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = returns, takes
        self.vector_bits = int(self._library.gradveil_vector_bits())
        self.shares_threads = bool(self._library.gradveil_openmp())

    # ---- convolutions

    def conv2d_clip(self, x: Tensor, g: Tensor, geometry: ConvGeometry, *, bias: bool, bound: float) -> Clipped:
        """Sums of clipped weight and bias gradients.

        An example's gradient of weight and bias together is scaled to norm ``bound`` at most; one that is not
        finite adds nothing.
        """
        examples = len(x)
        workers = _workers_for_products(examples, geometry.size, geometry.pixels)
        weight_sums = torch.zeros(workers, geometry.size)
        bias_sums = torch.zeros(workers, geometry.outputs)
        found = self._conv2d(x, g, geometry, bias, bound, workers, weight_sums, bias_sums, None, None)
        found.sums = [self._folded(weight_sums, geometry)] + ([bias_sums.sum(0)] if bias else [])
        return found

    def conv2d_gradients(
        self, x: Tensor, g: Tensor, geometry: ConvGeometry, *, bias: bool, buffer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bias gradients, and norms (float64) of the weight's, which go to ``buffer`` (B, size); per example."""
        examples = len(x)
        biases = torch.empty(examples, geometry.outputs if bias else 0)
        workers = _workers_for_products(examples, geometry.size, geometry.pixels)
        return biases, self._conv2d(x, g, geometry, bias, 0.0, workers, None, None, buffer, biases).norms

    def conv2d_weighted(self, buffer: Tensor, geometry: ConvGeometry, weights: Tensor) -> Tensor:
        """The sum of the gradients in ``buffer``, each with its weight; one of weight zero is not looked at."""
        return self._folded(self.weighted_rows(buffer, weights).unsqueeze(0), geometry)

    def _conv2d(
        self,
        x: Tensor,
        g: Tensor,
        geometry: ConvGeometry,
        bias: bool,
        bound: float,
        workers: int,
        weight_sums: Tensor | None,
        bias_sums: Tensor | None,
        buffer: Tensor | None,
        biases: Tensor | None,
    ) -> Clipped:
        x, g = x.contiguous(), g.contiguous()
        norms, weights = torch.empty(len(x), dtype=torch.float64), torch.empty(len(x), dtype=torch.float64)
        lost = self._library.gradveil_conv2d(
            x.data_ptr(),
            g.data_ptr(),
            len(x),
            ctypes.byref(geometry.shape),
            int(bias),
            bound,
            workers,
            _pointer(weight_sums),
            _pointer(bias_sums),
            norms.data_ptr(),
            weights.data_ptr(),
            _pointer(buffer),
            _pointer(biases) if bias else None,
        )
        return Clipped([], norms, weights, lost)

    def _folded(self, sums: Tensor, geometry: ConvGeometry) -> Tensor:
        """(O, C / G, *kernel) from parts as the kernel keeps them."""
        og = geometry.outputs // geometry.groups
        out = torch.empty(geometry.outputs, geometry.channels // geometry.groups, *geometry.kernel)
        self._library.gradveil_conv2d_fold(
            sums.data_ptr(), len(sums), geometry.groups, geometry.rows, og, out.data_ptr()
        )
        return out

    # ---- linear layers

    def linear_clip(self, x_BTD: Tensor, g_BTO: Tensor, *, bias: bool, bound: float) -> Clipped:
        """Sums of clipped weight (O, D) and bias gradients, as :meth:`conv2d_clip`."""
        x, g = x_BTD.contiguous(), g_BTO.contiguous()
        examples, positions, inputs = x.shape
        outputs = g.shape[2]
        width = -(-inputs // _LANES) * _LANES
        workers = _workers_for_products(examples, outputs * width, positions)
        weight_sums, bias_sums = torch.zeros(workers, outputs, width), torch.zeros(workers, outputs)
        norms, weights = torch.empty(examples, dtype=torch.float64), torch.empty(examples, dtype=torch.float64)
        lost = self._library.gradveil_linear_clip(
            x.data_ptr(),
            g.data_ptr(),
            examples,
            positions,
            inputs,
            outputs,
            int(bias),
            bound,
            workers,
            weight_sums.data_ptr(),
            bias_sums.data_ptr(),
            norms.data_ptr(),
            weights.data_ptr(),
        )
        total = weight_sums.sum(0)[:, :inputs].contiguous()
        return Clipped([total, bias_sums.sum(0)] if bias else [total], norms, weights, lost)

    def rank_one_clip(self, x_BD: Tensor, g_BO: Tensor, *, weight: bool, bias: bool, bound: float) -> Clipped:
        """Sums of clipped gradients g x^T, weight (O, D) and bias, those that are asked for."""
        x, g = x_BD.contiguous(), g_BO.contiguous()
        examples, inputs = x.shape
        outputs = g.shape[1]
        scaled, total = torch.empty_like(g), torch.empty(outputs if bias else 0)
        norms, weights = torch.empty(examples, dtype=torch.float64), torch.empty(examples, dtype=torch.float64)
        lost = self._library.gradveil_rank_one_clip(
            x.data_ptr(),
            g.data_ptr(),
            examples,
            inputs,
            outputs,
            int(weight),
            int(bias),
            bound,
            _workers(examples * (inputs + outputs), examples),
            scaled.data_ptr(),
            total.data_ptr() if bias else None,
            norms.data_ptr(),
            weights.data_ptr(),
        )
        sums = [total] if bias else []
        if weight:  # zero times an input that is not finite is not zero
            sums.insert(0, scaled.mT @ (torch.where(norms.isfinite().unsqueeze(1), x, 0.0) if lost else x))
        return Clipped(sums, norms, weights, lost)

    def gram_squares(self, x_BTD: Tensor, g_BTO: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        """The squared norm (float64) of every example's weight gradient, never underestimated; and the gradients (B, O)
        of the bias, where asked for.
        """
        x, g = x_BTD.contiguous(), g_BTO.contiguous()
        examples, positions, inputs = x.shape
        outputs = g.shape[2]
        squares = torch.empty(examples, dtype=torch.float64)
        sums = torch.empty(examples, outputs) if bias else None
        workers = _workers_for_products(examples, positions * positions, inputs + outputs)
        self._library.gradveil_gram_squares(
            x.data_ptr(),
            g.data_ptr(),
            examples,
            positions,
            inputs,
            outputs,
            workers,
            squares.data_ptr(),
            _pointer(sums),
        )
        return squares, sums

    # ---- rows

    def row_squares(self, rows: Tensor) -> Tensor:
        """The squared norm (float64) of every row of (B, n)."""
        rows = rows.contiguous()
        squares = torch.empty(len(rows), dtype=torch.float64)
        self._library.gradveil_row_squares(
            rows.data_ptr(), len(rows), rows.shape[1], _workers(rows.numel(), len(rows)), squares.data_ptr()
        )
        return squares

    def weighted_rows(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum over i of weights[i] rows[i]; a row of weight zero is not looked at, whatever it holds."""
        rows, weights = rows.contiguous(), weights.to(torch.float32).contiguous()
        out = torch.empty(rows.shape[1])
        self._library.gradveil_weighted_rows(
            rows.data_ptr(),
            len(rows),
            rows.shape[1],
            weights.data_ptr(),
            _workers(rows.numel(), rows.shape[1]),
            out.data_ptr(),
        )
        return out

    # ---- norms

    def group_norm_backward(
        self, x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, groups: int, *, to_x: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The input's gradient, and every example's gradients (B, C) of scale and shift. All contiguous."""
        examples, channels = x.shape[:2]
        out = torch.empty_like(x) if to_x else None
        to_scale, to_shift = torch.empty(examples, channels), torch.empty(examples, channels)
        self._library.gradveil_group_norm_backward(
            x.data_ptr(),
            g.data_ptr(),
            mean.data_ptr(),
            rstd.data_ptr(),
            scale.data_ptr(),
            examples,
            channels,
            x.numel() // max(1, examples * channels),
            groups,
            _workers(x.numel(), examples * groups),
            _pointer(out),
            to_scale.data_ptr(),
            to_shift.data_ptr(),
        )
        return out, to_scale, to_shift

    def layer_norm_backward(
        self, x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, *, to_x: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """As :meth:`group_norm_backward`, over the dimensions of ``scale``, which are the last ones of x."""
        examples, width = x.shape[0], scale.numel()
        out = torch.empty_like(x) if to_x else None
        to_scale, to_shift = torch.empty(examples, *scale.shape), torch.empty(examples, *scale.shape)
        self._library.gradveil_layer_norm_backward(
            x.data_ptr(),
            g.data_ptr(),
            mean.data_ptr(),
            rstd.data_ptr(),
            scale.data_ptr(),
            examples,
            x.numel() // max(1, examples * width),
            width,
            _workers(x.numel(), examples),
            _pointer(out),
            to_scale.data_ptr(),
            to_shift.data_ptr(),
        )
        return out, to_scale, to_shift

    # ---- noise

    def add_noise(
        self,
        key: bytes,
        targets: Sequence[tuple[Tensor, float, int]],
        *,
        divide_by: float,
        starts: Sequence[int] | None = None,
        threads: int | None = None,
        lattice: bool = False,
    ) -> None:
        """In place, each (grad, std, index) becomes (grad + std z) / divide_by; contiguous float32 or float64.

        z is N(0, 1) from ChaCha12 under the 32-byte ``key``, with the tensor's index as nonce: the same for any number
        of threads. Shards of tensors have their ``starts`` there, and get the noise of their places. ``lattice``: grad
        is rounded to whole units of std / 2^32, and std z drawn as a whole number of them.
        """
        if len(key) != 32:
            raise ValueError(f"a ChaCha12 key has 32 bytes, not {len(key)}")
        array = (_Target * len(targets))(
            *(
                _Target(t.data_ptr(), t.numel(), std, t.dtype == torch.float64, index, start)
                for (t, std, index), start in zip(targets, starts or [0] * len(targets), strict=True)
            )
        )
        elements = sum(t.numel() for t, _, _ in targets)
        workers = threads or _workers(elements * 4, 1 << 20)
        add = self._library.gradveil_lattice_noise if lattice else self._library.gradveil_noise
        add(key, array, len(targets), divide_by, workers)

    def lattice_layers(self) -> list[int]:
        """The widths of the lattice noise's ziggurat, for the test that numpy has the same."""
        out = (c_uint64 * 2048)()
        self._library.gradveil_lattice_layers(out)
        return list(out)

    def chacha_block(self, key: bytes, counter: int, nonce: bytes) -> bytes:
        """One block of the generator, for its test against the published vector."""
        out = ctypes.create_string_buffer(64)
        self._library.gradveil_chacha_block(key, counter, nonce, out)
        return out.raw


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=1)
def _load() -> tuple[Kernels | None, str]:
    if os.environ.get("GRADVEIL_NATIVE", "1") == "0":
        return None, "PyTorch (GRADVEIL_NATIVE=0)"
    compiler = build.compiler()
    if compiler is None:
        return None, "PyTorch (no C++ compiler found)"
    reason = ""
    for threads in _THREADS:
        try:
            kernels = Kernels(_built(compiler, threads))
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            reason = build.why(error)
        else:
            return kernels, f"native C++, {kernels.vector_bits}-bit vectors, {threads}"
    return None, f"PyTorch (the C++ kernel could not be built: {reason})"


def _built(compiler: str, threads: str) -> Path:
    to_compile, to_link = _THREADS[threads]
    return build.library(
        compiler, "kernels", SOURCES, headers=_HEADERS, compile_with=(*FLAGS, *to_compile), link_with=to_link
    )


def library() -> Path | None:
    """Where the compiled kernels are, for others to link to."""
    loaded = kernels()
    return None if loaded is None else loaded.library


def kernels() -> Kernels | None:
    """The compiled kernels, or None where the PyTorch path is in use."""
    return _load()[0]


def status() -> str:
    """One line: which clipping path is in use on the CPU, and why."""
    return f"clipping on the CPU: {_load()[1]}"


def usable(*tensors: Any) -> bool:
    """Whether the kernel takes these tensors."""
    return all(t.is_cpu and t.dtype == torch.float32 for t in tensors)


def for_tensors(*tensors: Any) -> Kernels | None:
    """The compiled kernels, where there are any and they take these tensors."""
    return kernels() if usable(*tensors) else None
