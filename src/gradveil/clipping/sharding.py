"""Models whose parameters are cut over processes (FSDP2, ``fully_shard``): what clipping has to know of them.

Around a layer's forward and backward its parameters are whole, and stand where the layer keeps them; otherwise the
model holds parts of them (DTensor). The sum of a layer's clipped gradients is therefore returned for the whole
parameter, as for any other, and FSDP adds it up over the processes while the backward pass goes on. What is clipped
only at the end of the pass is added up and cut here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Partial
else:  # a torch without distributed has no such models
    FSDPModule, DTensor, Partial = None, None, None  # type: ignore[assignment,misc]


def is_sharded(parameter: Tensor) -> bool:
    return DTensor is not None and isinstance(parameter, DTensor)


def any_sharded(module: nn.Module) -> bool:
    return any(is_sharded(p) for p in module.parameters())


def sharding_modules(module: nn.Module) -> Iterable[Any]:
    """The modules that add gradients up over processes."""
    return [m for m in module.modules() if FSDPModule is not None and isinstance(m, FSDPModule)]


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; the tensor itself where it is not cut. Not a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, from all processes; the tensor itself where it is not cut."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def added_up(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """This process's sum for a whole parameter, added to the others' and cut like the parameter."""
    mine: Any = parameter
    partial = DTensor.from_local(total.contiguous(), mine.device_mesh, [Partial("sum")] * mine.device_mesh.ndim)
    cut: Tensor = partial.redistribute(placements=mine.placements)
    return cut


def start_of(parameter: nn.Parameter) -> int:
    """Where this process's part of a parameter begins, among its elements in order."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mine: Any = parameter
    if any(isinstance(placement, Shard) and placement.dim != 0 for placement in mine.placements):
        raise NotImplementedError("a parameter that is cut along another dimension than its first")
    _, offset = compute_local_shape_and_global_offset(mine.shape, mine.device_mesh, mine.placements)
    row = torch.Size(mine.shape[1:]).numel()
    return int(offset[0]) * row if offset else 0
