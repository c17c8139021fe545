"""Which tracer takes which network, that both see the same, and what is said where neither does."""

import copy
import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from polyfed.core.errors import UserError
from polyfed.core.seeds import temporary_rng_seed
from polyfed.graphs import extract
from polyfed.graphs.tracing import export_tracer, fx_tracer
from polyfed.graphs.tracing.layer_flow import Root, record_layer_flow
from polyfed.models import MODELS, build
from tests.graphs.made_networks import Net, X, line


def both(model, x):
    """The flows that the two tracers see."""
    roots = [Root(copy.deepcopy(model)).eval() for _ in range(2)]
    return [
        record_layer_flow(trace(root, x), model, x)
        for trace, root in zip((fx_tracer.trace_with_fx, export_tracer.trace_with_export), roots, strict=True)
    ]


def assert_same(model, x):
    by_fx, by_export = both(model, x)
    assert by_fx.edges == by_export.edges
    assert by_fx.reasons == by_export.reasons
    assert [(n.name, n.type, n.parameters) for n in by_fx.nodes] == [
        (n.name, n.type, n.parameters) for n in by_export.nodes
    ]


WIDTHS = (
    "resnet18",
    "resnet18_hybrid",
    "flha_arch0",
    "flha_arch1",
    "flha_arch2",
    "flha_arch3",
    "flha_small",
    "flha_chain",
    "unet",
    "unet3d",
)
SIZES = {name: {"width": 4} for name in WIDTHS}
SIZES |= {"lstm": {"vocabulary": 9, "num_layers": 2}, "vit": {"dim": 8}}
TOKENS = {"lstm", "lstm_tagger", "tiny_transformer"}
SIZES |= {"lstm_tagger": {"vocabulary": 9}, "tiny_transformer": {"vocabulary": 9, "dim": 8}}


def zoo(name, **sizes):
    shape = {"cnn_pfedla": (3, 32, 32), "unet3d": (1, 8, 8, 8)}.get(name, (25,) if name in TOKENS else (1, 28, 28))
    with temporary_rng_seed(0):
        model = build(name, shape, 5, **{**SIZES.get(name, {}), **sizes})
    return model, torch.ones(2, *shape, dtype=torch.int64 if name in TOKENS else torch.float32)


# Have no layer that the others have not.
ALIKE = {"flha_arch0", "flha_arch1", "flha_arch2", "flha_small", "resnet18", "cnn_fedhenn", "cnn_pfedla", "cnn_582k"}
SLOW = [pytest.param(name, {}, marks=pytest.mark.slow) for name in MODELS if name in ALIKE]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, {}) for name in MODELS if name not in ALIKE), *SLOW, ("vit", {"pool": "cls"})]
)
def test_the_zoo(extracted, name, sizes):
    model, x = zoo(name, **sizes)
    graph = extracted(model, x, kinds="paper")
    assert graph.tracer == "torch.fx"
    local = {"lstm": {"embedding", "lstm"}, "vit": {"positions", "cls_token"} & set(dict(model.named_parameters()))}
    local |= {"lstm_tagger": {"embedding", "forwards", "backwards"}, "tiny_transformer": {"embedding", "positions"}}
    assert {parameter.split(".")[0] for parameter in graph.local_reasons} == local.get(name, set())
    assert_same(model, x)


def test_both_tracers_see_the_same_beyond_the_zoo():
    def forward(net, x):
        tokens = torch.cat([net.cls.expand(x.shape[0], -1, -1), net.patch(x).unsqueeze(1)], 1) + net.position
        tokens = net.norm(tokens * net.gamma) - F.linear(tokens, net.patch.weight)
        return net.out(F.batch_norm(tokens.mean(1), net.mean, net.mean + 1, net.gamma, net.shift))

    net = Net(forward, patch=line(), norm=nn.LayerNorm(4), out=nn.Sequential(nn.PReLU(), line(4, 2), nn.Dropout()))
    for name, shape in (("cls", (1, 1, 4)), ("position", (1, 2, 4)), ("gamma", (4,)), ("shift", (4,))):
        net.register_parameter(name, nn.Parameter(torch.ones(shape)))
    net.register_buffer("mean", torch.zeros(4))
    assert_same(net, X)
    convolutions = nn.Sequential(
        nn.Conv1d(4, 6, 3, stride=2, padding="valid", groups=2), nn.InstanceNorm1d(6, affine=True), nn.SyncBatchNorm(6),
        nn.RMSNorm(7), nn.ConvTranspose1d(6, 2, 1), nn.GroupNorm(2, 2), nn.Unflatten(2, (1, 7, 1)),
        nn.Conv3d(2, 1, (1, 3, 1)),
    )  # fmt: skip
    assert_same(convolutions, torch.randn(2, 4, 16))


