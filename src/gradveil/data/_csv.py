"""A strict and quick reader for the CSV files of Shokri et al.: ``label,bit,bit,...`` on every line.

A correct line ends in exactly ``2 * columns`` bytes of ``,0`` and ``,1``, and what stands before them is the
label, quoted or not. So all lines are cut at that point and checked at once by numpy; only when something is
wrong is the line looked at on its own, to say what. (np.loadtxt takes minutes for 197324 x 600.)
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradveil.data._files import damaged
from gradveil.errors import DataError

_LABEL = re.compile(rb'\s*(?:"(\d{1,9})"|(\d{1,9}))')
_BLOCK = 8192  # lines per numpy check: a few megabytes at a time


def read_bits(path: Path, *, columns: int, labels: range | None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bits, one row per line, and the labels as written; ``labels`` bounds them (None: any)."""
    lines = path.read_bytes().splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise damaged(path, "is empty", f"It must hold lines of a label and {columns} columns of 0 or 1.")
    bits = np.empty((len(lines), columns), np.uint8)
    for start in range(0, len(lines), _BLOCK):
        block = lines[start : start + _BLOCK]
        bits[start : start + len(block)] = _tails(path, block, start + 1, columns)
    classes = [_label(path, n, line, columns, labels) for n, line in enumerate(lines, 1)]
    return bits, np.array(classes, np.int64)


def _tails(path: Path, lines: list[bytes], first: int, columns: int) -> npt.NDArray[np.uint8]:
    width = 2 * columns
    short = next((i for i, line in enumerate(lines) if len(line) < width), None)
    if short is not None:
        raise _explain(path, first + short, lines[short], columns)
    pairs = np.frombuffer(b"".join(line[-width:] for line in lines), np.uint8).reshape(-1, columns, 2)
    values = pairs[:, :, 1] - np.uint8(ord("0"))  # anything below '0' wraps round to a large number
    good = (values <= 1).all(axis=1) & (pairs[:, :, 0] == ord(",")).all(axis=1)
    if not good.all():
        bad = int(np.argmin(good))
        raise _explain(path, first + bad, lines[bad], columns)
    return values


def _label(path: Path, number: int, line: bytes, columns: int, allowed: range | None) -> int:
    text = line[: -2 * columns]
    match = _LABEL.fullmatch(text)
    if match is None:
        if b"," in text:
            raise _explain(path, number, line, columns)
        raise damaged(
            path,
            f"line {number}: the label {_show(text)} is not a whole number",
            "The first column is the class.",
        )
    label = int(match[1] or match[2])
    if allowed is not None and label not in allowed:
        raise damaged(
            path,
            f"line {number}: the label {label} is not in {allowed.start}..{allowed.stop - 1}",
            "It is not a class of this set.",
        )
    return label


def _explain(path: Path, number: int, line: bytes, columns: int) -> DataError:
    """What is wrong with a line that is not a label and ``columns`` bits."""
    fields = line.split(b",")
    if len(fields) != columns + 1:
        return damaged(
            path,
            f"line {number}: {len(fields)} columns, not {columns + 1}",
            f"A line is a label and {columns} columns of 0 or 1.",
        )
    column, value = next((i, v) for i, v in enumerate(fields[1:], 2) if v not in (b"0", b"1"))
    return damaged(
        path, f"line {number}, column {column}: {_show(value)} is neither 0 nor 1", "The columns are binary."
    )


def _show(text: bytes) -> str:
    shown = text[:40].decode("utf-8", "replace")
    return repr(shown + "..." if len(text) > 40 else shown)
