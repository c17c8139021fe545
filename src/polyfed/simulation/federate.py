"""Defines the public functions `federate` and `resume`, which train clients by one method."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from polyfed.algorithms import REGISTRY, get
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import add_resume_hint_if_disk_full, expand_user_path
from polyfed.core.io.values.keyword_names import suggest_keywords, suggest_keywords_and_fields
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.compressors import Compressor
from polyfed.data.sources.client_source import ClientSource
from polyfed.simulation.callbacks.callback import Callback, RecordFunction, validate_callbacks
from polyfed.simulation.checks.settings.longer_run import check_equals_longer_run
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.monitoring.progress_argument import resolve_progress
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.round_loop import run_remaining_rounds
from polyfed.simulation.rounds.start.preparation import (
    check_and_build_federation,
    check_clients_are_those_of_run,
    create_run_directory,
)
from polyfed.simulation.rounds.start.resume import rewind_to_newest_checkpoint
from polyfed.simulation.scheduling.asynchronous.rules import FedAsync, FedBuff
from polyfed.simulation.scheduling.sampling.sampler import Sampler
from polyfed.simulation.scheduling.scheduling_arguments import check_sampler_is_that_of_run, describe_scheduling
from polyfed.simulation.settings import EngineName, Keep, Settings
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.configuration import read_section, restore_settings_and_method
from polyfed.simulation.storage.directory import RunDirectory, call_to_resume, read_config
from polyfed.simulation.storage.more_rounds import check_more_rounds, write_more_rounds


@suggest_keywords_and_fields(get)
def federate(
    clients: Iterable[Client] | ClientSource,
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
    evaluate_clients: int | float | Sequence[str] = 1.0,
    evaluate_all_at_end: bool = False,
    checkpoint_every: int = 1,
    out: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    min_replies: int = 1,
    metrics: Any = None,
    keep: Keep = "last",
    compress: str | Compressor | None = "none",
    compress_down: str | Compressor | None = "none",
    secure: bool = False,
    regions: int | Mapping[str, str] | None = None,
    cross_site: bool = False,
    sampler: str | Mapping[str, Any] | Sampler = "uniform",
    speeds: str | float | Mapping[str, float] | None = None,
    bandwidth: str | float | Mapping[str, float] | None = None,
    availability: str | Path | Mapping[str, Any] | None = None,
    asynchronous: FedBuff | FedAsync | str | Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    callbacks: Iterable[Callback | RecordFunction] = (),
    progress: Progress | bool | RecordFunction | None = None,
    quiet: bool = False,
) -> Run:
    """Trains clients by one method, and returns the run with metrics and personal models.

    Args:
        clients: the participants, each with its own data and network; or a source that makes each when it is drawn, any
            object with `ids` and `client(id)` such as `polyfed.data.ParquetClients` (`polyfed.data.sources.client_source`).
        algorithm: the method, or its name in the registry for its default hyper-parameters.
        rounds: communication rounds.
        seed: every random choice of the run derives from it.
        clients_per_round: clients that take part in a round: a fraction in (0, 1] (at least one client), or a whole
            number of clients. Note that 1.0 means all clients, and 1 means one client.
        engine: "auto", "inprocess", "pool", "cohort" for many clients at once, or "ray" for a cluster (pip install
            'polyfed[ray]'); "auto" never takes Ray, and takes a cohort if a measurement shows that it is faster.
        workers: processes of the pool or of Ray, or "auto" for one per core (of the cluster, with Ray; on macOS and Windows
            none but this process); 0 runs in this process. Results do not depend on it, with "cohort" up to rounding.
        ray_address: "local" starts a Ray on this machine for the run, "auto" joins the cluster that runs here (or at the
            environment's RAY_ADDRESS), HOST:PORT joins that one. A Ray that the process has joined already is used.
        gpus_per_worker: GPUs of each of Ray's workers; a fraction shares a GPU, and 0 computes on CPUs.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps"; for Ray's workers `gpus_per_worker` decides.
        evaluate_every: rounds between evaluations of the clients' personal models; the last round is always evaluated.
        evaluate_clients: clients that are evaluated: a fraction in (0, 1] or a whole number, drawn again for each evaluation
            from the seed and the round alone, so that every method evaluates the same; or a list of ids, the same each time.
        evaluate_all_at_end: whether all clients are evaluated after the last round, whatever `evaluate_clients` says.
        checkpoint_every: rounds between checkpoints; the last round always has one.
        on_error: "raise" ends the run at a client's failure, "skip" records it and continues without that client.
        min_replies: a round with fewer valid replies ends the run.
        keep: the round whose models and predictions are kept: "last"; "best", by the mean score on the clients' validation
            examples; "loss", the lowest loss on all validation examples together; or the number of a round.
        compress: compression of the clients' replies: "none", "int8" (one byte a number) or "topk:SHARE" (only that share
            of the entries of each tensor, those that changed most); see `polyfed.core.messages.compressors`.
        compress_down: compression of the server's messages: "none" or "int8".
        secure: the server half of the method sees only the sum of a round's replies, in fixed point
            (`polyfed.core.messages.fixed_point`). Real sites mask their replies, so that only the sum can be seen; a
            simulation computes the same sum without encryption.
        regions: sums replies by region, so that the server gets one sum in fixed point per region: the region of each
            client, {client: region}, or a number, to which clients are assigned by a checksum of their ids. Any regions give
            the same bits. For methods whose server half is a mean.
        cross_site: whether every client's model is scored on every other client's test examples at the end
            (`polyfed.simulation.results.across_sites.cross_site`); in simulations alone, since models travel.
        sampler: how the clients of a round are drawn: "uniform", "available", "power_of_choice" (or
            "power_of_choice:CANDIDATES"), "oort", or a `polyfed.Sampler` of your own.
        speeds, bandwidth: examples that a client goes through, and bytes that it sends and receives, in a simulated second:
            a number, "uniform:1-20", "lognormal:1.0", a CSV or JSON file, or {client: number}. Either simulates time.
        availability: when clients are available, in simulated seconds: a CSV file (client, start, end), FedScale's trace as
            JSON, or {client: [[start, end], ...]}.
        asynchronous: `polyfed.FedBuff(...)` or `polyfed.FedAsync(...)`: a round is one server update, which waits for some
            replies only. None: each round waits for all its clients.
        metrics: scores to compute at evaluation: names such as "auc", functions `f(outputs, targets) -> float` and
            `polyfed.Metric` objects; the first decides which round is the best. None takes the task's own.
        public: unlabelled examples that belong to no client, for the methods that need them; inputs alone will do.
        out: a new run directory (metrics, checkpoints, models, predictions); None writes nothing.
        config, facts: further content of `config.yaml`, for runs that are described by a file, and of `manifest.json`.
        callbacks: functions, called with each round's record, and objects of `polyfed.Callback`. One that returns False
            stops the run after the round, and it can be resumed.
        progress, quiet: the progress display: None or True shows a bar on a terminal and in a notebook and nothing
            elsewhere, `progress=False` and `quiet=True` show nothing; or a function of each round's record, or a `Progress`.

    Raises:
        UserError: an argument does not fit, and nothing has been computed; or a callback failed, and the rounds before
            are saved in `out`.
        ClientError: a client failed and `on_error` is "raise"; the rounds before are saved in `out`.
        RoundError: fewer than `min_replies` clients replied.
        RunInterrupt: Ctrl-C; the rounds before are saved in `out`.

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
        evaluate_clients=evaluate_clients, evaluate_all_at_end=evaluate_all_at_end,  # type: ignore[arg-type]  # a list
        on_error=on_error, min_replies=min_replies, keep=keep, secure=secure, regions=regions, cross_site=cross_site,
        compress=compress, compress_down=compress_down,  # type: ignore[arg-type]  # which they become
        **describe_scheduling(sampler, speeds, bandwidth, availability, asynchronous),
    )  # fmt: skip
    return run_federation(
        clients,
        get(algorithm)() if isinstance(algorithm, str) else algorithm,
        settings,
        public=public,
        metrics=metrics,
        out=out,
        config=config,
        facts=facts,
        callbacks=callbacks,
        progress=resolve_progress(progress, quiet=quiet),
        sampler=sampler if isinstance(sampler, Sampler) else None,
    )


