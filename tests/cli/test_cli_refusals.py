"""What ``gradveil train`` must refuse: exit code 2, a message with fact, why and fix, and nothing written."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gradveil as package
from gradveil.errors import GradveilError, UnsupportedModelError

SHORT = ("--steps", "2", "--batch-size", "8", "--evaluate-every", "2")

# name: (arguments, words of the fact, of the why, of the fix)
SETTINGS: dict[str, tuple[list[str], str, str, str]] = {
    "sigma zero": (["--sigma", "0"], "0.0", "zero noise protects nothing", "Give sigma > 0"),
    "sigma negative": (["--sigma", "-1"], "-1.0", "protects nothing", "Give sigma > 0"),
    "sigma NaN": (["--sigma", "nan"], "nan", "not a positive, finite number", "Give sigma > 0"),
    "sigma infinite": (["--sigma", "inf"], "inf", "not a positive, finite number", "Give sigma > 0"),
    "clip zero": (["--clip", "0"], "0.0", "a zero bound trains nothing", "Give clip > 0"),
    "clip negative": (["--clip", "-2"], "-2.0", "a zero bound trains nothing", "Give clip > 0"),
    "clip NaN": (["--clip", "nan"], "nan", "not a positive, finite number", "Give clip > 0"),
    "delta of 1/N": (["--delta", "0.00075"], "0.00075", "1/N", "Give a smaller delta"),
    "delta of 1": (["--delta", "1"], "1.0", "between 0 and 1", "below 1/N"),
    "delta of 0": (["--delta", "0"], "0.0", "between 0 and 1", "below 1/N"),
    "delta NaN": (["--delta", "nan"], "nan", "between 0 and 1", "below 1/N"),
    "batch larger than the data": (["--batch-size", "1348"], "1348", "1347 examples", "no more than there are"),
    "empty batches": (["--batch-size", "0"], "0", "batch_size is 0", "at least 1"),
    "no steps": (["--steps", "0"], "steps is 0", "declares its number of steps", "at least 1"),
    "sigma that decays to zero": (
        ["--strategy", "dyn-sigma", "--sigma-end", "0"],
        "0.0",
        "zero noise protects nothing",
        "must end above zero",
    ),
    "clip that decays to zero": (
        ["--strategy", "dyn-s-decay", "--clip-end", "0"],
        "0.0",
        "a zero bound trains nothing",
        "must end above zero",
    ),
    "sigma that decays below zero": (
        ["--strategy", "dyn-sigma", "--sigma-decay", "linear", "--sigma-end", "-1"],
        "-1.0",
        "zero noise protects nothing",
        "must end above zero",
    ),
    "unknown strategy": (["--strategy", "dyn-s-sgima"], "'dyn-s-sgima'", "Did you mean", "'dyn-s-sigma'"),
    "unknown data set": (["--dataset", "mnits"], "'mnits'", "Did you mean", "'mnist'"),
    "unknown sampling": (["--sampling", "poison"], "'poison'", "Did you mean", "'poisson'"),
    "unknown model": (["--model", "paper-cn"], "'paper-cn'", "Did you mean", "'paper-cnn'"),
    "shuffling": (["--sampling", "shuffle"], "'shuffle'", "no epsilon would be proved", "sampling='poisson'"),
    "a budget nothing proves": (
        ["--strategy", "dyn-s-sigma", "--budget", "1"],
        "budget=1.0",
        "no proved epsilon",
        "Choose a proved strategy",
    ),
    "a budget of zero": (["--budget", "0"], "budget is 0.0", "largest epsilon", "positive number"),
    "momentum of one": (["--momentum", "1"], "momentum", "less than 1", "1.0"),
    "a learning rate of zero": (["--lr", "0"], "lr", "greater than 0", "0.0"),
    "parts of no examples": (["--physical-batch-size", "0"], "physical_batch_size", "0", "at least 1"),
    "an option that is no number": (["--option", "quantile=half"], "quantile=half", "", "NAME=NUMBER"),
    "an option of no strategy": (["--option", "quantile=0.5"], "takes no options", "", "quantile"),
    "no views": (["--views", "0"], "views", "greater than or equal to 1", "0"),
    "views that are all the same": (["--views", "2"], "views = 2", "all be the same", "augment = 'flip'"),
    "an augmentation without a view for it": (["--augment", "flip"], "'flip'", "nothing would be", "views = 2"),
    "unknown augmentation": (["--views", "2", "--augment", "flop"], "augment", "'flip'", "flop"),
    "features of shifted images": (
        ["--views", "2", "--augment", "shift", "--features", "scattering", "--model", "linear"],
        "'shift'",
        "computed once",
        "augment = 'flip' with views = 2",
    ),
    "features of four views": (
        ["--views", "4", "--augment", "flip", "--features", "scattering", "--model", "linear"],
        "views = 4",
        "computed once",
        "augment = 'flip' with views = 2",
    ),
    "a mirrored table": (
        ["--dataset", "purchase-10", "--views", "2", "--augment", "flip"],
        "(600,)",
        "mirrors or moves images",
        "data set of images",
    ),
    "no such device": (["--device", "tpu"], "tpu", "", "cpu"),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_setting_that_cannot_work_is_refused_with_fact_why_and_fix(
    gradveil: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    arguments, *words = SETTINGS[name]
    outcome = gradveil("train", *SHORT, *arguments, "--run-dir", tmp_path / "run")
    assert outcome.code == 2
    for word in words:
        assert word in outcome.message
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert not (tmp_path / "run").exists(), "nothing may be half-written"


@pytest.mark.parametrize(
    "arguments", [["--sigma", "abc"], ["--no-such-flag"], ["--optimizer", "lion"], ["--decay", "linaer"], ["extra"]]
)
def test_a_malformed_command_line_exits_2(gradveil: Callable[..., Any], tmp_path: Path, arguments: list[str]) -> None:
    outcome = gradveil("train", *arguments, "--run-dir", tmp_path / "run")
    assert outcome.code == 2
    assert outcome.err
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_exists_is_refused_and_left_alone(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    where = tmp_path / "run"
    assert gradveil("train", *SHORT, "--sigma", "12", "--run-dir", where).code == 0
    before = {p: p.read_bytes() for p in where.rglob("*") if p.is_file()}
    outcome = gradveil("train", *SHORT, "--sigma", "12", "--run-dir", where)
    assert outcome.code == 2
    for word in (str(where), "exists and is not empty", "never written over", "--run-dir", "--resume"):
        assert word in outcome.message
    assert {p: p.read_bytes() for p in where.rglob("*") if p.is_file()} == before


def test_a_run_directory_below_a_file_is_refused(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = gradveil("train", *SHORT, "--run-dir", tmp_path / "file" / "run")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


# ---- resuming


@pytest.fixture
def cut(gradveil: Callable[..., Any], tmp_path: Path) -> Path:
    """A seeded run that was interrupted after its checkpoint of step 2, of 4."""
    from gradveil.training.run_directory import RunDirectory

    save = RunDirectory.save_checkpoint

    def last_save(self: RunDirectory, step: int, *args: Any) -> None:
        save(self, step, *args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", last_save)
        arguments = ("--steps", 4, "--batch-size", 8, "--checkpoint-every", 2, "--sigma", 12, "--seed", 5)
        outcome = gradveil("train", *arguments, "--run-dir", tmp_path / "cut")
    assert outcome.code == 130
    assert "--resume" in outcome.message
    return tmp_path / "cut"


def test_an_interrupted_run_is_resumed_to_its_end(gradveil: Callable[..., Any], cut: Path) -> None:
    outcome = gradveil("train", "--resume", cut)
    assert outcome.code == 0
    assert "steps             4  (finished)" in outcome.out
    again = gradveil("train", "--resume", cut)
    assert again.code == 0  # nothing left to do: the result once more
    assert "steps             4  (finished)" in again.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--model", "paper-mlp"],
            ["started with model = 'auto'", "'paper-mlp'", "keeps its settings", "start a new run"],
        ),
        (["--sigma", "13"], ["started with sigma = 12.0", "13.0", "keeps its settings", "start a new run"]),
        (["--strategy", "dyn-sigma"], ["started with strategy = 'baseline'", "'dyn-sigma'", "start a new run"]),
        (["--seed", "6"], ["not started with that seed", "without --seed"]),
        (["--run-dir", "elsewhere"], ["--resume already names the run directory", "remove --run-dir"]),
    ],
)
def test_a_run_is_not_resumed_with_another_model_or_configuration(
    gradveil: Callable[..., Any], cut: Path, arguments: list[str], words: list[str]
) -> None:
    before = (cut / "ledger.jsonl").read_bytes()
    outcome = gradveil("train", "--resume", cut, *arguments)
    assert outcome.code == 2
    for word in words:
        assert word in outcome.message
    assert (cut / "ledger.jsonl").read_bytes() == before


def test_a_run_whose_config_was_edited_is_not_resumed(gradveil: Callable[..., Any], cut: Path) -> None:
    config = cut / "config.toml"
    config.write_text(config.read_text().replace("sigma = 12.0", "sigma = 1.0"))
    outcome = gradveil("train", "--resume", cut)
    assert outcome.code == 2
    for word in ("config.toml", "keeps its settings", "Put the files back"):
        assert word in outcome.message


def test_what_is_no_run_is_not_resumed(gradveil: Callable[..., Any], tmp_path: Path) -> None:
    outcome = gradveil("train", "--resume", tmp_path / "nowhere")
    assert outcome.code == 2
    for word in ("not a run directory", "config.toml", "that gradveil train wrote"):
        assert word in outcome.message


# ---- data files


def _idx(array: np.ndarray) -> bytes:
    sizes = b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Forty training and twenty test images."""
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 20)):
        images = random.integers(0, 256, (count, 28, 28), np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(images), 1))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(_idx(np.arange(count) % 10))
    return folder


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"


