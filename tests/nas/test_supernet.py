"""The supernet: cells against the definition, grouping against the naive loop, what was found against the supernet."""

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.buffers import recompute_norm_statistics
from polyfed.core.seeds import temporary_rng_seed
from polyfed.nas import (  # fmt: skip
    OPERATION_NAMES,
    SMALL_OPERATION_NAMES,
    Cell,
    CellPlan,
    Network,
    OperationChoice,
    SampledNetwork,
    SupernetPlan,
    build_network_with_operations,
    build_operations,
    count_edge_operation_parameters,
    describe_network,
    gumbel_noise_like,
    load_network,
    most_probable_network,
    operation_probabilities,
    plan_cell_stacks,
    rebuild_network,
)
from polyfed.nas.cells import _scale_by_choice, apply_chosen_operations
from polyfed.nas.operations import GroupedNorm
from tests.few_cases import few


def supernet(context="free", seed=0, **fields):
    base, personal = plan_cell_stacks(base_cells=2, base_nodes=2, personal_nodes=1)
    with temporary_rng_seed(seed):
        network = SupernetPlan(1, 3, 4, base, personal, context=context, **fields)()
        for name, parameter in network.named_parameters():
            if "samplers" in name:
                nn.init.normal_(parameter, std=1.0 if context == "free" else 0.2)
            elif parameter.dim() == 1:  # BatchNorm's weights and biases, which start alike everywhere
                nn.init.uniform_(parameter, 0.5, 1.5)
    return network


def images(number=6, seed=1, size=9):
    with temporary_rng_seed(seed):
        return torch.randn(number, 1, size, size)


def test_form_of_the_paper():
    base, personal = plan_cell_stacks()
    assert [cell.inputs for cell in base + personal] == [2, 2, 2, 1]
    assert [cell.reduces for cell in base + personal] == [False, True, True, True]
    assert {names for cell in base for names in cell.candidates} == {OPERATION_NAMES}
    assert {names for cell in personal for names in cell.candidates} == {SMALL_OPERATION_NAMES}
    network = SupernetPlan(3, 10, 16, base, personal)()
    # A base edge counts as in Table 3.
    assert sum(p.numel() for p in next(network.cells_with_samplers())[0].operations[0].parameters()) == 9_184


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("channels", "edge", "master"), [pytest.param(32, 29_632, 948_224, marks=pytest.mark.slow), (16, 9_184, 293_888)]
)
def test_table_3_counts_four_and_four_cells_with_all_operations_on_every_edge(channels, edge, master):
    """ "Total of 32 edges". A network of this form has nothing else on its edges but what a skip of stride 2 is made of:
    C² weights and a BatchNorm, which the table does not count."""
    base, personal = plan_cell_stacks(4, 4, 2, 2, OPERATION_NAMES, OPERATION_NAMES)
    cells = base + personal
    assert (sum(len(cell.edges) for cell in cells), 32 * edge) == (32, master)
    with torch.device("meta"):
        network = SupernetPlan(3, 10, channels, base, personal)()
    on_edges = sum(p.numel() for cell, _ in network.cells_with_samplers() for p in cell.operations.parameters())
    halved = sum(cell.reduces * (i < cell.inputs) for cell in cells for i, _ in cell.edges)
    assert halved == 10
    assert on_edges == master + halved * (channels**2 + 2 * channels)
    assert count_edge_operation_parameters(network.plan) == master
    assert count_edge_operation_parameters(SupernetPlan(3, 10, channels, *plan_cell_stacks())) == 15 * edge + 3 * sum(
        p.numel() for p in build_operations(channels, SMALL_OPERATION_NAMES).parameters()
    )  # section 3.1's form, the default


def test_the_number_of_architectures_is_what_the_pages_say():
    """The paper's 2^40 is of neither form; the wrong numbers would be seen."""
    page = (Path(__file__).parents[2] / "docs" / "methods" / "feddsnas.md").read_text(encoding="utf-8")
    for (base, personal), said in (
        (plan_cell_stacks(), "2^54.5"),
        (plan_cell_stacks(4, 4, 2, 2, OPERATION_NAMES, OPERATION_NAMES), "2^101.4"),
    ):
        number = math.prod(len(names) for cell in base + personal for names in cell.candidates)
        assert f"2^{math.log2(number):.1f}" == said
        assert f"= {said}" in page


