"""README and docs say what is so: their code runs, their tables come from results files, their claims hold."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import gradveil
from gradveil import strategies

ROOT = Path(__file__).resolve().parent.parent


def test_the_readmes_loop_runs_and_changes_at_most_six_lines(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    assert sum("# new" in line for line in blocks[1].splitlines()) <= 6
    exec(compile("\n".join(blocks), "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "Proved:" in printed
    assert "not a guarantee" in printed


def test_the_readmes_table_of_strategies_is_the_real_one():
    text = (ROOT / "README.md").read_text().partition("## Strategies")[2].partition("\n## ")[0]
    rows = {m[1]: m[2] for m in re.finditer(r"^\| ([a-z0-9-]+) \|.*\| ([^|]+) \|$", text, flags=re.MULTILINE)}
    words = {"proved": "proved", "paper-only": "as published only", "none": "none"}
    for name in strategies.names():
        assert rows[name].startswith(words[strategies.get(name).guarantee]), name


def test_the_readmes_figures_come_from_the_results_files():
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "README.md").read_text()
    assert module.rendered(text) == text


def test_every_room_is_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {p.name if p.suffix else f"{p.name}/" for p in (ROOT / "src" / "gradveil").iterdir() if p.name[0] != "_"}
    missing = [room for room in rooms - {"py.typed", "version.py"} if room not in text]
    assert not missing


def test_everything_public_is_there():
    for name in gradveil.__all__:
        assert getattr(gradveil, name) is not None
