"""What of a finished run makes a cell of a paper's table: scores, what training after it gives, weights, bytes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, final

import torch

from polyfed.algorithms import name_of
from polyfed.cli.commands.papers import Cell
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation import SCORE
from polyfed.core.files import read_file, replace_file
from polyfed.core.typed import conforms, from_json
from polyfed.data import Shift
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.hypernetworks.ghn import Form
from polyfed.models import build
from polyfed.report import aggregation
from polyfed.report.generation import fresh_weights
from polyfed.search import NAMES, Plan, edge_parameters, operations, stacks
from polyfed.simulation import federation
from polyfed.simulation.conflicts import conflicts
from polyfed.simulation.experiment import Experiment, from_config, participants
from polyfed.simulation.runs.directory import BASELINES, read_config, read_metrics
from polyfed.simulation.runs.progress import Silent
from polyfed.simulation.transfer import adapted, transfer
from polyfed.simulation.unseen import compare_curves, load_server, warmstart

KEPT = "measured.json"  # in the folder of a run and its baselines: what took training to find out
_FEW = 200  # images of a task that no client has seen (FedPNAS, section 4)
_RATE = 0.002  # of the steps on them, as the authors' code has it
_DRAWS = 8  # of operations, over which the two gradients of Proposition 1 are averaged
_EPOCHS = {"smoke": 2}  # of an unseen client's training after its warm start, 20 at the other scales (ours)
_PER_ROUND = 750  # what pFedLA's Table 3 multiplies a round's megabytes with, see models/cnn.py


@final
@dataclass(frozen=True)
class Finished:
    """A run with its baselines, at the end: its folder, the scale of its recipe, and the runs of `others`, variants that a
    cell compares it with."""

    folder: Path
    scale: str
    others: tuple["Finished", ...] = ()

    def of(self, method: str) -> Path:
        """The run directory of one of its methods; empty is the recipe's own."""
        own = read_config(self.folder)["algorithm"]["name"]
        return self.folder if method in ("", own) else self.folder / BASELINES / method


def measure(cell: Cell, run: Finished | None) -> float | None:
    """Ours in the cell's unit; None where the run has no such method or the value is not defined.

    Raises:
        UserError: the run is damaged.
    """
    if run is not None and not (run.of(cell.method) / "config.yaml").exists():
        return None
    value = METRICS[cell.metric](cell, run)
    return None if value is None else 100 * value if cell.unit == "%" else value


def _score(prefix: str) -> Callable[[Cell, Any], float | None]:
    """Mean over the cell's clients of the task's score, of the metric with this prefix, after the last round."""

    def found(cell: Cell, run: Finished) -> float | None:
        return _mean(_scores(prefix, run.of(cell.method))[_slice(cell.part.get("clients", ":"))])

    return found


def _scores(prefix: str, folder: Path) -> list[float | None]:
    """The task's score of each client, of the metric with this prefix, after the last round."""
    rows = read_metrics(folder / "metrics.jsonl")[-1]["clients"]
    names = [f"{prefix}{score}" for score in SCORE.values()]
    return [next((row[n] for n in names if n in row), None) for _, row in sorted(rows.items())]


def _drop(cell: Cell, run: Finished) -> float | None:
    """How much clients' scores on the common test set fall from this run to each of its `others`, in which some clients have
    another network: the mean over runs and over the clients that keep theirs, or with `over: cells` the standard deviation.
    """

    def clients(of: Finished) -> list[tuple[Any, float | None]]:
        folder = of.of(cell.method)
        return list(zip(read_config(folder)["model"], _scores("global_", folder), strict=True))

    drops = [
        None if before is None or after is None else before - after
        for other in run.others
        for (network, before), (now, after) in zip(clients(run), clients(other), strict=True)
        if network == now
    ]
    return _stdev(drops) if cell.part.get("over") == "cells" else _mean(drops)


def _mean_cka(cell: Cell, run: Finished) -> float | None:
    """FedHeNN's mean CKA between two clients' representations of public examples, after the last round."""
    value = read_metrics(run.of(cell.method) / "metrics.jsonl")[-1].get("analysis", {}).get("mean_cka")
    return None if value is None else float(value)


def _megabytes(cell: Cell, run: Finished) -> float:
    """What one client moves in a round, both ways, times the number that the paper has."""
    history = read_metrics(run.of(cell.method) / "metrics.jsonl")
    moved = history[-1]["bytes_down_total"] + history[-1]["bytes_up_total"]
    trained = sum("bytes_up" in row for record in history for row in record["clients"].values())
    return float(_PER_ROUND * moved / trained / 2**20)


