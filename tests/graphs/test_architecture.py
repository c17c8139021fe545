"""Layer types, graphs and the catalogue: keys and files round trip, nonsense is refused, restrictions hold."""

import pytest
import yaml

from polyfed.core.errors import UserError
from polyfed.graphs import ArchitectureGraph, LayerCatalogue, LayerType, Node

CONV = LayerType("conv2d", 4, 8, (3, 3), (2, 2), 2, False, activation="relu")
LINE = LayerType("linear", 8, 3)
NORM = LayerType("batch_norm", 8, 8)
DILATED = LayerType("conv1d", 1, 2, (5,), (1,), dilation=(2,), activation="sigmoid+tanh")
TYPES = [CONV, LINE, NORM, DILATED, LayerType("conv3d", 1, 2, (1, 2, 3), (1, 1, 2))]


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.key)
def test_keys_round_trip_and_have_no_dots(kind):
    assert LayerType.from_key(kind.key) == kind
    assert "." not in kind.key


def test_shapes_and_fan_in():
    assert CONV.parameter_shapes == {"weight": (8, 2, 3, 3)}
    assert CONV.fan_in == 2 * 9
    assert LINE.parameter_shapes == {"weight": (3, 8), "bias": (3,)}
    assert NORM.parameter_shapes == {"weight": (8,), "bias": (8,)}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (("convolution", 1, 1), "did you mean|hoices"),
        (("linear", 0, 3), "at least 1"),
        (("linear", 2, True), "at least 1"),
        (("conv2d", 2, 3), "2 entries in kernel"),
        (("linear", 2, 3, (1,), (1,)), "0 entries"),
        (("linear", 2, 4, (), (), 2), "groups=1"),
        (("linear", 2, 4, (), (), 1, True, (1,)), "0 entries in kernel, stride and dilation"),
        (("conv1d", 2, 4, (3,), (1,), 1, True, (0,)), "at least 1"),
        (("linear", 2, 4, (), (), 1, True, (), "tan"), "unknown activation 'tan': give 'none', or names of celu, "),
        (("linear", 2, 4, (), (), 1, True, (), "tanh+relu"), "in this order"),
        (("linear", 2, 4, (), (), 1, True, (), ["relu"]), "unknown activation"),
        (("conv1d", 3, 4, (1,), (1,), 2), "groups=2 does not divide"),
        (("batch_norm", 3, 4), "as many channels"),
    ],
)
def test_types_that_are_no_layers_are_refused(fields, part):
    with pytest.raises(UserError, match=part):
        LayerType(*fields)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("", "is not a layer type; an example is"),
        ("linear-8-3", "is not a layer type"),
        ("linear-8-3-k-s-g1-b2-d-none", "is not a layer type"),
        ("conv2d-1-1-k3-s1-g1-b1-d1-none", "2 entries"),
        ("linear-8-3-k-s-g1-b1-d-tan", "unknown activation"),
    ],
)
def test_keys_that_are_none_are_refused(key, part):
    with pytest.raises(UserError, match=part):
        LayerType.from_key(key)


def test_dilation_is_one_in_each_dimension_unless_it_is_given():
    assert LayerType("conv2d", 1, 1, (3, 3), (1, 1)) == LayerType("conv2d", 1, 1, (3, 3), (1, 1), dilation=(1, 1))
    assert LINE.dilation == ()


def graph():
    nodes = (
        Node("conv", CONV, {"weight": "conv.weight"}),
        Node("norm", NORM, {"weight": "norm.weight", "bias": "norm.bias"}),
        Node("lstm", "other", {"lstm.w": "lstm.w"}),
        Node("join", "add", {}),
        Node("conv again", CONV, {"weight": "conv.weight"}),
        Node("head", LINE, {"weight": "head.weight", "bias": "head.bias"}),
    )
    sizes = {"conv.weight": 144, "norm.weight": 8, "norm.bias": 8, "lstm.w": 13, "head.weight": 24, "head.bias": 3}
    return ArchitectureGraph(nodes, ((0, 1), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5)), sizes, {"lstm.w": "no layer"})


