"""FedDyn: where it comes to rest, and each step against plain torch."""

import pytest
import torch
from closed_forms import CURVATURE, OPTIMUM, assert_near, linear, linear_clients, quadratics, slopes

import polyfed as pf
from polyfed.algorithms import FedAvg, FedDyn
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import SmallNet, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8}


def run(method, rounds, clients=None, **more):
    return pf.federate(clients or small_clients(), method, rounds=rounds, workers=0, evaluate_every=rounds, **more)


@pytest.mark.parametrize(("alpha", "rounds"), [(1.5, 15), pytest.param(0.3, 60, marks=pytest.mark.slow)])
def test_it_comes_to_rest_at_the_optimum_of_all(alpha, rounds):
    """On quadratics, whatever α is: FedAvg with as many local steps goes to the mean of the clients' own optima."""
    minimum = sum(a * c for a, c in zip(CURVATURE, OPTIMUM, strict=True)) / sum(CURVATURE)
    last = run(FedDyn(alpha=alpha, lr=0.3, batch_size=0, local_steps=4), rounds, quadratics()).last
    assert last.state["model"]["theta"].item() == pytest.approx(minimum, abs=1e-3)
    assert abs(sum(OPTIMUM) / 2 - minimum) > 1
    for i, (a, c) in enumerate(zip(CURVATURE, OPTIMUM, strict=True)):
        gradient = last.client_states[f"q{i}"]["gradient"]["theta"].item()
        assert gradient == pytest.approx(a * (minimum - c), abs=2e-3)


def test_in_the_first_round_clients_do_as_in_fedavg_and_the_server_goes_twice_as_far():
    """For α → 0: θ ← mean − h/α, where h/α is minus the mean change, whatever α is."""
    ours = run(FedDyn(alpha=1e-9, **OPTIONS), 1).last.state
    theirs = run(FedAvg(weighted=False, **OPTIONS), 1).last.state["model"]
    start = initial_state(SmallNet, 0)
    for name, theta in ours["model"].items():
        torch.testing.assert_close(theta, 2 * theirs[name] - start[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["h"][name], start[name] - theirs[name], rtol=1e-5, atol=1e-6)
    for name, tensor in ours["buffers"].items():
        assert torch.equal(tensor, theirs[name])


def test_rounds_are_what_the_paper_says_step_by_step():
    """Algorithm 1 in plain torch, two rounds with a part of the clients: h is divided by all, the mean by those drawn."""
    alpha, eta, steps = 0.5, 0.1, 3
    clients = linear_clients()
    found = run(FedDyn(alpha=alpha, lr=eta, batch_size=0, local_steps=steps), 2, clients, clients_per_round=2)
    theta = initial_state(linear, 0)
    h = {n: torch.zeros_like(t) for n, t in theta.items()}
    g = {c.id: dict(h) for c in clients}
    for record in found.history:
        drawn = [c for c in clients if "bytes_up" in record["clients"].get(c.id, {})]
        assert len(drawn) == 2
        trained = []
        for client in drawn:
            y = dict(theta)
            for _ in range(steps):
                s = slopes(y, client.train)
                y = {n: y[n] - eta * (s[n] - g[client.id][n] + alpha * (y[n] - theta[n])) for n in y}
            g[client.id] = {n: g[client.id][n] - alpha * (y[n] - theta[n]) for n in y}
            trained.append(y)
        h = {n: h[n] - alpha / 3 * sum(y[n] - theta[n] for y in trained) for n in h}
        theta = {n: sum(y[n] for y in trained) / 2 - h[n] / alpha for n in h}
    assert_near(found.last.state["model"], theta)
    assert_near(found.last.state["h"], {n: t / alpha for n, t in h.items()})


def test_the_penalty_is_the_whole_regulariser():
    """Its gradient at θ is α(θ − θ̄) − g: a norm that is not squared, or a term left out, has another."""
    (client,) = linear_clients(1)
    start = initial_state(client.model, 0)
    g = {n: torch.full_like(t, 0.3) for n, t in start.items()}
    method = FedDyn(alpha=4.0, lr=1e-3, batch_size=0, local_steps=2)
    with exclusive_single_torch_thread_with_grad():
        with_g, _ = method.local_update(Message({"model": start}, {"lr": 1e-3}), {"gradient": g}, client, 0)
        without, _ = method.local_update(Message({"model": start}, {"lr": 1e-3}), {"gradient": {}}, client, 0)
    for name in start:
        moved = with_g.tensors["model"][name] - without.tensors["model"][name]
        torch.testing.assert_close(moved, torch.full_like(moved, 2 * 1e-3 * 0.3), rtol=0.02, atol=0)


@pytest.mark.parametrize(("field", "value"), [("alpha", 0.0), ("weighted", True), ("adapters", "stack")])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value!r}"):
        FedDyn(**{field: value})
