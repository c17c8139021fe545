"""FedAvg with distillation learns what no client can alone, on real digits."""

import pytest

import polyfed as pf
from polyfed.algorithms import FedAvgKD, Local
from polyfed.data import IID, SOURCES, Split, make_clients
from polyfed.models import ModelSpec


@pytest.mark.slow
def test_learns_what_no_client_can_alone():
    pool, networks = SOURCES["digits"]().load(), [("mlp", (32,)), ("mlp", (24, 24)), ("cnn_small", (8, 16))]
    data, _ = make_clients(pool, Split(clients=9, examples_per_client=20, test_fraction=0.6), IID(), seed=0)
    specs = [
        ModelSpec(name, {"hidden" if name == "mlp" else "channels": sizes}, pool.input_shape, pool.num_outputs)
        for name, sizes in networks
    ]
    clients = [pf.Client(d.id, specs[k % 3], d.train, d.test) for k, d in enumerate(data)]
    options = {"lr": 0.1, "momentum": 0.5, "local_epochs": 4, "batch_size": 10}
    methods = FedAvgKD(teacher={"name": "mlp", "hidden": (64,)}, teacher_rounds=10, **options), Local(**options)
    distilled, alone = (
        pf.federate(clients, method, rounds=30, evaluate_every=30, workers=0).table()[-1]["accuracy"]
        for method in methods
    )
    assert distilled > alone + 0.05
