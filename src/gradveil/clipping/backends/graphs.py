"""Capturing a CUDA graph while nothing else is freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched inside becomes part of ``graph``.

    An earlier run that is still waiting for the garbage collector holds graphs and pinned memory. Freeing either is
    not permitted while a stream captures, and ends the capture: so they go before it, and the collector waits.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if collects:
            gc.enable()
