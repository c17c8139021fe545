"""A network whose embedding and output are one weight, or that uses a layer twice, gives with every method what the same
network gives in which this weight has one name: it is sent, pulled, decayed, clipped, compared and counted once."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedBN, FedRep, LGFedAvg
from polyfed.core.seeds import torch_generator
from polyfed.testing import example_of
from tests.few_cases import few

GENERATED = {
    "flha_ghn",
    "pfedhn",
    "heterofl",
    "fedrolex",
    "depthfl",
}  # by architecture, so that one that is written otherwise begins otherwise
# A common network that takes no tokens.
BRINGS = {name for name, method in REGISTRY.items() if {"shared", "teacher"} & method.__dataclass_fields__.keys()}
FAST = {"fedavg", "pfedla", "scaffold"}
METHODS = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.thorough)
    for name, method in REGISTRY.items()
    if name not in GENERATED | BRINGS and not {"images", "adapters"} & method.requires
]


class Once(nn.Module):
    """Tokens in, one of twelve out; the output's weight is the embedding."""

    def __init__(self, bias=True):
        super().__init__()
        self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 12, bias=bias)
        self._draw()

    def _draw(self):
        with torch.no_grad():
            for k, p in enumerate((self.body.weight, self.body.bias, self.out.weight, self.out.bias)):
                if p is not None:
                    p.copy_(0.3 * torch.randn(p.shape, generator=torch_generator(k)))

    def embedded(self, x):
        return F.embedding(x, self.out.weight)

    def forward(self, x):
        return self.out(self.body(self.embedded(x).mean(1)).tanh())


class Tied(Once):
    def __init__(self, bias=True):
        super().__init__(bias)
        out = self._modules.pop("out")
        self.emb, self.out = nn.Embedding(12, 8), out
        self.emb.weight = self.out.weight

    def embedded(self, x):
        return self.emb(x)


class Twice(Once):
    """Its body is a module of two names."""

    def __init__(self):
        super().__init__()
        self.again = self.body

    def forward(self, x):
        return self.out(self.again(self.embedded(x).mean(1)).tanh())


def tokens(seed, number=40):
    return torch.randint(0, 12, (number, 5), generator=torch_generator(seed)), torch.arange(number) % 12


def clients_with(network):
    return [pf.Client(f"c{i}", network, tokens(i), tokens(50 + i), tokens(70 + i)) for i in range(3)]


def method_of(name):
    wishes = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.5, "clip_norm": 0.3, "layer": "model", "batch_size": 32}
    return example_of(name).build(**wishes)


def run_of(method, network, rounds=2, **words):
    words |= {"public": tokens(99)[0]} if "public_data" in method.requires else {}
    with warnings.catch_warnings(action="ignore"):
        return pf.federate(clients_with(network), method, rounds=rounds, workers=0, **words)


def same(one, other):
    """The same networks and the same bytes, up to how long a name and the places in a header are."""
    for client in one.federation.clients:
        state, theirs = one.model(client).state_dict(), other.model(client).state_dict()
        assert state.keys() <= theirs.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    for record, again in zip(one.history, other.history, strict=True):
        for way in ("bytes_up", "bytes_down"):
            assert record[way] == pytest.approx(again[way], abs=80)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("network", [Tied, Twice])
@pytest.mark.one_case
def test_a_second_name_changes_nothing(name, network):
    method, rounds = method_of(name), 3 if name == "fedala" else 2
    same(run_of(method, Once, rounds), run_of(method, network, rounds))


@pytest.mark.parametrize(
    "words",
    few(
        [{"compress": "int8"}, {"compress": "topk:0.1"}, {"secure": True}, {"engine": "cohort"}],
        [{"compress": "int8"}, {"engine": "cohort"}],
    ),
)
@pytest.mark.one_case
def test_nor_in_fewer_bytes_in_secure_sums_or_side_by_side(words):
    method = method_of("fedavg")
    others = [Twice] if "compress" in words else [Tied, Twice]  # the noise of int8 follows the order of tensors
    for other in others:
        same(run_of(method, Once, **words), run_of(method, other, **words))


@pytest.mark.parametrize("bias", few([True, False], [True]))
def test_a_tied_head_is_shared_whole(bias):
    for method in (LGFedAvg(lr=0.5), FedRep(lr=0.5)):
        run = run_of(method, lambda: Tied(bias))
        weights = [run.model(c).out.weight for c in run.federation.clients]
        heads = [torch.equal(weights[0], other) for other in weights[1:]]
        assert heads == [isinstance(method, LGFedAvg)] * 2  # the head of FedRep stays with its client
    assert run_of(LGFedAvg(), lambda: Tied(bias)).history[-1]["bytes_up"] > 3 * 12 * 8 * 4


def test_a_head_without_anything_to_train_is_refused():
    def network():
        module = Tied()
        module.out.requires_grad_(False)
        return module

    with pytest.raises(pf.UserError, match="in the last 1 layers of the network of client 'c0' nothing is trained"):
        run_of(LGFedAvg(), network)


class SharedScale(nn.Module):
    """The scale of the norm layer is also used before it, under a name that comes first."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.emb, self.norm, self.out = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12)
        self.norm.weight = self.scale

    def forward(self, x):
        return self.out(self.norm(self.emb(x).mean(1) * self.scale))


def test_a_norm_stays_local_with_all_names_of_its_tensors():
    run = run_of(FedBN(lr=0.5), SharedScale)
    assert run.last.state["model"].keys() == {"emb.weight", "out.weight", "out.bias"}
    scales = [run.model(client).norm.weight for client in run.federation.clients]
    assert not torch.equal(scales[0], scales[1])


def test_generated_networks_stay_tied():
    for name in ("flha_ghn", "pfedhn"):
        run = run_of(REGISTRY[name](lr=0.05), Tied)
        network = run.model("c0")
        assert network.out.weight is network.emb.weight
    private = run_of(REGISTRY["flha_ghn"](lr=0.05), Tied).last.client_states["c0"].get("private", {})
    assert "out.weight" not in private
