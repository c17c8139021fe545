"""The step of FedPNAS: the inner step, and the direction of the outer one against autograd (section 3.2, algorithm 1)."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from polyfed.algorithms import FedPNAS
from polyfed.core.algorithm import Client, ClientInfo, DataSpec, ServerContext
from polyfed.core.seeds import temporary_rng_seed, torch_generator

SMALL = {
    "channels": 4, "base_cells": 1, "base_nodes": 1, "personal_nodes": 1,
    "operations": ("sep_conv_3", "max_pool_3", "skip"), "personal_operations": ("sep_conv_3", "skip"),
}  # fmt: skip
ONE = {**SMALL, "operations": ("sep_conv_3",), "personal_operations": ("dil_conv_3",)}


def by_hand(network, eta, x, y, second_order):
    """The first-order expression of section 3.2, from autograd's gradients alone: (∇_b, ∇_p) of a network without draws."""
    names = [n for n, _ in network.named_parameters()]
    theta = {n: p.detach().clone() for n, p in network.named_parameters()}

    def gradients(point):
        leaves = {n: t.clone().requires_grad_() for n, t in point.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(network, leaves, (x,)), y)
        return dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    personal = [n for n in names if n.startswith("personal.")]
    g = gradients(theta)
    ahead = gradients({n: theta[n] - eta * g[n] if n in personal else theta[n] for n in names})
    product = sum((g[n] * ahead[n]).sum() for n in personal)
    if second_order == "none":
        return ahead
    return {n: ahead[n] - eta * product * g[n] if n in personal else ahead[n] for n in names}


