"""q-FedAvg: FedAvg as a special case, rounds in plain torch, the minimum of its objective, and losses that become alike."""

import statistics

import pytest
from closed_forms import CURVATURE, OPTIMUM, assert_near, linear, linear_clients, loss, quadratics
from halves import play
from plain_torch import (
    LOCAL,
    assert_tensors_near,
    copy_of,
    draw_network,
    load,
    mean_of,
    normed,
    record_run,
    sgd,
    train,
    unequal_clients,
)
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg, QFedAvg
from polyfed.testing import small_clients


def run(method, rounds, clients=None, **more):
    return pf.federate(clients or small_clients(), method, rounds=rounds, workers=0, evaluate_every=rounds, **more)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.one_case
def test_q_0_is_fedavg(weighted):
    """With BatchNorm, whose statistics are averaged, and momentum; L does not matter."""
    options = {"lr": 0.05, "batch_size": 8, "momentum": 0.5, "weighted": weighted}
    ours = run(QFedAvg(q=0, lipschitz=7.0, **options), 3).last.state["model"]
    assert_near(ours, run(FedAvg(**options), 3).last.state["model"])


@pytest.mark.parametrize(("lipschitz", "q", "weighted"), [(None, 2.0, False), (3.0, 0.5, True)])
@pytest.mark.one_case
def test_rounds_in_plain_torch(lipschitz, q, weighted, monkeypatch):
    """Algorithm 2 as it is written, with L in Δ and in h; two of three clients a round, with momentum and weight decay."""
    clients = unequal_clients(normed, normed, normed)
    method = QFedAvg(**LOCAL, q=q, lipschitz=lipschitz, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, rounds=4, clients_per_round=2)
    network, curvature = draw_network(normed), 1 / LOCAL["lr"] if lipschitz is None else lipschitz
    w = copy_of(network)
    for cohort, minibatches in recorded.rounds:
        top, bottom, trained = {name: 0.0 for name, _ in network.named_parameters()}, 0.0, []
        shares = [len(c.train) if weighted else 1 for c in clients if c.id in cohort]
        for i, share in zip(cohort, shares, strict=True):
            whole = clients[int(i[-1])].train
            outputs = load(network, w).eval()(whole.x).float()  # polyfed evaluates in single precision
            f = float(F.cross_entropy(outputs, whole.y).detach())
            train(network.train(), sgd(network.parameters()), minibatches[i])
            trained.append(copy_of(network))
            dw = {name: curvature * (w[name] - trained[-1][name]) for name in top}
            square = sum(float(t.square().sum()) for t in dw.values())
            top = {name: top[name] + share * f**q * dw[name] for name in top}
            bottom += share * (q * f ** (q - 1) * square + curvature * f**q)
        w = {**mean_of(trained, shares), **{name: w[name] - top[name] / bottom for name in top}}
    assert_tensors_near(recorded.run.last.state["model"], w)


@pytest.mark.parametrize("q", [0, 1, 4])
@pytest.mark.one_case
def test_two_quadratics_reach_the_minimum_of_the_objective(q):
    """L_i = ½a_i(θ − c_i)²: where Σ_i F_i^q·a_i·(θ − c_i) is zero."""
    _, state, *_ = play(QFedAvg(q=q, lr=0.3, batch_size=0), quadratics(), 40)
    low, high = OPTIMUM
    for _ in range(60):
        middle = (low + high) / 2
        pulls = [(0.5 * a * (middle - c) ** 2) ** q * a * (middle - c) for a, c in zip(CURVATURE, OPTIMUM, strict=True)]
        low, high = (low, middle) if sum(pulls) > 0 else (middle, high)
    assert float(state["model"]["theta"]) == pytest.approx(middle, abs=1e-3)


@pytest.mark.thorough
def test_a_larger_q_makes_losses_more_alike():
    """Of two clients that agree and one with other labels, which FedAvg gives up."""
    people = linear_clients()
    odd = pf.Client("odd", linear, (people[0].train.x, (people[0].train.y + 1) % 3), people[0].test)
    people = [*people, odd]
    spread, worst = {}, {}
    for q in (0.0, 5.0):
        _, state, *_ = play(QFedAvg(q=q, lr=0.3, batch_size=0), people, 30)
        losses = [float(loss(state["model"], c.train)) for c in people]
        spread[q], worst[q] = statistics.pstdev(losses), max(losses)
    assert spread[5.0] < 0.7 * spread[0.0]
    assert worst[5.0] < 0.9 * worst[0.0]


@pytest.mark.parametrize(
    ("field", "value"), [("q", -1.0), ("lipschitz", 0.0), ("adapters", "svd"), ("robust", "median")]
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"QFedAvg: {field} must be .* got {value!r}"):
        QFedAvg(**{field: value})


def test_a_client_that_fits_exactly_changes_nothing_and_breaks_nothing():
    """Its loss is zero, whose power q − 1 is infinite for q below one."""
    people = quadratics()
    perfect = pf.Client(
        "p", people[0].model, (people[0].train.x, people[0].train.y * 0), people[0].test, task="regression"
    )
    state = run(QFedAvg(q=0.5, lr=0.1, batch_size=0), 1, [perfect]).last.state["model"]
    assert float(state["theta"]) == 0
