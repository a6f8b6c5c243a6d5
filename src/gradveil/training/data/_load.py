"""``load``: the one door to every data set. Readers are imported when they are needed."""

from __future__ import annotations

import os

from gradveil.errors import DataError
from gradveil.training.data._catalogue import describe
from gradveil.training.data._dataset import DataSet, Parts, assemble
from gradveil.training.data._description import Description, data_directory
from gradveil.training.data._download import download as fetch


def _read(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    match description.name:
        case "digits":
            from gradveil.training.data import _digits

            return _digits.read()
        case "mnist" | "fashion-mnist":
            from gradveil.training.data import _idx

            return _idx.read(description, data_dir)
        case "cifar10":
            from gradveil.training.data import _cifar

            return _cifar.read(description, data_dir)
        case "lfw":
            from gradveil.training.data import _lfw

            return _lfw.read(description, data_dir)
        case "location":
            from gradveil.training.data import _tables

            return _tables.read_location(description, data_dir)
        case "retail-10":
            from gradveil.training.data import _tables

            return _tables.read_retail(description, data_dir)
        case _:
            from gradveil.training.data import _tables

            return _tables.read_purchase(description, data_dir)


def load(name: str, *, data_dir: str | os.PathLike[str] | None = None, download: bool = False) -> DataSet:
    """Read a data set of the catalogue into memory.

    ``data_dir`` is the directory that holds the files (else GRADVEIL_DATA; ``digits`` needs none). With
    ``download`` a set that is not there is fetched first. Splits that are not published are fixed by
    constant seeds: the same files always give the same split.

    Raises :class:`~gradveil.errors.UnknownNameError` for a name that is not in the catalogue and
    :class:`~gradveil.errors.DataError` for files that are missing, truncated, or not what they should be.
    """
    description = describe(name)
    if download and not description.available(data_dir):
        fetch(name, data_dir)
    try:
        parts = _read(description, data_dir)
    except OSError as error:
        where = error.filename or data_directory(data_dir)
        raise DataError(
            f"{name}: {where} cannot be read ({error.strerror or error}). Check its permissions and the disk."
        ) from None
    return assemble(description, parts)
