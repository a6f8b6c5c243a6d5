"""Samplers and the loader they drive."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism.noise.streams import SecretKey
from gradveil.mechanism.sampling import PrivateLoader, Sampling, check_loader


def test_poisson_batch_sizes_pass_against_the_binomial_and_fail_against_another():
    sampling = Sampling(name="poisson", population=400, batch_size=20)
    key = SecretKey(7)
    sizes = np.array([len(sampling.draw(key, t)) for t in range(4000)])

    def p_value(rate: float) -> float:
        edges = np.arange(12, 30)
        cdf = stats.binom.cdf(edges, 400, rate)
        probabilities = np.diff(np.concatenate([[0], cdf, [1]]))
        counts = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
        return stats.chisquare(counts, probabilities * len(sizes)).pvalue

    assert p_value(0.05) > 1e-3
    assert p_value(0.05 * 1.05) < 1e-6
    assert p_value(0.05 / 1.05) < 1e-6


def test_poisson_includes_each_example_at_the_rate_independently_of_the_others():
    sampling = Sampling(name="poisson", population=50, batch_size=10)
    key = SecretKey(1)
    member = np.zeros((3000, 50))
    for t in range(3000):
        member[t, sampling.draw(key, t)] = 1
    assert abs(member.mean(0) - 0.2).max() < 5 * np.sqrt(0.16 / 3000)
    correlation = np.corrcoef(member.T) - np.eye(50)
    assert abs(correlation).max() < 5 / np.sqrt(3000)


@pytest.mark.parametrize("name", ["without-replacement", "with-replacement"])
def test_fixed_size_draws(name):
    sampling = Sampling(name=name, population=50, batch_size=10)
    key = SecretKey(1)
    draws = np.stack([sampling.draw(key, t) for t in range(3000)])
    assert draws.shape == (3000, 10)
    repeats = sum(len(set(d)) < 10 for d in draws)
    assert (repeats == 0) == (name == "without-replacement")
    counts = np.bincount(draws.ravel(), minlength=50) / 3000
    assert abs(counts - 0.2).max() < 5 * np.sqrt(0.2 / 3000)


def test_shuffle_covers_every_epoch_once():
    sampling = Sampling(name="shuffle", population=25, batch_size=10)
    key = SecretKey(1)
    epoch = np.concatenate([sampling.draw(key, t) for t in range(3)])
    assert sorted(epoch) == list(range(25))
    assert not np.array_equal(epoch[:10], sampling.draw(key, 3))


def test_a_step_draws_the_same_sample_whenever_it_is_asked_and_another_key_draws_another():
    sampling = Sampling(name="poisson", population=400, batch_size=20)
    assert np.array_equal(sampling.draw(SecretKey(5), 17), sampling.draw(SecretKey(5), 17))
    assert not np.array_equal(sampling.draw(SecretKey(5), 17), sampling.draw(SecretKey(5), 18))
    assert not np.array_equal(sampling.draw(SecretKey(), 0), sampling.draw(SecretKey(), 0))


def test_refused_sizes_and_names():
    with pytest.raises(ConfigError, match=r"batch size is 11 and the training set has 10"):
        Sampling(name="poisson", population=10, batch_size=11)
    with pytest.raises(ConfigError, match="at least 1"):
        Sampling(name="poisson", population=10, batch_size=0)
    with pytest.raises(ConfigError, match="empty"):
        Sampling(name="poisson", population=0, batch_size=1)
    with pytest.raises(UnknownNameError, match="poisson"):
        Sampling(name="poison", population=10, batch_size=1)


class Rows(Dataset):
    def __init__(self, n=40):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": torch.full((3,), float(i)), "i": i}


def collate_rows(rows):
    return torch.stack([r["x"] for r in rows]), torch.tensor([r["i"] for r in rows])


def loader_of(dataset, sampling, steps=30, **settings):
    return PrivateLoader(
        dataset=dataset,
        batch_size=sampling.batch_size,
        draw=lambda step: sampling.draw(SecretKey(3), step),
        span=lambda: range(steps),
        **settings,
    )


def test_the_users_dataset_collate_and_workers_are_kept():
    sampling = Sampling(name="poisson", population=40, batch_size=2)
    users = DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=2, collate_fn=collate_rows)
    seen = list(loader_of(users.dataset, sampling, like=users))
    plain = list(loader_of(Rows(), sampling, like=DataLoader(Rows(), batch_size=2, collate_fn=collate_rows)))
    assert len(seen) == 30
    for step, (batch, other) in enumerate(zip(seen, plain, strict=True)):
        drawn = sampling.draw(SecretKey(3), step).tolist()
        assert batch[1].tolist() == other[1].tolist() == drawn
        assert batch[0].shape == (len(drawn), 3)
    assert any(len(b[1]) == 0 for b in seen)  # empty batches come through any collate_fn, with the right shape


def test_default_collate_and_tensor_indexing_agree():
    x, y = torch.randn(40, 3), torch.arange(40)
    sampling = Sampling(name="poisson", population=40, batch_size=2)
    fast = list(loader_of(TensorDataset(x, y), sampling))
    slow = list(loader_of(Subset(TensorDataset(x, y), range(40)), sampling))
    for a, b in zip(fast, slow, strict=True):
        assert all(torch.equal(s, t) and s.dtype == t.dtype for s, t in zip(a, b, strict=True))


def test_physical_parts_hold_the_logical_batch_in_order():
    sampling = Sampling(name="poisson", population=40, batch_size=9)
    tickets = []
    loader = loader_of(
        TensorDataset(torch.arange(40)),
        sampling,
        physical_batch_size=4,
        hand_out=lambda ticket, *_: tickets.append(ticket),
        steps=20,
    )
    parts: dict[int, list[int]] = {}
    for (rows,) in loader:
        parts.setdefault(tickets[-1].step, []).extend(rows.tolist())
        assert len(rows) == tickets[-1].size <= 4
        assert tickets[-1].last == (len(parts[tickets[-1].step]) == tickets[-1].drawn)
    assert parts == {s: sampling.draw(SecretKey(3), s).tolist() for s in range(20)}


def test_islice_takes_a_part_of_the_run():
    sampling = Sampling(name="poisson", population=40, batch_size=9)
    loader = loader_of(TensorDataset(torch.arange(40)), sampling)
    assert len(list(islice(loader, 5))) == 5
    assert len(loader) == 30


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_loaders_whose_meaning_would_change_are_refused():
    data = TensorDataset(torch.arange(10))
    assert check_loader(DataLoader(data, batch_size=3, shuffle=True)) == 3
    assert check_loader(DataLoader(data, batch_size=4)) == 4
    with pytest.raises(ConfigError, match="IterableDataset"):
        check_loader(DataLoader(Stream(), batch_size=3))
    for sampler in (WeightedRandomSampler([1.0] * 10, 10), SubsetRandomSampler([1, 2])):
        with pytest.raises(ConfigError, match=type(sampler).__name__):
            check_loader(DataLoader(data, batch_size=3, sampler=sampler))
    with pytest.raises(ConfigError, match="batch sampler"):
        check_loader(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False)))
    with pytest.raises(ConfigError, match="physical_batch_size"):
        loader_of(data, Sampling(name="poisson", population=10, batch_size=2), physical_batch_size=0)
