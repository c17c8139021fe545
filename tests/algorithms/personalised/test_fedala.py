"""FedALA: FedAvg where W is 1, training alone where it is 0, and how W is learnt."""

from dataclasses import dataclass

import pytest
import torch
from closed_forms import assert_equal, assert_near, linear, linear_clients, slopes

import polyfed as pf
from polyfed.algorithms import FedALA, FedAvg, Local
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}


def test_where_w_stays_1_the_global_model_is_fedavg_bit_for_bit():
    ours = pf.federate(small_clients(), FedALA(weight_lr=0.0, **OPTIONS), rounds=3, workers=0).last.state["model"]
    theirs = pf.federate(small_clients(), FedAvg(buffers="local", **OPTIONS), rounds=3, workers=0).last.state["model"]
    assert_equal(ours, theirs)
    learnt = pf.federate(small_clients(), FedALA(**OPTIONS), rounds=3, workers=0).last
    assert not torch.equal(learnt.state["model"]["head.weight"], theirs["head.weight"])


@dataclass(frozen=True, kw_only=True)
class Nothing(FedALA):
    """W = 0."""

    def _learn_mixing_weights(self, down, own, client, seed):
        return {name: torch.zeros_like(tensor) for name, tensor in own["model"].items()}


def test_where_w_is_0_it_is_local_bit_for_bit():
    ours = pf.federate(linear_clients(), Nothing(**OPTIONS), rounds=3, workers=0)
    theirs = pf.federate(linear_clients(), Local(**OPTIONS), rounds=3, workers=0)
    for client in linear_clients():
        assert_equal(ours.model(client.id).state_dict(), theirs.model(client.id).state_dict())


@pytest.mark.parametrize("known", [False, True])
def test_w_is_learnt_as_the_paper_says_step_by_step(known):
    """In plain torch, on all examples: W ← clip(W − η·∇L(Θ̂) ⊙ (Θ − Θ_i), 0, 1); more epochs the first time; then Θ̂ is
    trained."""
    (client,), eta, rate = linear_clients(1), 0.1, 0.8
    shared = initial_state(linear, 0)
    mine = {n: t + 0.6 * torch.sin(torch.arange(t.numel()).view(t.shape)) for n, t in shared.items()}
    weights = {n: torch.linspace(0.2, 1.0, t.numel()).view(t.shape) for n, t in shared.items()}
    method = FedALA(lr=rate, weight_lr=eta * 50, sample=1.0, start_epochs=3, batch_size=0, momentum=0.5, local_steps=1)
    own = {"model": mine, "weights": weights, "trained": True, "learnt": known}
    with exclusive_single_torch_thread_with_grad():
        reply, after = method.local_update(Message({"model": shared}, {"lr": rate}), own, client, 5)
    w = weights
    for _ in range(1 if known else 3):
        g = slopes({n: mine[n] + (shared[n] - mine[n]) * w[n] for n in w}, client.train)
        w = {n: (w[n] - eta * 50 * g[n] * (shared[n] - mine[n])).clamp(0, 1) for n in w}
    assert_near(after["weights"], w)
    assert any(not torch.equal(w[n], weights[n]) for n in w)
    start = {n: mine[n] + (shared[n] - mine[n]) * w[n] for n in w}
    g = slopes(start, client.train)
    assert_near(reply.tensors["model"], {n: start[n] - rate * g[n] for n in w})


def test_lower_layers_are_the_global_models_and_statistics_do_not_move():
    run = pf.federate(small_clients(), FedALA(**OPTIONS, local_epochs=1), rounds=3, workers=0)
    steps = [-(-len(c.train) // 8) for c in small_clients()]
    for client, number in zip(small_clients(), steps, strict=True):
        own = run.last.client_states[client.id]
        assert own["weights"].keys() == {"head.weight", "head.bias"}
        assert all(bool(((w >= 0) & (w <= 1)).all()) for w in own["weights"].values())
        assert int(own["buffers"]["body.1.num_batches_tracked"]) in (3 * number, 3 * (number - 1))


def test_a_client_that_never_took_part_has_the_global_model():
    run = pf.federate(small_clients(), FedALA(buffers="average", **OPTIONS), rounds=1, clients_per_round=1, workers=0)
    (took,) = [i for i, row in run.history[0]["clients"].items() if "bytes_up" in row]
    others = [c.id for c in small_clients() if c.id != took]
    for client in others:
        assert torch.equal(run.model(client).head.weight, run.last.state["model"]["head.weight"])


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("sample", 0.0), ("weight_lr", -1.0), ("start_epochs", 0)])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value}"):
        FedALA(**{field: value})
