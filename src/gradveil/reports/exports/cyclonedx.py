"""A CycloneDX bill of materials (ML-BOM, 1.6): the model with its model card, its data set, and what trained it."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

from gradveil import __version__
from gradveil.accounting._rounding import at_most
from gradveil.accounting.manifest import CHECKPOINTS, bound_files
from gradveil.reports.exports import Export
from gradveil.reports.facts import RunFacts


def made(run: RunFacts) -> Export:
    assert run.contents is not None
    head = run.contents.head
    libraries = {name: run.environment.get(name) for name in ("torch", "numpy", "dp_accounting")}
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'gradveil:{head}')}",
        "version": 1,
        "metadata": {
            "timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "tools": {"components": [{"type": "application", "name": "gradveil", "version": __version__}]},
            "component": _model(run),
        },
        "components": [
            {"type": "library", "bom-ref": f"library-{name}", "name": name, "version": str(version)}
            for name, version in libraries.items()
            if isinstance(version, str)
        ],
    }
    return Export(json.dumps(bom, indent=1, allow_nan=False) + "\n")


def _model(run: RunFacts) -> dict[str, Any]:
    assert run.contents is not None
    weights = [f for path, f in bound_files(run.contents).items() if path.startswith(f"{CHECKPOINTS}/step-")]
    newest = max((f for f in weights if f.path.endswith(".safetensors")), key=lambda f: f.path, default=None)
    config = run.config
    network = config.model if config is not None else str((run.own or {}).get("engine", {}).get("model", "unknown"))
    data = config.dataset if config is not None else run.about.get("data", "not stated")
    found: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": run.about.get("name", run.name),
        "version": run.contents.head[:16],
        "description": run.about.get("purpose", "A model trained with differential privacy by gradveil."),
        "modelCard": {
            "modelParameters": {
                "approach": {"type": "supervised"},
                "modelArchitecture": network,
                "datasets": [{"type": "dataset", "name": data, "classification": "private"}],
            },
            "quantitativeAnalysis": {"performanceMetrics": _metrics(run)},
            "considerations": _considerations(run),
        },
        "properties": [{"name": f"gradveil:{name}", "value": value} for name, value in _properties(run).items()],
    }
    if newest is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": newest.sha256}]
    return found


def _metrics(run: RunFacts) -> list[dict[str, str]]:
    found = []
    if run.accuracy is not None:
        found.append({"type": "accuracy", "value": f"{run.accuracy:.4f}", "slice": "test set"})
    if run.proved is not None:
        found.append({"type": "epsilon, proved upper bound", "value": at_most(run.proved)})
    if run.strongest is not None and run.strongest.psnr is not None:
        found.append({"type": f"PSNR of the {run.strongest.name} attack, dB", "value": f"{run.strongest.psnr:.1f}"})
    return found


def _considerations(run: RunFacts) -> dict[str, Any]:
    assert run.statement is not None
    found: dict[str, Any] = {
        "technicalLimitations": [f"Not covered: {note}" for note in run.statement.to_dict()["not_covered"]],
        "ethicalConsiderations": [
            {"name": "Privacy of training examples", "mitigationStrategy": run.statement.meaning()}
        ],
    }
    if run.about.get("purpose"):
        found["useCases"] = [run.about["purpose"]]
    return found


def _properties(run: RunFacts) -> dict[str, str]:
    assert run.contents is not None and run.statement is not None
    header, proved = run.contents.header, run.statement.proved
    return {
        "strategy": header.strategy,
        "epsilon": at_most(proved.epsilon),
        "delta": f"{proved.delta:g}",
        "neighbours": proved.neighbours,
        "accountant": proved.accountant,
        "sampling": header.sampling,
        "steps-charged": str(proved.steps_charged),
        "unit-of-privacy": run.about.get("unit", "one training example"),
        "tuning-runs": run.about.get("tuning", "not stated"),
        "ledger-head": run.contents.head,
    }
