"""A strict and quick reader for the CSV files of Shokri et al.: ``label,bit,bit,...`` on every line.

A correct line ends in exactly ``2 * columns`` bytes of ``,0`` and ``,1``, and what stands before them is the
label, quoted or not (Retail has two). So all lines are cut at that point and checked at once by numpy; only
when something is wrong is the line looked at on its own, to say what. (np.loadtxt takes minutes for
197324 x 600.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradveil.errors import DataError
from gradveil.training.data._files import REPLACE, damaged

_LABEL = re.compile(rb'\s*(?:"(\d{1,9})"|(\d{1,9}))')
_BLOCK = 8192  # lines per numpy check: a few megabytes at a time


@dataclass(frozen=True)
class _Layout:
    """What a line must be: a label for each entry of ``labels`` (its bounds; None: any), then the bits."""

    path: Path
    columns: int
    labels: tuple[range | None, ...]
    fix: str

    @property
    def fields(self) -> int:
        return len(self.labels) + self.columns

    @property
    def words(self) -> str:
        labels = "a label" if len(self.labels) == 1 else f"{len(self.labels)} labels"
        return f"{labels} and {self.columns} columns of 0 or 1"

    def wrong(self, fact: str, why: str) -> DataError:
        return damaged(self.path, fact, why, self.fix)


def read_bits(
    path: Path, *, columns: int, labels: range | None, also: tuple[range, ...] = (), fix: str = REPLACE
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bits, one row per line, and the labels as written; ``labels`` bounds them (None: any).

    ``also`` bounds the labels of further label columns, which are checked and dropped; ``fix`` is what to do
    about a file that is wrong.
    """
    layout = _Layout(path, columns, (labels, *also), fix)
    lines = path.read_bytes().splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise layout.wrong("is empty", f"It must hold lines of {layout.words}.")
    bits = np.empty((len(lines), columns), np.uint8)
    for start in range(0, len(lines), _BLOCK):
        block = lines[start : start + _BLOCK]
        bits[start : start + len(block)] = _tails(layout, block, start + 1)
    classes = [_label(layout, n, line) for n, line in enumerate(lines, 1)]
    return bits, np.array(classes, np.int64)


def _tails(layout: _Layout, lines: list[bytes], first: int) -> npt.NDArray[np.uint8]:
    width = 2 * layout.columns
    short = next((i for i, line in enumerate(lines) if len(line) < width), None)
    if short is not None:
        raise _explain(layout, first + short, lines[short])
    pairs = np.frombuffer(b"".join(line[-width:] for line in lines), np.uint8).reshape(-1, layout.columns, 2)
    values = pairs[:, :, 1] - np.uint8(ord("0"))  # anything below '0' wraps round to a large number
    good = (values <= 1).all(axis=1) & (pairs[:, :, 0] == ord(",")).all(axis=1)
    if not good.all():
        bad = int(np.argmin(good))
        raise _explain(layout, first + bad, lines[bad])
    return values


def _label(layout: _Layout, number: int, line: bytes) -> int:
    """The first label of the line; every one of them is checked."""
    fields = line[: -2 * layout.columns].split(b",")
    if len(fields) != len(layout.labels):
        raise _explain(layout, number, line)
    found = []
    for column, (text, allowed) in enumerate(zip(fields, layout.labels, strict=True), 1):
        where = f"line {number}" if len(fields) == 1 else f"line {number}, column {column}"
        match = _LABEL.fullmatch(text)
        if match is None:
            why = "The first column is the class." if column == 1 else f"Column {column} is a class too."
            raise layout.wrong(f"{where}: the label {_show(text)} is not a whole number", why)
        label = int(match[1] or match[2])
        if allowed is not None and label not in allowed:
            bounds = f"{allowed.start}..{allowed.stop - 1}"
            raise layout.wrong(f"{where}: the label {label} is not in {bounds}", "It is not a class of this set.")
        found.append(label)
    return found[0]


def _explain(layout: _Layout, number: int, line: bytes) -> DataError:
    """What is wrong with a line that is not labels and bits."""
    fields = line.split(b",")
    if len(fields) != layout.fields:
        return layout.wrong(f"line {number}: {len(fields)} columns, not {layout.fields}", f"A line is {layout.words}.")
    labels = len(layout.labels)
    column, value = next((i, v) for i, v in enumerate(fields[labels:], labels + 1) if v not in (b"0", b"1"))
    return layout.wrong(f"line {number}, column {column}: {_show(value)} is neither 0 nor 1", "The columns are binary.")


def _show(text: bytes) -> str:
    shown = text[:40].decode("utf-8", "replace")
    return repr(shown + "..." if len(text) > 40 else shown)
