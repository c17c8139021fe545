"""AFL: λ in the simplex, FedAvg as a special case, rounds in plain torch, and the best model for the worst client."""

import pytest
import torch
from closed_forms import CURVATURE, OPTIMUM, assert_equal, assert_near, linear, linear_clients, loss, quadratics, slopes
from halves import begin, play

import polyfed as pf
from polyfed.algorithms import AFL, FedAvg
from polyfed.algorithms.global_model.afl import project_onto_simplex
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import AlgorithmContract, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8}


@pytest.mark.thorough
class TestContract(AlgorithmContract):
    """With the mean of all rounds as the result, and a rate at which λ reaches the border."""

    @pytest.fixture
    def algorithm(self):
        return AFL(**OPTIONS, lambda_lr=2.0, averaged_iterates=True)


def run(method, rounds, clients=None, **more):
    return pf.federate(clients or small_clients(), method, rounds=rounds, workers=0, evaluate_every=rounds, **more)


def odd_clients():
    """Three clients that agree, and one with other labels."""
    people = linear_clients()
    odd = pf.Client("odd", linear, (people[0].train.x, (people[0].train.y + 1) % 3), people[0].test)
    return [*people, odd]


@pytest.mark.parametrize("cohort", [None, 2])
def test_lambda_stays_in_the_simplex_and_rises_for_the_worst_client(cohort):
    last, before = {}, 0.25
    for rounds in (1, 3, 12):
        last = run(AFL(lr=0.3, batch_size=0), rounds, odd_clients(), clients_per_round=cohort or 4).last.state["shares"]
        assert all(0 <= share <= 1 for share in last.values())
        assert sum(last.values()) == pytest.approx(1, abs=1e-12)
        if cohort is None and rounds > 1:
            assert last["odd"] > before
            before = last["odd"]
    assert last["odd"] == max(last.values())
    assert last["odd"] > 0.3


def test_it_begins_with_equal_weights_and_keeps_no_mean_unless_asked_to():
    _, state, _ = begin(AFL(**OPTIONS), small_clients())
    assert state["shares"] == {f"client-{k}": 1 / 3 for k in range(3)}
    assert set(state) == {"model", "shares"}


def test_sums_that_hide_single_replies_are_refused():
    with pytest.raises(pf.UserError, match="secure"):
        run(AFL(**OPTIONS), 1, secure=True)


def test_without_a_rate_of_lambda_it_is_fedavg():
    ours, theirs = run(AFL(**OPTIONS, lambda_lr=0), 2), run(FedAvg(**OPTIONS, weighted=False), 2)
    assert ours.last.state["shares"] == dict.fromkeys(ours.federation.clients, 1 / 3)
    assert_near(ours.last.state["model"], theirs.last.state["model"], 1e-6)


@pytest.mark.parametrize("rate", [0.05, 3.0])
def test_rounds_in_plain_torch(rate):
    """With one step it is the paper's: θ − η·Σλ∇F; here with two. A large rate sets some λ to zero."""
    eta, clients = 0.3, odd_clients()
    ours = run(AFL(lr=eta, batch_size=0, local_epochs=2, lambda_lr=rate), 3, clients).last.state
    w, shares = initial_state(linear, 0), torch.full((4,), 0.25, dtype=torch.float64)
    for _ in range(3):
        after, losses = {name: torch.zeros_like(t) for name, t in w.items()}, []
        for k, client in enumerate(clients):
            now = dict(w)
            for _ in range(2):
                now = {name: t - eta * slopes(now, client.train)[name] for name, t in now.items()}
            after = {name: after[name] + float(shares[k]) * now[name] for name in w}
            losses.append(float(loss(w, client.train)))
        w, shares = after, nearest_in_simplex(shares + rate * torch.tensor(losses, dtype=torch.float64))
    assert_near(ours["model"], w)
    assert [ours["shares"][c.id] for c in clients] == pytest.approx(shares.tolist(), abs=1e-6)
    assert (min(ours["shares"].values()) == 0) == (rate == 3.0)


