"""What the trainers of other libraries need of a private run: epochs, an epsilon on the way, a word if all is in order.

These libraries count epochs of one pass over the data. A private run is one sequence of steps; it is cut into epochs
of as many steps as the user's own loader has batches, so that an epoch costs what it did and ``steps`` is easy to say:
``PrivacyEngine(epochs=3)``, or ``steps=3 * len(loader)``.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradveil.errors import ConfigError
from gradveil.mechanism.sampling import PrivateLoader, check_loader

if TYPE_CHECKING:
    from gradveil.engine import PrivacyEngine


def require(package: str, extra: str) -> Any:
    """The package, or an error that names the extra that brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{package} cannot be imported ({error}). It comes with an extra: pip install 'gradveil[{extra}]'"
        ) from error


class EpochLoader:
    """A run in epochs of ``len(data_loader)`` steps; each pass goes on where the last one ended."""

    def __init__(self, engine: PrivacyEngine, data_loader: DataLoader[Any]) -> None:
        if not isinstance(data_loader, DataLoader):
            raise ConfigError(
                f"a {type(data_loader).__name__} was given where a torch.utils.data.DataLoader is needed: its data "
                "set, batch size, workers and collate_fn are kept, and gradveil draws the batches."
            )
        check_loader(data_loader)
        self.engine, self.source, self.dataset = engine, data_loader, data_loader.dataset
        self.batch_size = data_loader.batch_size
        self._batches: PrivateLoader | None = None

    def make_private(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Begin the engine's run."""
        _, _, self._batches = self.engine.make_private(module=module, optimizer=optimizer, data_loader=self.source)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            raise ConfigError("the private loader was iterated over before training began: it has no run yet.")
        yield from islice(self._batches, len(self))


def check_steps(engine: PrivacyEngine, planned: float, *, epochs: float | None, batches: int) -> None:
    """Refuse a trainer that will take another number of steps than the run declares."""
    settings = engine.settings
    declared = settings.steps if settings.steps is not None else (settings.epochs or 0) * batches
    if planned == declared:
        return
    endless = not math.isfinite(planned)
    told = "steps without end" if endless else f"{planned:g} steps"
    if epochs is not None and not endless:
        told += f" ({epochs:g} epochs of {batches})"
    fix = "Limit the trainer's steps" if endless else f"Declare PrivacyEngine(steps={planned:g})"
    raise ConfigError(
        f"the trainer is set to take {told}, and the engine declares {declared}: schedules of the clip bound "
        f"and of sigma span the declared steps, and no further step may be taken. {fix}, or let the trainer take "
        f"{declared}."
    )


def refuse_metric_scheduler(name: str) -> ConfigError:
    return ConfigError(
        f"the learning rate follows a metric ({name}): computed from private data it would carry them into the weights "
        "past the noise. Use a schedule that depends on the step alone."
    )


def ending(engine: PrivacyEngine) -> str:
    """What the ledger says at the end of a run that was not broken off."""
    taken, declared = engine.step, engine.plan.steps
    return "finished" if taken == declared else f"stopped at step {taken} of {declared}"


def epsilon_so_far(engine: PrivacyEngine) -> dict[str, float]:
    """An epsilon to watch, under a name that says what it is: proved (RDP; the statement is tighter) or as published.

    Of the steps taken: a run that stops before its last declared step is charged for more. Empty where there is
    nothing to say.
    """
    from gradveil.accounting import default_view, from_releases, is_noised, proved_epsilon

    header, releases = engine.header, engine.releases
    if not engine.plan.strategy.is_private or not releases:
        return {}
    neighbours, _ = default_view(header.sampling)
    proved = proved_epsilon(header, releases, neighbours=neighbours, accountant="RDP", charge="taken").epsilon
    if math.isfinite(proved):
        return {epsilon_name("proved (RDP)"): proved}
    if not is_noised(header, releases):
        return {}
    return {epsilon_name("as published"): from_releases(header, releases)["MA"].epsilon}


def epsilon_name(kind: str) -> str:
    """The kind of an epsilon as part of a name that TensorBoard and MLflow both allow.

    >>> epsilon_name("proved (RDP)"), epsilon_name("as published")
    ('epsilon/proved-RDP', 'epsilon/as-published')
    """
    return "epsilon/" + re.sub(r"\W+", "-", kind).strip("-")
