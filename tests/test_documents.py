"""README and docs say what is so: their code runs, their tables come from results files, their claims hold."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

import gradveil

ROOT = Path(__file__).resolve().parent.parent


def test_the_readmes_example_runs_and_four_of_its_lines_make_it_private(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line for line in block.splitlines() if line]
    assert len(lines) <= 15
    assert sum("# new" in line for line in lines) == 4
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Proved:" in printed
    assert "not a guarantee" in printed
    assert 2.9 < names["engine"].epsilon <= 3.0


@pytest.fixture
def renderer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render")


RENDERED = (
    "accounting",
    "architecture",
    "performance",
    "attacks",
    "auditing",
    "cli",
    "recipes",
    "reproduction",
    "scaling",
    "strategies",
    "strategy-table",
)
EXPERIMENTS = sorted(f"reproduction/{path.stem}" for path in (ROOT / "docs" / "reproduction").glob("*.md"))


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{page}.md" for page in (*RENDERED, *EXPERIMENTS))])
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


PROSE = (ROOT / "README.md", *sorted(ROOT.glob("C*.md")), *sorted((ROOT / "docs").rglob("*.md")))
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def _defined(path: Path) -> set[str]:
    """Classes, functions and methods (as Class.method) of a Python file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        found.add(getattr(node, "name", ""))
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    """To a file that is there, an anchor that is there and, with `Name` as its text, a name that the file defines."""
    for text, target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor:
            assert anchor in _anchors(path), target
        if path.suffix == ".py" and re.fullmatch(r"`[\w.]+`", text) and not text.endswith(".py`"):
            assert text.strip("`") in _defined(path), f"{text} is not in {target}"


def test_a_walk_has_at_most_ten_hops_and_each_hop_links_to_code():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Walks")[2].partition("\n## ")[0]
    walks = text.split("\n### ")[1:]
    assert len(walks) == 3
    for walk in walks:
        hops = re.split(r"^\d+\. ", walk, flags=re.MULTILINE)[1:]
        assert 3 <= len(hops) <= 10
        assert all("](../src/" in hop for hop in hops), walk


FILE = re.compile(r"[\w./-]*\b\w+\.(?:py|cpp)\b")
SOURCES = [p for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".cpp", ".h")]


def test_every_source_file_that_is_named_exists():
    known = [p.as_posix() for folder in ("src", "tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*")]
    missing = {
        f"{path.relative_to(ROOT)}: {named}"
        for path in (*PROSE, *SOURCES)
        for named in FILE.findall(path.read_text())
        if not named.startswith("my_")  # a user's
        and not named.endswith("private_training.py")  # that gradveil init writes
        and not any(p.endswith("/" + named.replace("../", "").lstrip("/")) for p in known)
    }
    assert not missing


def test_the_examples_of_contributing_run():
    from gradveil.clipping.operations import table

    known = set(table.LAYERS)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4  # an operation rule, a strategy, an attack, an accountant
    try:
        for block in blocks:
            exec(compile(block, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
    finally:
        for added in set(table.LAYERS) - known:
            del table.LAYERS[added]


def test_one_version_everywhere():
    assert f"\nversion: {gradveil.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert gradveil.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_public_workflow_runs_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    called = re.findall(r"run: make ([\w-]+)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"check", "coverage", "mutants", "docs"} <= set(called) <= targets
