"""Fixed features: what a model is given instead of pixels. They learn nothing, so they cost no privacy.

A feature map is a module without parameters that treats each example alone, and knows its ``output_shape``. It is the
first part of a model; because it never changes, training computes its output once and fits the rest to that.

>>> make("scattering", (1, 28, 28)).output_shape
(81, 7, 7)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.errors import UnknownNameError
from gradveil.training.features.balanced import BalancedScattering, CentredScattering
from gradveil.training.features.scattering import Scattering

__all__ = ["MAPS", "BalancedScattering", "CentredScattering", "Scattering", "extract", "make"]

MAPS = {"scattering": Scattering, "balanced-scattering": BalancedScattering, "centred-scattering": CentredScattering}
_AT_ONCE = {"cpu": 48, "cuda": 3000}  # channels of images: on a CPU, as many as its cache holds


def make(name: str, input_shape: Sequence[int]) -> Scattering:
    """The named feature map, for examples of that shape."""
    if name not in MAPS:
        raise UnknownNameError("features", name, ("none", *MAPS))
    return MAPS[name](input_shape)


@torch.no_grad()
def extract(features: Scattering, x: Tensor, device: torch.device) -> Tensor:
    """The features of all examples in ``x``, on ``device``, computed in pieces."""
    features = features.to(device)
    found = torch.empty((len(x), *features.output_shape), device=device)
    rows = max(1, _AT_ONCE[device.type] // x.shape[1])
    for start in range(0, len(x), rows):
        found[start : start + rows] = features(x[start : start + rows].to(device))
    return found
