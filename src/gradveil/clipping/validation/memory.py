"""Does a model remember a batch: does what it keeps of one change its outputs for the next?

An example would then be part of the loss of later batches, in which it is not charged. What a model keeps and never
looks at again (attention maps, say) does no harm.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.clipping._rng import rng_at, rng_state
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.example_independence import outputs_agree
from gradveil.clipping.validation.shadow_forward import _device_of
from gradveil.clipping.validation.surroundings import Snapshot
from gradveil.errors import UnsupportedModelError

Call = tuple[Any, Any]
"""Arguments of the model, by place and by name."""


def check_memory(module: nn.Module, first: Call, second: Call) -> None:
    """Refuse a model whose outputs for ``first`` depend on whether it was called with ``first`` or ``second`` before.

    Nothing is left behind. A model that cannot be called without gradients, or not twice, shows nothing.
    """
    state, device = Snapshot(module), _device_of(module)
    rng = rng_state(device)

    def after(before: Call) -> list[Tensor]:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for args, kwargs in (before, first):
                    with rng_at(rng, device):
                        found = module(*args, **kwargs)
                return [t.detach().clone() for t in tensors_in(found)]
        finally:
            state.put_back()

    try:
        one, other = after(first), after(second)
        differ = not _agree(one, other) and _agree(one, after(first))
    except Exception:
        return
    if differ:
        raise UnsupportedModelError(
            "the model remembers: what it kept of one batch (a running mean in an attribute, a memory bank, a cache) "
            "changes its outputs for the next, so an example is part of the loss of later batches, in which it is not "
            "charged. Leave it out, or reset it at the start of forward()."
        )


def _agree(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(outputs_agree(x, y) for x, y in zip(a, b, strict=True))
