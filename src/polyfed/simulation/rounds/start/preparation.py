"""Prepares a run: checks everything that can be wrong before the first round, and creates the run directory."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples
from polyfed.core.io.atomic_files import add_resume_hint_if_disk_full
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.core.machine.package_versions import package_versions
from polyfed.core.methods.capabilities import (
    BringsNetwork,
    describe_evaluated_network,
    manifest_entry_of_resolved_fields,
)
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.precision import check_precision
from polyfed.data.partitioning.resplit import apply_common_preprocessing_to_public
from polyfed.data.sources.client_source import ClientSource, is_client_source
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.clients.client_list import list_clients
from polyfed.simulation.checks.code_fingerprints import code_fingerprint, find_changed_code, warn_of_changed_code
from polyfed.simulation.checks.fingerprints import column_fingerprint, data_fingerprint
from polyfed.simulation.checks.networks.trial_evaluation import check_losses_and_metrics_work
from polyfed.simulation.checks.settings.method_settings import check_settings_suit_method
from polyfed.simulation.checks.settings.private_training import check_and_complete_privacy
from polyfed.simulation.checks.settings.scheduling import check_scheduling
from polyfed.simulation.checks.settings.training_options import check_training_options
from polyfed.simulation.engines.devices import choose_client_device
from polyfed.simulation.rounds.columns.federated_preprocessing import unify_preprocessing_of_clients
from polyfed.simulation.rounds.federation import Federation, deciding_metric_manifest_entry
from polyfed.simulation.scheduling.sampling.sampler import Sampler
from polyfed.simulation.settings import Settings
from polyfed.simulation.sources.preparation import build_federation_of_source
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.configuration import describe_method_and_settings, resolve_or_restore_metrics
from polyfed.simulation.storage.directory import RunDirectory, call_to_resume, find_main_run


def check_and_build_federation(
    clients: Iterable[Client] | ClientSource,
    algorithm: Algorithm[Any, Any],
    settings: Settings,
    public: Any,
    metrics: Any,
    resumed: str | Path | None = None,
    clients_are_checked: bool = False,
    sampler: Sampler | None = None,
) -> Federation:
    """Builds the `Federation` of a run; first checks its clients, method, settings and data.

    Args:
        clients, algorithm, settings, public, metrics: of the run.
        resumed: the directory of a run that is resumed, or None.
        clients_are_checked: the caller has run `requirements.check_clients`, `requirements.check_networks_run` and
            `check_method` on these clients.
        sampler: an object of the user's own class; None builds the one that the settings name.

    Raises:
        UserError: a client, the method, a setting or the data do not fit.
    """
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm must be a method or its name, got {algorithm!r}; {how_to_give_method(algorithm)}")
    public_examples = None if public is None else as_examples(public, "public", labelled=False)
    if is_client_source(clients):
        return build_federation_of_source(clients, algorithm, settings, public_examples, metrics, resumed, sampler)  # type: ignore[arg-type]
    given_clients = list_clients(clients)
    if not clients_are_checked:
        requirements.check_clients(given_clients)
        if resumed is None:
            requirements.warn_of_single_client([client.id for client in given_clients], [algorithm])
    clients = unify_preprocessing_of_clients(given_clients, settings.seed, settings.secure)
    public_examples = apply_common_preprocessing_to_public(public_examples, clients)
    settings, scores = resolve_or_restore_metrics(settings, metrics, clients[0].task, resumed)
    if settings.keep in ("best", "loss") and all(client.val is None for client in clients):
        raise UserError(
            f"keep={settings.keep!r} needs validation examples, and no client has any: give val=..., or --data.val-fraction"
        )
    if not clients_are_checked or clients is not given_clients:
        if not isinstance(algorithm, BringsNetwork):  # other methods look into the clients' networks, so these must run
            requirements.check_networks_run(clients)
            if settings.on_error == "raise":
                check_losses_and_metrics_work(clients, scores)
        check_method(clients, algorithm, public_examples)
    check_settings_suit_method(algorithm, settings, sorted(client.id for client in clients))
    device = choose_client_device(settings)
    if isinstance(algorithm, LocalTraining):
        check_precision(algorithm.precision, device)
        check_training_options(clients, algorithm)
    algorithm = check_and_complete_privacy(algorithm, clients, settings.rounds)
    client_by_id = {c.id: c for c in sorted(clients, key=lambda c: c.id)}
    federation = Federation(client_by_id, algorithm, settings, public_examples, metrics=scores, sampler=sampler)
    check_scheduling(federation)
    return federation


def check_method(clients: Sequence[Client], algorithm: Algorithm[Any, Any], public: Examples | None) -> None:
    """Raises a `UserError` if clients fail a requirement, or the method's own network fails on their data."""
    requirements.check_requirements(clients, algorithm, public)
    if isinstance(algorithm, BringsNetwork):
        requirements.check_networks_run(clients, factory=algorithm.network_for(requirements.common_data_spec(clients)))


