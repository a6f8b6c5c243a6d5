"""Units: the modules whose forward is followed, so that every trainable parameter is in exactly one.

A unit is the smallest module that sees all uses of its parameters:

- a layer with a rule of its own (rules/);
- any other module that owns parameters, with everything below it: through torch.func;
- where modules share a parameter (tied weights): each of them, where all are layers with rules that can be added up
  (linear layers, embeddings), bound together by a tie; otherwise their common parent, through torch.func;
- a container without a forward of its own (ParameterList, a parametrisation) stands for its parent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from gradveil.clipping.groups import Group
from gradveil.clipping.rules import LayerRule, find
from gradveil.clipping.sharding import is_sharded
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
    first_weight: Any = None  # of a layer with a rule, when it was attached
    own_names: list[str] = field(default_factory=list)  # below this module: of a tied weight, another than in ``names``
    places: list[list[str]] = field(default_factory=list)  # below this module: all modules that hold it, each once
    whole_groups: bool = True  # no group reaches beyond this unit: it can be clipped inside the backward pass
    # How the first dimension of each flat input follows the batch, learned on the first batch of more than one example:
    # "examples" (it is the batch), "shared" (it does not change with the batch), "mixed" (it is the batch in some of
    # its calls only), "other" (none of these).
    inputs: dict[int, str] = field(default_factory=dict)
    batch_dims: dict[int, int | None] = field(default_factory=dict)  # where the batch stands in them; None: nowhere
    assumed_dims: dict[int, int] = field(default_factory=dict)  # where it was taken to stand before that was known,
    misread: bool = False  # and whether some input was then taken for another than it is
    index: int = 0  # among the units of its model
    slots: list[int] = field(default_factory=list)  # of its parameters, in the watch over gradients
    native: NativeLayer | None = None  # the layer in C++, where its kind is known there
    tie: Tie | None = None  # with the units that share a parameter with this one

    @property
    def label(self) -> str:
        return f"{type(self.module).__name__} {self.name!r}"

    def live(self) -> list[Tensor]:
        """The parameters as the module uses them now: whole, where the model holds parts of them."""
        if not any(is_sharded(p) for p in self.parameters):
            return list(self.parameters)
        found: list[Tensor] = []
        for name in self.own_names:
            owner, _, leaf = name.rpartition(".")
            found.append(getattr(self.module.get_submodule(owner), leaf))
        return found

    def sort_parameters(self) -> None:
        """Of a layer with a rule: weight before bias, which a use keeps to, whichever was registered first."""
        if self.rule is not None:
            order = {id(self.module._parameters.get(name)): i for i, name in enumerate(("weight", "bias"))}
            columns = sorted(
                zip(self.names, self.parameters, self.group_of, strict=True), key=lambda column: order[id(column[1])]
            )
            self.names, self.parameters, self.group_of = (list(column) for column in zip(*columns, strict=True))


@dataclass(eq=False)
class Tie:
    """Units that share parameters: their gradients are added up, example by example, before they are clipped."""

    units: list[Unit]
    parameters: list[nn.Parameter] = field(default_factory=list)  # of all of them, each once
    group_of: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    whole_groups: bool = False  # no group reaches beyond these units: they can be clipped by themselves

    def __post_init__(self) -> None:
        for unit in self.units:
            unit.tie, unit.whole_groups = self, False
            for name, parameter, group in zip(unit.names, unit.parameters, unit.group_of, strict=True):
                if all(parameter is not known for known in self.parameters):
                    self.parameters.append(parameter)
                    self.group_of.append(group)
                    self.names.append(name)

    def places(self, unit: Unit) -> list[int]:
        """Which of all the parameters are a unit's."""
        number = {id(p): i for i, p in enumerate(self.parameters)}
        return [number[id(p)] for p in unit.parameters]


