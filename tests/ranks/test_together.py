"""bfloat16, physical parts and activation checkpointing at once, over processes: the run of one process.

Under DistributedDataParallel and fully_shard, clipped per layer and flat, with tied embeddings, and on Hugging Face's
GPT-2 whole and with LoRA adapters (skipped where transformers or peft are not installed).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from jobs import on_ranks
from together import PHYSICAL, STEPS, all_together

# peft (0.21) itself asks every model for an attribute that transformers (5) has renamed, in get_peft_model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Two processes cut a batch into other parts than one, and kernels for other sizes add up in another order.
CLOSE = 1e-6  # in float32
MODELS = ("own", "gpt2", "gpt2, lora")
NEEDED = {"own": (), "gpt2": ("transformers",), "gpt2, lora": ("transformers", "peft")}
CASES = list(itertools.product(("per-layer", "flat"), (False, True)))  # clipping, bfloat16


@pytest.fixture(scope="module", params=MODELS)
def runs(request, tmp_path_factory):
    """By way: the runs of all cases, on each rank."""
    for package in NEEDED[request.param]:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'gradveil[transformers]'")
    cases = [(request.param, *case) for case in CASES]
    folder = tmp_path_factory.mktemp("together")
    ways = {"alone": 1, "ddp": 2, "fsdp": 2}
    return {way: on_ranks(count, all_together, folder / way, way, cases) for way, count in ways.items()}


def distance(one, other):
    return float((one["weights"] - other["weights"]).norm())


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_all_together_is_the_run_of_one_process(way, runs):
    alone = dict(zip(CASES, runs["alone"][0], strict=True))
    for rank in runs[way]:
        for (clipping, bf16), mine in zip(CASES, rank, strict=True):
            one = alone[clipping, bf16]
            assert mine["releases"] == one["releases"]
            if not bf16:
                assert float((mine["weights"] - one["weights"]).abs().max()) < CLOSE, clipping
                continue
            # Both are bfloat16 runs of the same float32 one, which is near.
            own_error = distance(one, alone[clipping, False])
            assert 0 < own_error < 0.05 * float(one["moved"].norm())
            assert distance(mine, one) < 2 * own_error, clipping


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_both_ways_of_spreading_are_one(way, runs):
    """All ranks end with the same weights; so do both ways, whose parts are the same."""
    for i, (clipping, bf16) in enumerate(CASES):
        first, second = (rank[i] for rank in runs[way])
        assert torch.equal(first["weights"], second["weights"])
        assert distance(first, runs["ddp"][0][i]) < (CLOSE if not bf16 else 1e-4), clipping


def test_each_setting_was_at_work(runs):
    for found in (*runs["alone"], *runs["ddp"], *runs["fsdp"]):
        for (clipping, bf16), run in zip(CASES, found, strict=True):
            assert run["logits"] == {torch.bfloat16 if bf16 else torch.float32}
            assert run["parts"] > STEPS, f"no batch had more than {PHYSICAL} examples"
            assert (run["groups"] == 1) == (clipping == "flat")
            assert run["recomputed"] > 0
