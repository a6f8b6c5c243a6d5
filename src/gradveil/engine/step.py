"""The release of one step: from the sums of clipped gradients to ``.grad``. This file is the whole order.

    check         the batch, the declared steps, the budget; refused, nothing has happened
    measure       clip statistics, the scale of the noise, and the record
    record        the ledger has it
    count         the step is taken and its batch is spent
    noise         under a nonce that is used for this release only
    hand out      .grad += noised mean
    learn         adaptive bounds follow what was released

An exception or an interrupt before "record" leaves nothing; after it, a release that is charged and perhaps not used.
Nothing is ever used and not charged. What the user does with ``.grad`` afterwards is post-processing.

A seeded run must be able to withhold a release that was made before and is another now. There the noise comes before
the record, on buffers that nobody else can reach, so that the record holds the digest of the noised gradients.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradveil.clipping import Clipper, ClipStats
from gradveil.engine.batches import Batches
from gradveil.engine.guards import NotFiniteCount
from gradveil.engine.release_log import ReleaseLog
from gradveil.errors import BudgetExhausted, PrivacyViolation
from gradveil.mechanism.distributed.ranks import Ranks
from gradveil.mechanism.noise.streams import NoiseSource, SecretKey, fresh_nonce
from gradveil.mechanism.release import Releaser


class PrivateStep:
    """Makes the releases of a run, one per step."""

    def __init__(
        self,
        *,
        key: SecretKey,
        releaser: Releaser,
        log: ReleaseLog,
        batches: Batches,
        clipper: Clipper,
        ranks: Ranks,
        steps: int,
    ) -> None:
        self.key, self.log, self.batches, self.clipper = key, log, batches, clipper
        self.releaser, self.ranks, self.steps = releaser, ranks, steps
        self.index = 0  # of the step to be released next
        self.not_finite = NotFiniteCount()
        self._process, self._generators = os.getpid(), dict[torch.device, torch.Generator]()
        self._series, self._in_series = fresh_nonce(), 0  # nonces that several ranks count up together

    def release(self, sums: Mapping[str, Tensor], stats: ClipStats) -> dict[str, Tensor]:
        """Make this step's release and hand it out; the noised mean gradients.

        Guarantee: the record in the ledger describes the noise on what was handed out, or nothing was handed out.
        """
        sampler = self.check(stats)
        noise = self.fresh_noise()
        sums = self.releaser.of_every_parameter(sums)
        measured = self.releaser.measure(self.index, sums, self.over_ranks(stats), noise, sampler=sampler)
        try:
            if self.key.seeded:
                self.releaser.add_noise(sums, measured.scale, noise)
                self.log.note(self.log.compared(measured.release, sums.values()))
                self.count()
            else:
                self.log.note(measured.release)
                self.count()
                self.releaser.add_noise(sums, measured.scale, noise)
            self._hand_out(sums)
            self.releaser.learn(measured, sums)
        finally:
            self.prepare()
        self.not_finite.note(stats.lost, step=self.index - 1)
        return sums

    def check(self, stats: ClipStats) -> str:
        """Refuse a step that the run may not take; the sampler to record."""
        self.check_process()
        _check_not_capturing(self.releaser.device)
        if self.index >= self.steps:
            raise BudgetExhausted(
                f"the run declared {self.steps} steps and has taken them: schedules and accounting end there. Declare "
                "more steps from the start."
            )
        rule, weighing = self.releaser.rule, self.clipper.weighing
        if weighing.bounds != tuple(rule.bounds(self.index)) or weighing.whitening is not rule.whitening:
            raise PrivacyViolation(
                f"the batch of step {self.index} was clipped to other bounds than its release would record, because an "
                "earlier step was interrupted. Nothing was released. Call the model and backward() for it again."
            )
        sampler = self.batches.check(stats, self.index)
        self.log.check_budget(self.index, sampler)
        return sampler

    def check_process(self) -> None:
        """Refused in a fork: it has the run's key, and would draw the parent's samples and keep a ledger of its own."""
        if os.getpid() != self._process:
            raise PrivacyViolation(
                f"this process ({os.getpid()}) was forked from the one that called make_private ({self._process}): "
                "both would release on the same data, and neither ledger would hold what the other has spent. Call "
                "make_private in the process that trains."
            )

    def fresh_noise(self) -> NoiseSource:
        """The noise of the next release; never the same twice, except for a seeded step that is repeated."""
        if self.key.seeded:
            return NoiseSource(self.key, self.index, generators=self._generators)
        if not self.ranks.several:
            return NoiseSource(self.key, fresh_nonce(), generators=self._generators)
        self._in_series += 1
        return NoiseSource(self.key, f"{self._series}-{self._in_series}", generators=self._generators)

    def renew(self, key: SecretKey) -> None:
        """Another key: the run goes back, and samples must be independent of those drawn before."""
        self.key, self._series, self._in_series = key, self.ranks.from_first(fresh_nonce), 0

    @property
    def looks_at_norms(self) -> bool:
        """Whether the release depends on the norms of the batch's examples."""
        return self.releaser.plan.sensitivity_rule == "l2max-example" or self.releaser.rule.counts_norms

    def over_ranks(self, stats: ClipStats) -> ClipStats:
        """The statistics of the whole batch, where the release depends on them."""
        if not self.looks_at_norms:
            return stats
        return self.ranks.combined(stats, len(self.releaser.groups), next(iter(self.releaser.parameters.values())))

    def count(self) -> None:
        """The release is recorded: the step is taken, whatever becomes of it."""
        self.index += 1
        self.batches.spend()

    def prepare(self) -> None:
        """Make ready for the next step: nothing gathered, and its bounds."""
        self.clipper.start_step()
        self.clipper.weighing.whitening = self.releaser.rule.whitening
        if self.index < self.steps:
            self.clipper.weighing.bounds = self.releaser.rule.bounds(self.index)

    @torch.no_grad()
    def _hand_out(self, noised: Mapping[str, Tensor]) -> None:
        for name, parameter in self.releaser.parameters.items():
            add_to_gradient(parameter, noised[name])


def _check_not_capturing(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PrivacyViolation(
            "backward() is being captured in a CUDA graph of your own: each replay would hand out the same noise, and "
            "no replay would be recorded. Use gradveil.cuda_graph_step(engine, loss)."
        )


def add_to_gradient(parameter: nn.Parameter, grad: Tensor) -> None:
    """As autograd does it."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)
