"""Views of images: what an example is seen as, several times at once, before its gradients are averaged and clipped.

    flip         its mirror image
    shift        moved by up to two pixels either way, the edge reflected
    flip-shift   both

Of K views the first is the image itself, the others are drawn: mirrored or not, moved by any offset. Two views by flip
are the image and its mirror image, and nothing is drawn. A draw is a function of the seed (one for each step), the
example and the view alone: the same in a resumed run, however a batch comes in parts, and on any device.

Legend: N examples, K views, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.errors import ConfigError

_FARTHEST = 2  # pixels of a shift


def check_shape(augment: str, dataset: str, input_shape: Sequence[int]) -> None:
    """Refuse to augment what is no image."""
    if augment != "none" and (len(input_shape) != 3 or min(input_shape[1:]) <= _FARTHEST):
        raise ConfigError(
            f"augment = {augment!r} mirrors or moves images, and an example of {dataset} has shape "
            f"{tuple(input_shape)}. Choose a data set of images, or leave augment and views out."
        )


def views_of(x_NCHW: Tensor, index_N: Tensor, *, augment: str, views: int, seed: int) -> Tensor:
    """The rows (N K, C, H, W) of these examples; ``index_N`` says which of all examples they are."""
    if augment == "flip" and views == 2:
        return torch.stack([x_NCHW, mirrored(x_NCHW)], dim=1).flatten(0, 1)
    n, c, height, width = x_NCHW.shape
    bits = _bits(seed, index_N, views - 1).unsqueeze(2)  # (N, K - 1, 1)
    down, right = (torch.arange(size, device=bits.device).expand(n, views - 1, size) for size in (height, width))
    if "flip" in augment:
        right = torch.where((bits & 1).bool(), width - 1 - right, right)
    if "shift" in augment:
        down, right = _reflected(down + _offset(bits >> 16), height), _reflected(right + _offset(bits >> 40), width)
    shape = (n, views - 1, c, height, width)
    drawn = x_NCHW.unsqueeze(1).expand(shape)
    drawn = drawn.gather(3, down[:, :, None, :, None].expand(shape)).gather(4, right[:, :, None, None].expand(shape))
    return torch.cat([x_NCHW.unsqueeze(1), drawn], dim=1).flatten(0, 1)


def fixed_views(x_NCHW: Tensor, augment: str) -> list[Tensor]:
    """Those over which predictions are averaged: nothing is drawn."""
    return [x_NCHW, mirrored(x_NCHW)] if "flip" in augment else [x_NCHW]


def mirrored(x: Tensor) -> Tensor:
    """Left and right exchanged."""
    return x.flip(-1)


def _reflected(place: Tensor, size: int) -> Tensor:
    """Places beyond the edge, as many pixels inside it."""
    last = size - 1
    return last - (last - place.abs()).abs()


def _offset(bits: Tensor) -> Tensor:
    return (bits & 0xFFFF) % (2 * _FARTHEST + 1) - _FARTHEST


def _bits(seed: int, index_N: Tensor, count: int) -> Tensor:
    """64 bits for each of ``count`` views of these examples, by SplitMix64 (Steele, Lea and Flood 2014).

    Good enough for augmentations, on which no privacy rests; the seed comes from the run's secret key.
    """
    place = index_N.to(torch.int64).unsqueeze(1) * count + torch.arange(1, count + 1, device=index_N.device)
    z = place * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    z = (z ^ _right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _right(z, 31)


def _signed(word: int) -> int:
    """A 64-bit word as torch has it."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _right(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # torch's shift repeats the sign
