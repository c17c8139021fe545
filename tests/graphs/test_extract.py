"""Nodes, joins and edges of networks whose graph is known by hand."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.core.seeds import temporary_rng_seed
from polyfed.graphs import LayerType
from polyfed.models import build
from tests.graphs.made_networks import Net, X, line

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_a_chain(extracted, told):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten(), line(72, 5)
    )
    graph = extracted(net, IMAGES)
    assert told(graph) == ["0: conv2d-3-8-k3x3-s2x2-g1-b1 < ", "5: linear-72-5-k-s-g1-b1 < 0"]
    assert graph.nodes[0].parameters == {"weight": "0.weight", "bias": "0.bias"}
    assert (graph.coverage, graph.tracer, graph.local_reasons) == (1.0, "torch.fx", {})


class Residual(nn.Module):
    """As torchvision's basic block: ReLU in place, the sum into the branch."""

    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample = None
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Pyramid(nn.Module):
    def __init__(self, widths, blocks, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layers = nn.ModuleList()
        for i, width in enumerate(widths):
            before = widths[max(i - 1, 0)]
            rest = [Residual(width, width, 1) for _ in range(blocks - 1)]
            self.layers.append(nn.Sequential(Residual(before, width, 1 if i == 0 else 2), *rest))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def test_a_residual_network_with_its_edges(extracted, told):
    graph = extracted(Pyramid((4, 8), 1, 5), IMAGES)
    assert told(graph) == [
        "conv1: conv2d-3-4-k7x7-s2x2-g1-b0 < ",
        "bn1: batch_norm-4-4-k-s-g1-b1 < conv1",
        "layers.0.0.conv1: conv2d-4-4-k3x3-s1x1-g1-b0 < bn1",
        "layers.0.0.bn1: batch_norm-4-4-k-s-g1-b1 < layers.0.0.conv1",
        "layers.0.0.conv2: conv2d-4-4-k3x3-s1x1-g1-b0 < layers.0.0.bn1",
        "layers.0.0.bn2: batch_norm-4-4-k-s-g1-b1 < layers.0.0.conv2",
        "layers.0.0.add: add < bn1 layers.0.0.bn2",
        "layers.1.0.conv1: conv2d-4-8-k3x3-s2x2-g1-b0 < layers.0.0.add",
        "layers.1.0.bn1: batch_norm-8-8-k-s-g1-b1 < layers.1.0.conv1",
        "layers.1.0.conv2: conv2d-8-8-k3x3-s1x1-g1-b0 < layers.1.0.bn1",
        "layers.1.0.bn2: batch_norm-8-8-k-s-g1-b1 < layers.1.0.conv2",
        "layers.1.0.downsample.0: conv2d-4-8-k1x1-s2x2-g1-b0 < layers.0.0.add",
        "layers.1.0.downsample.1: batch_norm-8-8-k-s-g1-b1 < layers.1.0.downsample.0",
        "layers.1.0.add: add < layers.1.0.bn2 layers.1.0.downsample.1",
        "fc: linear-8-5-k-s-g1-b1 < layers.1.0.add",
    ]


def kinds(graph):
    return Counter(node.type if isinstance(node.type, str) else node.type.kind for node in graph.nodes)


@pytest.mark.slow
def test_resnet18_of_both_makes(extracted):
    """17 convolutions of 3×3 or 7×7 and 3 of 1×1 in shortcuts, each with a norm; 8 sums of two; one linear layer."""
    with temporary_rng_seed(0):
        models = [build("resnet18", (3, 16, 16), 10, width=4), Pyramid((4, 8, 16, 32), 2, 10)]
    graphs = [extracted(model, IMAGES) for model in models]
    for graph in graphs:
        assert kinds(graph) == {"conv2d": 20, "batch_norm": 20, "add": 8, "linear": 1}
        assert len(graph.edges) == 20 + 19 + 2 * 8 + 1  # into norms, into convolutions but the first, sums, fc
        assert (graph.coverage, graph.tracer) == (1.0, "torch.fx")
        assert (
            sum(t.kind == "conv2d" for t in graph.layer_types) == 1 + 4 + 3 + 3
        )  # stem, within stages, into them, shortcuts
    ours, others = (set(graph.layer_types) for graph in graphs)
    assert len(ours & others) == 4 + 3 + 3 + 4 + 1  # all but the stem


def test_dense_connections(extracted, told):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3, padding=1)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.BatchNorm2d(4 + 2 * i), nn.ReLU(), nn.Conv2d(4 + 2 * i, 2, 3, padding=1))
                for i in range(3)
            )

        def forward(self, x):
            features = [self.stem(x)]
            for layer in self.layers:
                features.append(layer(torch.cat(features, 1)))
            return torch.cat(features, dim=1).mean((2, 3))

    told_graph = told(extracted(Dense(), IMAGES))
    assert [text for text in told_graph if ": concat" in text] == [
        "concat: concat < stem layers.0.2",
        "concat: concat < stem layers.0.2 layers.1.2",
        "concat: concat < stem layers.0.2 layers.1.2 layers.2.2",
    ]
    assert told_graph[1].endswith("< stem")  # a list of one is not a join
    assert len(told_graph) == 1 + 3 * 2 + 3


