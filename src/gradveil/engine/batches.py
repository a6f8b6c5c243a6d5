"""Which drawn batch a backward pass belongs to. A batch is released once, whole, at the step it was drawn for.

The loader hands out a ticket with every batch (or physical part of one). Refused:

    a batch from an older loop over the loader          its examples may be drawn again by the newer loop
    a batch of another step than the one to come        the engine went back to a checkpoint
    the next batch, while the last was not released     skipping batches by their content is not accounted for
    a second backward for a batch that was released     its examples would contribute twice
    more rows than were drawn                           an example that contributes twice is not bounded by its clip
    fewer rows than were drawn                          unless the engine was told that examples are dropped

Rows are counted for each physical part on its own: one part twice and another never is not the batch. Whose rows they
are, drawn.py sees as far as tensors show it.

A pass while no batch is handed out is released and recorded as such: it proves nothing.
"""

from __future__ import annotations

import warnings

from gradveil.clipping import ClipStats
from gradveil.errors import PrivacyViolation
from gradveil.mechanism.sampling import Ticket


class Batches:
    """The batch that the loader has handed out last, and what became of it."""

    def __init__(self, sampler: str, *, views: int = 1, drops_examples: bool = False) -> None:
        self.sampler, self.views, self.drops_examples = sampler, views, drops_examples
        self.ticket: Ticket | None = None
        self.loop = 0  # over the loader: the newest
        self._spent = False
        self._warned = False
        self._earlier = self._here = 0  # examples that went through backward(): of earlier parts, and of this one
        self._lost = False  # an error has taken the sums of earlier parts with it

    def start(self) -> int:
        """A new loop over the loader begins; its number."""
        self.loop += 1
        self.clear()
        return self.loop

    def clear(self) -> None:
        """No batch is handed out."""
        self.ticket, self._spent = None, False
        self._earlier, self._here, self._lost = 0, 0, False

    def hand_out(self, ticket: Ticket, *, loop: int, step: int) -> None:
        """The loader of ``loop`` hands out a batch, or a part of one, and the engine is about to take ``step``."""
        if loop != self.loop:
            raise PrivacyViolation(
                "a newer loop over the private loader was started, or the engine went back to a checkpoint: a batch of "
                "the older loop would be drawn again by the newer one and be charged as if it were fresh. Use one "
                "loop at a time."
            )
        if self.ticket is not None and not self._spent and ticket.step != self.ticket.step:
            raise self.unreleased()
        if ticket.step != step:
            raise PrivacyViolation(
                f"the loader drew a batch for step {ticket.step}, and the engine is at step {step}. Start a new loop "
                "over the loader."
            )
        if self.is_open:
            self._check_part()
            self._earlier, self._here = self._earlier + self._here, 0
        else:
            self._earlier, self._here, self._lost = 0, 0, False
        self.ticket, self._spent = ticket, False

    def _check_part(self) -> None:
        """Before the next part of a batch is handed out: this one is done with."""
        ticket = self.ticket
        assert ticket is not None
        if self._here != ticket.size and not self.drops_examples:
            raise PrivacyViolation(
                f"the next part of the batch of step {ticket.step} was asked for when {self._here} of the "
                f"{ticket.size} examples of the last part had gone through the model and backward(). Each step is "
                "accounted for as one whole batch, in which every example contributes once; a part that is skipped is "
                "not accounted for. Call backward() for each part before you take the next one."
            )

    def count(self, examples: int) -> None:
        """A backward pass has ended; ``examples`` is how many went through backward() in this step so far."""
        ticket = self.ticket
        if ticket is None or self._spent:
            return  # refused, or recorded as unknown, by check()
        if self._lost:
            raise PrivacyViolation(
                f"earlier parts of the batch of step {ticket.step} were given up when an error ended a backward pass: "
                "the batch cannot be made whole any more. Nothing of it was released. Start a new loop over the "
                "loader: it draws the batch again."
            )
        self._here = examples - self._earlier
        if self._here > ticket.size and ticket.size != ticket.drawn:
            raise PrivacyViolation(
                f"{self._here} examples went through backward() for a part of the batch that has {ticket.size}: an "
                "example that contributes more than once is not bounded by its clip. Call the model and backward() "
                "once for each part that the loader hands out."
            )

    def give_up(self) -> None:
        """An error has ended a backward pass, and what was summed up of the batch is gone."""
        self._lost = self._lost or self._earlier > 0
        self._here = 0

    def unreleased(self) -> PrivacyViolation:
        """What is wrong where the next batch is asked for, and this one was not released."""
        assert self.ticket is not None
        return PrivacyViolation(
            f"the batch of step {self.ticket.step} ({self.ticket.drawn} examples) was not released before the next one "
            "was drawn: not all of its examples went through the model and backward(). Each step is accounted for as "
            "one whole batch; skipping batches or examples by their content is not accounted for. Call backward() for "
            f"every batch, also an empty one{self._rows_of(self.ticket)}. If your code drops examples by their own "
            "content alone, say so: PrivacyEngine(drops_examples=True). For batches larger than memory use "
            "physical_batch_size."
        )

    def _rows_of(self, ticket: Ticket) -> str:
        rows = ticket.drawn * self.views
        return f", with all {rows} rows, {self.views} for each example" if self.views > 1 else ""

    @property
    def is_open(self) -> bool:
        """Whether a batch was handed out and not released yet."""
        return self.ticket is not None and not self._spent

    @property
    def in_parts(self) -> bool:
        """Whether parts of the batch that was handed out are still to come before it is released."""
        return self.ticket is not None and self.is_open and self.ticket.size != self.ticket.drawn

    def is_whole(self, stats: ClipStats, *, waits: bool = True) -> bool:
        """Whether all of the batch went through backward(), so that it can be released.

        ``waits=False``: what is missing will not come, since other processes go on.
        """
        ticket = self.ticket
        if ticket is None or self._spent:
            return True  # refused, or recorded as unknown, by check()
        if not ticket.last:
            return False
        return self.drops_examples or not waits or stats.examples >= ticket.drawn

    def check(self, stats: ClipStats, step: int) -> str:
        """The sampler to record: gradveil's, or "unknown" where the batch did not come from the loader."""
        ticket = self.ticket
        if self._spent:
            raise PrivacyViolation(
                f"backward() was called again after the batch of step {step - 1} was released: its examples would "
                "contribute twice. Add the losses of a batch and call backward() once. For data that is public, use "
                "`with engine.public_data():`."
            )
        if ticket is None:
            self._warn_of_unknown()
            return "unknown"
        if ticket.step != step:
            raise PrivacyViolation(
                f"this batch was drawn for step {ticket.step}, and the engine is at step {step}. Start a new loop over "
                "the loader."
            )
        if stats.examples > ticket.drawn:
            raise PrivacyViolation(
                f"{stats.examples} examples went through backward() in this step, but the batch has {ticket.drawn}: an "
                "example that contributes more than once is not bounded by its clip. Call the model and backward() "
                "once per batch, with the examples along the first dimension of the model's input."
            )
        if stats.examples != ticket.drawn and not (self.drops_examples and self.views == 1):
            raise PrivacyViolation(
                f"{stats.examples * self.views} rows went through backward() in this step, but the batch has "
                f"{ticket.drawn} examples{f' with {self.views} views each' if self.views > 1 else ''}. Give the model "
                f"all {ticket.drawn * self.views} rows, with the examples along the first dimension; if your code "
                "drops examples by their own content alone, say so: PrivacyEngine(drops_examples=True)."
            )
        return self.sampler

    def spend(self) -> None:
        """The batch is released, or charged as if it were."""
        self._spent = self.ticket is not None

    def _warn_of_unknown(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "this step's batch did not come from the loader that make_private returned, so nothing is known of "
                "how it was sampled: the run's proved epsilon is infinite from here on. For data that is public, use "
                "`with engine.public_data():`.",
                stacklevel=2,
            )
