"""Drives jax_worker.py: the same network in JAX, in its own virtual environment, taking turns with this process.

    make .venv-jax     # JAX and JAX-Privacy, apart from torch

A line on the worker's input is one step; its answer is the seconds that the step took.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("jax_worker.py")
PYTHON = Path(os.environ.get("GRADVEIL_JAX_PYTHON", ROOT / ".venv-jax" / "bin" / "python"))


class LeftOut(Exception):
    """A mode that is not measured on a workload, and why."""


def described(model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The layers of a plain stack and their weights, by name; refused for anything else."""
    layers: list[dict[str, Any]] = []
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv2d):
            layers.append({"kind": "conv", "name": name, "padding": layer.padding})
        elif isinstance(layer, nn.Linear):
            layers.append({"kind": "linear", "name": name})
        elif isinstance(layer, nn.ReLU | nn.MaxPool2d | nn.Flatten):
            layers.append({"kind": type(layer).__name__.lower()})
        else:
            raise LeftOut(f"{type(layer).__name__} is not written in JAX here: only stacks of plain layers are")
    return layers, weights


class JaxStep:
    """One worker; call it for a step, close it when done."""

    def __init__(self, w: Workload, *, threads: int, private: bool) -> None:
        if not PYTHON.exists():
            raise LeftOut("JAX-Privacy is not installed: make .venv-jax")
        model = w.make()
        layers, weights = described(model)
        x, y = w.data()
        expected = float(F.cross_entropy(model(x), y).detach())
        self._scratch = tempfile.TemporaryDirectory()
        told = Path(self._scratch.name) / "task.npz"
        np.savez(told, x=x.numpy(), y=y.numpy(), **{f"weight:{name}": v for name, v in weights.items()})
        task = json.dumps({"layers": layers, "threads": threads, "private": private, "arrays": str(told)})
        self._process = subprocess.Popen(
            [str(PYTHON), str(WORKER), task], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        first = self._answer()
        if not abs(first["loss"] - expected) < 1e-3 * max(1.0, abs(expected)):
            self.close()
            raise RuntimeError(f"not the same network: loss {first['loss']} in JAX, {expected} in PyTorch")
        self.versions: dict[str, str] = first["versions"]
        self.note = f"{first['microbatch']} examples vectorised at once" if private else None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the JAX worker stopped with exit code {self._process.wait()}")
        return dict(json.loads(line))

    def __call__(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the worker ends with its input
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._scratch.cleanup()


if __name__ == "__main__":
    from workloads import WORKLOADS

    torch.set_num_threads(2)
    worker = JaxStep(WORKLOADS["W4"], threads=2, private=True)
    print(worker.versions, worker.note, [worker() for _ in range(3)])
    worker.close()
