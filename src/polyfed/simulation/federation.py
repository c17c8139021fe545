"""The round loop: sample, dispatch, run, aggregate, evaluate, checkpoint.

`federate` starts a run and `resume` goes on with one; both return a `Run` with the metrics and the personal models.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from polyfed.algorithms import get, name_of
from polyfed.core.algorithm import Algorithm, BringsNetwork, Client, evaluated_network
from polyfed.core.compression import Compression
from polyfed.core.decided import decisions
from polyfed.core.errors import Interrupted, UserError
from polyfed.core.examples import as_examples
from polyfed.core.files import resumable, user_path
from polyfed.core.metrics import metrics_of, written
from polyfed.core.precision import check_precision
from polyfed.core.threads import one_thread
from polyfed.core.training import LocalTraining
from polyfed.data.resplit import public_prepared_again
from polyfed.simulation import checks
from polyfed.simulation.choosing import settled
from polyfed.simulation.collecting import Collected, evaluation, finished, is_evaluated, play_round, write_models
from polyfed.simulation.engines.machine import check_installed, device_of_clients
from polyfed.simulation.engines.start import start_for
from polyfed.simulation.engines.work import Engine
from polyfed.simulation.fingerprints import fingerprint, of_former_version
from polyfed.simulation.norms import losses_lost
from polyfed.simulation.participants import list_clients
from polyfed.simulation.preparing import together
from polyfed.simulation.resuming import go_back, kept_state
from polyfed.simulation.rounds import Federation, score_of
from polyfed.simulation.runs import chain
from polyfed.simulation.runs import checkpoint as checkpoints
from polyfed.simulation.runs.checkpoint import Checkpoint
from polyfed.simulation.runs.configuration import described, metrics_again, restored
from polyfed.simulation.runs.directory import RunDirectory, plain, read_config
from polyfed.simulation.runs.predictions import Kept
from polyfed.simulation.runs.progress import Progress, progress_of
from polyfed.simulation.runs.results import Run
from polyfed.simulation.secure import check_secure
from polyfed.simulation.settings import EngineName, Keep, Settings


@one_thread()
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
    compress: str | Compression | None = "none",
    compress_down: str | Compression | None = "none",
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
    federation = _checked(clients, method, settings, public, metrics)
    first = federation.begin()  # a method may refuse the federation
    directory = None
    if out is not None:
        # What takes long or may be refused comes before the folder is made, and config.yaml last: a run that is stopped
        # before it can be resumed leaves nothing that would keep it from being started again.
        content = {**plain(config or {}, "config"), **described(federation.algorithm, federation.settings)}
        known = {**(facts or {}), "seed": federation.settings.seed, "data_fingerprint": _fingerprint(federation)}
        known |= {"score": score_of(federation)}
        known |= {"evaluated": told} if (told := evaluated_network(federation.algorithm)) else {}
        known |= decisions(federation.algorithm, first.state)
        directory = RunDirectory.create(out)
        try:
            with resumable("the same command"):
                directory.write_manifest(known)
                directory.write_config(content)
        except BaseException:
            directory.close()
            raise
    return play(federation, first, [], directory, progress_of(progress, quiet=quiet))


@one_thread()
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
    out = user_path(out, "the run directory")
    config = read_config(out)
    directory = RunDirectory.open(out)
    try:
        chain.check_config(out, config, directory.manifest())
        settings, algorithm = restored(config, algorithm)
        settings = dataclasses.replace(
            settings, engine=engine or settings.engine, workers=settings.workers if workers is None else workers,
            device=device or settings.device, ray_address=ray_address or settings.ray_address,
            gpus_per_worker=settings.gpus_per_worker if gpus_per_worker is None else gpus_per_worker,
        )  # fmt: skip
        # imported late: experiments are described in terms of runs
        from polyfed.simulation.experiment import check_cluster, rebuild

        if ray_address is None:
            check_cluster(settings)
        if clients is None:
            clients, public = rebuild(config, out)
        federation = _checked(clients, algorithm, settings, public, metrics, out)
        before = directory.manifest().get("data_fingerprint")
        if before != (now := _fingerprint(federation)):
            chain.check_data(directory.path, now)
            if why := of_former_version(str(before), list(federation.clients.values()), federation.public):
                raise UserError(f"the run in {out} cannot be resumed: {why}")
            raise UserError(
                f"the clients are not those of the run in {out}: its data fingerprint is {before}, theirs is {now}; "
                "resume with the same ids, data and networks"
            )
        start, history = go_back(directory, federation)
    except BaseException:
        directory.close()
        raise
    return play(federation, start, history, directory, progress_of(progress, quiet=quiet))


def _checked(
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
    pool = None if public is None else as_examples(public, "public", labelled=False)
    listed = list_clients(clients)
    checks.check_clients(listed)
    clients = together(listed, settings.seed, settings.secure)
    pool = public_prepared_again(pool, clients)
    task = clients[0].task
    if out is None:
        scores = metrics_of(metrics, task)
        settings = dataclasses.replace(settings, metrics=() if metrics is None else tuple(map(written, scores)))
    else:
        scores = metrics_again(settings, metrics, task, out)
    if settings.keep in ("best", "loss") and all(client.val is None for client in clients):
        raise UserError(
            f"keep={settings.keep!r} needs validation examples, and no client has any: give val=..., or --data.val-fraction"
        )
    if isinstance(algorithm, BringsNetwork):  # for data that suit the method
        checks.check_requirements(clients, algorithm, pool)
        checks.check_models(clients, factory=algorithm.network_for(checks.common_data_spec(clients)))
    else:  # a network that fails on its data cannot be looked into
        checks.check_models(clients)
        checks.check_requirements(clients, algorithm, pool)
    parties = settings.cohort_size(len(clients))
    if settings.secure:
        check_secure(algorithm, parties)
    check_installed(settings.engine)
    device = device_of_clients(settings)
    if isinstance(algorithm, LocalTraining):
        check_precision(algorithm.precision, device)
        checks.check_training(clients, algorithm)
    everyone = {c.id: c for c in sorted(clients, key=lambda c: c.id)}
    return Federation(everyone, algorithm, settings, pool, metrics=scores)


def _fingerprint(federation: Federation) -> str:
    return fingerprint(list(federation.clients.values()), federation.public)


def play(
    federation: Federation,
    start: Checkpoint | None,
    past: Sequence[Mapping[str, Any]],
    directory: RunDirectory | None,
    progress: Progress,
    engine: Engine | None = None,
) -> Run:
    """Plays the rounds that are left. Whatever ends it early, the last complete round is saved first.

    Args:
        federation: who takes part, by which method.
        start: where to go on; None is the beginning.
        past: the records of the rounds before `start`.
        directory: where it is written; closed at the end, as the engine is. None writes nothing.
        progress: who is told how it goes.
        engine: where clients run; None starts the one that the settings ask for.
    """
    settings, algorithm = federation.settings, federation.algorithm
    history: list[Mapping[str, Any]] = list(past)
    changed: set[str] = set()
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(resumable(f"`polyfed resume {directory.path}`"))
            stack.callback(directory.close)
        members, now = list(federation.clients.values()), start or federation.begin()
        if engine is None:
            choice = settled(federation, now, directory, progress)
            engine = start_for(settings, algorithm, members, federation.metrics, choice)
        stack.callback(engine.close)
        saved = now.round
        best = None  # the state after the round that is kept, if that is not the last
        if settings.keep != "last" and directory is not None and now.round:
            best = kept_state(directory, federation, history, now)
        stays = _rounds_of(best)
        predictions = Kept(federation.clients, None if directory is None else directory.path)
        predictions.go_on(history)
        if directory is not None:
            belongs = chain.binding(read_config(directory.path), directory.manifest())
            if "files" in directory.manifest():  # they are written again
                directory.add_to_manifest({"files": {}})
        stack.callback(progress.stop)
        progress.start(name_of(algorithm), settings.rounds, now.recorded)
        rides = engine.rides and settings.keep == "last"  # the best round must be known before the next begins

        def keep_state(state: Checkpoint) -> None:
            assert directory is not None
            bound = {**belongs, "metrics": directory.metrics_sha256}
            bound |= {} if state.unfinished is None else {"records": str(state.recorded)}
            checkpoints.save(directory.checkpoints, state, changed, saved, _rounds_of(best, *stays), bound)

        def advance(after: Checkpoint) -> None:
            nonlocal now
            changed.update(i for i, own in after.client_states.items() if own is not now.client_states.get(i))
            now = after

        def finish(at: Checkpoint, evaluated: Collected | None) -> None:
            """Completes the record of a round, of which `at` is the state after, and writes it."""
            record, found = finished(federation, at.unfinished or {}, evaluated, history)
            record["analysis"] = _keep_analysis(federation, at, record.pop("replied"), directory)
            wanted = settings.keep if isinstance(settings.keep, int) else record["best_round"]
            if too_large := predictions.add(at.round, found, wanted):
                _tell(too_large, directory)
            if directory is not None:
                directory.append(record)
            history.append(record)
            advance(dataclasses.replace(at, unfinished=None))
            progress.round(record)
            for sentence in record["warnings"]:
                progress.say(f"warning: {sentence}")
            if (lost := losses_lost(history[-1:])) and not losses_lost(history[-2:-1]):  # once, not in each round
                progress.warn(lost)

        try:
            if now.round == 0:
                _keep_analysis(federation, now, list(federation.roster.ids), directory)
            while now.recorded < settings.rounds:
                if now.unfinished is not None and not (rides and now.round < settings.rounds):
                    finish(now, evaluation(federation, now, engine, progress))
                else:
                    after = play_round(federation, now, history, engine, progress, finish)
                    if not is_evaluated(settings, after.round):
                        finish(after, None)
                    elif rides:
                        advance(after)
                    else:
                        finish(after, evaluation(federation, after, engine, progress))
                kept = (
                    settings.keep if isinstance(settings.keep, int) else history[-1]["best_round"] if history else None
                )
                improved = settings.keep != "last" and kept == now.round
                best = now if improved else best
                ended = now.recorded == settings.rounds
                due = improved or ended or (now.round % settings.checkpoint_every == 0 and now.round < settings.rounds)
                if directory is not None and due and now.round > saved:
                    # That of the round which was the best until now is needed if this checkpoint gets damaged.
                    keep_state(now)
                    saved, stays = now.round, _rounds_of(best)
                    changed.clear()
            if settings.keep in ("best", "loss") and best is None:
                what = "score" if settings.keep == "best" else "loss"
                sentence = f"keep={settings.keep!r}: no round has a validation {what}, so that the last is kept"
                warnings.warn(sentence, RuntimeWarning, stacklevel=3)
            if directory is not None:
                write_models(federation, best or now, engine, directory, progress)
            predictions.finish()
            if directory is not None:
                directory.add_to_manifest({"files": chain.of_files(directory.path, ("models", "predictions"))})
        except BaseException as stop:
            if directory is not None and now.round > saved:
                keep_state(now)
            if isinstance(stop, KeyboardInterrupt) and directory is not None:
                raise Interrupted(
                    f"interrupted; {now.round} of {settings.rounds} rounds are saved: continue with "
                    f"`polyfed resume {directory.path}`"
                ) from stop
            raise
    path = None if directory is None else directory.path
    return Run(federation, history, now, path, best=best, kept_predictions=predictions)


def _rounds_of(state: Checkpoint | None, *others: int) -> tuple[int, ...]:
    return others if state is None else (state.round, *others)


def _tell(sentence: str, directory: RunDirectory | None) -> None:
    """A warning; in `manifest.json` too."""
    if directory is not None:
        directory.add_to_manifest({"predictions": sentence})
    warnings.warn(sentence, RuntimeWarning, stacklevel=5)


def _keep_analysis(
    federation: Federation, at: Checkpoint, who: Sequence[str], directory: RunDirectory | None
) -> dict[str, float]:
    """Writes what the method keeps of a round for plots; returns the numbers among it, for the record of the round."""
    kept = federation.algorithm.analysis(at.state, who)
    arrays = {name: value for name, value in kept.items() if not isinstance(value, int | float)}
    if directory is not None and arrays:
        directory.write_analysis(at.round, arrays)
    return {name: value for name, value in kept.items() if isinstance(value, int | float)}
