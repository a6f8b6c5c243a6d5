"""The page: says what is so of every kind of run, shows nothing private, asks nothing of the network."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from scipy.special import ndtr, ndtri

from gradveil.accounting.tradeoff import tradeoff
from gradveil.attacks.observation.views import VIEWS as REAL_VIEWS
from gradveil.attacks.trial import NAMES
from gradveil.cli import main
from gradveil.mechanism import strategies
from gradveil.mechanism.records import Release
from gradveil.reports.checklist import ATTACKS, VIEWS, checklist
from gradveil.reports.facts import read_run
from gradveil.reports.page import at_most, names_apart, render, write_page
from gradveil.reports.verdicts import plain
from small_runs import damaged, interrupted, trained, with_attack

SEED = 987654321
VOID = {"meta", "br", "img", "input", "link", "hr"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs nobody changes."""
    where = tmp_path_factory.mktemp("made")
    return {
        "baseline": trained(where / "baseline", strategy="baseline", evaluate_every=2),
        "seeded": trained(where / "seeded", strategy="dyn-s-decay", seed=SEED),
        "l2max": trained(where / "l2max", strategy="dyn-s-l2max"),
        "non-private": trained(where / "non-private", strategy="non-private"),
    }


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made["baseline"], tmp_path / "baseline")


@pytest.fixture(scope="module")
def attacked(made, tmp_path_factory):
    from gradveil import api

    run = shutil.copytree(made["baseline"], tmp_path_factory.mktemp("attacked") / "baseline")
    api.attack(run, attack="cpl", victims=3, iterations=6)
    return run


def page_of(*paths, **settings):
    text = render([read_run(path) for path in paths], **settings)
    Checked().check(text)
    return text


