from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from datafiles import write_cifar, write_faces, write_idx_set
from mirrors import everything_below, pack, publish

from gradveil.training.data import CATALOGUE, _cifar, _download, download, load
from gradveil.training.data._sources import SOURCES


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_over_http(
    name: str, mirror: Path, http: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx_set(mirror)
    publish(name, mirror, monkeypatch)
    seen: list[tuple[str, int, int | None]] = []
    data = tmp_path / "new" / "data"
    folder = download(name, data, lambda *step: seen.append(step), base_url=http)
    assert folder == data / name.replace("-", "_")
    assert everything_below(folder) == everything_below(mirror)
    assert len(load(name, data_dir=data).x_train) == 30
    assert {step[0] for step in seen} == {r.name for r in SOURCES[name].remotes}
    assert all(done == total for _, done, total in seen)


def test_what_is_there_is_kept(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(mirror)
    publish("mnist", mirror, monkeypatch)
    mine = tmp_path / "data/mnist"
    mine.mkdir(parents=True)
    (mine / "train-images-idx3-ubyte").write_bytes(b"mine, unpacked")
    (mine / "t10k-labels-idx1-ubyte.gz").write_bytes(b"mine")
    download("mnist", tmp_path / "data", base_url=mirror.as_uri())
    assert (mine / "train-images-idx3-ubyte").read_bytes() == b"mine, unpacked"
    assert (mine / "t10k-labels-idx1-ubyte.gz").read_bytes() == b"mine"
    assert not (mine / "train-images-idx3-ubyte.gz").exists()
    assert (mine / "t10k-images-idx3-ubyte.gz").is_file()


def test_cifar10_archive(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cifar, "ROWS", 2)
    write_cifar(tmp_path / "source", rows=2)
    pack(mirror / "cifar-10-binary.tar.gz", tmp_path / "source", "cifar-10-batches-bin")
    publish("cifar10", mirror, monkeypatch)
    (tmp_path / "data/cifar10/cifar-10-batches-bin").mkdir(parents=True)  # an empty folder is no obstacle
    folder = download("cifar10", tmp_path / "data", base_url=mirror.as_uri())
    assert everything_below(tmp_path / "data") == [
        f"cifar10/{folder.name}/{p}" for p in everything_below(tmp_path / "source")
    ]
    assert len(load("cifar10", data_dir=tmp_path / "data").x_train) == 10
    assert download("cifar10", tmp_path / "data", base_url="file:///nowhere") == folder


def test_lfw_archive_and_load_with_download(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_faces(tmp_path / "source", {"Ann": 20, "Zoe": 20})
    pack(mirror / "5976018", tmp_path / "source", "lfw")
    publish("lfw", mirror, monkeypatch)
    here = dataclasses.replace(_download.SOURCES["lfw"], base=mirror.as_uri())
    monkeypatch.setattr(_download, "SOURCES", {"lfw": here})
    assert load("lfw", data_dir=tmp_path / "data", download=True).classes == 2
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["lfw"]
    monkeypatch.setattr(_download, "SOURCES", {})
    assert load("lfw", data_dir=tmp_path / "data", download=True).classes == 2


def test_sources_and_catalogue_agree() -> None:
    assert set(SOURCES) == {name for name, entry in CATALOGUE.items() if entry.downloadable}
    for name in ("mnist", "fashion-mnist"):
        fetched = {f"{SOURCES[name].folder}/{r.name}" for r in SOURCES[name].remotes}
        assert fetched == {spellings[1] for spellings in CATALOGUE[name].files}
    lengths = {"md5": 32, "sha256": 64}
    assert all(len(r.checksum) == lengths[r.algorithm] for s in SOURCES.values() for r in s.remotes)


def test_lfw_is_the_archive_that_scikit_learn_fetches() -> None:
    from sklearn.datasets import _lfw

    (remote,) = SOURCES["lfw"].remotes
    assert (SOURCES["lfw"].base + remote.url, remote.checksum) == (_lfw.ARCHIVE.url, _lfw.ARCHIVE.checksum)