OPERATIONS = {
    "layer": lambda layer, a, b: layer(a),
    "relu": lambda layer, a, b: a.relu(),
    "add": lambda layer, a, b: a + b,
    "gate": lambda layer, a, b: a * b.sigmoid(),
    "concat": lambda layer, a, b: torch.cat([a, b], 1)[:, ::2],
    "in place": lambda layer, a, b: a.clone().add_(b),
    "constant": lambda layer, a, b: 1 - a,
}


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9
    ),
    st.booleans(),
)
def test_random_networks(program, shared):
    """Nodes and edges against a second, simpler account of who reaches whom: sets of names, kept as the program runs."""
    layers = nn.ModuleList(line() for _ in program)
    if shared:
        layers[-1] = layers[0]

    def forward(net, x):
        values = [x]
        for layer, (operation, a, b) in zip(net.layers, program, strict=True):
            values.append(OPERATIONS[operation](layer, values[a % len(values)], values[b % len(values)]))
        return values[-1]

    reach, nodes, edges = [{-1}], [], set()
    for operation, a, b in program:
        one, two = reach[a % len(reach)], reach[b % len(reach)]
        if operation == "layer":
            sources = one
        elif operation in ("relu", "constant"):
            sources = None
            reach.append(one)
        else:
            sources = one | two if operation != "gate" and one != two else None
            if sources is None:
                reach.append(one | two)
        if sources is not None:
            edges |= {(source, len(nodes)) for source in sources}
            nodes.append("concat" if operation == "concat" else "linear" if operation == "layer" else "add")
            reach.append({len(nodes) - 1})
    alive = set(reach[-1])
    for a, b in sorted(edges, key=lambda edge: -edge[1]):
        alive |= {a} if b in alive else set()
    order = sorted(alive - {-1})
    graph = extract(Net(forward, layers=layers), X)
    assert [getattr(node.type, "kind", node.type) for node in graph.nodes] == [nodes[k] for k in order]
    expected = {(order.index(a), order.index(b)) for a, b in edges if a in order and b in order}
    assert graph.edges == tuple(sorted(expected))
    assert graph.tracer == "torch.fx"


class Checked(nn.Module):
    """Python looks at the shape, which torch.fx does not know."""

    def __init__(self):
        super().__init__()
        self.fc = line()

    def forward(self, x):
        if x.shape[1] != 4:
            raise ValueError("4 features expected")
        return self.fc(x) / math.sqrt(x.shape[1]) + x


def test_decisions_on_shapes_are_for_torch_export(extracted, told):
    graph = extracted(nn.Sequential(line(), Checked(), nn.LSTM(4, 2)), X, kinds="paper")
    assert graph.tracer == "torch.export"
    assert told(graph) == [
        "0: linear-4-4-k-s-g1-b1 < ", "1.fc: linear-4-4-k-s-g1-b1 < 0", "1.add: add < 0 1.fc", "2: other < 1.add",
    ]  # fmt: skip


class Deciding(nn.Module):
    """Python looks at the values."""

    def __init__(self):
        super().__init__()
        self.fc = line()

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


def deciding(bias):
    net = nn.Sequential(line(), nn.Sequential(nn.ReLU(), Deciding()))
    nn.init.constant_(net[0].bias, bias)
    return net


def test_decisions_on_values_are_those_of_an_example_with_fixed_weights(capfd, caplog, extracted):
    """A graph must not depend on the weights that the network happens to have."""
    graph = extracted(deciding(10.0), X)
    assert graph == replace(extracted(deciding(-10.0), X), nodes=graph.nodes)  # but for where weights start
    assert (graph.tracer, graph.coverage, graph.edges) == ("torch.fx on an example", 1.0, ((0, 1),))
    assert [node.name for node in graph.nodes] == ["0", "1.1.fc"]
    refused = Net(lambda net, x: net.b(x) if x.isnan().any() else net.a(x), a=line(), b=line())
    assert extracted(refused, X).local_reasons == dict.fromkeys(
        ("b.weight", "b.bias"),
        "what runs depends on values, and on the example it does not run; compute both branches (torch.where in place of "
        "if) to have it generated",
    )
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


COUNTER = itertools.count()


class Restless(Deciding):
    """Another output each time."""

    def forward(self, x):
        return super().forward(x) + next(COUNTER)


def test_an_output_that_changes_is_for_nobody(capfd, caplog):
    with pytest.raises(UserError) as told:
        extract(nn.Sequential(line(), nn.Sequential(nn.ReLU(), Restless())), X)
    for part in (
        "the layers of Sequential cannot be followed",
        "torch.fx stopped in 1.1 (Restless): TraceError: symbolically traced variables",
        "torch.export stopped in 1.1 (Restless): GuardOnDataDependentSymNode: Could not guard",
        "torch.fx on an example stopped in Sequential: the traced program computes another output",
        "torch.where in place of if",
    ):
        assert part in str(told.value)
    assert "\n" not in str(told.value)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.getLogger("torch.fx.experimental.symbolic_shapes").level != logging.ERROR


def test_a_parameter_that_generated_weights_would_not_replace_is_no_silent_loss(extracted):
    net = Net(lambda net, x: net.fc(x) + net.hidden[0] * 2, fc=line())
    net.scale = nn.Parameter(torch.ones(4))
    net.hidden = [
        net.scale
    ]  # a plain list: its tensor is a constant for both tracers, and stays when parameters are replaced
    graph = extracted(net, X)
    assert graph.local_reasons.keys() == {"scale"}
    assert "the plain list of tensors that it is behind" in graph.local_reasons["scale"]


