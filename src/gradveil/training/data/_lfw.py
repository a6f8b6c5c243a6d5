"""Labeled Faces in the Wild: a folder of images per person, as the published archive unpacks.

As in the paper, the people with at least 20 images, at 32x32. The published frames are 250x250 with the
face in the middle: the central half is kept and resized. Images that are 32x32 already are taken as they are.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from gradveil.errors import DataError
from gradveil.training.data._dataset import Parts
from gradveil.training.data._description import LFW_MIN_IMAGES, Description, people
from gradveil.training.data._files import damaged, missing, root
from gradveil.training.data._split import SEED, stratified

SIDE = 32
FRAME = 250
_CENTRE = (FRAME // 4, FRAME // 4, FRAME // 4 + FRAME // 2, FRAME // 4 + FRAME // 2)


def read(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    """Every person with enough images, in alphabetical order, split 3:1 within each."""
    directory = root(description, data_dir)
    folder = directory / "lfw"
    if not folder.is_dir():
        raise missing(description, directory, ("lfw/<Person_Name>/",))
    found = list(people(folder))
    if len(found) < 2:
        only = f"only {found[0][0]!r} has" if found else "no person has"
        raise DataError(
            f"{folder}: {only} at least {LFW_MIN_IMAGES} images (.jpg or .png). The classes are the people "
            f"with that many, and two are needed. Expected: {folder}/<Person_Name>/<Person_Name>_0001.jpg, "
            "as the published lfw.tgz unpacks; look for a folder level too many or too few."
        )
    x = np.stack([read_face(path) for _, images in found for path in images])
    y = np.repeat(np.arange(len(found), dtype=np.int64), [len(images) for _, images in found])
    train, test = stratified(y, 0.25)
    note = (
        f"{description.title}: {len(found)} people, {len(x)} faces at {SIDE}x{SIDE}; no published split: "
        f"3:1 here, stratified by person, seed {SEED}: {len(train)} train, {len(test)} test."
    )
    return Parts(x[train], y[train], x[test], y[test], classes=len(found), scale=255, note=note)


def read_face(path: Path) -> npt.NDArray[np.uint8]:
    """One face as a (3, 32, 32) array."""
    try:
        with Image.open(path) as image:
            size = image.size
            if size in ((SIDE, SIDE), (FRAME, FRAME)):
                face = image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds on a damaged file; all mean the same here
        raise damaged(path, f"cannot be read as an image ({error})", "A face is missing from the set.") from None
    if size == (FRAME, FRAME):
        face = face.crop(_CENTRE).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    elif size != (SIDE, SIDE):
        raise damaged(
            path,
            f"is {size[0]}x{size[1]}",
            f"Faces are {FRAME}x{FRAME} as published (the central half is used) or {SIDE}x{SIDE}.",
        )
    return np.asarray(face, np.uint8).transpose(2, 0, 1)
