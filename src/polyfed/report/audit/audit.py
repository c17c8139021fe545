"""Implements `polyfed.audit`: tries to find the training examples of a run from its networks."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.evaluation.metrics import is_built_in_metric
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import number_units
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.report.audit.attack_rates import attack_auc, true_positive_rate
from polyfed.report.audit.attributes import MOST_COLUMNS, MOST_VALUES, Guesses, guess_attributes, measure_attributes
from polyfed.report.audit.audit_file import write_audit
from polyfed.report.audit.audit_report import AuditReport, ClientAudit
from polyfed.report.audit.effort import check_audit_effort
from polyfed.report.audit.likelihood_ratio import logit_scaled_confidence, score_members
from polyfed.report.audit.messages.attack_messages import attack_messages, choose_most_exposed
from polyfed.report.audit.messages.effort import describe_effort
from polyfed.report.audit.messages.message_audit import MessageAudit
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.experiment import check_ray_cluster_trusted, rebuild_clients
from polyfed.simulation.federate import run_federation
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.run import Run
from polyfed.simulation.results.saved_run import SavedRun
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.start.preparation import check_and_build_federation
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.configuration import restore_settings_and_method
from polyfed.simulation.storage.directory import read_config, read_manifest

_FEWEST_UNITS = 4
_FEW_NON_MEMBERS = 100

ScoredExamples = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]  # scores, members, units


@suggest_keywords
def audit(
    folder: Run | SavedRun | str | Path,
    *,
    clients: Iterable[Client] | None = None,
    algorithm: Algorithm[Any, Any] | None = None,
    public: Any = None,
    metrics: Any = None,
    runs: int = 8,
    client: str | None = None,
    iterations: int = 300,
    restarts: int = 2,
    on_run: Callable[[int], object] | None = None,
) -> AuditReport:
    """Attacks a run as its server or another client could, and returns rates and reconstructions.

    It finds out which examples were trained on, guesses columns of tables, and reconstructs images and label counts.

    It trains `runs` shadow runs like the run in `folder`, each on a random half of every client's training examples (of its
    patients, with `group=`). Each is attacked with what the others show. So it takes `runs` times as long as training.
    Messages are those of all training examples, of the up to four clients that have the fewest.

    Args:
        folder: a run directory, or the run that `federate` or `load` returned; the result is written to `audit.json` in
            it, for the page of `polyfed report`, and nothing else is changed.
        clients, algorithm, public: as they were given to `federate`; needed for a directory whose run no file describes.
            `algorithm` is needed only if it is not in the registry.
        metrics: as for `federate`; needed only if one that is not built in chose the round that was kept.
        runs: number of shadow runs, at least 4; more make the attack stronger.
        client: id of a client, to attack this one alone; None attacks all.
        iterations, restarts: effort of the search for images; `iterations=0` leaves it out.
        on_run: called with the number of each finished shadow run.

    Raises:
        UserError: no run directory, fewer than 4 runs, an effort below 0, an unknown client, clients that are not those of
            the run, a task that is not classification, or a client with fewer than 4 training examples.

    >>> audit("no/such/folder", runs=2)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: runs of an audit must be a whole number of at least 4, got 2
    """
    _check_options(runs, iterations, restarts, algorithm, on_run)
    if isinstance(folder, Run) and clients is None:
        clients = folder.federation.clients.values()
        public = folder.federation.public if public is None else public
    run_folder = folder.out if isinstance(folder, Run | SavedRun) else folder
    if run_folder is None:
        raise UserError("an audit reads a run directory, and this run was kept in memory; write it with run.save(DIR)")
    path = expand_user_path(run_folder, "the run directory")
    if not (path / "config.yaml").is_file():
        is_comparison = (path / "comparison.yaml").is_file()
        cure = f"is a comparison; give one of its runs, such as {path}/METHOD/seed-0"
        raise UserError(f"{path} {cure if is_comparison else 'is not a run directory: it has no config.yaml'}")
    federation = _rebuild_federation(path, clients, algorithm, public, metrics)
    attacked = _choose_clients(list(federation.clients.values()), client)
    for one_client in federation.clients.values():
        _check_can_be_halved(one_client)
    shadow_runs = _attack_shadow_runs(federation, attacked, runs, metrics, on_run)
    exposed = [client] if client is not None else choose_most_exposed(attacked)
    messages = attack_messages(federation, exposed, iterations, restarts)
    effort = describe_effort(federation, messages, iterations, restarts)
    report = _build_audit_report(attacked, shadow_runs, federation, messages, effort)
    write_audit(path, report)
    return report


@final
@dataclasses.dataclass(frozen=True)
class _ShadowRuns:
    """Holds what shadow runs show, by client and run, and the largest ε of each client whose training had one."""

    observations: Mapping[str, list[NDArray[Any]]]
    memberships: Mapping[str, list[NDArray[Any]]]
    guesses: Mapping[str, list[Guesses]]
    epsilons: Mapping[str, float]


def _rebuild_federation(
    path: Path, clients: Iterable[Client] | None, algorithm: Algorithm[Any, Any] | None, public: Any, metrics: Any
) -> Federation:
    """Builds the federation of the run in a directory again, of the clients that were given or of its file's."""
    config, manifest = read_config(path), read_manifest(path)
    integrity.check_config_unchanged(path, config, manifest)
    settings, method = restore_settings_and_method(config, algorithm)
    check_ray_cluster_trusted(settings)
    if clients is None:
        clients, public = _rebuild_clients(config, path)
    # Scores are not used, unless they choose the round.
    settings = dataclasses.replace(
        settings, cross_site=False, metrics=settings.metrics if settings.keep == "best" else ()
    )
    if metrics is None and (unknown := [name for name in settings.metrics if not _can_be_found(name)]):
        raise UserError(
            f"the run in {path} kept the round that the metric {unknown[0]!r} chose, which is not built in; give its "
            f"metrics again: polyfed.audit({str(path)!r}, metrics=[...])"
        )
    metrics = metrics if settings.keep == "best" else None
    federation = check_and_build_federation(clients, method, settings, public, metrics, path)
    if data_fingerprint(list(federation.clients.values()), federation.public) != manifest.get("data_fingerprint"):
        raise UserError(f"the clients are not those of the run in {path}; give those with which it was trained")
    return federation