def exact(network, eta, x, y):
    """The true gradient of L(θ_b, θ_p − η∇L), through the inner step."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    personal = [n for n in leaves if n.startswith("personal.")]

    def loss(point):
        return nn.functional.cross_entropy(torch.func.functional_call(network, point, (x,)), y)

    inner = torch.autograd.grad(loss(leaves), [leaves[n] for n in personal], create_graph=True)
    moved = leaves | {n: leaves[n] - eta * s for n, s in zip(personal, inner, strict=True)}
    return dict(zip(leaves, torch.autograd.grad(loss(moved), list(leaves.values())), strict=True))


def step_direction(method, network, x, y):
    """What `meta_gradient` leaves in `grad`, with the number of passes that it took."""
    passes = []

    def loss_of(batch):
        network.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        passes.append(batch)
        return loss.detach()

    method.build_meta_gradient_function(network)(loss_of)
    return {n: p.grad.clone() for n, p in network.named_parameters()}, passes


def double_network(eta=0.3):
    method = FedPNAS(**{**ONE, "personal_nodes": 2}, eta=eta)
    with temporary_rng_seed(3):
        network = method.supernet_plan(1, 3)().double().train()
        x, y = torch.randn(10, 1, 6, 6, dtype=torch.float64), torch.arange(10) % 3
    return method, network, x, y


@pytest.mark.parametrize("second_order", ["outer_product", "none"])
def test_meta_gradient_is_the_first_order_expression(second_order):
    method, network, x, y = double_network()
    before = {n: t.clone() for n, t in network.state_dict().items()}
    expected = by_hand(copy.deepcopy(network), 0.3, x, y, second_order)
    found, passes = step_direction(replace(method, second_order=second_order), network, x, y)
    assert passes == [0, 0]  # exactly two passes, of the same minibatch (algorithm 1)
    for name, slope in expected.items():
        assert torch.allclose(found[name], slope, rtol=1e-9, atol=1e-12), name
    after = network.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if "running" not in n and "batches" not in n)
    assert {int(after[n]) for n in after if "batches_tracked" in n} == {1}  # a step counts as one in BatchNorm


def visited(method, network, x, y, steps=1):
    """(g, θ̃_p) of each step: the personal gradients of its first pass, and the parameters at which the second is taken."""
    personal = [p for n, p in network.named_parameters() if n.startswith("personal.")]
    seen = []

    def loss_of(batch):
        point = [p.detach().clone() for p in personal]
        network.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        seen.append((point, [p.grad.clone() for p in personal]))
        return loss.detach()

    direction = method.build_meta_gradient_function(network)
    for _ in range(steps):
        direction(loss_of)
    return [(seen[k][0], seen[k][1], seen[k + 1][0]) for k in range(0, 2 * steps, 2)]


def test_the_inner_step():
    """SGD's is θ_p − ηg, bit for bit; Adam's first is θ_p − ηg/(|g| + ε), and later ones have the moments of those before,
    written out (Kingma and Ba 2015)."""
    method, network, x, y = double_network()
    ((theta, g, ahead),) = visited(method, network, x, y)
    assert all(torch.equal(a, torch.sub(t, s, alpha=0.3)) for t, s, a in zip(theta, g, ahead, strict=True))
    found = visited(replace(method, inner="adam", eta=0.01), network, x, y, steps=3)
    for k, (t, s, a) in enumerate(zip(*found[0], strict=True)):
        assert torch.allclose(a, t - 0.01 * s / (s.abs() + 1e-8), rtol=1e-12, atol=1e-14), k
    for k in range(len(found[0][0])):
        first, second = torch.zeros_like(found[0][1][k]), torch.zeros_like(found[0][1][k])
        for step, (t, s, a) in enumerate(((t[k], s[k], a[k]) for t, s, a in found), 1):
            first, second = 0.9 * first + 0.1 * s, 0.999 * second + 0.001 * s**2
            move = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            assert torch.allclose(a, t - 0.01 * move, rtol=1e-10, atol=1e-12)


def test_what_is_differentiated_through_with_an_inner_step_of_adam():
    """The authors' expression, g̃ − η·g·(gᵀg̃) with g̃ at Adam's θ̃_p, from autograd's gradients alone; without the outer
    product g̃ itself. The true derivative of Adam's first step is I − η·H·diag(ε/(|g| + ε)²) (checked against finite
    differences): the identity where |g| is large against ε, so that "none" is nearly exact, and the outer product is not."""
    method, network, x, y = double_network()
    method, eta = replace(method, inner="adam", eta=0.01), 0.01
    names = [n for n, _ in network.named_parameters()]
    personal = [n for n in names if n.startswith("personal.")]
    theta = {n: p.detach().clone() for n, p in network.named_parameters()}

    def loss(point):
        return nn.functional.cross_entropy(torch.func.functional_call(network, point, (x,)), y)

    def objective(point):
        """L(θ_b, θ̃_p(θ_b, θ_p)), with everything that it depends on."""
        inner = torch.autograd.grad(loss(point), [point[n] for n in personal], create_graph=True)
        moves = {n: s / (s.abs() + 1e-8) for n, s in zip(personal, inner, strict=True)}
        return loss(point | {n: point[n] - eta * move for n, move in moves.items()})

    def leaves(point):
        return {n: t.clone().requires_grad_() for n, t in point.items()}

    at = leaves(theta)
    g = dict(zip(personal, torch.autograd.grad(loss(at), [at[n] for n in personal]), strict=True))
    moved = leaves({n: theta[n] - eta * g[n] / (g[n].abs() + 1e-8) if n in personal else theta[n] for n in names})
    ahead = dict(zip(names, torch.autograd.grad(loss(moved), list(moved.values())), strict=True))
    product = sum((g[n] * ahead[n]).sum() for n in personal)
    for second_order, factor in (("outer_product", eta * product), ("none", 0.0)):
        found, _ = step_direction(replace(method, second_order=second_order), copy.deepcopy(network), x, y)
        for n in names:
            wanted = ahead[n] - factor * g[n] if n in personal else ahead[n]
            assert torch.allclose(found[n], wanted, rtol=1e-9, atol=1e-12), n
    at = leaves(theta)
    true = dict(zip(names, torch.autograd.grad(objective(at), list(at.values())), strict=True))
    at = leaves(theta)
    inner = torch.autograd.grad(loss(at), [at[n] for n in personal], create_graph=True)
    weighted = sum(
        (s * (1e-8 / (s.detach().abs() + 1e-8) ** 2 * ahead[n])).sum() for n, s in zip(personal, inner, strict=True)
    )
    hessian = torch.autograd.grad(weighted, [at[n] for n in personal])  # H·diag(…)·g̃
    for n, h in zip(personal, hessian, strict=True):
        assert torch.allclose(true[n], ahead[n] - eta * h, rtol=1e-7, atol=1e-10), n
    name, h = "personal.classifier.weight", 1e-6
    change = torch.zeros_like(theta[name])
    change[1, 2] = h
    ends = [objective(leaves({**theta, name: theta[name] + sign * change})).item() for sign in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(true[name][1, 2].item(), rel=1e-4, abs=1e-8)
    large = torch.cat([g[n].abs().flatten() for n in personal]) > 1e-2
    flat = {k: torch.cat([t[n].flatten() for n in personal])[large] for k, t in (("true", true), ("none", ahead))}
    assert large.sum() > 10
    assert torch.allclose(flat["none"], flat["true"], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("eta", [0.0, 0.3])
@pytest.mark.one_case
def test_the_meta_gradient_where_operations_are_drawn(eta):
    """g̃ − η·g·(gᵀg̃) over weights and samplers of the personal stack, each pass with the draw that it made; and an operation
    that the second pass did not use has no gradient, so that neither Adam nor momentum moves it."""
    method = FedPNAS(**{**SMALL, "personal_nodes": 2}, eta=eta)
    with temporary_rng_seed(3):
        network = method.supernet_plan(1, 3)().double().train()
    x, y = torch.randn(10, 1, 6, 6, dtype=torch.float64), torch.arange(10) % 3
    names, slopes, unused = [n for n, _ in network.named_parameters()], [], 0

    def loss_of(batch):
        network.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        slopes.append({n: None if p.grad is None else p.grad.clone() for n, p in network.named_parameters()})
        return loss.detach()

    for seed in range(8):
        slopes.clear()
        with temporary_rng_seed(seed):
            method.build_meta_gradient_function(network)(loss_of)
        (g, ahead), found = slopes, {n: p.grad for n, p in network.named_parameters()}
        personal = [n for n in names if n.startswith("personal.")]
        assert any("logits" in n for n in personal), "no sampler in the personal stack"
        both = [n for n in personal if g[n] is not None and ahead[n] is not None]
        alpha = sum((g[n] * ahead[n]).sum() for n in both)
        for n in names:
            if ahead[n] is None:
                assert found[n] is None, n
                unused += n in personal and g[n] is not None
            else:
                correction = eta * alpha * g[n] if n in both else 0.0
                assert torch.allclose(found[n], ahead[n] - correction, rtol=1e-10, atol=1e-13), n
    assert unused, "both passes always drew the same operations"


def test_cosine_with_the_true_second_order_gradient(record_property):
    """Base part and personal part, printed; the base part is exact but for the inner step's dependence on θ_b."""
    for eta in (0.01, 0.1, 0.3):
        method, network, x, y = double_network(eta)
        found, _ = step_direction(method, network, x, y)
        true = exact(network, eta, x, y)
        for part in ("base.", "personal."):
            a, b = (torch.cat([t[n].flatten() for n in t if n.startswith(part)]) for t in (found, true))
            cosine = float(a @ b / (a.norm() * b.norm()))
            print(f"eta {eta}: cosine of {part[:-1]} with the true gradient {cosine:.4f}")
            record_property(f"cosine {part[:-1]} at {eta}", cosine)
            assert cosine > (0.99 if eta == 0.01 else 0.5)