def nearest_in_simplex(point):
    """max(x − t, 0) for the t at which the sum is 1, by bisection."""
    low, high = float(point.min()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((point - middle).clamp(min=0).sum()) > 1 else (low, middle)
    return (point - middle).clamp(min=0)


def test_the_projection_is_the_nearest_point():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7):
        for _ in range(5):
            point = 2 * torch.randn(size, generator=generator, dtype=torch.float64)
            ours = project_onto_simplex({str(k): float(x) for k, x in enumerate(point)})
            assert list(ours.values()) == pytest.approx(nearest_in_simplex(point).tolist(), abs=1e-9)


def test_two_quadratics_end_where_both_losses_are_equal():
    """√a_1·(θ − c_1) = √a_2·(c_2 − θ); FedAvg ends at Σa_i·c_i/Σa_i, where the losses differ."""
    _, state, *_ = play(AFL(lr=0.1, lambda_lr=0.01, batch_size=0), quadratics(), 120)
    roots = [a**0.5 for a in CURVATURE]
    fair = sum(r * c for r, c in zip(roots, OPTIMUM, strict=True)) / sum(roots)
    mean = sum(a * c for a, c in zip(CURVATURE, OPTIMUM, strict=True)) / sum(CURVATURE)
    assert float(state["model"]["theta"]) == pytest.approx(fair, abs=0.02)
    assert abs(mean - fair) > 0.5


@pytest.mark.thorough
def test_the_worst_client_is_better_off_than_with_fedavg():
    people = odd_clients()
    worst = {}
    for method in (AFL(lr=0.3, batch_size=0, lambda_lr=0.05), FedAvg(lr=0.3, batch_size=0)):
        _, state, *_ = play(method, people, 30)
        worst[type(method)] = max(float(loss(state["model"], c.train)) for c in people)
    assert worst[AFL] < 0.85 * worst[FedAvg]


def test_the_mean_of_all_rounds_is_evaluated_if_asked_for():
    runs = [run(AFL(**OPTIONS, averaged_iterates=True), rounds) for rounds in (1, 2, 3)]
    models = [r.last.state["model"] for r in runs]
    for name, tensor in runs[2].model("client-0").state_dict().items():
        if name in models[0] and tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack([m[name] for m in models]).mean(0))
    assert_equal(models[2], run(AFL(**OPTIONS), 3).last.state["model"])


def test_a_client_without_weight_is_not_averaged():
    state = run(AFL(lr=0.3, batch_size=0, lambda_lr=50.0), 1, odd_clients()).last.state
    assert sorted(state["shares"].values()) == [0, 0, 0, 1]
    heavy = max(state["shares"], key=state["shares"].get)
    after = run(AFL(lr=0.3, batch_size=0, lambda_lr=50.0), 2, odd_clients()).last.state["model"]
    (client,) = [c for c in odd_clients() if c.id == heavy]
    slope = slopes(state["model"], client.train)
    assert_near(after, {name: t - 0.3 * slope[name] for name, t in state["model"].items()})


def test_a_round_of_clients_without_weight_leaves_the_model_as_it_is():
    """And gives the client that took part some weight."""
    method = AFL(**OPTIONS)
    federation, state, _, replies = play(method, small_clients())
    state["shares"] = {"client-0": 1.0, "client-1": 0.0, "client-2": 0.0}
    after = method.aggregate(state, {"client-1": replies["client-1"]}, federation.server_context())
    assert_equal(after["model"], state["model"])
    assert after["shares"]["client-1"] > 0


@pytest.mark.parametrize(("field", "value"), [("lambda_lr", -1.0), ("weighted", True), ("adapters", "svd")])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"AFL: {field} must be .* got {value!r}"):
        AFL(**{field: value})
    with pytest.raises(pf.UserError, match="robust='median' is not possible"):
        AFL(robust="median")
