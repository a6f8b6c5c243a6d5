"""Somebody who knows the truth and looks on: when did each example first come out, and which attempt was the best?

What he sees is reported, and told to no attack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.methods.base import Reconstruction
from gradveil.attacks.observation.views import GroundTruth
from gradveil.attacks.scoring.evaluate import best_guess, fewest_wrong, in_order, score
from gradveil.attacks.scoring.metrics import is_binary, matched, psnr, wrong_features
from gradveil.attacks.scoring.scores import MARGIN_DB, MARGIN_WRONG, ImageScore

CLEAR_DB = 30.0  # an image that one would call the same
_MOST_EXAMPLES = (
    8  # of one victim: with more, finding out which is which in every iteration takes longer than attacking
)


class Oracle:
    """Called by an attack after each iteration."""

    def __init__(self, secret: GroundTruth, mean_image: Tensor) -> None:
        self._truth, self._bits = secret.x, is_binary(secret.x)
        self._needed = fewest_wrong(self._truth, mean_image) if self._bits else best_guess(self._truth, mean_image)
        never = torch.full(self._truth.shape[:2], -1, device=self._truth.device)
        self.success, self.clear = never, never.clone()  # iteration of the first success, and of the first 30 dB

    def __call__(self, iteration: int, x: Tensor) -> None:
        if self._truth.shape[1] > _MOST_EXAMPLES:
            return
        x = torch.nan_to_num(x, 0.5, 0.5, 0.5)
        x = in_order(x, matched(x, self._truth))
        if self._bits:
            good = MARGIN_WRONG * wrong_features(x, self._truth) <= self._needed
        else:
            reached = psnr(x, self._truth)
            good = reached >= self._needed + MARGIN_DB
            self.clear = torch.where((self.clear < 0) & (reached >= CLEAR_DB), iteration, self.clear)
        self.success = torch.where((self.success < 0) & good, iteration, self.success)

    def summary(self) -> dict[str, Any]:
        """Medians over the examples that came out; None where none did."""
        found = {"iterations_to_success_median": _median(self.success)}
        if not self._bits:
            found["iterations_to_30_db_median"] = _median(self.clear)
            found["ever_30_db"] = float((self.clear >= 0).double().mean())
        return found


def _median(iterations: Tensor) -> float | None:
    reached = iterations[iterations >= 0]
    return float(reached.double().median()) if len(reached) else None


def oracle(found: Reconstruction, secret: GroundTruth, mean_image: Tensor) -> dict[str, float] | None:
    """What choosing among the attempts by the truth would have given: no attacker can. None where there was one."""
    if len(found.attempts) < 2:
        return None
    scores = [score(replace(found, x=x), secret, mean_image=mean_image) for x in found.attempts]
    success = torch.stack([s.success for s in scores]).any(0)
    result = {"attempts": float(len(scores)), "success_rate": float(success.double().mean())}
    images = [s.psnr for s in scores if isinstance(s, ImageScore)]
    if images:
        result["psnr_median"] = float(torch.stack(images).amax(0).median())
    return result