def test_inverted_residual_with_depthwise_convolution(extracted, told):
    block = nn.Sequential(
        nn.Conv2d(4, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True),
        nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True),
        nn.Conv2d(24, 4, 1, bias=False), nn.BatchNorm2d(4),
    )  # fmt: skip
    graph = extracted(Net(lambda net, x: x + net.block(x), block=block), IMAGES.repeat(1, 2, 1, 1)[:, :4])
    assert graph.nodes[2].type == LayerType("conv2d", 24, 24, (3, 3), (1, 1), 24, False, activation="relu6")
    assert told(graph)[-2:] == ["block.7: batch_norm-4-4-k-s-g1-b1 < block.6", "add: add < block.7"]


def test_squeeze_and_excitation_is_passed_through(extracted, told):
    def forward(net, x):
        x = net.conv(x)
        gate = net.up(F.relu(net.down(F.adaptive_avg_pool2d(x, 1))))
        return net.after(x * torch.sigmoid(gate)) + x

    net = Net(
        forward, conv=nn.Conv2d(3, 8, 1), down=nn.Conv2d(8, 2, 1), up=nn.Conv2d(2, 8, 1), after=nn.Conv2d(8, 8, 1)
    )
    assert [text.split(": ")[0] + " <" + text.split("<")[1] for text in told(extracted(net, IMAGES))] == [
        "conv < ", "down < conv", "up < down", "after < conv up", "add < conv after",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("join", "kind"),
    [
        (lambda a, b: a + b, "add"),
        (lambda a, b: a - b, "add"),
        (lambda a, b: torch.add(a, b, alpha=2), "add"),
        (lambda a, b: torch.sub(input=a, other=b), "add"),
        (lambda a, b: a.clone().add_(b), "add"),
        (lambda a, b: a.subtract(b), "add"),
        (lambda a, b: sum([a, b]), "add"),
        (lambda a, b: torch.cat([a, b]), "concat"),
        (lambda a, b: torch.cat(tensors=(a, b), dim=1), "concat"),
        (lambda a, b: torch.stack([a, b]), "concat"),
        (lambda a, b: torch.hstack([a, b]), "concat"),
        (lambda a, b: torch.concatenate([a, b]), "concat"),
        (lambda a, b: a * b, None),
        (lambda a, b: a @ b.T, None),
        (lambda a, b: torch.where(a > 0, a, b), None),
    ],
)
@pytest.mark.one_case
def test_joins(extracted, join, kind):
    graph = extracted(Net(lambda net, x: net.c(join(net.a(x), net.b(x)).sum() * x), a=line(), b=line(), c=line()), X)
    if kind is None:
        assert graph.edges == ((0, 2), (1, 2))
    else:
        assert graph.nodes[2].type == kind
        assert graph.edges == ((0, 2), (1, 2), (2, 3))


