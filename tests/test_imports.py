"""What each package may import: docs/packages.toml, which docs/architecture.md shows, holds for the code."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gradveil"
RULES: dict[str, list[str]] = {
    name: row["may_import"] for name, row in tomllib.loads((ROOT / "docs" / "packages.toml").read_text()).items()
}


def _module(path: Path, source: Path) -> str:
    """``engine/step.py`` as ``engine.step``, ``engine/__init__.py`` as ``engine``, the package itself as ''."""
    return ".".join(part for part in path.relative_to(source).with_suffix("").parts if part != "__init__")


def _imported(path: Path, source: Path, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and module (below gradveil) of every import of gradveil in a file, wherever it stands."""
    inside = ["gradveil", *path.relative_to(source).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((inside[: len(inside) - node.level + 1] if node.level else []) + [node.module or ""])
            found = [f"{base.strip('.')}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            package, _, rest = name.partition(".")
            if package == "gradveil":
                yield node.lineno, rest if rest in modules else rest.rpartition(".")[0]


def _row(module: str) -> str | None:
    """The row of the table that a module belongs to: the longest name that fits."""
    fits = [name for name in RULES if module == name or module.startswith(f"{name}.")]
    return max(fits, key=len, default=None)


def _allowed(row: str, module: str) -> bool:
    target = _row(module)
    return target == row or any(module == name or module.startswith(f"{name}.") for name in RULES[row])


def violations(source: Path) -> list[str]:
    files = sorted(source.rglob("*.py"))
    modules = {_module(path, source) for path in files}
    wrong = []
    for path in files:
        module = _module(path, source)
        if module in ("", "__main__"):  # the public names, and `python -m gradveil`
            continue
        row = _row(module)
        if row is None:
            wrong.append(f"{module} is in no row of docs/packages.toml")
            continue
        wrong += [
            f"{path.relative_to(source)}:{line}: {row} may not import {name}"
            for line, name in _imported(path, source, modules)
            if name and not _allowed(row, name)  # '' is the version, in gradveil/__init__.py
        ]
    return wrong


def test_every_import_is_one_that_the_table_allows():
    assert violations(SOURCE) == []


def test_the_table_has_no_cycle_no_ghost_and_no_idle_permission():
    """Rows import rows above them only; every row is in the tree; every permission is used."""
    names = list(RULES)
    files = sorted(SOURCE.rglob("*.py"))
    modules = {_module(path, SOURCE) for path in files}
    used: dict[str, set[str]] = {name: set() for name in names}
    for path in files:
        row = _row(_module(path, SOURCE))
        if row is not None:
            used[row] |= {name for _, name in _imported(path, SOURCE, modules)}
    for position, (name, allowed) in enumerate(RULES.items()):
        assert name in modules, name
        for other in allowed:
            assert other in names[:position], f"{name} may import {other}, which is not above it"
            hit = other == "errors" or any(module == other or module.startswith(f"{other}.") for module in used[name])
            assert hit, f"{name} may import {other}, and does not"


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("accounting/planted.py", "import gradveil.engine.step", "accounting may not import engine.step"),
        ("engine/planted.py", "from gradveil.training import loop", "engine may not import training.loop"),
        (
            "reports/planted.py",
            "def f():\n    from gradveil.training import loop",
            "reports may not import training.loop",
        ),
        ("clipping/backends/planted.py", "from .. import clipper", "clipping.backends may not import clipping.clipper"),
        ("mechanism/noise/planted.py", "from ..release import x", "mechanism.noise may not import mechanism.release"),
        ("elsewhere.py", "", "elsewhere is in no row"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, line, complaint):
    for path in SOURCE.rglob("*.py"):
        copy = tmp_path / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / file).write_text(line)
    (found,) = violations(tmp_path)
    assert complaint in found


def test_the_architecture_page_shows_the_table():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name, allowed in RULES.items():
        shown = ", ".join(f"`{other}`" for other in allowed) or "-"
        assert any(line.startswith(f"| `{name}` |") and line.endswith(f"| {shown} |") for line in page.splitlines())
