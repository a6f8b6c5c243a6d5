"""A record for the OpenDP deployments registry (opendp/deployments-registry-data), tier 3, as a draft."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from gradveil.accounting._rounding import at_most
from gradveil.reports.exports import NOT_STATED, Export, proved_or_refuse
from gradveil.reports.exports._yaml import to_yaml
from gradveil.reports.facts import RunFacts
from gradveil.training.run_directory import RunDirectory

# What the registry asks for, and under which name in ``about`` a person says it.
_PERSON = {
    "name": "name",
    "curator": "curator",
    "purpose": "intended use",
    "data": "data domain",
    "region": "region",
    "publication_date": "publication date",
    "owner": "registry author",
}


def made(run: RunFacts) -> Export:
    epsilon = proved_or_refuse(run, "a record of the registry")
    about = run.about
    missing = tuple(words for name, words in _PERSON.items() if not about.get(name))
    record = {
        "url_slug": re.sub(r"[^a-z0-9]+", "_", about.get("name", run.name).lower()).strip("_") or "model",
        "status": "Draft",
        "tier": 3,
        "deployment": _deployment(run, epsilon),
    }
    head = "# A draft for the OpenDP deployments registry, written by gradveil from a verified ledger.\n"
    if missing:
        head += f"# For a person to fill in: {', '.join(missing)}.\n"
    return Export(head + to_yaml(record), missing)


def _deployment(run: RunFacts, epsilon: float) -> dict[str, Any]:
    assert run.statement is not None and run.contents is not None
    about, statement, header = run.about, run.statement, run.contents.header
    proved = statement.proved
    other = "removed or added" if proved.neighbours == "add-remove" else "replaced by another"
    return {
        "basic": {
            "name": about.get("name", run.name),
            "data_curators": [about.get("curator", NOT_STATED)],
            "description": about.get(
                "description",
                f"A model trained with DP-SGD (strategy {header.strategy}) on {header.population} examples.",
            ),
            "intended_use": about.get("purpose", NOT_STATED),
            "data_product_type": "Machine learning model",
            "data_product_region": about.get("region", NOT_STATED),
            "publication_date": about.get("publication_date", _written(run)),
        },
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": about.get("data", f"Data sets of examples for the training; here {header.population}."),
            "unprotected_quantities": "The number of training examples, the settings of the training, and the training "
            "loss and test accuracy that were looked at during it.",
        },
        "privacy_loss": {
            "privacy_unit": about.get("unit", "one training example (one row)"),
            "privacy_unit_details": f"Two data sets are adjacent if one example is {other}. A person with several rows "
            "is not covered as a whole.",
            "privacy_parameters": {"epsilon": float(at_most(epsilon)), "delta": float(proved.delta)},
            "privacy_parameters_details": f"Proved by the {proved.accountant} accountant over {proved.steps_charged} "
            f"steps; under {statement.proved_other.neighbours}: {at_most(statement.proved_other.epsilon)}. Rounded up.",
        },
        "deployment_model": {
            "model_name": "Central",
            "actors": statement.to_dict()["trust_model"] + ".",
            "release_type": "One release",
            "release_type_details": "Every noised gradient counts as released: every intermediate model is covered.",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
        "accounting": {
            "post_processing": "The optimizer, averaging of weights, and anything computed from released gradients.",
            "composition": f"{proved.accountant} composition of {proved.steps_charged} subsampled Gaussian mechanisms "
            f"({header.sampling} sampling, rate {header.sample_rate:.6g}).",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": f"Tuning runs: {about.get('tuning', NOT_STATED)}. Runs on the "
            "same data that were tried and not released are not in this epsilon.",
            "mechanisms": _mechanisms(run),
            "justification": about.get("justification", NOT_STATED),
        },
        "administrative": {
            "registry_authors": [about.get("owner", NOT_STATED)],
            "notes": f"gradveil ledger head {run.contents.head}, {run.contents.length} lines.",
        },
    }


def _mechanisms(run: RunFacts) -> str:
    assert run.contents is not None and run.statement is not None
    header = run.contents.header
    groups = f"{len(header.groups)} groups of parameters" if len(header.groups) > 1 else "all parameters together"
    first = run.contents.charged()[0] if run.contents.charged() else None
    noise = "" if first is None else f" Clip bound {max(first.clip):g} and sigma {first.sigma:g} at the first step."
    return (
        f"Gaussian mechanism on sums of per-example gradients, clipped over {groups} (DP-SGD).{noise} Library: "
        f"gradveil {header.gradveil_version or 'of an unknown version'}. "
        + " ".join(f"Not covered: {note}." for note in run.statement.to_dict()["not_covered"][-2:])
    )


def _written(run: RunFacts) -> str:
    return f"{datetime.fromtimestamp(RunDirectory(run.path).ledger.stat().st_mtime, UTC):%Y-%m-%d}"
