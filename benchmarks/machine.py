"""What a results file says of where its figures come from, and how it is written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from gradveil.clipping.backends import cuda, layers, native

ROOT = Path(__file__).resolve().parent.parent


def description(device: str, threads: int) -> dict[str, Any]:
    """Machine, versions, command, and which kernels were in use."""
    return {
        "machine": torch.cuda.get_device_name() if device != "cpu" else f"{_cpu()}, threads: {threads}",
        "clipping": f"{native.status() if device == 'cpu' else cuda.status()}; {layers.status()}",
        "versions": {name: v for name in ("gradveil", "torch", "opacus") if (v := version(name))}
        | {"python": platform.python_version()},
        "command": "python " + " ".join(Path(a).name if "/" in a else a for a in sys.argv),
    }


def version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # says which build it is
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def write(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: a benchmark that is interrupted leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(scratch, path)
