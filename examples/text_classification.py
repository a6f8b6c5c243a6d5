"""Classify sentences with a small BERT, privately, in an Accelerate loop. pip install 'gradveil[huggingface]'

    python examples/text_classification.py
    torchrun --nproc-per-node 2 examples/text_classification.py
    python examples/text_classification.py --lora    # adapters and the last layer alone; pip install peft

The sentences are made here: words without a meaning, and some that are glad or sad.
"""

import argparse

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import gradveil

WORDS, LENGTH, PADDING = 40, 10, 0
GLAD, SAD = range(1, 6), range(6, 11)


class Sentences(Dataset):
    """Of 5 to 10 words, the rest is padding; two of the words tell the class, and may stand anywhere."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (n,), generator=generator)
        self.x = torch.randint(len(GLAD) + len(SAD) + 1, WORDS, (n, LENGTH), generator=generator)
        lengths = torch.randint(5, LENGTH + 1, (n, 1), generator=generator)
        self.x[torch.arange(LENGTH) >= lengths] = PADDING
        kinds = torch.stack([torch.tensor(GLAD), torch.tensor(SAD)])[self.y]
        for _ in range(2):
            place = (torch.rand(n, generator=generator) * lengths.squeeze(1)).long()
            self.x[torch.arange(n), place] = kinds[torch.arange(n), torch.randint(0, 5, (n,), generator=generator)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": (self.x[i] != PADDING).long(), "labels": self.y[i]}


def with_adapters(model):
    import peft

    targets = {"target_modules": "all-linear", "modules_to_save": ["classifier"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, **targets))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="train adapters and the last layer")
    lora = parser.parse_args().lora
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # on a CPU it joins processes only when told so
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes)
    model = BertForSequenceClassification(config).to(accelerator.device)
    if lora:
        model = with_adapters(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.03 if lora else 0.01)

    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=120, delta=1e-5, clipping="flat")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=Sentences(8000, seed=1),
        batch_size=256,  # of all processes together
        physical_batch_size=128,  # what goes through the model at once
    )
    model, optimizer = accelerator.prepare(model, optimizer)  # the loader stays: it has this process's share already

    model.train()
    for batch in loader:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(**batch).logits, labels))
        optimizer.step()

    test = Sentences(1000, seed=2)
    model.eval()
    with torch.no_grad():
        x = test.x.to(accelerator.device)
        found = model(input_ids=x, attention_mask=(x != PADDING).long()).logits.argmax(1).cpu()
    proved = engine.statement().proved
    accelerator.print(f"processes: {accelerator.num_processes}")
    accelerator.print(f"accuracy: {(found == test.y).float().mean():.3f}")
    accelerator.print(f"proved epsilon: {proved.epsilon:.2f} at delta {engine.delta:g}")
    engine.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
