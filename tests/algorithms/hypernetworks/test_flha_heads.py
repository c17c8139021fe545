"""FLHA-GHN's heads: light ones by default; with "auto" the paper's while messages are small, factored ones beyond, which is
said and kept."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.algorithm import ServerContext
from polyfed.core.serialization import safetensors_num_bytes as size_of
from polyfed.graphs import LayerCatalogue, LayerType
from polyfed.graphs.extract import extract
from polyfed.hypernetworks import ghn
from polyfed.hypernetworks.ghn import (
    MAX_DENSE_BYTES,
    GHNConfig,
    build_ghn,
    describe_message_size_of_heads,
    hypernetwork_size_in_bytes,
    shrink_to_size_of_networks,
    use_factored_heads_if_large,
)
from polyfed.hypernetworks.ghn_start import init_ghn_params
from polyfed.models import ModelSpec
from polyfed.simulation.storage.directory import read_config, read_manifest
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few


class WithoutNorm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def catalogue(width, names=("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")):
    specs = [ModelSpec(name, {"width": width}, (3, 32, 32), 10) for name in names]
    return LayerCatalogue.from_graphs(extract(spec(), torch.zeros(2, 3, 32, 32)) for spec in specs)


def test_a_size_is_that_of_a_message():
    for head in ("mlp", "factored"):
        form = GHNConfig(catalogue(8, ["flha_arch1"]), head=head, depth=2)
        made = init_ghn_params(form, "kaiming", seed=0)
        assert hypernetwork_size_in_bytes(form) == size_of({f"ghn/{name}": tensor for name, tensor in made.items()})


def test_a_form_is_light_where_it_is_large():
    small, large = (GHNConfig(LayerCatalogue((LayerType("linear", width, width),))) for width in (400, 2000))
    assert hypernetwork_size_in_bytes(small) < MAX_DENSE_BYTES < hypernetwork_size_in_bytes(large)
    assert use_factored_heads_if_large(small) is small
    assert use_factored_heads_if_large(large).head == "factored"
    assert use_factored_heads_if_large(use_factored_heads_if_large(large)) == use_factored_heads_if_large(large)


@pytest.mark.slow
def test_the_papers_networks_are_light_where_they_are_large():
    small, large = GHNConfig(catalogue(8)), GHNConfig(catalogue(64))
    assert use_factored_heads_if_large(small) is small
    assert use_factored_heads_if_large(large).head == "factored"
    assert (
        describe_message_size_of_heads(large)
        == "factored: 20 MB each way a round, where the paper's heads (mlp) would send 316 MB"
    )


def size_of_layers(form):
    return 4 * sum(math.prod(shape) for kind in form.catalogue.types for shape in kind.parameter_shapes.values())


@pytest.mark.thorough
def test_light_heads_send_at_most_twice_the_largest_network():
    for width in (4, 8, 16):
        form = GHNConfig(catalogue(width, ["flha_arch1", "flha_arch2"]))
        light = shrink_to_size_of_networks(form)
        assert light.head == "factored"
        assert hypernetwork_size_in_bytes(light) <= 2 * 4 * form.catalogue.largest_network
        assert shrink_to_size_of_networks(light) == light
    assert (light.rank, light.latent, light.hidden) == (32, 51, 16)
    as_said = replace(form, rank=3, latent=20, hidden=5)
    assert shrink_to_size_of_networks(as_said) == replace(as_said, head="factored")


def test_light_heads_are_the_smallest_where_none_is_small_enough():
    tiny = shrink_to_size_of_networks(GHNConfig(LayerCatalogue((LayerType("linear", 4, 2),))))
    assert (tiny.rank, tiny.latent, tiny.hidden) == (2, 8, 4)


def test_without_the_largest_network_light_heads_take_one_layer_of_each_type():
    types = catalogue(4, ["flha_arch1"]).types
    unknown, large = (GHNConfig(LayerCatalogue(types, size)) for size in (0, 10**5))
    light = shrink_to_size_of_networks(unknown)
    assert hypernetwork_size_in_bytes(light) <= 2 * size_of_layers(unknown) < 4 * 10**5
    assert hypernetwork_size_in_bytes(light) < hypernetwork_size_in_bytes(shrink_to_size_of_networks(large))


@pytest.mark.parametrize("depth", few([0, 2], [2]))
def test_clients_read_the_sizes_of_light_heads_from_the_message(depth):
    method = FLHAGHN(depth=depth)
    for width in (4, 16):
        types = catalogue(width, ["flha_arch1"])
        state = method.server_init(ServerContext(seed=0, rounds=1, clients=(), layer_catalogue=types))
        form = method._config_of_message(state["ghn"])
        chosen = shrink_to_size_of_networks(method._ghn_config(types))
        assert (form.head, form.rank, form.hidden) == (chosen.head, chosen.rank, chosen.hidden)
        assert build_ghn(form).load_state_dict(state["ghn"])


@pytest.mark.thorough
def test_a_message_of_the_default_is_no_larger_than_twice_the_largest_network():
    names = ("flha_arch1", "flha_arch2")
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    clients = [pf.Client(name, ModelSpec(name, {"width": 4}, (3, 8, 8), 3), (x, y), (x, y)) for name in names]
    largest = max(sum(p.nbytes for p in client.model().parameters()) for client in clients)
    sent = []
    for head in ("light", "factored"):
        run = pf.federate(clients, FLHAGHN(batch_size=6, refine_epochs=0, head=head), rounds=1, workers=0)
        sent.append(run.history[-1]["bytes_down_total"] / 2)
    assert sent[0] <= 2 * largest < sent[1]
    assert FLHAGHN().head == "light"


@pytest.mark.thorough
def test_below_the_size_the_former_default_is_the_papers_bit_for_bit(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = [
            pf.federate(small_clients(), FLHAGHN(lr=0.1, depth=1, **words), rounds=2, workers=0, out=tmp_path / f"{i}")
            for i, words in enumerate([{"head": "auto"}, {"head": "mlp"}])
        ]
    assert_runs_equal(*runs)
    assert "decided" not in read_manifest(tmp_path / "0")


def test_above_it_the_heads_are_factored_and_everyone_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ghn, "MAX_DENSE_BYTES", 1000)
    with pytest.warns(
        UserWarning, match=r"head is factored: \d+ MB each way a round, .* \(mlp\) would send \d+ MB; give"
    ):
        run = pf.federate(
            small_clients(), FLHAGHN(lr=0.1, depth=1, head="auto"), rounds=2, workers=0, out=tmp_path / "r"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = pf.federate(small_clients(), FLHAGHN(lr=0.1, depth=1, head="factored"), rounds=2, workers=0)
    assert_runs_equal(run, same)
    assert read_manifest(tmp_path / "r")["decided"]["head"].startswith("factored: ")
    assert read_config(tmp_path / "r")["algorithm"]["head"] == "auto"
    assert pf.resume(tmp_path / "r", clients=small_clients()).last.round == 2  # nothing is decided or said again


def test_the_published_form_without_norm_layers_is_warned_of():
    published = FLHAGHN(normalise=False, initialisation="paper", depth=1)
    clients = [pf.Client(one.id, WithoutNorm, one.train, one.test) for one in small_clients()]
    with pytest.warns(UserWarning, match="networks without norm layers, as all are here, learned less than"):
        pf.federate(clients, published, rounds=1, workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.federate(small_clients(), published, rounds=1, workers=0)  # which have BatchNorm
