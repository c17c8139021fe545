"""Pictures of FLHA-GHN: warm starts against training from scratch (its Figs. 3 and 7), the weights that a fresh hypernetwork
generates (Fig. 6), and the score against the number of communications (Fig. 4)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.evaluate import DEFAULT_METRIC
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.machine.threads import single_torch_thread
from polyfed.core.seeds import derive_seed, temporary_rng_seed, torch_generator
from polyfed.graphs import ArchitectureGraph, LayerCatalogue
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors, init_ghn_params
from polyfed.simulation.results.unseen_clients import TrainingCurves
from polyfed.simulation.storage.directory import read_config, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Initialisation = Literal["standard", "paper", "last_layer", "kaiming"]
_TITLES: Mapping[Initialisation, str] = {
    "standard": "initialised as PyTorch does",
    "paper": "initialised by the paper's sentence",
    "last_layer": "by the paper's sentence, the last layer alone",
    "kaiming": "initialised for Kaiming's variance (ours)",
}
_WARM, _SCRATCH, _REST = "#0072B2", "#D55E00", "#9a9a9a"
_BINS = 60


def draw_warm_start_curves(curves: Mapping[str, TrainingCurves]) -> "Figure":
    """An unseen client's score while its whole network is trained, from the warm start and from scratch (Figs. 3 and 7): one
    panel an unseen client. A dotted line is what training from scratch has at the end, a mark where the warm start
    reaches it.

    Args:
        curves: of each unseen client, e.g. of `polyfed.simulation.results.unseen_clients.compare_with_scratch`.

    Raises:
        UserError: there are none.
    """
    from matplotlib.ticker import MaxNLocator

    if not curves:
        raise UserError("there are no curves to draw; train for some epochs, `polyfed warmstart RUN --epochs 20`")
    columns = min(len(curves), 4)
    lines = -(-len(curves) // columns)
    figure = _new_figure(1 + 4.2 * columns, 0.6 + 3.4 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (name, client_curves) in zip(panels, curves.items(), strict=False):
        epochs = range(client_curves.epochs + 1)
        for values, colour, label in (
            (client_curves.warm, _WARM, "generated weights"),
            (client_curves.scratch, _SCRATCH, "from scratch"),
        ):
            # A training that diverged leaves a gap.
            shown = [math.nan if value is None else value for value in values]
            axes.plot(epochs, shown, color=colour, label=label, linewidth=1.5, marker=".", markersize=4)
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
    """A parameter of a network as a hypernetwork that has seen no training generates it.

    Args:
        graph: of the network, e.g. `graphs.extract`.
        parameter: its name in `named_parameters()`.
        initialisation: of the hypernetwork: "kaiming", "paper" or "last_layer" as in `hypernetworks.ghn.create`; "standard"
            as PyTorch and PyG initialise the published design, with no regard to what is generated.
        form: the hypernetwork's form; None takes the paper's sizes, with the layer types of the graph.
        seed: of its initial weights.

    Raises:
        UserError: an unknown initialisation, or a parameter that is not generated.

    >>> from polyfed.graphs import extract
    >>> net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    >>> weight = generate_untrained_weights(extract(net, torch.zeros(2, 100)), "0.weight", "kaiming")
    >>> tuple(weight.shape), bool((weight.std() / (2 / 100) ** 0.5 - 1).abs() < 0.2)
    ((50, 100), True)
    """
    form = form or GHNConfig(LayerCatalogue.from_graphs([graph]))
    graph = graph.restrict_to(form.catalogue.types)
    names = {name for node in graph.generated_weights for name in node.parameters.values()}
    if parameter not in names:
        raise UserError(f"{parameter!r} is not generated for this network; {did_you_mean(parameter, names)}")
    if initialisation not in _TITLES:
        raise UserError(f"unknown initialisation {initialisation!r}; {did_you_mean(str(initialisation), _TITLES)}")
    with single_torch_thread(), torch.no_grad():  # as in a run
        if initialisation == "standard":
            form = dataclasses.replace(form, head="mlp", normalise=False)
            with temporary_rng_seed(derive_seed(seed, "graph hypernetwork")):
                ghn = GHN(form)
        else:
            ghn = GHN(form)
            ghn.load_state_dict(init_ghn_params(form, initialisation, seed))
        weight: Tensor = ghn(graph_to_tensors(graph, form.catalogue, torch.device("cpu"), form.passing))[parameter]
    return weight


def draw_initialisation(
    graph: ArchitectureGraph,
    parameter: str,
    *,
    initialisations: Sequence[Initialisation] = ("standard", "kaiming"),
    fan: Literal["in", "out"] = "in",
    form: GHNConfig | None = None,
    seed: int = 0,
) -> "Figure":
    """Histograms of a layer's weight, drawn with Kaiming's variance and as a fresh hypernetwork generates it, one
    panel for each initialisation of the hypernetwork (Fig. 6, there for a convolution 3×3 of 64 to 128 channels).

    Args:
        graph: of a network with this layer.
        parameter: name of the layer's weight.
        initialisations: see `generate_untrained_weights`.
        fan: whether Kaiming's variance is 2/fan_in, which "kaiming" has, or 2/fan_out, which "paper" has.
        form, seed: see `generate_untrained_weights`.

    Raises:
        UserError: as of `generate_untrained_weights`; or `parameter` is a bias or a norm layer's scale, for which there
            is no variance.
    """
    owners = [node.type for node in graph.generated_weights if node.parameters.get("weight") == parameter]
    scales = {node.parameters.get("scale") for node in graph.generated_weights}
    if (owners and owners[0].is_norm) or parameter in scales:
        raise UserError(
            f"{parameter!r} is the scale of a norm layer, which starts at 1; choose the weight of another layer"
        )
    weights = {
        start: generate_untrained_weights(graph, parameter, start, form=form, seed=seed) for start in initialisations
    }
    if not owners:
        raise UserError(f"{parameter!r} is a bias, which starts at 0; choose a layer's weight")
    kind = owners[0]
    shape = kind.parameter_shapes["weight"]
    outputs = kind.c_out // kind.groups * math.prod(kind.kernel)
    deviation = math.sqrt(2 / (kind.fan_in if fan == "in" else outputs))
    kaiming_values = (
        torch.randn(shape, generator=torch_generator(derive_seed(seed, "kaiming"))).numpy().ravel() * deviation
    )
    figure = _new_figure(4.6 * len(weights), 3.8)
    for axes, (start, weight) in zip(figure.subplots(1, len(weights), squeeze=False)[0], weights.items(), strict=True):
        generated_values = weight.numpy().ravel()
        edges = np.histogram_bin_edges(np.concatenate([kaiming_values, generated_values]), bins=_BINS)
        for values, colour, name in ((kaiming_values, _WARM, "Kaiming"), (generated_values, _SCRATCH, "generated")):
            counts, _ = np.histogram(values, edges, density=True)
            label = f"{name}, std {values.std():.3g}"
            axes.stairs(counts, edges, fill=True, color=colour, alpha=0.5, label=label)
        axes.set_title(_TITLES[start], fontsize=10)
        axes.set_xlabel("weight")
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("density")
    figure.suptitle(f"{parameter} ({'×'.join(map(str, shape))}), before training")
    return figure


@final
@dataclass(frozen=True)
class CommunicationTradeoff:
    """Scores of runs that spend the same epochs on clients with more or fewer communications.

    Attributes:
        score_name: "accuracy", "auc" or "r2".
        total_epochs: L × R, the same for all.
        rounds: R, ascending, each once.
        mean_scores: by R, the mean over clients after the last round, averaged over the runs with this R.
        score_deviations: by R, the standard deviation of that mean over these runs (0 for one run).
        scores_by_client: by client's id, the same average of its own score, for each R.
    """

    score_name: str
    total_epochs: int
    rounds: tuple[int, ...]
    mean_scores: tuple[float, ...]
    score_deviations: tuple[float, ...]
    scores_by_client: Mapping[str, tuple[float, ...]]


def read_communication_tradeoff(runs: Sequence[str | Path]) -> CommunicationTradeoff:
    """The scores of several run directories, each of R rounds of L local epochs with L × R constant (Fig. 4: 1,000). Runs of
    the same R, of several seeds, are averaged.

    Raises:
        UserError: there are none, one is no complete run, or they differ in L × R, clients or score.
    """
    if not runs:
        raise UserError("give at least one run directory; those of Fig. 4 have rounds × local_epochs in common")
    final_scores = [_final_scores(expand_user_path(folder, "the run directory")) for folder in runs]
    for place, kind in enumerate(("rounds × local_epochs", "score", "clients")):
        values = [(record[1] * record[2], record[0], tuple(sorted(record[3])))[place] for record in final_scores]
        if run_index := next((i for i, value in enumerate(values) if value != values[0]), 0):
            raise UserError(
                f"{runs[run_index]} differs from {runs[0]} in {kind}: {_as_text(values[run_index])} against "
                f"{_as_text(values[0])}; draw runs that have it in common"
            )
    rounds = sorted({record[1] for record in final_scores})
    by_round = [[record[3] for record in final_scores if record[1] == number] for number in rounds]
    clients = {
        client: tuple(float(np.mean([scores[client] for scores in equal_rounds])) for equal_rounds in by_round)
        for client in sorted(final_scores[0][3])
    }
    means = [[float(np.mean(list(scores.values()))) for scores in equal_rounds] for equal_rounds in by_round]
    return CommunicationTradeoff(
        score_name=final_scores[0][0],
        total_epochs=final_scores[0][1] * final_scores[0][2],
        rounds=tuple(rounds),
        mean_scores=tuple(float(np.mean(equal_rounds)) for equal_rounds in means),
        score_deviations=tuple(float(np.std(equal_rounds)) for equal_rounds in means),
        scores_by_client=clients,
    )


def _as_text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _final_scores(folder: Path) -> tuple[str, int, int, dict[str, float]]:
    """Score, R, L, and each client's value after the last round."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run directory: it has no config.yaml")
    config, history = read_config(folder), read_metrics(folder / "metrics.jsonl")
    method = config.get("algorithm") or {}
    rounds, epochs = config.get("rounds"), method.get("local_epochs")
    if method.get("local_steps") is not None or not isinstance(epochs, int) or not isinstance(rounds, int):
        raise UserError(
            f"{folder}: its clients do not train for local_epochs, so that rounds × local_epochs is not known"
        )
    if not history or history[-1]["round"] < rounds:
        rounds_done = history[-1]["round"] if history else 0
        raise UserError(f"{folder} has {rounds_done} of {rounds} rounds; finish it, `polyfed resume {folder}`")
    last = history[-1]
    score = next((name for name in DEFAULT_METRIC.values() if name in last["summary"]), None)
    if score is None:
        raise UserError(f"{folder} has no score after its last round, since no client could be evaluated; run it again")
    return score, rounds, epochs, {i: row[score] for i, row in last["clients"].items() if row.get(score) is not None}


