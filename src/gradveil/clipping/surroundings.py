"""What surrounds a run of the model beside the user's own: attributes, autocast, hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn


class Attributes:
    """What the modules of a model hold as attributes, beside parameters, buffers and children: put back after a run.

    A run beside the ordinary one leaves nothing behind: counters do not advance, and an activation that was kept is the
    ordinary run's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._then = [(vars(child), dict(vars(child))) for child in module.modules()]

    def put_back(self) -> None:
        for live, then in self._then:
            for name in [name for name in live if name not in then]:
                del live[name]
            for name, value in then.items():
                if live.get(name, self) is not value:
                    live[name] = value


class Autocast:
    """The autocast that is on at present, if any, to be set again in the backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self.on = torch.amp.is_autocast_available(self._kind) and torch.is_autocast_enabled(self._kind)
        self._dtype = torch.get_autocast_dtype(self._kind) if self.on else None

    def again(self) -> AbstractContextManager[Any]:
        """Without its cache, which would keep every example's rounded weights until the end of the user's own block."""
        return torch.autocast(self._kind, dtype=self._dtype, cache_enabled=False) if self.on else nullcontext()


# For backward() inside an autocast block: products of scaled factors that were rounded to halves, and norms of rounded
# gradients, could carry an example over its bound. What autocast gave the forward pass is in half precision anyway.
no_autocast: Any = torch._C._DisableAutocast


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Take off hooks on saved tensors, such as those of activation checkpointing, while examples are run by themselves.

    What is saved in here never leaves; a checkpoint would count it, and torch.func refuses to run under such hooks.
    """
    autograd = cast(Any, torch._C._autograd)
    taken = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
