"""Where the sets that gradveil can fetch are published, with their published checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Remote:
    """One file: ``url`` below the base, the name it is saved under, and its published checksum."""

    url: str
    name: str
    algorithm: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a set comes from: a base address, a folder below DATA_DIR, and its files.

    With ``unpacks_to`` the one file is a tar archive whose top folder has that name and goes to ``folder``.
    """

    base: str
    folder: str
    remotes: tuple[Remote, ...]
    unpacks_to: str = ""


def _idx(folder: str, base: str, **md5: str) -> Source:
    names = {"images": "images-idx3-ubyte.gz", "labels": "labels-idx1-ubyte.gz"}
    remotes = []
    for key, checksum in md5.items():
        part, what = key.split("_")
        name = f"{part}-{names[what]}"
        remotes.append(Remote(url=name, name=name, algorithm="md5", checksum=checksum))
    return Source(base=base, folder=folder, remotes=tuple(remotes))


SOURCES: Mapping[str, Source] = {
    "mnist": _idx(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        train_images="f68b3c2dcbeaaa9fbdd348bbdeb94873",
        train_labels="d53e105ee54ea40749a09fcbcd1e9432",
        t10k_images="9fb629c4189551a2d022fa330f9573f3",
        t10k_labels="ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": _idx(
        "fashion_mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        train_images="8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        train_labels="25c81989df183df01b3e8a0aad5dffbe",
        t10k_images="bef4ecab320f06d8554ea6380940ec79",
        t10k_labels="bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar10": Source(
        base="https://www.cs.toronto.edu/~kriz/",
        folder="cifar10",
        remotes=(
            Remote(
                url="cifar-10-binary.tar.gz",
                name="cifar-10-binary.tar.gz",
                algorithm="md5",
                checksum="c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        unpacks_to="cifar-10-batches-bin",
    ),
    "lfw": Source(
        # The copy of lfw.tgz that scikit-learn fetches; its checksum is the one scikit-learn publishes.
        base="https://ndownloader.figshare.com/files/",
        folder="",
        remotes=(
            Remote(
                url="5976018",
                name="lfw.tgz",
                algorithm="sha256",
                checksum="055f7d9c632d7370e6fb4afc7468d40f970c34a80d4c6f50ffec63f5a8d536c0",
            ),
        ),
        unpacks_to="lfw",
    ),
}
