"""FLHA-GHN with the paper's graph: eq. 2 and 3 by loops over nodes, a round in plain torch, odd networks."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.algorithm import ClientInfo
from polyfed.core.errors import UserError
from polyfed.core.seeds import torch_generator
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.graphs.contraction import ContractionOptions
from polyfed.hypernetworks.ghn import catalogue_from_weights
from polyfed.models import ModelSpec
from polyfed.simulation.results.unseen_clients import build_unseen_client, compute_warm_start, load_trained_server
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import AlgorithmContract
from tests.few_cases import few

SHAPE, CLASSES = (1, 8, 8), 3
MODELS = [ModelSpec(name, {"width": 4, "norm": "batch"}, SHAPE, CLASSES) for name in ("flha_arch2", "flha_arch3")]
OPTIONS = {"graph": "layers", "lr": 0.05, "batch_size": 8, "momentum": 0.0, "clip_norm": None, "depth": 3, "hidden": 4,
           "head": "mlp"}  # fmt: skip


def examples(seed, number=24):
    return torch.randn(number, *SHAPE, generator=torch_generator(seed)), torch.arange(number) % CLASSES


def clients():
    return [pf.Client(f"c{k}", model, examples(k), examples(9 + k, 9)) for k, model in enumerate(MODELS)]


def start(method, everyone):
    federation = Federation({c.id: c for c in everyone}, method, Settings(rounds=3, seed=0))
    return method.server_init(federation.server_context())


def generated_by_loops(W, graph, normalise):
    """θ by eq. 2 and eq. 3, node by node, from the tensors of a hypernetwork by name."""
    keys = [key for name in W if name.endswith(".hidden.weight") for key in [name.split(".")[1]]]
    columns = ["add", "concat", "other", *sorted(keys, key=LayerType.from_key)]
    h = [torch.eye(len(columns))[columns.index(getattr(node.type, "key", node.type))] for node in graph.nodes]
    layer = 0
    while f"gnn.{layer}.lin_rel.weight" in W:
        A, B, b = (W[f"gnn.{layer}.{part}"] for part in ("lin_root.weight", "lin_rel.weight", "lin_rel.bias"))
        h = [
            torch.relu(A @ h[v] + B @ sum((h[u] for u, end in graph.edges if end == v), torch.zeros_like(h[v])) + b)
            for v in range(len(h))
        ]
        layer += 1
    theta = {}
    for node, latent in zip(graph.nodes, h, strict=True):
        if node.type in ("add", "concat"):
            continue
        H = {name.split(".", 2)[2]: tensor for name, tensor in W.items() if name.startswith(f"heads.{node.type.key}.")}
        z = F.leaky_relu(H["hidden.weight"] @ latent + H["hidden.bias"])
        if normalise:
            z = z / (z.square().mean() + 1e-12).sqrt()
        makers = {"weight": "out", "bias": "shift", "scale": "norm_scale", "shift": "norm_shift"}
        for role, name in node.parameters.items():
            made = H[f"{makers[role]}.weight"] @ z + H[f"{makers[role]}.bias"]
            if role == "weight":
                made = made.view(node.type.parameter_shapes["weight"]) * (H["scale.weight"] @ z + H["scale.bias"])
            theta[name] = made
    return theta


def disturbed(state):
    """The state with heads that make other scales than 1 and other shifts than 0."""
    generator = torch_generator(3)
    return {"ghn": {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in state["ghn"].items()}}


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.one_case
def test_generated_weights_are_those_of_loops_over_nodes(joins):
    everyone = clients()
    method = FLHAGHN(**OPTIONS, joins=joins)
    state = disturbed(start(method, everyone))
    for client in everyone:
        down = method.dispatch(state, ClientInfo(client.id, 1, 3))
        network, _, graph = method._generate_network(down, method.client_init(client, 0), client)
        assert not any(getattr(node.type, "is_norm", False) for node in graph.nodes)
        assert joins == any(node.type == "add" for node in graph.nodes)
        expected = generated_by_loops(state["ghn"], graph, method.normalise)
        made = network.generate_weights()
        assert made.keys() == expected.keys() == dict(network.model.named_parameters()).keys()
        for name, tensor in made.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_a_round_is_that_of_plain_torch():
    """Algorithm 1 with eq. 5: each client's SGD through the weights that loops make, then the mean over clients."""
    everyone = clients()
    method = FLHAGHN(**{**OPTIONS, "batch_size": 0}, schedule="constant", local_epochs=2)
    state = disturbed(start(method, everyone))
    ups = {}
    for client in everyone:
        down = method.dispatch(state, ClientInfo(client.id, 1, 3))
        reply, _ = method.local_update(down, method.client_init(client, 0), client, seed=5)
        ups[client.id] = reply
    federation = Federation({c.id: c for c in everyone}, method, Settings(rounds=3, seed=0))
    after = method.aggregate(state, ups, federation.server_context())["ghn"]
    mean = dict.fromkeys(after, 0.0)
    for client in everyone:
        W = {name: tensor.clone().requires_grad_() for name, tensor in state["ghn"].items()}
        net = client.model()
        graph = ContractionOptions("layers").apply(extract(net, torch.zeros(2, *SHAPE)))
        net.train()
        x, y = client.train.batch(torch.arange(len(client.train)))
        for _ in range(2):
            logits = functional_call(net, generated_by_loops(W, graph, method.normalise), (x,))
            slopes = torch.autograd.grad(F.cross_entropy(logits, y), list(W.values()), allow_unused=True)
            with torch.no_grad():
                for tensor, slope in zip(W.values(), slopes, strict=True):
                    tensor -= 0.0 if slope is None else method.lr * slope
        mean = {name: mean[name] + tensor.detach() / len(everyone) for name, tensor in W.items()}
    assert any((after[name] - state["ghn"][name]).abs().max() > 1e-3 for name in after)
    for name, tensor in mean.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6)


