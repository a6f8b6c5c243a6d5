"""``gradveil sign``: a run's ledger, and with it every file that it names."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("sign")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), required=True, help="An ed25519 private key of ssh-keygen.")
def command(run: Path, key: Path) -> None:
    """Sign RUN as it is: its ledger, and through it every file that the ledger names.

    The signature goes to RUN/signatures, in OpenSSH's format. It says that the owner of the key stands for this ledger;
    that the training was done as the ledger says, no signature shows. Anything that is wrong with RUN is found first.
    """
    from gradveil.cli.ledger import verified
    from gradveil.reports import signatures

    contents = verified(run)
    path = signatures.sign(run, contents, key, lambda: _passphrase(key))
    click.echo(f"signed: {contents.length} lines, head {contents.head}")
    click.echo(path.with_suffix(".txt.sig"))


def _passphrase(key: Path) -> str:
    return str(click.prompt(f"Passphrase of {key}", hide_input=True, err=True))
