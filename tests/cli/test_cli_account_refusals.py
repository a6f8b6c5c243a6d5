"""What account, calibrate and statement must refuse: exit code 2 for bad input, 4 for a ledger that does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli_account_runs import write_run

from gradveil.accounting import _ledger_lines as lines

ACCOUNT = {"--sigma": "6", "--sample-rate": "0.01", "--steps": "10", "--delta": "1e-5"}
CALIBRATE = {"--epsilon": "1", "--sample-rate": "0.01", "--steps": "10", "--delta": "1e-5"}


def _line_of(settings: dict[str, str | None]) -> list[str]:
    return [part for name, value in settings.items() if value is not None for part in (name, value)]


BAD_ACCOUNT: dict[str, tuple[dict[str, str | None], list[str]]] = {
    "q above 1": ({"--sample-rate": "1.5"}, ["sample rate 1.5", "not in (0, 1]", "Give"]),
    "q of 0": ({"--sample-rate": "0"}, ["sample rate 0.0"]),
    "q NaN": ({"--sample-rate": "nan"}, ["sample rate nan"]),
    "sigma NaN": ({"--sigma": "nan"}, ["sigma is nan", "Give a noise scale"]),
    "sigma 0": ({"--sigma": "0"}, ["sigma is 0.0", "Without noise"]),
    "sigma infinite": ({"--sigma": "inf"}, ["sigma is inf"]),
    "negative steps": ({"--steps": "-5"}, ["steps is -5", "at least 0"]),
    "too many steps": ({"--steps": "100000000000"}, ["100000000000"]),
    "steps that are no number": ({"--steps": "many"}, ["many"]),
    "delta 0": ({"--delta": "0"}, ["delta 0.0", "not in (0, 1)", "Give"]),
    "delta 1": ({"--delta": "1"}, ["delta 1.0"]),
    "delta NaN": ({"--delta": "nan"}, ["delta nan"]),
    "no layers": ({"--layers": "0"}, ["layers is 0"]),
    "unknown sampling": ({"--sampling": "poison"}, ["poison"]),
    "unknown decay": ({"--decay": "cosine"}, ["cosine"]),
    "an end without a decay": ({"--sigma-end": "4"}, ["no decay is named", "exponential"]),
    "a decay that grows": ({"--decay": "linear", "--sigma-end": "9"}, ["larger"]),
    "a decay to nothing": ({"--decay": "linear", "--sigma-end": "0"}, ["must end above zero"]),
    "half a batch": ({"--sampling": "with-replacement", "--population": "150"}, ["batch of 1.5", "whole"]),
    "kappa of 1": ({"--kappa": "1"}, ["kappa 1.0"]),
    "no sigma": ({"--sigma": None}, ["--sigma missing", "gradveil account RUN"]),
    "nothing": (dict.fromkeys(ACCOUNT), ["--sigma, --sample-rate, --steps missing"]),
    "a picture of no kind": ({"--plot": "x.doc"}, ["x.doc", ".png"]),
    "a picture nowhere": ({"--plot": "/no/such/place/x.png"}, ["/no/such/place", "does not exist"]),
}

BAD_CALIBRATE: dict[str, tuple[dict[str, str | None], list[str]]] = {
    "epsilon 0": ({"--epsilon": "0"}, ["epsilon 0.0", "Give one"]),
    "epsilon NaN": ({"--epsilon": "nan"}, ["epsilon nan"]),
    "negative epsilon": ({"--epsilon": "-1"}, ["epsilon -1.0"]),
    "no target": ({"--epsilon": None}, ["--epsilon", "--like-sigma"]),
    "two targets": ({"--like-sigma": "6"}, ["--epsilon", "--like-sigma"]),
    "a target without steps": ({"--epsilon": None, "--like-sigma": "6", "--steps": None}, ["needs --steps"]),
    "a target out of reach": ({"--epsilon": "1e9"}, ["out of reach"]),
    "q above 1": ({"--sample-rate": "2"}, ["sample rate 2.0"]),
    "no rate": ({"--sample-rate": None}, ["--sample-rate"]),
    "negative steps": ({"--steps": "-1"}, ["steps is -1"]),
    "no steps": ({"--steps": "0"}, ["steps is 0"]),
    "nothing to find by": ({"--steps": None}, ["--steps to find sigma", "--sigma to find the steps"]),
    "nothing left to find": ({"--sigma": "6"}, ["--decay"]),
    "delta 1": ({"--delta": "1"}, ["delta 1.0"]),
    "unknown method": ({"--accountant": "zCPD"}, ["'zCPD'", "Did you mean 'zCDP'"]),
    "unknown neighbours": ({"--neighbours": "add"}, ["'add'", "replace-one"]),
    "neighbours of a published one": ({"--accountant": "MA", "--neighbours": "add-remove"}, ["published"]),
    "a sampler without a bound": ({"--sampling": "shuffle"}, ["no PLD epsilon to aim at", "shuffled"]),
    "a ratio without a decay": ({"--ratio": "0.5"}, ["no decay is named"]),
    "a ratio of 0": ({"--decay": "linear", "--ratio": "0"}, ["ratio is 0.0"]),
    "sigma 0": ({"--sigma": "0", "--steps": None}, ["sigma is 0.0"]),
}


@pytest.mark.parametrize("name", BAD_ACCOUNT)
def test_account_refuses(gradveil: Callable[..., Any], name: str) -> None:
    changes, words = BAD_ACCOUNT[name]
    _refused(gradveil("account", *_line_of(ACCOUNT | changes), "--json"), words)


@pytest.mark.parametrize("name", BAD_CALIBRATE)
def test_calibrate_refuses(gradveil: Callable[..., Any], name: str) -> None:
    changes, words = BAD_CALIBRATE[name]
    _refused(gradveil("calibrate", *_line_of(CALIBRATE | changes), "--json"), words)


def _refused(outcome: Any, words: list[str]) -> None:
    assert outcome.code == 2
    for word in words:
        assert word in outcome.message
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


def test_a_run_and_parameters_do_not_go_together(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", releases=3)
    _refused(gradveil("account", run, "--sigma", 6, "--sample-rate", 0.01), ["--sigma, --sample-rate", "leave --sigma"])
    _refused(gradveil("account", run, "--delta", 1), ["delta 1.0"])
    _refused(gradveil("statement", run, "--delta", 0), ["delta 0.0"])


# ---- ledgers that do not hold


def _changed(data: bytes) -> bytes:
    return data.replace(b'"sigma":6.0', b'"sigma":9.0', 3)


def _of_nonsense(data: bytes) -> bytes:
    """A header whose hash is right and whose values are not."""
    body = {"format_version": 1, "strategy": 7, "groups": [], "population": "many", "sampling": None}
    body |= {"sample_rate": "high", "expected_batch_size": None, "steps": "x", "delta": "small", "seeded": 1}
    body |= {"guarantee": "proved", "plan": {}, "stopping": "none"}
    return lines.line(1, "header", lines.body_text(body), lines.GENESIS)[0].encode()


def _of_delta_5(data: bytes) -> bytes:
    """A header that makes sense but for its delta."""
    body = json.loads(data.splitlines()[0])["body"] | {"delta": 5.0}
    return lines.line(1, "header", lines.body_text(body), lines.GENESIS)[0].encode()


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "no whole line"),
    "foreign": (lambda data: b"step,loss\n1,2\n", "line 1 is not a ledger entry"),
    "not even text": (lambda data: bytes(range(256)) + b"\n", "line 1 is not a ledger entry"),
    "changed": (_changed, "was changed after it was written"),
    "a line missing": (lambda data: b"".join(data.splitlines(True)[:2] + data.splitlines(True)[3:]), "does not follow"),
    "without its header": (lambda data: b"".join(data.splitlines(True)[1:]), "does not follow"),
    "of another version": (lambda data: data.replace(b'"format_version":2', b'"format_version":9'), "line 1"),
    "whole, but of delta 5": (_of_delta_5, "delta 5.0"),
    "whole, but of nonsense": (_of_nonsense, "does not fit"),
}


@pytest.mark.parametrize("command", ["account", "statement"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_ledger_that_does_not_hold_exits_4(
    gradveil: Callable[..., Any], tmp_path: Path, name: str, command: str
) -> None:
    run = write_run(tmp_path / "run", releases=5)
    damage, words = DAMAGE[name]
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(damage(ledger.read_bytes()))
    for where in (run, ledger):
        outcome = gradveil(command, where, "--json")
        assert outcome.code == 4
        assert words in outcome.message
        assert outcome.out == ""
        assert "Traceback" not in outcome.err


@pytest.mark.parametrize("command", ["account", "statement"])
def test_no_ledger_exits_4(gradveil: Callable[..., Any], tmp_path: Path, command: str) -> None:
    outcome = gradveil(command, tmp_path)
    assert outcome.code == 4
    assert "there is no ledger" in outcome.message
