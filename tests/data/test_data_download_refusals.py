"""Whatever goes wrong with a download, no file is left behind and the message says what to do."""

from __future__ import annotations

import io
import socket
import tarfile
from pathlib import Path

import pytest
from datafiles import write_faces, write_idx_set
from mirrors import everything_below, pack, publish

from gradveil.errors import DataError, UnknownNameError
from gradveil.training.data import CATALOGUE, download, load
from gradveil.training.data._sources import SOURCES


def refused(name: str, data: Path, base_url: str) -> str:
    """The message; nothing but folders may be left behind."""
    with pytest.raises(DataError) as caught:
        download(name, data, base_url=base_url)
    assert everything_below(data) == []
    message = str(caught.value)
    for spellings in CATALOGUE[name].files:
        assert str(data / spellings[0]) in message
    return message


def test_wrong_checksum(mirror: Path, http: str, tmp_path: Path) -> None:
    write_idx_set(mirror)
    message = refused("mnist", tmp_path / "data", http)
    assert "not the published f68b3c2dcbeaaa9fbdd348bbdeb94873" in message
    for name, file in (("cifar10", "cifar-10-binary.tar.gz"), ("lfw", "5976018")):
        (mirror / file).write_bytes(b"another file")
        assert "gave 12 bytes" in refused(name, tmp_path / "data", http)


def test_second_file_wrong_keeps_the_first(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(mirror)
    publish("mnist", mirror, monkeypatch)
    (mirror / "train-labels-idx1-ubyte.gz").write_bytes(b"changed")
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz gave 7 bytes"):
        download("mnist", tmp_path / "data", base_url=mirror.as_uri())
    assert everything_below(tmp_path / "data") == ["mnist/train-images-idx3-ubyte.gz"]


def test_cut_short(mirror: Path, short_http: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(mirror)
    publish("mnist", mirror, monkeypatch)
    assert "cut short" in refused("mnist", tmp_path / "data", short_http)


def test_connection_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        for name in SOURCES:
            message = refused(name, tmp_path / "data", url)
            assert "could not be reached" in message
            assert "refused" in message
            assert "by hand" in message


def test_not_found_and_nonsense_addresses(http: str, tmp_path: Path) -> None:
    assert "404" in refused("cifar10", tmp_path / "data", http)
    assert "could not be reached" in refused("mnist", tmp_path / "data", "nonsense")
    assert "could not be reached" in refused("mnist", tmp_path / "data", (tmp_path / "nowhere").as_uri())


@pytest.mark.parametrize("member", ["../escape", "/escape", "lfw/../../escape"])
def test_archive_cannot_write_outside(
    member: str, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(mirror / "5976018", "w:gz") as tar:
        info = tarfile.TarInfo(member)
        info.size = 4
        tar.addfile(info, io.BytesIO(b"evil"))
    publish("lfw", mirror, monkeypatch)
    refused("lfw", tmp_path / "data", mirror.as_uri())
    assert not list(tmp_path.rglob("escape"))


def test_archive_that_is_none_or_holds_another_folder(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mirror / "5976018").write_bytes(b"not a tar file")
    publish("lfw", mirror, monkeypatch)
    assert "could not be unpacked" in refused("lfw", tmp_path / "data", mirror.as_uri())
    write_faces(tmp_path / "source", {"Ann": 1})
    pack(mirror / "5976018", tmp_path / "source", "elsewhere")
    publish("lfw", mirror, monkeypatch)
    assert "holds no folder 'lfw'" in refused("lfw", tmp_path / "data", mirror.as_uri())


def test_folder_that_is_not_whole_is_not_replaced(tmp_path: Path) -> None:
    write_faces(tmp_path / "lfw", {"Ann": 1})
    with pytest.raises(DataError, match="not ours to replace"):
        download("lfw", tmp_path, base_url="file:///nowhere")
    assert everything_below(tmp_path) == ["lfw/Ann/Ann_0001.png"]


@pytest.mark.parametrize(
    ("name", "where", "step"),
    [
        ("purchase-10", r"published at https://github\.com/privacytrustlab/datasets", "unpack it by hand"),
        ("purchase-50", r"published at https://github\.com/privacytrustlab/datasets", "unpack it by hand"),
        ("location", r"published at https://github\.com/privacytrustlab/datasets", "unpack it by hand"),
        ("retail-10", r"made from the FIMI repository.* 600 most frequent items.* k-means", "Make it by that rule"),
    ],
)
def test_sets_that_cannot_be_fetched_say_where_they_are(name: str, where: str, step: str, tmp_path: Path) -> None:
    for attempt in (
        lambda: download(name, tmp_path),
        lambda: load(name, data_dir=tmp_path, download=True),
    ):
        with pytest.raises(DataError, match=where) as caught:
            attempt()
        assert step in str(caught.value)
        assert str(tmp_path / CATALOGUE[name].files[0][0]) in str(caught.value)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="comes with scikit-learn"):
        download("digits", tmp_path)
    with pytest.raises(DataError, match="no data directory was given"):
        download("mnist", None)
    with pytest.raises(UnknownNameError, match="Did you mean 'mnist'"):
        download("minst", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        download("mnist", tmp_path / "file")
