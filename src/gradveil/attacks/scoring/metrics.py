"""How near a reconstruction came. Images are in [0, 1]; what an attack returns is clamped to that before it is judged.

Tables of bits are rounded before they are judged: what counts is how many features are wrong.

Legend: V victims, B examples of one victim.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared difference over everything but the first dimensions: (V, B) from (V, B, ...)."""
    return (a.clamp(0.0, 1.0) - b).square().flatten(2).mean(2)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, peak 1; 120 where the images agree to float32."""
    return -10.0 * torch.log10(mse(a, b).clamp(min=1e-12))


def ssim(a: Tensor, b: Tensor, window: int = 7) -> Tensor:
    """Structural similarity (V, B) with a square window and data range 1, averaged over channels."""
    shape = a.shape[:2]
    a, b = a.clamp(0.0, 1.0).flatten(0, 1).double(), b.flatten(0, 1).double()
    window = min(window, *a.shape[-2:])
    count = window**2

    def local(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, window, stride=1)

    mean_a, mean_b = local(a), local(b)
    unbiased = count / max(1, count - 1)
    var_a = (local(a * a) - mean_a**2) * unbiased
    var_b = (local(b * b) - mean_b**2) * unbiased
    both = (local(a * b) - mean_a * mean_b) * unbiased
    c1, c2 = 0.01**2, 0.03**2
    value = ((2 * mean_a * mean_b + c1) * (2 * both + c2)) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return value.flatten(1).mean(1).view(shape)


def is_binary(x: Tensor) -> bool:
    """Whether these are rows of bits: tables such as Purchase and Location, not images."""
    rows = x.dim() <= 3  # (n, features) or (V, B, features)
    return rows and bool(((x == 0) | (x == 1)).all())


def wrong_features(a: Tensor, b: Tensor) -> Tensor:
    """Hamming distance (V, B) of reconstructions (V, B, features), rounded to 0 or 1, from bits."""
    return ((a > 0.5) != (b > 0.5)).flatten(2).sum(2)


def matched(found: Tensor, secret: Tensor) -> Tensor:
    """Indices (V, B) into ``found`` that fit each victim's secret examples best: least total squared error."""
    batch = secret.shape[1]
    if batch == 1:
        return torch.zeros(secret.shape[:2], dtype=torch.int64, device=secret.device)
    flat_found, flat_secret = found.clamp(0.0, 1.0).flatten(2), secret.flatten(2)
    costs = torch.cdist(flat_secret, flat_found).square().cpu().numpy()
    picks = [linear_sum_assignment(cost)[1] for cost in costs]
    return torch.as_tensor(np.stack(picks), device=secret.device)


def rank_in(found: Tensor, secret_index: Tensor, candidates: Tensor) -> Tensor:
    """How many candidates are nearer to each reconstruction (n, ...) than the one it is of: 0 is found exactly."""
    distances = torch.cdist(found.clamp(0.0, 1.0).flatten(1), candidates.flatten(1))
    own = distances.gather(1, secret_index.view(-1, 1))
    return (distances < own).sum(1)
