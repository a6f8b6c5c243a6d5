"""Local mirrors of the published files, so that downloads are tested without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradveil.training.data import _download
from gradveil.training.data._sources import SOURCES


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Short(Quiet):
    """Promises the whole file and breaks off half-way."""

    def copyfile(self, source: io.BufferedIOBase, outputfile: io.BufferedIOBase) -> None:  # type: ignore[override]
        data = source.read()
        outputfile.write(data[: len(data) // 2])


def serve(folder: Path, handler: type[SimpleHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def publish(name: str, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the checksums of what the mirror holds for the published ones."""
    source = SOURCES[name]
    remotes = tuple(
        dataclasses.replace(r, checksum=hashlib.new(r.algorithm, (mirror / r.url).read_bytes()).hexdigest())
        for r in source.remotes
    )
    changed = {**SOURCES, name: dataclasses.replace(source, remotes=remotes)}
    monkeypatch.setattr(_download, "SOURCES", changed)


def pack(archive: Path, folder: Path, top: str) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=top)


def everything_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
