"""Run directories as a forger would leave them: lines changed and the whole chain hashed again."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradveil.accounting import ledger as ledgers
from gradveil.accounting._ledger_lines import GENESIS, line
from gradveil.training.run_directory import _facts_hash

Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]


def rehash(run: Path, change: Change) -> Path:
    """Every body as ``change(kind, body)`` gives it, None to leave the line out; hashes and pins fit again."""
    ledger, head, heads, out = run / "ledger.jsonl", GENESIS, {}, []
    releases, changed = iter(ledgers.read(ledger).releases), False
    for text in ledger.read_text().splitlines():
        entry = json.loads(text)
        kind = "release" if isinstance(entry, list) else entry["kind"]
        given = next(releases).to_dict() if kind == "release" else entry["body"]  # in full, as a first one is written
        body = change(kind, json.loads(json.dumps(given)))
        changed = changed or body != json.loads(json.dumps(given))
        if not changed:  # the line stays as it is, and so does its hash
            head = base64.urlsafe_b64decode(entry[2] + "=").hex() if isinstance(entry, list) else entry["hash"]
            out.append(text + "\n")
            heads[len(out)] = head
            continue
        if body is None:
            continue
        written, head = line(len(out) + 1, kind, json.dumps(body, separators=(",", ":")), head)
        out.append(written)
        heads[len(out)] = head
    ledger.write_text("".join(out))
    for path in (run / "checkpoints").glob("*.json"):
        facts = json.loads(path.read_text())
        facts["ledger_length"] = min(facts["ledger_length"], len(out))
        facts["ledger_head"] = heads[facts["ledger_length"]]
        facts["facts_sha256"] = _facts_hash(facts)
        path.write_text(json.dumps(facts, indent=1))
    return run


def louder(run: Path, *, times: float = 10.0, header: bool = True, bound: bool = True) -> Path:
    """As if there had been this much more noise; ``bound``: hashes of files in the ledger fit again too."""

    def change(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        if kind == "release":
            body["sigma"] *= times
            body["noise_std"] = [std * times for std in body["noise_std"]]
        if kind == "header" and header:
            body["plan"]["sigma"]["start"] *= times
            body["plan"]["varsigma"] *= times
        if kind == "settings" and header:
            body["sigma"] *= times
        return body

    rehash(run, change)
    return rebound(run) if bound else run


def rebound(run: Path) -> Path:
    """The newest line of each file names the file as it is now."""

    def change(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        if kind == "file" and (run / body["path"]).exists() and not body.get("salted"):
            data = (run / body["path"]).read_bytes()
            return body | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return body

    for path in (run / "checkpoints").glob("*.json"):  # their pins are in files that the ledger names: leave them out
        path.unlink()
    rehash(run, change)

    def without(kind: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if kind == "file" and body["path"].endswith(".json") and "checkpoints" in body["path"] else body

    return rehash(run, without)


def cut(run: Path, *, releases: int, end: bool = False) -> Path:
    """Only so many releases are left, and no line that names a file after them; with ``end``, as if that were all."""
    kept = {"releases": 0}

    def change(kind: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if kind == "release":
            kept["releases"] += 1
        if kind == "end":
            return {"reason": "finished", "releases": releases} if end else None
        return body if kept["releases"] <= releases and (kind != "file" or kept["releases"] == 0) else None

    for path in (run / "checkpoints").glob("*"):
        path.unlink()
    return rehash(run, change)
