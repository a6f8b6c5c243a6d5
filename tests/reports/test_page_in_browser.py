"""The page in a real browser, at the width of a desk and of a telephone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradveil import api
from gradveil.reports.facts import read_run
from gradveil.reports.page import write_page
from small_runs import damaged, trained

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: the page is not looked at in a browser")

PROBE = (Path(__file__).parent / "probe.js").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """One of everything."""
    where = tmp_path_factory.mktemp("page")
    runs = [
        trained(where / "baseline-with-a-rather-long-name-2026-11-15", strategy="baseline", evaluate_every=1),
        trained(where / "dyn-s-sigma", strategy="dyn-s-sigma", evaluate_every=1),
        trained(where / "non-private", strategy="non-private"),
        damaged(trained(where / "damaged", strategy="baseline")),
    ]
    api.attack(runs[0], attack="cpl", victims=2, iterations=12)
    write_page([read_run(run) for run in runs], where / "report.html", examples=2)
    return where / "report.html"


def browse(page, *, width, tmp_path, options=()):
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += ["--disable-background-networking", "--no-first-run", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=3000"]
    return subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)


def probed(page, *, width, tmp_path):
    """What the probe found: in a copy without the policy that lets no foreign script run."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    # In a frame of its own, because a window cannot be as narrow as a telephone.
    inner = text.replace("</body>", f"<script>{PROBE}</script></body>")
    outer = tmp_path / "probe.html"
    outer.write_text(
        f'<!doctype html><body style="margin:0"><iframe width="{width}" height="900" style="border:0" '
        f'srcdoc="{html.escape(inner)}"></iframe><pre id="found"></pre>'
        '<script>addEventListener("message", (e) => { document.querySelector("pre").textContent = e.data; });</script>'
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', browse(outer, width=1280, tmp_path=tmp_path).stdout, re.DOTALL)
    assert found, "the probe did not report"
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_or_lies_on_other_text_and_controls_work(page, tmp_path, width):
    found = probed(page, width=width, tmp_path=tmp_path)
    assert found["errors"] == []
    assert found["width"] == width
    assert found["scrollWidth"] <= width
    assert found["requests"] == []
    assert found["texts"] > 200
    assert found["overlaps"] == []
    assert found["sorted"]["accuracy"] == sorted(found["sorted"]["accuracy"])
    assert found["sorted"]["state"] == ["ascending", "descending", "none"]
    assert found["print"] == [12, 0, 12]  # details that are folded: now, while printing, and after it
    first, last = found["slider"]
    assert first["shown"] == "iteration 0" and last["shown"] == "iteration 10"
    assert set(first["at"]) == {0} and set(last["at"]) == {10}


def test_the_page_as_it_is_has_no_complaints(page, tmp_path):
    done = browse(page, width=1280, tmp_path=tmp_path)
    assert "CONSOLE" not in done.stderr
    assert "<h1>" in done.stdout


def test_it_prints(page, tmp_path):
    browse(page, width=1280, tmp_path=tmp_path, options=[f"--print-to-pdf={tmp_path / 'page.pdf'}"])
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
