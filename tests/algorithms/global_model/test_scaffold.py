"""SCAFFOLD: its sums, the optimum that FedAvg misses, and each of the ways in which it is got wrong."""

import pytest
import torch
from closed_forms import CURVATURE, OPTIMUM, assert_near, linear, linear_clients, quadratics, slopes

import polyfed as pf
from polyfed.algorithms import FedAvg, Scaffold
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8}


def run(method, rounds, clients=None, **more):
    return pf.federate(clients or small_clients(), method, rounds=rounds, workers=0, evaluate_every=rounds, **more)


def test_one_round_from_zero_variates_is_fedavg():
    ours = run(Scaffold(**OPTIONS), 1).last.state
    theirs = run(FedAvg(weighted=False, **OPTIONS), 1).last.state["model"]
    for name, tensor in theirs.items():
        assert torch.equal({**ours["model"], **ours["buffers"]}[name], tensor), name


@pytest.mark.parametrize("cohort", [3, 2])
def test_the_clients_variates_add_up_to_n_times_the_servers(cohort):
    """After every round, also one with a part of the clients: Σ(c_i⁺ − c_i) goes into c, not Σc_i⁺."""
    for rounds in (1, 2):
        last = run(Scaffold(**OPTIONS), rounds, clients_per_round=cohort).last
        for name, c in last.state["variate"].items():
            mine = [own["variate"][name] for own in last.client_states.values() if own["variate"]]
            torch.testing.assert_close(torch.stack(mine).sum(0) / 3, c, rtol=1e-4, atol=1e-5)
        assert last.state["variate"]["head.weight"].abs().max() > 0.01


def test_two_quadratics_reach_the_optimum_that_fedavg_misses():
    """L_i = ½a_i(θ − c_i)²: the minimum of L_1 + L_2 is Σa_i·c_i/Σa_i, and FedAvg with five steps ends elsewhere."""
    options = {"lr": 0.1, "batch_size": 0, "local_steps": 5}
    minimum = sum(a * c for a, c in zip(CURVATURE, OPTIMUM, strict=True)) / sum(CURVATURE)
    ours = run(Scaffold(**options), 25, quadratics())
    theirs = run(FedAvg(weighted=False, **options), 25, quadratics())
    assert ours.last.state["model"]["theta"].item() == pytest.approx(minimum, abs=1e-8)
    pull = [1 - (1 - 0.1 * a) ** 5 for a in CURVATURE]
    drifted = sum(p * c for p, c in zip(pull, OPTIMUM, strict=True)) / sum(pull)
    assert theirs.last.state["model"]["theta"].item() == pytest.approx(drifted, abs=1e-8)
    assert abs(drifted - minimum) > 0.2
    for i, (a, c) in enumerate(
        zip(CURVATURE, OPTIMUM, strict=True)
    ):  # each c_i is the client's gradient at the minimum
        variate = ours.last.client_states[f"q{i}"]["variate"]["theta"].item()
        assert variate == pytest.approx(a * (minimum - c), abs=1e-7)
    assert ours.last.state["variate"]["theta"].item() == pytest.approx(0, abs=1e-7)


def test_rounds_are_what_the_paper_says_step_by_step():
    """Algorithm 1, option II, in plain torch: three rounds, minibatches in an order of no importance (full batches), clients
    with unequal numbers of steps would count epochs; here K is the number of steps."""
    eta, eta_g, steps = 0.1, 0.5, 4
    clients = linear_clients()
    ours = run(
        Scaffold(lr=eta, server_lr=eta_g, batch_size=0, local_epochs=steps, weight_decay=0.01), 3, clients
    ).last.state
    x = initial_state(linear, 0)
    c = {n: torch.zeros_like(t) for n, t in x.items()}
    mine = [dict(c) for _ in clients]
    for _ in range(3):
        dx, dc = ({n: torch.zeros_like(t) for n, t in x.items()} for _ in range(2))
        for i, client in enumerate(clients):
            y = dict(x)
            for _ in range(steps):
                g = slopes(y, client.train)
                y = {n: y[n] - eta * (g[n] + 0.01 * y[n] - mine[i][n] + c[n]) for n in y}
            after = {n: mine[i][n] - c[n] + (x[n] - y[n]) / (steps * eta) for n in y}
            dx = {n: dx[n] + (y[n] - x[n]) / len(clients) for n in x}
            dc = {n: dc[n] + (after[n] - mine[i][n]) / len(clients) for n in x}
            mine[i] = after
        x, c = {n: x[n] + eta_g * dx[n] for n in x}, {n: c[n] + dc[n] for n in c}
    assert_near(ours["model"], x)
    assert_near(ours["variate"], c)


def test_steps_are_counted_and_not_epochs():
    """Each minibatch is a step: c_i of a client with four of them is the mean of four gradients."""
    last = run(Scaffold(lr=1e-3, batch_size=5, buffers="local"), 1, small_clients(1)).last
    whole = run(Scaffold(lr=1e-3, batch_size=0, buffers="local"), 1, small_clients(1)).last
    name = "head.bias"
    one, other = (found.client_states["client-0"]["variate"][name].norm() for found in (last, whole))
    assert 0.5 < float(one / other) < 2.0  # 4 if an epoch counted as one step


PLAIN = {
    "momentum": 0.5,
    "optimizer": "adam",
    "optimizer_options": {"dampening": 0.1},
    "clip_norm": 1.0,
    "lr_by_name": {"head.*": 2.0},
    "warmup_steps": 3,
}


@pytest.mark.parametrize(("field", "value"), PLAIN.items())
def test_all_but_plain_sgd_is_refused(field, value):
    with pytest.raises(
        pf.UserError, match=f"Scaffold: {field} must be .*, since c_i is read off the way of plain SGD, got"
    ):
        Scaffold(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("server_lr", 0.0), ("weighted", True), ("adapters", "zero_pad")])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value!r}"):
        Scaffold(**{field: value})
    assert Scaffold(optimizer="SGD", schedule="cosine", weight_decay=0.1).server_lr == 1


def test_twice_the_weights_travel_and_half_of_it_to_evaluate():
    rows = run(Scaffold(**OPTIONS), 1).history[0]["clients"]
    plain = run(FedAvg(weighted=False, **OPTIONS), 1).history[0]["clients"]
    for client, row in rows.items():
        assert 1.5 < row["bytes_up"] / plain[client]["bytes_up"] < 2
        assert row["bytes_down"] > plain[client]["bytes_down"]