class PreActivation(nn.Module):
    """A norm at the beginning, one after a sum, one after a layer that two layers share, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.a = nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3, padding=1)
        self.n1, self.b, self.n2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.after_b, self.frozen = nn.BatchNorm2d(4), nn.BatchNorm2d(4).requires_grad_(False)
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, x):
        x = self.a(self.first(x))
        x = self.after_b(self.b(self.after_b(self.b(self.n1(x).relu()))).relu()) + x
        return self.fc(self.frozen(self.n2(x)).flatten(1))


def norm_last():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.BatchNorm1d(CLASSES))


@pytest.mark.thorough
@pytest.mark.parametrize("norms", ["generate", "local"])
def test_odd_networks_learn_together(norms):
    method = FLHAGHN(**{**OPTIONS, "depth": 1}, norms=norms)
    nets = (PreActivation, norm_last)
    everyone = [pf.Client(f"c{k}", net, examples(k, 8), examples(9 + k, 4)) for k, net in enumerate(nets)]
    run = pf.federate(everyone, method, rounds=1, workers=0)
    for client in everyone:
        assert all(torch.isfinite(t).all() for t in run.model(client.id).state_dict().values() if t.is_floating_point())


def test_norms_that_stay_with_the_client_are_no_nodes():
    everyone = clients()
    method = FLHAGHN(**OPTIONS, norms="local")
    state = start(method, everyone)
    assert not any(t.is_norm or t.norm != "none" for t in catalogue_from_weights(state["ghn"]).types)
    down = method.dispatch(state, ClientInfo("c0", 1, 3))
    graph = method.client_graph(down, everyone[0])
    assert len(graph.nodes) == 17
    assert all(
        reason == "norm layers stay with the client (norms=local); norms=generate generates them"
        for reason in graph.local_reasons.values()
    )
    _, own = method.local_update(down, method.client_init(everyone[0], 0), everyone[0], seed=1)
    assert own["private"].keys() == graph.local_reasons.keys()


@pytest.mark.thorough
def test_files_of_layer_types_for_the_other_graph_are_told(tmp_path):
    everyone = clients()
    for form in ("layers", "layers_and_norms"):
        method = FLHAGHN(graph=form)
        graphs = [method.contraction.apply(extract(client.model(), torch.zeros(2, *SHAPE))) for client in everyone]
        LayerCatalogue.from_graphs(graphs).write_yaml(tmp_path / f"{form}.yaml")
    with pytest.raises(UserError, match="is for graph='layers'"):
        start(FLHAGHN(graph="layers_and_norms", catalogue=str(tmp_path / "layers.yaml")), everyone)
    with pytest.warns(UserWarning, match="no layer type of the catalogue .* has a norm"):
        start(FLHAGHN(graph="layers", catalogue=str(tmp_path / "layers_and_norms.yaml")), everyone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = start(FLHAGHN(graph="layers", catalogue=str(tmp_path / "layers.yaml")), everyone)
    assert own["ghn"].keys() == start(FLHAGHN(graph="layers"), everyone)["ghn"].keys()


@pytest.mark.thorough
def test_a_saved_run_generates_for_an_unseen_network_in_its_own_form(tmp_path):
    method = FLHAGHN(**OPTIONS, joins=False)
    pf.federate(clients(), method, rounds=1, workers=0, out=tmp_path / "run")
    server = load_trained_server(tmp_path / "run")
    assert (server.algorithm.graph, server.algorithm.joins) == ("layers", False)
    client, _ = build_unseen_client(MODELS[0], examples(7), test=examples(8, 6), id="new")
    found = compute_warm_start(server, client)
    assert (found.coverage, found.local) == (1.0, {})


CASES = {"layers": {}, "edges": {"joins": False}, "local": {"norms": "local"}}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.thorough if c == "layers" else pytest.mark.slow) for c in CASES]
)
class TestContract(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, case):
        return FLHAGHN(graph="layers", lr=0.05, momentum=0.5, batch_size=8, depth=2, hidden=4, **CASES[case])


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

    def forward(self, x):
        if not self.training:
            return self.second(self.first(x))
        return self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", few([True, False], [False]))
def test_activation_checkpointing_is_refused(reentrant):
    """In the backward pass it would compute layers with the weights that the network had before."""
    data = torch.randn(8, 6), torch.arange(8) % 3
    one = pf.Client("a", lambda: Checkpointed(reentrant), data, data)
    with pytest.raises(pf.ClientError, match="switch it off, with model"):
        pf.federate([one], FLHAGHN(depth=1), rounds=1, workers=0)
