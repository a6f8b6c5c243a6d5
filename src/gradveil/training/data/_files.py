"""From a data set to the paths of its files, with errors that say what is missing and how to get it."""

from __future__ import annotations

import os
from pathlib import Path

from gradveil.errors import DataError
from gradveil.training.data._description import ENVIRONMENT, Description, data_directory

REPLACE = "Replace it with a fresh copy of the published file."
NAMING = f"Name the data directory with {ENVIRONMENT} or --data-dir (data_dir= in Python)."


def how_to_get(description: Description) -> str:
    """Where the files come from, and whether gradveil can fetch them."""
    if not description.as_published:
        return f"{description.origin} gradveil cannot make it: put it there by hand."
    if not description.downloadable:
        return f"{description.origin} gradveil cannot fetch it: unpack it there by hand."
    command = f"gradveil datasets download {description.name}"
    return f"{description.origin} Where there is a network, '{command}' fetches it."


def root(description: Description, data_dir: str | os.PathLike[str] | None) -> Path:
    """The data directory, which must exist."""
    directory = data_directory(data_dir)
    if directory is None:
        expected = " or ".join(f"DATA_DIR/{spelling}" for spelling in description.files[0])
        raise DataError(
            f"no data directory was given, and {description.name} is read from files ({expected}). "
            f"{NAMING} {how_to_get(description)} The set 'digits' needs no files."
        )
    if not directory.is_dir():
        state = "is not a directory" if directory.exists() else "does not exist"
        expected = " or ".join(str(directory / spelling) for spelling in description.files[0])
        raise DataError(
            f"the data directory {directory} {state}, so {description.name} cannot be read "
            f"(expected: {expected}). {NAMING} {how_to_get(description)}"
        )
    return directory


def locate(description: Description, data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """The path of every file of the set, in catalogue order; the first accepted spelling that exists."""
    directory = root(description, data_dir)
    found: list[Path] = []
    for spellings in description.files:
        path = next((directory / s for s in spellings if (directory / s).is_file()), None)
        if path is None:
            raise missing(description, directory, spellings)
        found.append(path)
    return found


def missing(description: Description, directory: Path, spellings: tuple[str, ...]) -> DataError:
    expected = " or ".join(str(directory / s) for s in spellings)
    return DataError(
        f"{description.name}: {expected} does not exist, and the set is read from it. "
        f"{how_to_get(description)} {NAMING}"
    )


def damaged(path: Path, fact: str, why: str, fix: str = REPLACE) -> DataError:
    """A file that is there but wrong: the fact, why it matters, and the fix."""
    return DataError(f"{path}: {fact}. {why} {fix}")
