"""Where a reconstruction starts.

half, quarter, eighth   noise of a part of the size, tiled: "patterned" seeds, the first is the paper's
random                  noise of the whole size
constant                grey
image                   another image, given; or one for every example
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradveil.attacks.observation.views import Observation
from gradveil.errors import ConfigError, UnknownNameError

PARTS = {"half": 2, "quarter": 4, "eighth": 8}
SEEDS = (*PARTS, "random", "constant", "image")


def make_seed(
    kind: str,
    shape: tuple[int, ...],
    *,
    victims: int,
    batch: int = 1,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    image: Tensor | None = None,
) -> Tensor:
    """Starts (V, B, *shape) in [0, 1]; drawn on the CPU, so that they are the same on every device."""
    whole = (victims, batch, *shape)
    if kind == "image":
        if image is None or tuple(image.shape) not in (tuple(shape), whole):
            raise ConfigError(f"seed 'image' needs an image of shape {tuple(shape)}.")
        return image.to(device).expand(whole).clone()
    if kind == "constant":
        return torch.full(whole, 0.5, device=device)
    if kind == "random" or (kind in PARTS and len(shape) != 3):
        return torch.rand(whole, generator=generator).to(device)
    if kind not in PARTS:
        raise UnknownNameError("seed", kind, SEEDS)
    channels, height, width = shape
    parts = PARTS[kind]
    tile = torch.rand(
        victims, batch, channels, math.ceil(height / parts), math.ceil(width / parts), generator=generator
    )
    return tile.repeat(1, 1, 1, parts, parts)[..., :height, :width].contiguous().to(device)


def start_of(observation: Observation, kind: str, generator: torch.Generator, *, image: Tensor | None = None) -> Tensor:
    """Starts for all victims of an observation, on its device."""
    return make_seed(
        kind,
        observation.input_shape,
        victims=observation.victims,
        batch=observation.batch,
        generator=generator,
        device=observation.device,
        image=image,
    )