def _attack_shadow_runs(
    federation: Federation, attacked: Sequence[Client], runs: int, metrics: Any, on_run: Callable[[int], object] | None
) -> _ShadowRuns:
    """Trains the shadow runs, and keeps what each shows of the attacked clients."""
    everyone, settings = list(federation.clients.values()), federation.settings
    ids, epsilons = [client.id for client in attacked], dict[str, float]()
    shadow_runs = _ShadowRuns({i: [] for i in ids}, {i: [] for i in ids}, {i: [] for i in ids}, epsilons)
    for number in range(runs):
        seed = derive_seed(settings.seed, "audit", number)
        rows = {c.id: _draw_half(c.train, derive_seed(seed, c.id)) for c in everyone}
        run = _train_shadow_run(federation, rows, seed, metrics)
        for client in attacked:
            network = run.model(client.id)
            shadow_runs.guesses[client.id].append(guess_attributes(network, client.train))
            outputs = predict(network, client.train)
            shadow_runs.observations[client.id].append(logit_scaled_confidence(outputs, client.train.labels.cpu()))
            shadow_runs.memberships[client.id].append(np.isin(np.arange(len(client.train)), rows[client.id]))
        for name, value in run.history[-1].get("epsilon", {}).items():
            epsilons[name] = max(value, epsilons.get(name, 0.0))
        if on_run is not None:
            on_run(number + 1)
    return shadow_runs


def _rebuild_clients(config: Mapping[str, Any], path: Path) -> tuple[Sequence[Client], Examples | None]:
    if "deployment" in config:
        raise UserError(
            f"the run in {path} is of real sites, whose data are not here; audit a simulation with data like theirs"
        )
    if "data" not in config:
        raise UserError(
            f"the clients of {path} were made in Python; give them: polyfed.audit({str(path)!r}, clients=[...])"
        )
    return rebuild_clients(config, path)


def _check_options(runs: Any, iterations: Any, restarts: Any, algorithm: Any, on_run: Any) -> None:
    check_audit_effort(runs, iterations, restarts)
    if not (algorithm is None or isinstance(algorithm, Algorithm)):
        raise UserError(
            f"algorithm must be the method of the run, such as polyfed.algorithms.FedAvg(), or None, got {algorithm!r}"
        )
    if not (on_run is None or callable(on_run)):
        raise UserError(f"on_run must be a function of the number of finished runs, or None, got {on_run!r}")


def _can_be_found(metric: str) -> bool:
    return is_built_in_metric(metric) or ":" in metric


def _choose_clients(clients: list[Client], client: str | None) -> list[Client]:
    ids = [one_client.id for one_client in clients]
    if client is None:
        return clients
    if client not in ids:
        raise UserError(f"the run has no client {client!r}; {did_you_mean(str(client), ids)}")
    return [clients[ids.index(client)]]


