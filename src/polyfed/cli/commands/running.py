"""What the commands `run`, `resume` and `data` do: an experiment with its baselines, its directory, and its table."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.measure import Measurement

from polyfed.algorithms import name_of
from polyfed.cli.commands.terminal import Table, say
from polyfed.core.algorithm import Algorithm, Client, evaluated_network
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.files import make_folder
from polyfed.core.metrics import Metric, metrics_of
from polyfed.data import draw_class_table
from polyfed.data.columns import in_order
from polyfed.data.features import Prepared
from polyfed.simulation import federation
from polyfed.simulation.checks import check_models, check_requirements
from polyfed.simulation.experiment import Experiment, Participants, check_cluster, facts_of, from_config, participants
from polyfed.simulation.runs.directory import BASELINES, read_config, refuse_taken
from polyfed.simulation.runs.progress import Progress, for_terminal
from polyfed.simulation.runs.results import Run
from polyfed.simulation.secure import can_be_secure
from polyfed.simulation.tracking import check, kept, tracked


def run(
    experiment: Experiment,
    out: Path,
    *,
    quiet: bool = False,
    logger: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Runs an experiment and its baselines into `out`, tracked with the names of `logger`, and prints a table.

    Raises:
        UserError: what `federate` refuses; nothing has been computed.
        RoundError: a baseline could not be finished; all others were, and the table has them.
    """
    for folder in parts(experiment, out).values():  # a baseline's too: found before the first run, not after it
        refuse_taken(folder)
    found = checked(experiment)
    runs = {
        name_of(experiment.algorithm): _federate(
            experiment, experiment.algorithm, found, out, _progress(out, quiet, logger)
        )
    }
    failed: dict[str, str] = {}
    for name, baseline in experiment.baselines.items():
        folder = make_folder(out / BASELINES) / name
        try:
            runs[name] = _federate(experiment, baseline, found, folder, _progress(folder, quiet, logger))
        except (ClientError, RoundError) as error:  # the others are worth having
            failed[name] = str(error)
    show(runs, found, out, console or Console())
    _hand_over(out, logger, console)
    _tell(failed)


def _tell(failed: Mapping[str, str]) -> None:
    """Raises if baselines could not be finished."""
    if failed:
        raise RoundError("; ".join(f"{name} could not be finished: {why}" for name, why in failed.items()))


def _hand_over(out: Path, logger: Sequence[str], console: Console | None) -> None:
    """Logs the networks of a run to MLflow, if it is tracked there. What fails there costs no run."""
    if "mlflow" not in logger:
        return
    # imported late: most runs do without
    from polyfed.report.export.tracked import log_models

    try:
        logged = log_models(out)
    except Exception as error:  # of whatever kind the package has
        warnings.warn(
            f"the networks are not in MLflow: {error}; polyfed resume {out} tries again", RuntimeWarning, stacklevel=2
        )
    else:
        if logged:
            say(console or Console(), f"MLflow has {logged} networks of this run, as models with a signature")


def _check(experiment: Experiment, found: Participants) -> None:
    """Finds before the first round what would be found wrong only after it: a baseline that does not suit the clients, and
    a network whose outputs are not the classes."""
    metrics_of(experiment.settings.metrics, found.pool.task)
    check_models((*found.clients, *found.unseen), found.pool.num_classes)
    for method in (experiment.algorithm, *experiment.baselines.values()):
        check_requirements(found.clients, method, found.public)


def go_on(out: Path, *, quiet: bool = False, console: Console | None = None) -> None:
    """Goes on with the run in `out` and with its baselines, tracked as it was, and prints the table.

    Raises:
        UserError: `out` is not a run directory that can be resumed.
        RoundError: a baseline could not be finished; all others were, and the table has them.
    """
    if not (out / "config.yaml").exists():
        raise UserError(f"{out} is not a run directory: it has no config.yaml")
    config = read_config(out)
    if "data" not in config:
        federation.resume(out)  # explains that its clients are needed
    experiment = from_config(config)
    check_cluster(experiment.settings)
    found = participants(experiment)
    clients, public = found.clients, found.public
    logger = check(kept(out))
    main = federation.resume(out, clients=clients, public=public, progress=_progress(out, quiet, logger))
    runs = {name_of(experiment.algorithm): main}
    failed: dict[str, str] = {}
    for name, baseline in experiment.baselines.items():
        folder = make_folder(out / BASELINES) / name
        progress = _progress(folder, quiet, logger)
        try:
            if (folder / "config.yaml").exists():
                runs[name] = federation.resume(folder, clients=clients, public=public, progress=progress)
            else:
                runs[name] = _federate(experiment, baseline, found, folder, progress)
        except (ClientError, RoundError) as error:
            failed[name] = str(error)
    show(runs, found, out, console or Console())
    _hand_over(out, logger, console)
    _tell(failed)


