"""Your own networks and data in a federation: clients with tensors, a torch Dataset and a Hugging Face dataset (which needs
the extra `hub`)."""

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import TensorDataset

import polyfed as pf

x, y = torch.randn(240, 8), torch.arange(240) % 2
x = x + y[:, None]  # something to learn; take your own data instead
north, south, west, test = ((x[i::4], y[i::4]) for i in range(4))
table = Dataset.from_dict({"x": west[0].tolist(), "label": west[1].tolist()})


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


clients = [
    pf.Client("north", network, train=north, test=test),
    pf.Client("south", network, train=TensorDataset(*south), test=test),
    pf.Client("west", network, train=table, test=test),
]
run = pf.federate(clients, pf.algorithms.FedAvg(lr=0.1, local_epochs=2), rounds=5, seed=0)
print(run.table())
print(run.model("north"))  # an nn.Module, ready to use
