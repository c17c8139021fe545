"""The readings of the papers that polyfed has no option for, in benchmarks/deviations_*.py, are what they say."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.algorithms.hypernetworks import pfedla
from polyfed.graphs import LayerCatalogue, LayerType
from polyfed.graphs.client_graph import graph_of_client
from polyfed.hypernetworks import generated_network
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors
from polyfed.hypernetworks.ghn_start import init_ghn_params
from polyfed.models import ModelSpec, build
from polyfed.models.structure import tensor_names_by_module

ROOT = Path(__file__).parent.parent
DENSE = LayerType("linear", 4, 4)


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])


def test_norms_are_joined_with_the_convolution_before_them():
    from deviations_pfedla import join_norms_with_convolutions

    network = build("cnn_small", (1, 8, 8), 10, norm="batch")
    names = [name for name, _ in network.named_parameters()]
    layers = join_norms_with_convolutions(names, tensor_names_by_module(network), "module")
    assert list(layers) == ["conv1", "conv2", "fc1", "fc2"]
    assert layers["conv2"] == ["conv2.weight", "conv2.bias", "norm2.weight", "norm2.bias"]
    assert len(pfedla.group_tensor_names_into_layers(names, tensor_names_by_module(network), "module")) == 6


def test_clients_of_pfedla_start_from_draws_of_their_own():
    from deviations_pfedla import own_draws

    server = SimpleNamespace(
        model=ModelSpec("cnn_small", {}, (1, 8, 8), 10), seed=0, clients=[SimpleNamespace(id=name) for name in "ab"]
    )
    common = pfedla.init_server_state(server, pfedla.PFedLA())["models"]
    with own_draws():
        drawn = pfedla.init_server_state(server, pfedla.PFedLA())["models"]
    assert torch.equal(common["a"]["fc1.weight"], common["b"]["fc1.weight"])
    assert not torch.equal(drawn["a"]["fc1.weight"], drawn["b"]["fc1.weight"])
    assert common["a"].keys() == drawn["a"].keys() == drawn["b"].keys()


def test_retained_layers_have_no_part_in_the_update_of_their_weights():
    from deviations_pfedla import leave_out_retained_layers

    draw = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 2, 2, generator=draw).softmax(2)
    models, replies = (
        [{name: torch.randn(3, generator=draw) for name in ("first", "second")} for _ in range(2)] for _ in range(2)
    )
    layers = {name: [name] for name in ("first", "second")}
    every = pfedla.inner_products_with_updates(models, weights, replies, layers)
    with leave_out_retained_layers():
        mask = pfedla.retained_layer_mask(weights, [0, 1], 1)
        rest = pfedla.inner_products_with_updates(models, weights, replies, layers)
    assert mask.sum() == 2
    assert not rest[mask].any()
    assert torch.equal(rest[~mask], every[~mask])
    assert every.all()


@pytest.mark.parametrize("has_factor", [False, True])
def test_scales_start_at_random_around_zero(has_factor):
    from deviations_flha import start_scales_without_bias

    config, key = GHNConfig(LayerCatalogue((DENSE,)), depth=0, hidden=400), f"heads.{DENSE.key}.scale"
    default = init_ghn_params(config, "kaiming", seed=0)
    with start_scales_without_bias(has_factor):
        other = init_ghn_params(config, "kaiming", seed=0)
    assert default[f"{key}.bias"].item() == 1
    assert not default[f"{key}.weight"].any()
    assert other[f"{key}.bias"].item() == 0
    factor = (2 * 4 / 400) ** 0.5 if has_factor else 1
    assert float(other[f"{key}.weight"].std()) == pytest.approx(factor * (2 / 401) ** 0.5, rel=0.15)


def test_a_tied_layer_is_generated_of_its_first_node():
    from deviations_flha import Tied, generate_of_first_nodes

    images = torch.rand(4, 1, 8, 8)
    client = pf.Client("a", partial(Tied, 3, True), (images, torch.arange(4)), (images, torch.arange(4)))
    graph = graph_of_client(client, contraction=FLHAGHN().contraction)
    config = GHNConfig(LayerCatalogue.from_graphs([graph]), latent=8)
    ghn = GHN(config)
    ghn.load_state_dict(init_ghn_params(config, "kaiming", seed=0))
    usual = graph_to_tensors(graph, config.catalogue, torch.device("cpu"))
    with generate_of_first_nodes():
        first = generated_network.graph_to_tensors(graph, config.catalogue, torch.device("cpu"))
    (kind,) = (kind for kind, (nodes, _, _) in usual.weight_sets.items() if len(nodes) == 3)
    (nodes, *_), (node, *_) = usual.weight_sets[kind], first.weight_sets[kind]
    assert node.tolist() == nodes[:1].tolist()
    with torch.no_grad():
        states = ghn.encode_nodes(first.features, first.edges)
        weights, others = ghn(first)["middle.0.weight"], ghn(usual)["middle.0.weight"]
        assert torch.equal(weights, ghn.heads[kind.key](states[node])["weight"][0])
    assert not torch.allclose(weights, others, rtol=0.01)
    assert len(list(Tied(3, False).middle)) == 3


def test_clients_train_on_the_first_of_their_images_alone():
    from deviations_flha import four_clients, with_small_network

    all_images, fewer = four_clients(0), four_clients(0, trained_on=47)
    assert [(len(client.train), len(client.test)) for client in (all_images[0], fewer[0])] == [(52, 359), (47, 359)]
    assert torch.equal(fewer[3].train.index, all_images[3].train.index[:47])
    small, chain = (with_small_network(name)(0)[3].model() for name in ("flha_small", "flha_chain"))
    assert [sum(isinstance(part, nn.Conv2d) for part in network.modules()) for network in (small, chain)] == [3, 3]


def test_the_stem_has_no_pooling():
    from deviations_flha import build_without_pooling

    images = torch.rand(2, 1, 28, 28)
    usual, other = (
        build("flha_arch1", (1, 28, 28), 10, width=8, stem="xray"),
        build_without_pooling("flha_arch1", (1, 28, 28), 10),
    )
    assert [network[:4](images).shape[2:] for network in (usual, other)] == [(7, 7), (14, 14)]


def test_other_blocks_concatenate_and_chains_do_not_pool():
    from deviations_flha import build_chain, build_hybrid

    usual, other = build("resnet18_hybrid", (1, 8, 8), 10, width=8), build_hybrid((0, 1, 2, 3), (1, 8, 8), 10)
    joins = [[part.join for part in network.modules() if hasattr(part, "join")] for network in (usual, other)]
    assert joins == [["add", "concat", "add", "concat"] + ["add"] * 4, ["concat"] * 4 + ["add"] * 4]
    chains = [build_chain(13, pools, (1, 8, 8), 10) for pools in (True, False)]
    assert [chain[:-3](torch.rand(2, 1, 8, 8)).shape[2:] for chain in chains] == [(1, 1), (8, 8)]
