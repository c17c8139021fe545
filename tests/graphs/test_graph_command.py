"""`polyfed graph`: tables, picture, layer catalogue, and what is said to a user's mistakes."""

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from polyfed.cli.main import main
from polyfed.graphs import ArchitectureGraph, LayerCatalogue, LayerType, Node, extract
from polyfed.graphs.draw import draw_graph, layout_nodes_and_edges, node_label
from polyfed.models import build

NETS = '''
import itertools

import torch
from torch import nn

COUNTER = itertools.count()


class Learner(nn.Module):
    """A residual layer, a gain that belongs to no layer, and a layer that is never used."""

    def __init__(self, width=4, classes=2):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(width, width), nn.Linear(width, classes), nn.Linear(1, 1)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.b(x + self.a(x) * self.gain)


def changes(input_shape, num_classes):
    class Restless(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * next(COUNTER)

    return Restless(nn.Linear(input_shape[0], num_classes))


def fails():
    raise RuntimeError("no such file")
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "own_nets.py").write_text(NETS)
    return tmp_path


@pytest.fixture
def polyfed(capsys):
    """Runs a command and returns its status, standard output and error."""

    def polyfed(*arguments):
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    return polyfed


def cells(out):
    """The rows of all tables: lists of what stands between the lines."""
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in out.splitlines() if row.startswith("│")]


def test_tables_of_a_users_network(polyfed, here):
    status, out, err = polyfed("graph", "own_nets:Learner", "--input", "4", "--model.width", "4", "--model.classes=3",
                               "--plot", "graph.png")  # fmt: skip
    assert (status, err) == (0, "")
    assert cells(out) == [
        ["0", "", "a", "linear-4-4-k-s-g1-b1-d-none", "20", "generated"],
        ["1", "0", "gain", "scale-4-4-k-s-g1-b0-d-none", "4", "generated"],
        ["2", "1", "add", "add", "", ""],
        ["3", "2", "b", "linear-4-3-k-s-g1-b1-d-none", "15", "generated"],
        ["linear-4-3-k-s-g1-b1-d-none", "1", "15"],
        ["linear-4-4-k-s-g1-b1-d-none", "1", "20"],
        ["scale-4-4-k-s-g1-b0-d-none", "1", "4"],
        ["unused.weight", "1", "the output does not depend on it; delete it, or leave it, since it has no effect"],
        ["unused.bias", "1", "the output does not depend on it; delete it, or leave it, since it has no effect"],
    ]
    assert "4 nodes and 3 edges" in out
    assert out.endswith(
        "95.1% of 41 parameters are generated, as 3 layers of 3 types; the network was followed by torch.fx\n"
        "drawn in graph.png\n"
    )
    assert (here / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_networks_of_the_zoo(polyfed, here):
    arguments = ["--input", "1,8,8", "--plot", "one.svg"]
    status, out, err = polyfed("graph", "mlp", *arguments, "--classes", "3", "--model.hidden", "[16]")
    assert (status, err) == (0, "")
    assert [row[2:4] for row in cells(out)[:2]] == [
        ["fc1", "linear-64-16-k-s-g1-b1-d-relu"],
        ["fc2", "linear-16-3-k-s-g1-b1-d-none"],
    ]
    assert "stay with the client" not in out
    first = (here / "one.svg").read_bytes()
    assert b"<svg" in first
    assert polyfed("graph", "mlp", *arguments, "--classes", "3", "--model.hidden", "[16]")[1] == out
    assert (here / "one.svg").read_bytes() == first
    status, out, _ = polyfed("graph", "lstm", "--input=7", "--integer", "--model.vocabulary", "9")
    assert status == 0
    (local,) = [row for row in cells(out) if row[:2] == ["embedding.weight", "576"]]
    assert local[2].startswith("tables of which the data choose rows stay with the client (tables=local)")
    status, out, _ = polyfed("graph", "lstm", "--input=7", "--integer", "--model.vocabulary=9", "--tables=generated")
    assert (status, "embedding-9-64-k-s-g1-b0-d-none" in out, "100.0% of" in out) == (0, True, True)
    assert "--tables must be local or generated" in polyfed("graph", "lstm", "--input=7", "--tables=no")[2]


def test_a_catalogue_grows(polyfed, here):
    command = ["graph", "mlp", "--input", "1,8,8", "--catalogue", "layers.yaml"]
    status, out, _ = polyfed(*command, "--model.hidden", "[16]")
    assert status == 0
    assert "2 layer types in layers.yaml, 2 of them new" in out
    assert "4 layer types in layers.yaml, 2 of them new" in polyfed(*command, "--model.hidden", "[16, 12]")[1]
    assert "4 layer types in layers.yaml, 0 of them new" in polyfed(*command, "--model.hidden", "[16]")[1]
    sizes = {(64, 16): "relu", (16, 10): "none", (16, 12): "relu", (12, 10): "none"}
    types = (LayerType("linear", *size, activation=activation) for size, activation in sizes.items())
    catalogue = LayerCatalogue.read_yaml("layers.yaml")
    assert catalogue == LayerCatalogue(tuple(types))
    assert catalogue.largest_network == (64 + 1) * 16 + (16 + 1) * 12 + (12 + 1) * 10  # the [16, 12] of them


def test_graphs_of_the_paper(polyfed, here):
    """Its nodes, what its pictures say, and a catalogue that is not mixed with the other form."""
    network = [
        "flha_arch2",
        "--input",
        "1,8,8",
        "--model.width",
        "4",
        "--model.norm",
        "batch",
        "--catalogue",
        "layers.yaml",
    ]
    for options, nodes in (([], 17), (["--graph", "layers_and_norms"], 29), (["--graph", "layers"], 17)):
        (here / "layers.yaml").unlink(missing_ok=True)
        assert f"{nodes} nodes" in polyfed("graph", *network, *options)[1]
    assert {kind.norm for kind in LayerCatalogue.read_yaml("layers.yaml").types} == {"batch_norm", "none"}
    status, out, _ = polyfed("graph", *network, "--graph", "layers", "--no-joins")
    assert status == 0
    assert "13 nodes" in out
    assert "8 layer types in layers.yaml, 0 of them new" in out
    status, _, err = polyfed("graph", *network, "--graph", "layers_and_norms")
    assert status == 2
    assert "in the layer catalogue layers.yaml a norm is part of the layer before it" in err


def test_a_file_without_a_moved_norm_still_says_of_which_graphs_it_is(polyfed, here):
    network = ["graph", "mlp", "--input", "1,8,8", "--catalogue", "layers.yaml"]
    for first, second in (("layers", "layers_and_norms"), ("layers_and_norms", "layers")):
        (here / "layers.yaml").unlink(missing_ok=True)
        assert polyfed(*network, "--graph", first)[0] == 0
        status, _, err = polyfed(*network, "--graph", second)
        assert (status, f"--graph {first}" in err) == (2, True)
    (here / "layers.yaml").write_text(
        (here / "layers.yaml").read_text().replace("format: 2", "format: 2\ngraph: trees")
    )
    assert "must be layers or layers_and_norms, got 'trees'" in polyfed(*network)[2]


def test_a_moved_norm_is_in_the_label():
    kind = LayerType("linear", 8, 4, activation="relu", norm="layer_norm", norm_bias=True)
    assert node_label(Node("a", kind, {})) == "a\nlinear 8→4, relu, layer_norm"


def test_a_catalogue_of_an_earlier_version_is_not_added_to(polyfed, here):
    text = "layer_types:\n- {kind: linear, c_in: 64, c_out: 16, kernel: [], stride: [], groups: 1, bias: true}\n"
    (here / "layers.yaml").write_text(text)
    status, _, err = polyfed("graph", "mlp", "--input", "1,8,8", "--catalogue", "layers.yaml")
    assert status == 2
    assert "layers.yaml has format 1, and this version of polyfed reads format 2" in err
    assert "delete it and write it again, with `polyfed graph MODEL --catalogue FILE` for each network" in err
    assert (here / "layers.yaml").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "takes one model, got none"),
        (["mlp", "vit", "--input", "4"], "takes one model, got mlp and vit"),
        (["mlp"], "needs the shape of an example, for instance --input 3,32,32"),
        (["mlp", "--input", "3,x"], "--input must be whole numbers of at least 1, .* got '3,x'"),
        (["mlp", "--input", "3,0"], "got '3,0'"),
        (["mlp", "--input"], "--input needs a value"),
        (["mlp", "--input", "4", "--classes", "2,3"], "--classes must be one whole number of at least 1, got '2,3'"),
        (["mlp", "--input", "4", "--integer=yes"], "--integer takes no value"),
        (["mlp", "--input", "4", "--catalog", "c.yaml"], "unknown option --catalog; did you mean --catalogue"),
        (["mlp", "--input", "4", "--graph", "norms"], "--graph must be layers or layers_and_norms, got 'norms'"),
        (["mpl", "--input", "4"], "there is no model 'mpl'; did you mean mlp"),
        (["cnn-small"], "there is no model 'cnn-small'; did you mean cnn_small"),
        (["mlp", "--input", "4", "--model.hiden", "3"], "unknown argument 'hiden'; did you mean hidden"),
        (["mlp", "--input", "4", "--model.hidden", "[3"], r"--model.hidden must be a number, a word or a \[list\]"),
        (["vit", "--input", "1,9,9"], "patch=4 does not divide images of 9x9"),
        (["own_nets:Lerner", "--input", "4"], "has no 'Lerner'; did you mean Learner"),
        (["own_nets:fails", "--input", "4"], "factory own_nets:fails failed: RuntimeError: no such file"),
        (["own_nets:Learner", "--input", "5"], r"fails on an example of shape \(2, 5\) .* in a \(Linear\)"),
        (["own_nets:changes", "--input", "4"], "cannot be followed. torch.fx stopped in Restless"),
        (["mlp", "--input", "4", "--plot", "graph.gif"], "a picture must end in .png or .svg, got 'graph.gif'"),
        (["mlp", "--input", "4", "--plot", "no/graph.png"], "cannot write the picture 'no/graph.png'"),
        (
            ["mlp", "--input", "4", "--catalogue", "no/c.yaml"],
            r"cannot write the layer catalogue 'no/c.yaml' \(No such",
        ),
        (["mlp", "--input", "4", "--catalogue", "own_nets.py"], "the layer catalogue own_nets.py"),
        (["torch.nn:Identity", "--input", "4", "--catalogue", "c.yaml"], "nothing to write to c.yaml"),
    ],
)
def test_a_users_mistakes(polyfed, arguments, message):
    status, out, err = polyfed("graph", *arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"polyfed: .*{message}.*\n", err), err


def test_help(polyfed):
    status, out, _ = polyfed("graph", "--help")
    assert status == 0
    assert out.startswith("usage: polyfed graph MODEL --input SHAPE")
    for option in ("--integer", "--classes", "--model.NAME", "--plot", "--catalogue", "--graph", "--no-joins"):
        assert option in out
    assert "\n  graph " in polyfed("--help")[1]


def crosses(line, places):
    """Whether a line's corners, but for its ends, meet a node, or lie in another row than the next one."""
    inside = line[1:-1]
    gaps = [after[1] - before[1] for before, after in pairwise(line)]
    return any(abs(x - column) < 0.5 and y == row for x, y in inside for column, row in places) or set(gaps) != {1.0}


@pytest.mark.parametrize(
    ("name", "shape"), [("resnet18", (3, 16, 16)), ("flha_chain", (1, 16, 16)), ("vit", (1, 8, 8))]
)
def test_no_line_of_the_picture_crosses_a_node(name, shape):
    model = build(name, shape, 3, **({"pool": "cls"} if name == "vit" else {"width": 4}))
    graph = extract(model, torch.zeros(2, *shape))
    places, lines = layout_nodes_and_edges(graph)
    assert len(set(places)) == len(graph.nodes)
    assert all(places[a][1] < places[b][1] for a, b in graph.edges)
    assert not any(crosses(line, places) for line in lines)


def test_pictures_of_odd_graphs(here):
    """No nodes, nodes without edges, long names."""
    draw_graph(extract(nn.Flatten(), torch.zeros(2, 3)), "none.png")
    node = Node("block." * 20 + "gain", "other", {"gain": "gain"})
    draw_graph(ArchitectureGraph((node, node), (), {"gain": 1}, {"gain": "it is mine"}), "two.svg", "a" * 100)
    assert (here / "none.png").exists()
    assert node_label(node) == "…lock.block.block.block.block.gain\nstays with the client"
    pointwise = LayerType("conv2d", 8, 8, (1, 3), (2, 1), groups=8)
    assert node_label(Node("c", pointwise, {})) == "c\nconv2d 8→8, 1×3 /2×1, 8 groups"
    dilated = LayerType("conv1d", 8, 4, (3,), (1,), dilation=(2,), activation="tanh")
    assert node_label(Node("c", dilated, {})) == "c\nconv1d 8→4, 3, dilated 2, tanh"
    assert [node_label(Node("block.add", mark, {})) for mark in ("add", "other")] == [
        "block.add",
        "block.add\nstays with the client",
    ]
