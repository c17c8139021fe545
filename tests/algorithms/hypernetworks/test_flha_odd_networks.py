"""FLHA-GHN with networks that are put together oddly: a round runs, and what is evaluated is what the network computes with
the weights that were written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from tests.few_cases import few

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 7, (12, 6), generator=torch.Generator().manual_seed(0)).index_fill(1, torch.tensor([0]), 1)
Y = torch.arange(12) % 3


class Net(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


class TakesDict(Net):
    def forward(self, batch):
        return self.run(self, batch)


def tied():
    """A language model's head is its table of words; here classes are read off the logits of words."""
    net = Net(
        lambda net, x: net.out(net.head(net.words(x) + net.places(torch.arange(x.shape[1]))).mean(1)),
        words=nn.Embedding(7, 8), places=nn.Embedding(6, 8), head=nn.Linear(8, 7, bias=False), out=nn.Linear(7, 3),
    )  # fmt: skip
    net.head.weight = net.words.weight
    return net


def packed(net, x):
    sequences = pack_padded_sequence(net.words(x), (x != 0).sum(1).cpu(), batch_first=True, enforce_sorted=False)
    return net.out(net.recurrent(sequences)[1][0][-1])


def attend(net, x):
    sequence = net.first(x[:, None] * torch.ones(1, 4, 1))
    return net.out(net.attention(sequence, sequence, sequence)[0].mean(1))


def in_half(net, x):
    return net.out(net.first(x.bfloat16()).relu().float())


NETWORKS = {
    "a head tied to the table of words": (tied, TOKENS),
    "one weight, straight and transposed": (
        lambda: Net(
            lambda net, x: net.out(F.linear(net.first(x).relu(), net.first.weight.T)),
            first=nn.Linear(6, 4), out=nn.Linear(6, 3),
        ), X,
    ),
    "a module used twice": (
        lambda: Net(lambda net, x: net.out(net.a(net.a(x).relu()).relu()), a=nn.Linear(6, 6), out=nn.Linear(6, 3)), X,
    ),
    "packed sequences": (
        lambda: Net(packed, words=nn.Embedding(7, 6), recurrent=nn.LSTM(6, 5, batch_first=True), out=nn.Linear(5, 3)),
        TOKENS,
    ),
    "a branch on values": (
        lambda: Net(
            lambda net, x: net.out(net.b(x) if net.a(x).sum() > 0 else net.a(x)),
            a=nn.Linear(6, 6), b=nn.Linear(6, 6), out=nn.Linear(6, 3),
        ), X,
    ),
    "parameters of no dimension": (
        lambda: Net(
            lambda net, x: net.out(x) * net.heat.exp() + net.shift,
            heat=nn.Parameter(torch.tensor(0.5)), shift=nn.Parameter(torch.tensor(0.1)), out=nn.Linear(6, 3),
        ), X,
    ),
    "lists and dicts of parameters": (
        lambda: Net(
            lambda net, x: net.out(x @ net.list[0] * net.dict["scale"]),
            list=nn.ParameterList([torch.eye(6)]), dict=nn.ParameterDict({"scale": torch.ones(6)}), out=nn.Linear(6, 3),
        ), X,
    ),
    "two parametrizations": (
        lambda: Net(
            lambda net, x: net.out(net.a(x)), a=spectral_norm(weight_norm(nn.Linear(6, 6))), out=nn.Linear(6, 3)
        ), X,
    ),
    "attention with biases of keys and values": (
        lambda: Net(
            attend, first=nn.Linear(6, 8), attention=nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True),
            out=nn.Linear(8, 3),
        ), X,
    ),
    "layers in half precision": (
        lambda: Net(in_half, first=nn.Linear(6, 6).bfloat16(), out=nn.Linear(6, 3)), X,
    ),
    "a forward that takes a dict": (
        lambda: TakesDict(
            lambda net, batch: net.out(net.a(batch["x"]) + net.words(batch["t"]).mean(1)),
            a=nn.Linear(6, 6), words=nn.Embedding(7, 6), out=nn.Linear(6, 3),
        ), {"batch": {"x": X, "t": TOKENS}},
    ),
}  # fmt: skip
PRIVATE = {  # of each network, where not all is generated
    "a branch on values": {"b.weight", "b.bias"},
    "layers in half precision": {"first.weight", "first.bias"},
}


@pytest.mark.parametrize("name", few(NETWORKS, ["one weight, straight and transposed", "layers in half precision"]))
@pytest.mark.one_case
def test_a_round_runs_and_what_is_evaluated_is_what_was_written(name):
    build, x = NETWORKS[name]
    clients = [pf.Client(f"site-{k}", build, (x, Y), (x, Y)) for k in range(2)]
    method = FLHAGHN(lr=0.05, batch_size=6, depth=2, latent=8, tables="generated")
    run = pf.federate(clients, method, rounds=1, workers=0)
    network = run.model("site-0").eval()
    outputs = network(**x) if isinstance(x, dict) else network(x)
    torch.testing.assert_close(torch.as_tensor(run.predictions("site-0").outputs), outputs.detach())
    start = run.warmstart(build, (x, Y))
    assert start.local.keys() == PRIVATE.get(name, set())
