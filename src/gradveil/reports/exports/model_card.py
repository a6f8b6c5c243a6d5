"""A Hugging Face model card: metadata in YAML, and the privacy of the model in words."""

from __future__ import annotations

from typing import Any

from gradveil.accounting._rounding import at_most
from gradveil.reports.exports import NOT_STATED, Export
from gradveil.reports.exports._yaml import to_yaml
from gradveil.reports.facts import RunFacts
from gradveil.reports.verdicts import ABOUT, plain


def made(run: RunFacts) -> Export:
    about = run.about
    missing = tuple(name for name in ("license", "purpose", "data") if not about.get(name))
    return Export(f"---\n{to_yaml(_metadata(run))}---\n\n{_body(run)}", missing)


def _metadata(run: RunFacts) -> dict[str, Any]:
    data = run.config.dataset if run.config is not None else run.about.get("data", "private data")
    found: dict[str, Any] = {"library_name": "pytorch", "tags": ["differential-privacy", "dp-sgd", "gradveil"]}
    if run.about.get("license"):
        found["license"] = run.about["license"]
    if run.accuracy is not None:
        task = {"type": "other", "name": "Classification"}
        metric = {"type": "accuracy", "value": round(run.accuracy, 4), "name": "Test accuracy"}
        result = {"task": task, "dataset": {"name": data, "type": data}, "metrics": [metric]}
        found |= {
            "metrics": ["accuracy"],
            "model-index": [{"name": run.about.get("name", run.name), "results": [result]}],
        }
    return found


def _body(run: RunFacts) -> str:
    assert run.statement is not None and run.contents is not None
    statement, proved, words = run.statement, run.statement.proved, plain(run)
    rows = {
        "Proved epsilon, at most": at_most(proved.epsilon),
        "Delta": f"{proved.delta:g}",
        "Neighbours": proved.neighbours,
        f"Epsilon under {statement.proved_other.neighbours}": at_most(statement.proved_other.epsilon),
        "Accountant": proved.accountant,
        "Steps charged": str(proved.steps_charged),
        "Sampling": f"{proved.sampler}, rate {run.contents.header.sample_rate:.4g}",
        "Strategy": run.strategy,
        "Examples": str(run.contents.header.population),
        "Ledger head": f"`{run.contents.head}`",
    }
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    stated = "\n".join(f"- {title}: {run.about.get(name, NOT_STATED)}" for name, title in ABOUT.items())
    limits = "\n".join(f"- {note}" for note in statement.to_dict()["not_covered"])
    return (
        f"# {run.about.get('name', run.name)}\n\n"
        f"{words.private} {words.attacked}\n\n"
        f"## Privacy\n\n{_sentence(statement.meaning())}\n\n| | |\n|---|---|\n{table}\n\n"
        f"Not covered:\n\n{limits}\n\n"
        f"## About\n\n{stated}\n\n"
        f"Written by gradveil from a verified ledger; `gradveil verify RUN` checks it.\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