def _weight(cell: Cell, run: Finished) -> float | None:
    """Mean of pFedLA's weights after the last round, or over the rounds of a `period` (1 the first third, 2, 3): over the
    layers, or one `layer`; from client `target` to those of `sources`, or between all clients whose positions differ by
    `distance`. None where the run has no such layer or period."""
    found, part = aggregation.read(run.of(cell.method)), cell.part
    thirds = aggregation.periods(found)
    if part.get("period", 1) > len(thirds):
        return None
    mean = found.alpha[thirds[part["period"] - 1]].mean(axis=0) if "period" in part else found.alpha[-1]
    alpha = torch.from_numpy(mean).transpose(1, 2)  # (client, source, layer)
    if "layer" in part:
        if part["layer"] not in found.layers:
            return None
        alpha = alpha[:, :, [found.layer(part["layer"])]]
    if "distance" in part:
        position = torch.arange(len(found.clients))
        chosen = alpha[(position[:, None] - position).abs() == part["distance"]]
    else:
        chosen = alpha[part["target"], _slice(part["sources"])]
    return float(chosen.mean()) if chosen.numel() else None


def _warm_started(which: str) -> Callable[[Cell, Any], float | None]:
    """The last point of an unseen client's training from generated weights ("warm") or from scratch, mean over unseen
    clients. The cell's `scratch_lr` has the rate from scratch by scale; where it has none, that is the run's."""

    def compute(folder: Path, experiment: Experiment, scale: str, scratch_lr: float | None) -> dict[str, float | None]:
        server, unseen = load_server(folder), participants(experiment).unseen
        epochs = _EPOCHS.get(scale, 20)
        curves = [compare_curves(server, warmstart(server, c), epochs, scratch_lr=scratch_lr) for c in unseen]
        ends = {"warm": [c.warm[-1] for c in curves], "scratch": [c.scratch[-1] for c in curves]}
        return {name: _mean(values) for name, values in ends.items()}

    def found(cell: Cell, run: Finished) -> float | None:
        rate = cell.part.get("scratch_lr", {}).get(run.scale)
        key = "unseen" if rate is None else f"unseen, from scratch at {rate:g}"
        return _once(run, cell, key, lambda f, e, s: compute(f, e, s, rate))[which]

    return found


def _adapted(cell: Cell, run: Finished) -> float | None:
    """Mean accuracy over the cell's clients after the epoch of adaptation that the run's own method has, for one that has
    none in the run."""

    def compute(folder: Path, experiment: Experiment, scale: str) -> dict[str, float | None]:
        found = participants(experiment)
        again = federation.resume(folder, clients=found.clients, public=found.public, progress=Silent())
        return {client.id: adapted(again, client.id)["accuracy"] for client in found.clients}

    values = [value for _, value in sorted(_once(run, cell, "adapted", compute).items())]
    return _mean(values[_slice(cell.part.get("clients", ":"))])


def _step_weights(cell: Cell, run: Finished) -> float | None:
    """FedPNAS's α_i of normalised gradients ("cosine"), a client's own gradient along the "federated" one, or the "gap"
    between both (Proposition 1), at the server's θ after the last round; mean over the cell's clients."""

    def compute(folder: Path, experiment: Experiment, scale: str) -> dict[str, float | None]:
        found = participants(experiment)
        again = federation.resume(folder, clients=found.clients, public=found.public, progress=Silent())
        ids, weights = conflicts(again, draws=_DRAWS)
        return {
            f"{client}, {name}": value
            for name in ("cosine", "federated", "gap")
            for client, value in zip(ids, getattr(weights, name).tolist(), strict=True)
        }

    values = [
        value
        for name, value in sorted(_once(run, cell, "step weights", compute).items())
        if name.endswith(f", {cell.part['of']}")
    ]
    return _mean(values[_slice(cell.part.get("clients", ":"))])


def _seconds(cell: Cell, run: Finished) -> float | None:
    """Seconds of clients and server over all rounds, without evaluation; with `against` how many times those of another
    method of the run."""

    def spent(method: str) -> float:
        history = read_metrics(run.of(method) / "metrics.jsonl")
        return sum(float(record["seconds_clients"] + record["seconds_server"]) for record in history)

    if "against" not in cell.part:
        return spent(cell.method)
    other = spent(cell.part["against"])
    return spent(cell.method) / other if other else None


