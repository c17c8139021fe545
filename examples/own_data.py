"""Your own networks and data in a federation: a tensor client, a torch Dataset client and a Hugging Face client."""

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import TensorDataset

import polyfed as pf

x, y = torch.randn(600, 8), torch.arange(600) % 2
x[:, 0] += 3 * y  # something to learn; take your own tensors instead
parts = [(x[i::3], y[i::3]) for i in range(3)]
(north, south, west), test = parts, (x[:90], y[:90])
clients = [
    pf.Client("north", lambda: nn.Linear(8, 2), train=north, test=test),
    pf.Client("south", lambda: nn.Linear(8, 2), train=TensorDataset(*south), test=test),
    pf.Client(
        "west",
        lambda: nn.Linear(8, 2),
        train=Dataset.from_dict({"x": west[0].tolist(), "label": west[1].tolist()}),
        test=test,
    ),
]
run = pf.federate(clients, pf.algorithms.FedAvg(lr=0.1, local_epochs=2), rounds=5, seed=0)
print(*run.table(), sep="\n")
print(run.model("north"))  # an nn.Module, ready to use
