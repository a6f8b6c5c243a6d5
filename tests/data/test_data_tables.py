from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datafiles import write_table

from gradveil.errors import DataError
from gradveil.training.data import CATALOGUE, _csv, _tables, load
from gradveil.training.data._csv import read_bits
from gradveil.training.data._split import SEED


def blobs(count: int, columns: int, groups: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bits around ``groups`` prototypes, two in a hundred flipped."""
    random = np.random.default_rng(seed)
    prototypes = random.integers(0, 2, (groups, columns))
    group = np.arange(count) % groups
    return prototypes[group] ^ (random.random((count, columns)) < 0.02), group


@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_reader_gives_what_was_written(quoted: bool, end: str, tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (50, 7))
    labels = np.arange(50) * 3
    write_table(tmp_path / "t", bits, labels, quoted=quoted, end=end)
    x, y = read_bits(tmp_path / "t", columns=7, labels=None)
    assert np.array_equal(x, bits)
    assert np.array_equal(y, labels)
    assert (x.dtype, y.dtype) == (np.uint8, np.int64)


def test_last_line_needs_no_newline_and_blank_lines_at_the_end_are_nothing(tmp_path: Path) -> None:
    for text in (b"1,0,1\n2,1,1", b"1,0,1\n2,1,1\n\n \n"):
        (tmp_path / "t").write_bytes(text)
        assert read_bits(tmp_path / "t", columns=2, labels=None)[0].tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("third", "fact"),
    [
        ("2,0,1", "line 3: 3 columns, not 4"),
        ("2,0,1,1,0", "line 3: 5 columns, not 4"),
        ("", "line 3: 1 columns, not 4"),
        ("2,0,1,2", "line 3, column 4: '2' is neither 0 nor 1"),
        ("2,0,-1,0", "line 3, column 3: '-1' is neither 0 nor 1"),
        ("2,0,,0", "line 3, column 3: '' is neither 0 nor 1"),
        ("2,0.0,1,0", "line 3, column 2: '0.0' is neither 0 nor 1"),
        ("2,0,1,0 ", "line 3, column 4: '0 ' is neither 0 nor 1"),
        ("2;0;1;0", "line 3: 1 columns, not 4"),
        ("2,0,/,0", "line 3, column 3: '/' is neither 0 nor 1"),
        ("x,0,1,0", "line 3: the label 'x' is not a whole number"),
        ('"2,0,1,0', "line 3: the label '\"2' is not a whole number"),
        (",0,1,0", "line 3: the label '' is not a whole number"),
        ("-2,0,1,0", "line 3: the label '-2' is not a whole number"),
        ("0,0,1,0", "line 3: the label 0 is not in 1..9"),
        ("10,0,1,0", "line 3: the label 10 is not in 1..9"),
    ],
)
@pytest.mark.parametrize("block", [2, 8192])
def test_bad_line_is_named(third: str, fact: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_csv, "_BLOCK", block)
    (tmp_path / "t").write_text(f"1,0,0,1\n9,1,1,1\n{third}\n1,0,1,0\n")
    with pytest.raises(DataError) as caught:
        read_bits(tmp_path / "t", columns=3, labels=range(1, 10))
    assert f"{tmp_path / 't'}: {fact}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_empty_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(DataError, match="is empty"):
        read_bits(tmp_path / "t", columns=3, labels=None)


def test_long_foreign_text_is_shortened_in_the_message(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff" * 5000 + b",0,1\n")
    with pytest.raises(DataError) as caught:
        read_bits(tmp_path / "t", columns=2, labels=None)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_location_cut_at_the_end_of_a_line_is_refused(tmp_path: Path) -> None:
    bits, group = blobs(300, 446, 30)
    write_table(tmp_path / "location/bangkok", bits, group + 1, quoted=True)
    with pytest.raises(DataError, match="it has 300 records, the published file 5010"):
        load("location", data_dir=tmp_path)


def test_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tables, "LOCATION_ROWS", 300)
    bits, group = blobs(300, 446, 30)
    write_table(tmp_path / "location/bangkok", bits, group + 1, quoted=True)
    data = load("location", data_dir=tmp_path)
    assert (data.classes, data.input_shape, data.kind) == (30, (446,), "tabular")
    assert data.x_train.shape == (240, 446)
    assert data.x_train.dtype == torch.float32
    assert data.y_train.bincount().tolist() == [8] * 30
    assert data.y_test.bincount().tolist() == [2] * 30
    rows = {(*row, label) for row, label in zip(bits.tolist(), group.tolist(), strict=True)}
    for row, label in zip(data.x_test.int().tolist(), data.y_test.tolist(), strict=True):
        assert (*row, label) in rows


def test_location_labels_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tables, "LOCATION_ROWS", 1)
    bits, group = blobs(60, 446, 30)
    for shift in (0, 2):
        write_table(tmp_path / "location/bangkok", bits, group + shift, quoted=True)
        with pytest.raises(DataError, match=r"the label \d+ is not in 1..30"):
            load("location", data_dir=tmp_path)
    write_table(tmp_path / "location/bangkok", bits[:1], group[:1] + 1)
    with pytest.raises(DataError, match="cannot be split"):
        load("location", data_dir=tmp_path)


@pytest.mark.parametrize("classes", [10, 50])
@pytest.mark.parametrize("file", ["dataset_purchase", "dataset_purchase.csv", "purchase.csv"])
def test_purchase_classes_are_clusters(classes: int, file: str, tmp_path: Path) -> None:
    bits, group = blobs(300, 600, classes)
    published = np.random.default_rng(1).integers(1, 101, 300)
    write_table(tmp_path / "purchase" / file, bits, published)
    data = load(f"purchase-{classes}", data_dir=tmp_path)
    assert (data.classes, data.input_shape, data.kind) == (classes, (600,), "tabular")
    assert (len(data.x_train), len(data.x_test)) == (250, 50)
    assert "k-means" in data.note
    assert len(torch.cat([data.y_train, data.y_test]).unique()) == classes
    again = load(f"purchase-{classes}", data_dir=tmp_path)
    assert torch.equal(data.y_train, again.y_train)
    assert torch.equal(data.x_test, again.x_test)
    if classes == 10:  # ten well-parted groups are found, so that each cluster lies inside one group
        true = {tuple(row): g for row, g in zip(bits.tolist(), group.tolist(), strict=True)}
        pairs = {
            (true[tuple(row)], label)
            for row, label in zip(data.x_train.int().tolist(), data.y_train.tolist(), strict=True)
        }
        assert len(pairs) <= classes + 3


def test_purchase_split_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradveil.training.data import _tables

    monkeypatch.setattr(_tables, "PURCHASE_TEST", 20)
    monkeypatch.setattr(_tables, "PURCHASE_TOTAL", 120)
    bits, _ = blobs(150, 600, 10)
    write_table(tmp_path / "purchase/purchase.csv", bits, np.ones(150, int))
    data = load("purchase-10", data_dir=tmp_path)
    assert (len(data.x_train), len(data.x_test)) == (100, 20)


def test_purchase_refuses_what_cannot_be_clustered(tmp_path: Path) -> None:
    bits, _ = blobs(9, 600, 9)
    write_table(tmp_path / "purchase/purchase.csv", bits, np.ones(9, int))
    with pytest.raises(DataError, match="9 record"):
        load("purchase-10", data_dir=tmp_path)
    write_table(tmp_path / "purchase/purchase.csv", np.tile(bits[:3], (20, 1)), np.ones(60, int))
    with pytest.raises(DataError, match="fall into 3 clusters, not 10"):
        load("purchase-10", data_dir=tmp_path)


def test_purchase_with_the_columns_of_another_set(tmp_path: Path) -> None:
    bits, _ = blobs(20, 446, 5)
    write_table(tmp_path / "purchase/purchase.csv", bits, np.ones(20, int))
    with pytest.raises(DataError, match="line 1: 447 columns, not 601"):
        load("purchase-10", data_dir=tmp_path)


def write_retail(folder: Path, count: int = 150, *, columns: int = 600) -> tuple[Path, np.ndarray, np.ndarray]:
    """retail/retail600.csv with ``count`` lines; its path, its bits and its first labels."""
    bits, group = blobs(count, columns, 20)
    path = folder / "retail/retail600.csv"
    write_table(path, bits, np.array([f"{g // 2},{g}" for g in group]))
    return path, bits, group // 2


@pytest.fixture
def short_retail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tables, "RETAIL_ROWS", 150)
    monkeypatch.setattr(_tables, "PURCHASE_TEST", 20)
    monkeypatch.setattr(_tables, "PURCHASE_TOTAL", 120)


@pytest.mark.usefixtures("short_retail")
def test_retail_class_is_the_first_label_and_the_draw_is_that_of_purchase(tmp_path: Path) -> None:
    _, bits, label = write_retail(tmp_path)
    data = load("retail-10", data_dir=tmp_path)
    assert (data.classes, data.input_shape, data.kind) == (10, (600,), "tabular")
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.float32, torch.int64)
    order = np.random.RandomState(SEED).permutation(150)
    for x, y, rows in ((data.x_train, data.y_train, order[20:120]), (data.x_test, data.y_test, order[:20])):
        assert np.array_equal(x.numpy(), bits[rows])
        assert np.array_equal(y.numpy(), label[rows])


@pytest.mark.usefixtures("short_retail")
def test_retail_says_that_it_is_not_purchase(tmp_path: Path) -> None:
    write_retail(tmp_path)
    for text in (CATALOGUE["retail-10"].title, load("retail-10", data_dir=tmp_path).note):
        for words in ("NOT Purchase", "real market baskets", "labels made by clustering", "stand-in because Purchase"):
            assert words in text


@pytest.mark.usefixtures("short_retail")
@pytest.mark.parametrize(
    ("start", "fact"),
    [
        ("3", "line 3: 601 columns, not 602. A line is 2 labels and 600 columns of 0 or 1"),
        ("3,6,0", "line 3: 603 columns, not 602"),
        ("10,6", "line 3, column 1: the label 10 is not in 0..9"),
        ("3,20", "line 3, column 2: the label 20 is not in 0..19"),
        ("x,6", "line 3, column 1: the label 'x' is not a whole number"),
        ("3,", "line 3, column 2: the label '' is not a whole number"),
    ],
)
def test_retail_labels_that_are_wrong(start: str, fact: str, tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path)
    lines = path.read_text().splitlines()
    lines[2] = start + "," + lines[2].split(",", 2)[2]
    path.write_text("\n".join(lines) + "\n")
    refuses_retail(path, fact)


@pytest.mark.usefixtures("short_retail")
@pytest.mark.parametrize("value", ["2", "", "x"])
def test_retail_value_that_is_no_bit(value: str, tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path)
    lines = path.read_text().splitlines()
    fields = lines[4].split(",")
    fields[2] = value  # the first bit: two labels stand before it
    lines[4] = ",".join(fields)
    path.write_text("\n".join(lines) + "\n")
    refuses_retail(path, f"line 5, column 3: {value!r} is neither 0 nor 1")


@pytest.mark.usefixtures("short_retail")
def test_retail_with_the_columns_of_another_set(tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path, columns=446)
    refuses_retail(path, "line 1: 448 columns, not 602")


@pytest.mark.usefixtures("short_retail")
def test_retail_cut_within_a_line(tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path)
    path.write_bytes(path.read_bytes()[:-301])
    refuses_retail(path, "line 150: 452 columns, not 602")


@pytest.mark.parametrize("count", [1, 150])
def test_retail_cut_at_the_end_of_a_line(count: int, tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path, count)
    refuses_retail(path, f"it has {count} records, the whole file 64185. A file that was cut short")


@pytest.mark.usefixtures("short_retail")
def test_retail_with_more_baskets_than_the_rule_gives(tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path, 151)
    refuses_retail(path, "it has 151 records, the whole file 150")


def test_retail_empty(tmp_path: Path) -> None:
    path, _, _ = write_retail(tmp_path)
    path.write_text("\n")
    refuses_retail(path, "is empty. It must hold lines of 2 labels and 600 columns")


def test_retail_missing_file_gives_the_rule(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist") as caught:
        load("retail-10", data_dir=tmp_path)
    message = str(caught.value)
    assert "Its file is made from the FIMI repository" in message
    assert "600 most frequent items" in message
    assert "published at" not in message


def refuses_retail(path: Path, fact: str) -> None:
    """The file is refused with ``fact``, and the fix is to make it again: nobody publishes it."""
    with pytest.raises(DataError) as caught:
        load("retail-10", data_dir=path.parents[1])
    message = str(caught.value)
    assert f"{path}: {fact}" in message or f"{path} {fact}" in message
    assert "Make it again from the FIMI repository" in message
    assert "published file" not in message
