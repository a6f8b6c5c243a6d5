"""Tables of mixed types: a CSV file as features in [0, 1], and how much of its rows came back.

A number is one feature, scaled by the least and greatest value that are public; a category is as many features as it
has values, one of them 1. Such a group is a corner of a simplex, and attacks search on the simplex (methods/table.py).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.errors import ConfigError, DataError

_MOST_CATEGORIES = 10  # whole numbers with no more different values than this are a category
NEAR = 0.05  # of its range: a number that was found


@dataclass(frozen=True)
class Column:
    """``values``: those of a category; empty for a number between ``low`` and ``high``."""

    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0

    @property
    def width(self) -> int:
        return len(self.values) or 1


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    x: Tensor  # (n, features)
    y: Tensor  # (n,)
    classes: tuple[str, ...]

    @property
    def features(self) -> int:
        return sum(column.width for column in self.columns)


def groups_of(columns: Sequence[Column]) -> list[slice]:
    """The features of each column."""
    ends = torch.tensor([column.width for column in columns]).cumsum(0).tolist()
    return [slice(end - column.width, end) for column, end in zip(columns, ends, strict=True)]


def read_csv(path: Path, label: str) -> Table:
    """A CSV file with a header; ``label`` is the column of the class. Rows with empty cells are left out."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if all(isinstance(v, str) and v.strip() for v in row.values())]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a CSV file: {error}.") from None
    if not rows:
        raise DataError(f"{path} has no complete row under a header line.")
    if label not in rows[0]:
        raise ConfigError(f"{path} has no column {label!r} for the class; it has {', '.join(rows[0])}.")
    columns = tuple(_column(name, [row[name].strip() for row in rows]) for name in rows[0] if name != label)
    if not columns:
        raise DataError(f"{path} has no column beside the class {label!r}.")
    classes = tuple(sorted({row[label].strip() for row in rows}))
    x = encode([[row[c.name].strip() for c in columns] for row in rows], columns)
    return Table(columns, x, torch.tensor([classes.index(row[label].strip()) for row in rows]), classes)


def _column(name: str, cells: Sequence[str]) -> Column:
    different = sorted(set(cells))
    try:
        numbers = [float(cell) for cell in different]
    except ValueError:
        return Column(name, tuple(different))
    if not all(abs(n) < float("inf") for n in numbers):
        raise DataError(f"column {name!r} has a number that is not finite. Leave that row out.")
    if len(different) <= _MOST_CATEGORIES and all(n == int(n) for n in numbers):
        return Column(name, tuple(different))
    return Column(name, (), min(numbers), max(numbers))


def encode(rows: Sequence[Sequence[str]], columns: Sequence[Column]) -> Tensor:
    """Rows of cells as features (n, F); a category that is not public is refused."""
    x = torch.zeros(len(rows), sum(column.width for column in columns))
    for group, (i, column) in zip(groups_of(columns), enumerate(columns), strict=True):
        for j, row in enumerate(rows):
            if not column.values:
                x[j, group.start] = (float(row[i]) - column.low) / max(column.high - column.low, 1e-12)
            elif row[i] in column.values:
                x[j, group.start + column.values.index(row[i])] = 1.0
            else:
                raise DataError(
                    f"column {column.name!r} has the value {row[i]!r}, which is none of {column.values[:8]}."
                )
    return x


def decode(x: Tensor, columns: Sequence[Column]) -> list[list[str]]:
    """Features (n, F) as rows of cells: the likeliest category, the number."""
    found = []
    for row in x.detach().cpu():
        cells = []
        for column, group in zip(columns, groups_of(columns), strict=True):
            part = row[group]
            number = f"{column.low + float(part[0].clamp(0, 1)) * (column.high - column.low):.6g}"
            cells.append(column.values[int(part.argmax())] if column.values else number)
        found.append(cells)
    return found


@dataclass(frozen=True)
class MixedScore:
    """Shares of cells that are right, over all rows: categories exactly, numbers within 5 % of their range."""

    cells: float
    categories: float
    numbers: float
    rows: float  # right in every cell


def score_mixed(found: Tensor, truth: Tensor, columns: Sequence[Column]) -> MixedScore:
    """Features (V, B, F), the rows of each victim matched so that most cells are right."""
    right = torch.stack([_matched(a, b, columns) for a, b in zip(found, truth, strict=True)]).flatten(0, 1)
    kinds = torch.tensor([bool(column.values) for column in columns])

    def share(of: Tensor) -> float:
        return float(of.double().mean()) if of.numel() else float("nan")

    return MixedScore(share(right), share(right[:, kinds]), share(right[:, ~kinds]), share(right.all(1)))


def guess_mixed(public: Tensor, truth: Tensor, columns: Sequence[Column]) -> MixedScore:
    """What guessing gets: the most frequent category and the median number, in every row."""
    row = public.median(0).values
    for column, group in zip(columns, groups_of(columns), strict=True):
        if column.values:
            row[group] = public[:, group].mean(0)
    return score_mixed(row.expand_as(truth), truth, columns)


def _matched(found: Tensor, truth: Tensor, columns: Sequence[Column]) -> Tensor:
    cells = []
    for column, group in zip(columns, groups_of(columns), strict=True):
        a, b = found[:, group].unsqueeze(0), truth[:, group].unsqueeze(1)
        cells.append(a.argmax(2) == b.argmax(2) if column.values else ((a - b).abs() <= NEAR).squeeze(2))
    right = torch.stack(cells, 2).cpu()  # (true, found, columns)
    _, which = linear_sum_assignment(right.sum(2).numpy(), maximize=True)
    return right[torch.arange(len(truth)), torch.as_tensor(which)]
