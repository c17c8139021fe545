"""Worker processes are forked only where gradients can be computed afterwards."""

import os

import pytest
import torch

import polyfed as pf
from polyfed.simulation.engines import pool
from polyfed.testing import small_clients

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the first gradient of these tests decides")
@pytest.mark.parametrize("forks", [True, False])
def test_a_machine_with_a_gpu_forks_only_if_gradients_are_computed_afterwards(monkeypatch, forks):
    if not forks:  # as torch does after a gradient, where there is a GPU
        monkeypatch.setattr(pool, "_compute_gradient", lambda: os._exit(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pool.can_fork(CPU) is forks
    assert not pool.can_fork(torch.device("cuda"))


@pytest.mark.thorough
def test_where_it_does_not_workers_are_spawned_and_give_the_same_result(monkeypatch):
    alone = pf.federate(small_clients(), "fedavg", rounds=1, workers=0, device="cpu")
    monkeypatch.setattr(pool, "_computes_gradients_after_fork", lambda: False)
    spawned = pf.federate(small_clients(), "fedavg", rounds=1, workers=1, engine="pool", device="cpu")
    assert spawned.history[0]["train_loss"] == alone.history[0]["train_loss"]