def find_units(root: nn.Module, groups: tuple[Group, ...]) -> list[Unit]:
    """Cover the trainable parameters of ``root`` with units and tell each which groups it feeds."""
    modules = dict(root.named_modules(remove_duplicate=False))
    owners: dict[int, list[str]] = {}  # parameter id -> names of the modules that hold it, one for each
    paths: dict[int, list[str]] = {}  # parameter id -> all their names
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            owner = name.rpartition(".")[0]
            paths.setdefault(id(parameter), []).append(owner)
            held = owners.setdefault(id(parameter), [])
            if all(modules[owner] is not modules[other] for other in held):  # one module may have two names
                held.append(owner)
            named.setdefault(id(parameter), (name, parameter))

    # Where each parameter is followed: the module that owns it, or the common parent of all that do.
    apart = {pid for pid, held in owners.items() if len(held) > 1 and all(_adds_up(modules[name]) for name in held)}
    while True:
        places = {
            pid: held if pid in apart else [_with_forward(modules, _common_parent(held))]
            for pid, held in owners.items()
        }
        used = {place for found in places.values() for place in found}
        rules = {place: find(modules[place]) for place in used}
        # A module followed as a whole takes in everything below it.
        whole = [p for p in used if rules[p] is None or any(_below(q, p) for q in used)]
        inside = {pid for pid in apart if any(q == w or _below(q, w) for q in owners[pid] for w in whole)}
        # A module of several names, one of them inside such a module: it is followed where all of them are inside.
        torn = {pid for pid in owners if len({_outermost(name, whole) for name in paths[pid]}) > 1} - inside
        if not (inside or torn):
            break
        apart -= inside | torn  # one of its layers is followed with its parent: so are they all
        for pid in torn:
            owners[pid] = paths[pid]
    units: dict[str, Unit] = {}
    group_index = {name: i for i, group in enumerate(groups) for name in group.parameters}
    for pid, (name, parameter) in named.items():
        for own in places[pid]:
            outer = _outermost(own, whole)
            place = own if outer is None else outer
            if place not in units:
                units[place] = Unit(place, modules[place], None if place in whole else rules[place])
            unit = units[place]
            unit.names.append(name)
            unit.parameters.append(parameter)
            unit.group_of.append(group_index[name])
    for index, unit in enumerate(units.values()):
        unit.index = index
        unit.sort_parameters()
        below = {id(p): name for name, p in unit.module.named_parameters()}
        unit.own_names = [below[id(p)] for p in unit.parameters]
        holders: dict[int, list[str]] = {id(p): [] for p in unit.parameters}
        for prefix, child in unit.module.named_modules():
            for leaf, parameter in child.named_parameters(prefix=prefix, recurse=False, remove_duplicate=False):
                holders.get(id(parameter), []).append(leaf)
        unit.places = [holders[id(p)] for p in unit.parameters]
        names = set(unit.names)
        unit.whole_groups = all(names.issuperset(groups[g].parameters) for g in set(unit.group_of))
    for tie in _tie(units.values()):
        tie.whole_groups = all(set(tie.names).issuperset(groups[g].parameters) for g in set(tie.group_of))
    return list(units.values())


def _adds_up(module: nn.Module) -> bool:
    """Whether the gradients of this layer can be added to those of another that shares its weight."""
    rule = find(module)
    return rule is not None and rule.adds_up


def _tie(units: Iterable[Unit]) -> list[Tie]:
    """Bind the units that share parameters, directly or through others."""
    together: list[list[Unit]] = []
    for unit in units:
        mine = {id(p) for p in unit.parameters}
        joined = [t for t in together if any(id(p) in mine for other in t for p in other.parameters)]
        together = [t for t in together if t not in joined] + [[u for t in joined for u in t] + [unit]]
    return [Tie(tied) for tied in together if len(tied) > 1]


def _outermost(name: str, whole: Iterable[str]) -> str | None:
    """The outermost module followed as a whole that a module is, or is in."""
    return min((w for w in whole if w == name or _below(name, w)), key=len, default=None)


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
