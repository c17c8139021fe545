"""The same bits on Flower as in this process: metrics of every round, and the personal models, which stay at the sites."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, CAFedPNAS, FedAvg, FedHeNN, PFedLA
from polyfed.core.seeds import torch_generator
from polyfed.deploy.flower.apps import run_deployment
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.models import ModelSpec
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.testing import small_clients, without_durations

from .conftest import ONE, MemoryGrid, configuration

SUPERNET = {"channels": 4, "base_cells": 1, "base_nodes": 1, "operations": ["sep_conv_3", "skip"]}


def image_clients(names=(None,), number=4):
    """Clients with small images of three kinds, and networks of these names in turn."""
    generator = torch_generator(7)
    patterns, clients = torch.randn(3, 1, 8, 8, generator=generator), []
    for k in range(number):
        y = torch.arange(16 + 3 * k) % 3
        x = patterns[y] + 0.5 * torch.randn(len(y), 1, 8, 8, generator=generator)
        name = names[k % len(names)]
        model = None if name is None else ModelSpec(name, {"width": 4}, (1, 8, 8), 3)
        clients.append(pf.Client(f"client-{k}", model, (x[6:], y[6:]), (x[:6], y[:6])))
    return clients


def deployed(tmp_path, nodes, clients, method, file="", **words):
    """A run of all clients behind a grid in memory; the run and the grid."""
    if file:
        (tmp_path / "server.py").write_text(file)
        words["file"] = str(tmp_path / "server.py")
    grid = MemoryGrid(nodes(clients))
    sites = ",".join(client.id for client in clients)
    return run_deployment(
        grid, configuration(method, sites=sites, out=str(tmp_path / "run"), **words), SilentProgress()
    ), grid


def models_of(tmp_path, client):
    """The personal model at its site."""
    (file,) = (tmp_path / "sites" / client / "state").glob("*/models/*.safetensors")
    return safetensors.torch.load_file(file)


def assert_same(tmp_path, run, other):
    """Metrics and models of the deployed run are those of the simulated one."""
    assert without_durations(run.history) == without_durations(other.history)
    for client in other.federation.clients:
        ours, theirs = models_of(tmp_path, client), other.model(client).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), f"the model of {client} differs"


POOL = """import torch
def public():
    return torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(5))
"""


class Parts(nn.Module):
    """Takes an image and numbers, and answers as the networks of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.seen, self.last = nn.Linear(64, 8), nn.Linear(12, 3)

    def forward(self, image, record):
        return {"logits": self.last(torch.cat([self.seen(image.flatten(1)).relu(), record], 1))}


def of_parts(number, seed):
    generator = torch_generator(seed)
    shapes = {"record": (number, 4), "image": (number, 1, 8, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def clients_with_parts():
    y = torch.arange(20) % 3
    return [pf.Client(f"client-{k}", Parts, (of_parts(20, k), y), (of_parts(9, 9 + k), y[:9])) for k in range(3)]


PARTS = """import torch
def public():
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(40, *shape, generator=generator) for name, shape in (("record", (4,)), ("image", (1, 8, 8)))}
"""


def cases(tmp_path: Path):
    """Method -> clients, method, the server's file, and public examples of the simulation."""
    mixed = image_clients(("flha_arch1", "flha_arch2"))
    LayerCatalogue.from_graphs(map(graph_of_client, mixed)).write_yaml(tmp_path / "catalogue.yaml")
    noise = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    return {
        "fedavg": (small_clients(4), FedAvg(lr=0.05), ONE, None),
        "pfedla": (small_clients(4), PFedLA(lr=0.05), ONE, None),
        "flha_ghn": (
            mixed,
            FLHAGHN(lr=0.05, hidden=8, graph="layers_and_norms", catalogue=str(tmp_path / "catalogue.yaml")),
            "",
            None,
        ),
        "fedhenn": (mixed, FedHeNN(lr=0.05, rad_size=20, rad_batch=8, eta0=1.0), POOL, noise),
        "fedhenn, parts": (
            clients_with_parts(),
            FedHeNN(lr=0.05, rad_size=20, rad_batch=8, eta0=1.0),
            PARTS,
            of_parts(40, 5),
        ),
        "ca_fedpnas": (image_clients(), CAFedPNAS(lr=0.02, batch_size=8, **SUPERNET), "", None),
    }


@pytest.mark.slow  # smaller ones are in test_riding.py
@pytest.mark.parametrize("name", ["fedavg", "pfedla", "flha_ghn", "fedhenn", "fedhenn, parts", "ca_fedpnas"])
def test_a_deployment_gives_the_bits_of_a_simulation(tmp_path, nodes, name):
    clients, method, file, public = cases(tmp_path)[name]
    run, _ = deployed(tmp_path, nodes, clients, method, file)
    assert_same(tmp_path, run, pf.federate(clients, method, rounds=3, seed=3, public=public, workers=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "pfedla", "flha_ghn", "fedhenn", "fedhenn, parts", "ca_fedpnas"])
@pytest.mark.parametrize("engine", ["pool", "ray"])
def test_so_do_the_pool_and_ray(tmp_path, nodes, name, engine):
    clients, method, file, public = cases(tmp_path)[name]
    run, _ = deployed(tmp_path, nodes, clients, method, file)
    assert_same(tmp_path, run, pf.federate(clients, method, rounds=3, seed=3, public=public, engine=engine, workers=2))


@pytest.mark.thorough
def test_so_it_does_when_not_all_sites_take_part_in_each_round(tmp_path, nodes):
    clients, method = small_clients(4), PFedLA(lr=0.05)
    run, _ = deployed(
        tmp_path, nodes, clients, method, ONE, rounds=4, **{"clients-per-round": 0.5, "evaluate-every": 2}
    )
    assert_same(
        tmp_path,
        run,
        pf.federate(clients, method, rounds=4, seed=3, clients_per_round=0.5, evaluate_every=2, workers=0),
    )


def test_bfloat16_travels(tmp_path, nodes):
    """Flower's own arrays cannot carry it."""

    def half():
        return nn.Linear(6, 3).to(torch.bfloat16)

    clients = [
        pf.Client(c.id, half, (c.train.x.bfloat16(), c.train.y), (c.test.x.bfloat16(), c.test.y))
        for c in small_clients(2)
    ]
    method = FedAvg(lr=0.05)
    run, grid = deployed(
        tmp_path, nodes, clients, method,
        "import torch\nfrom torch import nn\ndef model():\n    return nn.Linear(6, 3).to(torch.bfloat16)\n",
    )  # fmt: skip
    assert_same(tmp_path, run, pf.federate(clients, method, rounds=3, seed=3, workers=0))
    assert grid.seen
