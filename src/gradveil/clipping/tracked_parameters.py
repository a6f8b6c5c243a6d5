"""The parameters of a model that are tracked: where each stands, and what must stay as it was when tracking began."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradveil.clipping.backends.layers import NativeWatch
from gradveil.clipping.operations.sources import Source
from gradveil.clipping.parameter_guard import Watch
from gradveil.clipping.sharding import any_sharded
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.support import normalisations


def check_no_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients: there is no gradient for them to see."""
    for name, parameter in module.named_parameters():  # the C++ watch would take Python's hooks off
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise refusal("hook", name)


class TrackedParameters:
    """Of one model. Each has a slot: its place in the watch over gradients."""

    def __init__(self, module: nn.Module, watch: Watch | NativeWatch) -> None:
        self.module, self._watch = module, watch
        self.named: list[tuple[str, Tensor]] = []  # by slot
        self.sources: dict[int, Source] = {}  # by id of the parameter
        self.sharded = any_sharded(module)
        self._slots: dict[int, int] = {}  # by id of the parameter
        self._slot_named: dict[str, int] = {}  # where what stands for a parameter is another tensor in every pass
        self._holders: list[tuple[dict[str, Any], str, Tensor, str]] = []  # where each parameter stands
        self._frozen = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]
        self._norms = normalisations(module)  # over the batch, while they train
        self._buffers = [
            (child._buffers, leaf, f"{prefix}.{leaf}" if prefix else leaf)
            for prefix, child in module.named_modules()
            for leaf in child._buffers
        ]
        self._registered = False  # whether some module, anywhere, has got a parameter or a child since the last look
        if self.sharded:
            return
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._slot_of(name, parameter)
        for prefix, child in module.named_modules():
            for leaf, held in child._parameters.items():
                if held is not None and held.requires_grad:
                    self._holders.append((child._parameters, leaf, held, f"{type(child).__name__} {prefix!r}"))

    def _slot_of(self, name: str, parameter: Tensor) -> int:
        """A parameter that several units share is watched once."""
        known = self._slots.get(id(parameter))
        if known is None:
            known = self._slots[id(parameter)] = self._watch.follow(parameter)
            self.named.append((name, parameter))
            self.sources[id(parameter)] = Source(parameter, known, (known,))
        return known

    def adopt(self, parameter: Tensor) -> Source | None:
        """Of a model that is cut over processes: what stands for one of its parameters while it is whole."""
        found = self.sources.get(id(parameter))
        if found is not None:
            return found
        name = next((name for name, live in self.module.named_parameters() if live is parameter), None)
        if name is None:
            return None
        self._slot_of(name, parameter)
        slot = self._slot_named.setdefault(name, self._slots[id(parameter)])
        found = self.sources[id(parameter)] = Source(parameter, slot, (slot,))
        return found

    def label(self, operation: str, slots: tuple[int, ...]) -> str:
        """The module that holds the parameters, where it is one; otherwise the operation and the parameters."""
        held = [{label for _, _, p, label in self._holders if p is self.named[slot][1]} for slot in slots]
        common = set.intersection(*held) if held else set()
        if len(common) == 1:
            return common.pop()
        return f"{operation} of {', '.join(repr(self.named[slot][0]) for slot in slots)}"

    def buffer_versions(self) -> list[tuple[str, int, int]]:
        """Name, identity and version of each buffer: what is another after a call was written to by it."""
        held = [(name, place.get(leaf)) for place, leaf, name in self._buffers]
        return [(name, id(t), t._version) for name, t in held if t is not None]

    def forget(self) -> None:
        for slot, (_, parameter) in enumerate(self.named):
            self._watch.forget(parameter, slot)

    def note_registration(self) -> None:
        """Some module has got a parameter or a child."""
        self._registered = True

    def check(self) -> None:
        """Refuse hooks on gradients, which would see none, and parameters that no longer train."""
        own = self._watch.own_hooks
        for name, parameter in self.named:
            hooks = parameter._backward_hooks
            if (hooks and len(hooks) > own) or parameter._post_accumulate_grad_hooks:
                raise refusal("hook", name)
            if not parameter.requires_grad:
                raise refusal("frozen", name)
        for place, leaf, held, label in self._holders:
            if place.get(leaf) is not held:
                raise refusal("replaced", label)
        for norm in self._norms:
            if norm.training:
                raise refusal("batch norm", type(norm).__name__)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise refusal("unfrozen", name)
        if self._registered and not self.sharded:
            tracked = {id(p) for _, p in self.named}
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad and id(parameter) not in tracked:
                    raise refusal("unfrozen", name)
            self._registered = False
