"""No test of this folder may see the developer's own data directory, except those marked ``realdata``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mirrors import Quiet, Short, serve


@pytest.fixture(autouse=True)
def _no_ambient_data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("realdata") is None:
        monkeypatch.delenv("GRADVEIL_DATA", raising=False)
        monkeypatch.setenv("no_proxy", "*")  # local mirrors only


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    return folder


@pytest.fixture
def http(mirror: Path) -> Iterator[str]:
    yield from serve(mirror, Quiet)


@pytest.fixture
def short_http(mirror: Path) -> Iterator[str]:
    yield from serve(mirror, Short)