def test_cell_is_the_sum_over_its_edges():
    """v_j = Σ_i o_ij(v_i), written out for two nodes."""
    names = ("sep_conv_3", "skip")
    cell = Cell(CellPlan(2, 2, (names,) * 5), 4, 4).eval()
    previous, skip = torch.randn(2, 3, 4, 5, 5)
    narrow = cell.skip  # the 1×1 convolution on the second input
    v0, v1 = previous, narrow(skip)
    index = torch.tensor([0, 1, 1, 0, 0])
    o = [edge[names[k]] for edge, k in zip(cell.operations, index.tolist(), strict=True)]
    v2 = o[0](v0) + o[1](v1)
    v3 = o[2](v0) + o[3](v1) + o[4](v2)
    assert torch.allclose(cell(previous, skip, OperationChoice(index)), v3, atol=1e-6)
    cell.join = "mean"
    v2 = (o[0](v0) + o[1](v1)) / 2
    assert torch.allclose(cell(previous, skip, OperationChoice(index)), (o[2](v0) + o[3](v1) + o[4](v2)) / 3, atol=1e-6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_grouping_is_the_naive_loop(channels_last):
    """One example at a time through the operation that it chose: values and gradients, to 1e-6 in evaluation mode."""
    ops = list(build_operations(4).double().eval().values())
    value = torch.randn(12, 4, 5, 5, dtype=torch.float64)
    if channels_last:
        value = value.contiguous(memory_format=torch.channels_last)
    index = torch.arange(12) * 5 % 7  # operations 7 and 8 are chosen by nobody, 0 to 4 by two
    weights = torch.randn(12, 4, 5, 5, dtype=torch.float64)
    found = []
    for run in (
        lambda v: apply_chosen_operations(ops, v, index),
        lambda v: torch.cat([ops[k](v[i : i + 1]) for i, k in enumerate(index)]),
    ):
        leaf = value.clone().requires_grad_()
        out = run(leaf)
        (out * weights).sum().backward()
        found.append([out.detach(), leaf.grad, *(p.grad for op in ops for p in op.parameters() if p.grad is not None)])
        for op in ops:
            op.zero_grad()
    assert len(found[0]) == len(found[1]) > 10
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("form", [(), (3, 1, 1, 1)])
def test_a_choice_of_1_has_the_value_and_the_gradients_of_a_product(form):
    found = []
    for product in (_scale_by_choice, torch.mul):
        with temporary_rng_seed(2):
            out, scale = torch.randn(3, 2, 4, 4).requires_grad_(), torch.ones(form, requires_grad=True)
            value = product(out, scale)
            (value * torch.randn(3, 2, 4, 4)).sum().backward()
        found.append([value.detach(), out.grad, scale.grad])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("context", few(["free", "aware"], ["aware"]))
def test_only_what_is_chosen_is_computed(context):
    """Calls are counted by hooks: at most one for each operation and edge, and none for those that nobody chose."""
    network = supernet(context).train()
    calls, chosen = [], []
    for cell, _ in network.cells_with_samplers():
        for edge in cell.operations:
            for op in edge.values():
                op.register_forward_hook(lambda module, _, __: calls.append(id(module)))
        cell.register_forward_pre_hook(lambda cell, inputs: chosen.append((cell, inputs[2].indices)))
    with temporary_rng_seed(5):
        network(images())
    expected = [
        id(list(edge.values())[k])
        for cell, index in chosen
        for number, edge in enumerate(cell.operations)
        for k in sorted(set(index.view(-1, len(cell.operations))[:, number].tolist()))
    ]
    assert sorted(calls) == sorted(expected)
    assert len(set(calls)) == len(calls)


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["free", "aware"])
def test_every_choice_is_an_operation_of_its_cell(context):
    network = supernet(context).train()
    seen = []
    for cell, _ in network.cells_with_samplers():
        cell.register_forward_pre_hook(lambda cell, inputs: seen.append((len(cell.operations[0]), inputs[2].indices)))
    for _ in range(20):
        network(images())
    assert {operations for operations, _ in seen} == {9, 5}
    assert all(int(index.max()) < operations for operations, index in seen)


