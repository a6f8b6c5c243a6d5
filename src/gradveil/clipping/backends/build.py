"""Compiling C++ at first use, where there is a compiler, and keeping what came out in the user's cache.

One process compiles at a time, into a folder of its own; what is in the cache is compared with its digest before it is
loaded, since a library that was cut short ends the process that loads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


def compiler() -> str | None:
    """The C++ compiler of this machine: CXX, or the first that is found."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def library(
    compiler: str,
    name: str,
    sources: Sequence[Path],
    *,
    headers: Sequence[Path] = (),
    compile_with: Sequence[str],
    link_with: Sequence[str] = (),
    depends_on: Sequence[str] = (),
    trial: str | None = None,
) -> Path:
    """The compiled library, from the cache or made now; whole or not there at all.

    ``depends_on``: what else, beside sources, flags and machine, makes it another library. ``trial``: Python code that
    loads the library named by its argument, run once in a process of its own, since a library may end its process.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    text = [path.read_text() for path in (*headers, *sources)]
    flags = " ".join([*compile_with, *link_with])
    told = "\n".join([*text, flags, version, platform.machine(), _cpu_flags(), *depends_on])
    file = f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so"
    directory = _cache_directory()
    found = directory / file
    if _is_whole(found):
        return found
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_one(directory):
        if _is_whole(found):  # another process has made it meanwhile
            return found
        _sweep(directory)
        _say(f"compiling {name}, once: about {_SECONDS.get(name, 40)} s")
        with tempfile.TemporaryDirectory(dir=directory, prefix=_BUILDING) as scratch:
            made = Path(scratch) / file
            objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
            for source, compiled in zip(sources, objects, strict=True):
                _run([compiler, *compile_with, "-c", "-o", compiled, str(source)])
            _run([compiler, "-shared", "-o", str(made), *objects, *link_with])
            if trial is not None:
                _run([sys.executable, "-c", trial, str(made)])
            _keep(made, found)
    return found


_BUILDING = "building-"
_SECONDS = {"kernels": 20, "layers": 40}


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Whether the library is there as it was made: one that was cut short would end the process that loads it."""
    try:
        told = _digest_file(library).read_text()
        return hashlib.sha256(library.read_bytes()).hexdigest() == told.strip()
    except (OSError, ValueError):
        return False


def _keep(made: Path, found: Path) -> None:
    """Into the cache: the library, and then its digest, each by a rename."""
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    told = made.with_suffix(".sha256")
    told.write_text(digest + "\n")
    _digest_file(found).unlink(missing_ok=True)
    os.replace(made, found)
    os.replace(told, _digest_file(found))


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """One process compiles at a time; the others wait for it. The system frees the lock of one that was killed."""
    with open(directory / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process, which compiles the kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: two may do the same work, and each renames a whole library
        yield


def _sweep(directory: Path) -> None:
    """Folders of compilations that were killed. Called with the lock held: no other is under way."""
    for folder in directory.glob(f"{_BUILDING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _say(words: str) -> None:
    if sys.stderr is not None:
        print(f"gradveil: {words}", file=sys.stderr, flush=True)


def why(error: BaseException) -> str:
    """The first line of what went wrong."""
    reason = str(getattr(error, "stderr", None) or error).strip().replace(str(Path.home()), "~")
    return (reason.splitlines() or ["no reason given"])[0][:120]


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradveil"


def _cpu_flags() -> str:
    """What -march=native looks at: a cache that is shared between machines must not mix their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
