"""Every parameter has a node: layers beyond the paper's, and parameters that belong to no layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.graphs.architecture import TRANSPOSED, unique_types
from polyfed.graphs.contraction import ContractionOptions
from polyfed.graphs.tables import keep_tables_local
from polyfed.models import MODELS, build
from tests.few_cases import few
from tests.graphs.made_networks import X, line


class Net(nn.Module):
    """A network whose modules and forward a test gives as they come."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


SEQUENCES = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[1, 2, 0], [3, 4, 5]])


def test_modules_beyond_the_paper(extracted, told):
    def forward(net, tokens):
        x = net.recurrent(net.embedding(tokens))[0]
        return net.out(net.act(net.up(x.transpose(1, 2))).sum(2))

    net = Net(
        forward, embedding=nn.Embedding(6, 4), recurrent=nn.LSTM(4, 5, 2, batch_first=True),
        up=nn.ConvTranspose1d(5, 3, 2), act=nn.PReLU(), out=line(3, 2),
    )  # fmt: skip
    graph = extracted(net, TOKENS)
    assert told(graph) == [
        "embedding: embedding-6-4-k-s-g1-b0 < ",
        "recurrent layer 0 input: lstm_input-4-20-k-s-g1-b1 < embedding",
        "recurrent layer 0 hidden: lstm_hidden-5-20-k-s-g1-b1 < recurrent layer 0 input",
        "recurrent layer 1 input: lstm_input-5-20-k-s-g1-b1 < recurrent layer 0 hidden",
        "recurrent layer 1 hidden: lstm_hidden-5-20-k-s-g1-b1 < recurrent layer 1 input",
        "up: conv_transpose1d-5-3-k2-s1-g1-b1 < recurrent layer 1 hidden",
        "act.weight: prelu-1-1-k-s-g1-b0 < up",
        "out: linear-3-2-k-s-g1-b1 < act.weight",
    ]
    assert graph.nodes[3].parameters == {"weight": "recurrent.weight_ih_l1", "bias": "recurrent.bias_ih_l1"}
    assert (graph.coverage, dict(graph.local_reasons)) == (1.0, {})
    assert graph.nodes[5].type.activation == "prelu"
    assert len(graph.layer_types) == 7  # both layers of the LSTM share the head of the hidden state


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", [{"bias": False}, {"bidirectional": True, "num_layers": 2}, {"proj_size": 2}])
def test_recurrent_layers(extracted, options):
    graph = extracted(Net(lambda net, x: net.rnn(x)[0], rnn=nn.LSTM(4, 3, **options)), SEQUENCES)
    assert graph.coverage == 1.0
    if "bidirectional" in options:
        ahead = [{graph.nodes[a].name.split("0 ")[-1] for a, b in graph.edges if b == k} for k in (4, 6)]
        assert ahead == [{"hidden", "reverse hidden"}] * 2
    for kind in (nn.GRU, nn.RNN):
        assert extracted(Net(lambda net, x: net.rnn(x)[0], rnn=kind(4, 3)), SEQUENCES).coverage == 1.0


@pytest.mark.parametrize("kind", few([nn.LSTM, nn.GRU, nn.RNN], [nn.LSTM]))
def test_packed_sequences(extracted, told, kind):
    """Their lengths are values, on which torch itself branches."""

    def forward(net, tokens):
        lengths = (tokens != 0).sum(1).cpu()
        packed = pack_padded_sequence(net.words(tokens), lengths, batch_first=True, enforce_sorted=False)
        state = net.recurrent(packed)[1]
        return net.out((state[0] if isinstance(state, tuple) else state)[-1])

    network = Net(
        forward, words=nn.Embedding(6, 4), recurrent=kind(4, 5, 2, batch_first=True, bidirectional=True), out=line(5, 2)
    )
    graph = extracted(network, TOKENS)
    padded = extracted(
        Net(
            lambda net, tokens: net.out(net.recurrent(net.words(tokens))[0][:, -1]), words=nn.Embedding(6, 4),
            recurrent=kind(4, 5, 2, batch_first=True, bidirectional=True), out=line(10, 2),
        ),
        TOKENS,
    )  # fmt: skip
    assert (graph.tracer, graph.coverage, padded.tracer) == ("torch.fx on an example", 1.0, "torch.fx")
    assert told(graph)[:-1] == told(padded)[:-1]
    assert [node.parameters for node in graph.nodes] == [node.parameters for node in padded.nodes]


