"""What a run has spent, taken along in a checkpoint and charged to the run that goes on from it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.accounting import ledger as ledgers
from gradveil.accounting import proved_epsilon
from gradveil.accounting.ledger import Ledger
from gradveil.errors import LedgerError
from gradveil.mechanism.records import Release, RunHeader
from made_ledgers import COUNTS, make_header, make_release


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ledgers.FILE_NAME


def plain(header: RunHeader) -> list[Release]:
    return [make_release(header, t, nonce=f"{t:032x}") for t in range(12)]


def with_counts(header: RunHeader) -> list[Release]:
    """Bounds that move by themselves, each group on its own."""
    sides = [replace(COUNTS, values=(t / 3, -t / 7)) for t in range(12)]
    clips = [(4.0 + t / 10, 1 / (t + 1)) for t in range(12)]
    return [
        make_release(header, t, side=(sides[t],), sensitivity=clips[t], noise_std=tuple(6 * c for c in clips[t]))
        for t in range(12)
    ]


def mixed(header: RunHeader) -> list[Release]:
    """Went back to a checkpoint, lost a line in a crash, was fed a batch of its own, and has digests."""
    seeded = [make_release(header, t, digest=f"{t:032x}") for t in (0, 1, 2, 3, 2, 3, 4)]
    lost = make_release(header, 5, recovered=True, sigma=5.5, noise_std=(22.0, 22.0))
    return [*seeded, lost, make_release(header, 5, sampler="unknown", scale_is_public=False)]


CASES: dict[str, tuple[str, Any]] = {
    "constant": ("baseline", plain),
    "decaying": ("dyn-sigma-decay", plain),
    "quantile clip": ("quantile-clip", with_counts),
    "mixed": ("baseline", mixed),
    "nothing": ("baseline", lambda header: []),
}


def spent_by(strategy: str, releases: Any, path: Path | None = None) -> tuple[Ledger, dict[str, Any]]:
    header = make_header(strategy)
    ledger = Ledger(header, path)
    for release in releases(header):
        ledger.append(release)
    return ledger, ledger.export_spent()


def bare(releases: Any) -> list[Release]:
    return [replace(release, nonce=None) for release in releases]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("on_disk", [True, False])
def test_what_was_spent_is_charged_to_the_run_that_goes_on(
    tmp_path: Path, path: Path, case: str, on_disk: bool
) -> None:
    origin, spent = spent_by(*CASES[case], tmp_path / "origin" if on_disk else None)
    spent = json.loads(json.dumps(spent))  # as a checkpoint keeps it
    fresh = Ledger(origin.header, path)
    fresh.import_spent(spent)
    assert fresh.releases == bare(origin.releases)
    found = ledgers.read(path)
    assert list(found.releases) == fresh.releases
    ((kind, note),) = found.notes
    assert kind == "spent"
    assert (note["ledger_head"], note["ledger_length"]) == (origin.head, origin.length)
    if fresh.releases and case != "mixed":
        fresh.append(make_release(fresh.header, 12))
        epsilons = [
            proved_epsilon(fresh.header, releases, accountant="RDP").epsilon
            for releases in ((*origin.releases, make_release(fresh.header, 12)), ledgers.read(path).releases)
        ]
        assert epsilons[0] == epsilons[1] < float("inf")


def test_importing_the_same_again_changes_nothing(path: Path) -> None:
    origin, spent = spent_by("baseline", mixed)
    fresh = Ledger(origin.header, path)
    fresh.import_spent(spent)
    fresh.append(make_release(fresh.header, 6))
    before = path.read_bytes()
    fresh.import_spent(spent)
    assert path.read_bytes() == before
    again = Ledger.resume(path, fresh.header)
    again.import_spent(spent)
    assert len(again.releases) == len(origin.releases) + 1


@pytest.mark.parametrize("cut", [1, 40, 200, 500, 800])
@pytest.mark.parametrize("releases", [plain, mixed])
def test_an_import_that_a_kill_cut_short_must_be_completed(path: Path, cut: int, releases: Any) -> None:
    origin, spent = spent_by("baseline", releases)
    Ledger(origin.header, path).import_spent(spent)
    path.write_bytes(path.read_bytes()[:-cut])
    resumed = Ledger.resume(path, origin.header)  # a half-written line is charged besides
    if len(resumed.releases) < len(origin.releases):
        with pytest.raises(LedgerError, match="Load the checkpoint again"):
            resumed.append(make_release(origin.header, 12))
    resumed.import_spent(spent)
    resumed.append(make_release(origin.header, 12))
    kept = list(ledgers.read(path).releases)
    for release in bare(origin.releases):
        kept.remove(release)
    assert [r.recovered for r in kept] in ([False], [True, False])


def test_a_run_with_releases_of_its_own_takes_no_others(path: Path) -> None:
    origin, spent = spent_by("baseline", plain)
    fresh = Ledger(origin.header, path)
    fresh.append(make_release(fresh.header, 0, sigma=7.0))
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="new engine"):
        fresh.import_spent(spent)
    other = Ledger(origin.header)
    other.import_spent(spent_by("baseline", mixed)[1])
    with pytest.raises(LedgerError, match="another checkpoint"):
        other.import_spent(spent)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("fact", "change"),
    [
        ("population", {"population": 2000}),
        ("sampling", {"sampling": "shuffle"}),
        ("sample_rate", {"sample_rate": 0.06}),
        ("groups", {"groups": ("all",)}),
        ("delta", {"delta": 1e-6}),
        ("guarantee", {"guarantee": "paper-only"}),
    ],
)
def test_a_run_that_disagrees_about_a_fact_is_refused(path: Path, fact: str, change: dict[str, Any]) -> None:
    origin, spent = spent_by("baseline", plain)
    fresh = Ledger(replace(origin.header, **change), path)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=f"had {fact} = "):
        fresh.import_spent(spent)
    assert path.read_bytes() == before
    longer = Ledger(replace(origin.header, steps=40, strategy="dyn-sigma"))  # may be others
    longer.import_spent(spent)


def _set(*keys: Any, to: Any) -> Any:
    def change(spent: dict[str, Any]) -> None:
        for key in keys[:-1]:
            spent = spent[key]
        spent[keys[-1]] = to

    return change


DAMAGE = {
    "sigma raised": _set("columns", "sigma", to={"runs": [[60.0, 12]]}),
    "a release less": _set("releases", to=11),
    "population": _set("header", "population", to=10**6),
    "no columns": lambda spent: spent.pop("columns"),
    "no checksum": lambda spent: spent.pop("sha256"),
    "another format": _set("format", to="gradveil-spent-2"),
    "not a number": _set("columns", "sigma", to=float("nan")),
    "not JSON": _set("columns", to={1, 2}),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_record_is_refused(path: Path, damage: str) -> None:
    origin, spent = spent_by("baseline", plain)
    DAMAGE[damage](spent)
    fresh = Ledger(origin.header, path)
    with pytest.raises(LedgerError, match="damaged"):
        fresh.import_spent(spent)
    assert ledgers.read(path).length == 1


@pytest.mark.parametrize("not_a_record", [{}, [], None, "spent", 3])
def test_what_is_no_record_is_refused(not_a_record: Any) -> None:
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(make_header()).import_spent(not_a_record)


def test_long_runs_are_exported_in_little_space() -> None:
    sizes = {}
    for strategy in ("baseline", "dyn-sigma-decay"):
        header = make_header(strategy, steps=10_000, groups=6)
        ledger = Ledger(header)
        for t in range(10_000):
            ledger.append(make_release(header, t, nonce=f"{t:032x}"))
        spent = ledger.export_spent()
        sizes[strategy] = len(json.dumps(spent))
        again = Ledger(header)
        again.import_spent(copy.deepcopy(spent))
        assert again.releases == bare(ledger.releases)
    assert sizes["baseline"] < 2_000
    assert sizes["dyn-sigma-decay"] < 800_000
