"""``gradveil verify``: the same as ``gradveil ledger verify``."""

from __future__ import annotations

from gradveil.cli.ledger import verify as command

__all__ = ["command"]
