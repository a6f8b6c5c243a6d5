"""The notebooks of the tutorial run from top to bottom: in a kernel where Jupyter is installed, otherwise as code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
JUPYTER = all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))


def _cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_are_two_and_they_are_committed_without_output():
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert cell["cell_type"] == "markdown" or (not cell["outputs"] and cell["execution_count"] is None)


@pytest.mark.skipif(JUPYTER, reason="Jupyter is installed: the kernel runs them")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run(path, tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(_cells(path, "code")), path.name, "exec"), {"__name__": "notebook"})


@pytest.mark.skipif(not JUPYTER, reason="needs gradveil[tutorials]; the cells run without a kernel instead")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_in_a_kernel(path, tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert printed
    assert not [output for output in printed if output.output_type == "error"]