@pytest.mark.parametrize(
    "no_join",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x + torch.ones(4),
        lambda x: x + x,
        lambda x: x + F.relu(x),
        lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
        lambda x: torch.cat(x.chunk(2, 1), 1),
        lambda x: torch.cat([x, torch.zeros(3, 4)], 1)[:, :4],
        lambda x: x.add(x.mean()),
        lambda x: x + torch.zeros_like(x),
    ],
)
@pytest.mark.one_case
def test_sums_with_constants_and_with_oneself_are_no_joins(extracted, no_join):
    graph = extracted(Net(lambda net, x: net.b(no_join(net.a(x))), a=line(), b=line()), X)
    assert (len(graph.nodes), graph.edges) == (2, ((0, 1),))


def test_a_buffer_is_a_constant_and_a_parameter_is_not(extracted, told):
    net = Net(lambda net, x: net.fc(x + net.shift + net.constant), fc=line())
    net.register_buffer("constant", torch.ones(4))
    net.shift = nn.Parameter(torch.ones(4))
    graph = extracted(net, X, kinds="paper")
    assert told(graph) == ["shift: other < ", "add: add < shift", "fc: linear-4-4-k-s-g1-b1 < add"]
    assert graph.local_reasons == {"shift": "Net uses it outside the layers of the catalogue; set kinds=all"}


def test_of_some_operands_only_the_shape_is_read(extracted):
    def forward(net, x):
        a, b = net.a(x), net.b(x)
        return net.c(a.view_as(b).type_as(b) + torch.randn_like(b)) + x.new_zeros(3, 4)

    graph = extracted(Net(forward, a=line(), b=line(), c=line()), X)
    assert [node.name for node in graph.nodes] == ["a", "c"]
    assert set(graph.local_reasons) == {"b.weight", "b.bias"}


def test_in_place_operations_whose_result_is_not_used(extracted):
    def forward(net, x):
        y, z = net.a(x), net.b(x)
        y.add_(z)
        net.relu(y)
        return net.c(y)

    graph = extracted(Net(forward, a=line(), b=line(), c=line(), relu=nn.ReLU(inplace=True)), X)
    assert [node.name for node in graph.nodes] == ["a", "b", "add", "c"]
    assert graph.edges == ((0, 2), (1, 2), (2, 3))


def test_writing_into_parts_of_a_tensor(extracted):
    def forward(net, x):
        out = x.new_zeros(3, 8)
        out[:, :4] = net.a(x)
        out[:, 4:] = net.b(x)
        return net.c(out)

    graph = extracted(Net(forward, a=line(), b=line(), c=line(8, 2)), X)
    assert (graph.tracer, graph.coverage) == ("torch.export", 1.0)
    assert graph.edges == ((0, 2), (1, 2))


def test_layers_of_every_kind(extracted):
    net = nn.Sequential(
        nn.Conv1d(2, 6, 3, stride=2, padding_mode="circular", padding=1), nn.GroupNorm(2, 6),
        nn.InstanceNorm1d(6, affine=True),
        nn.BatchNorm1d(6), nn.LayerNorm(4), nn.RMSNorm(4), nn.SyncBatchNorm(6), nn.Conv1d(6, 8, 3, groups=2, padding="same"),
        nn.Unflatten(2, (2, 2, 1)), nn.Conv3d(8, 3, (1, 2, 1), stride=(2, 1, 1)), nn.BatchNorm3d(3), nn.Flatten(),
        nn.Linear(3, 2, bias=False),
    )  # fmt: skip
    graph = extracted(net, torch.randn(2, 2, 8))
    assert [node.type.key for node in graph.nodes] == [
        "conv1d-2-6-k3-s2-g1-b1-d1-none",
        "group_norm-6-6-k-s-g1-b1-d-none",
        "instance_norm-6-6-k-s-g1-b1-d-none",
        "batch_norm-6-6-k-s-g1-b1-d-none",
        "layer_norm-4-4-k-s-g1-b1-d-none",
        "rms_norm-4-4-k-s-g1-b0-d-none",
        "batch_norm-6-6-k-s-g1-b1-d-none",
        "conv1d-6-8-k3-s1-g2-b1-d1-none",
        "conv3d-8-3-k1x2x1-s2x1x1-g1-b1-d1x1x1-none",
        "batch_norm-3-3-k-s-g1-b1-d-none",
        "linear-3-2-k-s-g1-b0-d-none",
    ]
    assert graph.edges == tuple((i, i + 1) for i in range(10))
