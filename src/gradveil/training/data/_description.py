"""What is known of a data set before any file is opened, and where its files are looked for. No torch.

Every file is looked for below one directory, DATA_DIR: the ``data_dir`` argument (``--data-dir``), else
the environment variable GRADVEIL_DATA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ENVIRONMENT = "GRADVEIL_DATA"
LFW_MIN_IMAGES = 20
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})

Kind = Literal["image", "tabular"]


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The directory that holds the data: the argument, else GRADVEIL_DATA, else None.

    An empty string counts as not given, and ``~`` is expanded.
    """
    chosen = os.fspath(data_dir) if data_dir is not None else ""
    chosen = chosen or os.environ.get(ENVIRONMENT, "")
    return Path(chosen).expanduser() if chosen else None


@dataclass(frozen=True, kw_only=True)
class Description:
    """An entry of the catalogue.

    ``train`` and ``test`` are the sizes of the published files; a loaded set says what was really there.
    ``files`` lists what is read, relative to DATA_DIR; each entry is a tuple of accepted spellings.
    An empty ``files`` means that the set comes with an installed package. Where ``as_published`` is False the
    file read is not the published one but made from it, and ``source`` gives the rule.
    """

    name: str
    title: str
    kind: Kind
    train: int
    test: int
    input_shape: tuple[int, ...]
    classes: int
    formats: str
    source: str
    licence: str
    files: tuple[tuple[str, ...], ...] = ()
    downloadable: bool = False
    as_published: bool = True

    @property
    def needs_files(self) -> bool:
        return bool(self.files)

    @property
    def origin(self) -> str:
        """One sentence: where the file is published, or what it is made from."""
        return f"It is published at {self.source}." if self.as_published else f"Its file is made from {self.source}."

    def available(self, data_dir: str | os.PathLike[str] | None = None) -> bool:
        """Whether every file of the set is in place. Says nothing about what is in the files."""
        if not self.needs_files:
            return True
        directory = data_directory(data_dir)
        if directory is None:
            return False
        try:
            if self.name == "lfw":
                return any(True for _ in people(directory / "lfw"))
            return all(any((directory / path).is_file() for path in spellings) for spellings in self.files)
        except OSError:  # a folder that may not be entered
            return False


def people(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """The people with enough images below ``folder``, by name, each with its image files by name."""
    if not folder.is_dir():
        return
    for person in sorted(folder.iterdir()):
        if person.name.startswith(".") or not person.is_dir():
            continue
        images = [p for p in person.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and p.name[0] != "."]
        if len(images) >= LFW_MIN_IMAGES:
            yield person.name, sorted(images)
