"""MOON: what it is without the contrast, and the contrast against its formula."""

import pytest
import torch
from closed_forms import assert_equal, assert_near
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg, Moon
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import assert_runs_equal, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}


def net():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def client():
    (found,) = small_clients(1)
    return pf.Client("one", net, found.train, found.test)


def test_without_contrast_it_is_fedavg_bit_for_bit():
    moon, fedavg = (
        pf.federate(small_clients(), m, rounds=3, workers=0) for m in (Moon(mu=0.0, **OPTIONS), FedAvg(**OPTIONS))
    )
    assert_runs_equal(moon, fedavg)
    pulled = pf.federate(small_clients(), Moon(mu=1.0, **OPTIONS), rounds=2, workers=0).last.state["model"]
    plain = pf.federate(small_clients(), FedAvg(**OPTIONS), rounds=2, workers=0).last.state["model"]
    assert not torch.equal(pulled["head.weight"], plain["head.weight"])
    assert Moon().mu > 0  # 0 as the default would be FedAvg


def test_a_first_round_has_no_model_before_and_no_contrast():
    """Where the model before is the global one, the contrast is log 2 and has no gradient."""
    start = initial_state(net, 0)
    down, method = Message({"model": start}, {"lr": 0.1}), Moon(mu=5.0, lr=0.1, batch_size=0)
    with exclusive_single_torch_thread_with_grad():
        first, own = method.local_update(down, {}, client(), 3)
        again, _ = method.local_update(down, {"previous": start}, client(), 3)
    assert_near(first.tensors["model"], again.tensors["model"])
    assert_equal(own["previous"], dict(first.tensors["model"]))


@pytest.mark.parametrize(("mu", "tau"), [(2.0, 0.5), pytest.param(0.5, 2.0, marks=pytest.mark.slow)])
def test_a_round_is_what_the_paper_says_step_by_step(mu, tau):
    """Eq. (3) and (4) in plain torch, on full batches."""
    who, eta = client(), 0.2
    start = initial_state(net, 0)
    before = {n: t + 0.3 * torch.sin(torch.arange(t.numel()).view(t.shape)) for n, t in start.items()}
    method = Moon(mu=mu, tau=tau, lr=eta, batch_size=0, local_steps=3)
    with exclusive_single_torch_thread_with_grad():
        reply, own = method.local_update(Message({"model": start}, {"lr": eta}), {"previous": before}, who, 5)
    x, y = who.train.x, who.train.y

    def z(model):
        return torch.tanh(x @ model["0.weight"].T + model["0.bias"])

    def alike(a, b):
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    theta, losses = dict(start), []
    for _ in range(3):
        leaves = {n: t.clone().requires_grad_() for n, t in theta.items()}
        near, far = ((alike(z(leaves), z(other)) / tau).exp() for other in (start, before))
        task = F.cross_entropy(z(leaves) @ leaves["2.weight"].T + leaves["2.bias"], y)
        loss = task - mu * torch.log(near / (near + far)).mean()
        theta = {
            n: t - eta * g
            for (n, t), g in zip(theta.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True)
        }
        losses.append(task.item())
    assert_near(reply.tensors["model"], theta)
    assert_equal(own["previous"], dict(reply.tensors["model"]))
    assert reply.scalars["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)  # the task's, which can be compared


def test_the_representation_can_be_named():
    """The input of the first layer is x, on which nothing that is trained has a say: no contrast."""
    start = initial_state(net, 0)
    before, down = {n: t + 0.3 for n, t in start.items()}, Message({"model": start}, {"lr": 0.1})
    with exclusive_single_torch_thread_with_grad():
        named, _ = Moon(module="0", mu=9.0, lr=0.1, batch_size=0).local_update(down, {"previous": before}, client(), 3)
        plain, _ = FedAvg(lr=0.1, batch_size=0).local_update(down, {}, client(), 3)
        assert_near(named.tensors["model"], plain.tensors["model"])
        with pytest.raises(pf.UserError, match="module='head': the network of 'one' has no such module"):
            Moon(module="head").local_update(down, {"previous": before}, client(), 3)


@pytest.mark.parametrize(("field", "value"), [("mu", -1.0), ("tau", 0.0)])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value}"):
        Moon(**{field: value})
