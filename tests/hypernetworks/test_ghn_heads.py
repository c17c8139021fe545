"""The heads of the graph hypernetwork against their plain formula, and the memory that they take."""

import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from polyfed.core.seeds import torch_generator
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.hypernetworks.generated_network import GeneratedNetwork
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors
from polyfed.hypernetworks.ghn_heads import Factored, TypeHead
from polyfed.hypernetworks.ghn_start import init_ghn_params

KINDS = {
    "3×3": LayerType("conv2d", 4, 6, (3, 3), (1, 1)),
    "two groups": LayerType("conv2d", 8, 6, (3, 2), (1, 1), 2),
    "1×1": LayerType("conv2d", 12, 10, (1, 1), (1, 1), bias=False),
    "linear": LayerType("linear", 9, 12),
}


def plain(head, h):
    """s·W of each row of h, as the formulas of `TypeHead` and `Factored` have it, with W itself in memory."""
    z = head.hidden_activations(h)
    if isinstance(head.out, Factored):
        out = head.out
        mixed = torch.einsum("rkj,nj->nrk", out.core, z)
        made = torch.einsum("or,ir,nrk->noik", out.rows, out.columns, mixed).flatten(1)
        made = made + math.sqrt(z.shape[1]) * out.bias
    else:
        made = head.out(z)
    return (head.scale(z) * made).reshape(len(z), *head.shape)


@pytest.mark.parametrize("rank", [None, 1], ids=["mlp", "factored"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_weights_and_gradients_are_those_of_the_plain_formula(kind, rank):
    head, generator = TypeHead(kind, inputs=5, hidden=7, rank=rank).double(), torch_generator(0)
    assert isinstance(head.out, Factored) == (rank is not None)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    h = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    wanted, found = plain(head, h), head(h)["weight"]
    assert len(found) == 3
    torch.testing.assert_close(torch.stack(list(found)), wanted, rtol=1e-12, atol=1e-12)

    slopes = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    leaves = {"h": h, **{name: p for name, p in head.named_parameters() if not name.startswith("shift")}}
    expected = torch.autograd.grad(wanted, list(leaves.values()), slopes)
    for layout in (torch.contiguous_format, torch.channels_last):
        given = [slope.contiguous(memory_format=layout) if slope.dim() == 4 else slope for slope in slopes]
        gradients = torch.autograd.grad(found, list(leaves.values()), given, retain_graph=True)
        for name, gradient, value in zip(leaves, gradients, expected, strict=True):
            torch.testing.assert_close(gradient, value, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_of_many_examples_at_once_are_those_of_one_after_the_other():
    """Private training needs the gradient of each example (`torch.func`)."""
    head, generator = Factored(KINDS["3×3"], hidden=7, rank=1).double(), torch_generator(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    z, slopes = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((3, 7), (5, 3, 6, 4, 3, 3)))
    scales = torch.rand(3, 1, generator=generator, dtype=torch.float64)

    def weighted_sum(tensors, slope):
        weights = torch.func.functional_call(head, tensors, (z, scales))
        return sum((weight * part).sum() for weight, part in zip(weights, slope, strict=True))

    gradients = torch.func.grad(weighted_sum)
    at_once = torch.func.vmap(gradients, in_dims=(None, 0))(dict(head.named_parameters()), slopes)
    for row, slope in enumerate(slopes):
        for name, expected in gradients(dict(head.named_parameters()), slope).items():
            torch.testing.assert_close(at_once[name][row], expected, rtol=1e-12, atol=1e-12, msg=name)


def test_what_no_layer_uses_counts_as_a_gradient_of_zeros():
    head = TypeHead(KINDS["3×3"], inputs=5, hidden=7, rank=1)
    nn.init.ones_(head.out.bias)
    first, _ = head(torch.ones(2, 5, requires_grad=True))["weight"]
    first.sum().backward()
    assert head.out.bias.grad is not None
    assert bool(torch.isfinite(head.out.bias.grad).all())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_generated_weights_have_the_layout_of_those_whose_place_they_take(kind):
    """Strides too: of a 1×1 kernel several pass for either layout, and convolutions would take one for the other."""
    head = TypeHead(kind, inputs=5, hidden=7, rank=1)
    made = head(torch.ones(1, 5))["weight"][0].detach()
    if math.prod(kind.kernel) == 1:
        assert made.stride() == torch.empty(made.shape).stride()
    else:
        assert made.stride() == torch.empty(made.shape).contiguous(memory_format=torch.channels_last).stride()


class Spent(torch.autograd.Function):
    """A network that uses up its weights: in its backward pass each is given back as soon as its gradient is there."""

    @staticmethod
    def forward(ctx, *weights):
        ctx.weights = [weight.detach() for weight in reversed(weights)]
        return torch.zeros(())

    @staticmethod
    def backward(ctx, slope):
        return tuple(torch.ones_like(ctx.weights.pop()) for _ in range(len(ctx.weights)))


def most_bytes(work):
    """The most that was allocated at one time, above what was before; by the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def share(head):
    """The most in memory while a network's weights are generated and their gradient goes back, over network and
    hypernetwork."""
    model = nn.Sequential(nn.Conv2d(1, 96, 1, bias=False), *(nn.Conv2d(96, 96, 3) for _ in range(4)))
    model.to(memory_format=torch.channels_last)
    graph = extract(model, torch.zeros(1, 1, 12, 12))
    model.requires_grad_(False)
    form = GHNConfig(LayerCatalogue.from_graphs([graph]), depth=1, latent=8, head=head)
    ghn = GHN(form)
    ghn.load_state_dict(init_ghn_params(form, "kaiming", seed=0))
    network = GeneratedNetwork(ghn, model, graph_to_tensors(graph, form.catalogue, torch.device("cpu")))
    held = sum(parameter.nbytes for parameter in network.parameters())
    extra = most_bytes(lambda: Spent.apply(*network.generate_weights().values()).backward())
    assert extra > sum(parameter.grad.nbytes for parameter in ghn.parameters())
    return (held + extra) / held


@pytest.mark.parametrize("head", ["mlp", "factored"])
def test_generating_and_back_needs_less_than_three_times_the_network_and_the_hypernetwork(head):
    """In memory are both, the gradient of the hypernetwork, the generated weights or their gradient, and little else."""
    assert share(head) < 2.8


def test_the_plain_formula_needs_more(monkeypatch):
    """Each of its steps makes something of the size of the weights: what the test above would find."""

    def forward(head, h):
        return {"weight": plain(head, h)} | (
            {"bias": head.shift(head.hidden_activations(h))} if hasattr(head, "shift") else {}
        )

    monkeypatch.setattr(TypeHead, "forward", forward)
    assert share("factored") > 3.3
