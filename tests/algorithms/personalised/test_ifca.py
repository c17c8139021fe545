"""IFCA: FedAvg at k = 1, and which model a client trains."""

import pytest
import torch
from closed_forms import assert_equal, assert_near, linear, linear_clients, loss, slopes

import polyfed as pf
from polyfed.algorithms import IFCA, FedAvg
from polyfed.core.algorithm import ClientInfo, Message
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients, without_durations

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}


@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_model_is_fedavg_bit_for_bit(weighted):
    ifca, fedavg = (
        pf.federate(small_clients(), m(weighted=weighted, **OPTIONS, **k), rounds=3, workers=0)
        for m, k in ((IFCA, {"k": 1}), (FedAvg, {}))
    )
    assert_equal(ifca.last.state["model/0"], fedavg.last.state["model"])
    for ours, theirs in zip(without_durations(ifca.history), without_durations(fedavg.history), strict=True):
        for client, row in ours["clients"].items():
            assert row["loss"] == theirs["clients"][client]["loss"]


def test_rounds_are_what_the_paper_says_step_by_step():
    """In plain torch: each client takes the model of the least loss on its examples; the mean is over those who did."""
    clients, eta, steps = linear_clients(), 0.3, 3
    for client in clients[1:]:  # two that agree, and one that says otherwise
        client.train.y.copy_((client.train.y + 1) % 3)
    method = IFCA(k=3, lr=eta, batch_size=0, local_steps=steps)
    found = pf.federate(clients, method, rounds=2, workers=0)
    models = list(method.server_init(found.federation.server_context()).values())
    assert_equal(models[0], initial_state(linear, 0))
    assert not torch.equal(models[1]["weight"], models[2]["weight"])
    for _ in range(2):
        members = [[], [], []]
        for client in clients:
            losses = [float(loss(model, client.train)) for model in models]
            j = losses.index(min(losses))
            y = dict(models[j])
            for _ in range(steps):
                g = slopes(y, client.train)
                y = {n: y[n] - eta * g[n] for n in y}
            members[j].append(y)
        models = [
            {n: sum(y[n] for y in mine) / len(mine) for n in model} if mine else model
            for model, mine in zip(models, members, strict=True)
        ]
        assert any(not mine for mine in members)  # whom nobody takes stays
    for j, model in enumerate(models):
        assert_near(found.last.state[f"model/{j}"], model)
    for client in clients:
        best = min(models, key=lambda model: float(loss(model, client.train)))
        assert_near(found.model(client.id).state_dict(), best)


def test_k_models_go_down_and_one_comes_up():
    run = pf.federate(small_clients(), IFCA(k=3, **OPTIONS), rounds=1, workers=0)
    for row in run.history[0]["clients"].values():
        assert row["bytes_up"] < row["bytes_down"] / 2


def test_a_reply_holds_one_of_the_models():
    run = pf.federate(small_clients(), IFCA(**OPTIONS), rounds=1, workers=0)
    method, state = run.federation.algorithm, run.last.state
    down = method.dispatch(state, ClientInfo("client-0"))
    for groups in ({}, dict(state), {"model/7": state["model/0"]}):
        with pytest.raises(ValueError, match="of the 2 models; a client sends the one that it trained"):
            method.reply_spec(state, down, Message(groups))


@pytest.mark.parametrize(("field", "value"), [("k", 0), ("buffers", "local"), ("adapters", "svd")])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value!r}"):
        IFCA(**{field: value})
