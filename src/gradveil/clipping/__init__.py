"""Per-example clipping inside one backward pass, and the oracle it is checked against."""

from gradveil.clipping.backward_pass import ClipStats, count_flags
from gradveil.clipping.clipper import Clipper
from gradveil.clipping.groups import CLIPPINGS, Clipping, Group, make_groups
from gradveil.clipping.reference import Reference, clipped_sums
from gradveil.clipping.validation.support import check_module, fix

__all__ = [
    "CLIPPINGS",
    "ClipStats",
    "Clipper",
    "Clipping",
    "Group",
    "Reference",
    "check_module",
    "clipped_sums",
    "count_flags",
    "fix",
    "make_groups",
]