@exclusive_single_torch_thread_with_grad()
def run_federation(
    clients: Iterable[Client] | ClientSource,
    algorithm: Algorithm[Any, Any],
    settings: Settings,
    *,
    progress: Progress,
    public: Any = None,
    metrics: Any = None,
    out: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    callbacks: Iterable[Callback | RecordFunction] = (),
    clients_are_checked: bool = False,
    sampler: Sampler | None = None,
) -> Run:
    """Trains as `federate` does, with options in a `Settings` object.

    Args:
        clients, algorithm, public, out, config, facts, callbacks: as for `federate`.
        settings: of the run.
        progress: the progress display.
        metrics: as for `federate`; None takes those that the settings name.
        clients_are_checked, sampler: as for `check_and_build_federation`.
    """
    callbacks = validate_callbacks(callbacks)
    metrics = settings.metrics or None if metrics is None else metrics
    federation = check_and_build_federation(
        clients, algorithm, settings, public, metrics, clients_are_checked=clients_are_checked, sampler=sampler
    )
    start = federation.initial_checkpoint()  # a method may refuse the federation
    directory = None if out is None else create_run_directory(out, federation, start, config or {}, facts or {})
    return run_remaining_rounds(federation, start, [], directory, progress, callbacks=callbacks)


@suggest_keywords
def resume(
    out: str | Path,
    *,
    clients: Iterable[Client] | ClientSource | None = None,
    algorithm: Algorithm[Any, Any] | None = None,
    public: Any = None,
    engine: EngineName | None = None,
    workers: int | Literal["auto"] | None = None,
    ray_address: str | None = None,
    gpus_per_worker: float | None = None,
    device: str | None = None,
    metrics: Any = None,
    sampler: Sampler | None = None,
    callbacks: Iterable[Callback | RecordFunction] = (),
    rounds: int | None = None,
    progress: Progress | bool | RecordFunction | None = None,
    quiet: bool = False,
) -> Run:
    """Continues an interrupted run from its newest intact checkpoint, as if it had not stopped; also a finished one.

    Args:
        out: the run directory.
        clients, algorithm, public: as they were given to `federate`; needed only if the run was not described by a file
            (then the run's `config.yaml` rebuilds them). `algorithm` is needed only if it is not in the registry.
        engine, workers, ray_address, gpus_per_worker, device: where to continue; None takes the run's own.
        rounds: more rounds than the run had, with which it becomes the run that had them from its beginning; None for no
            more. A schedule over all rounds, or a privacy budget, is refused.
        metrics, progress, quiet: as for `federate`; metrics are needed only if one of them is not built in.
        sampler, callbacks: as for `federate`; the former only if it is an object of your class, the latter are not restored.

    Raises:
        UserError: not a run directory, `clients` or `metrics` are missing or not those of the run, or `algorithm` is not
            that of the run; fewer rounds, or more for a run that depends on their number; or a callback failed.
    """
    places = {
        "engine": engine, "workers": workers, "ray_address": ray_address, "gpus_per_worker": gpus_per_worker,
        "device": device,
    }  # fmt: skip
    return resume_federation(
        out,
        clients=clients,
        algorithm=algorithm,
        public=public,
        execution={name: value for name, value in places.items() if value is not None},
        metrics=metrics,
        callbacks=callbacks,
        progress=resolve_progress(progress, quiet=quiet),
        sampler=sampler,
        rounds=rounds,
    )


