"""`privacy=` gives the same weights, bit for bit, and the same ε in every engine."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.testing import assert_runs_equal, small_clients


def private_run(name, unit, **options):
    def network():  # local, so that it travels to Ray's workers by value
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    clients = []
    for client in small_clients(3):
        patients = np.arange(len(client.train)) // 2
        train = pf.Examples(client.train.raw_inputs, client.train.labels, group=patients if unit == "group" else None)
        clients.append(dataclasses.replace(client, model=network, train=train))
    privacy = pf.Privacy(target_epsilon=8.0, unit=unit)
    method = pf.algorithms.get(name)(lr=0.1, batch_size=8, privacy=privacy)
    return pf.federate(clients, method, rounds=2, seed=3, quiet=True, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("fedavg", "example"),
        pytest.param("fedavg_ft", "group", marks=pytest.mark.thorough),
        pytest.param("flha_ghn", "example", marks=pytest.mark.thorough),
    ],
)
def test_pool_and_cohorts_train_privately_as_one_process_does(name, unit):
    serial = private_run(name, unit, engine="inprocess", workers=0)
    assert_runs_equal(private_run(name, unit, engine="pool", workers=2), serial)
    cohort = private_run(name, unit, engine="cohort", workers=0)
    assert 0 < max(serial.history[-1]["epsilon"].values()) <= 8
    assert [record["epsilon"] for record in cohort.history] == [record["epsilon"] for record in serial.history]
    for client in serial.federation.clients:  # only their scores may differ by rounding
        ours, theirs = cohort.model(client).state_dict(), serial.model(client).state_dict()
        assert all(torch.equal(ours[parameter], theirs[parameter]) for parameter in theirs)


@pytest.mark.slow
def test_ray_trains_privately_as_one_process_does():
    serial = private_run("fedavg", "example", engine="inprocess", workers=0)
    assert_runs_equal(private_run("fedavg", "example", engine="ray", workers=2), serial)
