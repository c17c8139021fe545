"""How alike clients' networks see the same examples: read from runs in memory and from directories, and shown."""

import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedHeNN, Local
from polyfed.alignment import compute_representations, linear_cka
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import fill_module, initial_state
from polyfed.report.figures.alignment import RepresentationAlignment, measure_alignment
from polyfed.report.page.panels.method_views import html_alignment
from polyfed.simulation.experiment import rebuild_clients
from polyfed.simulation.storage.directory import read_config
from polyfed.testing import small_clients

NAMES = ("north", "&lt;south&gt;")


def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def deep():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))


@pytest.fixture(scope="module")
def digits():
    """Three clients with a network of their own kind and public examples, all disjoint."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.from_numpy(data.images).float().unsqueeze(1) / 16, torch.from_numpy(data.target)
    clients = []
    for k, factory in enumerate((narrow, wide, deep)):
        train, test = (slice(200 * k, 200 * k + 100), slice(200 * k + 100, 200 * (k + 1)))
        clients.append(pf.Client(f"c{k}", factory, (x[train], y[train]), (x[test], y[test])))
    return clients, Examples(x[600:1000], y[600:1000])


@pytest.fixture(scope="module")
def runs(digits, tmp_path_factory):
    clients, public = digits
    shared = {"lr": 0.1, "batch_size": 16, "local_epochs": 2, "momentum": 0.5}
    methods = {
        "local": Local(**shared),
        "fedhenn": FedHeNN(**shared, eta0=10, normalise=True, rad_size=128, rad_batch=64),
    }
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: pf.federate(clients, method, rounds=5, public=public, workers=0, out=folder / name)
        for name, method in methods.items()
    }


@pytest.mark.thorough
def test_fedhenn_aligns_the_networks_and_local_training_does_not(runs):
    local, fedhenn = (measure_alignment(runs[name]) for name in ("local", "fedhenn"))
    assert local.clients == fedhenn.clients == ("c0", "c1", "c2")
    assert np.array_equal(local.cka_before, fedhenn.cka_before), "they start from the same weights"
    assert fedhenn.mean_cka_of_trained_networks > local.mean_cka_of_trained_networks + 0.05
    for table in (local.cka_before, local.cka_after, fedhenn.cka_after):
        assert (table.shape, table.dtype) == ((3, 3), np.float64)
        assert np.allclose(table, table.T)
        assert np.allclose(table.diagonal(), 1)


def test_each_value_is_the_linear_cka_of_two_networks(runs, digits):
    clients, _ = digits
    examples = Examples(clients[0].test.x[:40], clients[0].test.y[:40])
    found = measure_alignment(runs["fedhenn"], examples)
    ends = [runs["fedhenn"].model(client.id) for client in clients]
    starts = [fill_module(client.model(), initial_state(client.model, 0)) for client in clients]
    for table, models in ((found.cka_before, starts), (found.cka_after, ends)):
        for i, k in itertools.combinations(range(3), 2):
            one, other = (compute_representations(models[place], examples).double() for place in (i, k))
            assert table[i, k] == pytest.approx(linear_cka(one, other).item(), abs=1e-6)
        pairs = [table[i, k] for i, k in itertools.permutations(range(3), 2)]
        mean = found.mean_cka_of_initial_networks if table is found.cka_before else found.mean_cka_of_trained_networks
        assert mean == pytest.approx(sum(pairs) / 6)


def test_the_examples_are_test_examples_of_all_clients(runs, digits):
    clients, _ = digits
    x = torch.cat([c.test.x[torch.linspace(0, 99, n).long()] for c, n in zip(clients, (3, 3, 4), strict=True)])
    by_hand = measure_alignment(runs["fedhenn"], Examples(x, torch.zeros(10)))
    found = measure_alignment(runs["fedhenn"], rows=10)
    assert np.array_equal(found.cka_after, by_hand.cka_after)
    fewer = measure_alignment(runs["fedhenn"], Examples(clients[0].test.x, clients[0].test.y), rows=20)
    places = torch.linspace(0, 99, 20).long()
    chosen = Examples(clients[0].test.x[places], clients[0].test.y[places])
    assert np.array_equal(fewer.cka_after, measure_alignment(runs["fedhenn"], chosen).cka_after)


def test_the_module_may_be_named(runs):
    named = {"c0": "3", "c1": "3", "c2": "5"}  # the last linear layers, which are found by themselves
    assert np.array_equal(
        measure_alignment(runs["local"], module=named).cka_after, measure_alignment(runs["local"]).cka_after
    )
    first = measure_alignment(runs["local"], module="1")  # what all networks get there are the pictures themselves
    assert np.allclose(first.cka_after, 1)


@pytest.mark.parametrize("name", ["local", "fedhenn"])
def test_a_directory_gives_what_the_run_gives(name, runs, digits):
    clients, _ = digits
    files = sorted(path for path in runs[name].out.rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    found = measure_alignment(runs[name].out, clients=clients[::-1])
    wanted = measure_alignment(runs[name])
    assert found.clients == wanted.clients
    assert np.array_equal(found.cka_before, wanted.cka_before)
    assert np.array_equal(found.cka_after, wanted.cka_after)
    assert sorted(path for path in runs[name].out.rglob("*") if path.is_file()) == files
    assert [path.read_bytes() for path in files] == before, "a report only reads"


def test_a_run_described_by_a_file(tmp_path, monkeypatch):
    """Its clients come from its configuration."""
    from polyfed.cli.main import main

    monkeypatch.chdir(tmp_path)
    words = ["--data", "digits", "--data.clients", "3", "--data.examples_per_client", "30", "--model", "mlp"]
    assert (
        main(["run", *words, "--algorithm", "local", "--rounds", "1", "--workers", "0", "--quiet", "--out", "r"]) == 0
    )
    with pytest.raises(UserError, match=r"give them, .*clients=.*clients, _ = rebuild_clients\("):
        measure_alignment("r")
    clients, _ = rebuild_clients(read_config("r"), "r")
    found = measure_alignment("r", clients=clients)
    assert len(found.clients) == 3
    assert found.mean_cka_of_initial_networks == pytest.approx(1), "one architecture starts from one draw"
    assert found.mean_cka_of_trained_networks < found.mean_cka_of_initial_networks - 1e-6


# -- what is refused --------------------------------------------------------------------------------------------------


def test_no_run(tmp_path, runs, digits):
    clients, _ = digits
    with pytest.raises(UserError, match=r"is not a run directory: it has no config.yaml"):
        measure_alignment(tmp_path)
    with pytest.raises(UserError, match=r"does not hold its clients; give them, .* they were made in Python"):
        measure_alignment(runs["local"].out)
    with pytest.raises(UserError, match="a Run has its own, so leave them out"):
        measure_alignment(runs["local"], clients=clients)
    (tmp_path / "config.yaml").write_text("seed: 0")
    with pytest.raises(UserError, match=r"has no personal models .*; finish the run, `polyfed resume"):
        measure_alignment(tmp_path, clients=clients)


def test_clients_of_another_run(tmp_path, runs, digits):
    clients, _ = digits
    out = runs["local"].out
    with pytest.raises(UserError, match="a model 'c2' of none of the clients; give all clients of this run"):
        measure_alignment(out, clients=clients[:2])
    fourth = pf.Client("c3", narrow, clients[0].train, clients[0].test)
    with pytest.raises(UserError, match="no model of client 'c3'"):
        measure_alignment(out, clients=[*clients, fourth])
    swapped = [pf.Client(c.id, wide, c.train, c.test) for c in clients]
    with pytest.raises(UserError, match="cannot be read as the network of client 'c0'"):
        measure_alignment(out, clients=swapped)
    shutil.copytree(out, tmp_path / "damaged")
    (tmp_path / "damaged" / "models" / "c1.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"c1.safetensors cannot be read .* run it again"):
        measure_alignment(tmp_path / "damaged", clients=clients)


def test_examples_that_do_not_fit(runs):
    run = runs["local"]
    for rows in (1, 257):
        with pytest.raises(UserError, match=f"rows must be from 2 to 256, .* got {rows}"):
            measure_alignment(run, rows=rows)
    with pytest.raises(UserError, match="examples must be at least 2, got 1"):
        measure_alignment(run, Examples(torch.zeros(1, 1, 8, 8), torch.zeros(1)))
    with pytest.raises(UserError, match=r"client 'c0': .* give examples=... of its form"):
        measure_alignment(run, Examples(torch.zeros(8, 7), torch.zeros(8)))
    with pytest.raises(UserError, match="client 'c0'"):
        measure_alignment(run, module="no such module")


def test_runs_without_pairs():
    alone = pf.federate(small_clients(1), Local(local_epochs=1), rounds=1, workers=0)
    with pytest.raises(UserError, match="has one client, so that there is no pair"):
        measure_alignment(alone)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_two_heat_maps_on_one_scale():
    before, after = np.array([[1, 0.25], [0.25, 1]]), np.array([[1, 0.75], [0.75, 1]])
    html = html_alignment(RepresentationAlignment(("north", "<south>"), before, after), "k")
    assert "mean over pairs 0.25" in html
    assert "mean over pairs 0.75" in html
    cells = re.findall(r'data-t="([^"]+)" .*? fill="([^"]+)"', html)
    tables = [f"{a}, {b}" for _ in (before, after) for a in NAMES for b in NAMES]
    assert [text for text, _ in cells] == [
        f"{pair}: {value:.3f}" for pair, value in zip(tables, [*before.ravel(), *after.ravel()], strict=True)
    ]
    colours = {text.rpartition(" ")[2]: colour for text, colour in cells}
    viridis = colormaps["viridis"]
    assert colours == {f"{v:.3f}": to_hex(viridis(round(v * 255))) for v in (0.25, 0.75, 1)}, "one scale, from 0 to 1"


@pytest.mark.thorough
def test_many_clients_are_not_all_named():
    names = tuple(f"client-{k:03d}" for k in range(100))
    html = html_alignment(RepresentationAlignment(names, np.eye(100), np.ones((100, 100))), "k")
    assert "mean over pairs 1.00" in html
    assert len(html) < 150_000
    assert html.count("client-0") < 200
