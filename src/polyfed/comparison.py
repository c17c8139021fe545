"""Several methods on the same clients, several seeds each: what `compare` runs, and how it goes on after a stop."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from polyfed import checks, tuning
from polyfed.algorithm import Algorithm, Client
from polyfed.algorithms import REGISTRY, FedAvg, FedAvgFT, Local, get, name_of
from polyfed.data.examples import as_examples
from polyfed.errors import Interrupted, UserError
from polyfed.evaluation import SCORE
from polyfed.plans import EQUAL, Cast, Failure, Job, Method, Plan, play
from polyfed.rounds import Federation
from polyfed.runs import comparison as directory
from polyfed.runs.comparison import Comparison
from polyfed.runs.configuration import described
from polyfed.runs.summary import FORMAT, Budget, Histories, Reading, summarise
from polyfed.settings import EngineName, Settings
from polyfed.training import TAKEN_OVER, LocalTraining

ALWAYS = {"local": Local, "fedavg": FedAvg, "fedavg_ft": FedAvgFT}
"""What is compared unasked, wherever the clients allow it."""
_NOT_RESULTS = ("seed", "engine", "workers", "ray_address", "gpus_per_worker", "device", "checkpoint_every")


def compare(
    clients: Sequence[Client],
    methods: Sequence[Method | str] | Mapping[str, Method | str],
    *,
    rounds: int,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path | None = None,
    public: Any = None,
    like: Method | None = None,
    budget: str = "steps",
    target: float | None = None,
    tune: Mapping[str, Sequence[Any] | str] | None = None,
    trials: int | None = None,
    parallel: int | Literal["auto"] = "auto",
    sample: int | float = 1.0,
    engine: EngineName = "auto",
    workers: int | Literal["auto"] = "auto",
    ray_address: str = "local",
    gpus_per_worker: float = 0.0,
    device: str = "auto",
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    on_error: Literal["raise", "skip"] = "raise",
    min_replies: int = 1,
    title: str = "comparison",
    quiet: bool = False,
) -> Comparison:
    """Runs several methods on the same clients with several seeds, and puts the results side by side.

    `local` is always compared, `fedavg` and `fedavg_ft` too where the clients have one architecture. A method that they do
    not suit is left out, with the reason; one of which a run fails (it diverges, for instance) is told as failed, and the
    others are compared. The same call with the same `out` goes on where it was stopped; finished runs are not repeated.

    Args:
        clients: who takes part, as for `federate`.
        methods: names, methods, or either by label.
        rounds, sample, engine, workers, ray_address, gpus_per_worker, device, evaluate_every, checkpoint_every, on_error,
            min_replies: of each run, see `polyfed.settings.Settings`.
        seeds: one run of each method per seed. One gives no interval.
        out: the directory (see `polyfed.runs.comparison`); None keeps the results in memory.
        public: unlabelled examples that are no client's, for methods that need them; the others ignore them.
        like: whose local training the methods get that are given by name (`by_name` tells which part); default: that of the
            first method in `methods` that is not a name and has no other defaults for it. Without any, they have equal
            epochs and batches and otherwise their own defaults.
        budget: "steps" compares after all rounds; "bytes" or "seconds" (or "bytes=5e6", "seconds=30") each run at its last
            evaluated round that has spent no more. `polyfed.runs.summary.Budget` tells more.
        target: the mean score for the columns "to reach it"; None takes what training alone reaches.
        tune: fields to search on validation examples before, with the values to try or their range:
            {"lr": [0.01, 0.1]}, {"lr": "0.001..0.3"}; see `polyfed.tuning`.
        trials: runs a method has in that search, by Optuna (extra `tune`); None tries every combination of the values.
        parallel: runs at once, each in a process of its own; "auto" is one per core where a round has few clients.
        title: for headings.
        quiet: no progress.

    Raises:
        UserError: methods with unequal local training, clients that no method but `local` suits, or what `federate` refuses;
            nothing has been computed.
        ClientError, RoundError: every method that federates failed, the first as this error tells.

    >>> from polyfed.testing import small_clients
    >>> found = compare(small_clients(3), ["fedprox"], rounds=2, seeds=[0, 1], parallel=1, quiet=True)
    >>> [row["method"] for row in found.table()]
    ['local', 'fedavg', 'fedavg_ft', 'fedprox']
    """
    if not isinstance(seeds, Sequence):
        raise UserError(f"seeds must be different whole numbers, such as [0, 1, 2], got {seeds!r}")
    settings = Settings(
        rounds=rounds, sample=sample, engine=engine, workers=workers, ray_address=ray_address,
        gpus_per_worker=gpus_per_worker, device=device, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every,
        on_error=on_error, min_replies=min_replies,
    )  # fmt: skip
    cast = Cast(tuple(clients), None if public is None else as_examples(public, "public", labelled=False))
    plan = Plan(
        title=title, methods=methods_of(methods, like), seeds=tuple(seeds), settings=settings, cast=lambda seed: cast,
        reading=Reading(Budget.parse(budget), target), out=None if out is None else Path(out), parallel=parallel,
        search=tune, trials=trials, quiet=quiet,
    )  # fmt: skip
    return carry_out(plan)


def methods_of(
    given: Sequence[Method | str] | Mapping[str, Method | str], like: Method | None = None
) -> dict[str, Method]:
    """The methods by label, with those that are compared unasked before the others.

    Raises:
        UserError: an unknown name, something that is no method, or two with one label.

    >>> list(methods_of(["pfedla", "local"]))
    ['fedavg', 'fedavg_ft', 'pfedla', 'local']
    """
    if isinstance(given, str | Algorithm) or not isinstance(given, Sequence | Mapping):
        raise UserError(f"methods must be a list of names or methods, or a mapping from labels to them, got {given!r}")
    pairs: list[tuple[str | None, Any]] = (
        list(given.items()) if isinstance(given, Mapping) else [(None, method) for method in given]
    )
    own = [method for _, method in pairs if isinstance(method, LocalTraining)]
    found: dict[str, Method] = {}
    for label, method in pairs:
        made: Any = by_name(method, like or _model(method, own)) if isinstance(method, str) else method
        if not isinstance(made, Algorithm):
            raise UserError(
                f"methods must be names or methods, for example polyfed.algorithms.FedAvg(), got {method!r}"
            )
        name = name_of(made) if label is None else label
        if name in REGISTRY and name != name_of(made):
            raise UserError(
                f"{name!r} is the name of another method than {name_of(made)}; give that a label of its own"
            )
        if name in found:
            raise UserError(f"methods has {name!r} twice; give each a label of its own: {{'a': ..., 'b': ...}}")
        found[name] = made
    kinds = {type(method) for method in found.values()}
    lacking = [name for name, kind in ALWAYS.items() if kind not in kinds and name not in found]
    return {name: by_name(name, like or _model(name, own)) for name in lacking} | found


def _model(name: str, own: Sequence[Any]) -> Any:
    """The first of the methods that are there which trains as `name` does by default; else its epochs and batches alone."""
    alike = (m for m in own if not _trains_otherwise(get(name), type(m)) and not _trains_otherwise(type(m), get(name)))
    return next(alike, Local(**{field: getattr(own[0], field) for field in EQUAL}) if own else None)


def by_name(name: str, model: Any = None, fields: Mapping[str, Any] | None = None) -> Method:
    """A method that is compared by its name: with the local training of `model`, so that all train equally, and its own
    defaults otherwise; `fields` win over both.

    A method that sets a learning rate or an optimiser of its own, where `model` has not the same default, keeps its
    optimiser with all that belongs to it: the hypernetwork of FLHA-GHN and a supernet are not trained as a client's network.

    >>> model = get("fedprox")(lr=0.5, local_epochs=3)
    >>> by_name("local", model).lr, by_name("flha_ghn", model).lr, by_name("flha_ghn", model).local_epochs
    (0.5, 0.009, 3)
    """
    kind: Any = get(name)
    shared = {f.name: f.default for f in dataclasses.fields(LocalTraining) if f.name in EQUAL}
    if isinstance(model, LocalTraining):
        taken = set(EQUAL) if _trains_otherwise(kind, type(model)) else TAKEN_OVER
        shared = {field: getattr(model, field) for field in taken}
    made: Method = kind(**{**(shared if issubclass(kind, LocalTraining) else {}), **(fields or {})})
    return made


def _trains_otherwise(kind: Any, model: Any) -> bool:
    own, others, plain = ({f.name: f.default for f in dataclasses.fields(k)} for k in (kind, model, LocalTraining))
    return any(own.get(f, plain[f]) not in (plain[f], others.get(f, plain[f])) for f in ("lr", "optimizer"))


def carry_out(plan: Plan) -> Comparison:
    """Runs what a plan lacks, and reads the results.

    Raises:
        UserError, ClientError, RoundError: as for `compare`; complete runs are kept.
        Interrupted: Ctrl-C.
    """
    plan = dataclasses.replace(
        plan, cast=lru_cache(maxsize=1)(plan.cast)
    )  # dealing may read and decode whole data sets
    tuning.check(plan)
    description, data, class_names = _described(plan)
    methods = {label: plan.methods[label] for label in description["methods"]}
    if plan.out is not None:
        directory.keep_description(plan.out, description, plan.reading)
    failed: dict[str, Failure] = {}
    try:
        if plan.search is not None:
            first = description["fingerprints"][str(plan.seeds[0])]
            methods, description["tuning"], failed = tuning.search(plan, methods, first)
        jobs = [
            Job(label, method, seed, None if plan.out is None else plan.out / label / f"seed-{seed}",
                description["fingerprints"][str(seed)])
            for seed in plan.seeds
            for label, method in methods.items()
            if label not in failed
        ]  # fmt: skip
        played, not_played = play(plan, jobs) if jobs else ({}, {})
    except KeyboardInterrupt as stop:
        if plan.out is None:
            raise
        how = f"`polyfed compare {plan.out}`" if plan.experiment else f"the same call with out={str(plan.out)!r}"
        raise Interrupted(f"interrupted; the complete rounds are saved: continue with {how}") from stop
    for job in (job for job in jobs if job in not_played):
        failed.setdefault(job.label, not_played[job])
    methods = {label: method for label, method in methods.items() if label not in failed}
    if all(isinstance(method, Local) for method in methods.values()):
        raise next(iter(failed.values()))
    description["failed"] = {label: str(error) for label, error in failed.items()}
    description["methods"] = {label: _fields(method) for label, method in methods.items()}
    description["reference"] = _reference(methods)
    histories: Histories = {(job.label, job.seed): history for job, history in played.items() if job.label in methods}
    content = summarise(description, data, class_names, histories, plan.reading, on_disk=plan.out is not None)
    if plan.out is not None:
        directory.write(plan.out, content)
    return Comparison(content, plan.out)


def _described(plan: Plan) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]:
    """The content of `comparison.yaml`, what there is to know of the data by seed, and the classes' names. All that can be
    found wrong beforehand is found here, for each seed."""
    left_out: dict[str, str] = {}
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
            if label in left_out:
                continue
            reasons = [_unsuited(cast, one, settings) for one in tuning.variants(plan, method) or [method]]
            if reason := next(filter(None, reasons), None):
                if None in reasons:
                    raise UserError(f"not all values that are to be searched for {label} suit these clients: {reason}")
                left_out[label] = reason
        data[str(seed)] = _known_of(cast)
        fingerprints[str(seed)] = checks.fingerprint(cast.clients, cast.public)
        first_weights = first_weights or checks.first_weights(cast.clients)
    methods = {label: method for label, method in plan.methods.items() if label not in left_out}
    if all(isinstance(method, Local) for method in methods.values()):
        raise UserError(f"no method that federates suits these clients: {'; '.join(left_out.values())}")
    _check_equal_training(methods)
    task = cast.clients[0].task
    settings_kept = {k: v for k, v in dataclasses.asdict(plan.settings).items() if k not in _NOT_RESULTS}
    description = {
        "format": FORMAT,
        "title": plan.title,
        "task": task,
        "score": SCORE[task],
        "seeds": list(plan.seeds),
        "methods": {label: _fields(method) for label, method in methods.items()},
        "evaluated": {label: method.evaluated for label, method in methods.items()},
        "left_out": left_out,
        "reference": _reference(methods),
        "same_clients": len(set(fingerprints.values())) == 1,
        "settings": settings_kept,
        "fingerprints": fingerprints,
        "first_weights": first_weights,
        "search": _searched(plan),
        "trials": plan.trials,
        "experiment": plan.experiment,
    }
    return description, data, cast.class_names


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
        if "one_form" in method.requires:
            checks.check_models(cast.clients, factory=method.brings(checks.common_form(cast.clients)))
        clients = {c.id: c for c in sorted(cast.clients, key=lambda c: c.id)}
        method.init(Federation(clients, method, settings, cast.public).context())
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
            "test": len(c.test),
            "classes": c.train.labels.bincount(minlength=size).tolist() if counted else None,
        }
        for c in sorted(cast.clients, key=lambda c: c.id)
    }


def _check_equal_training(methods: Mapping[str, Method]) -> None:
    """Methods that train more than others would be compared by how much they train, whatever the budget."""
    trained = {
        label: (None if method.local_steps else method.local_epochs, method.local_steps, method.batch_size)
        for label, method in methods.items()
        if isinstance(method, LocalTraining)
    }
    for label, amount in trained.items():
        first = next(iter(trained))
        if amount != trained[first]:
            told = [
                f"{name} has " + ", ".join(f"{f}={getattr(methods[name], f)}" for f in EQUAL) for name in (first, label)
            ]
            raise UserError(f"methods must train equally in each round, but {' and '.join(told)}; give both the same")
