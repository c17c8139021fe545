"""Pictures of FLHA-GHN: what is drawn are the curves, weights and scores that are there."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import Local
from polyfed.core.errors import UserError
from polyfed.data.plot import save_figure
from polyfed.graphs import LayerCatalogue, extract
from polyfed.hypernetworks.ghn import GHNConfig
from polyfed.report.figures.generation import (
    draw_communication_tradeoff,
    draw_initialisation,
    draw_warm_start_curves,
    generate_untrained_weights,
    read_communication_tradeoff,
)
from polyfed.simulation.results.unseen_clients import TrainingCurves
from polyfed.testing import small_clients


def lines(axes):
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.get_lines()}


# -- curves -------------------------------------------------------------------------------------------------------


def test_curves_are_drawn_as_they_are():
    figure = draw_warm_start_curves({
        "a": TrainingCurves("accuracy", (0.5, 0.75, 0.875), (0.125, 0.25, 0.625)),
        "b": TrainingCurves("accuracy", (0.25, 0.25, 0.25), (0.125, 0.25, 0.5)),
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
    (axes,) = draw_warm_start_curves({"a": TrainingCurves("r2", (0.5, None, 0.5), (0.0, 0.25, None))}).axes
    assert math.isnan(lines(axes)["generated weights"][1])
    assert math.isnan(lines(axes)["from scratch"][2])
    assert len(axes.get_lines()) == 2


@pytest.mark.slow
def test_many_newcomers_have_panels_of_their_own(tmp_path):
    curves = {str(k): TrainingCurves("accuracy", (0.1, k / 10), (0.1, 0.2)) for k in range(4)}
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


def test_histograms_hold_every_weight_and_show_its_distribution(graph):
    figure = draw_initialisation(graph, "2.weight", initialisations=("standard", "paper", "kaiming"), seed=1)
    assert len(figure.axes) == 3
    kaiming = math.sqrt(2 / (16 * 9))
    for axes, start in zip(figure.axes, ("standard", "paper", "kaiming"), strict=True):
        drawn, made = (patch.get_data() for patch in axes.patches)
        for values, edges, _ in (drawn, made):
            assert (values * np.diff(edges)).sum() == pytest.approx(1)
        weight = generate_untrained_weights(graph, "2.weight", start, seed=1).numpy().ravel()
        assert len(weight) == 32 * 16 * 9
        values, edges, _ = made
        assert values == pytest.approx(np.histogram(weight, edges, density=True)[0])
        assert edges[0] <= weight.min()
        assert edges[-1] >= weight.max()
        centres = (drawn.edges[1:] + drawn.edges[:-1]) / 2
        spread = math.sqrt((centres**2 * drawn.values * np.diff(drawn.edges)).sum())
        assert spread == pytest.approx(kaiming, rel=0.05)


def test_the_papers_initialisation_is_held_against_fan_out(graph):
    figure = draw_initialisation(graph, "2.weight", initialisations=("paper",), fan="out", form=GHNConfig(
        LayerCatalogue(graph.layer_types)), seed=1)  # fmt: skip
    drawn, made = (patch.get_data() for patch in figure.axes[0].patches)
    centres = (drawn.edges[1:] + drawn.edges[:-1]) / 2
    spreads = [math.sqrt((centres**2 * one.values * np.diff(one.edges)).sum()) for one in (drawn, made)]
    assert spreads == pytest.approx([math.sqrt(2 / (32 * 9))] * 2, rel=0.05)


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
        ("3.weight", "kaiming", "'3.weight' is the scale of a norm layer"),
        ("0.bias", "kaiming", "'0.bias' is a bias, which starts at 0"),
        ("0.wieght", "kaiming", "'0.wieght' is not generated for this network; did you mean 0.weight?"),
        ("0.weight", "kaimign", "unknown initialisation 'kaimign'; did you mean kaiming?"),
    ],
)
def test_weights_that_have_no_histogram(graph, parameter, start, sentence):
    with pytest.raises(UserError, match=sentence):
        draw_initialisation(graph, parameter, initialisations=(start,))


# -- communications -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four epochs on clients each: with 1, 2 and 4 communications, the last of two seeds."""
    folder = tmp_path_factory.mktemp("communications")
    made = {}
    for name, rounds, seed in (("four", 4, 0), ("one", 1, 0), ("two", 2, 0), ("again", 4, 1)):
        options = Local(lr=0.05, local_epochs=4 // rounds)
        made[folder / name] = pf.federate(
            small_clients(2), options, rounds=rounds, seed=seed, workers=0, out=folder / name
        )
    return made


def test_communications_are_those_of_the_runs(runs):
    found = read_communication_tradeoff(list(runs))
    four, one, two, again = ({row["client"]: row["accuracy"] for row in run.table()} for run in runs.values())
    assert (found.score_name, found.total_epochs, found.rounds) == ("accuracy", 4, (1, 2, 4))
    assert found.mean_scores == pytest.approx((one["mean"], two["mean"], (four["mean"] + again["mean"]) / 2))
    assert found.score_deviations == pytest.approx((0, 0, abs(four["mean"] - again["mean"]) / 2))
    assert list(found.scores_by_client) == ["client-0", "client-1"]
    for client, values in found.scores_by_client.items():
        assert values == pytest.approx((one[client], two[client], (four[client] + again[client]) / 2))


def test_communications_are_drawn(runs, tmp_path):
    found = read_communication_tradeoff(list(runs))
    figure = draw_communication_tradeoff(found)
    (axes,) = figure.axes
    drawn = lines(axes)
    assert [drawn[client] for client in found.scores_by_client] == [
        list(values) for values in found.scores_by_client.values()
    ]
    (mean,) = axes.containers
    assert list(mean.lines[0].get_ydata()) == list(found.mean_scores)
    assert list(mean.lines[0].get_xdata()) == [1, 2, 4]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]
    assert "L = 4/R" in axes.get_xlabel()
    assert axes.get_ylabel() == "accuracy"
    save_figure(figure, tmp_path / "x.png")


def test_runs_that_cannot_be_compared(runs, tmp_path):
    with pytest.raises(UserError, match="give at least one run directory"):
        read_communication_tradeoff([])
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.yaml"):
        read_communication_tradeoff([tmp_path])
    (first, *_) = runs
    for name, fields, number, sentence in (
        ("longer", {"local_epochs": 3}, 2, "in rounds × local_epochs: 3 against 4"),
        ("more", {"local_epochs": 4}, 3, "in clients: client-0, client-1, client-2 against client-0, client-1"),
        ("steps", {"local_steps": 4}, 2, "do not train for local_epochs"),
    ):
        pf.federate(small_clients(number), Local(**fields), rounds=1, workers=0, out=tmp_path / name)
        with pytest.raises(UserError, match=sentence):
            read_communication_tradeoff([first, tmp_path / name])


def test_a_run_that_is_not_complete(runs, tmp_path):
    folder = Path(shutil.copytree(next(iter(runs)), tmp_path / "run"))
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(UserError, match=r"run has 3 of 4 rounds; finish it, `polyfed resume"):
        read_communication_tradeoff([folder])
