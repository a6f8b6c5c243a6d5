"""A run over several processes is the run of one: the same samples, releases and weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from jobs import (
    STRATEGIES,
    WAYS,
    every_sharding,
    every_strategy,
    every_way,
    left_alone,
    noise_alone,
    on_ranks,
    refused,
    resumed,
    without_a_seed,
)
from scipy import stats

from gradveil.accounting import ledger
from gradveil.mechanism.distributed.ranks import Ranks
from gradveil.mechanism.noise.streams import SecretKey
from gradveil.mechanism.sampling import Sampling

CLOSE = 1e-9
ALPHA = 1e-6  # a right scale fails once in a million tests; a wrong one must always


def scale_p_value(noise, std):
    """Two-sided, that the noise is normal with mean 0 and this standard deviation."""
    square = float((noise**2).sum()) / std**2
    return 2 * min(stats.chi2.cdf(square, len(noise)), stats.chi2.sf(square, len(noise)))


def same(one, several):
    """One rank's run, and the results of all ranks of the other."""
    for rank in several:
        assert torch.equal(rank["weights"], several[0]["weights"])
        assert rank["releases"] == several[0]["releases"]
    assert float((one["weights"] - several[0]["weights"]).abs().max()) < CLOSE
    assert len(one["releases"]) == len(several[0]["releases"])
    for mine, theirs in zip(one["releases"], several[0]["releases"], strict=True):
        for name, value in mine.items():
            if name in ("clip", "sensitivity", "noise_std", "sigma"):
                assert value == pytest.approx(theirs[name], rel=CLOSE)
            elif name == "chosen_from":  # sums of squares, in another order
                assert value["memory"] == pytest.approx(theirs[name]["memory"], rel=1e-6)
                assert (value["seen"] is None) == (theirs[name]["seen"] is None)
            elif name == "side":
                for a, b in zip(value, theirs[name], strict=True):
                    assert a["values"] == pytest.approx(b["values"], rel=CLOSE)
            else:
                assert value == theirs[name]
    for step, indices in one["taken"].items():
        assert sorted(i for rank in several for i in rank["taken"][step]) == indices
    assert any(not rank["taken"][step] for rank in several for step in one["taken"]) or len(several) < 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return on_ranks(1, every_strategy, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_are_one_under_every_strategy(count, alone, tmp_path):
    found = on_ranks(count, every_strategy, tmp_path)
    for strategy in STRATEGIES:
        same(alone[strategy], [rank[strategy] for rank in found])


def test_wrapped_in_parts_and_by_other_samplers(tmp_path):
    one = on_ranks(1, every_way, tmp_path)[0]
    found = on_ranks(2, every_way, tmp_path)
    for way in one:
        same(one[way], [rank[way] for rank in found])


# ---- noise


def test_noise_enters_once_at_the_recorded_scale_and_ranks_draw_apart(tmp_path):
    one = on_ranks(1, noise_alone, tmp_path)[0]
    first, second = on_ranks(2, noise_alone, tmp_path)
    for step in range(2):
        assert torch.equal(first["released"][step], second["released"][step])
        assert torch.allclose(first["released"][step], one["released"][step], rtol=1e-5, atol=1e-6)
        noise = first["released"][step].double().numpy()
        assert scale_p_value(noise, 6.0) > ALPHA  # sigma 3 times clip 2
        assert scale_p_value(noise, 6.0 * math.sqrt(2)) < ALPHA  # as if both ranks had added it
        assert scale_p_value(noise, 6.0 / math.sqrt(2)) < ALPHA
        mine, theirs = first["added"][step], second["added"][step]
        assert not bool(((mine != 0) & (theirs != 0)).any())  # each coordinate's noise is one rank's
        assert bool((mine != 0).any()) and bool((theirs != 0).any())
        size = min(int((mine != 0).sum()), int((theirs != 0).sum()))
        correlation = np.corrcoef(mine[mine != 0][:size].numpy(), theirs[theirs != 0][:size].numpy())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(size)


def test_owned_tensors_cover_all_once_and_are_balanced():
    tensors = [torch.empty(n) for n in (5, 1, 80, 3, 40, 40, 1, 30)]
    for count in (1, 2, 3, 8, 20):
        slices = [Ranks(rank, count).owned(tensors) for rank in range(count)]
        places = [i for s in slices for i in range(len(tensors))[s]]
        assert places == list(range(len(tensors)))
    sizes = [sum(t.numel() for t in tensors[Ranks(rank, 2).owned(tensors)]) for rank in range(2)]
    assert max(sizes) <= 0.75 * sum(sizes)


@pytest.mark.parametrize("population", [1, 7, 90, 1000])
@pytest.mark.parametrize("name", ["poisson", "without-replacement", "with-replacement", "shuffle"])
def test_shares_make_up_the_batch(name, population):
    sampling = Sampling(name=name, population=population, batch_size=max(1, population // 5))
    key = SecretKey(3)
    for count in (1, 2, 3, 16):
        shares = [Ranks(rank, count).share(population) for rank in range(count)]
        assert [i for share in shares for i in share] == list(range(population))
        for step in range(4):
            parts = [sampling.draw(key, step, share) for share in shares]
            assert sorted(np.concatenate(parts)) == sorted(sampling.draw(key, step))


# ---- agreement


def test_without_a_seed_all_ranks_draw_by_one_key(tmp_path):
    first, second = on_ranks(2, without_a_seed, tmp_path)
    assert torch.equal(first["weights"], second["weights"])
    again = on_ranks(2, without_a_seed, tmp_path / "again")[0]
    assert not torch.equal(first["weights"], again["weights"])


def test_ranks_that_do_not_agree_are_refused(tmp_path):
    for found in on_ranks(2, refused, tmp_path):
        assert "do not agree on the seed" in found["seed"]
        assert "do not agree on the run" in found["sigma"]
        assert "do not agree on the run" in found["strategy"]


# ---- failure and resuming


def test_a_rank_that_is_left_alone_says_so(tmp_path):
    told = on_ranks(2, left_alone, tmp_path)
    assert "does not answer" in told[0]
    assert "ledger" in told[0]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    run = tmp_path / "run"
    begun = on_ranks(2, resumed, tmp_path, str(run), True, None)
    assert [rank["has_file"] for rank in begun] == [True, False]  # one ledger, the first rank's
    ended = on_ranks(4, resumed, tmp_path, str(run), False, None)
    contents = ledger.read(run / "ledger.jsonl")
    assert contents.ended == "finished"
    assert len(contents.releases) == ended[0]["releases"] == 20 + 28  # 8 steps were taken twice, and are charged twice
    assert sorted({r.step for r in contents.releases}) == list(range(40))


def test_a_seeded_run_goes_on_bit_for_bit(tmp_path):
    run = tmp_path / "run"
    on_ranks(2, resumed, tmp_path / "a", str(run), True, 4)
    ended = on_ranks(2, resumed, tmp_path / "b", str(run), False, 4)
    assert len(ledger.read(run / "ledger.jsonl").releases) == 48
    assert torch.equal(ended[0]["weights"], ended[1]["weights"])


# ---- models that are cut over ranks


def test_fully_sharded_is_data_parallel_is_one_process(tmp_path):
    alone = on_ranks(1, every_sharding, tmp_path / "one", "alone")[0]
    parallel = on_ranks(2, every_sharding, tmp_path / "ddp", "ddp")
    cut = on_ranks(2, every_sharding, tmp_path / "fsdp", "fsdp")
    for i, settings in enumerate(WAYS):
        for found in (*(rank[i] for rank in parallel), *(rank[i] for rank in cut)):
            assert float((found["weights"] - alone[i]["weights"]).abs().max()) < 1e-6, settings
            for mine, theirs in zip(found["releases"], alone[i]["releases"], strict=True):
                assert mine["noise_std"] == pytest.approx(theirs["noise_std"], rel=1e-5), settings
                assert mine["clip"] == pytest.approx(theirs["clip"], rel=1e-5), settings
