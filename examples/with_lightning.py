"""Train a LightningModule privately. pip install 'gradveil[lightning]'"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.integrations.lightning import PrivateTraining


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)  # self(x): gradveil follows the examples through forward

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
loader = DataLoader(TensorDataset(x, torch.tensor(digits.target)), batch_size=128, shuffle=True)

engine = gradveil.PrivacyEngine(clip=1.0, sigma=3.0, steps=5 * len(loader), delta=1e-5)  # new
private = PrivateTraining(engine)  # new

trainer = lightning.Trainer(max_epochs=5, callbacks=[private], logger=False, enable_checkpointing=False)
trainer.fit(Digits(), private.loader(loader))  # private.loader is new

print(engine.statement())  # new
