"""How the per-example gradients of a convolution are formed, and its norms found, by its shape alone.

Legend: B examples, C input channels, O output channels, G groups, L output pixels, K kernel elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gradveil.clipping import performance


def choose_formula(
    *, pixels: int, places: int, fields: int, maps: int, taps: int, groups: int, settings: performance.Settings
) -> str:
    """How to get at the norms, by cost in multiply-adds per example.

    direct   form the gradient, L * K C O: the work of the sum itself. Clipped on the way to it, it costs a few passes
             over its K C O elements: cheap in the cache of a core, a hundred multiply-adds each where it does not fit.
    gram     sum over pairs of pixels of <patch, patch> <g, g>, where the products of patches are sums of products of
             input pixels (P of them): P^2 C + L^2 (K + O). One scaled contraction follows. For few pixels and many
             channels.
    """
    if groups != 1 or settings.formula == "direct":
        return "direct"
    if settings.formula == "gram":
        return "gram"
    elements = fields * maps * taps
    gram = places**2 * fields + pixels**2 * (8 * taps + maps)  # adding up shifted products is limited by memory
    return "gram" if elements > settings.cached_elements and gram < 50 * elements else "direct"


# Multiply-adds of one example's weight gradient on the CPU, from which on PyTorch's own convolution is quicker than
# cutting patches for a batched product.
_BY_CONVOLUTION = 12_000_000
# It takes several examples at once, each a group of channels: quick where channels fill its vectors, slow otherwise.
# More examples than these at once only leave the cache.
VECTOR, _AT_ONCE = 16, 8
# Patches of a row of the kernel are quick from so many columns of the product on, and up to so many elements of an
# example; several times the usual number of examples at once.
_COLUMNS, _MOST_BY_ROWS, _MORE_AT_ONCE = 48, 1 << 17, 3


@dataclass(frozen=True)
class Plan:
    """How the gradients of a convolution of some shape are formed, and its norms found.

    way     patches       all that the kernel sees is copied, and a batched product taken
            rows          what one row of the kernel sees is copied, which does for its other rows further down in the
                          same memory; a batched product for each of them (on the CPU)
            convolution   PyTorch's own weight gradient, every example a group of channels (on the CPU)
    """

    way: str
    elements: int  # that an example takes meanwhile
    formula: str  # see choose_formula
    channels_inside: bool  # patches are cut with the channels innermost: copying is quick where runs are long
    outputs_last: bool  # of a product with patches: quicker on the CPU where outputs fill its vectors


@lru_cache(maxsize=1024)
def plan_for(
    field: tuple[int, ...],
    map_: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    transposed: bool,
    one_contraction: bool,
    cpu: bool,
    settings: performance.Settings,
) -> Plan:
    """By the shapes of field and map: small layers feel how long it takes to decide, so it is decided once."""
    taps, pixels, outputs = math.prod(kernel), math.prod(map_[2:]), map_[1] // groups
    way, elements = "patches", field[1] * taps * max(pixels, outputs)
    if cpu:
        elements //= 2  # patches are written once and read once: they need not stay in the nearest cache
        if not transposed:
            other = _way_without_patches(field, map_, kernel, stride, groups, settings)
            way, elements = (way, elements) if other is None else other
    of_channels = field[1] * (kernel[-1] if dilation[-1] == 1 else 1)
    of_pixels = map_[-1] if stride[-1] == 1 else 1
    channels_inside = way == "patches" and groups == 1 and taps > 1 and of_channels > of_pixels
    outputs_last = way == "patches" and not channels_inside and cpu and outputs % VECTOR == 0
    formula = "direct"
    if one_contraction:
        places = math.prod(n + 2 * p for n, p in zip(field[2:], padding, strict=True))
        formula = choose_formula(
            pixels=pixels, places=places, fields=field[1], maps=map_[1], taps=taps, groups=groups, settings=settings
        )
    return Plan(way, elements, formula, channels_inside, outputs_last)


def _way_without_patches(
    field: tuple[int, ...],
    map_: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    groups: int,
    settings: performance.Settings,
) -> tuple[str, int] | None:
    """Rows or a convolution, and the elements of an example, where they are quicker than patches on the CPU."""
    gradient = field[1] * math.prod(kernel) * (map_[1] // groups)
    if len(kernel) == 2 and kernel[0] > 1 and stride[0] == 1:
        of_rows = gradient + math.prod(patches_of_a_row(1, field, map_, kernel, groups))
        if field[1] // groups * kernel[1] >= _COLUMNS and of_rows <= _MOST_BY_ROWS:
            return "rows", of_rows // _MORE_AT_ONCE
    if gradient * math.prod(map_[2:]) >= _BY_CONVOLUTION:
        taken = gradient + math.prod(field[1:]) + math.prod(map_[1:])
        return "convolution", max(taken, settings.chunk_elements // _AT_ONCE)
    return None


def patches_of_a_row(
    examples: int, field: Sequence[int], map_: Sequence[int], kernel: Sequence[int], groups: int
) -> tuple[int, ...]:
    """(b, G, C/G, KW, H, output width)"""
    return examples, groups, field[1] // groups, kernel[1], field[2], map_[3]
