"""Scattering features: two layers of fixed wavelets, each followed by a modulus, then a blur. Nothing is learned.

    order 0   x * phi                           1 channel
    order 1   |x * psi| * phi                  16 channels: 2 octaves, 8 angles
    order 2   ||x * psi_fine| * psi_coarse|    64 channels: 8 angles, and 8 of those, * phi

psi are Morlet wavelets, phi is a Gaussian; every channel is kept at one value per 4 x 4 pixels. The moduli make the
result change little when an image is moved or bent a little, which is what a linear classifier needs and pixels do not
give (Mallat, "Group Invariant Scattering", 2012). The shape of the filters is that of the public implementations
(Bruna & Mallat 2013; kymatio).

The features of an example are a function of that example alone. No statistic of a data set enters them, so computing
them costs no privacy, and a model on top of them is trained as privately as one on pixels.

Shapes: N examples, C channels, A angles, H x W pixels, padded to P x Q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.errors import ConfigError

ANGLES = 8
CELL = 4  # pixels a side that become one value: two octaves
_STD = 0.8  # of the fine wavelets' envelope, along the wave, in pixels; twice that along its crests
_FREQUENCY = 0.75 * math.pi  # of the fine wavelets; the coarse ones have half of it, and twice the std
_LOW_PASS = 2 * _STD
_CHANNELS_PER_GROUP = 3  # normalised together: 27 groups for each channel of the image
_SMALLEST = 5  # pixels a side: the padding reflects 4 of them


class Scattering(nn.Module):
    """(N, C, H, W) to (N, 81 C, H / 4, W / 4), each example normalised by itself in groups of three channels.

    No parameters and no state: what it computes is a function of the shape of its input.

    >>> Scattering((1, 28, 28)).output_shape, Scattering((3, 32, 32)).output_shape
    ((81, 7, 7), (243, 8, 8))
    """

    fine: Tensor
    coarse: Tensor

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        shape = tuple(input_shape)
        if len(shape) != 3 or min(shape[1:]) < _SMALLEST:
            raise ConfigError(
                f"scattering features of examples of shape {shape!r}: they are of images, (channels, height, width), "
                f"of at least {_SMALLEST} x {_SMALLEST} pixels. Leave the features out."
            )
        self.input_shape = shape
        padded = [(n // CELL + 2) * CELL for n in shape[1:]]  # a cell or more on each side, dropped again at the end
        self.output_shape = (shape[0] * (1 + 2 * ANGLES + ANGLES**2), *(p // CELL - 2 for p in padded))
        extra = [p - n for p, n in zip(padded, shape[1:], strict=True)]
        self._padding = [side for e in reversed(extra) for side in (e // 2, e - e // 2)]
        filters = {"fine": _wavelets(padded, octave=0), "coarse": _wavelets(padded, octave=1)}
        filters |= {f"blur{r}_{axis}": _blur(n, r) for r in (0, 1) for axis, n in enumerate(padded)}
        for name, values in filters.items():
            # They follow the module to its device and are in no checkpoint.
            self.register_buffer(name, values.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.coefficients(x)
        return F.group_norm(found, found.shape[1] // _CHANNELS_PER_GROUP)

    def coefficients(self, x: Tensor) -> Tensor:
        """The features before they are normalised."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise ConfigError(f"scattering features were made for {self.input_shape}, and got {tuple(x.shape[1:])}.")
        x = F.pad(x, self._padding, mode="reflect").unsqueeze(2)  # N C 1 P Q
        spectrum = torch.fft.fft2(x)
        fine = torch.fft.ifft2(spectrum * self.fine).abs()  # N C A P Q
        coarse = _at_half_resolution(spectrum, self.coarse).abs()  # N C A P/2 Q/2
        both = _at_half_resolution(torch.fft.fft2(fine).unsqueeze(3), self.coarse).abs()  # N C A A P/2 Q/2
        orders = (self._blurred(x, 0), self._blurred(fine, 0), self._blurred(coarse, 1))
        return torch.cat([*orders, self._blurred(both.flatten(2, 3), 1)], dim=2).flatten(1, 2)

    def _blurred(self, x: Tensor, halvings: int) -> Tensor:
        """x * phi, one value per cell; ``x`` is at the resolution of the image, halved so many times."""
        rows, columns = (self.get_buffer(f"blur{halvings}_{axis}") for axis in (0, 1))
        return rows @ x @ columns.T


def _wavelets(padded: Sequence[int], octave: int) -> Tensor:
    """Fourier transforms (A, P, Q) of Morlet wavelets: real, and zero at frequency zero."""
    std, frequency = _STD * 2**octave, _FREQUENCY / 2**octave
    grid = torch.meshgrid(*(_frequencies(n) for n in padded), indexing="ij")
    found = []
    for a in range(ANGLES):
        angle = (ANGLES / 2 - 1 - a) * math.pi / ANGLES
        direction = (math.cos(angle), math.sin(angle))

        def envelope(along: Tensor, across: Tensor) -> Tensor:
            return torch.exp(-0.5 * ((std * along) ** 2 + (2 * std * across) ** 2))

        # A sampled wavelet has every frequency together with those that are 2 pi away from it.
        wave = gauss = torch.zeros(())
        for shift in ((2 * math.pi * m, 2 * math.pi * n) for m in range(-2, 3) for n in range(-2, 3)):
            u, v = (axis + s for axis, s in zip(grid, shift, strict=True))
            along, across = direction[0] * u + direction[1] * v, direction[0] * v - direction[1] * u
            wave, gauss = wave + envelope(along - frequency, across), gauss + envelope(along, across)
        found.append(wave - gauss * (wave[0, 0] / gauss[0, 0]))
    return torch.stack(found)


def _blur(padded: int, halvings: int) -> Tensor:
    """The matrix (cells, pixels) that takes a line of pixels to its Gaussian averages, without the padding's cells."""
    size, step = padded >> halvings, CELL >> halvings
    std = _LOW_PASS / 2**halvings  # in pixels of that resolution
    weights = torch.fft.ifft(torch.exp(-0.5 * (std * _frequencies(size)) ** 2)).real
    return torch.stack([weights.roll(step * cell) for cell in range(1, size // step - 1)])


def _frequencies(n: int) -> Tensor:
    found: Tensor = torch.fft.fftfreq(n, d=1 / (2 * math.pi), dtype=torch.float64)
    return found


def _at_half_resolution(spectrum: Tensor, filters: Tensor) -> Tensor:
    """Every second value, along both axes, of the filtered signal: its spectrum is folded in four."""
    s00, s01, s10, s11 = _quarters(spectrum)
    f00, f01, f10, f11 = _quarters(filters)
    signal: Tensor = torch.fft.ifft2((s00 * f00 + s01 * f01 + s10 * f10 + s11 * f11) / 4)
    return signal


def _quarters(x: Tensor) -> list[Tensor]:
    return [quarter for half in x.chunk(2, dim=-2) for quarter in half.chunk(2, dim=-1)]
