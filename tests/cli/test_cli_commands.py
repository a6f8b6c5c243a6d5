"""The commands themselves: what they print, their exit codes, ``--json``, and what they load."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradveil import __version__

SEED = 918273645
SMALL = ("--steps", "6", "--batch-size", "16", "--sigma", "12", "--evaluate-every", "3", "--checkpoint-every", "3")


def _strict(text: str) -> Any:
    """JSON as others read it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run(gradveil: Callable[..., Any], tmp_path: Path) -> Path:
    """A finished run of six steps: header, six releases, two checks, end."""
    assert gradveil("train", *SMALL, "--seed", SEED, "--run-dir", tmp_path / "run").code == 0
    return tmp_path / "run"


# ---- train


def test_train_prints_the_result_on_stdout_and_progress_on_stderr(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    outcome = gradveil("train", *SMALL, "--run-dir", tmp_path / "run")
    assert outcome.code == 0
    for word in ("run directory", str(tmp_path / "run"), "test accuracy", "noise std", "Proved", "As published"):
        assert word in outcome.out
    assert "6/6" in outcome.err
    assert "6/6" not in outcome.out


def test_train_json_is_one_object_on_stdout(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    outcome = gradveil("train", *SMALL, "--run-dir", tmp_path / "run", "--json")
    found = _strict(outcome.out)
    assert found["steps"] == 6
    assert found["privacy"]["proved"]["epsilon"] > 0
    assert found["privacy"]["paper_is_a_guarantee"] is False


@pytest.mark.parametrize("strategy", ["non-private", "dyn-s-l2max", "quantile-clip"])
def test_train_json_is_strict_json_where_epsilon_is_infinite_too(
    gradveil: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    outcome = gradveil("train", *SMALL, "--strategy", strategy, "--run-dir", tmp_path / "run", "--json")
    epsilon = _strict(outcome.out)["privacy"]["proved"]["epsilon"]
    assert (epsilon == "inf") == (strategy != "quantile-clip")
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        _strict(line)


def test_an_exhausted_budget_exits_3_and_says_which_step_was_refused(
    gradveil: Callable[..., Any], tmp_path: Path
) -> None:
    arguments = ("--steps", 200, "--batch-size", 64, "--sigma", 3, "--budget", 0.8, "--evaluate-every", 200)
    outcome = gradveil("train", *arguments, "--run-dir", tmp_path / "run", "--json")
    assert outcome.code == 3
    found = _strict(outcome.out)
    assert 0 < found["steps"] < 200
    assert found["privacy"]["proved"]["epsilon"] <= 0.8
    for word in (f"step {found['steps']} of 200", "budget of epsilon = 0.8", "was not taken", "Raise the budget"):
        assert word in outcome.message
    verified = _strict(gradveil("ledger", "verify", tmp_path / "run", "--json").out)
    assert verified["releases"] == found["steps"]


def test_the_seed_is_in_no_file_but_secret_json_and_in_no_output(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    for name, flag in {"a": ["--seed", SEED], "b": [f"--seed={SEED}"]}.items():
        outcome = gradveil("train", *SMALL, *flag, "--run-dir", tmp_path / name)
        assert outcome.code == 0
        assert str(SEED) not in outcome.out + outcome.err
        files = [p for p in (tmp_path / name).rglob("*") if p.is_file()]
        assert [p.name for p in files if str(SEED).encode() in p.read_bytes()] == ["secret.json"]
        command = json.loads((tmp_path / name / "environment.json").read_text())["command"]
        assert command[:2] == ["gradveil", "train"]


def test_flags_override_the_configuration_file(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        'strategy = "quantile-clip"\nsteps = 3\nbatch_size = 16\nsigma = 9.0\n[options]\nquantile = 0.7\n'
    )
    outcome = gradveil("train", "--config", config, "--sigma", "12", "--steps", "2", "--run-dir", tmp_path / "run")
    assert outcome.code == 0
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (written["strategy"], written["steps"], written["sigma"]) == ("quantile-clip", 2, 12.0)
    assert written["options"] == {"quantile": 0.7}


@pytest.mark.parametrize("more", [(), ("--features", "scattering", "--model", "linear")])
def test_views_from_the_command_line(gradveil: Callable[..., Any], tmp_path: Path, more: tuple[str, ...]) -> None:
    where = tmp_path / "run"
    outcome = gradveil("train", *SMALL, "--views", "2", "--augment", "flip", *more, "--seed", SEED, "--run-dir", where)
    assert outcome.code == 0
    assert "views of an example are averaged before they are clipped" in " ".join(outcome.out.split())
    written = tomllib.loads((where / "config.toml").read_text())
    assert (written["views"], written["augment"]) == (2, "flip")
    assert gradveil("ledger", "verify", where).code == 0
    assert "averaged before" in " ".join(gradveil("statement", where).out.split())
    assert gradveil("train", "--resume", where, "--views", "3").code == 2


def test_the_configuration_of_a_run_starts_another(gradveil: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    outcome = gradveil("train", "--config", run / "config.toml", "--seed", SEED, "--run-dir", tmp_path / "again")
    assert outcome.code == 0
    assert (tmp_path / "again" / "config.toml").read_bytes() == (run / "config.toml").read_bytes()
    name = "checkpoints/step-00000006.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sgima = 3.0", ["unknown setting 'sgima'", "Did you mean", "'sigma'"]),
        ("seed = 5", ["holds a seed", "secret", "--seed"]),
        ("sigma = [1]", ["sigma", "settings do not fit"]),
        ('steps = "many"', ["steps", "settings do not fit", "'many'"]),
        ("steps = = 3", ["not a TOML file"]),
        ("\udcff", ["not a TOML file"]),
    ],
)
def test_a_configuration_file_that_does_not_fit_exits_2(
    gradveil: Callable[..., Any], tmp_path: Path, text: str, words: list[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_bytes(text.encode(errors="surrogateescape"))
    outcome = gradveil("train", "--config", config, "--run-dir", tmp_path / "run")
    assert outcome.code == 2
    for word in words:
        assert word in outcome.message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["nowhere.toml", "."])
def test_a_configuration_file_that_is_none_exits_2(gradveil: Callable[..., Any], tmp_path: Path, where: str) -> None:
    outcome = gradveil("train", "--config", tmp_path / where, "--run-dir", tmp_path / "run")
    assert outcome.code == 2
    assert str(tmp_path / where) in outcome.message


# ---- ledger


_BEGUN = ["header", "settings", *["file"] * 2, "check", "release", "check", "next"]  # two batches are checked
_SAVED = ["file"] * 3  # two of a checkpoint, and the metrics so far
LINES = [*_BEGUN, "next", *_SAVED, *["next"] * 3, *_SAVED, "end"]


def test_ledger_verify_says_what_it_checked(gradveil: Callable[..., Any], run: Path) -> None:
    outcome = gradveil("ledger", "verify", run)
    assert outcome.code == 0
    assert _kinds(run) == LINES
    for word in ("ledger valid", f"{len(LINES)} lines", "6 releases", "ended: finished"):
        assert word in outcome.out
    found = _strict(gradveil("ledger", "verify", run, "--json").out)
    assert (found["valid"], found["lines"], found["releases"]) == (True, len(LINES), 6)
    assert gradveil("ledger", "verify", run / "ledger.jsonl").code == 0


def _lines(run: Path) -> list[bytes]:
    return (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def _kinds(run: Path) -> list[str]:
    return ["next" if line.startswith(b"[") else json.loads(line)["kind"] for line in _lines(run)]


DAMAGE: dict[str, tuple[Callable[[list[bytes]], bytes], int]] = {
    "a changed byte": (lambda x: b"".join([*x[:5], x[5].replace(b'"sigma":12.0', b'"sigma":22.0'), *x[6:]]), 6),
    "a changed byte of a hash": (lambda x: b"".join([*x[:5], x[5][:-5] + b"zz" + x[5][-3:], *x[6:]]), 6),
    "a changed exponent": (lambda x: b"".join([x[0].replace(b"1e-05", b"1e905"), *x[1:]]), 1),
    "a number that is none": (lambda x: b"".join([*x[:5], x[5].replace(b":12.0", b":NaN"), *x[6:]]), 6),
    "a check that was not made": (lambda x: b"".join([*x[:4], x[4].replace(b"true", b"false"), *x[5:]]), 5),
    "a missing line": (lambda x: b"".join([*x[:2], *x[3:]]), 3),
    "swapped lines": (lambda x: b"".join([*x[:2], x[3], x[2], *x[4:]]), 3),
    "a doubled line": (lambda x: b"".join([*x[:3], x[2], *x[3:]]), 4),
    "shorter than the checkpoint says": (lambda x: b"".join(x[:4]), 5),
    "shorter, in the middle of a line": (lambda x: b"".join(x[:4]) + x[4][:30], 5),
    "only the header": (lambda x: x[0], 2),
    "empty": (lambda x: b"", 1),
    "something else": (lambda x: b"\x7fELF\n\n", 1),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_ledger_exits_4_with_the_line(gradveil: Callable[..., Any], run: Path, name: str) -> None:
    damage, line = DAMAGE[name]
    damaged = damage(_lines(run))
    assert damaged != b"".join(_lines(run))
    (run / "ledger.jsonl").write_bytes(damaged)
    for command in (["ledger", "verify", run], ["ledger", "verify", run, "--json"], ["ledger", "show", run]):
        outcome = gradveil(*command)
        assert outcome.code == 4
        assert f"line {line}" in outcome.message
        assert outcome.out == ""
    assert gradveil("train", "--resume", run).code == 4
    assert (run / "ledger.jsonl").read_bytes() == damaged


def test_a_ledger_written_anew_exits_4(gradveil: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    assert gradveil("train", *SMALL, "--seed", SEED + 1, "--sigma", "13", "--run-dir", tmp_path / "other").code == 0
    (run / "ledger.jsonl").write_bytes((tmp_path / "other" / "ledger.jsonl").read_bytes())
    outcome = gradveil("ledger", "verify", run)
    assert outcome.code == 4
    for word in (f"line {len(LINES) - 4}", "step-00000006.json", "has been rewritten"):
        assert word in outcome.message


def test_a_half_written_last_line_is_recognised_counted_and_repaired_on_resume(
    gradveil: Callable[..., Any], run: Path
) -> None:
    lines = _lines(run)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:25])
    outcome = gradveil("ledger", "verify", run)
    assert outcome.code == 0
    for word in (f"line {len(LINES)} is half-written", "counts as one release spent", "resuming"):
        assert word in " ".join(outcome.out.split())
    assert _strict(gradveil("ledger", "verify", run, "--json").out)["half_written_last_line"] is True
    resumed = gradveil("train", "--resume", run, "--json")
    assert resumed.code == 0
    assert _strict(resumed.out)["privacy"]["steps_recovered"] == 1
    after = _strict(gradveil("ledger", "verify", run, "--json").out)
    assert (after["half_written_last_line"], after["releases"], after["ended"]) == (False, 7, "finished")


def test_a_run_without_a_ledger_exits_4(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    outcome = gradveil("ledger", "verify", tmp_path)
    assert outcome.code == 4
    assert "no ledger" in outcome.message


def test_ledger_show_prints_the_releases(gradveil: Callable[..., Any], run: Path) -> None:
    outcome = gradveil("ledger", "show", run, "--last", "2")
    assert outcome.code == 0
    assert "baseline (proved)" in outcome.out
    found = _strict(gradveil("ledger", "show", run, "--json", "--last", "2").out)
    assert [r["step"] for r in found["releases"]] == [4, 5]
    assert found["header"]["population"] == 1347
    assert len(_strict(gradveil("ledger", "show", run, "--json", "--last", "0").out)["releases"]) == 6


# ---- strategies, data sets, demo


def test_strategies_lists_every_strategy_with_its_guarantee(gradveil: Callable[..., Any]) -> None:
    found = {s["name"]: s["guarantee"] for s in _strict(gradveil("strategies", "--json").out)}
    assert found["baseline"] == found["dyn-sigma"] == found["quantile-clip"] == "proved"
    assert found["dyn-s-sigma"] == "paper-only" and found["non-private"] == "none"
    shown = gradveil("strategies").out
    assert all(name in shown for name in found)


def test_datasets_lists_every_set_and_whether_it_is_there(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    found = {d["name"]: d for d in _strict(gradveil("datasets", "--json", "--data-dir", tmp_path).out)}
    assert found["digits"]["available"] is True
    assert found["mnist"]["available"] is False
    shown = gradveil("datasets", "--data-dir", tmp_path).out
    assert all(name in shown for name in found)


def test_an_unknown_data_set_is_not_downloaded(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    outcome = gradveil("datasets", "download", "mnits", "--data-dir", tmp_path)
    assert outcome.code == 2
    assert "'mnist'" in outcome.message
    assert gradveil("datasets", "download", "mnist").code == 2


def test_demo_json_has_a_result_for_every_strategy(
    gradveil: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradveil.cli import demo

    monkeypatch.setitem(demo.SHARED, "steps", 3)
    monkeypatch.setitem(demo.SHARED, "batch_size", 16)
    monkeypatch.setattr(demo, "ATTACKS", {"cpl": 2, "map": 2})
    outcome = gradveil("demo", "--json", "--run-dir", tmp_path / "demo", "--seed", "1")
    assert outcome.code == 0
    told = _strict(outcome.out)
    found = told["runs"]
    assert list(found) == list(demo.RUNS)
    assert "digits" in Path(told["report"]).read_text()
    assert found["baseline"]["attacks"]["map"]["result"]["psnr_median"] < 20
    assert all(r["steps"] == 3 for r in found.values())
    assert found["non-private"]["privacy"]["proved"]["epsilon"] == "inf"
    assert found["baseline"]["privacy"]["proved"]["epsilon"] < 10
    for name in demo.RUNS:
        assert gradveil("ledger", "verify", tmp_path / "demo" / name).code == 0
    table = gradveil("demo", "--run-dir", tmp_path / "table", "--seed", "1")
    assert all(name in table.out for name in demo.RUNS)


def test_an_unknown_command_exits_2(gradveil: Callable[..., Any]) -> None:
    outcome = gradveil("trian")
    assert outcome.code == 2
    assert "trian" in outcome.message


@pytest.mark.parametrize(
    "command", [[], ["train"], ["demo"], ["strategies"], ["datasets"], ["ledger"], ["ledger", "verify"]]
)
def test_every_command_has_help(gradveil: Callable[..., Any], command: list[str]) -> None:
    for flag in ("--help", "-h"):
        outcome = gradveil(*command, flag)
        assert outcome.code == 0
        assert "Usage" in outcome.out


# ---- real processes


def _process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradveil", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["strategies"], ["datasets", "--json"], ["--version"], ["train", "--help"], ["train", "--strategy", "basline"]],
    ids=" ".join,
)
def test_what_needs_no_torch_loads_none(tmp_path: Path, arguments: list[str]) -> None:
    program = (
        "import sys\nsys.argv = ['gradveil', *sys.argv[1:]]\nfrom gradveil.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'dp_accounting'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_real_process_trains_refuses_and_exits_with_its_codes(tmp_path: Path) -> None:
    trained = _process("train", *SMALL, "--run-dir", "run", "--json", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert _strict(trained.stdout)["steps"] == 6
    (ledger := tmp_path / "run" / "ledger.jsonl").write_bytes(ledger.read_bytes().replace(b"12.0", b"13.0", 1))
    verified = _process("ledger", "verify", "run", cwd=tmp_path)
    assert verified.returncode == 4
    assert verified.stdout == "" and "line 1" in verified.stderr
    refused = _process("train", "--sigma", "0", "--run-dir", "other", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("gradveil:") == 1 and "Traceback" not in refused.stderr
    assert not (tmp_path / "other").exists()


def test_the_version_is_that_of_the_package(gradveil: Callable[..., Any]) -> None:
    outcome = gradveil("--version")
    assert outcome.code == 0
    assert __version__ in outcome.out
