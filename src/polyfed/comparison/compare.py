"""Several methods on the same clients, several seeds each: what `compare` runs, and how it goes on after a stop."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from polyfed.algorithms import Local
from polyfed.comparison import directory, tuning
from polyfed.comparison.alone import ended, rounds_of_each
from polyfed.comparison.basis import rarest_of
from polyfed.comparison.beside import Beside, fit_beside
from polyfed.comparison.contenders import check_equal_training, methods_of
from polyfed.comparison.directory import CHOICES, FORMAT, Comparison
from polyfed.comparison.finals import compared
from polyfed.comparison.plans import Cast, Method, Plan
from polyfed.comparison.reading import Budget, Reading
from polyfed.comparison.summary import Material, summarise
from polyfed.comparison.values import MORE
from polyfed.core.algorithm import BringsNetwork, Client, evaluated_network
from polyfed.core.compression import Compression
from polyfed.core.errors import Interrupted, UserError
from polyfed.core.examples import as_examples
from polyfed.core.files import resumable, user_path
from polyfed.core.metrics import COMPARED, Metric, metrics_of
from polyfed.core.plain_values import plain_value
from polyfed.data.resplit import public_prepared_again
from polyfed.data.resplit import resplit as dealt_anew
from polyfed.simulation import checks
from polyfed.simulation.fingerprints import fingerprint
from polyfed.simulation.fingerprints import first_weights as first_weights_of
from polyfed.simulation.leaks import one_warning
from polyfed.simulation.participants import list_clients
from polyfed.simulation.rounds import Federation
from polyfed.simulation.runs.configuration import described
from polyfed.simulation.secure import check_secure
from polyfed.simulation.settings import EngineName, Settings

SEEDS = 5
"""Of a comparison, unless asked otherwise. A mean gain of 10 points of accuracy over 4 clients with 200 test examples each
is said in 66 of 100 comparisons with 3 seeds, in 99 with 5; one of 5 points in 25 and 56 (`benchmarks/verdicts.py`)."""
_NOT_RESULTS = ("seed", "keep", "engine", "workers", "ray_address", "gpus_per_worker", "device", "checkpoint_every")


def compare(
    clients: Iterable[Client],
    methods: Sequence[Method | str] | Mapping[str, Method | str],
    *,
    rounds: int,
    seeds: Sequence[int] | None = None,
    resplit: int | None = None,
    metrics: Any = None,
    out: str | Path | None = None,
    public: Any = None,
    like: Method | None = None,
    budget: str = "best",
    target: float | None = None,
    tune: Mapping[str, Sequence[Any] | str] | str | None = tuning.AUTO,
    trials: int | None = None,
    references: bool = True,
    parallel: int | Literal["auto"] = "auto",
    clients_per_round: int | float = 1.0,
    engine: EngineName = "auto",
    workers: int | Literal["auto"] = "auto",
    ray_address: str = "local",
    gpus_per_worker: float = 0.0,
    device: str = "auto",
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    on_error: Literal["raise", "skip"] = "raise",
    min_replies: int = 1,
    compress: str | Compression | None = "none",
    compress_down: str | Compression | None = "none",
    secure: bool = False,
    title: str = "comparison",
    progress: bool = True,
    quiet: bool = False,
) -> Comparison:
    """Runs several methods on the same clients with several seeds, and puts the results side by side.

    `local` is always compared, `fedavg` and `fedavg_ft` too where the clients have one architecture. A method that they do
    not suit is left out, with the reason; one of which a run fails (it diverges, for instance) is reported as failed,
    and the
    others are compared. The same call with the same `out` goes on where it was stopped; finished runs are not repeated.

    Args:
        clients: who takes part, as for `federate`.
        methods: names, methods, or either by label.
        rounds, clients_per_round, engine, workers, ray_address, gpus_per_worker, device, evaluate_every, checkpoint_every,
            on_error, min_replies, compress, compress_down: of each run, see `polyfed.simulation.settings.Settings`.
        secure: whether the server sees nothing but the sum of a round's replies. Methods that need each reply by itself are
            left out; `local` sends none, and stays.
        seeds: one run of each method per seed; default 0 to 4, or one for each dealing of `resplit`. With one seed nothing
            is decided, and with three only large gains are.
        resplit: how many times each client's training, validation and test examples are dealt again, each time with another
            seed: the better answer where data are few. None keeps the sets that were given.
        metrics: names, functions `f(outputs, targets) -> float` or `polyfed.Metric` objects; the first decides. None takes
            accuracy, AUC (labels) or, for regression, the mean absolute error, and R² beside it.
        out: the directory (see `polyfed.comparison.directory`); None keeps the results in memory.
        public: unlabelled examples that are no client's, for methods that need them; the others ignore them.
        like: whose local training the methods get that are given by name (`by_name` says which part); default: that of the
            first method in `methods` that is not a name and has no other defaults for it. Without any, they have equal
            epochs and batches and otherwise their own defaults.
        budget: "best" compares each method at its best round by validation loss, and gives no answer over or with one
            that was still learning; "steps" compares after all rounds, "bytes" or "seconds" (or "bytes=5e6", "seconds=30")
            each run at its last evaluated round that has spent no more. `polyfed.comparison.reading.Budget` says more.
        target: the mean score for the columns "to reach it"; None takes what training alone reaches.
        tune: "auto" searches the learning rate of every method on validation examples before, over 0.1 to 10 times its
            own and beyond where the best is at the edge; "none" does not, and the results say so; or fields with the values
            to try or their range: {"lr": [0.01, 0.1]}, {"lr": [0.01, 0.1, ...]} (and beyond), {"lr": "0.001..0.3"}; see
            `polyfed.comparison.tuning`.
        trials: runs a method has in that search, by Optuna (extra `tune`); None tries every combination of the values.
        parallel: runs at once, each in a process of its own; "auto" is one per core where a round has few clients.
        references: puts scores of simple models and of all data pooled next to the methods
            (`polyfed.comparison.references`).
        title: for headings.
        progress, quiet: `progress=False` and `quiet=True` show no progress.

    Raises:
        UserError: methods with unequal local training, clients that no method but `local` suits, or what `federate` refuses;
            nothing has been computed.
        ClientError, RoundError: every method that federates failed, the first as this error says.

    >>> from polyfed.testing import small_clients
    >>> words = {"tune": "none", "references": False, "parallel": 1, "quiet": True}
    >>> found = compare(small_clients(2), ["fedprox"], rounds=1, seeds=[0], **words)
    >>> [row["method"] for row in found.table()]
    ['local', 'fedavg', 'fedavg_ft', 'fedprox']
    """
    listed = list_clients(clients)
    seeds, resplit, target = plain_value(seeds), plain_value(resplit), plain_value(target)
    tune, trials, parallel = plain_value(tune), plain_value(trials), plain_value(parallel)
    if seeds is None:
        seeds = range(SEEDS if resplit is None else resplit) if isinstance(resplit, int | None) else ()
    if not isinstance(seeds, Sequence):
        raise UserError(f"seeds must be different whole numbers, such as [0, 1, 2], got {seeds!r}")
    settings = Settings(
        rounds=rounds, clients_per_round=clients_per_round, engine=engine, workers=workers, ray_address=ray_address,
        gpus_per_worker=gpus_per_worker, device=device, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every,
        on_error=on_error, min_replies=min_replies, secure=secure,
        compress=compress, compress_down=compress_down,  # type: ignore[arg-type]  # which they become
    )  # fmt: skip
    pool = None if public is None else as_examples(public, "public", labelled=False)
    if resplit is None:
        dealt: list[Sequence[Client]] = [listed] * len(seeds)
    else:
        if len(seeds) != resplit:
            raise UserError(
                f"resplit={resplit} deals the data {resplit} times, with a seed each; got {len(seeds)} seeds"
            )
        dealt = list(dealt_anew(listed, resplit))
    casts = {
        seed: Cast(tuple(sets), public_prepared_again(pool, sets)) for seed, sets in zip(seeds, dealt, strict=True)
    }
    one = isinstance(metrics, str | Metric) or callable(metrics)
    asked = () if metrics is None else (metrics,) if one else tuple(metrics)
    plan = Plan(
        title=title, methods=methods_of(methods, like), seeds=tuple(seeds), settings=settings, cast=casts.__getitem__,
        reading=Reading(Budget.parse(budget), target), out=None if out is None else user_path(out, "out"),
        parallel=parallel,
        search=search_of(tune, trials), trials=trials, quiet=quiet or not progress, metrics=asked, resplit=resplit,
        references=references,
    )  # fmt: skip
    return carry_out(plan)


def search_of(tune: Any, trials: int | None = None) -> Mapping[str, Sequence[Any] | str] | None:
    """The fields to search, of what was asked for.

    Raises:
        UserError: an unknown word, or `trials` without fields.

    >>> search_of("auto"), search_of("none"), search_of({"mu": [0.1, 1, ...]})
    ({'lr': 'grid,...'}, None, {'mu': [0.1, 1, '...']})
    """
    if isinstance(tune, str):
        if tune not in (tuning.AUTO, tuning.NONE):
            raise UserError(
                f"tune must be 'auto', 'none', or fields with the values to try, as in {{'lr': [0.01, 0.1]}}, got {tune!r}"
            )
        if trials is not None:
            raise UserError(tuning.no_fields(trials))
        return tuning.BY_DEFAULT if tune == tuning.AUTO else None
    if not isinstance(tune, Mapping):
        found: Mapping[str, Sequence[Any] | str] | None = tune  # None, or refused by `tuning.check`
        return found
    return {
        name: [MORE if value is ... else value for value in values] if isinstance(values, list | tuple) else values
        for name, values in tune.items()
    }


@one_warning()
def carry_out(plan: Plan) -> Comparison:
    """Runs what a plan lacks, and reads the results.

    Raises:
        UserError, ClientError, RoundError: as for `compare`; complete runs are kept.
        Interrupted: Ctrl-C.
        OSError: a full disk, say; complete runs are kept.
    """
    if plan.out is None:
        return _carried_out(plan)
    with resumable(f"`polyfed compare {plan.out}`" if plan.experiment else f"the same call with out={str(plan.out)!r}"):
        return _carried_out(plan)


def _carried_out(plan: Plan) -> Comparison:
    plan = dataclasses.replace(
        plan, cast=lru_cache(maxsize=1)(plan.cast)
    )  # dealing may read and decode whole data sets
    task = plan.cast(plan.seeds[0]).clients[0].task
    metrics = metrics_of(plan.metrics or COMPARED.get(task), task)
    plan = dataclasses.replace(plan, metrics=metrics)
    plan.reading.check(metrics[0].unit)
    tuning.check(plan)
    plan = dataclasses.replace(plan, searched_at=_searched_at(plan))
    description, data, class_names = _described(plan)
    methods = {label: plan.methods[label] for label in description["methods"]}
    if plan.out is not None:
        directory.keep_description(plan.out, description, plan.reading)
    try:
        methods, runs, failed = compared(plan, methods, description)
        methods = {label: method for label, method in methods.items() if label not in failed}
        if all(isinstance(method, Local) for method in methods.values()):
            raise next(iter(failed.values()))
        beside = fit_beside(plan, methods, description["fingerprints"]) if plan.references else Beside()
    except KeyboardInterrupt as stop:
        if plan.out is None:
            raise
        how = f"`polyfed compare {plan.out}`" if plan.experiment else f"the same call with out={str(plan.out)!r}"
        raise Interrupted(f"interrupted; the complete rounds are saved: continue with {how}") from stop
    description["failed"] = {label: str(error) for label, error in failed.items()}
    description["methods"] = {label: _fields(method) for label, method in methods.items()}
    description["reference"] = _reference(methods)
    runs = {run: one for run, one in runs.items() if run[0] in methods}
    ends = rounds_of_each(plan, methods, runs, data, description.get("tuning"))
    histories = {run: ended(one.history, ends[run]) if run in ends else one.history for run, one in runs.items()}
    material = Material(
        description, data, class_names, histories, plan.metrics[0],
        lambda label, seed, client, n: runs[label, seed].outputs(client, ends.get((label, seed), {}).get(client, n)),
        lambda seed, client: _targets(plan, seed, client), beside.references, beside.left_out,
        lambda name, seed, client: beside.outputs[name][seed][client],
        {run: one.folder.relative_to(plan.out).as_posix() for run, one in runs.items() if one.folder and plan.out},
    )  # fmt: skip
    content = summarise(material, plan.reading)
    if plan.out is not None:
        directory.write(plan.out, content)
    return Comparison(content, plan.out)


def _targets(plan: Plan, seed: int, client: str) -> Any:
    return next(c.test.labels.cpu() for c in plan.cast(seed).clients if c.id == client)


def _described(plan: Plan) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]:
    """The content of `comparison.yaml`, what there is to know of the data by seed, and the classes' names. All that can be
    found wrong beforehand is found here, for each seed."""
    skipped: dict[str, str] = {}
    data: dict[str, Any] = {}
    fingerprints: dict[str, str] = {}
    first_weights = ""
    for seed in plan.seeds:
        cast = plan.cast(seed)
        settings = dataclasses.replace(plan.settings, seed=seed)
        checks.check_clients(cast.clients)
        checks.check_models(cast.clients)
        settings.cohort_size(len(cast.clients))
        for label, method in plan.methods.items():
            if label in skipped:
                continue
            reasons = [_unsuited(cast, one, settings) for one in tuning.variants(plan, method) or [method]]
            if reason := next(filter(None, reasons), None):
                if None in reasons:
                    raise UserError(f"not all values that are to be searched for {label} suit these clients: {reason}")
                skipped[label] = reason
        data[str(seed)] = _known_of(cast)
        fingerprints[str(seed)] = fingerprint(cast.clients, cast.public)
        first_weights = first_weights or first_weights_of(cast.clients)
    methods = {label: method for label, method in plan.methods.items() if label not in skipped}
    if all(isinstance(method, Local) for method in methods.values()):
        raise UserError(f"no method that federates suits these clients: {'; '.join(skipped.values())}")
    check_equal_training(methods)
    settings_kept = {k: v for k, v in dataclasses.asdict(plan.settings).items() if k not in _NOT_RESULTS}
    description = {
        "format": FORMAT,
        "choices": CHOICES,
        "title": plan.title,
        "task": cast.clients[0].task,
        "metrics": [_metric(metric) for metric in plan.metrics],
        "seeds": list(plan.seeds),
        "methods": {label: _fields(method) for label, method in methods.items()},
        "evaluated": {label: evaluated_network(method) for label, method in methods.items()},
        "skipped": skipped,
        "reference": _reference(methods),
        "same_clients": plan.resplit is not None or len(set(fingerprints.values())) == 1,
        "resplit": plan.resplit,
        "references": plan.references,
        "settings": settings_kept,
        "fingerprints": fingerprints,
        "first_weights": first_weights,
        "search": _searched(plan),
        "trials": plan.trials,
        "experiment": plan.experiment,
    }
    if plan.search is not None and plan.searched_at.asked:
        description["searched_at"] = str(plan.searched_at)
    return description, data, cast.class_names


def _searched_at(plan: Plan) -> Budget:
    """The budget with which a comparison began. A search is not repeated when its results are read by another."""
    if plan.out is None or not (plan.out / directory.DESCRIPTION).exists():
        return plan.reading.budget
    return Budget.parse(directory.read_description(plan.out).get("searched_at", Budget().kind))


def _metric(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in ("name", "label", "unit", "higher_is_better")}


def _reference(methods: Mapping[str, Method]) -> str | None:
    return next((label for label, method in methods.items() if isinstance(method, Local)), None)


def _searched(plan: Plan) -> dict[str, Any] | None:
    if plan.search is None:
        return None
    return {name: values if isinstance(values, str) else list(values) for name, values in plan.search.items()}


def _fields(method: Method) -> dict[str, Any]:
    fields: dict[str, Any] = described(method, Settings())["algorithm"]
    return fields


def _unsuited(cast: Cast, method: Method, settings: Settings) -> str | None:
    """Why the clients do not suit a method, in the words with which a run would refuse them; None if they do."""
    try:
        checks.check_requirements(cast.clients, method, cast.public)
        if settings.secure and not isinstance(method, Local):
            check_secure(method, settings.cohort_size(len(cast.clients)))
        if isinstance(method, BringsNetwork):
            checks.check_models(cast.clients, factory=method.network_for(checks.common_data_spec(cast.clients)))
        clients = {c.id: c for c in sorted(cast.clients, key=lambda c: c.id)}
        Federation(clients, method, settings, cast.public).begin()
    except UserError as reason:
        return str(reason)
    return None


def _known_of(cast: Cast) -> dict[str, Any]:
    counted = cast.clients[0].task == "classification"
    most = max(int(c.train.labels.max()) for c in cast.clients) + 1 if counted else 0
    size = max(most, len(cast.class_names or ()))
    return {
        c.id: {
            "train": len(c.train),
            "val": 0 if c.val is None else len(c.val),
            "test": len(c.test),
            "classes": c.train.labels.bincount(minlength=size).tolist() if counted else None,
            "rarest": None if c.task == "regression" else list(rarest_of(c.test.labels.cpu())),
        }
        for c in sorted(cast.clients, key=lambda c: c.id)
    }