def test_gradient_reaches_samplers_and_chosen_operations_only():
    network = supernet().train()
    with temporary_rng_seed(6):
        network(images()).square().sum().backward()
    reached = 0
    for cell, sampler in network.cells_with_samplers():
        assert sampler.logits.grad.abs().sum() > 0
        for edge in cell.operations:
            weighted = [op for op in edge.values() if any(True for _ in op.parameters())]
            touched = [any(p.grad is not None for p in op.parameters()) for op in weighted]
            assert sum(touched) <= 1
            reached += sum(touched)
    assert reached, "no operation that was chosen has a gradient"


def test_one_choice_per_batch():
    network = supernet("aware", per="batch").train()
    seen = []
    for cell, _ in network.cells_with_samplers():
        cell.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2].indices.dim()))
    network(images())
    assert set(seen) == {1}


def test_the_choice_of_a_batch_follows_the_mean_of_its_probabilities():
    """Two kinds of images with opposite preferences: the mean is even, and each operation is drawn about half the time."""
    network = supernet("aware", per="batch").train()
    logits = torch.tensor([[[8.0, 0.0]], [[0.0, 8.0]], [[0.0, 8.0]], [[8.0, 0.0]]])
    with temporary_rng_seed(8):
        drawn = torch.stack([network._choose_operations(0, logits).indices for _ in range(400)]).flatten()
    assert 150 < int(drawn.sum()) < 250


def test_the_temperature_reaches_the_sample():
    """The gradient of a draw is eq. 2's at the network's temperature."""
    network = supernet().train()
    logits = torch.zeros(1, 3, requires_grad=True)
    slopes = []
    for temperature in (1.0, 4.0):
        network.temperature = temperature
        with temporary_rng_seed(9):
            noise = gumbel_noise_like(logits)
        with temporary_rng_seed(9):
            (slope,) = torch.autograd.grad(network._choose_operations(0, logits).scale.sum(), logits)
        k = int(noise.argmax())
        soft = torch.softmax(noise / temperature, -1)[0]
        by_hand = soft[k] * (nn.functional.one_hot(torch.tensor(k), 3) - soft) / temperature
        assert torch.allclose(slope[0], by_hand, atol=1e-6)
        slopes.append(slope)
    assert not torch.allclose(*slopes)


def test_statistics_of_one_value_are_left_as_they_are():
    """An operation that one image reaches at one pixel has no variance: `recompute` must not make it zero."""
    norm = GroupedNorm(2)
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), norm)
    recompute_norm_statistics(network, Examples(torch.randn(1, 2, 3, 3), torch.zeros(1, dtype=torch.int64)))
    assert torch.equal(norm.running_var, torch.ones(2))
    assert torch.equal(norm.running_mean, torch.zeros(2))
    recompute_norm_statistics(network, Examples(torch.randn(9, 2, 3, 3), torch.zeros(9, dtype=torch.int64)))
    assert not torch.equal(norm.running_var, torch.ones(2))


def test_a_supernet_is_read_once(monkeypatch):
    """Not once a weight: that took longer than the evaluation of the network that was found."""
    base, personal = plan_cell_stacks(base_cells=1)
    network, read = SupernetPlan(1, 10, 4, base, personal)(), []
    own = Network.state_dict
    monkeypatch.setattr(Network, "state_dict", lambda self, *a, **k: (read.append(self), own(self, *a, **k))[1])
    build_network_with_operations(network, [torch.zeros(5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)])
    assert sum(one is network for one in read) == 1


@pytest.mark.thorough
def test_what_was_found_computes_what_the_supernet_does():
    network = supernet().eval()
    plain = most_probable_network(network)
    assert torch.equal(plain(images()), network(images()))
    assert sum(p.numel() for p in plain.parameters()) < sum(p.numel() for p in network.parameters()) / 3
    assert not list(plain.base["samplers"])
    assert not list(plain.personal["samplers"])
    choices = [torch.tensor([k % 9 for k in range(5)]), torch.tensor([8 - k for k in range(5)]), torch.tensor([3])]
    other = build_network_with_operations(network, choices)
    sizes = zip(choices, (9, 9, 5), strict=True)
    network.noise = {
        k: 100.0 * nn.functional.one_hot(c, n) for k, (c, n) in enumerate(sizes)
    }  # so large that it decides
    assert torch.equal(other(images()), network(images()))
    network.noise = None
    with pytest.raises(UserError, match="one architecture per example"):
        most_probable_network(supernet("aware"))


