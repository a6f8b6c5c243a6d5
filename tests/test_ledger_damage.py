"""A ledger that was changed, cut short or written over: any change shows, and what is lost is charged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradveil.accounting import _ledger_lines as lines
from gradveil.accounting import ledger as ledgers
from gradveil.accounting import proved_epsilon, statement
from gradveil.accounting.ledger import Ledger
from gradveil.errors import LedgerError
from gradveil.training.run_directory import RunDirectory
from made_ledgers import COUNTS, live_engine, make_header, make_release, take_steps, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ledgers.FILE_NAME


# ---- any change shows, with its line


def _refused(path: Path, data: bytes) -> LedgerError:
    path.write_bytes(data)
    with pytest.raises(LedgerError) as caught:
        ledgers.read(path)
    assert caught.value.exit_code == 4
    assert f"line {caught.value.line}" in str(caught.value)
    return caught.value


@pytest.fixture
def small(path: Path) -> bytes:
    """A header, a plain release, one with a side release, an end."""
    header = make_header("quantile-clip", steps=2)
    ledger = Ledger(header, path)
    ledger.append(make_release(header, 0))
    ledger.append(make_release(header, 1, side=(COUNTS,)))
    ledger.end("finished")
    return path.read_bytes()


@pytest.mark.parametrize("change", ["lowest bit", "highest bit", "to a nine", "to a quote", "to a newline"])
def test_every_single_changed_byte_is_detected_on_its_line(path: Path, small: bytes, change: str) -> None:
    to = {
        "lowest bit": lambda b: b ^ 1,
        "highest bit": lambda b: b ^ 0x80,
        "to a nine": lambda b: ord("9"),
        "to a quote": lambda b: ord('"'),
        "to a newline": lambda b: ord("\n"),
    }[change]
    wrong: list[str] = []
    for position in range(len(small) - 1):  # the last newline has a test of its own
        changed = bytearray(small)
        changed[position] = to(small[position])
        if changed == small:
            continue
        line = small.count(b"\n", 0, position) + 1
        path.write_bytes(changed)
        around = small[max(0, position - 12) : position + 5]
        try:
            ledgers.read(path)
            wrong.append(f"byte {position} ({around!r}): not noticed")
        except LedgerError as error:
            if error.line != line or f"line {line}" not in str(error):
                wrong.append(f"byte {position} ({around!r}): line {line}, but named {error.line}: {error}")
        except Exception as error:
            wrong.append(f"byte {position} ({around!r}): {type(error).__name__}: {error}")
    assert wrong == []


@pytest.mark.parametrize("byte", [b"", b"x", b" ", b"\x00", b"9"])
def test_a_changed_last_newline_is_noticed_on_the_last_line(path: Path, small: bytes, byte: bytes) -> None:
    """Without its newline the last line is as a crash leaves it: half-written, and then counted as spent."""
    path.write_bytes(small[:-1] + byte)
    line = small.count(b"\n")
    try:
        found = ledgers.read(path)
    except LedgerError as error:
        noticed = error.line
    else:
        noticed = found.length + 1 if found.torn and found.ended is None and found.charged()[-1].recovered else None
    assert noticed == line


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null", b'"6.0"'])
def test_a_number_replaced_by_something_else_is_detected(path: Path, small: bytes, number: bytes) -> None:
    lines = small.split(b"\n")
    assert b'"sigma":6.0' in lines[1]
    lines[1] = lines[1].replace(b'"sigma":6.0', b'"sigma":' + number)
    assert _refused(path, b"\n".join(lines)).line == 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_line_is_detected(path: Path, small: bytes, number: int) -> None:
    lines = small.splitlines(keepends=True)
    del lines[number - 1]
    assert _refused(path, b"".join(lines)).line == number


def test_swapped_doubled_and_inserted_lines_are_detected(path: Path, small: bytes) -> None:
    one, two, three, four = small.splitlines(keepends=True)
    assert _refused(path, one + three + two + four).line == 2
    assert _refused(path, one + two + two + three + four).line == 3
    assert _refused(path, one + one + two).line == 2
    assert _refused(path, one + two + b"\n" + three).line == 3
    assert _refused(path, one + two + b'{"n":3}\n' + three).line == 3
    assert _refused(path, one + two + two.replace(b'"n":2', b'"n":3') + three).line == 3


def test_a_line_of_another_ledger_is_detected(tmp_path: Path, path: Path, small: bytes) -> None:
    write(tmp_path / "other", make_header("quantile-clip", steps=2, sigma=7.0), 2)
    other = (tmp_path / "other").read_bytes().splitlines(keepends=True)
    mine = small.splitlines(keepends=True)
    assert _refused(path, mine[0] + mine[1] + other[2] + mine[3]).line == 3
    assert _refused(path, other[0] + mine[1]).line == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        b"hello\n",
        b"{}\n",
        b"[1, 2]\n",
        b"null\n",
        b'"n"\n',
        b'{"n":1,"kind":"header","body":[],"prev":"","hash":""}\n',
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_foreign_file_is_refused_at_line_1(path: Path, data: bytes) -> None:
    assert _refused(path, data).line == 1


def test_a_header_of_another_version_is_refused_as_such(path: Path) -> None:
    body = make_header().to_dict() | {"format_version": 3}
    line, _ = lines.line(1, "header", lines.body_text(body), lines.GENESIS)
    error = _refused(path, line.encode())
    assert error.line == 1
    assert "version" in str(error) and "3" in str(error)


@pytest.mark.parametrize(
    "body", [{}, {"format_version": 1}, {"format_version": 1, "strategy": "baseline"}, [], None, 1]
)
def test_a_chained_header_that_is_none_is_refused(path: Path, body: Any) -> None:
    line, _ = lines.line(1, "header", lines.body_text(body), lines.GENESIS)
    assert _refused(path, line.encode()).line == 1


@pytest.mark.parametrize("body", [{}, {"step": 1}, [], None, 1, {"side": 3}, {"side": [{}]}])
@pytest.mark.parametrize("kind", ["release", "gift"])
def test_a_chained_line_that_is_no_release_is_refused(path: Path, kind: str, body: Any) -> None:
    ledger = write(path, make_header(), 1)
    line, _ = lines.line(3, kind, lines.body_text(body), ledger.head)
    assert _refused(path, path.read_bytes() + line.encode()).line == 3


def test_a_missing_ledger_is_said_to_be_missing(path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger at"):
        ledgers.read(path)


# ---- against the newest checkpoint


def _pinned_run(tmp_path: Path, count: int = 6, pin_at: int = 4) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run")
    header = make_header()
    ledger = Ledger(header, run.ledger)
    for step in range(count):
        ledger.append(make_release(header, step))
        if step + 1 == pin_at:
            ledger.commit()
            facts = {"ledger_length": ledger.length, "ledger_head": ledger.head}
            run.save_checkpoint(step + 1, b"tensors", facts)
    ledger.commit()
    return run


def test_a_ledger_that_goes_on_after_its_checkpoint_is_valid(tmp_path: Path) -> None:
    run = _pinned_run(tmp_path)
    assert len(run.verified_ledger().releases) == 6
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[:5]))
    assert len(run.verified_ledger().releases) == 4


@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("rest", [b"", b'{"n":'])
def test_a_ledger_shorter_than_its_checkpoint_says_is_refused_at_the_first_missing_line(
    tmp_path: Path, kept: int, rest: bytes
) -> None:
    run = _pinned_run(tmp_path)
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[:kept]) + rest)
    with pytest.raises(LedgerError, match=f"line {kept + 1} is missing") as caught:
        run.verified_ledger()
    assert caught.value.line == kept + 1


def test_a_ledger_written_anew_with_a_valid_chain_is_refused_at_the_pinned_line(tmp_path: Path) -> None:
    run = _pinned_run(tmp_path)
    run.ledger.unlink()
    header = make_header()
    ledger = Ledger(header, run.ledger)
    for step in range(8):
        ledger.append(make_release(header, step, sigma=60.0, noise_std=(240.0, 240.0)))
    ledger.commit()
    assert len(ledgers.read(run.ledger).releases) == 8
    with pytest.raises(LedgerError, match="has been rewritten") as caught:
        run.verified_ledger()
    assert caught.value.line == 5


def test_the_newest_of_several_checkpoints_counts(tmp_path: Path) -> None:
    run = _pinned_run(tmp_path, count=4, pin_at=2)
    contents = run.verified_ledger()
    facts = {"ledger_length": contents.length, "ledger_head": contents.head}
    run.save_checkpoint(4, b"tensors", facts)
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[:4]))
    with pytest.raises(LedgerError) as caught:
        run.verified_ledger()
    assert caught.value.line == 5


# ---- a half-written last line


PLANS: dict[str, dict[str, Any]] = {
    "constant": {"strategy": "baseline"},
    "decaying sigma": {"strategy": "dyn-sigma"},
    "decaying sigma, linear": {"strategy": "dyn-sigma", "sigma_decay": "linear", "sigma_end": 0.5},
    "rising and falling sigma": {"strategy": "dyn-sigma", "sigma_decay": "cyclic", "sigma_end": 0.5},
    "decaying clip": {"strategy": "dyn-s-decay"},
    "decaying clip, fixed variance": {"strategy": "dyn-s-decay", "fixed_variance": True},
    "both decaying": {"strategy": "dyn-sigma-decay"},
    "whitened": {"strategy": "adaclip"},
}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("taken", [0, 1, 7, 19])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_half_written_line_is_recognised_and_charged_at_no_more_than_the_planned_noise(
    path: Path, plan: str, taken: int, share: float
) -> None:
    header = make_header(**PLANS[plan])
    write(path, header, taken)
    planned = make_release(header, taken)
    line = (json.dumps({"n": taken + 2, "kind": "release", "body": planned.to_dict()}) + "\n").encode()
    with open(path, "ab") as file:
        file.write(line[: max(1, int(share * len(line)))])
    found = ledgers.read(path)
    assert found.torn
    assert len(found.releases) == taken
    recovered = found.charged()[-1]
    assert recovered.recovered and recovered.step == taken
    assert 0 < recovered.multiplier <= planned.multiplier * (1 + 1e-12)
    least = proved_epsilon(header, (*found.releases, planned), accountant="RDP").epsilon
    assert proved_epsilon(header, found.charged(), accountant="RDP").epsilon >= least * (1 - 1e-12)

    resumed = Ledger.resume(path, header)
    repaired = ledgers.read(path)
    assert not repaired.torn
    assert repaired.releases == found.charged() == tuple(resumed.releases)
    assert b'"repaired":true' in path.read_bytes()
    assert sum(r.recovered for r in repaired.releases) == 1


def test_a_half_written_first_release_of_a_strategy_with_side_releases_charges_them_too(tmp_path: Path) -> None:
    """The counts of quantile clipping are a release of their own; a line that is lost held them."""
    engine, model, optimizer, loader = live_engine(tmp_path, strategy="quantile-clip")
    take_steps(model, optimizer, loader, 1)
    engine.commit()
    path = tmp_path / ledgers.FILE_NAME
    whole = ledgers.read(path)
    path.write_bytes(path.read_bytes()[:-40])
    torn = ledgers.read(path)
    assert torn.torn and torn.releases == ()
    assert torn.charged()[0].multiplier <= whole.releases[0].multiplier


@pytest.mark.parametrize("end", [3.0, 0.5, 0.3])
def test_a_half_written_end_line_costs_a_release_with_noise(path: Path, end: float) -> None:
    """After the last declared step a schedule goes on falling, below zero even; the charge must stay finite."""
    header = make_header("dyn-sigma", steps=10, sigma_decay="linear", sigma_end=end)
    write(path, header, 10).end("finished")
    path.write_bytes(path.read_bytes()[:-10])
    found = ledgers.read(path)
    assert found.torn and found.ended is None
    assert found.charged()[-1].multiplier > 0
    assert proved_epsilon(header, found.charged(), accountant="RDP").epsilon < float("inf")


def test_repairing_twice_charges_twice_and_an_unharmed_ledger_is_not_repaired(path: Path) -> None:
    header = make_header()
    write(path, header, 3)
    Ledger.resume(path, header)
    assert len(ledgers.read(path).releases) == 3
    for count in (4, 5):
        with open(path, "ab") as file:
            file.write(b'{"n":')
        Ledger.resume(path, header)
        assert len(ledgers.read(path).releases) == count
    assert statement(header, ledgers.read(path).releases).steps_recovered == 2


def test_a_half_written_line_stays_charged_when_the_repair_is_cut_short(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = make_header()
    write(path, header, 3)
    with open(path, "ab") as file:
        file.write(b'{"n":')

    def killed(self: Ledger) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            Ledger.resume(path, header)
    assert len(ledgers.read(path).charged()) == 4
