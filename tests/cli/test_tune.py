"""``gradveil tune``, and the small hands: what a search costs, what a typo gets, what fits 80 columns."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from click.shell_completion import ShellComplete
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_poisson_subsampled_gaussian

from gradveil.accounting import ledger as ledgers
from gradveil.accounting.repeat_and_select import selected_epsilon
from gradveil.cli import cli
from gradveil.errors import ConfigError
from gradveil.reports.checklist import checklist
from gradveil.reports.facts import read_run
from small_runs import trained

BASE = 'dataset = "digits"\nsteps = 4\nbatch_size = 64\nsigma = 3.0\nclipping = "flat"\n'


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_a_search_keeps_the_best_run_and_charges_the_selection(gradveil, base, tmp_path):
    out = tmp_path / "search"
    values = ("--try", "lr=0.1,0.5", "--try", "clip=0.5,1", "--mean-runs", 2, "--seed", 3)
    done = gradveil("tune", "--config", base, *values, "--run-dir", out, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert [path.name for path in out.iterdir()] == ["selected"]
    facts = read_run(out / "selected")
    assert facts.contradictions == [] and facts.bound(out / "selected" / "tune.json")
    assert told["one_run"] == facts.proved < told["epsilon"] < 6 * facts.proved + 3
    kept = json.loads((out / "selected" / "tune.json").read_text())
    assert kept["epsilon"] == told["epsilon"] and kept["chosen"]["lr"] == facts.config.lr
    assert "runs" not in kept  # how many there were is not to be known
    (item,) = [item for item in checklist(facts) if item.name == "Hyper-parameter tuning"]
    assert item.answer == "satisfied"


def test_the_charge_is_that_of_the_theorem(tmp_path):
    """Papernot & Steinke, Theorem 2 with eta = 1 (geometric), over the orders; a proof of its own."""
    contents = ledgers.read(trained(tmp_path / "run", clipping="flat") / "ledger.jsonl")
    header, mean = contents.header, 10.0
    orders = np.concatenate([np.linspace(1.05, 12, 300), np.arange(13, 256)])
    rdp = 6 * np.asarray(_compute_rdp_poisson_subsampled_gaussian(header.sample_rate, 3.0, orders))
    gamma = 1 / mean
    hats = 2 * (1 - 1 / orders) * rdp + 2 * math.log(1 / gamma) / orders
    selected = rdp + hats.min() + math.log(mean) / (orders - 1)
    delta = header.delta
    bound = (selected + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)).min()
    found = selected_epsilon(header, contents.releases, mean=mean)
    assert found == pytest.approx(float(bound), rel=0.1)
    costs = [selected_epsilon(header, contents.releases, mean=m) for m in (1.0, 2.0, 10.0, 100.0)]
    assert costs == sorted(costs) and costs[0] >= read_run(tmp_path / "run").proved
    with pytest.raises(ConfigError, match="at least one"):
        selected_epsilon(header, contents.releases, mean=0.5)


def test_nothing_is_charged_that_the_theorem_does_not_cover(tmp_path):
    contents = ledgers.read(trained(tmp_path / "run", strategy="dyn-s-l2max") / "ledger.jsonl")
    with pytest.raises(ConfigError, match="does not follow the data"):
        selected_epsilon(contents.header, contents.releases, mean=2.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--try", "sigma=1,2"), "sigma cannot be tried"),
        (("--try", "lr"), "NAME=VALUE"),
        (("--try", "lr=-1"), "lr"),
        (("--try", "lr=0.1", "--mean-runs", "0"), "at least one"),
    ],
)
def test_what_cannot_be_tried(gradveil, base, tmp_path, options, said):
    done = gradveil("tune", "--config", base, "--run-dir", tmp_path / "out", *options)
    assert done.code == 2 and said in done.message


# ---- small hands


def test_a_mistyped_command_gets_a_suggestion(gradveil):
    done = gradveil("trian")
    assert done.code == 2 and "Did you mean train?" in done.message
    assert "lists the commands" in gradveil("xyzzy").message


def test_compare_fits_80_columns(gradveil, tmp_path, monkeypatch):
    run = trained(tmp_path / "a-run-with-quite-a-long-name")
    monkeypatch.setenv("COLUMNS", "80")
    done = gradveil("compare", run)
    assert done.code == 0 and "eps proved" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_calibrate_takes_sizes_in_place_of_the_rate(gradveil):
    rate = gradveil("calibrate", "--epsilon", 2, "--sample-rate", 0.01, "--steps", 100, "--json")
    sizes = gradveil("calibrate", "--epsilon", 2, "--batch-size", 600, "--data-size", 60000, "--steps", 100, "--json")
    assert rate.code == sizes.code == 0 and json.loads(rate.out) == json.loads(sizes.out)
    for wrong in (
        (),
        ("--batch-size", 10),
        ("--batch-size", 10, "--data-size", 5),
        ("--sample-rate", 0.1, "--batch-size", 1, "--data-size", 10),
    ):
        assert gradveil("calibrate", "--epsilon", 2, "--steps", 100, *wrong).code == 2


@pytest.mark.parametrize(
    ("arguments", "start", "wanted"),
    [
        (["train", "--strategy"], "dyn-s-", "dyn-s-decay"),
        (["train", "--dataset"], "dig", "digits"),
        (["attack", "--attack"], "m", "map"),
        (["export", "run", "--to"], "reg", "registry"),
    ],
)
def test_values_are_completed(arguments, start, wanted):
    found = ShellComplete(cli, {}, "gradveil", "_GRADVEIL_COMPLETE").get_completions(arguments, start)
    assert wanted in [item.value for item in found]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--sigma", "-1"),
        ("--clip", "0"),
        ("--clipping", "foo"),
        ("--delta", "2"),
        ("--batch-size", "0"),
        ("--steps", "0"),
    ],
)
def test_wrong_values_fail_before_torch_is_imported(wrong):
    program = (
        "import sys\nsys.argv = ['gradveil', 'train', *sys.argv[1:]]\nfrom gradveil.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, *wrong], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
