"""The ledger: what is in it, and that it is on disk before results are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from gradveil.accounting import _ledger_lines as lines
from gradveil.accounting import ledger as ledgers
from gradveil.accounting.ledger import Ledger
from gradveil.engine import PrivacyEngine
from gradveil.errors import ConfigError, LedgerError, RunDirectoryError
from made_ledgers import COUNTS, live_engine, make_header, make_release, take_steps, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ledgers.FILE_NAME


# ---- what goes in comes out


def test_what_was_appended_and_committed_is_read_back_equal(path: Path) -> None:
    header = make_header("quantile-clip")
    ledger = Ledger(header, path)
    releases = [
        make_release(header, 0, side=(COUNTS,)),
        make_release(header, 1, sampler="unknown", scale_is_public=False, sigma=1 / 3, noise_std=(0.1, 1e-300)),
        make_release(header, 2, recovered=True, side=(COUNTS, COUNTS)),
    ]
    for release in releases:
        ledger.append(release)
    ledger.commit()
    found = ledgers.read(path)
    assert found.header == header
    assert found.releases == tuple(releases)
    assert (found.length, found.head, found.torn, found.ended) == (4, ledger.head, False, None)
    assert len(found.hashes) == 4 and found.hashes[-1] == ledger.head
    assert found.charged() == tuple(releases)


@pytest.mark.parametrize(
    "strategy", ["baseline", "dyn-s-decay", "dyn-sigma", "dyn-s-sigma", "quantile-clip", "adaclip"]
)
def test_every_strategys_header_is_read_back_equal(path: Path, strategy: str) -> None:
    header = make_header(strategy)
    Ledger(header, path)
    assert ledgers.read(path).header == header


def test_the_end_of_a_run_is_read_back_and_nothing_follows_it(path: Path) -> None:
    ledger = write(path, make_header(), 2)
    ledger.end("finished")
    found = ledgers.read(path)
    assert found.ended == "finished"
    assert len(found.releases) == 2
    with pytest.raises(LedgerError, match="ended"):
        ledger.append(make_release(ledger.header, 2))
    assert ledgers.read(path) == found


def test_a_resumed_run_has_not_ended(path: Path) -> None:
    header = make_header()
    write(path, header, 2)
    Ledger.resume(path, header).append(make_release(header, 2))
    assert ledgers.read(path).ended is None


def test_a_release_that_is_not_a_number_never_gets_into_the_file(path: Path) -> None:
    ledger = write(path, make_header(), 1)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="not a finite number"):
        ledger.append(make_release(ledger.header, 1, sigma=float("nan")))
    assert path.read_bytes() == before


def test_a_ledger_is_never_overwritten(path: Path) -> None:
    write(path, make_header(), 3)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Ledger(make_header(), path)
    with pytest.raises(RunDirectoryError, match="never"):
        PrivacyEngine(strategy="baseline", clip=1.0, sigma=1.0, steps=3, run_dir=path.parent)
    assert path.read_bytes() == before


def test_a_ledger_that_another_process_wrote_to_is_not_written_to(path: Path) -> None:
    header = make_header()
    first = write(path, header, 2)
    second = Ledger.resume(path, header)
    second.append(make_release(header, 2))
    second.commit()
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerError, match="another process"):
            first.append(make_release(header, 2))
    assert len(first.releases) == 2
    assert path.read_bytes() == before
    assert ledgers.read(path).head == second.head


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("strategy", {"strategy": "dyn-s-decay"}),
        ("groups", {"groups": 3}),
        ("steps", {"steps": 21}),
        ("plan", {"sigma": 6.5}),
    ],
)
def test_a_ledger_is_not_resumed_under_other_settings(path: Path, field: str, change: dict[str, Any]) -> None:
    header = make_header()
    write(path, header, 3)
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match=field):
        Ledger.resume(path, make_header(**change))
    assert path.read_bytes() == before


# ---- on disk before anything is handed out


def test_commit_returns_after_the_bytes_are_in_the_file_and_fsynced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = make_header()
    ledger = Ledger(header, path)
    seen: list[tuple[int, int]] = []
    real = os.fsync

    def watch(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_ino, path.read_bytes().count(b"\n")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    ledger.append(make_release(header, 0))
    assert seen == []
    ledger.commit()
    assert seen == [(path.stat().st_ino, 2)]
    ledger.commit()
    assert len(seen) == 1, "nothing new, nothing to write"
    assert ledgers.read(path).releases == (make_release(header, 0),)


def test_a_release_is_in_the_file_when_append_returns(path: Path) -> None:
    header = make_header(steps=2000)
    ledger = Ledger(header, path)
    for step in range(30):
        ledger.append(make_release(header, step))
        assert [r.step for r in ledgers.read(path).releases] == list(range(step + 1))


def test_a_commit_interrupted_in_its_fsync_leaves_a_valid_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_header()
    ledger = write(path, header, 1)
    real = os.fsync

    def interrupted(descriptor: int) -> None:
        real(descriptor)
        raise KeyboardInterrupt

    ledger.append(make_release(header, 1))
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.commit()
    monkeypatch.setattr(os, "fsync", real)
    with contextlib.suppress(LedgerError):
        ledger.commit()  # what happens at exit
    assert [r.step for r in ledgers.read(path).releases] == [0, 1]


HANDED_OUT = {
    "engine.state_dict": lambda engine, model: engine.state_dict(),
    "engine.statement": lambda engine, model: engine.statement(),
    "model.state_dict": lambda engine, model: model.state_dict(),
}


@pytest.mark.parametrize("what", list(HANDED_OUT))
def test_the_ledger_is_on_disk_when_something_is_handed_out(tmp_path: Path, path: Path, what: str) -> None:
    engine, model, optimizer, loader = live_engine(tmp_path)
    take_steps(model, optimizer, loader, 3)
    handed = HANDED_OUT[what](engine, model)
    found = ledgers.read(path)
    assert [r.step for r in found.releases] == [0, 1, 2]
    assert found.releases == engine.releases
    if what == "engine.state_dict":
        assert (handed["ledger_length"], handed["ledger_head"]) == (found.length, found.head)


@pytest.mark.parametrize("what", list(HANDED_OUT))
def test_nothing_is_handed_out_when_the_ledger_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine, model, optimizer, loader = live_engine(tmp_path)
    take_steps(model, optimizer, loader, 1)
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        HANDED_OUT[what](engine, model)
    monkeypatch.setattr(os, "fsync", real)


# ---- lines that are no releases


def test_a_digest_that_follows_is_read_into_its_release(path: Path) -> None:
    header = make_header()
    ledger = Ledger(header, path)
    for step in (0, 1, 0):  # went back to a checkpoint
        ledger.append(make_release(header, step))
    ledger.add_digest(0, "ab" * 16)
    ledger.add_digest(0, "ab" * 16)  # again, after an interrupt: not written twice
    assert [r.digest for r in ledger.releases] == [None, None, "ab" * 16]
    found = ledgers.read(path)
    assert list(found.releases) == ledger.releases
    assert (found.length, found.head) == (5, ledger.head)
    resumed = Ledger.resume(path, header)
    resumed.add_digest(1, "cd" * 16)
    assert [r.digest for r in ledgers.read(path).releases] == [None, "cd" * 16, "ab" * 16]
    with pytest.raises(LedgerError, match="cannot become"):
        resumed.add_digest(0, "ef" * 16)
    with pytest.raises(LedgerError, match="no release"):
        resumed.add_digest(7, "ef" * 16)


@pytest.mark.parametrize("body", [{"step": 4, "digest": "a"}, {"step": 0}, {"step": 0, "digest": 1}, {}, {"step": []}])
def test_a_digest_of_nothing_is_refused_on_its_line(path: Path, body: dict[str, Any]) -> None:
    ledger = write(path, make_header(), 1)
    line, _ = lines.line(3, "digest", lines.body_text(body), ledger.head)
    with open(path, "a") as file:
        file.write(line)
    with pytest.raises(LedgerError, match="line 3") as caught:
        ledgers.read(path)
    assert caught.value.line == 3


def test_notes_are_read_back_in_their_order(path: Path) -> None:
    header = make_header()
    ledger, memory = Ledger(header, path), Ledger(header)
    evidence = {"largest": 1e-7, "layers": ["a", "b"]}
    for one in (ledger, memory):
        one.note("check", evidence)
        one.append(make_release(header, 0))
        one.note("public", {"examples": 10, "pair": (1, 2)})
    evidence["largest"] = 0.0  # of no consequence
    expected = (
        ("check", {"largest": 1e-7, "layers": ["a", "b"]}),
        ("public", {"examples": 10, "pair": [1, 2]}),
    )
    found = ledgers.read(path)
    assert found.notes == ledger.notes == memory.notes == expected
    assert (found.length, found.head) == (memory.length, memory.head)
    assert Ledger.resume(path, header).notes == expected


def test_a_note_of_unknown_kind_or_content_is_refused(path: Path) -> None:
    ledger = write(path, make_header(), 1)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"'chek'.*'check'"):
        ledger.note("chek", {})
    for body in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(LedgerError, match="not JSON"):
            ledger.note("check", body)
    assert path.read_bytes() == before


# ---- older and newer releases


def test_a_ledger_of_version_0_1_verifies_and_goes_on(path: Path) -> None:
    old = Path(__file__).with_name("ledger_of_version_0_1.jsonl").read_bytes()
    path.write_bytes(old)
    found = ledgers.read(path)
    assert [(r.step, r.digest, r.recovered, r.nonce) for r in found.releases] == [
        (0, None, False, None),
        (1, "ab" * 16, False, None),
        (2, None, True, None),
    ]
    assert found.releases[0].side == (COUNTS,)
    assert (found.ended, found.notes) == ("finished", ())
    Ledger.resume(path, found.header).append(make_release(found.header, 2, nonce="0f" * 16))
    assert path.read_bytes().startswith(old)
    assert ledgers.read(path).releases[-1].nonce == "0f" * 16


def test_what_a_release_does_not_have_takes_no_space_in_its_line(path: Path) -> None:
    header = make_header()
    ledger = write(path, header, 1)
    assert b"null" not in path.read_bytes().splitlines()[1]
    ledger.append(make_release(header, 1, nonce="a1" * 16, digest="b2" * 16, sensitivity=(4.0, 3), noise_std=()))
    found = ledgers.read(path).releases[1]
    assert (found.nonce, found.digest, found.sensitivity, found.noise_std) == ("a1" * 16, "b2" * 16, (4.0, 3), ())
