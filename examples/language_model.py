"""Train a small GPT-2, its embeddings tied, privately in a loop of plain torch. pip install 'gradveil[transformers]'

    python examples/language_model.py
    torchrun --nproc-per-node 2 examples/language_model.py
    torchrun --nproc-per-node 2 examples/language_model.py --shard

The sentences are made here, word by word: each word has four likely followers.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import gradveil

WORDS, LENGTH, FOLLOWERS = 24, 16, torch.tensor([0.4, 0.3, 0.2, 0.1])


def sentences(n, seed):
    """Their words, and nothing of the data is anywhere else. One sentence is one example: it is what is protected."""
    likely = torch.stack([torch.randperm(WORDS, generator=torch.Generator().manual_seed(w))[:4] for w in range(WORDS)])
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(0, WORDS, (n,), generator=generator)]
    for _ in range(LENGTH - 1):
        chosen = torch.multinomial(FOLLOWERS.expand(n, -1), 1, generator=generator).squeeze(1)
        words.append(likely[words[-1], chosen])
    return torch.stack(words, 1)


def losses(logits, words):
    """Of each sentence: the mean over its own words."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), words[:, 1:], reduction="none").mean(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true", help="cut the model over the processes (fully_shard)")
    shard = parser.parse_args().shard
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    if several:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, **ends)
    model = GPT2LMHeadModel(config).to(device)
    if several and shard:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    elif several:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=120, delta=1e-5, clipping="flat")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(sentences(8000, seed=1).to(device)),
        batch_size=256,  # of all processes together
        physical_batch_size=128,  # what goes through the model at once
    )
    model.train()
    for (words,) in loader:
        optimizer.zero_grad()
        losses(model(words).logits, words).sum().div(max(len(words), 1)).backward()  # a batch may be empty
        optimizer.step()

    test = sentences(1000, seed=2).to(device)
    model.eval()
    with torch.no_grad():
        perplexity = float(losses(model(test).logits, test).mean().exp())
    proved = engine.statement().proved
    if not several or dist.get_rank() == 0:
        best = math.exp(-float((FOLLOWERS * FOLLOWERS.log()).sum()))
        print(f"processes: {dist.get_world_size() if several else 1}")
        print(f"perplexity: {perplexity:.2f} (guessing: {WORDS}, knowing the followers: {best:.2f})")
        print(f"proved epsilon: {proved.epsilon:.2f} at delta {engine.delta:g}")
    engine.close()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
