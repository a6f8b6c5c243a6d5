"""Plant each fault of mutants.toml in a copy of the project, and fail unless its named test notices.

python tests/mutants/run.py [PART OF A NAME ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("src", "tests", "pyproject.toml", "README.md")
FAILED = 1  # pytest's exit code for failed tests; 2 to 5 are broken runs, missing tests and the like


def mutants() -> list[dict[str, str]]:
    return list(tomllib.loads((ROOT / "tests" / "mutants" / "mutants.toml").read_text())["mutant"])


def planted(mutant: dict[str, str], text: str) -> str:
    """The file's text with the fault in it; refused where the fault no longer fits."""
    if text.count(mutant["before"]) != 1:
        raise ValueError(f"{mutant['name']}: its text occurs {text.count(mutant['before'])} times in {mutant['file']}")
    return text.replace(mutant["before"], mutant["after"])


def _pytest(root: Path, *tests: str) -> int:
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def main() -> int:
    chosen = [m for m in mutants() if not sys.argv[1:] or any(part in m["name"] for part in sys.argv[1:])]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, root / name) if source.is_dir() else shutil.copy(source, root / name)
        if _pytest(root, *dict.fromkeys(m["test"] for m in chosen)) != 0:
            print("the named tests fail without any fault: nothing can be said")
            return 1
        for mutant in chosen:
            path = root / mutant["file"]
            text = path.read_text()
            path.write_text(planted(mutant, text))
            killed = _pytest(root, mutant["test"]) == FAILED
            path.write_text(text)
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant['name']}", flush=True)
            if not killed:
                survivors.append(mutant["name"])
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted faults were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
