"""One run over several processes (torchrun, torch.distributed): what each has to do, and what they tell each other.

Every process ("rank") holds the model and sees its own part of each batch. So that a run over any number of ranks is
the same run:

    who is in a batch     a function of the secret key, the step and the example, drawn by the rank that owns it
    the sum of gradients  clipped where the examples are, added up over the ranks
    the noise             a function of the key, the step and the place of a coordinate; each coordinate's is added
                          once, by the rank that owns its parameter, before the sum
    what is looked at     (counts, largest norms) reduced over the ranks before anybody uses it
    the ledger            the same records on every rank, written by the first

A single process is the case of one rank, and says nothing to anybody.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradveil.clipping import ClipStats
from gradveil.clipping.sharding import is_sharded
from gradveil.errors import ConfigError, RankLost

T = TypeVar("T")
_BUCKET = 1 << 23  # elements that are sent at a time: enough to fill a link, few enough not to double the memory


class Ranks:
    """The processes of a run, as one of them sees it."""

    def __init__(self, rank: int = 0, count: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.count, self.group = rank, count, group

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks to the user."""
        return self.rank == 0

    # ---- who does what

    def share(self, population: int) -> range:
        """The examples that this rank draws and trains on: consecutive ones, as many as the other ranks'."""
        return range(self.rank * population // self.count, (self.rank + 1) * population // self.count)

    def owned(self, tensors: Sequence[Tensor]) -> slice:
        """Which of some tensors this rank adds noise to: consecutive ones, about as many elements as other ranks."""
        if not self.several:
            return slice(0, len(tensors))
        total, before = sum(t.numel() for t in tensors), 0
        first = last = 0
        for tensor in tensors:
            owner = min(self.count - 1, (2 * before + tensor.numel()) * self.count // max(1, 2 * total))
            first += owner < self.rank
            last += owner <= self.rank
            before += tensor.numel()
        return slice(first, last)

    # ---- what they tell each other

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """In place: every tensor becomes its sum over the ranks, the same bits on each."""
        if not self.several:
            return
        with self._answering():
            for bucket in _buckets(tensors):
                wide = [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in bucket]
                flat = torch.cat([t.reshape(-1) for t in wide])
                dist.all_reduce(flat, group=self.group)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def summed(self, values: Tensor) -> Tensor:
        """Numbers, each added up over the ranks."""
        if self.several:
            with self._answering():
                dist.all_reduce(values, group=self.group)
        return values

    def total(self, values: Sequence[float], like: Tensor) -> list[float]:
        """Numbers, each added up over the ranks; exact for whole ones."""
        return self._reduced(values, like, dist.ReduceOp.SUM)

    def highest(self, values: Sequence[float], like: Tensor) -> list[float]:
        """Numbers, the highest of each over the ranks."""
        return self._reduced(values, like, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], like: Tensor, operation: Any) -> list[float]:
        if not self.several:
            return list(values)
        sent = torch.tensor(list(values), dtype=torch.float64, device=like.device)
        with self._answering():
            dist.all_reduce(sent, op=operation, group=self.group)
        return [float(v) for v in sent.tolist()]

    def combined(self, clip_stats: ClipStats, groups: int, like: Tensor) -> ClipStats:
        """What the ranks' parts of a batch add up to, beside the gradients."""
        if not self.several:
            return clip_stats
        counted = self.total([clip_stats.examples, *clip_stats.counts_within()], like)
        return _Combined(
            int(counted[0]), counted[1:], self.highest([clip_stats.largest(g) for g in range(groups)], like)
        )

    def all_agree(self, here: bool) -> bool:
        """Whether it is so on every rank."""
        return not self.several or self.highest([float(not here)], torch.empty(0))[0] == 0.0

    def digest(self, here: str) -> str:
        """One digest of what every rank has."""
        if not self.several:
            return here
        found: list[Any] = [None] * self.count
        with self._answering():
            dist.all_gather_object(found, here, group=self.group)
        return hashlib.sha256(" ".join(found).encode()).hexdigest()[:32]

    def copy_first(self, module: nn.Module) -> None:
        """The first rank's weights and buffers, on all ranks."""
        if not self.several:
            return
        with self._answering(), torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if not is_sharded(tensor):
                    dist.broadcast(tensor.data, src=0, group=self.group)

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all ranks; if it raises an error, all of them do."""
        if not self.several:
            return make()
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = make()
            except Exception as error:  # the others wait for an answer
                box[1] = error
        with self._answering():
            dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    def check_same(self, what: str, value: str) -> None:
        """Refused on all ranks where they do not agree; ``value`` is compared by its hash."""
        if not self.several:
            return
        mine = hashlib.sha256(value.encode()).hexdigest()
        found: list[Any] = [None] * self.count
        with self._answering():
            dist.all_gather_object(found, mine, group=self.group)
        others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if others:
            raise ConfigError(
                f"the processes of this run do not agree on {what}: rank {others[0]} has another than rank 0. All must "
                "be started with the same settings, seed, data and model."
            )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"another process of this run does not answer (rank {self.rank} of {self.count} was waiting: "
                f"{str(error).splitlines()[0]}). What was released is in the ledger. Start all processes again, with "
                "resume."
            ) from error


class _Combined(ClipStats):
    """Statistics of the whole batch, from numbers that were reduced."""

    def __init__(self, examples: int, within: Sequence[float], largest: Sequence[float]) -> None:
        super().__init__(len(within))
        self.examples = examples
        self._counts, self._norms = [int(v) for v in within], list(largest)

    def largest(self, group: int) -> float:
        return self._norms[group]

    def counts_within(self) -> list[int]:
        return list(self._counts)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, those that can be sent together together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = bucket and sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET
        if bucket and (full or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def current() -> Ranks:
    """The ranks of the default process group; one where there is none, refused where torchrun has started several."""
    if not (dist.is_available() and dist.is_initialized()):
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1 and dist.is_available() and dist.is_torchelastic_launched():
            raise ConfigError(
                f"torchrun has started {started} processes, and torch.distributed is not initialised: each would make "
                "a run of its own on the same data, and what they release together would not be accounted for. Call "
                "torch.distributed.init_process_group() before the PrivacyEngine is made (with Accelerate on a CPU: "
                "Accelerator(cpu=True))."
            )
        return Ranks()
    if dist.get_world_size() == 1:
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks of this run: those of torchrun, joined here and left at the end, or those that are there already."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_available() or dist.is_initialized():
        yield current()
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(own_device(torch.device("cuda")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield current()
        dist.barrier()  # gloo sometimes aborts where a group is taken down while another member is at work in it
    finally:
        dist.destroy_process_group()


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process, where torchrun has started several on this machine and none is named."""
    local = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(local)) if str(device) == "cuda" and local else device


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def silence(wrapper: DistributedDataParallel) -> None:
    """Keep DistributedDataParallel from averaging gradients: the engine adds them up, once, with their noise."""
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False


def silence_active(module: nn.Module) -> None:
    """The same, called in the forward pass of ``module``: for one that was wrapped after make_private."""
    active: Any = DistributedDataParallel._get_active_ddp_module()
    if active is not None and active.module is module:
        silence(active)