def test_an_example_is_routed_the_same_whatever_else_is_in_the_batch():
    network = supernet("aware").eval()
    x = images(8)
    together = network(x)
    assert torch.allclose(together, torch.cat([network(x[i : i + 1]) for i in range(8)]), atol=1e-5)
    routes = operation_probabilities(network, Examples(x, torch.zeros(8, dtype=torch.int64)))
    assert [tuple(r.shape) for r in routes] == [(5, 9), (5, 9), (1, 5)]
    assert all(torch.allclose(r.sum(1), torch.ones(len(r)), atol=1e-5) for r in routes)


@pytest.mark.parametrize("context", few(["free", "aware"], ["aware"]))
def test_sampled_is_the_mean_of_its_networks(context):
    network = supernet(context).eval()
    with temporary_rng_seed(7):
        noise = {
            k: gumbel_noise_like(torch.empty(4, s.edges, s.operations))
            for k, (_, s) in enumerate(network.cells_with_samplers())
        }
    mean = SampledNetwork(network, noise).eval()
    singles = []
    for k in range(4):
        network.noise = {cell: tensor[k] for cell, tensor in noise.items()}
        singles.append(network(images()).softmax(1))
    network.noise = None
    assert torch.allclose(mean(images()).exp(), torch.stack(singles).mean(0), atol=1e-6)
    assert torch.allclose(mean(images()).exp().sum(1), torch.ones(6), atol=1e-5)
    assert not torch.allclose(singles[0], singles[1])  # they are different networks


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "aware", "sampled"])
def test_written_and_read_back(kind, tmp_path):
    network = supernet("aware" if kind == "aware" else "free").eval()
    module = network if kind == "aware" else most_probable_network(network)
    if kind == "sampled":
        noise = {
            k: gumbel_noise_like(torch.empty(2, s.edges, s.operations))
            for k, (_, s) in enumerate(network.cells_with_samplers())
        }
        module = SampledNetwork(network, noise).eval()
    known = operation_probabilities(network, Examples(images(), torch.zeros(6, dtype=torch.int64)))
    description = describe_network(module, known)
    (tmp_path / "a.json").write_text(json.dumps(description))
    safetensors.torch.save_file({n: t.contiguous() for n, t in module.state_dict().items()}, tmp_path / "a.safetensors")
    again = load_network(tmp_path / "a.json")
    assert type(again) is type(module)
    assert torch.allclose(again(images()), module(images()), atol=1e-5)  # `probabilities` has changed the memory layout
    edge = description["cells"][0]["edges"][0]
    assert edge["candidates"] == list(OPERATION_NAMES)
    assert len(edge["probabilities"]) == 9
    assert len(edge["operations"]) == (1 if kind == "plain" else 9)
    inner = again.network if kind == "sampled" else again
    assert inner.supernet == (network.plan if kind != "plain" else module.supernet)
    assert all(torch.allclose(a, b) for a, b in zip(inner.known, known, strict=True))


def test_files_that_do_not_fit(tmp_path):
    with pytest.raises(UserError, match=r"models/ID\.json"):
        load_network(tmp_path / "none.json")
    with pytest.raises(UserError, match="not a description"):
        rebuild_network({"format": "something"})
    with pytest.raises(UserError, match="its format is 'list'"):
        rebuild_network([])
    with pytest.raises(UserError, match="incomplete or damaged"):
        rebuild_network({"format": "polyfed.search 1", "plan": {"channels": 3}})
    network = most_probable_network(supernet())
    (tmp_path / "a.json").write_text(json.dumps(describe_network(network, network.known)))
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="do not belong together"):
        load_network(tmp_path / "a.json")


def test_errors_of_forms():
    with pytest.raises(UserError, match="at least 1 base cell"):
        plan_cell_stacks(base_cells=0)
    with pytest.raises(UserError, match="has 5 edges, got candidates for 2"):
        CellPlan(2, 2, (("skip",),) * 2)
    with pytest.raises(UserError, match="equally many"):
        Network(SupernetPlan(1, 2, 4, (CellPlan(2, 1, (("skip",), ("skip", "sep_conv_3"))),), ()))


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 5, 8, 28])
def test_small_and_odd_images(size):
    for context in ("free", "aware"):
        network = supernet(context).train()
        for number in (1, 3):
            assert network(images(number, size=size)).shape == (number, 3)
