"""The personalised baselines on real handwritten digits: ten clients with 20 examples of all classes each, which is too
little to learn from alone.

Mean accuracy on the clients' own test sets, seed 0: Local 0.72, FedAvg 0.93, Per-FedAvg 0.91 (both variants), pFedMe 0.92,
FedFomo 0.86, pFedHN 0.92; a small CNN with BatchNorm: Local 0.71, FedBN 0.94. The margins are about half of the gains.
"""

import functools

import pytest

import polyfed as pf
from polyfed.algorithms import FedAvg, FedBN, FedFomo, FedRep, Local, PerFedAvg, PFedHN, PFedMe
from polyfed.data import IID, SOURCES, ClassesPerClient, Split, make_clients
from polyfed.models import ModelSpec

OPTIONS = {"lr": 0.1, "local_epochs": 4, "batch_size": 10}
MOREAU = {"lam": 5.0, "personal_lr": 0.1, "lr": 0.2, "local_epochs": 2, "batch_size": 10}


@functools.cache
def clients(partition, examples, network="mlp"):
    pool = SOURCES["digits"]().load()
    split = Split(clients=10, examples_per_client=examples, test_fraction=0.6)
    data, _ = make_clients(pool, split, partition, seed=0)
    fields = {"hidden": (32,)} if network == "mlp" else {"norm": "batch", "channels": (8, 16)}
    spec = ModelSpec(network, fields, pool.input_shape, pool.num_outputs)
    return tuple(pf.Client(d.id, spec, d.train, d.test) for d in data)


@functools.cache
def row(method, partition, examples, network="mlp"):
    run = pf.federate(clients(partition, examples, network), method, rounds=20, evaluate_every=20, workers=0)
    return run.table()[-1]


@pytest.mark.parametrize(
    ("method", "margin"),
    [
        # test_meta_identities.py and test_fedfomo.py have closed forms of these methods.
        pytest.param(PerFedAvg(alpha=0.02, **OPTIONS), 0.09, marks=pytest.mark.slow),
        pytest.param(PerFedAvg(variant="hf", alpha=0.02, **OPTIONS), 0.09, marks=pytest.mark.slow),
        pytest.param(PFedMe(**MOREAU), 0.1, marks=pytest.mark.slow),
        pytest.param(FedFomo(**OPTIONS), 0.06, marks=pytest.mark.slow),
        pytest.param(
            PFedHN(lr=0.1, momentum=0.0, batch_size=10, local_steps=12, hn_lr=0.02, hn_momentum=0.5),
            0.1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["per_fedavg fo", "per_fedavg hf", "pfedme", "fedfomo", "pfedhn"],
)
def test_learns_what_no_client_can_alone(method, margin):
    assert row(method, IID(), 20)["accuracy"] > row(Local(**OPTIONS), IID(), 20)["accuracy"] + margin


@pytest.mark.slow
@pytest.mark.parametrize("method", [PerFedAvg(alpha=0.1, adapt_steps=3, **OPTIONS), PFedMe(**MOREAU)])
def test_the_personal_network_beats_the_global_one_under_skew(method):
    """Three classes a client."""
    found = row(method, ClassesPerClient(3), 30)
    assert found["accuracy"] > found["server_accuracy"] + 0.025


@pytest.mark.slow
def test_fedreps_own_heads_beat_one_model_for_all_under_skew():
    """Two classes a client: FedAvg 0.92, FedRep 0.97."""
    fedrep, fedavg = (row(method(**OPTIONS), ClassesPerClient(2), 30)["accuracy"] for method in (FedRep, FedAvg))
    assert fedrep > fedavg + 0.025


@pytest.mark.slow
def test_fedbn_learns_what_no_client_can_alone():
    fedbn, local = (row(method(**OPTIONS), IID(), 20, "cnn_small")["accuracy"] for method in (FedBN, Local))
    assert fedbn > local + 0.1
