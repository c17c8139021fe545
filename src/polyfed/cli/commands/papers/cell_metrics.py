"""Computes polyfed's value for one cell of a paper's table from a finished run: scores, scores of training after the
run, aggregation weights, or bytes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, final

import torch

from polyfed.algorithms import registry_name
from polyfed.cli.commands.papers.paper_tables import PaperCell
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metrics import default_metric_names
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.data import Shift
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.hypernetworks.ghn import GHNConfig
from polyfed.models import build
from polyfed.nas import (
    OPERATION_NAMES,
    SupernetPlan,
    build_operations,
    count_edge_operation_parameters,
    plan_cell_stacks,
)
from polyfed.report.figures import aggregation
from polyfed.report.figures.generation import generate_untrained_weights
from polyfed.simulation import federate
from polyfed.simulation.experiment import Experiment, build_experiment, load_participants
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.architecture_transfer import score_after_adaptation, transfer_network
from polyfed.simulation.results.gradient_conflicts import measure_gradient_conflicts
from polyfed.simulation.results.unseen_clients import compare_with_scratch, compute_warm_start, load_trained_server
from polyfed.simulation.storage.directory import BASELINES, read_config, read_metrics

MEASURED_FILE = "measured.json"  # in the folder of a run and its baselines: what took training to find out
_FEW = 200  # images of a task that no client has seen (FedPNAS, section 4)
_RATE = 0.002  # of the steps on them, as the authors' code has it
_DRAWS = 8  # of operations, over which the two gradients of Proposition 1 are averaged
_EPOCHS = {"smoke": 2}  # of an unseen client's training after its warm start, 20 at the other scales (ours)
_PER_ROUND = 750  # what pFedLA's Table 3 multiplies a round's megabytes with, see models/cnn.py


@final
@dataclass(frozen=True)
class RecipeRun:
    """Holds a finished run's folder and scale, and the other variants' runs to compare it with.

    Attributes: its folder, the scale of its recipe, and the runs of `compared_runs`, the variants with which a cell compares
    it.
    """

    folder: Path
    scale: str
    compared_runs: tuple["RecipeRun", ...] = ()

    def folder_of(self, method: str) -> Path:
        """Returns the run directory of the method with this name; an empty name stands for the recipe's main method."""
        recipe_method = read_config(self.folder)["algorithm"]["name"]
        return self.folder if method in ("", recipe_method) else self.folder / BASELINES / method


def measure_cell(cell: PaperCell, run: RecipeRun | None) -> float | None:
    """Computes a cell's value in its unit from a run; None if it lacks the method or is undefined.

    Raises:
        UserError: the run is damaged.
    """
    if run is not None and not (run.folder_of(cell.method) / "config.yaml").exists():
        return None
    value = CELL_METRICS[cell.metric](cell, run)
    return None if value is None else 100 * value if cell.unit == "%" else value


def _score_metric(prefix: str) -> Callable[[PaperCell, Any], float | None]:
    """Averages a score over the cell's clients: the task's score of the metric with this prefix, after the last round."""

    def measure_score(cell: PaperCell, run: RecipeRun) -> float | None:
        return _mean_of_defined(
            _score_by_client(prefix, run.folder_of(cell.method))[_parse_slice(cell.part.get("clients", ":"))]
        )

    return measure_score


def _score_by_client(prefix: str, folder: Path) -> list[float | None]:
    """Returns each client's score of the metric with this prefix, after the last round."""
    rows = read_metrics(folder / "metrics.jsonl")[-1]["clients"]
    names = [f"{prefix}{score}" for score in default_metric_names()]
    return [next((row[n] for n in names if n in row), None) for _, row in sorted(rows.items())]


def _drop_of_scores(cell: PaperCell, run: RecipeRun) -> float | None:
    """Computes by how much the clients' scores on the common test set are lower in the runs `others` than in this run.

    In each of the others, some clients have another network. The value is the mean over runs and over the clients that
    keep their network, or with `over: cells` the standard deviation.
    """

    def clients(clients_run: RecipeRun) -> list[tuple[Any, float | None]]:
        folder = clients_run.folder_of(cell.method)
        return list(zip(read_config(folder)["model"], _score_by_client("global_", folder), strict=True))

    drops = [
        None if before is None or after is None else before - after
        for other in run.compared_runs
        for (network, before), (now, after) in zip(clients(run), clients(other), strict=True)
        if network == now
    ]
    return _stdev_of_defined(drops) if cell.part.get("over") == "cells" else _mean_of_defined(drops)


