"""Units: the parameters that one kind of operation takes together, clipped at once where they hold whole groups.

A unit comes up when such an operation is first seen. A parameter that is in several units ties them: their gradients
are added up, example by example, before they are clipped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gradveil.clipping.backends.layers import Layers, NativeWatch
from gradveil.clipping.groups import Group
from gradveil.clipping.native_layers import native_layer
from gradveil.clipping.operations.sources import Source, slots_of
from gradveil.clipping.rules.layer import LayerRule

if TYPE_CHECKING:
    from gradveil.clipping.native_layers import NativeLayer
    from gradveil.clipping.operations.table import LayerOperation, Statics
    from gradveil.clipping.parameter_guard import Watch
    from gradveil.clipping.tracked_parameters import TrackedParameters


@dataclass(eq=False)
class TrackedModule:
    """``names``, ``parameters``, ``slots`` and ``group_of`` run in parallel."""

    label: str
    index: int
    slots: list[int]
    names: list[str]
    parameters: list[Tensor]
    group_of: list[int]
    rule: LayerRule | None = None  # of a layer
    way: str = ""  # to its gradients, where it has no rule: "copies" or "torch.func"
    whole_groups: bool = True  # no group reaches beyond this unit: it can be clipped inside the backward pass
    native: NativeLayer | None = None  # the layer in C++, where its kind is known there
    tie: TiedWeights | None = None  # with the units that share a parameter with this one


@dataclass(eq=False)
class TiedWeights:
    """Units that share parameters."""

    units: list[TrackedModule]
    parameters: list[Tensor] = field(default_factory=list)  # of all of them, each once
    slots: list[int] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    whole_groups: bool = False  # no group reaches beyond these units: they can be clipped by themselves

    def __post_init__(self) -> None:
        for unit in self.units:
            unit.tie, unit.whole_groups = self, False
            for column in zip(unit.names, unit.parameters, unit.group_of, unit.slots, strict=True):
                name, parameter, group, slot = column
                if slot not in self.slots:
                    self.parameters.append(parameter)
                    self.group_of.append(group)
                    self.names.append(name)
                    self.slots.append(slot)

    def places(self, unit: TrackedModule) -> list[int]:
        """Which of all the parameters are a unit's."""
        return [self.slots.index(slot) for slot in unit.slots]


class TrackedModules:
    """The units of a model that have come up so far."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        parameters: TrackedParameters,
        library: Layers | None,
        watch: Watch | NativeWatch,
    ) -> None:
        self._groups, self._parameters, self._library, self._watch = groups, parameters, library, watch
        self.quick: dict[tuple[int, ...], NativeLayer] = {}  # see Operations
        self._asked_for_native: set[int] = set()
        self._group_of = {name: i for i, group in enumerate(groups) for name in group.parameters}
        self._by_key: dict[Hashable, TrackedModule] = {}
        self._all: list[TrackedModule] = []
        self.ties: list[TiedWeights] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[TrackedModule]:
        return iter(self._all)

    def __getitem__(self, index: int) -> TrackedModule:
        return self._all[index]

    def of_layer(
        self, op: LayerOperation, statics: Statics, sources: Sequence[Source], weight: Tensor, bias: Tensor | None
    ) -> TrackedModule:
        """The unit of an operation that has a rule."""
        key = (op.name, statics, *(source.key for source in sources))
        unit = self._by_key.get(key)
        if unit is None:
            unit = self._by_key[key] = self._add(op.name, slots_of(sources), op.make_rule(statics))
        if unit.native is None and unit.index not in self._asked_for_native:
            self._asked_for_native.add(unit.index)
            whole = all(source.is_parameter for source in sources)
            if whole and self._library is not None and isinstance(self._watch, NativeWatch):
                unit.native = native_layer(self._library, unit, self._watch, weight, bias)
        return unit

    def of_operation(self, name: str, sources: Sequence[Source], *, way: str) -> TrackedModule:
        """The unit of another operation, whose gradients are found in ``way``."""
        key = (name, *(source.key for source in sources))
        unit = self._by_key.get(key)
        if unit is None:
            unit = self._by_key[key] = self._add(name, slots_of(sources), None)
        unit.way = way
        return unit

    def _add(self, operation: str, slots: tuple[int, ...], rule: LayerRule | None) -> TrackedModule:
        self.quick.clear()  # it may share parameters with one of them
        named, label = self._parameters.named, self._parameters.label(operation, slots)
        names = [named[slot][0] for slot in slots]
        unit = TrackedModule(
            label,
            len(self._all),
            list(slots),
            names,
            [named[slot][1] for slot in slots],
            [self._group_of[name] for name in names],
            rule,
        )
        unit.whole_groups = self._are_whole(unit)
        self._all.append(unit)
        if any(set(unit.slots) & set(other.slots) for other in self._all[:-1]):
            self._tie()
        return unit

    def _are_whole(self, of: TrackedModule | TiedWeights) -> bool:
        return all(set(of.names).issuperset(self._groups[g].parameters) for g in set(of.group_of))

    def _tie(self) -> None:
        """Bind the units that share parameters, directly or through others."""
        together: list[list[TrackedModule]] = []
        for unit in self._all:
            mine = set(unit.slots)
            joined = [t for t in together if any(mine & set(other.slots) for other in t)]
            together = [t for t in together if t not in joined] + [[u for t in joined for u in t] + [unit]]
        self.ties = [TiedWeights(tied) for tied in together if len(tied) > 1]
        for tie in self.ties:
            tie.whole_groups = self._are_whole(tie)
            for unit in tie.units:
                if unit.native is not None:
                    unit.native.wait_for_others()
