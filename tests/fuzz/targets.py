"""Every parser of a file that somebody else may have written, and how damaged inputs are made of whole samples.

A target may raise :class:`GradveilError` and nothing else. It returns True where it accepted an input that it must not
accept: a ledger that differs from the one that was written, and is not that one cut short.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.accounting import _ledger_lines as lines
from gradveil.accounting import _run_lock, _spent, statement_of
from gradveil.accounting import ledger as ledgers
from gradveil.accounting._checks import trusted
from gradveil.errors import GradveilError
from gradveil.reports.comparison import row_of
from gradveil.reports.facts import read_run
from gradveil.reports.gates import Limits, judge
from gradveil.training import checkpoints
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.run_directory import RunDirectory, _facts_hash

LIMITS = Limits(max_epsilon=1e9, max_delta=1.0, max_attack_psnr=1e9, min_accuracy=0.0)
WORDS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, 5e-324, float("inf"),
    float("nan"), "", "x", "inf", "é", "\u0000", "\ud800", "9" * 400, [], {}, [[]], {"": {}}, [0] * 9, {"kind": "x"},
)  # fmt: skip
BYTES = (
    b"",
    b"\x00",
    b"\xff",
    b"\xff\xfe",
    b"\n",
    b'"',
    b"{",
    b"}",
    b"[" * 3000,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"-",
    b",",
)


def damaged_bytes(data: bytes, random: random.Random) -> bytes:
    """Some bytes changed, removed, doubled, moved or put in."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at, end = random.randrange(len(made) + 1), random.randrange(len(made) + 1)
        how = random.randrange(7)
        if how == 0 and at < len(made):
            made[at] ^= 1 << random.randrange(8)
        elif how == 1:
            del made[at:]
        elif how == 2:
            del made[min(at, end) : max(at, end)]
        elif how == 3:
            made[at:at] = random.choice(BYTES)
        elif how == 4:
            made[at:at] = made[min(at, end) : min(at, end) + 200]
        elif how == 5:
            made[at : at + random.randrange(1, 9)] = random.randbytes(random.randrange(1, 9))
        elif at < len(made):
            made[at] = random.randrange(256)
    return bytes(made)


def damaged_value(value: Any, random: random.Random) -> Any:
    """A JSON value with something in it exchanged, removed, renamed or put in."""
    if random.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return random.choice(WORDS)
    if isinstance(value, list):
        made = list(value)
        at = random.randrange(len(made))
        if random.random() < 0.3:
            return made[:at]
        made[at] = damaged_value(made[at], random)
        return made
    key, found = random.choice(list(value)), dict(value)
    how = random.random()
    if how < 0.15:
        del found[key]
    elif how < 0.25:
        found[random.choice(("", "x", "kind", key + "x"))] = random.choice(WORDS)
    else:
        found[key] = damaged_value(found[key], random)
    return found


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


