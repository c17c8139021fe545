"""The decoder that generates layers of any type and width."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.algorithm import Message, ServerContext
from polyfed.core.seeds import torch_generator
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.graphs.client_graph import graph_of_client
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors, hypernetwork_size_in_bytes
from polyfed.hypernetworks.ghn_start import init_ghn_params
from polyfed.hypernetworks.lowrank_decoder import LowRankDecoder, common_draw, fits, largest_sizes

SIZES = (12, 10, 9)
CONV = LayerType("conv2d", 8, 12, (3, 3), (1, 1), norm="batch_norm", norm_bias=True)
KINDS = {
    "conv": CONV,
    "depthwise": LayerType("conv2d", 6, 6, (3, 3), (1, 1), groups=6, bias=False),
    "linear": LayerType("linear", 10, 4),
    "norm": LayerType("layer_norm", 5, 5),
    "words": LayerType("embedding", 7, 3, bias=False, start=(0.0, 0.02)),
    "scale": LayerType("scale", 5, 5, bias=False, start=(1e-3, 0.0)),
    "table": LayerType("table", 2, 3, (4,), bias=False),
    "number": LayerType("scalar", 1, 1, bias=False, start=(2.5, 0.0)),
    "up": LayerType("conv_transpose1d", 4, 6, (2,), (2,)),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_weights_are_those_of_the_formula(kind):
    decoder, generator = LowRankDecoder(5, 4, 3, SIZES, normalise=False).double(), torch_generator(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(generator=generator)
    h = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    z = F.leaky_relu(decoder.hidden(h))
    constant, s = torch.cat([z, torch.ones(2, 1)], 1), decoder.scale(z)
    made = decoder(kind, h)
    assert {role: tuple(each[0].shape) for role, each in made.items()} == kind.parameter_shapes
    shape = kind.parameter_shapes["weight"]
    rows, columns, positions = (*(*shape, 1, 1)[:2], math.prod(shape[2:]))
    mean, spread = (1.0, 0.0) if kind.is_norm else kind.start_or_default
    if kind.kind in ("conv2d", "linear"):
        spread = math.sqrt(2 / kind.fan_in)
    for k in range(2):
        u, v, core = (part @ constant[k] for part in (decoder.rows, decoder.columns, decoder.core))
        change = torch.einsum("or,ir,kr->oik", u[:rows], v[:columns], core[:positions]) * s[k] / math.sqrt(rows)
        draw = common_draw(rows, columns, positions, SIZES, k)
        torch.testing.assert_close(made["weight"][k], (mean + spread * draw + change).reshape(shape))
        if "bias" in made:
            torch.testing.assert_close(made["bias"][k], (decoder.vectors[0] @ constant[k])[: kind.c_out])


def test_it_starts_as_its_draw_and_narrow_layers_are_cut_from_wide_ones():
    decoder = LowRankDecoder(5, 4, 3, SIZES)
    decoder.reset()
    h = torch.randn(1, 5)
    wide, narrow = (decoder(LayerType("linear", i, o), h) for i, o in ((10, 12), (6, 7)))
    torch.testing.assert_close(narrow["weight"][0] * math.sqrt(6), wide["weight"][0][:7, :6] * math.sqrt(10))
    torch.testing.assert_close(wide["weight"][0], math.sqrt(2 / 10) * common_draw(12, 10, 1, SIZES, 0)[..., 0])
    scales = decoder(CONV, h)
    assert (scales["scale"][0].unique().tolist(), scales["shift"][0].unique().tolist()) == ([1.0], [0.0])
    assert not torch.equal(common_draw(4, 4, 1, SIZES, 0), common_draw(4, 4, 1, SIZES, 1))


def test_sizes():
    assert largest_sizes(KINDS.values()) == (12, 10, 9)
    assert fits(CONV, SIZES)
    assert not fits(LayerType("linear", 11, 4), SIZES)
    assert not fits(LayerType("conv_transpose1d", 4, 14, (2,), (2,)), SIZES)  # its bias has 14 entries


def net(width, depth=1):
    middle = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), *middle, nn.Linear(width, 3))


def test_the_hypernetwork_does_not_grow_with_the_types():
    catalogues = [
        LayerCatalogue.from_graphs(extract(net(w), torch.ones(2, 4)) for w in widths) for widths in ((9,), range(3, 10))
    ]
    forms = [GHNConfig(LayerCatalogue(()), head="lowrank", sizes=largest_sizes(c.types)) for c in catalogues]
    assert hypernetwork_size_in_bytes(forms[0]) == hypernetwork_size_in_bytes(forms[1])
    assert len(catalogues[1].types) > 5 * len(catalogues[0].types)


@pytest.mark.parametrize(
    "options", [{}, {"gnn": "gated"}, {"passing": "asynchronous"}, {"depth": 0}, {"normalise": False}]
)
def test_generated_weights_start_with_kaimings_variance(options):
    graph = extract(net(64, 2), torch.ones(2, 4))
    form = GHNConfig(LayerCatalogue(()), **{"depth": 2, "head": "lowrank", "sizes": (64, 64, 1), **options})
    ghn = GHN(form)
    ghn.load_state_dict(init_ghn_params(form, "kaiming", seed=0))
    made = ghn(graph_to_tensors(graph, None, torch.device("cpu"), form.passing))
    assert made["2.weight"].std().item() == pytest.approx(math.sqrt(2 / 64), rel=0.05)
    assert not torch.equal(made["2.weight"], made["4.weight"])  # of one type, and each with a draw of its own
    assert made.keys() == dict(net(64, 2).named_parameters()).keys()


def data(seed, count=60):
    x = torch.randn(count, 4, generator=torch_generator(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.thorough
def test_networks_of_different_widths_learn_together_and_an_unseen_width_gets_weights():
    clients = [pf.Client(f"c{k}", lambda w=w: net(w), data(k), data(k + 9)) for k, w in enumerate((12, 16, 20))]
    method = FLHAGHN(head="lowrank", depth=2, lr=0.03, batch_size=16, local_epochs=3)
    run = pf.federate(clients, method, rounds=8, workers=0, seed=0)
    assert run.table()[-1]["generated_accuracy"] > 0.7
    start = run.warmstart(lambda: net(14), data(20), test=data(21))
    assert (start.coverage, dict(start.local)) == (1.0, {})
    assert start.before["accuracy"] > 0.6
    wide = run.warmstart(lambda: net(24), data(20), test=data(21))
    assert wide.coverage == 0.0
    assert "lacks its type linear-4-24" in wide.local["0.weight"]


def test_a_reply_does_not_name_layer_types():
    client = pf.Client("c", lambda: net(12), data(0), data(1))
    method = FLHAGHN(head="lowrank", depth=1, lr=0.1)
    catalogue = LayerCatalogue.from_graphs([graph_of_client(client)])
    state = method.server_init(ServerContext(0, 1, (), layer_catalogue=catalogue))
    down = Message(state, {"lr": 0.1})
    up, _ = method.local_update(down, method.client_init(client, 0), client, seed=0)
    assert up.tensors["ghn"].keys() == state["ghn"].keys()
    assert not [name for name in state["ghn"] if "linear-" in name]


def test_what_does_not_fit_is_refused():
    with pytest.raises(Exception, match="initialisation must be 'kaiming' or 'network'"):
        FLHAGHN(head="lowrank", initialisation="paper")
    client = pf.Client("c", lambda: net(12), data(0), data(1))
    with pytest.raises(ValueError, match="no low-rank decoder"):
        FLHAGHN(head="lowrank").client_graph(Message({"ghn": {}}, {}), client)
