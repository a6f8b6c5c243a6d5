"""Compiling C++ at first use, where there is a compiler, and keeping what came out in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    if found.exists():
        return found
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / file
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        for source, compiled in zip(sources, objects, strict=True):
            _run([compiler, *compile_with, "-c", "-o", compiled, str(source)])
        _run([compiler, "-shared", "-o", str(made), *objects, *link_with])
        if trial is not None:
            _run([sys.executable, "-c", trial, str(made)])
        os.replace(made, found)
    return found


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