def parts(experiment: Experiment, out: Path) -> dict[str, Path]:
    """Folders of the runs of an experiment in `out`, by method: its own, and then the baselines."""
    others = {name: out / BASELINES / name for name in experiment.baselines}
    return {name_of(experiment.algorithm): out, **others}


def part(experiment: Experiment, name: str, found: Participants, folder: Path, progress: Progress) -> Run:
    """Runs one method of an experiment, or goes on with it if it is in `folder`. `checked` belongs before it."""
    if not (folder / "config.yaml").exists():
        method = experiment.baselines.get(name, experiment.algorithm)
        return _federate(experiment, method, found, make_folder(folder.parent, parents=True) / folder.name, progress)
    s = experiment.settings
    return federation.resume(
        folder, clients=found.clients, public=found.public, progress=progress, engine=s.engine, workers=s.workers,
        ray_address=s.ray_address, gpus_per_worker=s.gpus_per_worker, device=s.device,
    )  # fmt: skip


def checked(experiment: Experiment) -> Participants:
    """Who takes part in an experiment, once it is known that all of its methods suit them.

    Raises:
        UserError: they do not.
    """
    check_cluster(experiment.settings)
    found = participants(experiment)
    _check(experiment, found)
    return found


def _progress(out: Path, quiet: bool, logger: Sequence[str]) -> Progress:
    return tracked(logger, out, for_terminal(quiet=quiet)) if logger else for_terminal(quiet=quiet)


def _federate(
    experiment: Experiment, method: Algorithm[Any, Any], found: Participants, out: Path, progress: Progress
) -> Run:
    s = experiment.settings
    own = method is experiment.algorithm
    kept = {k: v for k, v in experiment.config.items() if own or k != "baselines"}
    return federation.federate(
        found.clients, method, rounds=s.rounds, seed=s.seed, clients_per_round=s.clients_per_round,
        public=found.public, engine=s.engine,
        workers=s.workers, ray_address=s.ray_address, gpus_per_worker=s.gpus_per_worker, device=s.device,
        evaluate_every=s.evaluate_every, checkpoint_every=s.checkpoint_every, on_error=s.on_error,
        min_replies=s.min_replies, metrics=s.metrics or None, keep=s.keep,
        compress=s.compress, compress_down=s.compress_down, secure=s.secure and (own or can_be_secure(method)),
        out=out, config=kept,
        facts={**facts_of(found), **_preparation(found)}, progress=progress,
    )  # fmt: skip


def _preparation(found: Participants) -> dict[str, Mapping[str, int]]:
    return {"preparation": found.preparation} if found.preparation else {}


def show(runs: Mapping[str, Run], found: Participants, out: Path, console: Console) -> None:
    """Prints the table of a run and its baselines: per client and overall, with the gain over the first baseline; overall
    only where so many methods do not fit the terminal."""
    main, *others = runs
    score = runs[main].federation.metrics[0]
    at: Literal["last", "best"] = (
        "best"
        if all(run.best is not None and run.federation.settings.keep in ("best", "loss") for run in runs.values())
        else "last"
    )
    tables = {name: {row["client"]: row for row in run.table(at)} for name, run in runs.items()}
    by = "lowest validation loss" if runs[main].federation.settings.keep == "loss" else "best validation score"
    when = f"after round {runs[main].last.round}" if at == "last" else f"after the round with the {by}"
    title = f"{score.label} on each client's own test examples, {when}"
    table = Table(title=title, title_justify="left")
    table.add_column("client")
    for column in ("examples", *(["classes"] if found.classes else []), *others, main, *(["gain"] if others else [])):
        table.add_column(column, justify="right")
    for client, row in tables[main].items():
        last = client == "mean"
        if last:
            table.add_section()
        cells = [f"{row['num_examples']:.0f}"]
        if found.classes:
            shown = [c.id for c in found.clients] if last else [client]
            counts = [sum(n > 0 for n in found.classes[c]) for c in shown]
            cells.append(f"{sum(counts) / len(counts):.1f}" if last else str(counts[0]))
        scores = [tables[name][client][score.name] for name in (*others, main)]
        cells += [_shown(value, score) for value in scores]
        if others:
            cells.append(_gain(scores[-1], scores[0], score))
        table.add_row(client, *cells)
    if others and Measurement.get(console, console.options.update(max_width=10**4), table).maximum > console.width:
        table = _by_method(tables, main, score, when)
    console.print(table)
    for name, run in runs.items():
        record = run.history[-1]
        down, up = (record[f"bytes_{way}_total"] / 2**20 for way in ("down", "up"))
        told = f"{name}: {down:.1f} MB down, {up:.1f} MB up in {len(run.history)} rounds"
        say(console, f"{told}{_pace(run)}")
        if evaluated := evaluated_network(run.federation.algorithm):
            say(console, f"{name}: scores are of {evaluated}")
    if cost := found.preparation:
        told = f"{cost['bytes_up'] / 1024:.1f} kB up, {cost['bytes_down'] / 1024:.1f} kB down"
        say(console, f"preprocessing from sums over all clients: {told} in {cost['rounds']} rounds")
    say(console, f"Everything about this run is in {out}")
    if found.unseen:
        absent = f"{', '.join(c.id for c in found.unseen)} took no part"
        if "flha_ghn" in runs:
            folder = out if main == "flha_ghn" else out / BASELINES / "flha_ghn"
            absent += f"; `polyfed warmstart {folder}` gives unseen clients their networks"
        say(console, absent)


