"""Units: the parameters that one kind of operation takes together, clipped at once where they hold whole groups.

A unit comes up when such an operation is first seen. A parameter that is in several units ties them: their gradients
are added up, example by example, before they are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gradveil.clipping.groups import Group
from gradveil.clipping.rules.layer import LayerRule

if TYPE_CHECKING:
    from gradveil.clipping.native_layers import NativeLayer


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

    def __init__(self, groups: tuple[Group, ...], watched: Sequence[tuple[str, Tensor]]) -> None:
        self._groups, self._watched = groups, watched  # name and parameter, by slot
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

    def get(self, key: Hashable, make: Callable[[], tuple[str, Sequence[int], LayerRule | None]]) -> TrackedModule:
        """The unit of a key; ``make`` says its label, the slots of its parameters, and its rule."""
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = self._add(*make())
        return found

    def _add(self, label: str, slots: Sequence[int], rule: LayerRule | None) -> TrackedModule:
        names = [self._watched[slot][0] for slot in slots]
        unit = TrackedModule(
            label,
            len(self._all),
            list(slots),
            names,
            [self._watched[slot][1] for slot in slots],
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