def _unseen(when: str) -> Callable[[Cell, Any], float | None]:
    """Accuracy of the clients' networks on their images rotated otherwise, "before" and "after" a few steps on them: the
    mean over clients, or with `over: clients` its standard deviation over them."""

    def compute(folder: Path, experiment: Experiment, degrees: float) -> dict[str, float | None]:
        found = participants(experiment)
        run = federation.resume(folder, clients=found.clients, public=found.public, progress=Silent())
        rotated = participants(replace(experiment, shifts=(Shift(rotation=degrees),))).clients
        done = []
        for client in rotated:
            few = client.train.select(torch.arange(min(_FEW, len(client.train))))
            done.append(transfer(run, client.id, Client(client.id, None, few, client.test), lr=_RATE))
        scores = {"before": [d.before["accuracy"] for d in done], "after": [d.after["accuracy"] for d in done]}
        spread = {f"{name}, over clients": _stdev(values) for name, values in scores.items()}
        return {**{name: _mean(values) for name, values in scores.items()}, **spread}

    def found(cell: Cell, run: Finished) -> float | None:
        degrees = float(cell.part["rotation"])
        told = _once(run, cell, f"rotation {degrees:g}", lambda f, e, _: compute(f, e, degrees))
        return told.get(f"{when}, over clients" if cell.part.get("over") == "clients" else when)

    return found


def _parameters(cell: Cell, run: None) -> float:
    """Numbers of parameters of one operation of the search space, of all of an edge, or of a network of 32 such edges (4
    base and 4 personal cells of 2 nodes); needs no run."""
    if cell.part["operation"] == "network":
        base, personal = stacks(4, 4, 2, 2, NAMES, NAMES)
        return float(edge_parameters(Plan(1, 10, cell.part["channels"], base, personal)))
    edge, name = operations(cell.part["channels"]), cell.part["operation"]
    return float(sum(p.numel() for p in (edge if name == "all" else edge[name]).parameters()))


def _fresh_deviation(cell: Cell, run: None) -> float:
    """Standard deviation of a fresh hypernetwork's weights for a convolution of the small CNN, over Kaiming's √(2/fan_in) or
    √(2/fan_out), by the cell's `fan`; needs no run. Three hypernetworks of the paper's sizes, of that network's layer
    types."""
    shape = (1, 28, 28)
    graph = extract(build("flha_small", shape, 10), torch.zeros(2, *shape))
    form = Form(LayerCatalogue.of([graph]), normalise=cell.part["normalise"])
    parameter = next(
        n.parameters["weight"]
        for n in graph.nodes
        if isinstance(n.type, LayerType) and n.type.key.startswith(cell.part["layer"])
    )
    weights = [fresh_weights(graph, parameter, cell.part["start"], form=form, seed=seed) for seed in range(3)]
    share = {"in": weights[0][0], "out": weights[0][:, 0]}[cell.part["fan"]]  # what one output, or one input, has
    return fmean(float(weight.std()) * (share.numel() / 2) ** 0.5 for weight in weights)


METRICS: Mapping[str, Callable[[Cell, Any], float | None]] = {
    "score": _score(""),
    "server_score": _score("server_"),
    "cohort_score": _score("cohort_"),
    "global_score": _score("global_"),
    "drop": _drop,
    "mean_cka": _mean_cka,
    "trained_score": _score("trained_"),
    "megabytes": _megabytes,
    "weight": _weight,
    "warm_start": _warm_started("warm"),
    "from_scratch": _warm_started("scratch"),
    "adapted": _adapted,
    "step_weights": _step_weights,
    "seconds": _seconds,
    "unseen": _unseen("before"),
    "unseen_retrained": _unseen("after"),
    "parameters": _parameters,
    "fresh_deviation": _fresh_deviation,
}
"""What a cell can be."""


def _once(
    run: Finished, cell: Cell, key: str, compute: Callable[[Path, Experiment, str], dict[str, float | None]]
) -> dict[str, float | None]:
    """What `compute` finds of the run of the cell's method; written beside the run, and not computed a second time."""
    file, folder = run.folder / KEPT, run.of(cell.method)
    kept = _kept(file)
    experiment = from_config(read_config(folder))
    key = f"{name_of(experiment.algorithm)}, {key}"
    if key not in kept:
        kept[key] = compute(folder, experiment, run.scale)
        replace_file(file, json.dumps(kept, indent=1).encode())
    return kept[key]


def _kept(file: Path) -> dict[str, dict[str, float | None]]:
    """What was measured before.

    Raises:
        UserError: the file is damaged.
    """
    if not file.exists():
        return {}
    try:
        kept: dict[str, dict[str, float | None]] = from_json(read_file(file))
        if wrong := conforms(kept, dict[str, dict[str, float | None]]):
            raise ValueError(wrong)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it, and what it holds is computed again") from error
    return kept


def _slice(text: str) -> slice:
    """Which of a list, as Python writes it.

    >>> list(range(8))[_slice("1::4")], list(range(8))[_slice("6:")], list(range(3))[_slice(":")]
    ([1, 5], [6, 7], [0, 1, 2])
    """
    return slice(*(int(part) if part else None for part in text.split(":")))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _stdev(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) > 1 else None