@exclusive_single_torch_thread_with_grad()
def resume_federation(
    out: str | Path,
    *,
    progress: Progress,
    clients: Iterable[Client] | ClientSource | None = None,
    algorithm: Algorithm[Any, Any] | None = None,
    public: Any = None,
    execution: Mapping[str, Any] | None = None,
    metrics: Any = None,
    callbacks: Iterable[Callback | RecordFunction] = (),
    clients_are_checked: bool = False,
    sampler: Sampler | None = None,
    rounds: int | None = None,
) -> Run:
    """Continues a run as `resume` does, with progress on the given display.

    Args:
        out, clients, algorithm, public, metrics, callbacks, sampler, rounds: as for `resume`.
        progress: the progress display.
        execution: settings of where to continue that replace the run's own, such as those of `Settings.execution_settings`.
        clients_are_checked: as for `run_federation`.
    """
    callbacks = validate_callbacks(callbacks)
    out = expand_user_path(out, "the run directory")
    config = read_config(out)
    directory = RunDirectory.open(out)
    try:
        integrity.check_config_unchanged(out, config, directory.read_manifest())
        name = str(read_section(config, "algorithm").get("name", ""))
        if algorithm is None and ":" not in name and name not in REGISTRY:
            raise UserError(
                f"{out} is a run of {name!r}, which is not a method of polyfed: give it, resume(..., algorithm=...)"
            )
        settings, algorithm = restore_settings_and_method(config, algorithm)
        if rounds is not None:
            check_more_rounds(out, config, rounds)
            check_equals_longer_run(out, algorithm, settings, rounds)
        settings = dataclasses.replace(settings, **(execution or {}), rounds=rounds or settings.rounds)
        # imported late: experiments are described in terms of runs
        from polyfed.simulation.experiment import check_ray_cluster_trusted, rebuild_clients

        if "ray_address" not in (execution or {}):
            check_ray_cluster_trusted(settings)
        if clients is None:
            clients, public = rebuild_clients(config, out)
        check_sampler_is_that_of_run(sampler, settings)
        federation = check_and_build_federation(
            clients, algorithm, settings, public, metrics, out, clients_are_checked, sampler
        )
        check_clients_are_those_of_run(directory, federation)
        with add_resume_hint_if_disk_full(f"`{call_to_resume(out)}`"):
            start, history = rewind_to_newest_checkpoint(directory, federation)
            if settings.rounds > config["rounds"]:
                write_more_rounds(directory, config, settings.rounds)
    except BaseException:
        directory.close()
        raise
    return run_remaining_rounds(federation, start, history, directory, progress, callbacks=callbacks)
