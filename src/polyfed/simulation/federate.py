"""The round loop: sample, dispatch, run, aggregate, evaluate, checkpoint.

`federate` starts a run and `resume` goes on with one; both return a `Run` with the metrics and the personal models.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from polyfed.algorithms import get, registry_name
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.capabilities import BringsNetwork, describe_evaluated_network, resolved_fields_for_manifest
from polyfed.core.errors import RunInterrupt, UserError
from polyfed.core.evaluation.metrics import metric_path_or_name, resolve_metrics
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.io.atomic_files import add_resume_hint, expand_user_path
from polyfed.core.machine.threads import single_torch_thread
from polyfed.core.messages.compressors import Compressor
from polyfed.core.nn.precision import check_precision
from polyfed.core.training.config import LocalTraining
from polyfed.data.partitioning.resplit import prepare_public_like_clients
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.client_list import list_clients
from polyfed.simulation.checks.fingerprints import data_fingerprint, former_version_error
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.devices import check_engine_installed, client_device
from polyfed.simulation.engines.factory import build_engine_for_settings
from polyfed.simulation.monitoring.progress import Progress, resolve_progress
from polyfed.simulation.monitoring.update_norms import describe_diverged_losses
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.engine_choice import resolve_auto_engine
from polyfed.simulation.rounds.federated_preprocessing import with_common_preprocessing
from polyfed.simulation.rounds.federation import Federation, describe_deciding_metric
from polyfed.simulation.rounds.resume import load_kept_checkpoint, rewind_to_checkpoint
from polyfed.simulation.rounds.secure_aggregation import check_secure_support
from polyfed.simulation.rounds.training_round import (
    PhaseResults,
    complete_record,
    evaluate_clients,
    is_evaluation_round,
    run_round,
    write_personal_models,
)
from polyfed.simulation.settings import EngineName, Keep, Settings
from polyfed.simulation.storage import checkpoint as checkpoints
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.checkpoint import Checkpoint
from polyfed.simulation.storage.configuration import (
    describe_method_and_settings,
    restore_metrics,
    restore_settings_and_method,
)
from polyfed.simulation.storage.directory import RunDirectory, read_config, to_plain_values
from polyfed.simulation.storage.predictions import PredictionStore


@single_torch_thread()
def federate(
    clients: Iterable[Client],
    algorithm: Algorithm[Any, Any] | str,
    *,
    rounds: int,
    seed: int = 0,
    clients_per_round: int | float = 1.0,
    public: Any = None,
    engine: EngineName = "auto",
    workers: int | Literal["auto"] = "auto",
    ray_address: str = "local",
    gpus_per_worker: float = 0.0,
    device: str = "auto",
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    out: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    min_replies: int = 1,
    metrics: Any = None,
    keep: Keep = "last",
    compress: str | Compressor | None = "none",
    compress_down: str | Compressor | None = "none",
    secure: bool = False,
    config: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | bool | None = None,
    quiet: bool = False,
) -> Run:
    """Runs a federation.

    Args:
        clients: who takes part, each with its own data and network.
        algorithm: the method, or its name in the registry for its default hyper-parameters.
        rounds, seed, clients_per_round, engine, workers, ray_address, gpus_per_worker, device, evaluate_every,
            checkpoint_every, on_error, min_replies, keep, compress, compress_down, secure: see
            `polyfed.simulation.settings.Settings`.
        metrics: what is computed at evaluation: names such as "auc", functions `f(outputs, targets) -> float` and
            `polyfed.Metric` objects; the first decides which round is the best. None is the task's own.
        public: unlabelled examples that are no client's, for the methods that need them; inputs alone will do.
        out: a new run directory (metrics, checkpoints, models, predictions); None writes nothing.
        config: what `config.yaml` holds beside the settings and the method, for runs that are described by a file.
        facts: what `manifest.json` holds beside versions, seed and the fingerprint of the data.
        progress, quiet: who is told how it goes; None or True shows a bar on a terminal and nothing elsewhere.
            `progress=False` and `quiet=True` show nothing.

    Raises:
        UserError: something given does not fit; nothing has been computed.
        ClientError: a client failed and `on_error` is "raise"; the rounds before are saved in `out`.
        RoundError: fewer than `min_replies` clients replied.
        Interrupted: Ctrl-C; the rounds before are saved in `out`.

    >>> import torch
    >>> from polyfed.algorithms import FedAvg
    >>> x, y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]).repeat(20)
    >>> x[:, 0] += 4 * y
    >>> data = {"train": (x[:20], y[:20]), "test": (x[20:], y[20:])}
    >>> clients = [Client(name, lambda: torch.nn.Linear(2, 2), **data) for name in ("north", "south")]
    >>> run = federate(clients, FedAvg(lr=0.5), rounds=3, workers=0)
    >>> [row["client"] for row in run.table()], run.table()[-1]["accuracy"] > 0.8
    (['north', 'south', 'mean'], True)
    """
    settings = Settings(
        rounds=rounds, seed=seed, clients_per_round=clients_per_round, engine=engine, workers=workers,
        ray_address=ray_address, gpus_per_worker=gpus_per_worker, device=device,
        evaluate_every=evaluate_every, checkpoint_every=checkpoint_every,
        on_error=on_error, min_replies=min_replies, keep=keep, secure=secure,
        compress=compress, compress_down=compress_down,  # type: ignore[arg-type]  # which they become
    )  # fmt: skip
    method = get(algorithm)() if isinstance(algorithm, str) else algorithm
    federation = _validate_and_build(clients, method, settings, public, metrics)
    first = federation.initial_checkpoint()  # a method may refuse the federation
    directory = None
    if out is not None:
        # What takes long or may be refused comes before the folder is made, and config.yaml last: a run that is stopped
        # before it can be resumed leaves nothing that would keep it from being started again.
        content = {
            **to_plain_values(config or {}, "config"),
            **describe_method_and_settings(federation.algorithm, federation.settings),
        }
        manifest_facts = {
            **(facts or {}),
            "seed": federation.settings.seed,
            "data_fingerprint": _data_fingerprint(federation),
        }
        manifest_facts |= {"score": describe_deciding_metric(federation)}
        manifest_facts |= (
            {"evaluated": evaluated} if (evaluated := describe_evaluated_network(federation.algorithm)) else {}
        )
        manifest_facts |= resolved_fields_for_manifest(federation.algorithm, first.state)
        directory = RunDirectory.create(out)
        try:
            with add_resume_hint("the same command"):
                directory.write_manifest(manifest_facts)
                directory.write_config(content)
        except BaseException:
            directory.close()
            raise
    return run_rounds(federation, first, [], directory, resolve_progress(progress, quiet=quiet))


@single_torch_thread()
def resume(
    out: str | Path,
    *,
    clients: Iterable[Client] | None = None,
    algorithm: Algorithm[Any, Any] | None = None,
    public: Any = None,
    engine: EngineName | None = None,
    workers: int | Literal["auto"] | None = None,
    ray_address: str | None = None,
    gpus_per_worker: float | None = None,
    device: str | None = None,
    metrics: Any = None,
    progress: Progress | bool | None = None,
    quiet: bool = False,
) -> Run:
    """Goes on with a run that was stopped, from its newest whole checkpoint; the result is the one that it would have had.

    Args:
        out: the run directory.
        clients, algorithm, public: as they were given to `federate`; needed only if the run was not described by a file
            (then the run's `config.yaml` rebuilds them). `algorithm` is needed only if it is not in the registry.
        engine, workers, ray_address, gpus_per_worker, device: where to go on; None takes what the run had.
        metrics, progress, quiet: as for `federate`; metrics are needed only if one of them is not built in.

    Raises:
        UserError: not a run directory, `clients` or `metrics` are missing or not those of the run, or `algorithm` is not
            that of the run.
    """
    out = expand_user_path(out, "the run directory")
    config = read_config(out)
    directory = RunDirectory.open(out)
    try:
        integrity.check_config_unchanged(out, config, directory.read_manifest())
        settings, algorithm = restore_settings_and_method(config, algorithm)
        settings = dataclasses.replace(
            settings, engine=engine or settings.engine, workers=settings.workers if workers is None else workers,
            device=device or settings.device, ray_address=ray_address or settings.ray_address,
            gpus_per_worker=settings.gpus_per_worker if gpus_per_worker is None else gpus_per_worker,
        )  # fmt: skip
        # imported late: experiments are described in terms of runs
        from polyfed.simulation.experiment import check_ray_cluster_trusted, rebuild_clients

        if ray_address is None:
            check_ray_cluster_trusted(settings)
        if clients is None:
            clients, public = rebuild_clients(config, out)
        federation = _validate_and_build(clients, algorithm, settings, public, metrics, out)
        fingerprint_before = directory.read_manifest().get("data_fingerprint")
        if fingerprint_before != (fingerprint_now := _data_fingerprint(federation)):
            integrity.check_manifest_unchanged(directory.path, fingerprint_now)
            if version_error := former_version_error(
                str(fingerprint_before), list(federation.clients.values()), federation.public
            ):
                raise UserError(f"the run in {out} cannot be resumed: {version_error}")
            raise UserError(
                f"the clients are not those of the run in {out}: its data fingerprint is {fingerprint_before}, theirs "
                f"is {fingerprint_now}; resume with the same ids, data and networks"
            )
        start, history = rewind_to_checkpoint(directory, federation)
    except BaseException:
        directory.close()
        raise
    return run_rounds(federation, start, history, directory, resolve_progress(progress, quiet=quiet))


def _validate_and_build(
    clients: Iterable[Client],
    algorithm: Algorithm[Any, Any],
    settings: Settings,
    public: Any,
    metrics: Any,
    out: str | Path | None = None,
) -> Federation:
    """Everything that can be found wrong before work starts; `out` is the directory of a run that goes on."""
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"algorithm must be a method or its name, got {algorithm!r}; for example polyfed.algorithms.FedAvg()"
        )
    public_examples = None if public is None else as_examples(public, "public", labelled=False)
    client_list = list_clients(clients)
    requirements.check_clients(client_list)
    clients = with_common_preprocessing(client_list, settings.seed, settings.secure)
    public_examples = prepare_public_like_clients(public_examples, clients)
    task = clients[0].task
    if out is None:
        scores = resolve_metrics(metrics, task)
        settings = dataclasses.replace(
            settings, metrics=() if metrics is None else tuple(map(metric_path_or_name, scores))
        )
    else:
        scores = restore_metrics(settings, metrics, task, out)
    if settings.keep in ("best", "loss") and all(client.val is None for client in clients):
        raise UserError(
            f"keep={settings.keep!r} needs validation examples, and no client has any: give val=..., or --data.val-fraction"
        )
    if isinstance(algorithm, BringsNetwork):  # for data that suit the method
        requirements.check_requirements(clients, algorithm, public_examples)
        requirements.check_networks_run(clients, factory=algorithm.network_for(requirements.common_data_spec(clients)))
    else:  # a network that fails on its data cannot be looked into
        requirements.check_networks_run(clients)
        requirements.check_requirements(clients, algorithm, public_examples)
    cohort_size = settings.cohort_size(len(clients))
    if settings.secure:
        check_secure_support(algorithm, cohort_size)
    check_engine_installed(settings.engine)
    device = client_device(settings)
    if isinstance(algorithm, LocalTraining):
        check_precision(algorithm.precision, device)
        requirements.check_training_options(clients, algorithm)
    client_by_id = {c.id: c for c in sorted(clients, key=lambda c: c.id)}
    return Federation(client_by_id, algorithm, settings, public_examples, metrics=scores)


def _data_fingerprint(federation: Federation) -> str:
    return data_fingerprint(list(federation.clients.values()), federation.public)


def run_rounds(
    federation: Federation,
    start: Checkpoint | None,
    earlier_records: Sequence[Mapping[str, Any]],
    directory: RunDirectory | None,
    progress: Progress,
    engine: Engine | None = None,
) -> Run:
    """Plays the rounds that are left. Whatever ends it early, the last complete round is saved first.

    Args:
        federation: who takes part, by which method.
        start: where to go on; None is the beginning.
        earlier_records: the records of the rounds before `start`.
        directory: where it is written; closed at the end, as the engine is. None writes nothing.
        progress: who is told how it goes.
        engine: where clients run; None starts the one that the settings ask for.
    """
    settings, algorithm = federation.settings, federation.algorithm
    history: list[Mapping[str, Any]] = list(earlier_records)
    changed_clients: set[str] = set()
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(add_resume_hint(f"`polyfed resume {directory.path}`"))
            stack.callback(directory.close)
        clients, checkpoint = list(federation.clients.values()), start or federation.initial_checkpoint()
        if engine is None:
            choice = resolve_auto_engine(federation, checkpoint, directory, progress)
            engine = build_engine_for_settings(settings, algorithm, clients, federation.metrics, choice)
        stack.callback(engine.close)
        saved_round = checkpoint.round
        best = None  # the state after the round that is kept, if that is not the last
        if settings.keep != "last" and directory is not None and checkpoint.round:
            best = load_kept_checkpoint(directory, federation, history, checkpoint)
        kept_rounds = _checkpoint_rounds(best)
        predictions = PredictionStore(federation.clients, None if directory is None else directory.path)
        predictions.resume_after(history)
        if directory is not None:
            run_binding = integrity.run_binding(read_config(directory.path), directory.read_manifest())
            if "files" in directory.read_manifest():  # they are written again
                directory.add_to_manifest({"files": {}})
        stack.callback(progress.stop)
        progress.start(registry_name(algorithm), settings.rounds, checkpoint.last_recorded_round)
        overlaps = (
            engine.overlaps_evaluation and settings.keep == "last"
        )  # the best round must be known before the next begins

        def keep_state(state: Checkpoint) -> None:
            assert directory is not None
            binding = {**run_binding, "metrics": directory.metrics_sha256}
            binding |= {} if state.unevaluated_record is None else {"records": str(state.last_recorded_round)}
            checkpoints.save_checkpoint(
                directory.checkpoint_folder, state, changed_clients, saved_round,
                _checkpoint_rounds(best, *kept_rounds), binding,
            )  # fmt: skip

        def advance(after: Checkpoint) -> None:
            nonlocal checkpoint
            changed_clients.update(
                i
                for i, client_state in after.client_states.items()
                if client_state is not checkpoint.client_states.get(i)
            )
            checkpoint = after

        def finish(at: Checkpoint, evaluation_results: PhaseResults | None) -> None:
            """Completes the record of a round, of which `at` is the state after, and writes it."""
            record, outputs = complete_record(federation, at.unevaluated_record or {}, evaluation_results, history)
            record["analysis"] = _write_analysis(federation, at, record.pop("replied"), directory)
            round_to_keep = settings.keep if isinstance(settings.keep, int) else record["best_round"]
            if too_large := predictions.add(at.round, outputs, round_to_keep):
                _warn(too_large, directory)
            if directory is not None:
                directory.append_record(record)
            history.append(record)
            advance(dataclasses.replace(at, unevaluated_record=None))
            progress.finish_round(record)
            for sentence in record["warnings"]:
                progress.say(f"warning: {sentence}")
            if (lost := describe_diverged_losses(history[-1:])) and not describe_diverged_losses(
                history[-2:-1]
            ):  # once, not in each round
                progress.warn(lost)

        try:
            if checkpoint.round == 0:
                _write_analysis(federation, checkpoint, list(federation.client_registry.ids), directory)
            while checkpoint.last_recorded_round < settings.rounds:
                if checkpoint.unevaluated_record is not None and not (overlaps and checkpoint.round < settings.rounds):
                    finish(checkpoint, evaluate_clients(federation, checkpoint, engine, progress))
                else:
                    after = run_round(federation, checkpoint, history, engine, progress, finish)
                    if not is_evaluation_round(settings, after.round):
                        finish(after, None)
                    elif overlaps:
                        advance(after)
                    else:
                        finish(after, evaluate_clients(federation, after, engine, progress))
                kept_round = (
                    settings.keep if isinstance(settings.keep, int) else history[-1]["best_round"] if history else None
                )
                improved = settings.keep != "last" and kept_round == checkpoint.round
                best = checkpoint if improved else best
                ended = checkpoint.last_recorded_round == settings.rounds
                is_due = (
                    improved
                    or ended
                    or (checkpoint.round % settings.checkpoint_every == 0 and checkpoint.round < settings.rounds)
                )
                if directory is not None and is_due and checkpoint.round > saved_round:
                    # That of the round which was the best until now is needed if this checkpoint gets damaged.
                    keep_state(checkpoint)
                    saved_round, kept_rounds = checkpoint.round, _checkpoint_rounds(best)
                    changed_clients.clear()
            if settings.keep in ("best", "loss") and best is None:
                criterion = "score" if settings.keep == "best" else "loss"
                sentence = f"keep={settings.keep!r}: no round has a validation {criterion}, so that the last is kept"
                warnings.warn(sentence, RuntimeWarning, stacklevel=3)
            if directory is not None:
                write_personal_models(federation, best or checkpoint, engine, directory, progress)
            predictions.write_client_files()
            if directory is not None:
                directory.add_to_manifest({"files": integrity.hash_files(directory.path, ("models", "predictions"))})
        except BaseException as stop:
            if directory is not None and checkpoint.round > saved_round:
                keep_state(checkpoint)
            if isinstance(stop, KeyboardInterrupt) and directory is not None:
                raise RunInterrupt(
                    f"interrupted; {checkpoint.round} of {settings.rounds} rounds are saved: continue with "
                    f"`polyfed resume {directory.path}`"
                ) from stop
            raise
    path = None if directory is None else directory.path
    return Run(federation, history, checkpoint, path, best=best, prediction_store=predictions)


def _checkpoint_rounds(state: Checkpoint | None, *more_rounds: int) -> tuple[int, ...]:
    return more_rounds if state is None else (state.round, *more_rounds)


def _warn(sentence: str, directory: RunDirectory | None) -> None:
    """A warning; in `manifest.json` too."""
    if directory is not None:
        directory.add_to_manifest({"predictions": sentence})
    warnings.warn(sentence, RuntimeWarning, stacklevel=5)


def _write_analysis(
    federation: Federation, checkpoint: Checkpoint, client_ids: Sequence[str], directory: RunDirectory | None
) -> dict[str, float]:
    """Writes what the method keeps of a round for plots; returns the numbers among it, for the record of the round."""
    analysis = federation.algorithm.analysis(checkpoint.state, client_ids)
    arrays = {name: value for name, value in analysis.items() if not isinstance(value, int | float)}
    if directory is not None and arrays:
        directory.write_analysis(checkpoint.round, arrays)
    return {name: value for name, value in analysis.items() if isinstance(value, int | float)}
