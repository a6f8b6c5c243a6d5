"""The small C++ kernel for the CPU: compiled at first use where there is a compiler, and cached.

The pure PyTorch path is always there and gives the same sums up to rounding; ``GRADVEIL_NATIVE=0`` chooses it.
:func:`status` says in one line which is in use.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("_native.cpp")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-std=c++17")  # no fast-math: sums and norms stay IEEE
_LANES = 16


_NAMES = ("C", "H", "W", "O", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW", "G")


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in _NAMES]


class Kernels:
    """The compiled functions."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._conv = loaded.gradveil_conv2d_clip
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._conv.restype = None
        self._conv.argtypes = [
            pointer,
            pointer,
            long,
            long,
            ctypes.POINTER(_Shape),
            ctypes.c_int,
            ctypes.c_float,
            pointer,
            pointer,
            pointer,
        ]
        self.vector_bits = int(loaded.gradveil_vector_bits())

    def conv2d_clip(
        self,
        x: Tensor,
        g: Tensor,
        *,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        bias: bool,
        bound: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of clipped weight and bias gradients, and squared norms (float64) per example, before clipping.

        An example's gradient of weight and bias together is scaled to norm ``bound`` at most; one that is not
        finite adds nothing. Float32 on the CPU.
        """
        x, g = x.contiguous(), g.contiguous()
        examples, channels = x.shape[:2]
        outputs = g.shape[1]
        shape = _Shape(channels, *x.shape[2:], outputs, *g.shape[2:], *kernel, *stride, *padding, *dilation, groups)
        rows = channels // groups * kernel[0] * kernel[1]
        padded = -(-(outputs // groups) // _LANES) * _LANES
        workers = max(1, min(torch.get_num_threads(), examples))
        weight_sums = torch.zeros(workers, groups, rows, padded)
        bias_sums = torch.zeros(workers, outputs)
        squares = torch.empty(examples, dtype=torch.float64)

        def work(worker: int) -> None:
            self._conv(
                x.data_ptr(),
                g.data_ptr(),
                examples * worker // workers,
                examples * (worker + 1) // workers,
                ctypes.byref(shape),
                int(bias),
                bound,
                weight_sums[worker].data_ptr(),
                bias_sums[worker].data_ptr(),
                squares.data_ptr(),
            )

        if workers == 1:
            work(0)
        else:
            list(_pool(workers).map(work, range(workers)))  # the calls leave Python's lock to the others
        summed = weight_sums.sum(0)[:, :, : outputs // groups].transpose(1, 2)
        return summed.reshape(outputs, channels // groups, *kernel), bias_sums.sum(0), squares


@lru_cache(maxsize=1)
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="gradveil-clip")


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradveil"


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


@lru_cache(maxsize=1)
def _load() -> tuple[Kernels | None, str]:
    if os.environ.get("GRADVEIL_NATIVE", "1") == "0":
        return None, "PyTorch (GRADVEIL_NATIVE=0)"
    compiler = _compiler()
    if compiler is None:
        return None, "PyTorch (no C++ compiler found)"
    try:
        library = _built(compiler)
        kernels = Kernels(library)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return None, f"PyTorch (the C++ kernel could not be built: {str(reason).strip().splitlines()[0][:120]})"
    return kernels, f"native C++, {kernels.vector_bits}-bit vectors"


def _built(compiler: str) -> Path:
    """The compiled library, from the cache or made now; whole or not there at all."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    told = "\n".join([SOURCE.read_text(), " ".join(FLAGS), version, platform.machine(), _cpu_flags()])
    name = f"kernels-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so"
    directory = _cache_directory()
    library = directory / name
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / name
        subprocess.run(
            [compiler, *FLAGS, "-o", str(made), str(SOURCE)], capture_output=True, text=True, check=True, timeout=120
        )
        os.replace(made, library)
    return library


def _cpu_flags() -> str:
    """What -march=native looks at: a cache that is shared between machines must not mix their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def kernels() -> Kernels | None:
    """The compiled kernels, or None where the PyTorch path is in use."""
    return _load()[0]


def status() -> str:
    """One line: which clipping path is in use on the CPU, and why."""
    return f"clipping on the CPU: {_load()[1]}"


def usable(*tensors: Any) -> bool:
    """Whether the kernel takes these tensors."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
