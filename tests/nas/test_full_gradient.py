"""Eq. 2 as it is printed, through all operations of an edge (`gradient="full"`): against plain torch, and against
"chosen"."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyfed.algorithms import CAFedPNAS, FedPNAS
from polyfed.core.seeds import temporary_rng_seed
from polyfed.nas import SupernetPlan, gumbel_noise_like, plan_cell_stacks, sample_operations
from tests.few_cases import few

TEMPERATURE = 0.7


def supernet(context="free", per="example", dtype=torch.float64):
    base, personal = plan_cell_stacks(base_cells=1, personal_cells=1)
    with temporary_rng_seed(0):
        network = SupernetPlan(1, 3, 4, base, personal, context=context, per=per)().to(dtype)
        for name, parameter in network.named_parameters():
            if "samplers" in name or parameter.dim() == 1:
                nn.init.uniform_(parameter, -0.4, 0.4) if "samplers" in name else nn.init.uniform_(parameter, 0.5, 1.5)
    network.temperature = TEMPERATURE
    return network.train()


def batch(dtype=torch.float64, number=7):
    with temporary_rng_seed(1):
        return torch.randn(number, 1, 8, 8, dtype=dtype), torch.arange(number) % 3


def slopes(network, form, x, y, seed=5):
    """(logits, gradients by name) of one draw."""
    network.gradient = form
    network.zero_grad()
    with temporary_rng_seed(seed):
        logits = network(x)
    F.cross_entropy(logits, y).backward()
    return logits.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in network.named_parameters()}


def plain(network, x, seed=5):
    """Algorithm 2 with eq. 2 by loops over edges, operations and examples: every operation of an edge times its Z[k],
    whose value is one-hot and whose gradient is the softmax's. A minibatch goes through an operation as a whole, but for
    those that chose it, which go together, as everywhere in polyfed."""

    previous = skip = network.base["stem"](x)
    with temporary_rng_seed(seed):
        for cell, sampler in network.cells_with_samplers():
            logits = sampler(F.adaptive_avg_pool2d(x, 8), previous)
            if logits.dim() == 3 and network.plan.per == "batch":
                logits = F.softmax(logits, -1).mean(0).log()
            perturbed = logits + gumbel_noise_like(logits)
            soft = F.softmax(perturbed / TEMPERATURE, -1)
            z = F.one_hot(perturbed.argmax(-1), logits.shape[-1]) + soft - soft.detach()
            z = z.expand(len(x), *z.shape[-2:])
            previous, skip = by_definition(cell, previous, skip, z), previous
    return network.personal["classifier"](previous.mean((2, 3)))


def by_definition(cell, previous, skip, z):
    """v_j = Σ_i Z_ijᵀ·O_ij(v_i)."""
    values = [previous] if cell.plan.inputs == 1 else [previous, cell.skip(skip)]
    for j in range(cell.plan.nodes):
        terms = []
        for number, (i, to) in enumerate(cell.plan.edges):
            if to != j + cell.plan.inputs:
                continue
            for k, operation in enumerate(cell.operations[number].values()):
                weight = z[:, number, k].view(-1, 1, 1, 1)
                chosen = weight.detach() > 0.5
                out = operation(values[i])
                group = chosen.flatten()
                if 0 < int(group.sum()) < len(group):
                    out = out.clone()
                    out[group] = operation(values[i][group])
                terms.append(weight * out)
        values.append(torch.stack(terms).sum(0))
    return values[-1]


CASES = few([("free", "example"), ("aware", "example"), ("aware", "batch")], {("free", "example"), ("aware", "batch")})


@pytest.mark.parametrize(("context", "per"), CASES)
@pytest.mark.one_case
def test_gradients_are_those_of_equation_2_with_every_operation(context, per):
    """To the samplers, context-free or not, and to all weights; operations that were not drawn have zero there."""
    network = supernet(context, per)
    x, y = batch()
    expected = plain(copy.deepcopy(network), x)
    other = copy.deepcopy(network)
    F.cross_entropy(plain(other, x), y).backward()
    logits, found = slopes(network, "full", x, y)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-12)
    reached = 0
    for name, parameter in other.named_parameters():
        by_hand = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine = torch.zeros_like(parameter) if found[name] is None else found[name]
        assert torch.allclose(mine, by_hand, rtol=1e-6, atol=1e-9), name
        reached += ".samplers." in name and bool(mine.abs().max() > 1e-6)
    assert reached, "no sampler has a gradient"


@pytest.mark.parametrize(("context", "per"), CASES)
@pytest.mark.one_case
def test_the_forward_pass_the_weights_and_the_statistics_are_those_of_the_chosen_ones(context, per):
    """Only the samplers' gradients differ: outputs, running statistics and the gradients of weights that lie behind no
    sampler do not, bit for bit. A weight that was not drawn has no gradient, so that neither Adam nor momentum moves it."""
    x, y = batch(torch.float32)
    networks = {form: supernet(context, per, torch.float32) for form in ("chosen", "full")}
    (one, before), (other, after) = (slopes(networks[form], form, x, y) for form in networks)
    assert torch.equal(one, other)
    of_full = networks["full"].state_dict()  # with BatchNorm's means, variances and counters
    assert all(torch.equal(t, of_full[n]) for n, t in networks["chosen"].state_dict().items())
    assert [n for n, g in before.items() if g is None] == [n for n, g in after.items() if g is None]
    assert any(g is None for g in after.values())
    for name, slope in before.items():
        if context == "free" and slope is not None and ".samplers." not in name:
            assert torch.equal(slope, after[name]), name
    weights = [n for n, g in before.items() if g is not None and n.startswith("personal.cells")]
    assert weights
    assert all(torch.equal(before[n], after[n]) for n in weights)  # the last cell: no sampler comes after it
    differing = [
        n for n, g in before.items() if ".samplers." in n and g is not None and not torch.allclose(g, after[n])
    ]
    assert differing, "both forms have the same gradient"


def test_the_softmax_part_against_finite_differences():
    """Σ_k c_k·∂softmax((g + log π)/τ)[k]/∂log π is what `draw` gives for ∂L/∂Z = c."""
    with temporary_rng_seed(2):
        logits, c = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    with temporary_rng_seed(3):
        choice = sample_operations(leaf, TEMPERATURE, "full")
    with temporary_rng_seed(3):
        noise = gumbel_noise_like(logits)
    assert torch.equal(choice.one_hot.detach(), F.one_hot((logits + noise).argmax(-1), 5).double())
    assert choice.scale is None
    (slope,) = torch.autograd.grad((c * choice.one_hot).sum(), leaf)
    h = 1e-6
    for edge in range(2):
        for k in range(5):
            ends = []
            for sign in (1, -1):
                moved = logits.clone()
                moved[edge, k] += sign * h
                ends.append((c * torch.softmax((moved + noise) / TEMPERATURE, -1)).sum().item())
            assert slope[edge, k].item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("context", "expected"), [("free", {"chosen": 1, "full": 9}), ("aware", {"full": 9 + 1})])
def test_operations_evaluated_on_an_edge(context, expected):
    """Context-free: 1, or once each. Where images choose, each operation that somebody chose runs for those, and all once
    more for the gradient."""
    network = supernet(context)
    x, y = batch()
    edge, calls = network.base["cells"][0].operations[0], []
    for operation in edge.values():
        operation.register_forward_hook(lambda *_: calls.append(1))
    for form, number in expected.items():
        calls.clear()
        slopes(network, form, x, y)
        assert len(calls) >= number if context == "aware" else len(calls) == number
        assert len(calls) <= 18


@pytest.mark.parametrize("method", [FedPNAS, CAFedPNAS])
def test_the_meta_step_with_full_gradients(method):
    """g̃ − η·g·(gᵀg̃), both of plain torch's eq. 2, each pass with the draw that it made; statistics count one pass."""
    method = method(
        channels=4, base_cells=1, base_nodes=1, personal_nodes=1, operations=("sep_conv_3", "max_pool_3", "skip"),
        personal_operations=("sep_conv_3", "skip"), eta=0.3, gradient="full",
    )  # fmt: skip
    with temporary_rng_seed(3):
        network = method.supernet_plan(1, 3)().double().train()
    network.gradient, network.temperature = method.gradient, TEMPERATURE
    x, y = batch()
    personal = [n for n, _ in network.named_parameters() if n.startswith("personal.")]
    start = copy.deepcopy(network)

    def by_hand(module, seed):
        module.zero_grad()
        F.cross_entropy(plain(module, x, seed), y).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}

    first = by_hand(copy.deepcopy(start), 11)
    ahead_at = copy.deepcopy(start)
    with torch.no_grad():
        for name, parameter in ahead_at.named_parameters():
            if name in personal:
                parameter -= 0.3 * first[name]
    second = by_hand(ahead_at, 12)
    seeds = iter((11, 12))

    def loss_of(_):
        network.zero_grad()
        with temporary_rng_seed(next(seeds)):
            loss = F.cross_entropy(network(x), y)
        loss.backward()
        drawn.append({n for n, p in network.named_parameters() if p.grad is not None})
        return loss.detach()

    drawn = []
    method.build_meta_gradient_function(network)(loss_of)
    both = drawn[0] & drawn[1]
    alpha = sum((first[n] * second[n]).sum() for n in personal if n in both)
    for name, parameter in network.named_parameters():
        wanted = second[name] - (0.3 * alpha * first[name] if name in personal and name in both else 0.0)
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(mine, wanted, rtol=1e-6, atol=1e-9), name
    assert {int(b) for n, b in network.named_buffers() if "batches_tracked" in n} <= {0, 1}


def test_the_form_of_the_gradient_is_no_part_of_the_seed_of_the_first_weights():
    """Attributes of a new network are: another one would change the bits of all runs before."""
    network = supernet()
    assert network.gradient == "chosen"
    assert "gradient" not in vars(network)
