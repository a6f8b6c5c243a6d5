"""What a pre-flight tries: what is seen of a planned release, from most to least, and what an attack made of it."""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.accounting.reconstruction_robustness import one_step_bound

KAPPA = 0.01  # how often guessing is taken to succeed, for the bound


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One attack on what is seen; ``reached`` and ``guess`` in dB of PSNR, in wrong features, or in tokens found."""

    seen: str
    attack: str
    success: float | None  # share of examples nearer than every guess by 6 dB (text: 90 % of tokens); None: not tried
    reached: str = "-"
    bound: float | None = None  # on the success of any attack, where guessing succeeds in 1 of 100
    iterations: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Case:
    """``mean_over``: the batch size whose noise is on the gradient of the one example."""

    words: str
    clipped: bool = False
    noised: bool = False
    mean_over: int = 1

    def bound(self, sigma: float | None, groups: int) -> float | None:
        if not self.noised or sigma is None:
            return None
        return one_step_bound(sigma / self.mean_over / groups**0.5, KAPPA)


def cases(clip: float | None, sigma: float | None, batch_size: int) -> list[Case]:
    """The gradient as it is; clipped; with the noise of a batch of B; with the noise that proofs are about."""
    found = [Case("undefended")]
    if clip is not None:
        found.append(Case(f"clipped to {clip:g}", clipped=True))
    if clip is not None and sigma is not None:
        noised = f"clipped to {clip:g}, noise {sigma:g}"
        if batch_size > 1:
            found.append(Case(f"{noised}, B = {batch_size}, example alone", True, True, batch_size))
        found.append(Case(f"{noised}, all other examples known", True, True))
    return found
