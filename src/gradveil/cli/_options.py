"""Options that several commands share, and which of a command's options the user has given."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.core import ParameterSource


def shape(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Callback of an option: the shape of one example, numbers of at least 1 separated by commas."""
    if value is None:
        return None
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r} is not the shape of an example. Give it without the batch: 1,28,28.")
    return found


def given(ctx: click.Context) -> set[str]:
    """The names of the parameters that were not left at their defaults."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}


def flags(ctx: click.Context, names: set[str]) -> str:
    """Parameters as they are written on the command line."""
    shown = [p.opts[-1] if isinstance(p, click.Option) else str(p.metavar or p.name) for p in ctx.command.params]
    return ", ".join(flag for flag, p in zip(shown, ctx.command.params, strict=True) if p.name in names)


def completing(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For ``shell_complete`` of an option whose values are names that are looked up when they are asked for."""
    return lambda ctx, param, incomplete: [name for name in names() if name.startswith(incomplete)]


def strategy_names() -> Iterable[str]:
    from gradveil.mechanism import strategies

    return strategies.names()


def dataset_names() -> Iterable[str]:
    from gradveil.training.data import CATALOGUE

    return CATALOGUE


def recipe_names() -> Iterable[str]:
    from gradveil.training import recipes

    return recipes.names()


def export_forms() -> Iterable[str]:
    from gradveil.reports.exports import FORMS

    return FORMS


def attack_names() -> Iterable[str]:
    return ("cpl", "dlg", "idlg", "inverting", "map", "analytic", "prior")
