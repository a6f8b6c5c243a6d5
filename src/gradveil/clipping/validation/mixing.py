"""Does an example's output depend on the other examples of its batch? Checked in the mode training runs in.

Clipping bounds an example's influence only if the gradient of example i's loss depends on example i alone.
:func:`check_model` looks at the model, loss_watch.py at the loss.

Same size. The model is run on the batch, and again with the rows of a random half of the examples replaced by rows of
the other half; then the two halves change roles. Shapes and the state of the random generators are the same in all
runs, so dropout masks are too, and the rows that were kept must have the same outputs, nearly bit for bit. Every row is
kept once. The halves are random because a model that mixes fixed pairs of rows could hide behind a fixed split.

Size. The two halves are run by themselves and compared with the whole batch. Random draws would fall on other rows
there, so a model that draws is run with its dropout layers switched off, and in eval mode if it still draws.

Nothing is reported on the strength of one run: a difference counts only if it is seen again, and is well above the
difference between two runs on the same rows (atomic additions on a GPU, generators out of reach).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.clipping._rng import same_rng
from gradveil.clipping.validation.batch_arguments import BatchArguments, SharedArguments
from gradveil.clipping.validation.example_independence import outputs_agree
from gradveil.clipping.validation.repeatable import Mode, Ran, Run, RunFailed, Runner
from gradveil.clipping.validation.row_differences import Split, largest_difference, tolerance
from gradveil.clipping.validation.shadow_forward import plain_run
from gradveil.errors import UnsupportedModelError

__all__ = ["SharedArguments", "Verdict", "check_model", "model_refusal"]


@dataclass(frozen=True)
class Verdict:
    """What one check of a batch has shown.

    ``mixes``: an example's output depends on other examples. ``comparable``: every row was compared, at this batch size
    and at half of it; if not, ``reason`` says what could not be compared.
    """

    mixes: bool
    comparable: bool
    reason: str


def model_refusal(verdict: Verdict) -> UnsupportedModelError:
    """The error to raise for a verdict that says ``mixes``."""
    return UnsupportedModelError(
        f"the model mixes examples: {verdict.reason}. A per-example gradient is then undefined, and clipping does not "
        "bound the influence of one example. Normalise within each example (GroupNorm, LayerNorm) rather than over the "
        "batch; attend, sort and accumulate along the sequence, not along the batch; do not use the batch size in the "
        "forward pass."
    )


def check_model(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    rows: int,
    *,
    run: Run = plain_run,
    views: int = 1,
    shared: Collection[int] = (),
    size: bool = True,
    seed: int | None = None,
) -> Verdict:
    """Whether the output of any example of this call depends on the other examples. Nothing is left behind.

    ``views``: so many consecutive rows are one example. ``shared``: see :class:`SharedArguments`. ``size=False`` leaves
    out the runs with half the batch (a compiled model would be compiled again for them); ``comparable`` then speaks of
    the other runs only. ``seed``: of the random split; by default every check splits the batch differently.

    The number of calls depends on what is found, so processes that must call the model equally often cannot use this.
    """
    arguments = BatchArguments(args, kwargs, rows)
    arguments.leave_out(shared)
    split = Split.random(rows, views, seed)
    if split is None:
        return Verdict(False, False, "a batch of one example has no other examples to depend on")
    verdict = Verdict(False, False, "no argument has the batch along its first dimension")
    for batched in arguments.readings() if arguments.shapes() else ():
        verdict = _Check(Runner(module, run, arguments.kind()), arguments, batched, split, size).verdict()
        if verdict.comparable and not verdict.mixes:
            break  # in one reading of the arguments the examples are independent
    return verdict


class _Check:
    """One check under one reading of which arguments follow the batch."""

    def __init__(self, runner: Runner, arguments: BatchArguments, batched: list[int], split: Split, size: bool) -> None:
        self._runner, self._arguments, self._batched = runner, arguments, batched
        self._split, self._size = split, size
        self._dims: list[int | None] | None = None  # of every output: the dimension that is the batch

    def _go(self, mode: Mode, index: Tensor | None = None) -> Ran:
        index = self._split.everything if index is None else index
        return self._runner(self._arguments.with_rows(self._batched, index), mode)

    def verdict(self) -> Verdict:
        try:
            base = self._go(Mode())
        except RunFailed as failure:
            return Verdict(False, False, str(failure))
        if not any(t.dim() > 0 and t.shape[0] == self._split.rows for t in base.outputs):
            return Verdict(False, False, "no output has the batch along its first dimension")
        mode, whole = Mode(), base
        missing: list[str] = []
        try:
            if base.run.drew:
                mode, whole = self._without_draws()
            if self._size:
                by_size = self._compare_sizes(mode._replace(no_autocast=self._runner.autocast), whole)
                if by_size:
                    return Verdict(True, True, by_size)
        except RunFailed as failure:
            missing.append(str(failure))
        try:
            changed = self._same_size_or_quieter(base, mode)
            if changed:
                return Verdict(True, True, changed)
        except RunFailed as failure:
            missing.append(str(failure))
        return Verdict(False, not missing, "; ".join(missing))

    def _without_draws(self) -> tuple[Mode, Ran]:
        for mode in (Mode(no_dropout=True), Mode(evaluate=True)):
            ran = self._go(mode)
            if not ran.run.drew:
                return mode, ran
        raise RunFailed("the model draws random numbers even in eval mode, so runs of different sizes differ anyway")

    # ---- the same number of rows

    def _same_size_or_quieter(self, base: Ran, quiet: Mode) -> str:
        try:
            return self._same_size(Mode(), base)
        except RunFailed:
            if quiet == Mode():
                raise
            found = self._same_size(quiet, self._go(quiet))
            if found:
                return found
            raise  # independent in a quieter mode: not what was to be shown

    def _same_size(self, mode: Mode, base: Ran) -> str:
        """What shows that kept rows depend on the others, or nothing."""
        inexact = False
        unchanged = 0
        for kept, index in self._split.replacements():
            if not self._arguments.changes(self._batched, index):
                unchanged += 1
                continue
            changed = self._go(mode, index)
            if not same_rng(base.after, changed.after):
                raise RunFailed(f"how many random numbers the model draws {mode.words} depends on the examples")
            difference = self._difference(base, changed, kept)
            inexact |= difference > 0
            if difference > 1 and self._is_confirmed(mode, base, changed, kept, index):
                return (
                    f"with {self._split.rows - len(kept)} of {self._split.rows} rows replaced, {mode.words}, the "
                    "outputs of the other rows change"
                )
        if inexact and self._runner.autocast and not mode.no_autocast:
            return self._at_full_precision(mode)
        if unchanged:
            raise RunFailed("the examples of the batch are all the same, so replacing some shows nothing")
        return ""

    def _at_full_precision(self, mode: Mode) -> str:
        """Differences that half precision may explain, looked at without autocast. Not every model runs without."""
        mode = mode._replace(no_autocast=True)
        try:
            return self._same_size(mode, self._go(mode))
        except RunFailed:
            return ""

    def _difference(self, a: Ran, b: Ran, kept: Tensor) -> float:
        """The largest difference of kept rows, in units of what rounding may do."""
        worst, exact = 0.0, True
        pairs = self._pairs(a.outputs, b.outputs)
        for x, y, dim in pairs:
            if x.is_floating_point() or x.is_complex():
                found = largest_difference(x, y, kept, dim) / tolerance(x, autocast=a.autocast)
                worst, exact = max(worst, found), exact and found == 0
        if exact:  # a rounded tie may turn an integer over; without rounding only another example can
            integers = [largest_difference(x, y, kept, dim) for x, y, dim in pairs if not x.is_floating_point()]
            worst = max([worst, *(float("inf") if found else 0.0 for found in integers)])
        return worst

    def _pairs(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, int]]:
        rows = self._split.rows
        dims = self._dims
        if dims is None or len(dims) != len(a):
            dims = [0 if t.dim() > 0 and t.shape[0] == rows else None for t in a]
        pairs = [
            (x, y, dim)
            for x, y, dim in zip(a, b, dims, strict=False)
            if dim is not None and x.shape == y.shape and x.shape[dim : dim + 1] == (rows,)
        ]
        if len(a) != len(b) or not pairs:
            raise RunFailed("the shapes of the outputs depend on the examples")
        return pairs

    def _is_confirmed(self, mode: Mode, base: Ran, changed: Ran, kept: Tensor, index: Tensor) -> bool:
        """Seen once more, and well above the difference between two runs on the same rows."""
        again, changed_again = self._go(mode), self._go(mode, index)
        noise = max(self._difference(base, again, kept), self._difference(changed, changed_again, kept))
        signal = min(self._difference(base, changed, kept), self._difference(again, changed_again, kept))
        if noise > 1:
            raise RunFailed(f"two runs of the model {mode.words} on the same rows give different outputs")
        return signal > max(1.0, 8 * noise)

    # ---- half the rows

    def _compare_sizes(self, mode: Mode, whole: Ran) -> str:
        """What shows that outputs depend on the number of rows, or nothing."""
        if mode.no_autocast:  # half precision rounds differently for every size
            try:
                return self._sizes_at(mode, self._go(mode))
            except RunFailed:
                mode = mode._replace(no_autocast=False)
        return self._sizes_at(mode, whole)

    def _sizes_at(self, mode: Mode, whole: Ran) -> str:
        halves = [(side, self._go(mode, side)) for side in self._split.sides]
        self._dims = [
            self._split.batch_dim(t, [half.outputs[i] for _, half in halves if i < len(half.outputs)])
            for i, t in enumerate(whole.outputs)
        ]
        compared = [i for i, dim in enumerate(self._dims) if dim is not None]
        if not compared:
            raise RunFailed("the shapes of the outputs do not follow the number of rows")
        with self._runner.precision(mode):
            differing = self._rows_that_differ(whole, halves, compared)
            # A near tie that rounding turns over (a hard gate, an argmax) changes a row here and there; the batch size
            # changes rows in general.
            if differing < 2 or differing <= 0.1 * self._split.rows:
                return ""
            again = self._go(mode)
            if not all(outputs_agree(whole.outputs[i], again.outputs[i]) for i in compared):
                raise RunFailed(f"two runs of the model {mode.words} on the same rows give different outputs")
        return f"{mode.words}, an example has other outputs in a batch of {self._split.rows} than in half of that batch"

    def _rows_that_differ(self, whole: Ran, halves: list[tuple[Tensor, Ran]], compared: list[int]) -> int:
        differing = torch.zeros(self._split.rows, dtype=torch.bool)
        for side, half in halves:
            for i in compared:
                dim = (self._dims or [])[i]
                assert dim is not None
                expected = whole.outputs[i].index_select(dim, side.to(whole.outputs[i].device))
                if not outputs_agree(expected, half.outputs[i]):
                    rows = zip(side.tolist(), expected.unbind(dim), half.outputs[i].unbind(dim), strict=True)
                    differing[[r for r, a, b in rows if not outputs_agree(a, b)]] = True
        return int(differing.sum())
