"""FedHeNN with `sketch`: the exact mean kernel where all clients reply and the rank is full, and a state without N."""

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedHeNN
from polyfed.core.algorithm import ClientInfo
from polyfed.core.seeds import torch_generator
from polyfed.core.state_dict import iter_tensors
from polyfed.testing import SmallNet, assert_runs_equal, small_clients
from tests.few_cases import few

OPTIONS = {"lr": 0.05, "batch_size": 8, "rad_size": 20, "rad_batch": 8, "local_epochs": 1, "eta0": 1.0}
PUBLIC = torch.randn(40, 6, generator=torch_generator(8))


def wide_net():
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def clients(number=3):
    return [
        pf.Client(c.id, wide_net if k == 1 else SmallNet, c.train, c.test) for k, c in enumerate(small_clients(number))
    ]


def federate(method, number=3, **settings):
    return pf.federate(clients(number), method, **({"rounds": 3, "seed": 3, "workers": 0, "public": PUBLIC} | settings))


def sent_kernel(run, method):
    message = method.dispatch(run.last.state, run.federation.client_info("client-0", 4))
    features = message.tensors["target"]["features"].double()
    centred = features - features.mean(0)
    return centred @ centred.T


@pytest.mark.parametrize("fields", few([{}, {"weighting": "capacity"}, {"share": "weights"}], [{}]))
def test_with_all_clients_and_full_rank_it_is_the_exact_mean_kernel(fields):
    exact, sketched = FedHeNN(rank=39, **fields, **OPTIONS), FedHeNN(rank=39, sketch=True, **fields, **OPTIONS)
    runs = federate(exact), federate(sketched)
    torch.testing.assert_close(sent_kernel(runs[0], exact), sent_kernel(runs[1], sketched), rtol=1e-3, atol=1e-4)
    for client in runs[0].federation.clients:
        models = [run.model(client).state_dict() for run in runs]
        for name, tensor in models[0].items():
            torch.testing.assert_close(tensor, models[1][name], rtol=1e-2, atol=1e-3)
    assert runs[1].history[-1]["analysis"]["sketch_error"] < 1e-5


def test_the_state_does_not_grow_with_the_clients():
    method = FedHeNN(rank=4, sketch=True, **OPTIONS)
    sizes = {
        number: sum(t.nbytes for t in iter_tensors(federate(method, number, rounds=2).last.state)) for number in (2, 7)
    }
    assert set(sizes.values()) == {4 * (40 * 6 + 40 * 4)}  # the pool and F


def test_round_1_has_no_target_and_a_sampled_run_says_what_the_sketch_loses():
    run = federate(FedHeNN(rank=2, sketch=True, **OPTIONS), 5, clients_per_round=2)
    assert 0 < run.history[-1]["analysis"]["sketch_error"] < 1
    method = run.federation.algorithm
    start = run.federation.initial_checkpoint().state
    assert "target" not in method.dispatch(start, ClientInfo("client-0", 1, 3)).tensors


@pytest.mark.thorough
def test_resumed_it_goes_on_bit_for_bit(tmp_path):
    method = FedHeNN(rank=4, sketch=True, **OPTIONS)
    whole, out = federate(method, rounds=4, clients_per_round=2), tmp_path / "run"
    federate(method, rounds=4, clients_per_round=2, out=out)
    for stale in (out / "checkpoint" / "round-000004").iterdir():
        stale.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert_runs_equal(whole, pf.resume(out, clients=clients(), public=PUBLIC, workers=0))


@pytest.mark.parametrize("fields", [{}, {"rank": 4, "kernel": "rbf"}])
def test_it_needs_a_rank_and_a_linear_kernel(fields):
    with pytest.raises(pf.UserError, match="sketch must be false without rank"):
        FedHeNN(sketch=True, **fields)