def create_run_directory(
    out: str | Path, federation: Federation, start: Checkpoint, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> RunDirectory:
    """Creates the directory of a new run, with its configuration and manifest.

    Args:
        out: the folder, which must not exist or be empty.
        federation, start: the run, and its state before round 1.
        config, facts: further content of `config.yaml` and `manifest.json`.

    Raises:
        UserError: the folder is taken or cannot be written, or the configuration holds what YAML cannot.
    """
    # Everything that takes long or may be refused comes before the folder is made, and config.yaml last: a run that is
    # stopped before it can be resumed leaves nothing that keeps it from being started again.
    content = {
        **to_plain_values(config, "config"),
        **describe_method_and_settings(federation.algorithm, federation.settings),
    }
    evaluated = describe_evaluated_network(federation.algorithm)
    class_names = federation.class_names
    manifest = {
        **({} if class_names is None else {"class_names": list(class_names)}),
        **facts,
        "seed": federation.settings.seed,
        "data_fingerprint": _data_fingerprint(federation),
        **({"column_fingerprint": columns} if (columns := _column_fingerprint(federation)) else {}),
        **({"code": code} if (code := _code_fingerprint(federation)) else {}),
        "score": deciding_metric_manifest_entry(federation),
        "task": federation.task.spec,
        **({"evaluated": evaluated} if evaluated else {}),
        **manifest_entry_of_resolved_fields(federation.algorithm, start.state),
    }
    directory = RunDirectory.create(out)
    try:
        is_baseline = find_main_run(directory.path) != directory.path  # its main run is saved already
        with add_resume_hint_if_disk_full(f"`{call_to_resume(directory.path)}`" if is_baseline else "the same command"):
            directory.write_manifest(manifest)
            directory.write_config(content)
    except BaseException:
        directory.close()
        raise
    return directory


def how_to_give_method(value: Any) -> str:
    """Returns how to give a method, for a value that is none."""
    if isinstance(value, type) and issubclass(value, Algorithm):
        name = next((name for name, kind in REGISTRY.items() if kind is value), None)
        return f"a class is none yet: give {value.__name__}(){'' if name is None else f' or {name!r}'}"
    if isinstance(value, list | tuple | dict):
        return "several are compared by polyfed.compare(clients, algorithms, ...)"
    return "for example polyfed.algorithms.FedAvg()"


def check_clients_are_those_of_run(directory: RunDirectory, federation: Federation) -> None:
    """Raises a `UserError` if a resumed run has other clients or data; warns if it has other code."""
    out, fingerprint_before = directory.path, directory.read_manifest().get("data_fingerprint")
    fingerprint_now = _data_fingerprint(federation)
    if fingerprint_before == fingerprint_now:
        columns_now = _column_fingerprint(federation)
        if directory.read_manifest().get("column_fingerprint", columns_now) != columns_now:
            raise UserError(
                f"{integrity.COLUMNS_CHANGED} than when the run in {out} began; "
                "put the table back, or start another run with another out=... (--out)"
            )
        warn_of_changed_code(find_changed_code(directory.read_manifest().get("code"), _code_fingerprint(federation)))
        _warn_of_other_versions(directory)
        return
    integrity.refuse_changed_manifest(out, fingerprint_now)
    raise UserError(
        f"the clients are not those of the run in {out}: its data fingerprint is {fingerprint_before}, theirs "
        f"is {fingerprint_now}; resume with the same ids, data and networks"
    )


def _warn_of_other_versions(directory: RunDirectory) -> None:
    """Warns if a run was begun with other versions of the packages that compute it than it is resumed with."""
    before, now = directory.read_manifest().get("versions", {}), package_versions()
    changed = [name for name in ("polyfed", "torch", "numpy") if before.get(name, now[name]) != now[name]]
    if changed:
        pairs = [" and ".join(f"{name} {versions[name]}" for name in changed) for versions in (before, now)]
        warnings.warn(
            f"the run in {directory.path} was begun with {pairs[0]}, and is resumed with {pairs[1]}: its later rounds may "
            "have other bits than those of an uninterrupted run",
            UserWarning,
            stacklevel=4,
        )


def _data_fingerprint(federation: Federation) -> str:
    if isinstance(federation.clients, SourceClients):
        return federation.clients.fingerprint(federation.public)
    return data_fingerprint(list(federation.clients.values()), federation.public)


def _column_fingerprint(federation: Federation) -> str:
    is_source = isinstance(federation.clients, SourceClients)  # which makes clients when they are drawn
    return column_fingerprint([] if is_source else federation.clients.values())


def _code_fingerprint(federation: Federation) -> dict[str, str]:
    is_source = isinstance(federation.clients, SourceClients)  # which makes clients when they are drawn
    return code_fingerprint([] if is_source else federation.clients.values(), federation.algorithm)
