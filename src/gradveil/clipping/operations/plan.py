"""What each operation with a parameter does with the batch: learned on the first batch, from runs on parts of it.

The model is run on a few real examples, in batches of two sizes, and once more with one example replaced by another.
Of every operation that takes a parameter (or what is derived from parameters) each of its other tensors is compared:

    a dimension that changes with the size of the batch    it holds batch data; which rows are whose is seen from the
                                                           rows that change with the one example
    none                                                   a constant: what the operation gives is derived from
                                                           parameters alone, and followed like a parameter

A constant that is found makes further operations ones with a parameter, so the runs are repeated until nothing new is
found. An operation is known again by its function, the parameters it takes, and how many such calls came before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradveil.clipping.operations.layout import Layout, NoLayout, changed_rows, find, settled

Base = tuple[Any, tuple[Hashable, ...]]
Kind = Literal["meeting", "derived", "expansion", "unknown"]


@dataclass(frozen=True)
class Site:
    """One operation with a parameter. ``layouts`` and ``out``: of its other tensors, and of its first result."""

    kind: Kind
    layouts: tuple[Layout | None, ...] = ()
    out: Layout | None = None
    moved: bool = False  # the rows are not the examples in their order
    why: str = ""  # where it is unknown


@dataclass
class Record:
    """The tensors of one operation in a run, beside those that are tracked: what it was given, and its results."""

    given: list[Tensor]
    results: list[Tensor] = field(default_factory=list)
    derived: bool = False  # taken to be of parameters and constants alone


Trace = Mapping[tuple[Base, int], Record]


class Plan:
    """The sites of a model, by operation and number of the call."""

    def __init__(self) -> None:
        self.sites: dict[tuple[Base, int], Site] = {}
        self._common: dict[Base, Site | None] = {}
        self._numbers: dict[Hashable, int] = {}
        self.slots: set[Hashable] = set()  # of the parameters that were met
        self.routed = False  # rows are chosen by what is in them, and their owners are followed (routing.py)
        self.finds_rows = (
            False  # an index was found by what is in a tensor: the next batch may have more rows, or fewer
        )
        self.routed_slots: set[Hashable] = set()  # of parameters that were met with such rows

    def number(self, key: Hashable) -> int:
        """A short name for the key of a derived parameter; the parameters' own are not negative."""
        return -1 - self._numbers.setdefault(key, len(self._numbers))

    def get(self, base: Base, nth: int) -> Site | None:
        """What is known of an operation; of a call that did not come up, what all others of its kind have."""
        common = self._common.get(base)
        return common if common is not None else self.sites.get((base, nth))

    def learn(self, first: Trace, second: Trace, changed: Trace, sizes: tuple[int, int], example: int) -> bool:
        """Compare the runs; whether something was found that makes another run worth while."""
        news = False
        for place, record in first.items():
            other = second.get(place)
            if other is None or len(other.given) != len(record.given):
                continue
            site = _compare(record, other, changed.get(place), sizes, example)
            taken = {of.get(place, record).derived for of in (first, second, changed)}
            news |= not _is_selection(place[0]) and taken != {site.kind == "derived"}
            self.sites[place] = site
        self._common = {}
        for (base, _), site in self.sites.items():
            known = self._common.setdefault(base, site)
            if known != site:
                self._common[base] = None
        self.slots = {key for (_, keys), _ in self.sites for key in keys if isinstance(key, int) and key >= 0}
        self.slots |= self.routed_slots
        return news or self._follow_routes()

    def _follow_routes(self) -> bool:
        """Where some operation cannot be planned, and rows are chosen by an index: follow whose they are."""
        chosen = {place: site for place, site in self.sites.items() if _is_selection(place[0])}
        unknown = any(site.kind == "unknown" or site.moved for place, site in self.sites.items() if place not in chosen)
        unknown |= self.finds_rows
        if self.routed or not unknown or not any(site.kind == "meeting" for site in chosen.values()):
            return False
        self.routed, self.sites = True, chosen
        return True

    def is_always(self, base: Base, site: Site) -> bool:
        """Whether all calls of an operation are like this one."""
        return self._common.get(base) == site


def _compare(a: Record, b: Record, c: Record | None, sizes: tuple[int, int], example: int) -> Site:
    same = c if c is not None and [t.shape for t in c.given] == [t.shape for t in a.given] else None
    again: Iterable[Tensor | None] = same.given if same is not None else [None] * len(a.given)
    try:
        layouts = tuple(find(x, y, z, sizes, example) for x, y, z in zip(a.given, b.given, again, strict=True))
        out = None
        if a.results and b.results:
            z = same.results[0] if same is not None and same.results else None
            out = find(a.results[0], b.results[0], z, sizes, example)
    except NoLayout as error:
        return Site("unknown", why=str(error))
    *known, out = settled(
        [*layouts, out], [tuple(t.shape) for t in (*a.given, *a.results[:1])] + [()] * (not a.results)
    )
    layouts = tuple(known)
    if not any(layouts):
        if same is not None and any(not _equal(x, z) for x, z in zip(a.given, same.given, strict=True)):
            return Site("unknown", layouts, why="it depends on the examples without having them apart")
        return Site("expansion" if out is not None else "derived", layouts, out)
    moved = same is not None and any(
        layout is not None and layout.inner == 1 and _moves(x, z, layout.dim, sizes[0], example)
        for layout, x, z in zip(layouts, a.given, same.given, strict=True)
    )
    return Site("meeting", layouts, out, moved)


def _is_selection(base: Base) -> bool:
    return bool(base[1]) and isinstance(base[1][0], tuple)


def _moves(a: Tensor, b: Tensor, dim: int, size: int, example: int) -> bool:
    return a.shape[dim] == size and any(row != example for row in changed_rows(a, b, dim))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def copy_of(t: Tensor) -> Tensor:
    """A tensor as it is now; what cannot be compared (sparse, nested) by its shape alone."""
    if t.is_sparse or t.is_nested:
        return torch.empty(tuple(t.shape), device="meta") if not t.is_nested else torch.empty(0, device="meta")
    return t.detach().clone()
