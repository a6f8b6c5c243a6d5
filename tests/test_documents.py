"""README and docs say what is so: their code runs, their tables come from results files, their claims hold."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import gradveil
from gradveil.mechanism import strategies

ROOT = Path(__file__).resolve().parent.parent


def test_the_readmes_loop_runs_and_changes_at_most_six_lines(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    assert sum("# new" in line for line in blocks[1].splitlines()) <= 6
    exec(compile("\n".join(blocks), "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "Proved:" in printed
    assert "not a guarantee" in printed


def test_the_readmes_table_of_strategies_is_the_real_one():
    text = (ROOT / "README.md").read_text().partition("## Strategies")[2].partition("\n## ")[0]
    rows = {m[1]: m[2] for m in re.finditer(r"^\| ([a-z0-9-]+) \|.*\| ([^|]+) \|$", text, flags=re.MULTILINE)}
    words = {"proved": "proved", "paper-only": "as published only", "none": "none"}
    for name in strategies.names():
        assert rows[name].startswith(words[strategies.get(name).guarantee]), name


@pytest.fixture
def renderer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render")


RENDERED = ("performance", "attacks", "auditing", "reproduction", "recipes", "scaling", "strategies", "accounting")


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{page}.md" for page in RENDERED)])
def test_the_documents_figures_come_from_the_results_files(name, renderer):
    assert name in renderer.DOCUMENTS
    text = (ROOT / name).read_text()
    assert "<!-- begin " in text
    assert renderer.rendered(text) == text, "run: python benchmarks/render.py"


def test_a_document_renders_without_results_and_with_them(tmp_path, monkeypatch, renderer):
    text = (ROOT / "docs" / "performance.md").read_text()
    monkeypatch.setattr(renderer, "FIGURES", tmp_path)
    monkeypatch.setattr("tables.RESULTS", tmp_path)
    empty = renderer.rendered(text)
    assert empty.count("not measured yet") + empty.count("not drawn yet") == empty.count("<!-- begin ")

    def row(ms, base="sgd"):
        return {"median_ms": ms, "quartiles_ms": [ms, ms], "ratio": ms / 2, "base": base, "peak_bytes": 10**6}

    rows = {"sgd": row(2.0), "gradveil per-layer": row(2.5), "sgd, channels_last": row(1.0)}
    rows["gradveil per-layer, channels_last"] = row(1.5)
    workload = {"what": "a net", "batch": 3, "rows": rows, "failed": {"opacus ew": "RuntimeError: no"}}
    told = {"machine": "a machine", "versions": {"torch": "2"}, "clipping": "somehow", "command": "python speed.py"}
    (tmp_path / "speed_cpu.json").write_text(json.dumps({**told, "workloads": {"W1": workload}}))
    modes = {m: {"median_ms": 1.0} for m in ("sgd", "gradveil per-layer", "gradveil flat")}
    points = [{"at": n, "modes": modes} for n in (1, 4)]
    series = {"what": "a stack", "axis": "layers", "slopes": dict.fromkeys(modes, 1.0), "points": points}
    (tmp_path / "scaling_cpu.json").write_text(json.dumps({**told, "series": {"s": series}}))
    full = renderer.rendered(text)
    assert "| W1, a net, batch 3 | 2.00 | 1.25 (1.25 to 1.25) |" in full
    assert "| W1, a net, batch 3 | 2.00 | 1.00 | 1.50 | 1.50 | 0.75 |" in full
    assert "- W1 Opacus expanded weights: RuntimeError: no" in full
    assert "| a stack | 1 to 4 layers | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |" in full


def test_every_room_is_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {p.name if p.suffix else f"{p.name}/" for p in (ROOT / "src" / "gradveil").iterdir() if p.name[0] != "_"}
    missing = [room for room in rooms - {"py.typed", "version.py"} if room not in text]
    assert not missing


def test_everything_public_is_there():
    for name in gradveil.__all__:
        assert getattr(gradveil, name) is not None


_NEED_MORE = ("integrations.md", "from-opacus.md")  # their code needs extras: see tests/integrations
PAGES = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in _NEED_MORE)


@pytest.mark.parametrize("name", PAGES)
def test_every_code_block_of_a_page_runs(name, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.DOTALL)
    if not blocks:
        pytest.skip("no code on this page")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), name, "exec", dont_inherit=True), {"__name__": "page"})


def test_every_page_is_in_the_sites_contents():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or f"\n{page.stem}\n" in index, page.name