def test_cells_in_a_loop_over_lengths(extracted, told):
    """torch.fx cannot loop over a length; torch.export sees calls of cells, not modules."""

    def forward(net, x):
        state = x.new_zeros(len(x), 3)
        for step in range(x.shape[1]):
            state = net.cell(x[:, step], state)
        return net.out(state)

    for kind, name in ((nn.GRUCell, "gru"), (nn.RNNCell, "rnn")):
        graph = extracted(Net(forward, cell=kind(4, 3), out=line(3, 2)), SEQUENCES)
        assert graph.tracer == "torch.export"
        assert {node.name: node.type.kind for node in graph.nodes} == {
            "cell input": f"{name}_input", "cell hidden": f"{name}_hidden", "out": "linear",
        }  # fmt: skip
        assert (graph.coverage, len(graph.generated_weights)) == (1.0, 3)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_and_their_layers_share_heads(extracted, cell):
    def forward(net, x):
        state = net.cell(x, net.cell(x))
        return state[0] if cell is nn.LSTMCell else state

    graph = extracted(Net(forward, cell=cell(4, 3)), X)
    layer = getattr(nn, cell.__name__.removesuffix("Cell"))(4, 3)
    assert graph.layer_types == extracted(Net(lambda net, x: net.rnn(x)[0], rnn=layer), SEQUENCES).layer_types
    assert (len(graph.generated_weights), graph.coverage) == (2, 1.0)


def test_attention_is_linear_layers_for_both_tracers(extracted, told):
    net = Net(
        lambda net, x: net.out(net.attend(x, x, x)[0]), attend=nn.MultiheadAttention(4, 2, add_bias_kv=True), out=line()
    )
    graph = extracted(net, SEQUENCES)
    assert graph.coverage == 1.0
    assert {"linear-4-12-k-s-g1-b1", "linear-4-4-k-s-g1-b1"} <= {t.key[: t.key.index("-d")] for t in graph.layer_types}
    wide = Net(lambda net, x: net.attend(x, x[:, :, :2], x)[0], attend=nn.MultiheadAttention(4, 2, kdim=2, vdim=4))
    assert extracted(wide, SEQUENCES).coverage == 1.0


def test_a_linear_layer_of_transformers_shares_the_head_of_torchs(extracted):
    class Conv1D(nn.Module):  # as transformers has it
        def __init__(self, c_out, c_in):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(c_in, c_out)), nn.Parameter(torch.zeros(c_out))

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)

    graph = extracted(nn.Sequential(Conv1D(5, 4), nn.GELU(), Conv1D(4, 5)), X)
    plain = extracted(nn.Sequential(line(4, 5), nn.GELU(), line(5, 4)), X)
    assert graph.layer_types == plain.layer_types
    assert graph.nodes[0].parameters == {TRANSPOSED: "0.weight", "bias": "0.bias"}


def test_what_is_trained_of_a_computed_weight_is_generated(extracted, told):
    graph = extracted(
        nn.Sequential(line(), nn.ReLU(), weight_norm(nn.Conv1d(3, 4, 1)), spectral_norm(line())), SEQUENCES
    )
    weight = "2.parametrizations.weight.original"
    assert told(graph)[1:] == [
        f"{weight}0: table-1-4-k1-s-g1-b0 < 0",
        f"2: conv1d-3-4-k1-s1-g1-b1 < {weight}0",
        "3: linear-4-4-k-s-g1-b1 < 2",
    ]
    assert graph.nodes[2].parameters == {"weight": f"{weight}1", "bias": "2.bias"}
    assert graph.coverage == 1.0


def test_parameters_of_no_layer_are_where_they_are_used(extracted, told):
    def forward(net, x):
        tokens = torch.cat([net.cls.expand(x.shape[0], -1, -1), net.patch(x).unsqueeze(1)], 1) + net.position
        return net.temperature * net.out((tokens * net.gamma) @ net.matrix)

    net = Net(forward, patch=line(), out=line(4, 2))
    net.cls, net.position = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 2, 4))
    net.gamma, net.matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.eye(4))
    net.temperature = nn.Parameter(torch.tensor(2.5))
    graph = extracted(net, X)
    assert told(graph) == [
        "cls: table-1-1-k4-s-g1-b0 < ",
        "patch: linear-4-4-k-s-g1-b1 < ",
        "concat: concat < cls patch",
        "position: table-2-1-k4-s-g1-b0 < ",
        "add: add < concat position",
        "gamma: scale-4-4-k-s-g1-b0 < add",
        "matrix: table-4-4-k-s-g1-b0 < gamma",
        "out: linear-4-2-k-s-g1-b1 < matrix",
        "temperature: scalar-1-1-k-s-g1-b0 < out",
    ]
    assert graph.nodes[8].type.start == (2.5, 0.0)
    assert graph.head_parameter_names == {"temperature", "out.weight", "out.bias"}


def test_a_norm_over_several_dimensions(extracted):
    graph = extracted(nn.Sequential(nn.LayerNorm((3, 4)), line()), SEQUENCES[:2])
    assert [node.type.kind for node in graph.nodes] == ["scale_table", "table", "linear"]
    assert [node.type.start for node in graph.nodes[:2]] == [(1.0, 0.0), (0.0, 0.0)]


