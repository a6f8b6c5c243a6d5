"""Units: the modules whose forward is followed, so that every trainable parameter is in exactly one.

A unit is the smallest module that sees all uses of its parameters:

- a layer with a rule of its own (rules/);
- any other module that owns parameters, with everything below it: through torch.func;
- where two modules share a parameter (tied weights), their common parent, through torch.func;
- a container without a forward of its own (ParameterList, a parametrisation) stands for its parent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from gradveil.clipping.groups import Group
from gradveil.clipping.rules import LayerRule, find
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.native_layers import NativeLayer


@dataclass(eq=False)
class Unit:
    """One followed module; ``names``, ``parameters`` and ``group_of`` run in parallel over what trains in it."""

    name: str
    module: nn.Module
    rule: LayerRule | None = None  # None: followed through torch.func
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    whole_groups: bool = True  # no group reaches beyond this unit: it can be clipped inside the backward pass
    # How the first dimension of each flat input follows the batch, learned on the first batch of more than one example:
    # "examples" (it is the batch), "shared" (it does not change with the batch), "other" (neither).
    inputs: dict[int, str] = field(default_factory=dict)
    index: int = 0  # among the units of its model
    slots: list[int] = field(default_factory=list)  # of its parameters, in the watch over gradients
    native: NativeLayer | None = None  # the layer in C++, where its kind is known there

    @property
    def label(self) -> str:
        return f"{type(self.module).__name__} {self.name!r}"


def find_units(root: nn.Module, groups: tuple[Group, ...]) -> list[Unit]:
    """Cover the trainable parameters of ``root`` with units and tell each which groups it feeds."""
    modules = dict(root.named_modules(remove_duplicate=False))
    owners: dict[int, list[str]] = {}  # parameter id -> names of the modules that hold it
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            owner = name.rpartition(".")[0]
            held = owners.setdefault(id(parameter), [])
            if all(modules[owner] is not modules[other] for other in held):  # one module may have two names
                held.append(owner)
            named.setdefault(id(parameter), (name, parameter))

    # Where each parameter is followed: the module that owns it, or the common parent of all that do.
    places = {pid: _with_forward(modules, _common_parent(held)) for pid, held in owners.items()}
    rules = {place: find(modules[place]) for place in set(places.values())}
    # A module followed as a whole takes in everything below it.
    whole = [p for p in set(places.values()) if rules[p] is None or any(_below(q, p) for q in places.values())]
    units: dict[str, Unit] = {}
    group_index = {name: i for i, group in enumerate(groups) for name in group.parameters}
    for pid, (name, parameter) in named.items():
        place = min((w for w in whole if w == places[pid] or _below(places[pid], w)), key=len, default=places[pid])
        if place not in units:
            units[place] = Unit(place, modules[place], None if place in whole else rules[place])
        unit = units[place]
        unit.names.append(name)
        unit.parameters.append(parameter)
        unit.group_of.append(group_index[name])
    for index, unit in enumerate(units.values()):
        unit.index = index
        names = set(unit.names)
        unit.whole_groups = all(names.issuperset(groups[g].parameters) for g in set(unit.group_of))
    return list(units.values())


def _below(name: str, parent: str) -> bool:
    return name != parent and (parent == "" or name.startswith(f"{parent}."))


def _common_parent(names: list[str]) -> str:
    if len(set(names)) == 1:
        return names[0]
    parts = [n.split(".") if n else [] for n in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _with_forward(modules: dict[str, nn.Module], name: str) -> str:
    """The module itself, or the nearest parent that has a forward to follow."""
    while True:
        module = modules[name]
        inside = name.rpartition(".")[0]
        if isinstance(module, ParametrizationList):  # layer.parametrizations.weight -> layer
            name = inside.rpartition(".")[0]
        elif type(module).forward is nn.Module.forward and "forward" not in vars(module):
            if not name:
                raise UnsupportedModelError("the model has parameters but no forward method: it cannot be trained.")
            name = inside
        else:
            return name