def test_shared_weights_are_one_set_with_two_nodes():
    sets = graph().generated_weights
    assert [(made.type, made.nodes) for made in sets] == [(CONV, (0, 4)), (NORM, (1,)), (LINE, (5,))]
    assert graph().layer_types == tuple(sorted([CONV, LINE, NORM]))
    assert graph().coverage == pytest.approx(1 - 13 / 200)


def test_layers_outside_the_catalogue_stay_private():
    whole = graph()
    assert whole.restrict_to_types(TYPES) is whole
    less = whole.restrict_to_types([LINE])
    assert [node.type for node in less.nodes] == ["other", "other", "other", "add", "other", LINE]
    assert less.local_reasons.keys() == {"conv.weight", "norm.weight", "norm.bias", "lstm.w"}
    assert CONV.key in less.local_reasons["conv.weight"]
    assert less.edges == whole.edges
    assert less.coverage == pytest.approx(27 / 200)


def test_catalogue_is_sorted_and_a_union():
    one, other = graph(), graph().restrict_to_types([LINE])
    assert LayerCatalogue.from_graphs([one, other]) == LayerCatalogue((NORM, LINE, CONV, CONV))
    assert LayerCatalogue.from_graphs([other, one]).largest_network == one.num_generated > other.num_generated


def test_catalogue_files_round_trip(tmp_path):
    path = tmp_path / "catalogue.yaml"
    for size in (0, 1210):
        LayerCatalogue(tuple(TYPES), size).write_yaml(path)
        read = LayerCatalogue.read_yaml(path)
        assert (read.types, read.largest_network) == (LayerCatalogue(tuple(TYPES)).types, size)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("layer_types: []", "must have a list"),
        ("[1]", "must have a list"),
        (
            "layer_types: [{kind: linear, c_in: 1, c_out: 2}]",
            "has format 1, and this version of polyfed reads format 2, in ",
        ),
        ("format: 3\nlayer_types: [3]", "delete it and write it again, with `polyfed graph"),
        ("format: 2\nlayer_types: [{kind: linear, c_in: 1, c_out: 2, dilation: 1}]", "dilation must be a list"),
        ("format: 2\nlayer_types: [{kind: linear, c_in: 1, c_out: 2, activation: rel}]", "unknown activation 'rel'"),
        ("format: 2\nlayer_types: [3]", "layer type 1 must give kind, c_in and c_out"),
        ("format: 2\nlayer_types: [{kind: linear, c_in: 1, c_out: 2, grops: 1}]", "did you mean groups"),
        ("format: 2\nlayer_types: [{kind: linear, c_in: 1, c_out: 2, bias: 3}]", "bias must be true or false"),
        (
            "format: 2\nlayer_types: [{kind: conv1d, c_in: 1, c_out: 2, kernel: 3, stride: [1]}]",
            "kernel must be a list",
        ),
        ("format: 2\nlayer_types: [{kind: linear, c_in: 1.5, c_out: 2}]", "layer type 1: c_in must be a whole number"),
        ("format: 2\nlayer_types: [{kind: lnear, c_in: 1, c_out: 2}]", "did you mean linear"),
        ("format: 2\nlayer_types: [{kind: [1], c_in: 1, c_out: 2}]", "kind must be text"),
        ("format: 2\nlargest_network: big\nlayer_types: [3]", "largest_network must be a whole number, got 'big'"),
        ("format: 2\nlargest_network: -1\nlayer_types: [3]", "largest_network must be at least 0, got -1"),
    ],
)
def test_catalogue_files_with_mistakes_are_refused(tmp_path, text, part):
    path = tmp_path / "catalogue.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=part):
        LayerCatalogue.read_yaml(path)


def test_catalogue_files_are_yaml_that_people_can_write(tmp_path):
    path = tmp_path / "catalogue.yaml"
    LayerCatalogue((CONV,)).write_yaml(path)
    (row,) = yaml.safe_load(path.read_text())["layer_types"]
    assert (row["kernel"], row["dilation"], row["activation"]) == ([3, 3], [1, 1], "relu")
