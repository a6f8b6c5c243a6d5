"""Tables and numbers for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = "", title: str = "") -> None:
    """Print a table on stdout; as wide as it needs to be where stdout is not a terminal."""
    console = Console(width=None if Console().is_terminal else 160)
    shown = Table(*columns, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown.columns[:1]:
        column.no_wrap = True
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    if note:
        console.print(note, style="dim", highlight=False)


def number(value: float | None, digits: int = 4) -> str:
    """A short number; a dash for none, the word for infinite.

    >>> number(0.60123), number(None), number(float("inf"))
    ('0.6012', '-', 'infinite')
    """
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if math.isfinite(value) else "infinite"


def upper(value: float | None, digits: int = 4) -> str:
    """An upper bound, never printed as less than it is.

    >>> upper(14.3507), upper(None), upper(float("inf"))
    ('14.36', '-', 'infinite')
    """
    from gradveil.accounting._rounding import at_most  # which brings numpy

    return "-" if value is None else at_most(value, digits=digits)


def lower(value: float | None, digits: int = 4) -> str:
    """A lower bound, never printed as more than it is."""
    from gradveil.accounting._rounding import at_least

    return "-" if value is None else at_least(value, digits=digits)
