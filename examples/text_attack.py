"""Read sentences off the gradient of a small GPT-2, and see what clipping and noise change.
pip install 'gradveil[transformers]'

    python examples/text_attack.py

The weights are random and the sentences are made here. With a model and gradients of your own, see `gradveil attack`.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gradveil.attacks.text import TextAttack, chance, observe_text, score_text

WORDS, SENTENCES, LENGTH = 500, 4, 16


def main():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(WORDS, (1, SENTENCES, LENGTH))  # one gradient of four sentences
    releases = {
        "undefended": {},
        "clipped to 1": {"clip": 1.0},
        "clipped to 1, sigma .02": {"clip": 1.0, "sigma": 0.02},
        "clipped to 1, sigma 1": {"clip": 1.0, "sigma": 1.0},
    }
    for name, settings in releases.items():
        seen = observe_text(model, ids, generator=torch.Generator().manual_seed(1), **settings)
        score = score_text(TextAttack().run(seen).ids, ids)
        print(f"{name}: {score.tokens:.0%} of tokens, {score.sentences:.0%} of sentences, ROUGE-L {score.rouge_l:.2f}")
    print(f"guessing: {chance(ids, WORDS).tokens:.0%} of tokens")


if __name__ == "__main__":
    main()
