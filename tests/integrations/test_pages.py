"""The code in docs/integrations.md and docs/from-opacus.md runs, and is that of the examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"

# The package that a block needs, and its extra; the first that is found in the text.
NEEDS = {
    "TensorBoardProgress": ("tensorboard", "tensorboard"),
    "MLflowProgress": ("mlflow", "mlflow"),
    "import lightning": ("lightning", "lightning"),
    "from transformers": ("accelerate", "huggingface"),
    "import opacus": ("opacus", "peers"),
}

# A deprecation inside Lightning, the Trainer pinning memory for no GPU, Opacus on its random numbers and its hooks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def skip_without(code: str) -> None:
    for mark, (package, extra) in NEEDS.items():
        if mark in code and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'gradveil[{extra}]'")


def run(code: str, page: str, namespace: dict[str, object]) -> None:
    exec(compile(code, page, "exec"), namespace)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")  # and unset again after the example that sets it


@pytest.mark.parametrize("code", blocks("integrations.md"), ids=lambda code: code.partition("\n")[0].strip('"'))
def test_the_blocks_of_integrations_run(code, capsys):
    skip_without(code)
    run(code, "docs/integrations.md", {"__name__": "page"})
    if "engine.statement()" in code:
        assert "Proved:" in capsys.readouterr().out


def test_the_blocks_of_integrations_are_the_examples():
    examples = {path.read_text() for path in EXAMPLES.glob("with_*.py")}
    assert set(blocks("integrations.md")) == examples


@pytest.mark.parametrize("peer", ["opacus", "gradveil"])
def test_the_blocks_of_from_opacus_run(peer, capsys):
    """Both share the first block; without Opacus, gradveil's still run."""
    shared, *others = blocks("from-opacus.md")
    mine = [code for code in others if ("import opacus" in code) == (peer == "opacus")]
    assert mine
    namespace: dict[str, object] = {"__name__": "page"}
    for code in (shared, *mine):
        skip_without(code)
        run(code, "docs/from-opacus.md", namespace)
    printed = capsys.readouterr().out
    assert ("Proved:" in printed) == (peer == "gradveil")


def test_the_links_lead_somewhere():
    for page in ("integrations.md", "from-opacus.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), target