def _mean_cka(cell: PaperCell, run: RecipeRun) -> float | None:
    """Returns FedHeNN's mean CKA between two clients' representations of public examples, after the last round."""
    value = read_metrics(run.folder_of(cell.method) / "metrics.jsonl")[-1].get("analysis", {}).get("mean_cka")
    return None if value is None else float(value)


def _megabytes_per_round(cell: PaperCell, run: RecipeRun) -> float:
    """Returns the megabytes that one client moves in a round, both ways, times the number that the paper has."""
    history = read_metrics(run.folder_of(cell.method) / "metrics.jsonl")
    moved = history[-1]["bytes_down_total"] + history[-1]["bytes_up_total"]
    trained = sum("bytes_up" in row for record in history for row in record["clients"].values())
    return float(_PER_ROUND * moved / trained / 2**20)


def _aggregation_weight(cell: PaperCell, run: RecipeRun) -> float | None:
    """Averages pFedLA's aggregation weights after the last round, or over the rounds of a `period` (thirds: 1, 2, 3).

    Averages over the layers, or takes one `layer`; from client `target` to those of `sources`, or between all clients
    whose positions differ by `distance`. None where the run has no such layer or period.
    """
    aggregation_weights, part = aggregation.read_aggregation_weights(run.folder_of(cell.method)), cell.part
    thirds = aggregation.split_rounds_into_thirds(aggregation_weights)
    if part.get("period", 1) > len(thirds):
        return None
    mean = (
        aggregation_weights.alpha[thirds[part["period"] - 1]].mean(axis=0)
        if "period" in part
        else aggregation_weights.alpha[-1]
    )
    alpha = torch.from_numpy(mean).transpose(1, 2)  # (client, source, layer)
    if "layer" in part:
        if part["layer"] not in aggregation_weights.layers:
            return None
        alpha = alpha[:, :, [aggregation_weights.layers.index(part["layer"])]]
    if "distance" in part:
        position = torch.arange(len(aggregation_weights.clients))
        weights = alpha[(position[:, None] - position).abs() == part["distance"]]
    else:
        weights = alpha[part["target"], _parse_slice(part["sources"])]
    return float(weights.mean()) if weights.numel() else None


def _warm_start_metric(curve_name: str) -> Callable[[PaperCell, Any], float | None]:
    """Averages over unseen clients the last score of training from generated weights ("warm") or from scratch.

    The cell's `scratch_lr` has the rate from scratch by scale; the default is the run's.
    """

    def compute(folder: Path, experiment: Experiment, scale: str, scratch_lr: float | None) -> dict[str, float | None]:
        server, unseen = load_trained_server(folder), load_participants(experiment).unseen
        epochs = _EPOCHS.get(scale, 20)
        curves = [
            compare_with_scratch(server, compute_warm_start(server, c), epochs, scratch_lr=scratch_lr) for c in unseen
        ]
        ends = {"warm": [c.warm[-1] for c in curves], "scratch": [c.scratch[-1] for c in curves]}
        return {name: _mean_of_defined(values) for name, values in ends.items()}

    def measure_curve_end(cell: PaperCell, run: RecipeRun) -> float | None:
        rate = cell.part.get("scratch_lr", {}).get(run.scale)
        key = "unseen" if rate is None else f"unseen, from scratch at {rate:g}"
        return _measure_once(run, cell, key, lambda f, e, s: compute(f, e, s, rate))[curve_name]

    return measure_curve_end


