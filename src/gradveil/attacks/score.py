"""Judging reconstructions: against the truth, against guessing, and against what theory allows.

A success is better than every guess: PSNR 6 dB above the best constant image and above the mean training image,
whichever is nearer to the victim. The paper's own criterion (MSE below 0.70) is reported beside it under both readings,
per pixel as the text says and as the plain l2 distance that the released code saves; for images in [0, 1] a black
square passes the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.attack import Reconstruction
from gradveil.attacks.metrics import matched, mse, psnr, rank_in, ssim
from gradveil.attacks.observation import Secret

MARGIN_DB = 6.0  # above every guess
PAPER_THRESHOLD = 0.70
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Score:
    """Per example of every victim, flat (V B): what was reached, and what guessing reaches."""

    psnr: Tensor
    ssim: Tensor | None  # images only
    mse: Tensor
    distance: Tensor  # l2, the paper's code's "mse"
    label_right: Tensor
    guess_psnr: Tensor  # of the better of the two guesses
    rank: Tensor | None  # how many training examples are nearer than the right one
    failed: Tensor

    @property
    def success(self) -> Tensor:
        """Better than every guess by a margin."""
        return (self.psnr >= self.guess_psnr + MARGIN_DB) & ~self.failed

    def success_at(self, threshold: float) -> float:
        """The share of examples that came out above a PSNR."""
        return float(((self.psnr >= threshold) & ~self.failed).double().mean())

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """Medians, the worst 5 % (the best for the attacker), rates, and 95 % bootstrap intervals."""
        found: dict[str, Any] = {
            "examples": len(self.psnr),
            "psnr_median": float(self.psnr.median()),
            "psnr_median_interval": _interval(self.psnr, np.median, seed),
            "psnr_worst_5_percent": float(self.psnr.double().quantile(0.95)),
            "mse_median": float(self.mse.median()),
            "success_rate": float(self.success.double().mean()),
            "success_rate_interval": _interval(self.success.double(), np.mean, seed),
            "success_curve": {str(db): self.success_at(db) for db in range(5, 45, 5)},
            "labels_right": float(self.label_right.double().mean()),
            "failed": int(self.failed.sum()),
            "guess_psnr_median": float(self.guess_psnr.median()),
            "paper": {
                "asr_mse_per_pixel": float((self.mse < PAPER_THRESHOLD).double().mean()),
                "asr_l2_distance": float((self.distance < PAPER_THRESHOLD).double().mean()),
            },
        }
        if self.ssim is not None:
            found["ssim_median"] = float(self.ssim.median())
        if self.rank is not None:
            found["rank_median"] = float(self.rank.double().median())
            found["retrieved_first"] = float((self.rank == 0).double().mean())
        return found


def _interval(values: Tensor, statistic: Any, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    data = values.detach().cpu().double().numpy()
    picks = rng.integers(0, len(data), size=(_RESAMPLES, len(data)))
    found = statistic(data[picks], axis=1)
    return [float(q) for q in np.quantile(found, (0.025, 0.975))]


def score(
    reconstruction: Reconstruction,
    secret: Secret,
    *,
    mean_image: Tensor,
    candidates: Tensor | None = None,
    candidate_index: Tensor | None = None,
) -> Score:
    """Judge a reconstruction. ``mean_image`` is that of training examples other than the victims.

    candidates         training examples to be retrieved from, with ``candidate_index`` (V, B) of the right ones
    """
    order = matched(reconstruction.x, secret.x)
    x = _in_order(reconstruction.x, order)
    labels = torch.gather(reconstruction.labels, 1, order)
    truth = secret.x
    images = truth.dim() == 5
    failed = reconstruction.failed.unsqueeze(1).expand(truth.shape[:2]).flatten()
    ranks = None
    if candidates is not None and candidate_index is not None:
        ranks = rank_in(x.flatten(0, 1), candidate_index.flatten(), candidates)
    return Score(
        psnr=psnr(x, truth).flatten(),
        ssim=ssim(x, truth).flatten() if images else None,
        mse=mse(x, truth).flatten(),
        distance=(x.clamp(0.0, 1.0) - truth).flatten(2).norm(dim=2).flatten(),
        label_right=(labels == secret.y).flatten(),
        guess_psnr=best_guess(truth, mean_image).flatten(),
        rank=ranks,
        failed=failed,
    )


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    return torch.stack([row[picked] for row, picked in zip(x, order, strict=True)])


def best_guess(truth: Tensor, mean_image: Tensor) -> Tensor:
    """PSNR (V, B) of the better of two guesses: the best constant for that very example, and the mean image."""
    constant = truth.flatten(2).mean(2).view(*truth.shape[:2], *[1] * (truth.dim() - 2)).expand_as(truth)
    return torch.maximum(psnr(constant, truth), psnr(mean_image.expand_as(truth), truth))


def controls(
    secret: Secret, *, mean_image: Tensor, others: Tensor, seed: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """What anyone has without looking at a gradient, as reconstructions (V, B, ...)."""
    picks = torch.randint(len(others), secret.x.shape[:2], generator=generator)
    return {
        "mean training image": mean_image.expand_as(secret.x),
        "a random training image": others[picks].to(secret.x),
        "the untouched seed": seed,
    }


def table_rows(scores: Sequence[tuple[str, Score]]) -> list[list[str]]:
    """One row for each: median PSNR with its interval, worst 5 %, SSIM, success, labels."""
    rows = []
    for name, found in scores:
        s = found.summary()
        low, high = s["psnr_median_interval"]
        rows.append(
            [
                name,
                f"{s['psnr_median']:.1f} ({low:.1f} to {high:.1f})",
                f"{s['psnr_worst_5_percent']:.1f}",
                f"{s['ssim_median']:.3f}" if "ssim_median" in s else "-",
                f"{s['success_rate']:.0%}",
                f"{s['labels_right']:.0%}",
            ]
        )
    return rows
