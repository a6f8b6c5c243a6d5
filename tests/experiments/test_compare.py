"""Verdicts in words follow from the figures."""

from __future__ import annotations

import pytest

from gradveil.experiments.compare import Claim, Entry, Report, Table


def entry(published, measured, **settings):
    return Entry(where={"set": "mnist"}, published=published, measured=measured, **settings)


@pytest.mark.parametrize(
    ("published", "measured", "verdict"),
    [
        (0.960, [0.9605], "agrees"),
        (0.960, [0.966], "agrees"),
        (0.960, [0.967], "higher"),
        (0.960, [0.950], "lower"),
        (0.960, [0.94, 0.98], "agrees"),  # seeds that differ so much say nothing against it
        (None, [0.9], "nothing published"),
        (0.960, [], "not measured"),
    ],
)
def test_a_verdict(published, measured, verdict):
    assert entry(published, measured, tolerance=0.006).verdict == verdict


def test_an_entry_says_why_nothing_was_measured():
    assert entry(5419, [], missing="never reached").cells()[-1] == "never reached"


def test_mean_spread_and_difference():
    row = entry(0.5, [0.6, 0.8], digits=2, beside={"proved epsilon": "1.116"})
    assert row.cells() == ["mnist", "0.50", "0.70", "0.14", "+0.20", "agrees", "1.116"]
    assert entry(0.5, [0.7], digits=2).cells() == ["mnist", "0.50", "0.70", "-", "+0.20", "higher"]
    assert row.to_dict()["difference"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("readings", "verdict"),
    [
        ({"example": True, "batch": True}, "holds"),
        ({"example": False, "batch": True}, "holds only in this reading: batch"),
        ({"example": False, "batch": False}, "does not hold"),
        ({"example": None, "batch": None}, "not measured"),
        ({"example": None, "batch": True}, "holds"),
    ],
)
def test_a_claim_is_judged_by_reading(readings, verdict):
    assert Claim.judged("1", "something is so", readings, "3 of 4").verdict == verdict


def test_a_report_as_markdown_and_as_plain_data():
    rows = [entry(0.5, [0.7], digits=2)]
    claim = Claim.judged("1", "something is so", {"all": False}, "0 of 1")
    report = Report(tables=[Table.of("Accuracy", rows, "A note.")], entries=rows, claims=[claim])
    text = report.to_markdown()
    assert "| set | published | measured | spread | difference | verdict |" in text
    assert "| mnist | 0.50 | 0.70 | - | +0.20 | higher |" in text
    assert "A note." in text
    assert "| 1 | something is so | does not hold | 0 of 1 |" in text
    assert report.to_dict()["claims"][0]["verdict"] == "does not hold"
