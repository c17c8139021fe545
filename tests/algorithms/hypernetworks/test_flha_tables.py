"""FLHA-GHN on networks of text: what is generated, what a reply reveals of words, gradients through recurrent layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.algorithm import ClientInfo, ServerContext
from polyfed.core.seeds import torch_generator
from polyfed.graphs import LayerCatalogue, LayerType, Node
from polyfed.graphs.client_graph import graph_of_client
from polyfed.graphs.tables import set_starts_of_layer_types
from polyfed.hypernetworks.generated_network import build_generated_network
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors
from polyfed.hypernetworks.ghn_start import init_ghn_params
from tests.few_cases import few

WORDS = 12
OWN = (1, 2, 5, 9)  # the words that occur in the client's texts


class Recurrent(nn.Module):
    """A network of text, with a table of words, an LSTM and a linear layer."""

    def __init__(self, cell=nn.LSTM):
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(WORDS, 6), cell(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.rnn(self.words(x))[0][:, -1])


class Transformer(nn.Module):
    """A network of text, with a table of words, positions, attention and a linear layer."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 8), nn.Parameter(0.02 * torch.randn(1, 4, 8))
        self.attend, self.norm, self.out = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        x = self.words(x) + self.positions
        return self.out(self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1))


def client_of(network, seed=0):
    generator = torch_generator(seed)
    x = torch.tensor(OWN)[torch.randint(0, len(OWN), (24, 4), generator=generator)]
    return pf.Client("site", network, (x, torch.arange(24) % 3), (x, torch.arange(24) % 3))


def one_reply(method, client):
    catalogue = LayerCatalogue.from_graphs(
        [graph_of_client(client, contraction=replace(method.contraction, tables="generated"))]
    )
    server = method.server_init(ServerContext(0, 1, (), layer_catalogue=catalogue))
    down = method.dispatch(server, ClientInfo("site"))
    up, state = method.local_update(down, method.client_init(client, 0), client, seed=1)
    return down, up, state


@pytest.mark.parametrize("head", ["mlp", "factored"])
def test_a_reply_reveals_the_words_of_a_generated_table(head):
    """Rows of words that a client does not have have no gradient: the rows of the head's bias come back unchanged."""
    method = FLHAGHN(tables="generated", depth=2, lr=0.05, head=head, rank=1)
    down, up, _ = one_reply(method, client_of(Recurrent))
    (name,) = [n for n in up.tensors["ghn"] if n.startswith("heads.embedding") and n.endswith("out.bias")]
    change = (up.tensors["ghn"][name] - down.tensors["ghn"][name]).view(WORDS, 6)
    assert tuple(change.abs().sum(1).nonzero().flatten().tolist()) == OWN
    assert "vocabulary" in method.discloses
    assert "vocabulary" not in FLHAGHN().discloses | FLHAGHN(tables="generated", kinds="paper").discloses


def test_by_default_no_reply_contains_a_table():
    method = FLHAGHN(depth=2, lr=0.05)
    client = client_of(Recurrent)
    _, up, state = one_reply(method, client)
    assert not [name for name in up.tensors["ghn"] if "embedding" in name]
    assert list(state["private"]) == ["words.weight"]
    changed = (state["private"]["words.weight"] - method.client_init(client, 0)["private"]["words.weight"]).abs().sum(1)
    assert tuple(changed.nonzero().flatten().tolist()) == OWN


def config_of(client, **options):
    return GHNConfig(LayerCatalogue.from_graphs([graph_of_client(client)]), depth=2, latent=7, hidden=4, **options)


