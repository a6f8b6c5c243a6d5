"""Drawings: pictures of nothing, to measure features on where no real picture may be looked at.

Discs, boxes and strokes of random sizes, places, directions and colours, each covering what is below it. Their edges,
corners and flat parts are roughly as frequent as in photographs (Lee, Mumford & Huang 2001, "Occlusion models for
natural images"), which is all that is asked of them here.

Shapes: N drawings, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LAYERS = 10
_SMALLEST, _LARGEST = 0.06, 0.5  # radius, as a share of the picture's height
_STROKES = 0.5  # share of the shapes that are thin
_STROKE = (0.03, 0.07)  # half the width of those
_TINT = 0.25  # how far the channels of one colour are from their mean, at most
_EDGE = 0.4  # pixels over which a shape fades


def draw(count: int, shape: Sequence[int], seed: int) -> Tensor:
    """(N, C, H, W) in [0, 1], always the same for the same seed."""
    channels, height, width = shape
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator)

    def colour() -> Tensor:
        tint = _TINT * (2 * uniform(count, channels, 1, 1) - 1) if channels > 1 else 0.0
        return (uniform(count, 1, 1, 1) + tint).clamp(0, 1)

    rows = (torch.arange(height) + 0.5).view(1, -1, 1) / height
    columns = (torch.arange(width) + 0.5).view(1, 1, -1) / width
    picture = colour().expand(count, channels, height, width)
    for _ in range(_LAYERS):
        length = _SMALLEST * (_LARGEST / _SMALLEST) ** uniform(count, 1, 1)
        thin = uniform(count, 1, 1) < _STROKES
        stroke = _STROKE[0] + (_STROKE[1] - _STROKE[0]) * uniform(count, 1, 1)
        breadth = torch.where(thin, torch.minimum(stroke, length), length * (0.3 + 0.7 * uniform(count, 1, 1)))
        down, right = (rows - 1.4 * uniform(count, 1, 1) + 0.2), (columns - 1.4 * uniform(count, 1, 1) + 0.2)
        angle = math.pi * uniform(count, 1, 1)
        along = (angle.cos() * right + angle.sin() * down) / length
        across = (angle.cos() * down - angle.sin() * right) / breadth
        disc, box = (along.square() + across.square()).sqrt(), torch.maximum(along.abs(), across.abs())
        outside = torch.where(uniform(count, 1, 1) < 0.5, disc, box) - 1  # 0 on the edge
        cover = torch.sigmoid(-outside * breadth * height / _EDGE).unsqueeze(1)
        picture = picture * (1 - cover) + colour() * cover
    return picture