def draw_communication_tradeoff(tradeoff: CommunicationTradeoff) -> "Figure":
    """The score against the number of communications R, at the same number of epochs on clients (Fig. 4): the mean over
    clients, with its deviation where there are several runs of an R, and each client, if they are at most eight."""
    figure = _new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    if len(tradeoff.scores_by_client) <= 8:
        for client, values in tradeoff.scores_by_client.items():
            axes.plot(tradeoff.rounds, values, color=_REST, linewidth=0.8, label=client)
            axes.annotate(client, (tradeoff.rounds[-1], values[-1]), fontsize=7, color="#555555", xytext=(4, 0),
                          textcoords="offset points", va="center")  # fmt: skip
    axes.errorbar(
        tradeoff.rounds,
        tradeoff.mean_scores,
        yerr=tradeoff.score_deviations,
        color=_WARM,
        marker="o",
        markersize=4,
        linewidth=1.8,
        capsize=3,
        label="mean",
    )
    axes.margins(x=0.12)  # room for the names
    axes.set_xticks(tradeoff.rounds, [str(number) for number in tradeoff.rounds])
    axes.set_xlabel(f"communications R, with L = {tradeoff.total_epochs}/R local epochs each")
    axes.set_ylabel(tradeoff.score_name)
    axes.grid(alpha=0.3)
    return figure


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
