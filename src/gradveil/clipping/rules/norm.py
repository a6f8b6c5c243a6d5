"""Normalisation within an example, and PReLU: layers whose per-example gradients are as small as the layer.

Their per-example gradients are sums over an example's own positions, so they are simply formed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping.backends import cuda, native
from gradveil.clipping.per_sample_grads import MaterializedGrads, PerSampleGrads, at_least_float32, wide_pair
from gradveil.clipping.rules.layer import LayerRule


def _over_positions(t: Tensor, last: int) -> Tensor:
    """Sum (B, ..., *shape) over everything between the batch and the last dimensions."""
    middle = tuple(range(1, t.dim() - last))
    return t.sum(middle) if middle else t


def _use(scaled: Tensor, shift: Tensor, needs: tuple[bool, bool, bool]) -> PerSampleGrads:
    return MaterializedGrads(([scaled] if needs[1] else []) + ([shift] if needs[2] else []))


def _as_autocast_has_it(x: Tensor) -> Tensor:
    """On a GPU autocast normalises in float32; the operators that are called here are below it, and do not know."""
    return x.float() if x.is_cuda and x.element_size() == 2 and torch.is_autocast_enabled("cuda") else x


class LayerNormRule(LayerRule):
    """Layer normalisation, with or without bias."""

    def prepare(self, x: Tensor) -> Tensor:
        return _as_autocast_has_it(x)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = self.settings
        out, mean, rstd = torch.native_layer_norm(x, m.normalized_shape, weight, bias, m.eps)
        return out, (mean, rstd)

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        mean, rstd = kept
        kernels = native.for_tensors(x, g, weight, mean, rstd)
        if kernels is not None:
            to_x, scaled, shift = kernels.layer_norm_backward(
                x.contiguous(), g.contiguous(), mean, rstd, weight.contiguous(), to_x=needs[0]
            )
            return to_x, _use(scaled, shift, needs)
        to_x, last = None, len(self.settings.normalized_shape)
        if needs[0]:
            to_x = torch.ops.aten.native_layer_norm_backward(
                g, x, self.settings.normalized_shape, mean, rstd, weight, None, [True, False, False]
            )[0]
        if last == 1 and cuda.usable(x, g):
            return to_x, _use(*cuda.feature_moments(x, g, mean, rstd), needs)
        wide_x, wide_g = wide_pair(x, g)
        scaled = _over_positions(wide_g * ((wide_x - mean) * rstd), last)
        return to_x, _use(scaled, _over_positions(wide_g, last), needs)


class RMSNormRule(LayerRule):
    """RMS normalisation."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = self.settings
        return F.rms_norm(x, m.normalized_shape, weight, m.eps), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        last = len(self.settings.normalized_shape)
        over = tuple(range(x.dim() - last, x.dim()))
        wide_x, wide_g = wide_pair(x, g)
        eps = self.settings.eps if self.settings.eps is not None else torch.finfo(wide_x.dtype).eps
        rstd = torch.rsqrt(wide_x.square().mean(over, keepdim=True) + eps)
        normed = wide_x * rstd
        to_x = None
        if needs[0]:
            weighted = wide_g * weight
            to_x = (rstd * (weighted - normed * (weighted * normed).mean(over, keepdim=True))).to(x.dtype)
        return to_x, MaterializedGrads([_over_positions(wide_g * normed, last)])


class GroupNormRule(LayerRule):
    """Group normalisation: the gradient of the scale from two moments per channel, sum g x and sum g."""

    def groups(self, channels: int) -> int:
        return int(self.settings.num_groups)

    def prepare(self, x: Tensor) -> Tensor:
        return _as_autocast_has_it(x)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        n, c = x.shape[:2]
        pixels = x[0, 0].numel()
        x = x.contiguous()
        out, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, pixels, self.groups(c), self.settings.eps)
        return out, (mean, rstd)

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        mean, rstd = kept
        n, c = x.shape[:2]
        groups, pixels = self.groups(c), x[0, 0].numel()
        x, g = x.contiguous(), g.contiguous()
        kernels = native.for_tensors(x, g, weight, mean, rstd)
        if kernels is not None:
            to_x, scaled, shift = kernels.group_norm_backward(
                x, g, mean, rstd, weight.contiguous(), groups, to_x=needs[0]
            )
            return to_x, _use(scaled, shift, needs)
        to_x = None
        if needs[0]:
            to_x = torch.ops.aten.native_group_norm_backward(
                g, x, mean, rstd, weight, n, c, pixels, groups, [True, False, False]
            )[0]
        if cuda.usable(x, g):
            return to_x, _use(*cuda.channel_moments(x, g, mean, rstd), needs)
        wide_x, wide_g = wide_pair(x, g)
        flat_x, flat_g = wide_x.reshape(n, c, -1), wide_g.reshape(n, c, -1)
        shift = flat_g.sum(2)
        moment = torch.linalg.vecdot(flat_g, flat_x)
        per_channel = c // groups
        mean_nc = at_least_float32(mean).repeat_interleave(per_channel, 1)
        rstd_nc = at_least_float32(rstd).repeat_interleave(per_channel, 1)
        return to_x, _use((moment - mean_nc * shift) * rstd_nc, shift, needs)


class InstanceNormRule(GroupNormRule):
    """Instance normalisation without running statistics: a group norm with one channel per group."""

    least_dims = 3

    def groups(self, channels: int) -> int:
        return channels

    def prepare(self, x: Tensor) -> Tensor:
        return x

    # Autocast leaves its input in half precision beside weights of float32, which a group norm does not take.

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, kept = super().forward(x.to(weight.dtype), weight, bias)
        return out.to(x.dtype), kept

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        to_x, use = super().backward(x.to(weight.dtype), weight, kept, g.to(weight.dtype), needs)
        return None if to_x is None else to_x.to(x.dtype), use


class PReLURule(LayerRule):
    """PReLU with one slope, or one per channel."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.prelu(x, weight), ()

    def backward(
        self, x: Tensor, weight: Tensor, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, PerSampleGrads]:
        below = ~(x > 0)  # at 0, and for what is no number, as torch has it
        slope = weight if weight.numel() == 1 else weight.view(-1, *[1] * (x.dim() - 2))
        to_x = torch.where(below, g * slope, g) if needs[0] else None
        wide_x, wide_g = wide_pair(x, g)
        part = torch.where(below, wide_g * wide_x, wide_g.new_zeros(()))
        if weight.numel() == 1:
            return to_x, MaterializedGrads([part.flatten(1).sum(1, keepdim=True)])
        return to_x, MaterializedGrads([part.reshape(*part.shape[:2], -1).sum(2)])
