"""Ditto: what it is for λ = 0, whatever λ is, and in closed form."""

import pytest
import torch
from closed_forms import COUNT, CURVATURE, OPTIMUM, assert_equal, assert_near, linear_clients, quadratics, slopes

import polyfed as pf
from polyfed.algorithms import Ditto, FedAvg, Local
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import SmallNet, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "local_epochs": 2, "momentum": 0.5}


def test_without_pull_v_is_local_bit_for_bit():
    ditto = pf.federate(small_clients(), Ditto(lam=0.0, **OPTIONS), rounds=3, workers=0)
    local = pf.federate(small_clients(), Local(**OPTIONS), rounds=3, workers=0)
    for client in small_clients():
        assert_equal(ditto.model(client.id).state_dict(), local.model(client.id).state_dict())


@pytest.mark.parametrize("lam", [0.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_w_is_fedavg_whatever_lambda_is(lam):
    ditto = pf.federate(small_clients(), Ditto(lam=lam, **OPTIONS), rounds=2, workers=0)
    fedavg = pf.federate(small_clients(), FedAvg(buffers="local", **OPTIONS), rounds=2, workers=0)
    assert_equal(ditto.last.state["model"], fedavg.last.state["model"])
    for client, row in ditto.history[-1]["clients"].items():
        assert row["server_loss"] == fedavg.history[-1]["clients"][client]["loss"]
        assert row["loss"] != row["server_loss"]


def test_v_reaches_its_closed_form():
    """v_i = argmin ½a(v − c)² + λ/2·(v − w)², w being the fixed point of FedAvg with one step."""
    lam = 0.7
    run = pf.federate(quadratics(), Ditto(lam=lam, lr=0.2, batch_size=0, local_steps=1), rounds=150, workers=0,
                      evaluate_every=150)  # fmt: skip
    shares = [
        n * a / sum(n * a for n, a in zip(COUNT, CURVATURE, strict=True)) for n, a in zip(COUNT, CURVATURE, strict=True)
    ]
    w = sum(s * c for s, c in zip(shares, OPTIMUM, strict=True))
    assert run.last.state["model"]["theta"].item() == pytest.approx(w, abs=1e-8)
    for i, (a, c) in enumerate(zip(CURVATURE, OPTIMUM, strict=True)):
        assert run.model(f"q{i}").theta.item() == pytest.approx((a * c + lam * w) / (a + lam), abs=1e-8)


def test_a_round_is_what_the_paper_says_step_by_step():
    """In plain torch, with one full batch a step: w_i by gradient descent, v_i pulled to the w that came, not to w_i."""
    (client,), lam, eta = linear_clients(1), 2.0, 0.1
    start = initial_state(client.model, 0)
    own = {"model": {n: t + 0.1 for n, t in start.items()}, "trained": True}
    method = Ditto(lam=lam, lr=eta, batch_size=0, local_steps=3)
    with exclusive_single_torch_thread_with_grad():
        reply, after = method.local_update(Message({"model": start}, {"lr": eta}), own, client, 5)

    w, v = dict(start), dict(own["model"])
    for _ in range(3):
        g, h = slopes(w, client.train), slopes(v, client.train)
        w = {n: w[n] - eta * g[n] for n in w}
        v = {n: v[n] - eta * (h[n] + lam * (v[n] - start[n])) for n in v}
    assert_near(reply.tensors["model"], w)
    assert_near(after["model"], v)


def test_a_client_that_never_took_part_has_w_and_its_v_begins_at_the_common_draw():
    run = pf.federate(small_clients(), Ditto(**OPTIONS, buffers="average"), rounds=1, clients_per_round=1, workers=0)
    (took,) = [i for i, row in run.history[0]["clients"].items() if "bytes_up" in row]
    for client in small_clients():
        same = torch.equal(run.model(client.id).head.weight, run.last.state["model"]["head.weight"])
        assert same == (client.id != took)
    own = Ditto().client_init(small_clients(1)[0], 0)
    assert_equal(own["model"], initial_state(SmallNet, 0))


def test_epochs_of_v_are_its_own():
    one, three = (pf.federate(small_clients(1), Ditto(lr=0.05, personal_epochs=k), rounds=1, workers=0) for k in (1, 3))
    assert_equal(one.last.state["model"], three.last.state["model"])
    steps = [int(r.model("client-0").body[1].num_batches_tracked) for r in (one, three)]
    assert steps[1] == 3 * steps[0]


@pytest.mark.parametrize(("field", "value"), [("lam", -1.0), ("personal_epochs", 0)])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value}"):
        Ditto(**{field: value})
    assert Ditto().lam > 0  # 0 as the default would be training alone
