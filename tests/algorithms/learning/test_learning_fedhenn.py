"""On real digits FedHeNN makes representations alike, and networks that have not learned enough better than alone."""

import pytest

import polyfed as pf
from polyfed.algorithms import FedAvg, FedHeNN, FedHeNNHomo, Local
from polyfed.alignment import compute_representations
from polyfed.alignment.pairwise_cka import mean_pairwise_cka
from polyfed.data import PARTITIONS, SOURCES, Split, make_clients
from polyfed.models import ModelSpec

NETWORKS = [
    ("mlp", {"hidden": [64]}),
    ("mlp", {"hidden": [128, 64]}),
    ("cnn_small", {}),
    ("cnn_fedhenn", {"level": 3, "channels": 16, "padding": 2}),
]


def digits(partition, number, examples, networks):
    """Clients with real digits and these networks in turn, 300 digits that are nobody's to test on, and public ones."""
    pool = SOURCES["digits"](common_test=0.2).load()
    split = Split(clients=number, examples_per_client=examples, test_fraction=0.1, public_fraction=0.2, global_test=300)
    data, public = make_clients(pool, split, partition, seed=0)
    specs = [ModelSpec(name, arguments, pool.input_shape, 10) for name, arguments in networks]
    return [
        pf.Client(d.id, specs[i % len(specs)], d.train, d.test, None, d.global_test) for i, d in enumerate(data)
    ], public


@pytest.mark.slow
def test_aligned_networks_learn_more_than_alone():
    """Four networks, 100 digits of all classes each, few steps. Margins: 5 points of accuracy (measured: 14) and 0.2 of CKA
    on unseen digits (measured: 0.33); with eta0 = 0 both are those of Local."""
    clients, public = digits(PARTITIONS["iid"](), 4, 100, NETWORKS)

    def learned(method):
        run = pf.federate(clients, method, rounds=10, seed=0, public=public, workers=0, evaluate_every=10)
        parts = [compute_representations(run.model(client.id), clients[0].global_test) for client in clients]
        return run.table()[-1]["global_accuracy"], mean_pairwise_cka(parts)

    both = {"local_epochs": 3, "lr": 0.02, "momentum": 0.0}
    alone, unlike = learned(Local(**both))
    together, alike = learned(FedHeNN(**both, eta0=10.0, rad_size=256, normalise=True))
    assert together > alone + 0.05
    assert alike > unlike + 0.2


@pytest.mark.slow
def test_batch_norm_does_not_undo_the_alignment():
    """With running statistics in the term, networks with BatchNorm fell from 0.8 to 0.4 (recipe `digits`)."""
    networks = [("flha_small", {"width": 8})]
    clients, public = digits(PARTITIONS["dirichlet"](alpha=1.0), 3, 60, networks)

    def learned(method):
        run = pf.federate(clients, method, rounds=8, seed=0, public=public, workers=0, evaluate_every=8)
        return run.table()[-1]["global_accuracy"]

    both = {"local_epochs": 2, "lr": 0.05, "momentum": 0.9, "batch_size": 16, "buffers": "local"}
    assert learned(FedHeNN(**both, eta0=1.0, rad_size=128, rad_batch=32)) > learned(Local(**both)) - 0.02


@pytest.mark.slow
def test_the_global_model_drifts_less_than_fedavgs():
    """Three classes a client, ten epochs a round. Margin: 5 points (measured: 15); with eta0 = 0 it is FedAvg's."""
    clients, public = digits(PARTITIONS["classes_per_client"](k=3, equal=False), 6, 80, [("cnn_small", {})])

    def learned(method):
        run = pf.federate(clients, method, rounds=10, seed=0, public=public, workers=0, evaluate_every=10)
        row = run.table()[-1]
        return row.get("server_global_accuracy", row["global_accuracy"])

    both = {"local_epochs": 10, "lr": 0.05, "momentum": 0.5}
    assert learned(FedHeNNHomo(**both, eta0=1.0, rad_size=200, rad_batch=64)) > learned(FedAvg(**both)) + 0.05
