"""Scores to the digit: the constants of SSIM, the level of an interval, which 5 % are the worst."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binom

from gradveil.attacks.scoring.metrics import ssim
from gradveil.attacks.scoring.scores import ImageScore, TableScore, interval


def test_ssim_of_constant_images_is_the_luminance_term_with_its_constant():
    """(2 a b + c1) / (a^2 + b^2 + c1) with c1 = .01^2 (Wang et al. 2004, data range 1): a half at a = 0, b = .01."""
    black, grey = torch.zeros(1, 1, 1, 9, 9), torch.full((1, 1, 1, 9, 9), 0.01)
    assert ssim(black, grey).item() == pytest.approx(0.5, abs=1e-6)


def test_ssim_of_an_image_against_its_mean_is_the_contrast_term_with_its_constant():
    """c2 / (variance + c2) with c2 = .03^2, for an image without correlation to its mean: a half at spread .03."""
    pattern = torch.arange(49.0).double() - 24
    pattern = (pattern / pattern.std()).view(1, 1, 1, 7, 7)  # mean 0, unbiased variance 1, in the only window
    mean = torch.full((1, 1, 1, 7, 7), 0.5).double()
    assert ssim(mean + 0.03 * pattern, mean).item() == pytest.approx(0.5, abs=1e-9)


def test_the_bootstrap_interval_holds_95_percent():
    """Resampled means of n coins are binomial: the ends are its quantiles .025 and .975, not .05 and .95."""
    n = 400
    coins = torch.tensor([0.0, 1.0]).repeat(n // 2)
    ends = np.mean([interval(coins, np.mean, seed) for seed in range(5)], axis=0)
    assert ends == pytest.approx(binom.ppf([0.025, 0.975], n, 0.5) / n, abs=0.002)
    assert np.all(np.abs(ends - binom.ppf([0.05, 0.95], n, 0.5) / n) > 0.005)  # and these would be seen


def _common(n: int) -> dict[str, torch.Tensor | None]:
    return {"label_right": torch.ones(n), "counts_right": torch.ones(n), "rank": None, "failed": torch.zeros(n).bool()}


def test_the_worst_5_percent_are_the_best_for_the_attacker():
    values = torch.arange(101.0)
    rest = torch.zeros(101)
    images = ImageScore(psnr=values, ssim=None, mse=rest, distance=rest, guess_psnr=rest, **_common(101))
    assert images.summary()["psnr_worst_5_percent"] == 95.0
    table = TableScore(features=200, wrong=values, guess_wrong=values, **_common(101))
    assert table.summary()["wrong_worst_5_percent"] == pytest.approx(5.0)
