from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from datafiles import CIFAR_NAMES, write_faces, write_idx_set

import gradveil.training.data
from gradveil.errors import DataError, UnknownNameError
from gradveil.training.data import CATALOGUE, data_directory, load

NAMES = ["digits", "mnist", "fashion-mnist", "cifar10", "lfw", "purchase-10", "purchase-50", "location", "retail-10"]
NEED_FILES = [name for name in NAMES if name != "digits"]


def test_public_face() -> None:
    assert sorted(gradveil.training.data.__all__) == gradveil.training.data.__all__
    assert all(hasattr(gradveil.training.data, name) for name in gradveil.training.data.__all__)


def test_catalogue_holds_the_sets() -> None:
    assert list(CATALOGUE) == NAMES
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.kind in ("image", "tabular")
        assert len(entry.input_shape) == (3 if entry.kind == "image" else 1)
        assert entry.train > entry.test > 0
        assert entry.classes >= 10
        assert all((entry.title, entry.formats, entry.source, entry.licence))
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.train = 1  # type: ignore[misc]


def test_catalogue_starts_without_torch() -> None:
    heavy = "*('torch' in sys.modules, 'numpy' in sys.modules)"
    code = f"import sys, gradveil.training.data as d; print(len(d.CATALOGUE), {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(NAMES)), "False", "False"]


def test_data_directory_is_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_directory(None) is None
    monkeypatch.setenv("GRADVEIL_DATA", "/from/environment")
    assert data_directory(None) == Path("/from/environment")
    assert data_directory("") == Path("/from/environment")
    assert data_directory("/given") == Path("/given")
    assert data_directory(Path("/given")) == Path("/given")
    monkeypatch.setenv("GRADVEIL_DATA", "")
    assert data_directory(None) is None
    assert data_directory("~/data") == Path.home() / "data"


def test_available_looks_for_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CATALOGUE["digits"].available(None)
    assert not any(CATALOGUE[name].available(None) for name in NEED_FILES)
    assert not any(CATALOGUE[name].available(tmp_path) for name in NEED_FILES)

    write_idx_set(tmp_path / "mnist")
    write_idx_set(tmp_path / "fashion_mnist", gz=False)
    write_faces(tmp_path / "lfw", {"A_B": 20})
    (tmp_path / "cifar10/cifar-10-batches-bin").mkdir(parents=True)
    for name in CIFAR_NAMES:
        (tmp_path / "cifar10/cifar-10-batches-bin" / name).touch()
    for path in ("purchase/purchase.csv", "location/bangkok", "retail/retail600.csv"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    assert all(CATALOGUE[name].available(tmp_path) for name in NAMES)
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    assert all(CATALOGUE[name].available() for name in NAMES)

    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    (tmp_path / "cifar10/cifar-10-batches-bin/data_batch_4.bin").unlink()
    (tmp_path / "lfw/A_B/A_B_0001.png").unlink()
    assert [name for name in NAMES if not CATALOGUE[name].available()] == ["mnist", "cifar10", "lfw"]


def test_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown data set 'fashion_mnist'.*'fashion-mnist'"):
        load("fashion_mnist")


@pytest.mark.parametrize("name", NEED_FILES)
def test_no_data_directory_says_so_and_how_to_fix_it(name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name)
    message = str(caught.value)
    assert message.startswith("no data directory was given")
    assert "GRADVEIL_DATA or --data-dir" in message
    assert CATALOGUE[name].source in message


@pytest.mark.parametrize("name", NEED_FILES)
def test_missing_file_names_the_path_and_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(name, data_dir=tmp_path)
    message = str(caught.value)
    first = CATALOGUE[name].files[0][0].replace("/<Person_Name>_0001.jpg", "")
    assert f"{tmp_path / first}" in message
    assert "does not exist" in message
    assert "GRADVEIL_DATA or --data-dir" in message
    assert (f"gradveil datasets download {name}" in message) == CATALOGUE[name].downloadable


@pytest.mark.parametrize("name", NEED_FILES)
def test_missing_data_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist") as caught:
        load(name, data_dir=tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / CATALOGUE[name].files[0][0]) in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a directory"):
        load(name, data_dir=tmp_path / "file")


def test_what_the_system_refuses_to_read_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "location").mkdir()
    (tmp_path / "location/bangkok").touch()

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"bangkok cannot be read \(Permission denied\)"):
        load("location", data_dir=tmp_path)
