"""The loop over the private loader, as the engine sees it: batches are drawn and handed out, and steps taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradveil.engine.plain import HiddenGradients, PlainStep
from gradveil.errors import BudgetExhausted, PrivacyViolation
from gradveil.mechanism.sampling import Indices, Ticket

if TYPE_CHECKING:
    from gradveil.engine.engine import PrivacyEngine


class Loop:
    """What the private loader, and the optimizer's hooks, call."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine, self._hidden = engine, HiddenGradients()

    def after_step(self, *_: Any) -> None:
        self._hidden.show()

    def coming_steps(self) -> range:
        """The steps of the next loop over the loader: the rest of the run, or of the epoch."""
        engine = self._engine
        end = engine.plan.steps
        if engine.settings.epochs is not None:
            end = min(end, (engine.step // engine._epoch + 1) * engine._epoch)
        return range(engine.step, end)

    def draw(self, step: int) -> Indices:
        engine = self._engine
        if engine.ranks.several:
            return engine.sampling.draw(engine._run_key, step, engine.ranks.share(engine.sampling.population))
        indices = engine.sampling.draw(engine._run_key, step)
        again = 0
        while not len(indices) and not engine.plan.strategy.is_private:
            again += 1  # plain training has nothing to do with an empty batch, and nothing to hide: draw another
            indices = engine.sampling.draw(engine._run_key, step + again * (1 << 40))
        return indices

    def start(self) -> int:
        """A new loop over the loader starts clean: nothing of an abandoned batch may enter the next release."""
        engine = self._engine
        if engine.step >= engine.plan.steps:
            raise BudgetExhausted(
                f"the run declared {engine.plan.steps} steps and has taken them all: a further loop over the loader "
                "would be empty. Declare more steps, or epochs, from the start."
            )
        if engine.stopped is not None:
            raise BudgetExhausted(
                f"the run was stopped: {engine.stopped}. A further loop over the loader would be empty."
            )
        self._check_attached()
        loop = engine._batches.start()
        if engine._private is not None:
            engine._private.check_process()
            engine._private.prepare()
        if engine._plain is not None:
            engine._plain.clear()
            for parameter in engine.parameters.values():
                parameter.grad = None
        return loop

    def hand_out(self, ticket: Ticket, loop: int, batch: Any) -> None:
        engine = self._engine
        if engine._private is None:
            engine._batches.ticket = ticket
            return
        self._check_attached()
        engine._private.check_process()
        engine._batches.hand_out(ticket, loop=loop, step=engine.step)
        engine._drawn.hand_out(batch)
        if engine._clipper is not None:
            engine._clipper.checks.not_batch_first = engine._layout.misplaced(batch)

    def _check_attached(self) -> None:
        engine = self._engine
        if engine._private is not None and not engine._handles:
            raise PrivacyViolation(
                "the engine was detached, or closed: gradients of further batches would be neither clipped nor noised. "
                "Make a new PrivacyEngine."
            )

    def finish(self) -> None:
        """The loader has no further batch: the last one must have been released like the others."""
        engine = self._engine
        if engine._private is not None and engine._batches.is_open:
            raise engine._batches.unreleased()
        engine._batches.clear()
        engine.commit()

    def before_step(self, *_: Any) -> None:
        """Before the optimizer's step. Of a private run: while parts of a batch are still to come, it finds nothing."""
        engine = self._engine
        if engine._in_update:
            return
        if engine._plain is not None:
            self._take_plain_step(engine._plain)
        elif engine._batches.in_parts:
            self._hidden.hide(list(engine.parameters.values()))

    def _take_plain_step(self, plain: PlainStep) -> None:
        engine = self._engine
        if engine._recorder is not None:
            engine._recorder.see_part({n: p.grad for n, p in engine.parameters.items() if p.grad is not None})
        plain()
        if engine._recorder is not None:
            engine._recorder.see_plain_step()

    def count_plain_step(self) -> None:
        """A step without privacy was taken."""
        engine = self._engine
        engine._plain_steps += 1
        engine._batches.clear()

    def equal_parts(self, here: int) -> int:
        """Parts of a batch: as many on every rank, for the ranks call a model that is cut together."""
        engine = self._engine
        return int(engine.ranks.highest([here], torch.empty(0))[0])