def _accuracy_after_adaptation(cell: PaperCell, run: RecipeRun) -> float | None:
    """Averages clients' accuracy after the run's own adaptation epoch, for a method that has no such epoch."""

    def compute(folder: Path, experiment: Experiment, scale: str) -> dict[str, float | None]:
        experiment_data = load_participants(experiment)
        resumed_run = federate.resume(
            folder, clients=experiment_data.clients, public=experiment_data.public, progress=SilentProgress()
        )
        return {
            client.id: score_after_adaptation(resumed_run, client.id)["accuracy"] for client in experiment_data.clients
        }

    values = [value for _, value in sorted(_measure_once(run, cell, "adapted", compute).items())]
    return _mean_of_defined(values[_parse_slice(cell.part.get("clients", ":"))])


def _step_weights(cell: PaperCell, run: RecipeRun) -> float | None:
    """Averages FedPNAS's α_i at the server's θ after the last round over the cell's clients.

    It is α_i of normalised gradients ("cosine"), a client's own gradient along the federated one ("federated"), or the
    difference of both ("gap", Proposition 1).
    """

    def compute(folder: Path, experiment: Experiment, scale: str) -> dict[str, float | None]:
        experiment_data = load_participants(experiment)
        resumed_run = federate.resume(
            folder, clients=experiment_data.clients, public=experiment_data.public, progress=SilentProgress()
        )
        ids, weights = measure_gradient_conflicts(resumed_run, draws=_DRAWS)
        by_name = {"cosine": weights.cosine, "federated": weights.federated_cosine, "gap": weights.cosine_gap}
        return {
            f"{client}, {name}": value
            for name, values in by_name.items()
            for client, value in zip(ids, values.tolist(), strict=True)
        }

    values = [
        value
        for name, value in sorted(_measure_once(run, cell, "step weights", compute).items())
        if name.endswith(f", {cell.part['of']}")
    ]
    return _mean_of_defined(values[_parse_slice(cell.part.get("clients", ":"))])


def _training_seconds(cell: PaperCell, run: RecipeRun) -> float | None:
    """Returns the run's seconds without evaluation, or with `against` the ratio to another method's."""

    def seconds_of(method: str) -> float:
        history = read_metrics(run.folder_of(method) / "metrics.jsonl")
        return sum(float(record["seconds_clients"] + record["seconds_server"]) for record in history)

    if "against" not in cell.part:
        return seconds_of(cell.method)
    other_seconds = seconds_of(cell.part["against"])
    return seconds_of(cell.method) / other_seconds if other_seconds else None


def _unseen_images_metric(when: str) -> Callable[[PaperCell, Any], float | None]:
    """Averages accuracy on the clients' images under other rotations "before" or "after" a few steps.

    With `over: clients` it is their standard deviation.
    """

    def compute(folder: Path, experiment: Experiment, degrees: float) -> dict[str, float | None]:
        experiment_data = load_participants(experiment)
        run = federate.resume(
            folder, clients=experiment_data.clients, public=experiment_data.public, progress=SilentProgress()
        )
        rotated = load_participants(replace(experiment, shifts=(Shift(rotation=degrees),))).clients
        transfers = []
        for client in rotated:
            few = client.train.select(torch.arange(min(_FEW, len(client.train))))
            transfers.append(transfer_network(run, client.id, Client(client.id, None, few, client.test), lr=_RATE))
        scores = {
            "before": [d.scores_before_retraining["accuracy"] for d in transfers],
            "after": [d.scores_after_retraining["accuracy"] for d in transfers],
        }
        spread = {f"{name}, over clients": _stdev_of_defined(values) for name, values in scores.items()}
        return {**{name: _mean_of_defined(values) for name, values in scores.items()}, **spread}

    def measure_unseen(cell: PaperCell, run: RecipeRun) -> float | None:
        degrees = float(cell.part["rotation"])
        scores = _measure_once(run, cell, f"rotation {degrees:g}", lambda f, e, _: compute(f, e, degrees))
        return scores.get(f"{when}, over clients" if cell.part.get("over") == "clients" else when)

    return measure_unseen


