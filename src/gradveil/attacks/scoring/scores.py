"""What reconstructions reached, example by example, and its summary: images by PSNR, tables of bits by wrong features.

A success is better than every guess by the same margin in both: 6 dB, a quarter of the mean squared error. The mean
squared error of rounded bits is their share of wrong ones, so for tables it is a quarter of the wrong features that the
best guess has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

MARGIN_DB = 6.0  # above every guess
MARGIN_WRONG = 4  # times fewer wrong features than every guess
PAPER_THRESHOLD = 0.70
_RESAMPLES = 2000
_SHARES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of features that are wrong: thresholds of the curve


@dataclass(frozen=True, kw_only=True)
class Score:
    """Per example of every victim, flat (V B); ``counts_right`` per victim."""

    headings: ClassVar[tuple[str, ...]]  # of the columns that ``row`` fills
    success_means: ClassVar[str]

    label_right: Tensor  # of the example that it was matched with
    counts_right: Tensor  # (V,): share of the labels that were found, whosever they are
    rank: Tensor | None  # how many training examples are nearer than the right one
    failed: Tensor

    @property
    def success(self) -> Tensor:
        """Better than every guess by a margin."""
        raise NotImplementedError

    def measured(self, seed: int) -> dict[str, Any]:
        """The summary of what kind of data this is."""
        raise NotImplementedError

    def row(self) -> list[str]:
        """The summary in words, one for each of ``headings``."""
        raise NotImplementedError

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """Medians, the worst 5 % (the best for the attacker), rates, and 95 % bootstrap intervals."""
        found: dict[str, Any] = {
            "examples": len(self.label_right),
            "success_rate": float(self.success.double().mean()),
            "success_rate_interval": interval(self.success.double(), np.mean, seed),
            "labels_right": float(self.counts_right.double().mean()),
            "failed": int(self.failed.sum()),
            **self.measured(seed),
        }
        if self.rank is not None:
            found["rank_median"] = float(self.rank.double().median())
            found["retrieved_first"] = float((self.rank == 0).double().mean())
        return found


@dataclass(frozen=True, kw_only=True)
class ImageScore(Score):
    """PSNR, SSIM and what the paper measures; also for rows of numbers that are not bits, which have no SSIM."""

    headings = ("PSNR, median dB", "worst 5 %", "SSIM", "found again", "success", "labels")
    success_means = "6 dB closer than the mean image and the best constant"

    psnr: Tensor
    ssim: Tensor | None  # images only
    mse: Tensor
    distance: Tensor  # l2, the paper's code's "mse"
    guess_psnr: Tensor  # of the better of the two guesses

    @property
    def success(self) -> Tensor:
        return (self.psnr >= self.guess_psnr + MARGIN_DB) & ~self.failed

    def success_at(self, threshold: float) -> float:
        """The share of examples that came out above a PSNR."""
        return float(((self.psnr >= threshold) & ~self.failed).double().mean())

    def measured(self, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "psnr_median": float(self.psnr.median()),
            "psnr_median_interval": interval(self.psnr, np.median, seed),
            "psnr_worst_5_percent": float(self.psnr.double().quantile(0.95)),
            "mse_median": float(self.mse.median()),
            "success_curve": {str(db): self.success_at(db) for db in range(5, 45, 5)},
            "guess_psnr_median": float(self.guess_psnr.median()),
            "paper": {
                "asr_mse_per_pixel": float((self.mse < PAPER_THRESHOLD).double().mean()),
                "asr_l2_distance": float((self.distance < PAPER_THRESHOLD).double().mean()),
            },
        }
        if self.ssim is not None:
            found["ssim_median"] = float(self.ssim.median())
        return found

    def row(self) -> list[str]:
        s = self.summary()
        low, high = s["psnr_median_interval"]
        return [
            f"{s['psnr_median']:.1f} ({low:.1f} to {high:.1f})",
            f"{s['psnr_worst_5_percent']:.1f}",
            f"{s['ssim_median']:.3f}" if "ssim_median" in s else "-",
            f"{s['retrieved_first']:.0%}" if "retrieved_first" in s else "-",
            f"{s['success_rate']:.0%}",
            f"{s['labels_right']:.0%}",
        ]


@dataclass(frozen=True, kw_only=True)
class TableScore(Score):
    """Hamming distances of reconstructions rounded to 0 or 1."""

    headings = ("wrong features, median", "worst 5 %", "exact", "success", "labels")
    success_means = (
        "at most a quarter of the wrong features (6 dB) of the best of all zeros, all ones and the rounded mean row"
    )

    features: int
    wrong: Tensor
    guess_wrong: Tensor  # of the best of the guesses

    @property
    def success(self) -> Tensor:
        return (MARGIN_WRONG * self.wrong <= self.guess_wrong) & ~self.failed

    def success_at(self, share: float) -> float:
        """The share of examples with at most this share of their features wrong."""
        return float(((self.wrong <= share * self.features) & ~self.failed).double().mean())

    def measured(self, seed: int) -> dict[str, Any]:
        return {
            "features": self.features,
            "wrong_median": float(self.wrong.double().median()),
            "wrong_median_interval": interval(self.wrong, np.median, seed),
            "wrong_worst_5_percent": float(self.wrong.double().quantile(0.05)),
            "wrong_share_median": float(self.wrong.double().median()) / self.features,
            "exact": self.success_at(0.0),
            "success_curve": {str(share): self.success_at(share) for share in _SHARES},
            "guess_wrong_median": float(self.guess_wrong.double().median()),
        }

    def row(self) -> list[str]:
        s = self.summary()
        low, high = s["wrong_median_interval"]
        return [
            f"{s['wrong_median']:.0f} of {self.features} ({low:.0f} to {high:.0f})",
            f"{s['wrong_worst_5_percent']:.0f}",
            f"{s['exact']:.0%}",
            f"{s['success_rate']:.0%}",
            f"{s['labels_right']:.0%}",
        ]


def interval(values: Tensor, statistic: Any, seed: int) -> list[float]:
    """The 95 % bootstrap interval of a statistic."""
    rng = np.random.default_rng(seed)
    data = values.detach().cpu().double().numpy()
    picks = rng.integers(0, len(data), size=(_RESAMPLES, len(data)))
    found = statistic(data[picks], axis=1)
    return [float(q) for q in np.quantile(found, (0.025, 0.975))]