@pytest.mark.parametrize("head", few(["mlp", "factored"], ["factored"]))
@pytest.mark.parametrize("network", [Recurrent, lambda: Recurrent(nn.GRU), lambda: Recurrent(nn.RNN), Transformer])
@pytest.mark.one_case
def test_gradients_through_generated_layers_are_those_of_plain_torch(network, head):
    """The hypernetwork's gradient is its weights' Jacobian times the gradient of a network that has these weights."""
    client = client_of(network)
    config = config_of(client, head=head, rank=1)
    weights = init_ghn_params(config, "kaiming", seed=0)
    generated, _ = build_generated_network(client.model, graph_of_client(client), config, weights)
    x, y = client.train.batch(torch.arange(6))[:2]
    loss = F.cross_entropy(generated(x), y)
    slopes = torch.autograd.grad(loss, list(generated.ghn.parameters()))

    plain, ghn = network(), GHN(config)
    ghn.load_state_dict(weights)
    made = ghn(graph_to_tensors(graph_of_client(client), config.catalogue, torch.device("cpu")))
    assert made.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(made)
    plain_loss = F.cross_entropy(plain(x), y)
    plain_loss.backward()
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6)
    names, parts = list(made), dict(plain.named_parameters())
    expected = torch.autograd.grad([made[n] for n in names], list(ghn.parameters()), [parts[n].grad for n in names])
    for slope, other in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", ["mlp", "factored"])
@pytest.mark.one_case
def test_generated_weights_start_at_the_size_of_the_networks_own(head):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.rnn = nn.Embedding(200, 32), nn.LSTM(32, 48, 2, bidirectional=True)
            self.up, self.act = nn.ConvTranspose1d(96, 40, 4), nn.PReLU(40)
            self.gain, self.position = (
                nn.Parameter(torch.full((40,), 1e-3)),
                nn.Parameter(0.02 * torch.randn(1, 60, 32)),
            )
            self.out = nn.Linear(40, 3)

        def forward(self, x):
            x = self.rnn(self.words(x) + self.position)[0]
            return self.out((self.act(self.up(x.transpose(1, 2))).mean(2)) * self.gain)

    model = Wide()
    graph = pf.graphs.extract(model, torch.ones(2, 60, dtype=torch.int64))
    config = GHNConfig(LayerCatalogue.from_graphs([graph]), head=head)
    ghn = GHN(config)
    ghn.load_state_dict(init_ghn_params(config, "kaiming", seed=0))
    made = ghn(graph_to_tensors(graph, config.catalogue, torch.device("cpu")))
    own = dict(model.named_parameters())
    assert made.keys() == own.keys()
    for weight_set in graph.generated_weights:
        kind, name = weight_set.type, weight_set.parameters["weight"]
        if kind.kind == "linear":
            continue
        mean, spread = kind.start
        assert made[name].mean().item() == pytest.approx(mean, abs=0.1 * spread + 1e-7), kind.key
        assert made[name].std(correction=0).item() == pytest.approx(
            spread, rel=0.15 if head == "mlp" else 0.35, abs=1e-6
        ), kind.key
    network = init_ghn_params(replace(config, head="mlp"), "network", seed=0)
    ghn = GHN(replace(config, head="mlp"))
    ghn.load_state_dict(network)
    made = ghn(graph_to_tensors(graph, config.catalogue, torch.device("cpu")))
    assert made["out.weight"].std().item() == pytest.approx(own["out.weight"].std().item(), rel=0.3)


@pytest.mark.thorough
def test_a_transformer_and_an_lstm_learn_in_one_federation():
    def data(seed):
        x = torch.randint(0, WORDS, (120, 4), generator=torch_generator(seed))
        return x, (x < 4).sum(1).clamp(max=2)

    clients = [pf.Client(f"c{k}", (Transformer, Recurrent)[k % 2], data(k), data(k + 9)) for k in range(4)]
    run = pf.federate(clients, FLHAGHN(depth=2, lr=0.01, batch_size=16, local_epochs=3), rounds=9, workers=0, seed=0)
    assert run.table()[-1]["accuracy"] > 0.7


def test_types_of_shared_weights_have_one_start():
    kind = LayerType("vector", 4, 4, bias=False)
    nodes = set_starts_of_layer_types(
        [Node("a", kind, {"weight": "w"}), Node("b", kind, {"weight": "w"})], {"w": torch.ones(4)}
    )
    assert {node.type.start for node in nodes} == {(1.0, 0.0)}
