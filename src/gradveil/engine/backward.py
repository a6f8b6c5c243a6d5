"""When a backward pass has ended: its sums of clipped gradients are kept until the batch is whole, and released."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradveil.engine.engine import PrivacyEngine

Accumulator = Callable[[Mapping[str, Tensor] | None], dict[str, Tensor]]


def accumulator() -> Accumulator:
    """Sums of the parts of a batch, in a closure: no attribute leads to them.

    Called with a part's sums, it adds them; with None, it gives up what it has.
    """
    sums: dict[str, Tensor] = {}

    def add_or_take(part: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        nonlocal sums
        if part is None:
            taken, sums = sums, {}
            return taken
        for name, total in part.items():
            sums[name] = sums[name] + total if name in sums else total
        return {}

    return add_or_take


def backward_ended(engine: PrivacyEngine, sums: Accumulator) -> None:
    """A backward pass has left clipped sums: release them once the whole batch is there.

    Whatever is refused here leaves ``backward()`` as an error, with nothing kept and nothing released.
    """
    step, clipper, batches, drawn = engine._private, engine._clipper, engine._batches, engine._drawn
    assert step is not None and clipper is not None
    part: Mapping[str, Tensor] | None = None
    try:
        with torch.no_grad():
            stats = clipper.clip_stats
            if not batches.is_open or stats.passes == 1:
                sums(None)  # of a batch that was given up
            batches.count(stats.examples)
            drawn.backward_ended()
            part = clipper.take_sums()
            if engine._recorder is not None:
                engine._recorder.see_part(part)
            sums(part)
            if batches.is_whole(stats, waits=not engine.ranks.several):
                noised = step.release(sums(None), stats)
                if engine._recorder is not None:
                    engine._recorder.see_release(noised)
    except BaseException as error:
        part = None
        traceback.clear_frames(error.__traceback__)  # sums without noise among their variables
        batches.give_up()
        drawn.give_up()
        sums(None)
        step.prepare()
        raise
