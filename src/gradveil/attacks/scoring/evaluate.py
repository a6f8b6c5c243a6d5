"""Judging reconstructions: against the truth, against guessing, and against what theory allows.

A success is better than every guess. Images: PSNR 6 dB above the best constant image and above the mean training image,
whichever is nearer to the victim. Tables of bits: at most a quarter of the wrong features of the best of all zeros, all
ones and the rounded mean row, which is the same margin. The paper's own criterion (MSE below 0.70) is reported beside
it for images under both readings, per pixel as the text says and as the plain l2 distance that the released code saves;
for images in [0, 1] a black square passes the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.methods.base import Reconstruction
from gradveil.attacks.methods.labels import counts_recovered
from gradveil.attacks.observation.views import GroundTruth
from gradveil.attacks.scoring.metrics import is_binary, matched, mse, psnr, rank_in, ssim, wrong_features
from gradveil.attacks.scoring.scores import ImageScore, Score, TableScore

__all__ = ["Score", "best_guess", "controls", "fewest_wrong", "in_order", "score", "table_rows"]


def score(
    reconstruction: Reconstruction,
    secret: GroundTruth,
    *,
    mean_image: Tensor,
    candidates: Tensor | None = None,
    candidate_index: Tensor | None = None,
) -> Score:
    """Judge a reconstruction. ``mean_image`` is that of training examples other than the victims (of rows too).

    candidates         training examples to be retrieved from, with ``candidate_index`` (V, B) of the right ones
    """
    truth = secret.x
    # A failed attack is judged as one that returned grey: no number that is not finite gets into a summary.
    broken = ~torch.isfinite(reconstruction.x).flatten(1).all(1)
    guess = torch.nan_to_num(reconstruction.x, 0.5, 0.5, 0.5)
    order = matched(guess, truth)
    x = in_order(guess, order)
    labels = torch.gather(reconstruction.labels, 1, order)
    ranks = None
    if candidates is not None and candidate_index is not None:
        ranks = rank_in(x.flatten(0, 1), candidate_index.flatten(), candidates)
    common: dict[str, Any] = {
        "label_right": (labels == secret.y).flatten(),
        "counts_right": counts_recovered(labels, secret.y),
        "rank": ranks,
        "failed": (reconstruction.failed | broken).unsqueeze(1).expand(truth.shape[:2]).flatten(),
    }
    if is_binary(truth):
        return TableScore(
            features=truth.shape[2],
            wrong=wrong_features(x, truth).flatten(),
            guess_wrong=fewest_wrong(truth, mean_image).flatten(),
            **common,
        )
    return ImageScore(
        psnr=psnr(x, truth).flatten(),
        ssim=ssim(x, truth).flatten() if truth.dim() == 5 else None,
        mse=mse(x, truth).flatten(),
        distance=(x.clamp(0.0, 1.0) - truth).flatten(2).norm(dim=2).flatten(),
        guess_psnr=best_guess(truth, mean_image).flatten(),
        **common,
    )


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """Each victim's examples (V, B, ...) in the order of ``order`` (V, B)."""
    return torch.stack([row[picked] for row, picked in zip(x, order, strict=True)])


def best_guess(truth: Tensor, mean_image: Tensor) -> Tensor:
    """PSNR (V, B) of the better of two guesses: the best constant for that very example, and the mean image."""
    constant = truth.flatten(2).mean(2).view(*truth.shape[:2], *[1] * (truth.dim() - 2)).expand_as(truth)
    return torch.maximum(psnr(constant, truth), psnr(mean_image.expand_as(truth), truth))


def fewest_wrong(truth: Tensor, mean_row: Tensor) -> Tensor:
    """Wrong features (V, B) of the best of three guesses: all zeros, all ones, and the rounded mean row."""
    guesses = (torch.zeros_like(truth), torch.ones_like(truth), mean_row.expand_as(truth))
    return torch.stack([wrong_features(guess, truth) for guess in guesses]).amin(0)


def controls(
    secret: GroundTruth, *, mean_image: Tensor, others: Tensor, seed: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """What anyone has without looking at a gradient, as reconstructions (V, B, ...)."""
    picks = torch.randint(len(others), secret.x.shape[:2], generator=generator)
    mean, other = mean_image.expand_as(secret.x), others[picks].to(secret.x)
    if is_binary(secret.x):
        return {
            "all zeros": torch.zeros_like(secret.x),
            "rounded mean training row": (mean > 0.5).to(secret.x),
            "a random training row": other,
            "the untouched seed": seed,
        }
    return {
        "mean training image": mean,
        "a random training image": other,
        "the untouched seed": seed,
    }


def table_rows(scores: Sequence[tuple[str, Score]]) -> list[list[str]]:
    """One row for each, under the headings of its score: the median with its interval, worst 5 %, success, labels."""
    return [[name, *found.row()] for name, found in scores]
