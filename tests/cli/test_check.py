"""``gradveil check`` and ``compare``: what passes, what fails and why, as a pipeline would see it."""

from __future__ import annotations

import csv
import io
import json
import shutil
from xml.etree import ElementTree

import pytest

from small_runs import damaged, trained, with_attack


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for strategy in ("baseline", "dyn-s-l2max", "non-private"):
        trained(folder / strategy, strategy=strategy)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made / "baseline", tmp_path / "baseline")


def test_a_run_within_its_limits_passes(gradveil, run):
    done = gradveil("check", run, "--max-epsilon", "100", "--min-accuracy", "0")
    assert done.code == 0
    assert "FAIL" not in done.out
    assert "proved epsilon: epsilon = " in done.out


def test_too_large_an_epsilon_fails(gradveil, run):
    done = gradveil("check", run, "--max-epsilon", "0.0001")
    assert done.code == 1
    assert "is more than 0.0001" in done.out


def test_an_unproved_epsilon_does_not_pass_whatever_is_published(gradveil, made):
    done = gradveil("check", made / "dyn-s-l2max", "--max-epsilon", "1000000")
    assert done.code == 1
    assert "no finite epsilon is proved" in done.out
    assert "A published figure does not pass" in done.out


def test_plain_training_does_not_pass(gradveil, made):
    done = gradveil("check", made / "non-private", "--max-epsilon", "1000000")
    assert done.code == 1


def test_the_other_neighbours_have_their_own_epsilon(gradveil, run):
    def epsilon(*more):
        gates = json.loads(gradveil("check", run, "--max-epsilon", "100", "--json", *more).out)["gates"]
        return float(gates[1]["reason"].split()[2])

    assert epsilon("--neighbours", "replace-one") > epsilon("--neighbours", "add-remove") == epsilon()


def test_an_attack_that_was_not_run_is_not_withstood(gradveil, run):
    done = gradveil("check", run, "--max-attack-psnr", "20")
    assert done.code == 1
    assert "no attack was run" in done.out


def test_an_attack_that_came_too_near_fails(gradveil, run):
    with_attack(run, psnr=25.0)
    assert gradveil("check", run, "--max-attack-psnr", "20").code == 1
    assert gradveil("check", run, "--max-attack-psnr", "30").code == 0


def test_an_attack_on_tables_has_no_images_to_pass_with(gradveil, run):
    with_attack(run, images=False)
    done = gradveil("check", run, "--max-attack-psnr", "20")
    assert done.code == 1
    assert "without images" in done.out


def test_too_low_an_accuracy_fails(gradveil, run):
    assert gradveil("check", run, "--min-accuracy", "1").code == 1


def test_an_invalid_ledger_is_exit_code_4_and_passes_nothing(gradveil, run):
    done = gradveil("check", damaged(run), "--max-epsilon", "1000000")
    assert done.code == 4
    assert "failed verification" in done.out
    assert "pass" not in done.out


def test_an_audit_above_what_is_proved_fails(gradveil, run):
    (run / "audit.json").write_text(json.dumps({"epsilon_lower_bound": 1e6}))
    done = gradveil("check", run, "--max-epsilon", "100")
    assert done.code == 1
    assert "audited epsilon is at least" in done.out
    (run / "audit.json").write_text(json.dumps({"epsilon_lower_bound": 0.0}))
    assert gradveil("check", run, "--max-epsilon", "100").code == 0


def test_junit(gradveil, made, tmp_path):
    out = tmp_path / "gates.xml"
    runs = [made / "baseline", made / "dyn-s-l2max"]
    assert gradveil("check", *runs, "--max-epsilon", "100", "--junit", out).code == 1
    suite = ElementTree.parse(out).getroot()
    assert suite.get("tests") == "4"
    assert suite.get("failures") == "1"
    (failure,) = suite.iter("failure")
    assert "no finite epsilon" in failure.get("message")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no limit was given"),
        (("--max-epsilon", "inf"), "none"),
        (("--neighbours", "add-remove", "--min-accuracy", "0"), "--max-epsilon"),
        (("--max-epsilon", "x"), "x"),
    ],
)
def test_bad_limits(gradveil, run, args, said):
    done = gradveil("check", run, *args)
    assert done.code == 2
    assert said in done.err


def test_no_run(gradveil, tmp_path):
    assert gradveil("check", tmp_path, "--max-epsilon", "1").code == 2
    assert gradveil("compare", tmp_path / "nowhere").code == 2
    assert gradveil("compare").code == 2


def test_compare_as_table_json_and_csv(gradveil, made):
    runs = [made / name for name in ("baseline", "dyn-s-l2max", "non-private")]
    assert "infinite" in gradveil("compare", *runs).out
    rows = json.loads(gradveil("compare", *runs, "--json").out)
    assert [row["strategy"] for row in rows] == ["baseline", "dyn-s-l2max", "non-private"]
    assert rows[0]["epsilon_proved"] > 0
    assert rows[1]["epsilon_proved"] == "inf"
    parsed = list(csv.DictReader(io.StringIO(gradveil("compare", *runs, "--csv").out)))
    assert [row["run"] for row in parsed] == [row["run"] for row in rows]
    assert gradveil("compare", *runs, "--csv", "--json").code == 2
