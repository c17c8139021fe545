"""α_i of FedPNAS's third step: its definition, that eq. 5 is eq. 4 with it, against autograd in float64, and what
Proposition 1 compares it with."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedDSNAS, FedPNAS
from polyfed.core.errors import UserError
from polyfed.core.seeds import temporary_rng_seed
from polyfed.nas.step_weights import compute_lookahead_step_weights
from polyfed.simulation.results.gradient_conflicts import measure_gradient_conflicts

ONE = {
    "channels": 4, "base_cells": 1, "base_nodes": 1, "personal_nodes": 2, "operations": ("sep_conv_3",),
    "personal_operations": ("dil_conv_3",),
}  # fmt: skip
ETA, OUTER = 0.3, 0.7


def test_the_definition():
    """Products, cosines and the mean of unit gradients, by loops."""
    with temporary_rng_seed(1):
        g, ahead = torch.randn(2, 4, 9, dtype=torch.float64)
    found = compute_lookahead_step_weights(g, ahead)
    length = lambda v: float(sum(e * e for e in v.tolist()) ** 0.5)  # noqa: E731
    mean = [sum(float(ahead[j, e]) / length(ahead[j]) for j in range(4)) / 4 for e in range(9)]
    for i in range(4):
        product = sum(float(g[i, e] * ahead[i, e]) for e in range(9))
        assert found.alpha[i].item() == pytest.approx(product)
        assert found.cosine[i].item() == pytest.approx(product / length(g[i]) / length(ahead[i]))
        assert found.federated_cosine[i].item() == pytest.approx(
            sum(float(g[i, e]) * mean[e] for e in range(9)) / length(g[i])
        )
        assert found.cosine_gap[i].item() == pytest.approx(
            abs(found.cosine[i].item() - found.federated_cosine[i].item())
        )


def test_proposition_1_is_exact_where_clients_do_not_differ():
    """The federated gradient is then each client's own: the gap is 0. Where two clients pull in opposite directions it is
    the cosine itself, and none of them agrees with L = 0; scale does not matter."""
    with temporary_rng_seed(2):
        g = torch.randn(1, 6, dtype=torch.float64)
        ahead = g + 0.2 * torch.randn(1, 6, dtype=torch.float64)
    same = compute_lookahead_step_weights(g.expand(5, -1), 3.0 * ahead.expand(5, -1))
    assert torch.allclose(same.cosine_gap, torch.zeros(5, dtype=torch.float64), atol=1e-14)
    against = compute_lookahead_step_weights(torch.cat([g, -g]), torch.cat([ahead, -100 * ahead]))
    assert torch.allclose(against.federated_cosine, torch.zeros(2, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(against.cosine, same.cosine[:2])
    none = compute_lookahead_step_weights(torch.zeros(2, 3), torch.ones(2, 3))
    assert none.cosine.tolist() == none.federated_cosine.tolist() == [0.0, 0.0]


def test_equation_5_is_equation_4_with_these_weights():
    """θ_p − (η_2/M) Σ (I − η_1 g g^T) g̃, the mean of the clients' steps, is θ_p − (η_2/M) Σ g̃_i + (η_1 η_2/M) Σ α_i g_i,
    with gradients of autograd in float64 (appendix E)."""
    method = FedPNAS(**ONE, eta=ETA)
    steps, local, ahead = [], [], []
    for client in range(3):
        with temporary_rng_seed(3):
            network = method.supernet_plan(1, 3)().double().train()
        with temporary_rng_seed(10 + client):
            x, y = torch.randn(8, 1, 6, 6, dtype=torch.float64), torch.randint(3, (8,))
        g, tilde = by_autograd(network, x, y)
        local.append(g)
        ahead.append(tilde)

        def loss_of(batch, network=network, x=x, y=y):
            network.zero_grad()
            loss = nn.functional.cross_entropy(network(x), y)
            loss.backward()
            return loss.detach()

        method.build_meta_gradient_function(network)(loss_of)
        steps.append(torch.cat([p.grad.flatten() for n, p in network.named_parameters() if n.startswith("personal.")]))
    alpha = compute_lookahead_step_weights(torch.stack(local), torch.stack(ahead)).alpha
    by_eq_4 = -OUTER * torch.stack(steps).mean(0)
    weighted = (alpha[:, None] * torch.stack(local)).mean(0)
    by_eq_5 = -OUTER * torch.stack(ahead).mean(0) + ETA * OUTER * weighted
    assert torch.allclose(by_eq_4, by_eq_5, rtol=1e-10, atol=1e-13)
    assert weighted.norm() * ETA > 1e-3 * torch.stack(ahead).mean(0).norm(), "the third step would not be seen"


def by_autograd(network, x, y, eta=ETA):
    """(g, g̃) of the personal part, from autograd alone."""
    names = [n for n, _ in network.named_parameters() if n.startswith("personal.")]
    network = copy.deepcopy(network)

    def slopes(point):
        leaves = {n: t.clone().requires_grad_() for n, t in point.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(network, leaves, (x,)), y)
        return dict(zip(names, torch.autograd.grad(loss, [leaves[n] for n in names]), strict=True))

    theta = {n: p.detach().clone() for n, p in network.named_parameters()}
    g = slopes(theta)
    tilde = slopes({n: t - eta * g[n] if n in g else t for n, t in theta.items()})
    return tuple(torch.cat([one[n].flatten() for n in names]) for one in (g, tilde))


def clients(number=3):
    made = []
    for k in range(number):
        with temporary_rng_seed(k):
            x, y = torch.randn(15, 1, 6, 6), torch.arange(15) % 3
        made.append(pf.Client(f"client-{k}", None, (x[3:], y[3:]), (x[:3], y[:3])))
    return made


@pytest.mark.thorough
def test_those_of_a_run_are_at_the_servers_theta():
    """Against autograd in float64 from the state that the run kept."""
    method = FedPNAS(**ONE, eta=ETA, lr=0.02, finetune_epochs=0)
    run = pf.federate(clients(), method, rounds=2, workers=0)
    ids, found = measure_gradient_conflicts(run)
    assert ids == ("client-0", "client-1", "client-2")
    network = method.supernet_plan(1, 3)().double().train()
    state = run.last.state
    network.load_state_dict({**network.state_dict(), **state["base"], **state["personal"]})
    pairs = [by_autograd(network, c.train.x.double(), c.train.labels) for c in clients()]
    wanted = compute_lookahead_step_weights(*(torch.stack(one) for one in zip(*pairs, strict=True)))
    for name in ("alpha", "cosine", "federated_cosine"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), rtol=2e-3, atol=2e-5), name
    assert (found.cosine_gap > 1e-3).all(), "the clients' images differ"


@pytest.mark.thorough
def test_operations_are_drawn_alike_and_adam_steps_too():
    drawing = {**ONE, "operations": ("sep_conv_3", "skip"), "personal_operations": ("dil_conv_3", "max_pool_3", "skip")}
    run = pf.federate(clients(2), FedPNAS(**drawing, inner="adam", eta=0.002), rounds=1, workers=0)
    before = copy.deepcopy(run.last.state)
    one, again, other = (measure_gradient_conflicts(run, draws=n, seed=s)[1] for n, s in ((2, 0), (2, 0), (2, 1)))
    assert torch.equal(one.alpha, again.alpha)
    assert not torch.equal(one.alpha, other.alpha)
    assert all(torch.equal(before[g][n], t) for g in before for n, t in run.last.state[g].items())


def test_what_is_refused():
    with pytest.raises(UserError, match=r"two matrices of one shape, a row per client, got \(3,\) and \(3,\)"):
        compute_lookahead_step_weights(torch.zeros(3), torch.zeros(3))
    run = pf.federate(clients(1), FedDSNAS(**ONE), rounds=1, workers=0)
    with pytest.raises(UserError, match="FedDSNAS takes no step ahead"):
        measure_gradient_conflicts(run)
    mine = pf.federate(clients(1), replace(FedPNAS(**ONE), finetune_epochs=0), rounds=1, workers=0)
    with pytest.raises(UserError, match="at least 1, got 0 and 1"):
        measure_gradient_conflicts(mine, rows=0)