def _on_mnist(gradveil: Callable[..., Any], mnist: Path) -> Any:
    run = mnist.parent.parent / "run"
    outcome = gradveil("train", "--dataset", "mnist", "--data-dir", mnist.parent, *SHORT, "--run-dir", run)
    assert run.exists() == (outcome.code == 0), "nothing may be half-written"
    return outcome


def test_whole_idx_files_are_trained_on(gradveil: Callable[..., Any], mnist: Path) -> None:
    assert _on_mnist(gradveil, mnist).code == 0


IDX_DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], list[str]]] = {
    "gzip cut short": (IMAGES, lambda d: d[: len(d) // 2], ["not a whole gzip file", "cut short"]),
    "gzip with a changed byte": (IMAGES, lambda d: d[:200] + bytes([d[200] ^ 255]) + d[201:], [IMAGES]),
    "not gzip": (IMAGES, lambda d: b"hello" + d, [IMAGES, "gzip"]),
    "empty gzip": (IMAGES, lambda d: gzip.compress(b""), ["starts with nothing"]),
    "data cut short": (LABELS, lambda d: d[:-1], ["(40,)", "only 39", "truncated"]),
    "header cut short": (LABELS, lambda d: d[:6], ["inside its header", "truncated"]),
    "empty": (LABELS, lambda d: b"", ["starts with nothing", "not an idx file"]),
    "more data than stated": (LABELS, lambda d: d + b"\0", ["holds more", "other bytes"]),
    "another magic": (LABELS, lambda d: b"\x01" + d[1:], ["starts with 01", "not an idx file"]),
    "a label of 10": (LABELS, lambda d: d[:-1] + b"\n", ["label 10 at position 39", "not a class"]),
    "fewer labels than images": (LABELS, lambda d: _idx(np.zeros(39)), ["39 labels", "40 images"]),
    "a size that lies": (LABELS, lambda d: d[:4] + b"\xff\xff\xff\xff" + d[8:], ["4294967295", "truncated"]),
    "another size of image": (IMAGES, lambda d: gzip.compress(_idx(np.zeros((40, 27, 28)))), ["27x28", "not 28x28"]),
}


@pytest.mark.parametrize("name", list(IDX_DAMAGE))
def test_a_damaged_idx_file_is_refused(gradveil: Callable[..., Any], mnist: Path, name: str) -> None:
    file, damage, words = IDX_DAMAGE[name]
    (mnist / file).write_bytes(damage((mnist / file).read_bytes()))
    outcome = _on_mnist(gradveil, mnist)
    assert outcome.code == 2
    for word in (*words, str(mnist / file), "fresh copy"):
        assert word in outcome.message


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10", "lfw", "purchase-10", "location"])
def test_missing_files_are_answered_with_where_to_put_them(
    gradveil: Callable[..., Any], tmp_path: Path, dataset: str
) -> None:
    (tmp_path / "data").mkdir()
    run = ("--run-dir", tmp_path / "run")
    for arguments, words in (
        ([], ["no data directory", "GRADVEIL_DATA", "--data-dir"]),
        (["--data-dir", tmp_path / "data"], [str(tmp_path / "data"), "published at"]),
        (["--data-dir", tmp_path / "nowhere"], [str(tmp_path / "nowhere"), "does not exist", "--data-dir"]),
    ):
        outcome = gradveil("train", "--dataset", dataset, *SHORT, *arguments, *run)
        assert outcome.code == 2
        for word in words:
            assert word in outcome.message
    assert not (tmp_path / "run").exists()


def test_one_missing_file_of_four_is_named(gradveil: Callable[..., Any], mnist: Path) -> None:
    (mnist / "t10k-labels-idx1-ubyte").unlink()
    outcome = _on_mnist(gradveil, mnist)
    assert outcome.code == 2
    for word in (str(mnist / "t10k-labels-idx1-ubyte"), "does not exist", "gradveil datasets download mnist"):
        assert word in outcome.message


@pytest.mark.parametrize(
    ("rows", "cut", "words"),
    [
        (3, 100, ["not a multiple of 3073", "truncated"]),
        (3, 0, ["holds 3 images, not 10000", "not whole"]),
        (0, 0, ["holds 0 images"]),
    ],
)
def test_a_damaged_cifar_file_is_refused(
    gradveil: Callable[..., Any], tmp_path: Path, rows: int, cut: int, words: list[str]
) -> None:
    folder = tmp_path / "data" / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (folder / name).write_bytes(bytes(3073 * rows - cut))
    run = tmp_path / "run"
    outcome = gradveil("train", "--dataset", "cifar10", "--data-dir", tmp_path / "data", *SHORT, "--run-dir", run)
    assert outcome.code == 2
    for word in (*words, str(folder / "data_batch_1.bin"), "fresh copy"):
        assert word in outcome.message
    assert not run.exists()


CSV_DAMAGE: dict[str, tuple[Callable[[list[str]], str], list[str]]] = {
    "a line cut short": (lambda rows: "\n".join(rows)[:-9], ["line 60", "columns, not 447"]),
    "a column too many": (lambda rows: "\n".join([rows[0] + ",1", *rows[1:]]), ["line 1", "448 columns, not 447"]),
    "a two": (lambda rows: "\n".join([*rows[:6], rows[6][:-1] + "2"]), ["line 7, column 447", "neither 0 nor 1"]),
    "a label of 31": (lambda rows: "\n".join([*rows[:2], '"31"' + rows[2][3:]]), ["line 3", "31", "not in 1..30"]),
    "a label that is a word": (lambda rows: "\n".join(['"x"' + rows[0][3:], *rows[1:]]), ["line 1", "whole number"]),
    "nothing": (lambda rows: "", ["is empty"]),
    "bytes of something else": (lambda rows: "\x00\x01\x02\n" * 5, ["line 1", "columns, not 447"]),
}


@pytest.mark.parametrize("name", list(CSV_DAMAGE))
def test_a_damaged_csv_file_is_refused_at_its_line(gradveil: Callable[..., Any], tmp_path: Path, name: str) -> None:
    random = np.random.default_rng(0)
    rows = [f'"{i % 3 + 1}",' + ",".join(map(str, random.integers(0, 2, 446))) for i in range(60)]
    path = tmp_path / "data" / "location" / "bangkok"
    path.parent.mkdir(parents=True)
    damage, words = CSV_DAMAGE[name]
    path.write_text(damage(rows))
    run = tmp_path / "run"
    outcome = gradveil("train", "--dataset", "location", "--data-dir", tmp_path / "data", *SHORT, "--run-dir", run)
    assert outcome.code == 2
    for word in (*words, str(path), "fresh copy"):
        assert word in outcome.message
    assert not run.exists()


# ---- the same from Python


def _make_private(model: nn.Module | None = None, *, batch_size: int = 10, **settings: Any) -> None:
    model = nn.Linear(4, 3) if model is None else model
    given = {"strategy": "baseline", "clip": 1.0, "sigma": 2.0, "steps": 5, "delta": 1e-3} | settings
    engine = package.PrivacyEngine(**given)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=TensorDataset(torch.zeros(50, 4), torch.zeros(50, dtype=torch.int64)),
        batch_size=batch_size,
    )


def test_batchnorm_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(UnsupportedModelError, match="BatchNorm") as caught:
        _make_private(model, run_dir=tmp_path / "run")
    assert "GroupNorm" in str(caught.value) or "LayerNorm" in str(caught.value)
    assert "'1'" in str(caught.value) or " 1" in str(caught.value), "which of the layers"
    assert not (tmp_path / "run").exists()


def test_a_ledger_that_is_refused_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    _make_private(run_dir=tmp_path / "run")
    model = nn.Linear(4, 3)
    with pytest.raises(GradveilError, match=r"sigma|plan"):
        _make_private(model, run_dir=tmp_path / "run", resume=True, sigma=3.0)
    assert "forward" not in vars(model) and not model._forward_hooks and not model._forward_pre_hooks
    _make_private(model, run_dir=tmp_path / "other")


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": 0.0},
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"clip": 0.0},
        {"clip": -1.0},
        {"clip": math.nan},
        {"delta": 1 / 50},
        {"delta": 0.5},
        {"batch_size": 51},
        {"strategy": "dyn-sigma", "sigma_end": 0.0},
        {"strategy": "basline"},
        {"sampling": "poison"},
        {"steps": 0},
    ],
    ids=str,
)
def test_the_engine_refuses_what_the_command_line_refuses(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(GradveilError) as caught:
        _make_private(run_dir=tmp_path / "run", **settings)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_an_engine_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    _make_private(run_dir=tmp_path / "run")
    with pytest.raises(GradveilError, match="groups"):
        _make_private(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), run_dir=tmp_path / "run", resume=True)
    with pytest.raises(GradveilError, match="ledger"):
        _make_private(run_dir=tmp_path / "run")
