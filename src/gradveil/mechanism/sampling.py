"""Who is in the batch, and what that means for accounting.

    poisson               each example joins with probability q, independently (the default; what is accounted)
    without-replacement   a uniformly random set of exactly B examples
    with-replacement      B independent uniform draws; an example may come twice (the paper's words)
    shuffle               one random order per epoch; no amplification is claimed, never called proved

The sample of step t is a function of the secret key and of t, so a resumed run draws what it would
have drawn. The normaliser of every private mean is the public expected batch size, never the drawn one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from gradveil.errors import ConfigError, PrivacyViolation, UnknownNameError
from gradveil.mechanism.records import SAMPLINGS

if TYPE_CHECKING:
    from gradveil.mechanism.noise.streams import SecretKey


Indices = np.ndarray[Any, np.dtype[np.int64]]
Draw = Callable[[int], Indices]  # from the step to the indices in its batch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the batches of a run are drawn from ``population`` examples; ``batch_size`` is the expected size."""

    name: str
    population: int
    batch_size: int

    def __post_init__(self) -> None:
        if self.name not in SAMPLINGS:
            raise UnknownNameError("sampling", self.name, SAMPLINGS)
        if self.population < 1:
            raise ConfigError("the training set is empty: there is nothing to sample from.")
        if not isinstance(self.batch_size, int) or not 1 <= self.batch_size <= self.population:
            raise ConfigError(
                f"the batch size is {self.batch_size} and the training set has {self.population} examples: a batch "
                "is drawn from the training set, so it must have at least 1 example and no more than there are."
            )

    @property
    def rate(self) -> float:
        """q = B / N: the probability, or expected share, with which an example is in a batch."""
        return self.batch_size / self.population

    def draw(self, key: SecretKey, step: int, share: range | None = None) -> Indices:
        """The indices in the batch of ``step``; empty is possible (and is a step) under Poisson sampling.

        Of a ``share`` of the examples (consecutive ones), those of the batch that are in it: over all shares it is
        the same batch. Under Poisson sampling only the share is looked at.
        """
        n, size = self.population, self.batch_size
        share = range(n) if share is None else share
        if self.name == "poisson":
            return share.start + np.flatnonzero(_uniform(key, step, share) < self.rate).astype(np.int64)
        if self.name == "shuffle":
            epoch, place = divmod(step, -(-n // size))
            drawn = key.stream("shuffle", epoch).permutation(n)[place * size : (place + 1) * size]
        else:
            drawn = key.stream("sample", step).choice(n, size=size, replace=self.name == "with-replacement")
        return drawn[(drawn >= share.start) & (drawn < share.stop)].astype(np.int64)


_TOGETHER = 4  # numbers that a Philox generator makes at a time


def _uniform(key: SecretKey, step: int, share: range) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One number in [0, 1) for each example of a share: a function of the key, the step and the example alone."""
    rng = key.stream("sample", step)
    blocks, extra = divmod(share.start, _TOGETHER)
    if blocks:
        rng.bit_generator.advance(blocks)  # type: ignore[attr-defined]
    return rng.random(extra + len(share))[extra:]


@dataclass(frozen=True)
class Ticket:
    """Which drawn batch the loader has just handed out, and which physical part of it."""

    step: int
    drawn: int  # examples in the whole logical batch
    size: int  # examples in this physical part
    last: bool  # no further physical part follows


class _Batches(Sampler[list[int]]):
    """The batch sampler behind a private loader; each iteration notes a ticket for each physical batch, in order."""

    def __init__(
        self, draw: Draw, span: Callable[[], range], physical: int | None, parts: Callable[[int], int] | None
    ) -> None:
        self.draw, self.span, self.physical, self.parts = draw, span, physical, parts
        self.tickets: deque[Ticket] = deque()  # of the newest iteration

    def __iter__(self) -> Iterator[list[int]]:
        self.tickets = deque()
        return self._parts_of(self.span(), self.tickets)

    def _parts_of(self, steps: range, tickets: deque[Ticket]) -> Iterator[list[int]]:
        for step in steps:
            indices = self.draw(step).tolist()
            size = self.physical or max(len(indices), 1)
            count = max(1, -(-len(indices) // size))
            count = count if self.parts is None else self.parts(count)
            for start in range(0, count * size, size):
                part = indices[start : start + size]
                tickets.append(Ticket(step, len(indices), len(part), last=start + size >= count * size))
                yield part


class _EmptyAwareCollate:
    """The user's collate_fn, which also makes a batch of no examples: that of one, cut to none."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], dataset: Dataset[Any]) -> None:
        self.collate_fn, self.dataset = collate_fn, dataset

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self.collate_fn(examples)
        return tree_map(lambda t: t[:0] if isinstance(t, torch.Tensor) else t, self.collate_fn([self.dataset[0]]))


class PrivateLoader:
    """Iterates over the run's remaining steps, or over an epoch's; each loop starts at the engine's current step.

    ``itertools.islice(loader, k)`` takes the next k physical batches and the next loop goes on from there. Only the
    newest loop may be used. Workers, ``collate_fn`` and pinning are those of the user's loader.
    """

    def __init__(
        self,
        *,
        dataset: Dataset[Any],
        batch_size: int,
        draw: Draw,
        span: Callable[[], range],
        physical_batch_size: int | None = None,
        start: Callable[[], int] | None = None,
        finish: Callable[[], None] | None = None,
        hand_out: Callable[[Ticket, int, Any], None] | None = None,
        like: DataLoader[Any] | None = None,
        parts: Callable[[int], int] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """``start`` gives the number of a loop, with which ``hand_out`` is told of its batches.

        ``parts``: from the parts that a batch has here to those that are handed out, of which the last are empty.
        ``stopped``: whether the run ends after the last batch that was handed out whole.
        """
        if physical_batch_size is not None and (
            physical_batch_size < 1 or physical_batch_size != int(physical_batch_size)
        ):
            raise ConfigError(
                f"physical_batch_size is {physical_batch_size}; give a whole number of at least 1, or None."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._span, self._start, self._finish, self._hand_out = span, start, finish, hand_out
        self._stopped = stopped
        self._batches = _Batches(draw, span, physical_batch_size, parts)
        collate = like.collate_fn if like is not None else default_collate
        self._tensors: tuple[torch.Tensor, ...] | None = None
        self._loader: DataLoader[Any] | None = None
        if isinstance(dataset, TensorDataset) and collate is default_collate and not (like and like.num_workers):
            self._tensors = tuple(dataset.tensors)  # indexing whole tensors equals collating their rows, at once
        else:
            extras: dict[str, Any] = {}
            if like is not None:
                extras = {
                    "num_workers": like.num_workers,
                    "pin_memory": like.pin_memory,
                    "timeout": like.timeout,
                    "worker_init_fn": like.worker_init_fn,
                    "multiprocessing_context": like.multiprocessing_context,
                    "persistent_workers": like.persistent_workers,
                    "prefetch_factor": like.prefetch_factor,
                    "generator": like.generator,
                }
            self._loader = DataLoader(
                dataset,
                batch_sampler=self._batches,
                collate_fn=_EmptyAwareCollate(collate, dataset),
                **extras,
            )

    def __reduce__(self) -> str:
        raise PrivacyViolation(
            "a private loader cannot be copied or pickled: it draws the batches of one engine, and a copy of that "
            "engine would draw the same samples and use the same noise on other gradients. Use the loader itself: each "
            "loop over it goes on where the run is."
        )

    def __len__(self) -> int:
        """Logical batches in the next loop: what is left of the run, or of the epoch."""
        return len(self._span())

    def __iter__(self) -> Iterator[Any]:
        loop = 0 if self._start is None else self._start()
        batches = self._index_tensors(iter(self._batches)) if self._loader is None else iter(self._loader)
        return self._handed_out(batches, self._batches.tickets, loop)

    def _handed_out(self, batches: Iterator[Any], tickets: deque[Ticket], loop: int) -> Iterator[Any]:
        whole = True  # no part of the last batch is still to come
        for batch in batches:
            if whole and self._stopped():
                break
            ticket = tickets.popleft()
            whole = ticket.last
            if self._hand_out is not None:
                self._hand_out(ticket, loop, batch)
            yield batch
        if self._finish is not None:
            self._finish()

    def _index_tensors(self, parts: Iterator[list[int]]) -> Iterator[list[torch.Tensor]]:
        assert self._tensors is not None
        for indices in parts:
            picked = torch.tensor(indices, dtype=torch.int64)
            yield [t[picked.to(t.device)] for t in self._tensors]


@dataclass(frozen=True)
class Source:
    """Where examples come from, and the expected size of a batch."""

    dataset: Dataset[Any]
    batch_size: int
    like: DataLoader[Any] | None  # the user's loader, whose workers and collate_fn are kept

    @property
    def population(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def batches(self) -> int:
        """In an epoch."""
        return len(self.like) if self.like is not None else -(-self.population // self.batch_size)


def source_of(data_loader: DataLoader[Any] | Dataset[Any], batch_size: int | None) -> Source:
    """From a loader, whose batch size is its own, or from a data set and a batch size."""
    if isinstance(data_loader, DataLoader):
        size = check_loader(data_loader)
        if batch_size is not None and batch_size != size:
            raise ConfigError(f"batch_size={batch_size} was given, but the data loader's is {size}.")
        found = Source(data_loader.dataset, size, data_loader)
    else:
        if batch_size is None:
            raise ConfigError("a Dataset was given without batch_size: the sampling rate is batch_size / N.")
        found = Source(data_loader, batch_size, None)
    if not hasattr(found.dataset, "__len__"):
        raise ConfigError("the data set has no length: the sampling rate is batch_size / N. Give a map-style Dataset.")
    return found


def check_loader(loader: DataLoader[Any]) -> int:
    """The batch size of a loader whose sampler may be replaced; an error where that would change its meaning."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "the data loader reads an IterableDataset, which has no length and no index: a private sample needs to "
            "pick each example with a known probability. Give a map-style Dataset (with __len__ and __getitem__)."
        )
    batch_sampler = loader.batch_sampler
    if batch_sampler is None or loader.batch_size is None:
        raise ConfigError(
            "the data loader has a batch sampler of its own, or none: gradveil replaces the sampler so that the "
            "sampling rate is known. Give a DataLoader with batch_size=B."
        )
    sampler = loader.sampler
    if type(batch_sampler) is not BatchSampler or type(sampler) not in (SequentialSampler, RandomSampler):
        raise ConfigError(
            f"the data loader samples with {type(sampler).__name__}, which gradveil would have to replace: its "
            "weights or order would be lost, and unequal probabilities are not accounted for. Give a DataLoader with "
            "shuffle=True or False; to train on a part of the data use torch.utils.data.Subset."
        )
    return int(loader.batch_size)


def check_no_repeats(dataset: Dataset[Any]) -> None:
    """Refuse a data set in which an example is seen to be there several times: in a Subset, or joined to itself."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    sets: list[Dataset[Any]] = []
    try:
        of, place = _origins(dataset, sets)
    except (TypeError, ValueError, IndexError):
        return  # indices that are no numbers, or of no example: for the data set to complain of
    order = np.lexsort((place, of))
    again = np.flatnonzero((np.diff(of[order]) == 0) & (np.diff(place[order]) == 0))
    if len(again):
        first = order[again[0]]
        times = int(((of == of[first]) & (place == place[first])).sum())
        raise ConfigError(
            f"example {int(place[first])} of the {type(sets[int(of[first])]).__name__} is {times} times in the "
            f"training set (a {type(dataset).__name__} with repeated indices, or of a data set that is joined to "
            "itself): what is accounted for is the influence of one entry, so an example that fills several is "
            "protected less than the statement says. Give each example once: Subset(data, sorted(set(indices))). "
            "To have several augmented rows of each example, use views=K; to weigh examples, weigh their losses."
        )


def _origins(dataset: Dataset[Any], sets: list[Dataset[Any]]) -> tuple[Indices, Indices]:
    """Of each entry: the number, in ``sets``, of the data set that it comes from, and its index there."""
    if isinstance(dataset, Subset):
        of, place = _origins(dataset.dataset, sets)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return of[chosen], place[chosen]
    if isinstance(dataset, ConcatDataset):
        parts = [_origins(part, sets) for part in dataset.datasets]
        return np.concatenate([of for of, _ in parts]), np.concatenate([place for _, place in parts])
    number = next((i for i, known in enumerate(sets) if known is dataset), len(sets))
    if number == len(sets):
        sets.append(dataset)
    size = len(dataset)  # type: ignore[arg-type]
    return np.full(size, number, dtype=np.int64), np.arange(size, dtype=np.int64)
