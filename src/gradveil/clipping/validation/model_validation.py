"""How a model's operations follow the batch: what runs on parts of its first batch tell, before any gradient is taken.

The runs are in shadow_forward.py, what is learned from them in operations/plan.py. They leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradveil.clipping.operations.tracing import Tracing
from gradveil.clipping.validation.example_independence import check_state
from gradveil.clipping.validation.memory import check_memory
from gradveil.clipping.validation.shadow_forward import Arguments, Moment, PlainRun, plain_run
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.clipper import Clipper
    from gradveil.clipping.operations.plan import Record

SIZES = 5, 7  # of the batches; very small ones hide what depends on the size
EXAMPLE = 1  # the one that is replaced: not the middle one, which stays where it is when the batch is turned round
MOST = 40  # rounds: what is derived from constants shows one operation at a time


class ModelCheck:
    """Of one model. It is made on the first batch of more than one example.

    A parameter that is not used there is looked at when it first is: after that pass, and before it is differentiated.
    """

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper
        self.passed = False
        self.written: set[str] = set()  # state that calls write to, and that does not depend on the examples
        self.mixed_outputs: set[int] = set()  # that have the batch in more than one dimension

    @property
    def is_incomplete(self) -> bool:
        """Whether some parameter was not used yet. Processes that must call the model together do not ask."""
        clipper = self._clipper
        return not clipper.sharded and len(clipper.plan.slots) < len(clipper.parameters.sources)

    def look(
        self, args: Any, kwargs: Any, rows: int, *, before: Moment | None = None, all_rows: bool = False
    ) -> list[Tensor]:
        """Learn the plan of the model; the outputs that the followed model must give.

        ``before``: the moment to start from, where it is not now. ``all_rows``: run on the whole batch and a little
        more, for what only some examples bring about.
        """
        with self._clipper.quietly():
            whole = plain_run(self._clipper.module, args, kwargs, evaluate=False, starting_from=before)
        arguments = Arguments(args, kwargs, rows)
        failed: Exception | None = None
        # The last ways are for models that insist on an order of the examples, or on their values.
        ways = [
            (batched, in_order, noisy)
            for batched in arguments.readings()
            for in_order, noisy in ((False, True), (False, False), (True, True), (True, False))
        ]
        sizes = (rows, rows + 2 * self._clipper.views) if all_rows else None
        for batched, in_order, noisy in ways if not self._clipper.sharded else ways[1:2]:
            try:
                some = partial(arguments.some, batched, in_order=in_order, noisy=noisy)
                self._learn(some, before, sizes, moved=noisy)
                break
            except UnsupportedModelError:
                raise
            except Exception as error:
                failed = failed or error
        else:
            assert failed is not None
            raise UnsupportedModelError(
                f"the model cannot be called with {SIZES[0]} or {SIZES[1]} of its examples "
                f"({(str(failed).splitlines() or [type(failed).__name__])[0]}), by which it is seen where the batch "
                f"stands in its operations. Of the arguments of shapes {arguments.shapes()} so many rows were given: "
                "those with the size of the batch first. What is the same for all examples should have another size "
                "there: register it as a buffer, or give it a first dimension of 1."
            ) from failed
        return whole.outputs

    def _learn(
        self, some: Callable[..., Any], before: Moment | None, sizes: tuple[int, int] | None, *, moved: bool
    ) -> None:
        clipper, views = self._clipper, self._clipper.views
        sizes = sizes or (SIZES[0] * views, SIZES[1] * views)
        example = min(EXAMPLE * views, sizes[0] - 1)

        def run(size: int, replaced: int | None = None) -> tuple[PlainRun, dict[Any, Record]]:
            given = some(size, replaced)
            mode = Tracing(
                clipper.plan,
                clipper.parameters.sources,
                rows=size,
                differentiates=not clipper.sharded,
                changed=replaced,
            )
            if clipper.sharded:
                mode.adopt = clipper.parameters.adopt
            with clipper.quietly():
                found = plain_run(clipper.module, *given, evaluate=False, starting_from=before, mode=mode, moved=moved)
            return found, mode.records

        for _ in range(MOST):
            first, traced = run(sizes[0])
            of_more, larger = run(sizes[1])
            other, changed = run(sizes[0], example)
            news = clipper.plan.learn(traced, larger, changed, sizes, example)
            if clipper.agree(not news):
                break
        self.mixed_outputs = {
            i
            for i, (a, b) in enumerate(zip(first.outputs, of_more.outputs, strict=False))
            if _has_the_batch_twice(a, b, sizes)
        }
        for others in (other, of_more):
            check_state(first.changed, others.changed)
        self.written |= set(first.changed)
        if not clipper.sharded:
            with clipper.quietly():
                check_memory(clipper.module, some(sizes[0], None), some(sizes[0], example))


def _has_the_batch_twice(a: Tensor, b: Tensor, sizes: tuple[int, int]) -> bool:
    """Whether an output compares examples: more than one dimension follows the batch, or one by more than its size."""
    if a.dim() != b.dim():
        return False
    dims = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    return len(dims) > 1 or any(a.shape[d] * sizes[1] < b.shape[d] * sizes[0] for d in dims)