def _shown(value: float | None, metric: Metric) -> str:
    """A value as people read it.

    >>> _shown(0.871, metrics_of("accuracy", "classification")[0]), _shown(0.871, metrics_of("auc", "classification")[0])
    ('87.1 %', '0.871')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric.unit == "%" else f"{value:.3f}"


def _gain(value: float | None, base: float | None, metric: Metric) -> str:
    """By how much a value is better than another; of shares in points."""
    if value is None or base is None:
        return "–"
    gain = value - base if metric.higher_is_better else base - value
    return f"{100 * gain:+.1f}" if metric.unit == "%" else f"{gain:+.3f}"


def _by_method(tables: Mapping[str, Mapping[str, Mapping[str, Any]]], main: str, score: Metric, when: str) -> Table:
    """One row a method, for so many methods that the columns of one row a client do not fit the terminal."""
    others = [name for name in tables if name != main]
    table = Table(title=f"{score.label} on each client's own test examples, {when}; metrics.jsonl has each client's",
                  title_justify="left")  # fmt: skip
    table.add_column("method")
    for column in ("mean", "worst client", "best client", f"gain over {others[0]}"):
        table.add_column(column, justify="right")
    means = {name: rows["mean"][score.name] for name, rows in tables.items()}
    base = means[others[0]]
    for name in (*others, main):
        values = [row[score.name] for client, row in tables[name].items() if client != "mean"]
        known = sorted((v for v in values if v is not None), reverse=not score.higher_is_better)
        cells = [means[name], *((known[0], known[-1]) if known else (None, None))]
        table.add_row(name, *(_shown(value, score) for value in cells), _gain(means[name], base, score))
    return table


def _pace(run: Run) -> str:
    """Mean seconds of a round; empty for a run that did not record them."""
    if not all("seconds_clients" in record and "seconds_server" in record for record in run.history):
        return ""
    clients, server = (fmean(record[f"seconds_{side}"] for record in run.history) for side in ("clients", "server"))
    return f"; a round took {clients:.2f} s on clients, {server:.2f} s on the server"


def show_data(experiment: Experiment, plot: Path, console: Console | None = None) -> None:
    """Prints and draws the number of training examples per client and class, or that have each label; of regression prints
    how many there are, and mean and standard deviation of their targets.

    Raises:
        UserError: a picture that cannot be written.
    """
    console = console or Console()
    found = participants(experiment)
    names, task = found.pool.class_names, found.pool.task
    everyone, first = (*_by_name(found.clients), *_by_name(found.unseen)), len(found.clients)
    what = {"classification": "by class", "multilabel": "that have each label", "regression": "and their targets"}[task]
    table = Table(title=f"training examples {what} (partition {found.partition_fingerprint})", title_justify="left")
    table.add_column("client")
    for name in (*names, "all", "test"):
        table.add_column(name, justify="right")
    counts = {c.id: found.classes.get(c.id) or tuple(c.train.labels.sum(0).long().tolist()) for c in everyone}
    for position, client in enumerate(everyone):
        cells = [str(n) if n else "·" for n in counts[client.id]]
        mark = " (unseen client)" if position >= first else ""
        if task == "regression":
            cells = [f"{mean:.4g} ± {spread:.2g}" for mean, spread in _targets(client)]
        table.add_row(f"{client.id}{mark}", *cells, str(len(client.train)), str(len(client.test)))
    # Drawn first: if the picture cannot be written, there is an error and nothing else.
    if task != "regression":
        draw_class_table(np.array([counts[c.id] for c in everyone]), names, plot, unseen=len(found.unseen),
                         clients=[c.id for c in everyone])  # fmt: skip
    console.print(table)
    if task != "regression":
        say(console, f"drawn in {plot}")


def _by_name(clients: Sequence[Client]) -> list[Client]:
    """Clients in the order of their names; names that are numbers as numbers."""
    place = {name: position for position, name in enumerate(in_order([client.id for client in clients]))}
    return sorted(clients, key=lambda client: place[client.id])


def _targets(client: Client) -> list[tuple[float, float]]:
    """Mean and standard deviation of each target of the training examples, in the unit of the data."""
    y, ready = client.train.labels.double(), client.train.transform
    y = ready.outputs(y).double() if isinstance(ready, Prepared) else y
    return list(zip(y.mean(0).tolist(), y.std(0, correction=0).tolist(), strict=True))
