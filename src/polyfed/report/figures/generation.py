"""Draws how fast clients learn from weights that FLHA-GHN's hypernetwork generated, compared with training from scratch
(its Figs. 3 and 7), and generates weights by an untrained hypernetwork (Fig. 6).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import derive_seed, temporary_rng_seed
from polyfed.graphs import ArchitectureGraph, LayerCatalogue
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors
from polyfed.hypernetworks.ghn_start import init_ghn_params
from polyfed.simulation.results.unseen_clients import UnseenClientCurves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Initialisation = Literal["standard", "paper", "last_layer", "kaiming"]
_WARM, _SCRATCH = "#0072B2", "#D55E00"


def draw_warm_start_curves(curves: Mapping[str, UnseenClientCurves]) -> "Figure":
    """Draws unseen clients' scores by epoch, from generated weights and scratch (FLHA-GHN, Figs. 3, 7).

    Each unseen client has a panel. A dotted line marks the last score from scratch, a circle the epoch in which the warm
    start reaches it.

    Args:
        curves: by unseen client, for example from `polyfed.simulation.results.unseen_clients.compare_with_scratch`.

    Raises:
        UserError: `curves` is empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not curves:
        raise UserError("there are no curves to draw; train for some epochs, `polyfed warmstart DIR --epochs 20`")
    columns = min(len(curves), 4)
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 0.6 + 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (name, client_curves) in zip(panels, curves.items(), strict=False):
        epochs = range(client_curves.epochs + 1)
        for values, colour, label in (
            (client_curves.warm, _WARM, "generated weights"),
            (client_curves.scratch, _SCRATCH, "from scratch"),
        ):
            # A training that diverged leaves a gap.
            heights = [math.nan if value is None else value for value in values]
            axes.plot(epochs, heights, color=colour, label=label, linewidth=1.5, marker=".", markersize=4)
        if (goal := client_curves.scratch[-1]) is not None:
            axes.axhline(goal, color=_SCRATCH, linestyle=":", linewidth=1)
        if client_curves.epochs_to_match_scratch is not None:
            value = client_curves.warm[client_curves.epochs_to_match_scratch]
            axes.plot(
                [client_curves.epochs_to_match_scratch],
                [value],
                color=_WARM,
                marker="o",
                markersize=8,
                fillstyle="none",
                linestyle="",
            )
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("epochs of training the whole network")
        axes.set_ylabel(client_curves.score)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    for spare in panels[len(curves) :]:
        spare.set_visible(False)
    return figure


def generate_untrained_weights(
    graph: ArchitectureGraph,
    parameter: str,
    initialisation: Initialisation,
    *,
    form: GHNConfig | None = None,
    seed: int = 0,
) -> Tensor:
    """Returns the values that an untrained hypernetwork of FLHA-GHN generates for one parameter of a network (Fig. 6).

    Args:
        graph: the network's graph, for example from `graphs.extract`.
        parameter: the parameter's name in `named_parameters()`.
        initialisation: how the hypernetwork starts: "kaiming", "paper" or "last_layer" as in
            `hypernetworks.ghn_start.init_ghn_params`; "standard" as PyTorch and PyG initialise the published design, with no
            regard to the generated weights.
        form: the hypernetwork's configuration; None takes the paper's sizes and the layer types of the graph.
        seed: seed of the hypernetwork's initial weights.

    Raises:
        UserError: the initialisation is unknown, or the parameter is not generated.

    >>> from polyfed.graphs import extract
    >>> net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    >>> weight = generate_untrained_weights(extract(net, torch.zeros(2, 100)), "0.weight", "kaiming")
    >>> tuple(weight.shape), bool((weight.std() / (2 / 100) ** 0.5 - 1).abs() < 0.2)
    ((50, 100), True)
    """
    form = form or GHNConfig(LayerCatalogue.from_graphs([graph]))
    graph = graph.restrict_to_types(form.catalogue.types)
    names = {name for node in graph.generated_weights for name in node.parameters.values()}
    if parameter not in names:
        raise UserError(f"{parameter!r} is not generated for this network; {did_you_mean(parameter, names)}")
    if initialisation not in (choices := get_args(Initialisation)):
        raise UserError(f"unknown initialisation {initialisation!r}; {did_you_mean(str(initialisation), choices)}")
    with exclusive_single_torch_thread_with_grad(), torch.no_grad():  # as in a run
        if initialisation == "standard":
            form = dataclasses.replace(form, head="mlp", normalise=False)
            with temporary_rng_seed(derive_seed(seed, "graph hypernetwork")):
                ghn = GHN(form)
        else:
            ghn = GHN(form)
            ghn.load_state_dict(init_ghn_params(form, initialisation, seed))
        weight: Tensor = ghn(graph_to_tensors(graph, form.catalogue, torch.device("cpu"), form.passing))[parameter]
    return weight
