"""Noise onto gradients on a GPU: drawn there, and added to all of them in a few launches.

Whose generator draws it, and what it is seeded with, is in streams.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradveil.clipping.backends import cuda
from gradveil.clipping.backends.layers import Layers, layers


def add_device_noise(
    grads: Sequence[torch.Tensor],
    stds: Sequence[float],
    *,
    divide_by: float,
    generator: torch.Generator,
) -> None:
    """In place on one GPU, float32: g becomes (g + std z) / divide_by, all tensors in a few launches."""
    library = layers()
    if library is not None:
        _teach(library, grads[0].device)
        library.add_noise(list(grads), list(stds), divide_by, generator)
        return
    draws = torch.randn(sum(g.numel() for g in grads), device=grads[0].device, generator=generator)
    alike = len(set(stds)) == 1
    if not alike:
        torch._foreach_mul_(list(draws.split([g.numel() for g in grads])), list(stds))
    add_drawn_noise(grads, draws, stds[0] if alike else 1.0, divide_by=divide_by)


_taught: set[torch.device] = set()


def _teach(library: Layers, device: torch.device) -> None:
    """At first use on a GPU: which kernel adds noise there, where there is one."""
    if device not in _taught:
        _taught.add(device)
        found = cuda.noise_kernels(device) if device.type == "cuda" else []
        if found:
            library.learn_noise(device.index, *map(list, found))


def add_drawn_noise(
    grads: Sequence[torch.Tensor], draw: torch.Tensor, std: float | torch.Tensor, *, divide_by: float
) -> None:
    """In place: g becomes (g + std z) / divide_by, with z the next numbers of ``draw``, one for each element.

    A ``std`` on the device is read when the kernels run, so that a captured graph follows a schedule.
    """
    grads = list(grads)
    pieces = draw.split([g.numel() for g in grads])
    views = [z if g.dim() == 1 else z.view(g.shape) for z, g in zip(pieces, grads, strict=True)]
    if isinstance(std, torch.Tensor):
        draw.mul_(std)
        torch._foreach_add_(grads, views)
    else:
        torch._foreach_add_(grads, views, alpha=std)
    torch._foreach_div_(grads, divide_by)