def test_without_the_outer_product_a_step_is_that_of_per_fedavg_on_the_personal_part():
    """First-order Per-FedAvg: w ← w − β∇f(w̃), here with only the personal part moved to w̃ (identity 10, η > 0)."""
    method = FedPNAS(**ONE, eta=0.2, second_order="none", lr=0.1, optimizer="sgd", batch_size=0, finetune_epochs=0)
    x, y = torch.randn(20, 1, 6, 6, generator=torch_generator(7)), torch.arange(20) % 3
    client = Client("client-0", None, (x[6:], y[6:]), (x[:6], y[:6]))
    state = method.server_init(ServerContext(0, 1, (ClientInfo(client.id),), data_spec=DataSpec((1, 6, 6), 3)))
    reply, _ = method.local_update(method.dispatch(state, ClientInfo(client.id)), {}, client, 5)
    network = method.supernet_plan(1, 3)().train()
    network.load_state_dict({**network.state_dict(), **state["base"], **state["personal"]})
    x, y = client.train.x, client.train.labels
    ahead = by_hand(network, 0.2, x, y, "none")
    for group in ("base", "personal"):
        for name, weight in reply.tensors[group].items():
            expected = state[group][name] - 0.1 * ahead[name]
            assert torch.allclose(weight, expected, rtol=1e-4, atol=1e-5), name
