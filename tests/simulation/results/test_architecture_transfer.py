"""Transfer of a found architecture to a new task: samplers stay, weights move, and it helps."""

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import CAFedPNAS, FedAvg, FedDSNAS
from polyfed.core.errors import UserError
from polyfed.core.seeds import torch_generator
from polyfed.simulation.results.architecture_transfer import score_after_adaptation, transfer_network
from polyfed.testing import SmallNet, small_clients

SMALL = {
    "channels": 4, "base_cells": 1, "base_nodes": 1, "personal_nodes": 1, "batch_size": 16, "lr": 0.03,
    "operations": ("sep_conv_3", "max_pool_3", "skip"), "personal_operations": ("sep_conv_3", "skip"),
}  # fmt: skip


def images(number, turn=0, seed=1):
    """Three patterns with noise; `turn` quarter turns of them are other tasks."""
    generator = torch_generator(seed)
    patterns = torch.randn(3, 1, 6, 6, generator=torch_generator(7))
    y = torch.arange(number) % 3
    return torch.rot90(
        patterns[y] + 0.4 * torch.randn(number, 1, 6, 6, generator=generator), turn, (2, 3)
    ).contiguous(), y


@pytest.fixture(scope="module", params=[pytest.param(CAFedPNAS, marks=pytest.mark.slow), FedDSNAS])
def run(request):
    clients = [pf.Client(f"c{k}", None, images(60, seed=k), images(30, seed=10 + k)) for k in range(2)]
    return pf.federate(clients, request.param(**SMALL, local_epochs=6), rounds=4, workers=0, evaluate_every=4)


@pytest.fixture(scope="module")
def quick():
    """A run whose scores say nothing."""
    clients = [pf.Client(f"c{k}", None, images(20, seed=k), images(10, seed=10 + k)) for k in range(2)]
    return pf.federate(clients, FedDSNAS(**SMALL), rounds=1, workers=0)


@pytest.mark.thorough
@pytest.mark.parametrize("parts", ["all", "personal"])
def test_a_new_task_is_learned_and_samplers_stay(run, parts):
    assert run.table()[-1]["accuracy"] > 0.9
    task = pf.Client("turned", None, images(40, turn=1), images(60, turn=1, seed=5))
    done = transfer_network(run, "c0", task, parts=parts)
    assert done.scores_after_retraining["accuracy"] > done.scores_before_retraining["accuracy"] + 0.2
    assert (
        float((done.model(task.test.x).argmax(1) == task.test.labels).double().mean())
        == done.scores_after_retraining["accuracy"]
    )
    before, after = run.model("c0").state_dict(), done.model.state_dict()
    assert before.keys() == after.keys()  # the same operations: the architecture is the one that was found
    for name, tensor in before.items():
        if ".samplers." in name:
            assert torch.equal(tensor, after[name]), name
    moved = not torch.equal(before["base.stem.weight"], after["base.stem.weight"])
    assert moved == (parts == "all")
    assert not torch.equal(before["personal.classifier.weight"], after["personal.classifier.weight"])


def test_the_run_is_left_as_it_was(quick):
    before = {n: t.clone() for n, t in quick.model("c0").state_dict().items()}
    one, other = (
        transfer_network(quick, "c0", pf.Client("t", None, images(20, 1), images(20, 1)), steps=3) for _ in range(2)
    )
    assert one.scores_after_retraining == other.scores_after_retraining
    assert all(torch.equal(t, before[n]) for n, t in quick.model("c0").state_dict().items())


@pytest.mark.thorough
@pytest.mark.parametrize("method", [FedDSNAS, pytest.param(CAFedPNAS, marks=pytest.mark.slow)])
def test_adapted_afterwards_is_adapted_in_the_run(method):
    """Neither θ nor the replies depend on it, so that one run tells both, bit for bit."""
    clients = [pf.Client(f"c{k}", None, images(30, seed=k), images(30, seed=10 + k)) for k in range(2)]
    runs = [pf.federate(clients, method(**SMALL, finetune_epochs=n), rounds=2, workers=0) for n in (0, 2)]
    for client in ("c0", "c1"):
        plain, tuned = (run.history[-1]["clients"][client] for run in runs)
        for run in runs:
            assert score_after_adaptation(run, client, epochs=2)["loss"] == tuned["loss"]
            assert score_after_adaptation(run, client, epochs=0)["loss"] == plain["loss"] == tuned["server_loss"]
        assert plain["loss"] != tuned["loss"]
    with pytest.raises(UserError, match="finetune_epochs must be at least 0, got -1"):
        score_after_adaptation(runs[0], "c0", epochs=-1)
    with pytest.raises(UserError, match="no client 'c7' in this run"):
        score_after_adaptation(runs[0], "c7")


def test_what_is_refused(quick):
    task = pf.Client("t", None, images(20), images(20))
    with pytest.raises(UserError, match="no client 'c9'"):
        transfer_network(quick, "c9", task)
    with pytest.raises(UserError, match="steps must be at least 1, got 0"):
        transfer_network(quick, "c0", task, steps=0)
    x, y = images(20)
    with pytest.raises(UserError, match="label 7, but the run's network has 3 outputs"):
        transfer_network(quick, "c0", pf.Client("t", None, (x, y), (x, y + 5)))
    small = torch.zeros(4, 1, 5, 5), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"inputs \(1, 5, 5\)"):
        transfer_network(quick, "c0", pf.Client("t", None, small, small))
    other = pf.federate(small_clients(1), FedAvg(), rounds=1, workers=0)
    assert other.federation.clients["client-0"].model is SmallNet
    with pytest.raises(UserError, match="this run is of FedAvg"):
        transfer_network(other, "client-0", task)
