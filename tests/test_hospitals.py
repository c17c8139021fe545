"""The example of four hospitals: its clients are what it says, and their networks are worth comparing."""

import importlib.util
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score

import polyfed as pf
from polyfed.comparison.references.reference_models import fit_client_references
from polyfed.core.evaluation.evaluate import predict
from polyfed.data.partitioning.resplit import resplit_clients

EXAMPLE = Path(__file__).parent.parent / "examples" / "hospitals.py"


@pytest.fixture(scope="module")
def clients():
    spec = importlib.util.spec_from_file_location("hospitals_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hospitals()


def auc(outputs, client):
    return roc_auc_score(client.test.labels, outputs[:, 1] - outputs[:, 0])


def test_its_clients(clients):
    """All 569 patients, unequal in number and share; each site is standardised by its own training patients."""
    parts = {c.id: (c.train, c.val, c.test) for c in clients}
    sizes = {i: sum(map(len, sets)) for i, sets in parts.items()}
    assert sizes == {"north": 60, "south": 90, "east": 140, "west": 279}
    malignant = {i: sum(int(s.labels.sum()) for s in sets) / sizes[i] for i, sets in parts.items()}
    assert malignant["north"] == 0.5
    assert malignant["west"] < 0.35
    for client in clients:
        assert torch.allclose(client.train.x.mean(0), torch.zeros(30), atol=1e-5)
        assert torch.allclose(client.train.x.std(0, unbiased=False), torch.ones(30), atol=1e-5)
    assert len({c.model for c in clients}) == 4
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.thorough
def test_networks_are_as_good_as_logistic_regression(clients):
    run = pf.federate(clients, pf.algorithms.Local(lr=0.05, batch_size=16, local_epochs=2), rounds=20, workers=0)
    (logistic,) = (r.outputs for r in fit_client_references(clients)[0] if r.name == "logistic_regression")
    for client in clients:
        assert auc(predict(run.model(client.id), client.test), client) > 0.95
        assert auc(logistic[client.id], client) > 0.95


def test_they_can_be_split_again(clients):
    for divided in resplit_clients(clients, splits=2):
        assert [len(c.test) for c in divided] == [len(c.test) for c in clients]