def test_another_output_than_the_models_is_not_believed(monkeypatch):
    real = fx_tracer.trace_with_fx

    def wrong(root, x):
        program = real(root, x)
        root.model[0].weight.data.mul_(2)
        return program

    monkeypatch.setitem(extract.__globals__["_TRACERS"], "torch.fx", wrong)
    assert extract(nn.Sequential(line(), line()), X).tracer == "torch.export"


def test_torchs_transformer_is_seen_into_by_torch_export(extracted, told):
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), line(8, 3))
    net.requires_grad_(True)
    graph = extracted(net, torch.randn(2, 3, 8))
    assert (graph.tracer, graph.coverage) == ("torch.export", 1.0)
    assert told(graph) == [
        "0.self_attn: linear-8-24-k-s-g1-b1 < ",
        "0.self_attn.out_proj: linear-8-8-k-s-g1-b1 < 0.self_attn",
        "0.add: add < 0.self_attn.out_proj",
        "0.norm1: layer_norm-8-8-k-s-g1-b1 < 0.add",
        "0.linear1: linear-8-16-k-s-g1-b1 < 0.norm1",
        "0.linear2: linear-16-8-k-s-g1-b1 < 0.linear1",
        "0.add: add < 0.norm1 0.linear2",
        "0.norm2: layer_norm-8-8-k-s-g1-b1 < 0.add",
        "1: linear-8-3-k-s-g1-b1 < 0.norm2",
    ]


def signed(x):
    """A function that torch.fx calls without looking into it, and torch.export cannot follow."""
    return x if x.sum() > 0 else -x


torch.fx.wrap("signed")


def test_where_torch_export_fails_composites_are_one_node(extracted, told):
    net = Net(lambda net, x: net.out(signed(net.attend(x, x, x)[0])), attend=nn.MultiheadAttention(4, 2), out=line())
    graph = extracted(net, torch.randn(2, 3, 4), kinds="paper")
    assert graph.tracer == "torch.fx"
    assert told(graph) == ["attend: other < ", "out: linear-4-4-k-s-g1-b1 < attend"]
    assert (
        graph.local_reasons["attend.out_proj.weight"]
        == "MultiheadAttention is not a layer of the catalogue; set kinds=all"
    )


def projected(x, weight, bias):
    """As torchvision's shifted-window attention: a function that torch.fx does not look into, given a layer's weights."""
    return F.linear(x, weight, bias).relu()


torch.fx.wrap("projected")


def test_torch_export_sees_into_functions_that_are_given_weights(extracted):
    net = Net(lambda net, x: net.out(projected(x, net.fc.weight, net.fc.bias)), fc=line(), out=line())
    graph = extracted(net, X)
    assert (graph.tracer, graph.coverage, graph.edges) == ("torch.export", 1.0, ((0, 1),))


class Cache:
    """A class of a user's own, in a model's output."""


def test_outputs_of_classes_that_torch_export_does_not_know(extracted):
    net = nn.Sequential(Checked(), Net(lambda net, x: {"logits": net.fc(x), "cache": Cache()}, fc=line()))
    assert extracted(net, X).tracer == "torch.export"


class Counting(nn.Module):
    """A buffer, a plain attribute and a cache that change with every use, and state beyond tensors."""

    def __init__(self):
        super().__init__()
        self.fc, self.uses, self.cache = line(), 0, {}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.uses += 1
        self.cache["last"] = self.fc(x)
        return F.dropout(self.cache["last"], 0.5) + torch.randn_like(x)  # random in evaluation mode too

    def get_extra_state(self):
        return {"uses": self.uses}

    def set_extra_state(self, state):
        self.uses = state["uses"]


def test_state_and_randomness(extracted):
    net = nn.Sequential(Counting().train(), nn.BatchNorm1d(4).eval())
    graph = extracted(net, X)
    assert (graph.tracer, graph.edges, graph.coverage) == ("torch.fx", ((0, 1),), 1.0)
    assert (net[0].uses, net[0].cache, int(net[0].calls)) == (0, {}, 0)
    assert (net[0].training, net[1].training) == (True, False)


def test_in_whatever_mode_the_caller_is():
    net = nn.Sequential(line(), Checked())
    graph = extract(net, X)
    with torch.inference_mode():
        assert extract(net, X.clone()) == graph
        assert extract(nn.Sequential(line(), Checked()), X * 1).edges == graph.edges
    with torch.no_grad():
        assert extract(net, X) == graph


def test_optional_arguments_and_outputs_in_containers(extracted):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = line(), line()

        def forward(self, x, mask=None, *, scale=1.0, **others):
            x = self.a(x) * scale
            return {"first": [x if mask is None else x * mask], "other": (self.b(x), 3, None)}

    graph = extracted(Masked(), X)
    assert (graph.tracer, graph.edges, graph.coverage) == ("torch.fx", ((0, 1),), 1.0)
