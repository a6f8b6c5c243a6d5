"""Settings that trade memory for time. They change no result beyond rounding, and no privacy.

>>> from gradveil.clipping import performance
>>> with performance.use(performance.Settings(kept_elements=0)):  # keep nothing between norms and sums
...     pass
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes, in elements of a tensor.

    chunk_elements        per-example work held at a time on the CPU: small enough for its cache
    cuda_chunk_elements   the same on a GPU: large enough for its width
    kept_elements         per-example gradients of one layer kept between norms and sums, where groups span layers;
                          a layer that needs more computes its gradients a second time
    cuda_kept_elements    the same on a GPU
    cached_elements       per-example gradients that fit the cache of one core: forming them costs little more than
                          the product itself; larger ones pass through memory several times
    formula               "auto" lets each layer choose its formula by cost; a name forces it where it applies
    """

    chunk_elements: int = 1 << 20
    cuda_chunk_elements: int = 1 << 28
    kept_elements: int = 1 << 27
    cuda_kept_elements: int = 1 << 29
    cached_elements: int = 1 << 18
    formula: str = "auto"

    def chunk(self, device: Any) -> int:
        return self.cuda_chunk_elements if device.type == "cuda" else self.chunk_elements

    def kept(self, device: Any) -> int:
        return self.cuda_kept_elements if device.type == "cuda" else self.kept_elements


_current = Settings()


def settings() -> Settings:
    """The settings in use."""
    return _current


def set_settings(new: Settings) -> None:
    """Use these settings from now on, in the whole process."""
    global _current
    _current = new


@contextmanager
def use(new: Settings) -> Iterator[None]:
    """Use these settings inside a with block."""
    before = settings()
    set_settings(new)
    try:
        yield
    finally:
        set_settings(before)
