"""Clipping groups: which parameters are clipped together.

    per-layer   one group per module that owns parameters, weight and bias jointly (the paper's M layers)
    flat        one group of everything
    a mapping   {group name: [parameter or module names]}; every trainable parameter in exactly one group

M groups clipped at C each have a joint sensitivity of C sqrt(M): accounting knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gradveil.errors import ConfigError, UnknownNameError

Clipping = str | Mapping[str, Sequence[str]]
CLIPPINGS = ("per-layer", "flat")


@dataclass(frozen=True)
class Group:
    """Parameters (by their names in the model) whose per-example gradients are clipped as one vector."""

    name: str
    parameters: tuple[str, ...]


def make_groups(module: nn.Module, clipping: Clipping) -> tuple[Group, ...]:
    """The groups of a model's trainable parameters, in the order in which the model holds them."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if not names:
        raise ConfigError("the model has no trainable parameter: there is nothing to train, privately or not.")
    if clipping == "flat":
        return (Group("all", tuple(names)),)
    if clipping == "per-layer":
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0] or "(root)", []).append(name)
        return tuple(Group(layer, tuple(members)) for layer, members in layers.items())
    if isinstance(clipping, str):
        raise UnknownNameError("clipping", clipping, CLIPPINGS)
    return _given_groups(names, clipping)


def _given_groups(names: list[str], clipping: Mapping[str, Sequence[str]]) -> tuple[Group, ...]:
    taken: dict[str, str] = {}
    groups = []
    for group, wanted in clipping.items():
        if isinstance(wanted, str):
            raise ConfigError(f"clipping group {group!r} is the string {wanted!r}; give a list of names.")
        members: list[str] = []
        for entry in wanted:
            found = [n for n in names if n == entry or n.startswith(f"{entry}.")]
            if not found:
                raise UnknownNameError(f"parameter in clipping group {group!r}:", entry, names)
            members += found
        for name in members:
            if name in taken:
                raise ConfigError(
                    f"parameter {name!r} is in the clipping groups {taken[name]!r} and {group!r}: it would be clipped "
                    "twice. Put each parameter in one group."
                )
            taken[name] = group
        groups.append(Group(group, tuple(members)))
    missing = [n for n in names if n not in taken]
    if missing:
        raise ConfigError(
            f"no clipping group holds {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}: an unclipped "
            "parameter has unbounded sensitivity. Add it to a group, or freeze it (requires_grad_(False))."
        )
    return tuple(groups)
