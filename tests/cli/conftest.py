"""The command line, in this process: exit code, stdout and stderr of ``gradveil ...``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The error message, on one line."""
        return " ".join(self.err.split())


@pytest.fixture(autouse=True)
def _no_ambient_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)


@pytest.fixture(autouse=True)
def _checks_of_the_first_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones come at steps that cannot be foreseen, and each is a line of the ledger."""
    from gradveil.clipping.validation.spot_checks import SpotChecks

    monkeypatch.setattr(SpotChecks, "_chance", lambda self: 0.0)


@pytest.fixture
def gradveil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Call the command line as its console script does."""
    from gradveil.cli import main

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["gradveil", *(str(a) for a in arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        found = capsys.readouterr()
        return Result(code, found.out, found.err)

    return call
