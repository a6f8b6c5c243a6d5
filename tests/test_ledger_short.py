"""Releases written as what they do not share with the one before; very many of them in little memory."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.accounting import _ledger_lines as lines
from gradveil.accounting import ledger as ledgers
from gradveil.accounting import proved_epsilon, statement
from gradveil.accounting._events import Unbounded, release_charges
from gradveil.accounting._next_release import following, next_nonce, stated
from gradveil.accounting._release_table import ReleaseTable
from gradveil.accounting.ledger import Ledger
from gradveil.errors import LedgerError
from gradveil.mechanism.records import Release, RunHeader
from made_ledgers import COUNTS, make_header, make_release, write

HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)
POSITIVE = st.sampled_from([0.0, 0.1, 1.0, 4.0, 6.0, 1 / 3, 1e-9]) | st.floats(min_value=0, max_value=1e9)


def _words() -> st.SearchStrategy[str | None]:
    return st.none() | HEX | st.sampled_from(["", "a", "ab-9", "ab-10", "x" * 32]) | HEX.map(lambda h: f"{h}-7")


@st.composite
def releases(draw: st.DrawFn) -> Release:
    groups = draw(st.integers(1, 3))
    clip = draw(POSITIVE.map(lambda c: (c,) * groups) | st.tuples(*[POSITIVE] * groups))
    sensitivity = clip if draw(st.booleans()) else draw(st.tuples(*[POSITIVE] * groups))
    sigma = draw(POSITIVE)
    noise = tuple(sigma * s for s in sensitivity) if draw(st.booleans()) else draw(st.tuples(*[POSITIVE] * groups))
    return Release(
        step=draw(st.integers(0, 5)),
        sampler=draw(st.sampled_from(["poisson", "unknown"])),
        sample_rate=0.05,
        expected_batch_size=50.0,
        clip=clip,
        sensitivity_rule=draw(st.sampled_from(["clip", "l2max-example"])),
        sensitivity=sensitivity,
        sigma=sigma,
        noise_std=noise,
        scale_is_public=draw(st.booleans()),
        side=draw(st.sampled_from([(), (COUNTS,)])),
        digest=draw(_words()),
        recovered=draw(st.booleans()),
        nonce=draw(_words()),
    )


@given(releases(), releases())
def test_what_is_stated_gives_the_release_back(before: Release, release: Release) -> None:
    told = json.loads(json.dumps(stated(before, release)))
    assert following(before, told) == release


@given(st.lists(releases(), max_size=6))
def test_a_table_is_equal_to_its_releases(made: list[Release]) -> None:
    table = ReleaseTable(made)
    assert table == made and list(table) == made and len(table) == len(made)
    assert [table[i] for i in range(len(made))] == made and table[1:] == tuple(made[1:])
    assert [r.multiplier for r in table] == [r.multiplier for r in made]
    assert list(table.steps()) == [r.step for r in made] and list(table.sigmas()) == [r.sigma for r in made]
    grown = ReleaseTable(made[:1])
    for before, release in itertools.pairwise(made):
        grown.follow(stated(before, release))
    assert grown == made
    assert sum(len(sigmas) for _, sigmas in table.stretches()) == len(made)


@given(st.lists(releases(), min_size=1, max_size=5))
def test_a_table_is_charged_as_its_releases_are(made: list[Release]) -> None:
    header = make_header()
    expected, found = _charges(header, made), _charges(header, ReleaseTable(made))
    if isinstance(expected, str):
        assert found == expected
        return
    assert [m for m, _ in found] == [m for m, _ in expected]
    assert [z for _, z in found] == pytest.approx([z for _, z in expected], rel=1e-14)


def _charges(header: RunHeader, made: Sequence[Release]) -> Any:
    """Or why there are none."""
    try:
        return release_charges(header, made)
    except Unbounded as error:
        return str(error)


@pytest.mark.parametrize("strategy", ["baseline", "dyn-sigma", "dyn-s-decay", "quantile-clip"])
def test_the_statement_of_a_table_is_that_of_its_releases(strategy: str) -> None:
    header = make_header(strategy, steps=200)
    made = [make_release(header, t) for t in range(150)]
    told, expected = statement(header, ReleaseTable(made)), statement(header, made)
    assert told.proved.epsilon == pytest.approx(expected.proved.epsilon, rel=1e-9)
    assert str(told) == str(expected)


def test_a_table_can_grow_while_another_goes_on() -> None:
    header = make_header()
    table = ReleaseTable([make_release(header, 0)])
    longer = table.plus(make_release(header, 1))
    assert len(table) == 1 and [r.step for r in longer] == [0, 1]
    table.add_digest(0, "ab" * 16)
    assert table[0].digest == "ab" * 16 and longer[0].digest is None


# ---- in the file


@pytest.mark.parametrize("strategy", ["baseline", "dyn-sigma"])
def test_a_release_takes_at_most_120_bytes_after_a_million(strategy: str) -> None:
    header = make_header(strategy, steps=1_000_000, groups=20)
    made = [make_release(header, t, nonce=hashlib.md5(b"%d" % t).hexdigest()) for t in range(999_900, 1_000_000)]
    wording = lines.Wording(header, length=1_000_000, head=lines.GENESIS, last=made[0])
    assert sum(len(wording.line("release", release)) for release in made[1:]) <= 120 * 99


def test_an_ordinary_step_is_one_short_line_and_read_back(tmp_path: Path) -> None:
    path, header = tmp_path / ledgers.FILE_NAME, make_header(steps=6)
    made = [make_release(header, t, nonce=f"{t:032x}") for t in range(3)]
    made += [make_release(header, 3, nonce=f"{'0' * 32}-5"), make_release(header, 4, nonce=f"{'0' * 32}-6")]
    made += [replace(make_release(header, 4, digest="ab" * 16), recovered=True, side=(COUNTS,))]
    ledger = Ledger(header, path)
    for release in made:
        ledger.append(release)
    raw = path.read_text().splitlines()
    assert [json.loads(line)[1].keys() for line in raw[3:4]] == [{"nonce64"}]
    assert json.loads(raw[5])[1] == {}
    assert ledgers.read(path).releases == made
    assert ledgers.read(path).head == ledger.head == ledgers.read(path).hashes[-1]


def test_a_ledger_of_the_first_format_goes_on_in_it(tmp_path: Path) -> None:
    path = tmp_path / ledgers.FILE_NAME
    header = replace(make_header(), format_version=1)
    write(path, header, 3)
    assert b"\n[" not in path.read_bytes()
    Ledger.resume(path, header).append(make_release(header, 3))
    assert b"\n[" not in path.read_bytes() and len(ledgers.read(path).releases) == 4
    short, _ = lines.line(7, "next", "{}", ledgers.read(path).head)
    path.write_bytes(path.read_bytes() + short.encode())
    with pytest.raises(LedgerError, match="line 7 is not of the format"):
        ledgers.read(path)


def test_ledgers_in_memory_and_on_disk_have_the_same_head(tmp_path: Path) -> None:
    header = make_header()
    on_disk, in_memory = write(tmp_path / ledgers.FILE_NAME, header, 5), Ledger(header)
    for release in on_disk.releases:
        in_memory.append(release)
        assert len(in_memory.head) == 64
    assert in_memory.head == on_disk.head


NONSENSE = [
    '{"step":-1}',
    '{"step":1.5}',
    '{"step":true}',
    '{"step":9007199254740993}',
    '{"step":' + "9" * 5000 + "}",
    '{"sigma":"x"}',
    '{"sigma":null}',
    '{"sigma":NaN}',
    '{"sigma":1e999}' + "",
    '{"sigma":' + "9" * 400 + "}",
    '{"clip":[[]]}',
    '{"clip":{}}',
    '{"noise_std":["a"]}',
    '{"side":[{"name":"x"}]}',
    '{"side":3}',
    '{"nonce64":"short"}',
    '{"nonce64":3}',
    '{"nonce64":"//////////////////////"}',
    '{"nonce64":"AAAAAAAAAAAAAAAAAAAAAA","nonce":"x"}',
    '{"digest":3}',
    '{"recovered":0}',
    '{"unheard":1}',
    "[]",
    "3",
    "null",
    "{",
    '{"a":' * 3000 + "1" + "}" * 3000,
    "",
]


@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
def test_a_chained_line_that_makes_no_sense_is_refused_or_proves_nothing(tmp_path: Path, body: str) -> None:
    path, header = tmp_path / ledgers.FILE_NAME, make_header()
    ledger = write(path, header, 2)
    text, _ = lines.line(4, "next", body, ledger.head)
    path.write_bytes(path.read_bytes() + text.encode())
    if body in ('{"sigma":1e999}',):  # JSON, and a float: a release without a finite noise
        assert proved_epsilon(header, ledgers.read(path).releases).epsilon == float("inf")
        return
    with pytest.raises(LedgerError) as caught:
        ledgers.read(path)
    assert caught.value.line == 4 and len(str(caught.value)) < 300


def test_a_short_line_before_any_release_or_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ledgers.FILE_NAME
    text, _ = lines.line(1, "next", "{}", lines.GENESIS)
    path.write_text(text)
    with pytest.raises(LedgerError, match="line 1"):
        ledgers.read(path)
    ledger = Ledger(make_header(), other := tmp_path / "other")
    text, _ = lines.line(2, "next", "{}", ledger.head)
    other.write_text(other.read_text() + text)
    with pytest.raises(LedgerError, match="no release is before it"):
        ledgers.read(other)


def test_short_lines_that_are_missing_doubled_or_changed_are_named(tmp_path: Path) -> None:
    path = tmp_path / ledgers.FILE_NAME
    write(path, make_header(), 6, nonce="ab" * 16)
    whole = path.read_bytes().splitlines(keepends=True)
    for changed, line, why in (
        ([*whole[:4], *whole[5:]], 5, "missing, doubled or moved"),
        ([*whole[:5], whole[4], *whole[5:]], 6, "missing, doubled or moved"),
        ([*whole[:4], whole[4].replace(b"q", b"r", 1), *whole[5:]], 5, "was changed"),
        ([*whole[:4], whole[4].replace(b"[5,", b"[05,"), *whole[5:]], 5, "line 5"),
        ([*whole[:4], whole[4].replace(b"[5,", b"[5, "), *whole[5:]], 5, "was changed"),
        ([*whole[:4], b"[]\n", *whole[5:]], 5, "not a ledger entry"),
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(LedgerError, match=why) as caught:
            ledgers.read(path)
        assert caught.value.line == line


def test_nonces_of_a_series_count_on() -> None:
    assert next_nonce("ab-1") == "ab-2" and next_nonce("ab") is None and next_nonce(None) is None
    assert next_nonce("ab-" + "9" * 40) is None and next_nonce("ab-²") is None
    assert base64.urlsafe_b64encode(bytes(16))[:22] == b"A" * 22


def test_a_header_that_declares_more_steps_than_can_be_charged_proves_nothing() -> None:
    header = replace(make_header(), steps=10**15)
    found = proved_epsilon(header, [make_release(header, 0)])
    assert found.epsilon == float("inf") and "are charged one by one" in str(found.reason)
