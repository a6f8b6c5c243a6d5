"""What surrounds a run of the model beside the user's own: attributes, autocast, hooks on saved tensors."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradveil.clipping.sharding import any_sharded


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


class Snapshot:
    """All that a model holds: parameters, buffers, and what its modules keep as attributes, however deep.

    A run beside the ordinary one must leave nothing behind, or what it left would be a constant to the next one: a mean
    that is taken in the first call, say. State outside the model (globals, closures) is out of reach.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[int, Any] = {}  # by id, and kept alive
        self._dicts: list[tuple[Any, dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # as they are, and as they were
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        # A model that is cut over processes puts other tensors in the place of its parameters, and keeps count of it.
        self._sharded = any_sharded(module)
        for child in module.modules():
            if self._sharded:
                self._seen[id(child._parameters)] = child._parameters
            if not type(child).__module__.startswith("gradveil.clipping"):
                self._visit(vars(child))
        self._before = self._held()

    def _visit(self, held: Any) -> None:
        todo = [held]
        while todo:
            found = todo.pop()
            if id(found) in self._seen or len(self._seen) > _MOST_OBJECTS:
                continue
            if isinstance(found, Tensor):
                self._seen[id(found)] = found
                if not found.is_meta and found.layout is torch.strided:
                    self._tensors[id(found)] = (found, found.detach().clone())
            elif isinstance(found, dict):
                self._seen[id(found)] = found
                self._dicts.append((found, dict(found)))
                todo += found.values()
            elif isinstance(found, list | set | deque | bytearray):
                self._seen[id(found)] = found
                self._sequences.append((found, list(found)))
                todo += found
            elif isinstance(found, tuple):
                todo += found
            elif isinstance(found, np.ndarray):
                self._seen[id(found)] = found
                self._arrays.append((found, found.copy()))
            elif _is_of_the_models_own(found):
                self._seen[id(found)] = found
                todo.append(vars(found))

    def _held(self) -> dict[str, Any]:
        """By name: what would leave with the model's state_dict."""
        found: dict[str, Any] = dict(self._module.named_buffers())
        if not self._sharded:
            found |= dict(self._module.named_parameters())
        for name, child in self._module.named_modules():
            if type(child).get_extra_state is not nn.Module.get_extra_state:
                extra = copy.deepcopy(child.get_extra_state())
                found |= {f"{name}.extra_state[{i}]": leaf for i, leaf in enumerate(tree_leaves(extra))}
        return found

    def changed(self) -> dict[str, Any]:
        """By name: copies of what would leave with the model's state_dict, where it is not what it was."""
        found: dict[str, Any] = {}
        for name, value in self._held().items():
            before = self._tensors.get(id(value), (None, None))[1]
            before = before if before is not None else self._before.get(name)
            if name not in self._before or not same_value(value, before):
                found[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return found

    def put_back(self) -> None:
        for live, then in self._dicts:
            if len(live) != len(then) or any(live.get(key, self) is not value for key, value in then.items()):
                live.clear()
                live.update(then)
        for held, items in self._sequences:
            if len(held) != len(items) or any(a is not b for a, b in zip(held, items, strict=True)):
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(items)
        for array, values in self._arrays:
            if not np.array_equal(array, values):
                array[...] = values
        for t, value in self._tensors.values():
            if not same_value(t, value):
                t.data.copy_(value)  # a graph that holds it finds it as it was, in its version too


_MOST_OBJECTS = 50_000


def _is_of_the_models_own(found: Any) -> bool:
    """Whether it may hold state: an object with attributes, no module (those are visited), class, function or ours."""
    if isinstance(found, nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType | torch.Generator):
        return False
    return hasattr(found, "__dict__") and not type(found).__module__.startswith(("gradveil.", "torch.distributed"))


def same_value(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


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
