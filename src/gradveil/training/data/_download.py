"""Fetch a published data set, check it, and put it in place in one move. No torch.

A file is written beside its target under a temporary name, its checksum is compared with the published one,
and only then is it renamed; an archive is unpacked into a temporary folder first. Whatever happens, no
half-written file stands under the name that a reader opens. The checksums (md5 where nothing better was
published) find damage on the way, not a forger.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from gradveil.errors import DataError
from gradveil.training.data._catalogue import describe
from gradveil.training.data._description import Description, data_directory
from gradveil.training.data._sources import SOURCES, Remote

Progress = Callable[[str, int, int | None], None]

TIMEOUT_SECONDS = 60.0
_CHUNK = 1 << 18


def download(
    name: str,
    data_dir: str | os.PathLike[str] | None,
    progress: Progress | None = None,
    *,
    base_url: str | None = None,
) -> Path:
    """Fetch the set's files into ``data_dir`` (created if need be); returns the folder they are in.

    Files that are there already are kept and not fetched again. ``progress`` is called with the file's name,
    the bytes so far and the bytes in all (None where the server does not say). ``base_url`` names a mirror
    that holds the same files; the checksums stay. Raises :class:`~gradveil.errors.DataError`.
    """
    description = describe(name)
    if not description.needs_files:
        raise DataError(f"{name} needs no download: it comes with scikit-learn. Use it as it is.")
    directory = data_directory(data_dir)
    if directory is None:
        raise DataError(
            f"no data directory was given, so there is nowhere to put {name}. "
            "Set GRADVEIL_DATA or give --data-dir (data_dir= in Python)."
        )
    if name not in SOURCES:
        steps = "Download and unpack it by hand" if description.as_published else "Make it by that rule"
        raise DataError(
            f"{name} cannot be fetched by gradveil, which knows no checksum to check it with. "
            f"{description.origin} {steps} and put it at {_by_hand(description, directory)}."
        )
    source = SOURCES[name]
    folder = directory / source.folder
    base = (base_url or source.base).rstrip("/") + "/"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remote in source.remotes:
            if source.unpacks_to:
                if not description.available(directory):
                    _fetch_archive(base + remote.url, remote, folder / source.unpacks_to, progress)
            elif not any((folder / n).is_file() for n in (remote.name, remote.name.removesuffix(".gz"))):
                _fetch(base + remote.url, remote, folder / remote.name, progress)
    except _Failed as failure:
        raise DataError(
            f"{name}: {failure} No partial file was left. Try again, or put the published file(s) of "
            f"{description.source} by hand at {_by_hand(description, directory)}."
        ) from None
    except OSError as error:
        raise DataError(f"{name}: {folder} cannot be written ({error}). Check its permissions and the disk.") from None
    return folder / source.unpacks_to


class _Failed(Exception):
    """What went wrong, in one sentence."""


def _by_hand(description: Description, directory: Path) -> str:
    return ", ".join(" or ".join(str(directory / s) for s in spellings) for spellings in description.files)


def _fetch(url: str, remote: Remote, target: Path, progress: Progress | None) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        digest, received = _transfer(url, remote, part, progress)
        if digest != remote.checksum:
            raise _Failed(
                f"{url} gave {received} bytes with {remote.algorithm} {digest}, not the published "
                f"{remote.checksum}: the download was cut short or is another file."
            )
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _transfer(url: str, remote: Remote, part: Path, progress: Progress | None) -> tuple[str, int]:
    digest = hashlib.new(remote.algorithm, usedforsecurity=False)
    received = 0
    with part.open("wb") as file:
        try:
            response = urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise _Failed(f"{url} was refused by the server ({error}).") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise _Failed(f"{url} could not be reached ({getattr(error, 'reason', error)}).") from None
        with response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            while True:
                try:
                    piece = response.read(_CHUNK)
                except (http.client.HTTPException, OSError) as error:
                    raise _Failed(f"{url} broke off after {received} bytes ({error}).") from None
                if not piece:
                    return digest.hexdigest(), received
                file.write(piece)
                digest.update(piece)
                received += len(piece)
                if progress is not None:
                    progress(remote.name, received, total)


def _fetch_archive(url: str, remote: Remote, target: Path, progress: Progress | None) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise _Failed(f"{target} exists but is not whole, and it is not ours to replace. Move it away.")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        archive = Path(scratch) / remote.name
        _fetch(url, remote, archive, progress)
        unpacked = Path(scratch) / "unpacked"
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(unpacked, filter="data")  # refuses links and paths that lead outside
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise _Failed(f"{remote.name} could not be unpacked ({error}).") from None
        if not (unpacked / target.name).is_dir():
            raise _Failed(f"{remote.name} holds no folder {target.name!r}.")
        if target.exists():
            target.rmdir()
        (unpacked / target.name).rename(target)