def _parameter_count(cell: PaperCell, run: None) -> float:
    """Counts the parameters of an operation, an edge, or a network of 32 edges; needs no run.

    The network has 4 base and 4 personal cells of 2 nodes.
    """
    if cell.part["operation"] == "network":
        base, personal = plan_cell_stacks(4, 4, 2, 2, OPERATION_NAMES, OPERATION_NAMES)
        return float(count_edge_operation_parameters(SupernetPlan(1, 10, cell.part["channels"], base, personal)))
    edge, name = build_operations(cell.part["channels"]), cell.part["operation"]
    return float(sum(p.numel() for p in (edge if name == "all" else edge[name]).parameters()))


def _untrained_weight_deviation(cell: PaperCell, run: None) -> float:
    """Measures the standard deviation of an untrained hypernetwork's weights for a convolution of the small CNN.

    It is divided by Kaiming's √(2/fan_in) or √(2/fan_out), as the cell's `fan` says, and averaged over three
    hypernetworks of the paper's sizes; needs no run.
    """
    shape = (1, 28, 28)
    graph = extract(build("flha_small", shape, 10), torch.zeros(2, *shape))
    form = GHNConfig(LayerCatalogue.from_graphs([graph]), normalise=cell.part["normalise"])
    parameter = next(
        n.parameters["weight"]
        for n in graph.nodes
        if isinstance(n.type, LayerType) and n.type.key.startswith(cell.part["layer"])
    )
    weights = [
        generate_untrained_weights(graph, parameter, cell.part["start"], form=form, seed=seed) for seed in range(3)
    ]
    share = {"in": weights[0][0], "out": weights[0][:, 0]}[cell.part["fan"]]  # what one output, or one input, has
    return fmean(float(weight.std()) * (share.numel() / 2) ** 0.5 for weight in weights)


CELL_METRICS: Mapping[str, Callable[[PaperCell, Any], float | None]] = {
    "score": _score_metric(""),
    "server_score": _score_metric("server_"),
    "cohort_score": _score_metric("cohort_"),
    "global_score": _score_metric("global_"),
    "drop": _drop_of_scores,
    "mean_cka": _mean_cka,
    "trained_score": _score_metric("trained_"),
    "megabytes": _megabytes_per_round,
    "weight": _aggregation_weight,
    "warm_start": _warm_start_metric("warm"),
    "from_scratch": _warm_start_metric("scratch"),
    "adapted": _accuracy_after_adaptation,
    "step_weights": _step_weights,
    "seconds": _training_seconds,
    "unseen": _unseen_images_metric("before"),
    "unseen_retrained": _unseen_images_metric("after"),
    "parameters": _parameter_count,
    "fresh_deviation": _untrained_weight_deviation,
}
"""Maps the name of a cell's metric to the function that measures it."""


def _measure_once(
    run: RecipeRun, cell: PaperCell, key: str, compute: Callable[[Path, Experiment, str], dict[str, float | None]]
) -> dict[str, float | None]:
    """Calls `compute` for the run of the cell's method, and stores the result beside the run for later calls."""
    file, folder = run.folder / MEASURED_FILE, run.folder_of(cell.method)
    measured = _read_stored_measurements(file)
    experiment = build_experiment(read_config(folder))
    key = f"{registry_name(experiment.algorithm)}, {key}"
    if key not in measured:
        measured[key] = compute(folder, experiment, run.scale)
        write_file_atomically(file, json.dumps(measured, indent=1).encode())
    return measured[key]


def _read_stored_measurements(file: Path) -> dict[str, dict[str, float | None]]:
    """Reads the results that `_measure_once` stored.

    Raises:
        UserError: the file is damaged.
    """
    if not file.exists():
        return {}
    try:
        measured: dict[str, dict[str, float | None]] = parse_json(read_file(file))
        if error_text := validation_error(measured, dict[str, dict[str, float | None]]):
            raise ValueError(error_text)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it, and what it holds is computed again") from error
    return measured


def _parse_slice(text: str) -> slice:
    """Parses a slice as Python writes it.

    >>> list(range(8))[_parse_slice("1::4")], list(range(8))[_parse_slice("6:")], list(range(3))[_parse_slice(":")]
    ([1, 5], [6, 7], [0, 1, 2])
    """
    return slice(*(int(part) if part else None for part in text.split(":")))


def _mean_of_defined(values: list[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def _stdev_of_defined(values: list[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return stdev(defined) if len(defined) > 1 else None
