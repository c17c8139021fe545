"""FedNova: equal steps are FedAvg, unequal ones find the minimum that FedAvg misses."""

import pytest
import torch
from closed_forms import COUNT, CURVATURE, OPTIMUM, linear, linear_clients, quadratics
from halves import OPTIONS, play, run

import polyfed as pf
from polyfed.algorithms import FedAvg, FedNova
from polyfed.algorithms.global_model.fednova import sum_of_step_weights
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

BATCH = 10  # of COUNT = 10 and 30 examples: one step an epoch and three


def model_of(method, clients, rounds=2):
    return run(method, clients, rounds=rounds, evaluate_every=rounds).last.state


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.one_case
def test_if_everyone_takes_one_step_it_is_fedavg_bit_for_bit(weighted):
    """With BatchNorm's statistics, which are averaged."""
    options = {"lr": 0.05, "batch_size": 0, "weighted": weighted}
    ours, theirs = (model_of(method(**options), small_clients(), 3) for method in (FedNova, FedAvg))
    for name, tensor in theirs["model"].items():
        assert torch.equal({**ours["model"], **ours["buffers"]}[name], tensor)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.one_case
def test_with_equal_numbers_of_steps_it_is_fedavg(momentum):
    options = {"lr": 0.05, "batch_size": 8, "local_steps": 7, "momentum": momentum}
    ours, theirs = (model_of(method(**options), small_clients()) for method in (FedNova, FedAvg))
    for name, tensor in theirs["model"].items():
        found = {**ours["model"], **ours["buffers"]}[name]
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=2e-6)
    assert float(ours["steps"]["weight"]) == pytest.approx(sum_of_step_weights(7, momentum), rel=1e-6)


def test_with_unequal_numbers_of_steps_it_is_not():
    options = {"lr": 0.05, "batch_size": 8, "local_epochs": 2}
    ours, theirs = (model_of(method(**options), small_clients())["model"] for method in (FedNova, FedAvg))
    assert not torch.allclose(ours["head.weight"], theirs["head.weight"], atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_weights_of_steps_are_those_of_sgd_with_momentum(momentum, steps):
    """With gradients of 1 and a rate of 1 the parameter moves by the sum of all weights."""
    p = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=momentum)
    for _ in range(steps):
        p.grad = torch.ones(())
        optimizer.step()
    assert sum_of_step_weights(steps, momentum) == pytest.approx(-p.item(), rel=1e-6)


@pytest.mark.thorough
def test_two_quadratics_come_near_the_minimum_that_fedavg_misses():
    """Σ p_i·L_i with one step and three: FedAvg counts the second client thrice."""
    options = {"lr": 0.005, "batch_size": BATCH}
    p = [n / sum(COUNT) for n in COUNT]
    pull = [share * a for share, a in zip(p, CURVATURE, strict=True)]
    minimum = sum(w * c for w, c in zip(pull, OPTIMUM, strict=True)) / sum(pull)
    found, fedavg = (model_of(m(**options), quadratics(), 800)["model"]["theta"].item() for m in (FedNova, FedAvg))
    assert abs(fedavg - minimum) > 0.3
    assert abs(found - minimum) < abs(fedavg - minimum) / 10
    steps = [n / BATCH for n in COUNT]
    drifted = [w * (1 - (1 - 0.005 * a) ** t) / t for w, a, t in zip(p, CURVATURE, steps, strict=True)]
    expected = sum(w * c for w, c in zip(drifted, OPTIMUM, strict=True)) / sum(drifted)
    assert found == pytest.approx(expected, abs=1e-4)  # exactly there: mean steps of several are not one step


def test_a_reply_has_the_mean_step_and_buffers_as_they_are():
    clients = small_clients()
    _, _, _, ours = play(FedNova(**OPTIONS), clients)
    _, _, _, theirs = play(FedAvg(**OPTIONS), clients)
    draw = initial_state(clients[0].model, 3)
    for c in clients:
        weight = ours[c.id].tensors["steps"]["weight"].item()
        assert weight == pytest.approx(sum_of_step_weights(-(-len(c.train) // 8), 0.5))
        for name, tensor in theirs[c.id].tensors["model"].items():
            found = ours[c.id].tensors["model"][name]
            if "running" in name or "num_batches" in name:
                assert torch.equal(found, tensor)
            else:
                torch.testing.assert_close(found, draw[name] + (tensor - draw[name]) / weight, rtol=1e-5, atol=1e-6)


def test_what_is_evaluated_is_sent_without_the_number_of_steps():
    federation, state, _, _ = play(FedNova(**OPTIONS), small_clients())
    sent = {
        purpose: set(FedNova(**OPTIONS).dispatch(state, federation.client_info("client-0", 2, purpose)).tensors)
        for purpose in ("local", "personal")
    }
    assert sent == {"local": {"model", "steps"}, "personal": {"model"}}


def test_it_runs_on_secure_sums():
    plain, secure = (
        pf.federate(linear_clients(), FedNova(lr=0.1, batch_size=8), rounds=2, workers=0, secure=secure).last.state
        for secure in (False, True)
    )
    for name in linear().state_dict():
        torch.testing.assert_close(plain["model"][name], secure["model"][name], rtol=1e-3, atol=1e-3)


def test_without_weights_it_says_that_steps_show():
    assert "form" in FedNova(weighted=False).discloses
    assert "form" not in FedNova().discloses


@pytest.mark.parametrize(
    "wrong", [{"optimizer": "adam"}, {"nesterov": True, "momentum": 0.9}, {"warmup_steps": 2},
              {"optimizer_options": {"dampening": 0.1}}, {"adapters": "svd"}],
)  # fmt: skip
def test_local_steps_of_unknown_weights_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"FedNova: {next(iter(wrong))} must be"):
        FedNova(**wrong)
