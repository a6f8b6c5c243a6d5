"""The command line: one file per command, each thin. Results on stdout, progress on stderr.

Exit codes: 0 done, 1 a gate failed or a signature is missing, 2 bad input, 3 budget exhausted, 4 ledger invalid.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from importlib import import_module

import click

from gradveil import __version__
from gradveil.errors import GradveilError

_COMMANDS = {
    "init": "Write a private training script for your CSV file or folder of images.",
    "train": "Train a model with differential privacy; record every release.",
    "tune": "Search for settings, with the selection charged.",
    "demo": "Train digits five ways, attack each, and write a report (a few minutes).",
    "attack": "Reconstruct training examples from gradients, and score the result.",
    "audit": "Measure a lower bound on epsilon and compare it with the proved one.",
    "inspect": "Inspect a model before training: what leaks, what is refused.",
    "reproduce": "Rerun the paper's tables and figures and compare with the published values.",
    "compare": "Compare runs: accuracy, the three epsilons, noise, attacks.",
    "report": "Write an HTML page: what is proved, what leaks, what was not tested.",
    "export": "Export a run for a registry, a model hub, a bill of materials or another program.",
    "sign": "Sign a run's ledger, and with it every file that it names.",
    "verify": "Verify a run's ledger and files, and who signed them.",
    "check": "Check runs against limits: exit code 1 and the reason on failure.",
    "recipes": "List recipes: settings with good accuracy at a proved epsilon.",
    "strategies": "List the strategies and what each guarantees.",
    "datasets": "List the data sets and download missing ones.",
    "ledger": "Verify or show a run's ledger.",
    "account": "Compute every epsilon of a run or of given settings.",
    "calibrate": "Find the noise, decay or number of steps for a target epsilon.",
    "statement": "Print the privacy statement of a run, as text or JSON.",
}


class _Lazy(click.Group):
    """Imports a command's file when it is called: `gradveil strategies` needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"gradveil.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            near = difflib.get_close_matches(args[0], _COMMANDS, n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else " gradveil --help lists the commands."
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="gradveil")
def cli() -> None:
    """Train PyTorch models with differential privacy that withstands gradient leakage, and show it."""


_shown: set[str] = set()


def _show(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line on stderr, once, without the source line a developer would want."""
    if str(message) not in _shown:
        _shown.add(str(message))
        click.echo(f"gradveil: note: {message}", err=True)


def main() -> None:
    """The console script: errors raised on purpose become one message and their exit code."""
    warnings.showwarning = _show
    try:
        cli(standalone_mode=False)
    except GradveilError as error:
        click.echo(f"gradveil: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        click.echo("gradveil: interrupted. A run directory can be resumed: gradveil train --resume RUN", err=True)
        sys.exit(130)
    except KeyboardInterrupt:
        click.echo("gradveil: interrupted. A run directory can be resumed: gradveil train --resume RUN", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        click.echo(f"gradveil: {where}{error.strerror or error}", err=True)
        sys.exit(2)