def _check_can_be_halved(client: Client) -> None:
    if not client.task.one_class_per_example:
        task = client.task.name or type(client.task).__name__
        raise UserError(
            f"an audit attacks networks that choose one class for each example, and the task of client {client.id!r} is "
            f"{task}; there is no attack for it here, which does not mean that its networks reveal nothing"
        )
    units = len(np.unique(number_units(client.train)))
    if units < _FEWEST_UNITS:
        kind = "training examples" if client.train.group is None else "groups of training examples"
        raise UserError(f"client {client.id!r} has {units} {kind}, and an audit needs at least {_FEWEST_UNITS}")


def _draw_half(examples: Examples, seed: int) -> NDArray[np.int64]:
    """Returns the positions of the examples of a random half of all units."""
    units = number_units(examples)
    num_units = int(units.max()) + 1
    half = numpy_generator(seed).permutation(num_units)[: num_units // 2]
    return np.flatnonzero(np.isin(units, half))


def _train_shadow_run(federation: Federation, rows: Mapping[str, NDArray[np.int64]], seed: int, metrics: Any) -> Run:
    halves = [
        dataclasses.replace(
            c, train=c.train.select(torch.as_tensor(rows[c.id], dtype=torch.int64, device=c.train.device))
        )
        for c in federation.clients.values()
    ]
    settings = dataclasses.replace(federation.settings, seed=seed)
    with warnings.catch_warnings():  # the checks of all clients have warned already
        warnings.simplefilter("ignore", UserWarning)
        return run_federation(
            halves, federation.algorithm, settings, progress=SilentProgress(), public=federation.public, metrics=metrics
        )


def _build_audit_report(
    clients: Sequence[Client],
    shadow_runs: _ShadowRuns,
    federation: Federation,
    messages: tuple[MessageAudit, ...],
    effort: Sequence[str],
) -> AuditReport:
    entries, parts, first_unit = list[ClientAudit](), list[ScoredExamples](), 0
    observations, memberships, epsilons = shadow_runs.observations, shadow_runs.memberships, shadow_runs.epsilons
    attributes = measure_attributes(
        [(c.train, number_units(c.train), shadow_runs.guesses[c.id], memberships[c.id]) for c in clients]
    )
    for client in clients:
        members = np.stack(memberships[client.id])
        scores, units = score_members(np.stack(observations[client.id]), members), number_units(client.train)
        part: ScoredExamples = (scores.ravel(), members.ravel(), np.tile(units, len(scores)))
        entries.append(_measure_attack(client.id, len(client.train), part, epsilons.get(client.id)))
        parts.append((part[0], part[1], part[2] + first_unit))
        first_unit += int(units.max()) + 1
    all_scores, all_members, all_units = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    num_examples = sum(entry.examples for entry in entries)
    epsilon = max((entry.epsilon for entry in entries if entry.epsilon is not None), default=None)
    overall = _measure_attack("all", num_examples, (all_scores, all_members, all_units), epsilon)
    num_runs = len(observations[clients[0].id])
    few = any(int((~np.stack(members)).sum()) < _FEW_NON_MEMBERS for members in memberships.values())
    sentences = (*_describe_attempt(num_runs, few, bool(attributes)), *effort)
    name = registry_name(federation.algorithm)
    return AuditReport(name, num_runs, tuple(entries), overall, sentences, messages, attributes)


def _measure_attack(name: str, num_examples: int, part: ScoredExamples, epsilon: float | None) -> ClientAudit:
    at_1_percent, at_10_percent = (true_positive_rate(*part, false_positive_rate=share) for share in (0.01, 0.1))
    return ClientAudit(name, num_examples, attack_auc(*part), at_1_percent, at_10_percent, epsilon)


def _describe_attempt(num_runs: int, has_few_scores: bool, with_attributes: bool) -> tuple[str, ...]:
    """Returns what was tried to find members and attributes, and what the rates do not say, as sentences."""
    sentences = [
        f"Tried: membership inference by a likelihood ratio (LiRA, one variance for each client) on each client's personal "
        f"network; {num_runs} runs, each on a random half of the training examples, each attacked with the "
        f"{num_runs - 1} others. In parentheses: 95 % intervals."
    ]
    if has_few_scores:
        sentences.append(
            "Fewer than 100 scores of non-members for a client: there the rate at 1 % is the one without any false positive."
        )
    if with_attributes:
        sentences.append(
            "Tried on columns: who has the network and a row's other columns and label takes the value that makes the label "
            f"and the value's frequency most probable; the first {MOST_COLUMNS} columns of 2 to {MOST_VALUES} values. "
            "Other rows: the same for those that the network was not trained on. What is higher than there is what training "
            "gave away of single rows; what is as high, it tells of anybody."
        )
    return tuple(sentences)
