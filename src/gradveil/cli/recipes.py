"""``gradveil recipes``: the table of recipes, or the settings of one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from gradveil.cli._output import table, upper
from gradveil.training import recipes


@click.command("recipes")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(name: str | None, as_json: bool) -> None:
    """List the recipes of gradveil train --recipe. With NAME, print its settings as TOML."""
    chosen = [recipes.get(known) for known in ([name] if name is not None else recipes.names())]
    if as_json:
        click.echo(json.dumps([_to_json(recipe) for recipe in chosen], indent=1))
    elif name is not None:
        from gradveil.training.config import RunConfig

        click.echo(f"# {chosen[0].summary}; {chosen[0].declaration}")
        click.echo(RunConfig.check(chosen[0].settings).to_toml(), nl=False)
    else:
        _print(chosen)


def _to_json(recipe: recipes.Recipe) -> dict[str, Any]:
    return {**dataclasses.asdict(recipe), "declaration": recipe.declaration}


def _print(chosen: list[recipes.Recipe]) -> None:
    from gradveil.training.recipes.selection import epsilon_with_search

    table(
        ["recipe", "data set", "proved epsilon", "chosen by", "epsilon with them", "what it is"],
        [
            [r.name, r.dataset, upper(r.epsilon), f"{r.tried} runs", upper(epsilon_with_search(r), 3), r.summary]
            for r in chosen
        ],
        note="Proved epsilon: of one run, at delta = 1e-5, add or remove one example. The settings were chosen by the "
        "test accuracy of so many runs on the same data; if tuning runs are charged too, the total is in the column "
        "'epsilon with them'.",
    )