def test_shared_parameters(extracted, told):
    """A weight that two layers use in different ways is typed by its shape; the words' table stays one."""
    net = Net(lambda net, x: net.out(net.tokens(x).mean(1)), tokens=nn.Embedding(6, 4), out=line(4, 6))
    net.out.weight = net.tokens.weight
    graph = extracted(net, TOKENS)
    assert [node.type.kind for node in graph.nodes] == ["embedding", "embedding", "vector"]
    assert [one.nodes for one in graph.generated_weights] == [(0, 1), (2,)]
    assert set(keep_tables_local(graph).local_reasons) == {"tokens.weight"}
    turned = Net(lambda net, x: F.linear(net.a(x).relu(), net.a.weight.T), a=line(4, 2, bias=False))
    assert [node.type.kind for node in extracted(turned, X).nodes] == ["table", "table"]
    net = nn.Sequential(line(), line(), line(), line())
    net[1].weight, net[2].bias = net[0].weight, net[0].bias
    net[1].bias.requires_grad_(False)
    graph = extracted(net, X)
    assert set(graph.local_reasons) == {"1.bias", "0.weight", "0.bias", "2.weight"}


def test_words_and_positions(extracted):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.out = nn.Embedding(6, 4), nn.Embedding(3, 4), line(4, 2)
            self.register_buffer("order", torch.arange(3)[None])

        def forward(self, x):
            return self.out((self.words(x) + self.places(self.order[:, : x.shape[1]])).mean(1))

    graph = extracted(Words(), TOKENS)
    assert [node.type.kind for node in graph.nodes if not isinstance(node.type, str)] == [
        "embedding",
        "positions",
        "linear",
    ]
    local = ContractionOptions(tables="local").apply(graph)
    assert list(local.local_reasons) == ["words.weight"]
    assert "tables=generated generates them" in local.local_reasons["words.weight"]
    bags = extracted(nn.Sequential(nn.EmbeddingBag(6, 4), line()), TOKENS)
    assert bags.layer_types[0] == graph.layer_types[0]  # one head for both


def test_frozen_and_unused_parameters_stay_private(extracted):
    net = Net(lambda net, x: net.rnn(x)[0] * net.gain, rnn=nn.GRU(4, 3))
    net.gain, net.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    net.empty = nn.Parameter(torch.ones(0))
    net.gain.requires_grad_(False)
    graph = extracted(net, SEQUENCES)
    assert dict(graph.local_reasons) == {
        "gain": "it is not trained (requires_grad is False); with requires_grad=True it is generated",
        "unused": "the output does not depend on it; delete it, or leave it, since it has no effect",
        "empty": "it has no entries, so that there is nothing to generate",
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lstm", "lstm_tagger", "tiny_transformer", "vit", "unet", "cnn_small", "mlp"])
def test_the_zoo_is_generated_whole_and_what_was_typed_keeps_its_graph(name):
    tokens = name in ("lstm", "lstm_tagger", "tiny_transformer")
    shape = (5,) if tokens else (1, 28, 28)
    model = build(name, shape, 5, **({"vocabulary": 9} if tokens else {}))
    x = torch.ones(2, *shape, dtype=torch.int64 if tokens else torch.float32)
    graph = extract(model, x)
    assert (graph.coverage, dict(graph.local_reasons)) == (1.0, {})
    former = extract(model, x, kinds="paper")
    if former.coverage == 1:
        assert former == graph
    else:
        assert set(former.layer_types) <= set(graph.layer_types)
        assert tokens or name == "vit"
    assert name in MODELS


def test_a_type_carries_the_size_of_its_networks_own_draw():
    net = Net(lambda net, x: net.out(net.tokens(x).mean(1)) * net.gain, tokens=nn.Embedding(60, 40), out=line(40, 6))
    net.gain = nn.Parameter(torch.full((6,), 1e-6))
    nn.init.normal_(net.tokens.weight, std=0.02)
    starts = {node.name: node.type.start for node in extract(net, TOKENS).nodes}
    assert starts["gain"] == (pytest.approx(1e-6), 0.0)
    assert starts["tokens"] == (0.0, pytest.approx(0.02, rel=0.05))
    assert starts["out"] == (0.0, pytest.approx((3 * 40) ** -0.5, rel=0.2))


def test_types_are_compared_without_their_start(tmp_path):
    one, two = (LayerType("table", 4, 5, bias=False, start=start) for start in ((0.0, 3.0), (1.0, 4.0)))
    assert one == two
    assert unique_types([one, two])[0].start == unique_types([two, one])[0].start == (0.5, pytest.approx(12.5**0.5))
    LayerCatalogue((one,)).write_yaml(tmp_path / "types.yaml")
    assert LayerCatalogue.read_yaml(tmp_path / "types.yaml").types[0].start == (0.0, 3.0)
    assert LayerType.from_key(one.key) == one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vector", 3, 4, (), (), 1, False), "as many channels after it as before"),
        (("table", 3, 4, (2,), (1,), 1, False), "has 0 entries in kernel, stride and dilation"),
        (("embedding", 3, 4), "an? embedding has no bias"),
        (("linear", 3, 4, (), (), 1, True, (), "none", "none", False, (0.0, -1.0)), "a mean and a standard deviation"),
    ],
)
def test_types_that_are_none(arguments, message):
    with pytest.raises(Exception, match=message):
        LayerType(*arguments)
