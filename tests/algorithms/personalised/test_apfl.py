"""APFL: its two ends, w whatever α is, and a round in plain torch."""

import pytest
import torch
from closed_forms import assert_equal, assert_near, linear, linear_clients, slopes

import polyfed as pf
from polyfed.algorithms import APFL, FedAvg, Local
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "local_epochs": 2}


def run(method, rounds=2, **more):
    return pf.federate(small_clients(), method, rounds=rounds, workers=0, **more)


def test_with_alpha_1_it_is_local_bit_for_bit():
    apfl, local = run(APFL(alpha=1.0, adaptive=False, **OPTIONS)), run(Local(**OPTIONS))
    for client in small_clients():
        assert_equal(apfl.model(client.id).state_dict(), local.model(client.id).state_dict())


def test_with_alpha_0_it_is_fedavg_bit_for_bit():
    apfl, fedavg = run(APFL(alpha=0.0, adaptive=False, **OPTIONS)), run(FedAvg(buffers="local", **OPTIONS))
    for client in small_clients():
        assert_equal(apfl.model(client.id).state_dict(), fedavg.model(client.id).state_dict())


def test_w_is_that_of_fedavg_whatever_alpha_is():
    """It makes one step a minibatch, with its momentum, by its own gradient."""
    options = {**OPTIONS, "momentum": 0.5}
    apfl, fedavg = run(APFL(alpha=0.7, **options)), run(FedAvg(buffers="local", **options))
    assert_equal(apfl.last.state["model"], fedavg.last.state["model"])
    for row in apfl.history[-1]["clients"].values():
        assert row["loss"] != row["server_loss"]


@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_round_is_what_the_paper_says_step_by_step(adaptive):
    """In plain torch, on full batches: v by the loss of the mixture, with α of the chain rule; α once, at the first step."""
    (client,), eta, alpha = linear_clients(1), 0.2, 0.3
    start = initial_state(linear, 0)
    v = {n: t + 0.5 * torch.cos(torch.arange(t.numel()).view(t.shape)) for n, t in start.items()}
    method = APFL(lr=eta, batch_size=0, local_steps=4, adaptive=adaptive)
    own = {"model": v, "alpha": alpha, "trained": True}
    with exclusive_single_torch_thread_with_grad():
        reply, after = method.local_update(Message({"model": start}, {"lr": eta}), own, client, 5)
    w = dict(start)
    for step in range(4):
        mixture = {n: alpha * v[n] + (1 - alpha) * w[n] for n in w}
        g, h = slopes(w, client.train), slopes(mixture, client.train)
        along = sum(float(((v[n] - w[n]) * h[n]).sum()) for n in w)
        w = {n: w[n] - eta * g[n] for n in w}
        v = {n: v[n] - eta * alpha * h[n] for n in v}
        alpha = alpha - eta * along if adaptive and step == 0 else alpha
    assert_near(reply.tensors["model"], w)
    assert_near(after["model"], v)
    assert after["alpha"] == pytest.approx(alpha, abs=1e-6)
    assert (alpha == 0.3) != adaptive
    with exclusive_single_torch_thread_with_grad():
        mixture = method.personal_model(Message({"model": start}), after, client, 0).state_dict()
    assert_near(mixture, {n: alpha * v[n] + (1 - alpha) * start[n] for n in start})


def test_alpha_stays_between_0_and_1():
    last = run(APFL(lr=2.0, batch_size=0), rounds=3).last
    found = {own["alpha"] for own in last.client_states.values()}
    assert all(0 <= alpha <= 1 for alpha in found)
    assert len(found) > 1


def test_a_client_that_never_took_part_has_w():
    found = run(APFL(buffers="average", **OPTIONS), rounds=1, clients_per_round=1)
    (took,) = [i for i, row in found.history[0]["clients"].items() if "bytes_up" in row]
    for client in small_clients():
        same = torch.equal(found.model(client.id).head.weight, found.last.state["model"]["head.weight"])
        assert same == (client.id != took)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_impossible_values_are_refused(value):
    with pytest.raises(pf.UserError, match=f"alpha must be from 0 to 1, got {value}"):
        APFL(alpha=value)
