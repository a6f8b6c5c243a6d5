from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datafiles import write_faces
from PIL import Image

from gradveil.errors import DataError
from gradveil.training.data import load
from gradveil.training.data._lfw import read_face


def test_people_with_enough_images(tmp_path: Path) -> None:
    write_faces(tmp_path / "lfw", {"Zoe": 24, "Ann": 20, "Rare": 19})
    (tmp_path / "lfw/Ann/notes.txt").write_text("not an image")
    (tmp_path / "lfw/README").write_text("not a person")
    data = load("lfw", data_dir=tmp_path)
    assert data.classes == 2
    assert (data.input_shape, data.kind) == ((3, 32, 32), "image")
    assert (len(data.x_train), len(data.x_test)) == (33, 11)
    assert data.y_train.bincount().tolist() == [15, 18]
    assert data.y_test.bincount().tolist() == [5, 6]
    assert "2 people, 44 faces" in data.note
    again = load("lfw", data_dir=tmp_path)
    assert torch.equal(data.x_train, again.x_train)
    with Image.open(tmp_path / "lfw/Ann/Ann_0001.png") as image:
        ann = torch.tensor(image.getpixel((0, 0))).float() / 255
    assert torch.allclose(data.x_test[data.y_test == 0][0, :, 5, 5], ann)


def test_published_frames_are_cropped_to_the_central_half(tmp_path: Path) -> None:
    frame = np.zeros((250, 250, 3), np.uint8)
    frame[62:187, 62:187] = (200, 100, 50)
    frame[62:124, 62:187, 2] = 250
    Image.fromarray(frame).save(tmp_path / "face.png")
    face = read_face(tmp_path / "face.png")
    assert face.shape == (3, 32, 32)
    assert face.dtype == np.uint8
    assert np.all(face[0] == 200)
    assert np.all(face[1] == 100)
    assert np.all(face[2, :14] == 250)
    assert np.all(face[2, 18:] == 50)


def test_small_faces_are_taken_as_they_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "face.png")
    assert np.array_equal(read_face(tmp_path / "face.png"), pixels.transpose(2, 0, 1))
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "grey.png")
    assert np.array_equal(read_face(tmp_path / "grey.png")[2], pixels[:, :, 0])


def test_jpeg(tmp_path: Path) -> None:
    Image.new("RGB", (250, 250), (10, 120, 240)).save(tmp_path / "face.jpg", quality=95)
    assert np.allclose(read_face(tmp_path / "face.jpg").mean((1, 2)), (10, 120, 240), atol=3)


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "flipped"])
def test_unreadable_image_is_named(damage: str, tmp_path: Path) -> None:
    write_faces(tmp_path / "lfw", {"Ann": 20, "Zoe": 20})
    path = tmp_path / "lfw/Zoe/Zoe_0007.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "text": b"<html>404</html>",
            "empty": b"",
            "cut": whole[: len(whole) // 2],
            "flipped": whole[:1000] + bytes(b ^ 255 for b in whole[1000:1100]) + whole[1100:],
        }[damage]
    )
    with pytest.raises(DataError, match="cannot be read as an image") as caught:
        load("lfw", data_dir=tmp_path)
    assert str(path) in str(caught.value)


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    write_faces(tmp_path / "lfw", {"Ann": 20, "Zoe": 20}, size=64)
    with pytest.raises(DataError, match=r"Ann_0001.png: is 64x64. Faces are 250x250 as published"):
        load("lfw", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("people", "fact"),
    [
        ({}, "no person has"),
        ({"Ann": 19, "Zoe": 3}, "no person has"),
        ({"Ann": 20, "Zoe": 3}, "only 'Ann' has"),
    ],
)
def test_too_few_people(people: dict[str, int], fact: str, tmp_path: Path) -> None:
    (tmp_path / "lfw").mkdir()
    write_faces(tmp_path / "lfw", people)
    with pytest.raises(DataError, match=f"{fact} at least 20 images") as caught:
        load("lfw", data_dir=tmp_path)
    assert str(tmp_path / "lfw") in str(caught.value)
