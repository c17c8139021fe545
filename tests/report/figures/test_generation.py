"""FLHA-GHN: the curves that are drawn are those there are, and the weights of an untrained hypernetwork."""

import math

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.data.plot import save_figure
from polyfed.graphs import LayerCatalogue, extract
from polyfed.hypernetworks.ghn import GHNConfig
from polyfed.report.figures.generation import draw_warm_start_curves, generate_untrained_weights
from polyfed.simulation.results.unseen_clients import UnseenClientCurves


def lines(axes):
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.get_lines()}


# -- curves -------------------------------------------------------------------------------------------------------


def test_curves_are_drawn_as_they_are():
    figure = draw_warm_start_curves({
        "a": UnseenClientCurves("accuracy", (0.5, 0.75, 0.875), (0.125, 0.25, 0.625)),
        "b": UnseenClientCurves("accuracy", (0.25, 0.25, 0.25), (0.125, 0.25, 0.5)),
    })  # fmt: skip
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy"] * 2
    first, second = figure.axes
    assert lines(first)["generated weights"] == [0.5, 0.75, 0.875]
    assert lines(first)["from scratch"] == [0.125, 0.25, 0.625]
    (level, mark) = [line for line in first.get_lines() if line.get_label().startswith("_")]
    assert set(level.get_ydata()) == {0.625}
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([1], [0.75])
    assert len(second.get_lines()) == 3, "the warm start never has the goal, so nothing marks it"
    for axes in figure.axes:
        assert list(axes.get_lines()[0].get_xdata()) == [0, 1, 2]


def test_a_training_that_diverged_leaves_a_gap():
    (axes,) = draw_warm_start_curves({"a": UnseenClientCurves("r2", (0.5, None, 0.5), (0.0, 0.25, None))}).axes
    assert math.isnan(lines(axes)["generated weights"][1])
    assert math.isnan(lines(axes)["from scratch"][2])
    assert len(axes.get_lines()) == 2


@pytest.mark.slow
def test_many_newcomers_have_panels_of_their_own(tmp_path):
    curves = {str(k): UnseenClientCurves("accuracy", (0.1, k / 10), (0.1, 0.2)) for k in range(4)}
    figure = draw_warm_start_curves(curves)
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == list(curves)
    for name in ("one.svg", "two.svg"):
        save_figure(draw_warm_start_curves(curves), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    with pytest.raises(UserError, match="there are no curves to draw; train for some epochs"):
        draw_warm_start_curves({})


# -- initial weights ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph():
    net = nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Flatten(),
                        nn.Linear(32 * 16, 5))  # fmt: skip
    return extract(net, torch.zeros(2, 4, 8, 8))


def test_the_papers_initialisation_is_held_against_fan_out(graph):
    form = GHNConfig(LayerCatalogue(graph.layer_types))
    weight = generate_untrained_weights(graph, "2.weight", "paper", form=form, seed=1)
    assert weight.shape == (32, 16, 3, 3)
    assert weight.std(correction=0).item() == pytest.approx(math.sqrt(2 / (32 * 9)), rel=0.05)


def test_our_initialisation_has_kaimings_variance_and_the_standard_has_not(graph):
    for name, fan_in in (("0.weight", 4 * 9), ("2.weight", 16 * 9), ("5.weight", 32 * 16)):
        wanted = math.sqrt(2 / fan_in)
        assert generate_untrained_weights(graph, name, "kaiming").std().item() == pytest.approx(wanted, rel=0.15)
        assert abs(generate_untrained_weights(graph, name, "standard").std().item() / wanted - 1) > 0.3


def test_a_form_of_ones_own_decides(graph):
    form = GHNConfig(LayerCatalogue(graph.layer_types[:2]), depth=0, latent=4, hidden=3)
    known = next(made for made in graph.generated_weights if made.type in graph.layer_types[:2])
    name = known.parameters["weight"]
    assert generate_untrained_weights(graph, name, "kaiming", form=form).shape == known.type.parameter_shapes["weight"]
    other = next(
        made.parameters["weight"] for made in graph.generated_weights if made.type not in graph.layer_types[:2]
    )
    with pytest.raises(UserError, match=f"'{other}' is not generated for this network"):
        generate_untrained_weights(graph, other, "kaiming", form=form)


@pytest.mark.parametrize(
    ("parameter", "start", "sentence"),
    [
        ("0.wieght", "kaiming", "'0.wieght' is not generated for this network; did you mean 0.weight?"),
        ("0.weight", "kaimign", "unknown initialisation 'kaimign'; did you mean kaiming?"),
    ],
)
def test_weights_that_are_not_generated(graph, parameter, start, sentence):
    with pytest.raises(UserError, match=sentence):
        generate_untrained_weights(graph, parameter, start)
