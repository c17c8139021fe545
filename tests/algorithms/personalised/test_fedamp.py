"""FedAMP: training alone at one end, and the mixture and the pull against their formulas."""

import numpy as np
import pytest
import torch
from closed_forms import assert_equal, assert_near, linear, linear_clients, slopes

import polyfed as pf
from polyfed.algorithms import FedAMP, Local
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}


def test_without_pull_it_is_local_bit_for_bit():
    amp, local = (
        pf.federate(small_clients(), m, rounds=3, workers=0) for m in (FedAMP(lam=0.0, **OPTIONS), Local(**OPTIONS))
    )
    pulled = pf.federate(small_clients(), FedAMP(lam=1.0, **OPTIONS), rounds=3, workers=0)
    for client in small_clients():
        assert_equal(amp.model(client.id).state_dict(), local.model(client.id).state_dict())
        assert not torch.equal(pulled.model(client.id).head.weight, local.model(client.id).head.weight)


def state_of(method, models):
    infos = tuple(ClientInfo(name) for name in models)
    state = method.server_init(ServerContext(0, 5, infos, linear))
    replies = {name: Message({"model": model}, {}) for name, model in models.items() if model}
    return method.aggregate(state, replies, None), infos


def drawn(number, scale):
    rng = np.random.default_rng(3)
    start = initial_state(linear, 0)
    return {
        f"c{k}": {n: t + scale * torch.from_numpy(rng.normal(size=tuple(t.shape))).float() for n, t in start.items()}
        for k in range(number)
    }


def flat(model):
    return np.concatenate([model[n].numpy().astype(np.float64).ravel() for n in ("weight", "bias")])


def test_the_mixture_is_a_gradient_step_on_the_attraction():
    """In numpy: u_i = w_i − α·Σ_j A'(‖w_i − w_j‖²)(w_i − w_j), the norm squared."""
    models, sigma, alpha = drawn(4, 0.3), 2.0, 0.4
    method = FedAMP(sigma=sigma, alpha=alpha, lam=3.0)
    state, infos = state_of(method, models)
    w = {name: flat(model) for name, model in models.items()}
    for who in infos:
        xi = {j: alpha * np.exp(-((w[who.id] - w[j]) ** 2).sum() / sigma) / sigma for j in w if j != who.id}
        u = (1 - sum(xi.values())) * w[who.id] + sum(xi[j] * w[j] for j in xi)
        down = method.dispatch(state, who)
        np.testing.assert_allclose(flat(down.tensors["cloud"]), u, rtol=1e-5, atol=1e-6)
        assert down.scalars["pull"] == pytest.approx(3.0 / 0.4)
    assert method.dispatch(state, ClientInfo("c0", purpose="personal")).nbytes == 0


def test_the_near_attract_more_than_the_far():
    """And by default distances are measured by those of the round, so that the scale of weights does not matter."""
    for scale in (1.0, 30.0):
        start = {n: torch.zeros_like(t) for n, t in initial_state(linear, 0).items()}
        at = {"a": 0.0, "b": 0.1, "far": 1.0}
        models = {name: {n: t + scale * x for n, t in start.items()} for name, x in at.items()}
        method = FedAMP()
        state, (a, *_) = state_of(method, models)
        u = method.dispatch(state, a).tensors["cloud"]["bias"] / scale
        d = {j: 21 * x**2 for j, x in at.items() if j != "a"}  # 18 weights and 3 biases
        near = {j: np.exp(-4 * d[j] / np.mean(list(d.values()))) for j in d}
        xi = {j: near[j] / sum(near.values()) * 2 / 3 for j in d}  # ξ_ii is 1/N
        torch.testing.assert_close(u, torch.full_like(u, sum(xi[j] * at[j] for j in xi)), rtol=1e-4, atol=1e-6)
        assert xi["b"] > 10 * xi["far"]


def test_a_model_that_nobody_has_trained_is_left_out():
    models = drawn(3, 0.3)
    method = FedAMP()
    alone, infos = state_of(method, {"c0": models["c0"], "c1": {}, "c2": {}})
    assert "cloud" not in method.dispatch(alone, infos[0]).tensors  # nobody else
    assert_near(method.dispatch(alone, infos[1]).tensors["cloud"], {
        n: t + (models["c0"][n] - t) * 2 / 3 for n, t in alone["model"].items()
    })  # fmt: skip


def test_a_round_is_what_the_paper_says_step_by_step():
    """In plain torch: from w_i, with the pull to u_i."""
    (client,), eta, pull = linear_clients(1), 0.1, 2.5
    models = drawn(2, 0.4)
    w, u = models.values()
    method = FedAMP(lr=eta, batch_size=0, local_steps=4)
    with exclusive_single_torch_thread_with_grad():
        reply, own = method.local_update(Message({"cloud": u}, {"lr": eta, "pull": pull}), {"model": w}, client, 5)
    for _ in range(4):
        g = slopes(w, client.train)
        w = {n: w[n] - eta * (g[n] + pull * (w[n] - u[n])) for n in w}
    assert_near(reply.tensors["model"], w)
    assert_equal(own["model"], dict(reply.tensors["model"]))


@pytest.mark.parametrize(("field", "value"), [("lam", -1.0), ("sigma", 0.0), ("alpha", 0.0), ("buffers", "average")])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value!r}"):
        FedAMP(**{field: value})
