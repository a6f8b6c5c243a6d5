"""Train a transformer privately with transformers.Trainer. pip install 'gradveil[huggingface]'"""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import gradveil
from gradveil.integrations.huggingface import PrivateTrainer


class Sentences(Dataset):
    """Random words; the class is that of the first. Any map-style data set and collator will do."""

    def __init__(self, n=1200, words=30, length=8):
        self.x = torch.randint(0, words, (n, length))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i, 0] % 3}


sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **sizes))

args = TrainingArguments(
    output_dir="runs/huggingface",
    per_device_train_batch_size=120,  # the whole batch that a step draws
    num_train_epochs=3,
    learning_rate=0.01,
    max_grad_norm=0,  # every example is clipped already
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=3 * 1200 // 120, delta=1e-5, clipping="flat")
trainer = PrivateTrainer(engine=engine, physical_batch_size=40, model=model, args=args, train_dataset=Sentences())
trainer.train()

print(engine.statement())
