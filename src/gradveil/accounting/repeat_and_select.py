"""What it costs to try settings and keep the best: the theorem of Papernot and Steinke (2022, arXiv 2110.03620).

A private training is run K times, with settings drawn anew each time from a fixed list, and only the best run is
released. K is drawn from a geometric distribution with a mean that was fixed before, and is not released. Then the
whole search is private, at a cost that hardly grows with the mean. Computed with dp_accounting's event for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader

GEOMETRIC = 1.0  # the shape of dp_accounting's event


def selected_epsilon(
    header: RunHeader, releases: Sequence[Release], *, mean: float, delta: float | None = None
) -> float:
    """The proved epsilon of the best of K runs like this one, K geometric with this mean; add or remove one example.

    By RDP. Refused where the run has no such bound: other samplers than Poisson, noise that follows the data.
    """
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent
    from dp_accounting.rdp import RdpAccountant

    if mean < 1:
        raise ConfigError(f"{mean:g} runs on average: a search has at least one.")
    if header.sampling != "poisson" or any(r.sampler != "poisson" or not r.scale_is_public for r in releases):
        raise ConfigError(
            f"the selection is charged for Poisson sampling and noise that does not follow the data; this run has "
            f"{header.sampling} sampling and strategy {header.strategy}. Use a proved strategy with Poisson sampling."
        )
    counted = Counter((r.sample_rate, r.multiplier) for r in releases)
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), count
        )
        for (rate, z), count in counted.items()
    ]
    event = RepeatAndSelectDpEvent(dp_accounting.ComposedDpEvent(parts), mean, GEOMETRIC)
    accountant = RdpAccountant()
    accountant.compose(event)
    return float(accountant.get_epsilon(header.delta if delta is None else delta))
