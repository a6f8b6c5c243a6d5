"""The cache of compiled kernels: one process compiles, what is loaded is whole, what was killed is swept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gradveil.clipping.backends import build

SOURCE = 'extern "C" int answer() { return 42; }\n'
ASKS = "import ctypes, sys; assert ctypes.CDLL(sys.argv[1]).answer() == 42"
FLAGS = ("-O0", "-fPIC")

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def _made(source: Path) -> Path:
    compiler = build.compiler()
    assert compiler is not None
    return build.library(compiler, "answer", [source], compile_with=FLAGS, trial=ASKS)


@pytest.mark.parametrize("damage", ["cut", "empty", "a byte changed", "no digest", "another digest", "a directory"])
def test_a_library_that_is_not_as_it_was_made_is_made_again(source: Path, damage: str, capfd) -> None:
    library = _made(source)
    assert "compiling answer, once" in capfd.readouterr().err
    assert _made(source) == library and not capfd.readouterr().err
    whole, digest = library.read_bytes(), library.with_suffix(".sha256")
    if damage == "cut":
        os.truncate(library, len(whole) // 2)  # loading this one is a SIGBUS
    elif damage == "empty":
        library.write_bytes(b"")
    elif damage == "a byte changed":
        library.write_bytes(whole[:-9] + b"!" + whole[-8:])
    elif damage == "no digest":
        digest.unlink()
    elif damage == "another digest":
        digest.write_text("0" * 64)
    else:
        digest.unlink()
        digest.mkdir()
        with pytest.raises(OSError):
            _made(source)
        shutil.rmtree(digest)
    assert _made(source) == library
    assert "compiling" in capfd.readouterr().err
    subprocess.run([sys.executable, "-c", ASKS, str(library)], check=True)


def test_folders_of_compilations_that_were_killed_are_swept(source: Path) -> None:
    cache = _made(source).parent
    (cache / "building-dead").mkdir()
    (cache / "building-dead" / "half.o").write_bytes(b"x")
    source.write_text(SOURCE.replace("42", "6 * 7"))
    _made(source)
    assert sorted(p.suffix for p in cache.iterdir() if p.name != ".lock") == [".sha256", ".sha256", ".so", ".so"]


def test_one_compiles_and_the_others_wait_for_it(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    compiled: list[str] = []
    run, entered = build._run, threading.Event()

    def slowly(command: list[str]) -> None:
        compiled.append(command[-1])
        entered.set()
        run(command)

    monkeypatch.setattr(build, "_run", slowly)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(_made(source))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert len(compiled) == 3, "compiled, linked and tried once"
    assert capfd.readouterr().err.count("compiling answer, once") == 1