@dataclass
class Samples:
    """A run directory that is whole, and a place to damage copies in."""

    run: Path
    scratch: Path

    def replaced(self, name: str, data: bytes) -> Path:
        """The run with one file exchanged."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self.scratch

    def restored(self, name: str) -> None:
        source = self.run / name
        if source.exists():
            shutil.copyfile(source, self.scratch / name)
        else:
            (self.scratch / name).unlink(missing_ok=True)

    def sample(self, name: str) -> bytes:
        return (self.run / name).read_bytes()


Target = Callable[[Samples, random.Random], bool]


def _shown(where: Path) -> None:
    """All that check and compare do with a run."""
    facts = read_run(where)
    judge(facts, LIMITS)
    row_of(facts)


def _of_run(name: str) -> Target:
    def target(samples: Samples, random: random.Random) -> bool:
        whole = samples.sample(name)
        if name.endswith(".json") and random.random() < 0.6:
            data = _encoded(damaged_value(json.loads(whole), random))
        else:
            data = damaged_bytes(whole, random)
        try:
            _shown(samples.replaced(name, data))
        finally:
            samples.restored(name)
        return False

    return target


def ledger(samples: Samples, random: random.Random) -> bool:
    """A ledger with bytes changed is never accepted."""
    whole = samples.sample(ledgers.FILE_NAME)
    data = damaged_bytes(whole, random)
    path = samples.scratch / "damaged.jsonl"
    path.write_bytes(data)
    contents = ledgers.read(path)
    trusted(lambda: statement_of(contents))
    kept = data[: data.rfind(b"\n") + 1]
    return not whole.startswith(kept)


def chained_nonsense(samples: Samples, random: random.Random) -> bool:
    """Lines whose chain is right and whose content is not."""
    text = samples.sample(ledgers.FILE_NAME).decode().splitlines()
    entries: list[tuple[str, Any]] = []
    for line in text:
        entry = json.loads(line)
        entries.append(("next", entry[1]) if isinstance(entry, list) else (entry["kind"], entry["body"]))
    at = random.randrange(len(entries))
    kind, body = entries[at]
    entries[at] = (
        random.choice((kind, kind, kind, "release", "next", "digest", "end", "spent")),
        damaged_value(body, random),
    )
    head, made = lines.GENESIS, b""
    for number, (kind, body) in enumerate(entries, start=1):
        line, head = lines.line(number, kind, json.dumps(body, separators=(",", ":")), head)
        made += line.encode("utf-8", "surrogatepass")
    path = samples.scratch / "nonsense.jsonl"
    path.write_bytes(made)
    contents = ledgers.read(path)
    str(trusted(lambda: statement_of(contents)))
    return False


def config(samples: Samples, random: random.Random) -> bool:
    path = samples.scratch / "c.toml"
    path.write_bytes(damaged_bytes(samples.sample("config.toml"), random))
    RunConfig.check(read_toml(path))
    return False


def settings(samples: Samples, random: random.Random) -> bool:
    """Values of any kind where a configuration has its own."""
    value = damaged_value(read_toml(samples.run / "config.toml"), random)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        RunConfig.check(value)
    return False


def secret(samples: Samples, random: random.Random) -> bool:
    data = samples.sample("secret.json")
    made = damaged_bytes(data, random) if random.random() < 0.5 else _encoded(damaged_value(json.loads(data), random))
    try:
        RunDirectory(samples.replaced("secret.json", made)).read_seed()
    finally:
        samples.restored("secret.json")
    return False


def _checkpoint(samples: Samples) -> str:
    return max(p.name for p in (samples.run / "checkpoints").glob("*.json"))


def checkpoint(samples: Samples, random: random.Random) -> bool:
    """Facts that were damaged; half of them with a hash that fits them."""
    name = f"checkpoints/{_checkpoint(samples)}"
    facts = json.loads(samples.sample(name))
    if random.random() < 0.5:
        made = damaged_value(facts, random)
        if isinstance(made, dict):
            try:
                made["facts_sha256"] = _facts_hash(made)
            except UnicodeEncodeError:
                made["facts_sha256"] = "0" * 64
        data = _encoded(made)
    else:
        data = damaged_bytes(samples.sample(name), random)
    run = RunDirectory(samples.replaced(name, data))
    try:
        run.verified_ledger()
        found = run.newest_checkpoint()
        if found is not None:
            run.read_tensors(found)
    finally:
        samples.restored(name)
    return False


def tensors(samples: Samples, random: random.Random) -> bool:
    name = f"checkpoints/{_checkpoint(samples)}".replace(".json", ".safetensors")
    checkpoints.parts_of(damaged_bytes(samples.sample(name), random))
    return False


def pictures(samples: Samples, random: random.Random) -> bool:
    name = "attacks/map-made-up/pictures.npz"
    samples.replaced(name, damaged_bytes(samples.sample(name), random))
    try:
        for attack in read_run(samples.scratch).attacks:
            attack.pictures()
    finally:
        samples.restored(name)
    return False


def lock(samples: Samples, random: random.Random) -> bool:
    _run_lock._owner(damaged_bytes(b'{"pid": 123, "host": "somewhere"}', random))
    return False


def spent(samples: Samples, random: random.Random) -> bool:
    """What a checkpoint brings along, damaged, with a checksum that fits it."""
    contents = ledgers.read(samples.run / ledgers.FILE_NAME)
    told = _spent.export(contents.header, contents.releases, length=contents.length, head=contents.head)
    made = damaged_value(told, random)
    if not isinstance(made, dict):
        made = {"format": made}
    try:
        made["sha256"] = _spent._checksum(made)
    except (ValueError, TypeError):
        made["sha256"] = hashlib.sha256(b"").hexdigest()
    _spent.check(made, contents.header)
    return False


TARGETS: dict[str, Target] = {
    "ledger, bytes": ledger,
    "ledger, chained": chained_nonsense,
    "config.toml": config,
    "settings": settings,
    "secret.json": secret,
    "checkpoint facts": checkpoint,
    "checkpoint tensors": tensors,
    "metrics.jsonl": _of_run("metrics.jsonl"),
    "audit.json": _of_run("audit.json"),
    "result.json": _of_run("attacks/map-made-up/result.json"),
    "environment.json": _of_run("environment.json"),
    "pictures.npz": pictures,
    "lock": lock,
    "spent": spent,
}


def made_samples(folder: Path) -> Samples:
    """A small run that was attacked and audited."""
    import numpy as np

    from small_runs import trained, with_attack

    run = with_attack(trained(folder / "run", seed=5, strategy="quantile-clip"))
    images = np.random.default_rng(0).random((2, 1, 8, 8))
    np.savez_compressed(run / "attacks/map-made-up/pictures.npz", **{"0/found": images, "0/original": images})
    audit = {"unit": "one step", "epsilon_lower_bound": 0.1, "epsilon_proved": "inf", "delta": 1e-5, "trials": 9}
    (run / "audit.json").write_text(json.dumps(audit))
    scratch = folder / "scratch"
    shutil.copytree(run, scratch)
    return Samples(run, scratch)


def outcome(target: Target, samples: Samples, seed: int) -> str:
    """ "refused", "taken", or what went wrong."""
    try:
        accepted = target(samples, random.Random(seed))
    except GradveilError as error:
        return "refused" if len(str(error)) < 20_000 else "a message of more than 20 000 letters"
    return "accepted what was changed" if accepted else "taken"


def seeds(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1