class Checked(HTMLParser):
    """Every element is closed in its turn, every id is there once, every link leads somewhere."""

    def check(self, text):
        self.open, self.ids, self.links = [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        assert len(set(self.ids)) == len(self.ids)
        assert set(self.links) <= set(self.ids)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a":
            assert given["href"].startswith("#")
            self.links.append(given["href"][1:])
        assert not [name for name in given if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def words(text):
    """What is read: without markup."""
    return " ".join(unescape(re.sub("<[^>]+>", " ", text.partition("<body>")[2].partition("<script>")[0])).split())


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradveil", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr()


# ---- what is said of each kind of run


def test_a_finished_run_says_first_what_is_proved(made):
    facts = read_run(made["baseline"])
    text = words(page_of(made["baseline"]))
    assert f"epsilon ≤ {at_most(facts.proved)} at delta = 1e-5 under add-remove: proved." in text
    assert "is right in more than" in text
    assert "Finished: 6 of 6 steps taken." in text
    assert text.index("epsilon ≤") < text.index("As published: not a guarantee") < text.rindex("Checklist")
    assert "No attack was run on this run" in text and "gradveil attack" in text
    assert "Audited Not run." in text
    for method in ("BaseC", "AdvC", "OptC", "zCDP", "MA"):
        assert method in text


def test_what_is_written_is_proved_too():
    for value in (1.11601, 0.123449, 9.9999, 99.995, 12345.6, 3.0, 1e-4):
        assert float(at_most(value)) >= value


def test_nothing_is_proved_for_l2max_and_the_page_says_why(made):
    text = words(page_of(made["l2max"]))
    reason = read_run(made["l2max"]).statement.proved.reason
    assert f"Nothing is proved, because {reason}." in text
    assert "epsilon ≤" not in text
    assert "scaled to the private batch" in text


def test_a_run_without_privacy(made):
    text = words(page_of(made["non-private"]))
    assert "Not private: trained without noise." in text
    assert "there is no noise to account for" in text
    assert "epsilon ≤" not in text


def test_an_interrupted_run_says_at_which_step(run):
    interrupted(run, after=3)
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    text = words(page_of(run))
    assert "Not finished: interrupted or still running after step 3 of 6." in text
    assert "The run has not finished" in text
    assert "baseline not ended tier 1: strong formal guarantee" in text


@pytest.mark.parametrize("how", ["changed", "missing", "nonsense"])
def test_a_ledger_that_does_not_hold(run, how):
    if how == "changed":
        damaged(run)
    elif how == "missing":
        (run / "ledger.jsonl").unlink()
    else:
        shutil.rmtree(run / "checkpoints")
        rewritten(run / "ledger.jsonl", delta=7.0)
    text = words(page_of(run))
    assert "The ledger failed verification:" in text
    assert "Ledger invalid: what was released is unknown." in text
    assert "epsilon ≤" not in text


def rewritten(path, **changed):
    """A ledger with whole lines, whose header says something else."""
    from gradveil.accounting.ledger import Ledger, read
    from gradveil.mechanism.records import RunHeader

    header = RunHeader.from_dict(read(path).header.to_dict() | changed)
    path.unlink()
    Ledger(header, path).end("finished")


def test_a_run_that_never_began(run):
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    text = words(page_of(run))
    assert "There is no ledger" in text and "Not started" in text


def test_an_engines_own_run_has_a_ledger_alone(run, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(run / "ledger.jsonl", own)
    text = words(page_of(own))
    assert "epsilon ≤" in text
    assert "There is no config.toml" in text and "not stated" in text
    assert "not recorded" in text


def test_files_that_are_damaged_are_named(run):
    (run / "config.toml").write_text("strategy = [")
    (run / "environment.json").write_text("{")
    text = words(page_of(run))
    assert "config.toml:" in text and "environment.json cannot be read" in text


def test_an_audit_stands_beside_what_is_proved(run):
    (run / "audit.json").write_text(json.dumps({"epsilon_lower_bound": 0.25, "confidence": 0.95, "secret": "hush"}))
    text = words(page_of(run))
    assert "Audited ≥ 0.25 confidence 0.95" in text
    assert "hush" not in text
    assert "is wrong" not in text
    (run / "audit.json").write_text(json.dumps({"epsilon_lower_bound": 25.0}))
    assert "Above the proved epsilon" in words(page_of(run))


def test_several_runs_on_one_page(made):
    text = page_of(*made.values(), title="All of them")
    assert "<h1>All of them</h1>" in text
    for name in made:
        assert name in text
    assert text.count('<tr><td data-value="') == 4
    assert "Epsilon, MA as published" in text


def test_runs_of_the_same_name_are_told_apart(made, tmp_path):
    paths = [shutil.copytree(made["baseline"], tmp_path / name / "run") for name in "ab"]
    assert names_apart([read_run(p) for p in paths]) == ["a/run", "b/run"]
    assert names_apart([read_run(paths[0])] * 2) == ["run (1)", "run (2)"]
    page_of(*paths, *paths)


# ---- what attacks got


def test_figures_of_an_attack_without_pictures(attacked):
    text = page_of(attacked)
    assert "cpl against baseline" in text
    assert "beats guessing by 6 dB" in text
    assert "Attacks not run: dlg, idlg, inverting, map, analytic, prior." in text
    assert "No attack used knowledge of the defence." in text
    assert "Views not tried: per-example, batch." in text
    assert "data:image" not in text
    assert "--examples 4" in text


def test_pictures_only_when_asked_for_and_then_for_the_owner_alone(attacked, tmp_path):
    text = page_of(attacked, examples=2)
    # Two victims: the original, the frames of iterations 0, 1 and 5, and the end; the first one's also in the verdict.
    assert text.count('src="data:image/png;base64,') == 2 * 5 + 2
    assert 'data-iterations="0 1 5"' in text
    assert "This page shows training examples." in text
    assert page_of(attacked, examples=sys.maxsize).count("data:image/png") == 3 * 5 + 2
    write_page([read_run(attacked)], tmp_path / "p.html", examples=1)
    assert (tmp_path / "p.html").stat().st_mode & 0o777 == 0o600


def test_pictures_that_cannot_be_read_are_said_to_be(attacked, tmp_path):
    run = shutil.copytree(attacked, tmp_path / "run")
    (kept,) = run.glob("attacks/*/pictures.npz")
    kept.write_bytes(b"not a zip file")
    assert "Its images cannot be read" in page_of(run, examples=1)
    kept.unlink()
    assert "No images were stored." in page_of(run, examples=1)


def test_an_attack_on_tables_has_no_psnr(run):
    text = words(page_of(with_attack(run, images=False)))
    assert "wrong features, median 3 of -" in text


def test_the_names_of_attacks_and_views_are_the_real_ones():
    assert ATTACKS == NAMES
    assert VIEWS == REAL_VIEWS


# ---- the checklist


def answers(path):
    return {item.name: item.answer for item in checklist(read_run(path))}


def test_the_checklist_follows_from_the_files(made, run):
    found = answers(made["baseline"])
    assert found["Ledger verified"] == found["Delta"] == found["Seed"] == found["Access to files"] == "satisfied"
    assert found["Hyper-parameter tuning"] == found["Floating point"] == "open"
    assert found["Stopping rule"] == "not applicable"
    assert answers(made["seeded"])["Seed"] == "open"
    assert answers(made["l2max"])["Accounting"] == "open"
    assert answers(made["non-private"])["Delta"] == "not applicable"
    (run / "ledger.jsonl").chmod(0o666)
    assert answers(run)["Access to files"] == "open"
    assert answers(damaged(run))["Ledger verified"] == "open"


def test_a_secret_that_others_may_read_is_found_without_reading_it(made, tmp_path):
    run = shutil.copytree(made["seeded"], tmp_path / "run")
    (run / "secret.json").write_text("not even JSON")
    (run / "secret.json").chmod(0o644)
    assert answers(run)["Access to files"] == "open"
    assert "not even JSON" not in page_of(run)


# ---- nothing private, nothing foreign


def test_nothing_private_is_in_it(made):
    text = page_of(made["seeded"])
    contents = read_run(made["seeded"]).contents
    assert contents.header.seeded
    for secret in (str(SEED), (made["seeded"] / "secret.json").read_text(), contents.header.salt):
        assert secret not in text
    assert all(release.digest not in text for release in contents.releases)
    assert "data:image" not in text


def test_s_t_is_left_out_where_showing_it_would_undo_what_is_proved(tmp_path):
    run = trained(tmp_path / "fixed", strategy="dyn-s-l2max", fixed_variance=True, reading="batch", seed=SEED)
    facts = read_run(run)
    text = page_of(run)
    assert "epsilon ≤" in text
    assert text.count("showing it would undo what is proved") == 4  # S_t, sigma_t, the published figures, the statement
    # sigma_t is the fixed noise over S_t, and the published figures follow from it: they are as secret.
    secret = [f"{max(release.sensitivity):.4g}" for release in facts.contents.releases]
    secret += [f"{release.sigma:.4g}" for release in facts.contents.releases]
    secret += [f"{figure.epsilon:.4g}" for figure in facts.statement.paper.values()]
    # What is read, not where it is drawn.
    read = re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
    for figure in secret:
        assert not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", read), figure


def test_it_asks_nothing_of_the_network(made, attacked):
    text = page_of(*made.values(), attacked, examples=1)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(|<link|<iframe|<base|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)="(?!data:image/png;base64,|#)', text)


def test_names_from_files_are_text_and_never_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    mine = strategies.register(
        strategies.Strategy(name=evil, bounds="constant", sensitivity="clip", noise="constant", summary="mine")
    )
    try:
        path = tmp_path / "<img src=x onerror=alert(1)>"
        run = with_attack(trained(path, strategy=mine.name), attack="<b onclick=alert(1)>")
    finally:
        strategies.unregister(evil)
    (run / "environment.json").write_text(json.dumps({"command": [evil], evil: '"><svg onload=alert(1)>'}))
    text = page_of(run, run, title=evil)
    assert text.count("<script") == 1
    assert not re.search(r"<img src=x|<b onclick|<svg onload", text)
    assert "&lt;script&gt;alert(1)" in text


def test_only_its_own_script_may_run(made):
    import base64
    import hashlib

    text = page_of(made["baseline"])
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text.replace("&#39;", "'")


# ---- the command


def test_the_command_writes_into_the_run_or_where_it_is_told(run, tmp_path, monkeypatch, capsys):
    code, told = call(monkeypatch, capsys, "report", run)
    assert code == 0 and told.out.strip() == str(run / "report.html")
    assert "epsilon ≤" in (run / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    code, told = call(monkeypatch, capsys, "report", run, run, "--title", "Two")
    assert code == 0 and (tmp_path / "report.html").exists()
    code, told = call(monkeypatch, capsys, "report", run, "--out", tmp_path / "x.html", "--examples", "all")
    assert code == 0 and (tmp_path / "x.html").exists()


def test_bad_input_writes_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for arguments in (
        ["report", tmp_path / "nowhere"],
        ["report", run, tmp_path],
        ["report", run, "--examples", "some"],
        ["report", run, "--out", tmp_path / "no" / "folder.html"],
        ["report"],
    ):
        code, told = call(monkeypatch, capsys, *arguments)
        assert code == 2 and told.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("epsilon", "tag"),
    [
        (0.9, "tier 1: strong formal guarantee"),
        (1.0, "tier 1"),
        (7.1, "tier 2: reasonable guarantee"),
        (10.1, "tier 3: weak guarantee"),
        (math.inf, "nothing proved"),
    ],
)
def test_the_first_screen_says_how_much_epsilon_is_worth(run, epsilon, tag):
    facts = read_run(run)
    proved = replace(facts.statement.proved, epsilon=epsilon, reason="of a test" if epsilon == math.inf else None)
    found = plain(replace(facts, statement=replace(facts.statement, proved=proved)))
    assert found.tag.startswith(tag)
    assert (found.kind == "strong") == (epsilon <= 1)


@pytest.mark.parametrize(("psnr", "leak"), [(28.9, True), (12.0, False), (15.0, False)])
def test_what_an_attack_got_back_is_in_the_verdict(run, psnr, leak):
    with_attack(run, psnr=psnr)
    found = plain(read_run(run))
    assert found.leak == leak
    assert f"{psnr} dB, where guessing gives 11.0" in found.attacked
    assert ("got training examples back" in found.attacked) == leak
    text = words(page_of(run))
    verdict = text.partition(" Glossary ")[2].partition("What came back")[0]
    assert f"{psnr} dB" in text and ("leaks" in verdict) <= leak


def test_mu_and_true_positive_rates_stand_beside_epsilon_and_bound_it(run):
    facts = read_run(run)
    found = tradeoff(facts.contents.header, facts.contents.charged())
    epsilon, delta = facts.proved, facts.statement.proved.delta
    for rate, tpr in found.true_positive_rates.items():
        assert rate <= tpr <= min(1.0, math.exp(epsilon) * rate + delta) * (1 + 1e-6)
    rates = list(found.true_positive_rates.values())
    assert rates == sorted(rates) and 0 < found.mu < 10
    text = words(page_of(run))
    assert "mu, Gaussian DP" in text and "found at 0.1 % false positives" in text


def test_the_tradeoff_of_one_gaussian_step_is_that_of_its_mu():
    from made_ledgers import make_header

    header = replace(make_header(steps=1, groups=1), sample_rate=1.0, expected_batch_size=1000.0)
    release = Release(
        step=0, sampler="poisson", sample_rate=1.0, expected_batch_size=1000.0, clip=(4.0,), sensitivity_rule="clip",
        sensitivity=(4.0,), sigma=2.0, noise_std=(8.0,), scale_is_public=True,
    )  # fmt: skip
    found = tradeoff(header, [release])
    assert found.mu == pytest.approx(0.5, rel=0.01) and found.mu >= 0.5  # z = 2: mu = 1/2
    assert found.true_positive_rates[0.01] == pytest.approx(float(ndtr(ndtri(0.01) + 0.5)), rel=0.01)


def test_about_is_shown_and_what_is_not_stated_too(tmp_path):
    path = trained(tmp_path / "run", about={"purpose": "a <b>test</b>", "tuning": "3 runs", "contact": "me"})
    page = page_of(path)
    assert "a &lt;b&gt;test&lt;/b&gt;" in page
    text = words(page)
    assert "Tuning runs on the same data 3 runs" in text and "Sign-off not stated" in text and "contact me" in text
    assert 'purpose = "a <b>test</b>"' in (path / "config.toml").read_text()


def test_a_page_of_a_run_that_contradicts_its_ledger_says_so_first(run):
    config = (run / "config.toml").read_text().replace("sigma = 3.0", "sigma = 30.0")
    (run / "config.toml").write_text(config)
    text = words(page_of(run))
    verdict = text.partition(" Glossary ")[2].partition("What came back")[0]
    assert "evidence invalid" in verdict and "config.toml: changed" in verdict
    assert '"sigma": 30' not in page_of(run)  # settings are the ledger's
