"""What the command `compare` does: methods and seeds of an experiment, and the table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, final

from rich.console import Console
from rich.table import Table

from polyfed.algorithms import get, name_of
from polyfed.checks import check_models
from polyfed.commands.experiment import Experiment, from_config, participants
from polyfed.commands.words import flag, number, take
from polyfed.comparison import by_name, carry_out, methods_of
from polyfed.errors import RoundError, UserError, nearest
from polyfed.plans import Cast, Method, Plan
from polyfed.runs.comparison import DESCRIPTION, Comparison, read_description, reading_of
from polyfed.runs.configuration import described
from polyfed.runs.directory import read_config
from polyfed.runs.summary import Budget, Reading
from polyfed.settings import Settings
from polyfed.tuning import GRID, number_or_word

_WORDS = {"true": True, "false": False, "null": None}
_READING = ("budget", "target", "parallel", "quiet")  # what may be asked of a directory


@final
@dataclass(frozen=True)
class Asked:
    """What the command line asks for beside the experiment.

    Args:
        algorithms: labels; empty for the experiment's method and its baselines.
        seeds: of the runs; None is 0, 1 and 2.
        hyper: a YAML file with the fields of methods, by label.
        budget, target: how results are read; None leaves what the directory says, or the defaults.
        tune: fields to search and their values or ranges, "lr=0.01,0.1;mu=0.01..1", or "grid".
        trials: runs a method has in the search, by Optuna; None tries all combinations.
        same_data: the first seed deals the data for all.
        parallel: runs at once.
        quiet: no progress.
    """

    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    hyper: Path | None = None
    budget: str | None = None
    target: float | None = None
    tune: str | None = None
    trials: int | None = None
    same_data: bool = False
    parallel: int | Literal["auto"] = "auto"
    quiet: bool = False

    def reading(self, before: Reading | None = None) -> Reading:
        """Budget and target, over those that the directory has."""
        found = before or Reading()
        budget = found.budget if self.budget is None else Budget.parse(self.budget)
        return Reading(budget, found.target if self.target is None else self.target)


def read_words(words: list[str]) -> Asked:
    """Takes the command's own options from the words of the command line.

    Raises:
        UserError: a value that is none.

    >>> read_words(["--algorithms=local,fedavg", "--seeds", "4,5", "--quiet"]).seeds
    (4, 5)
    """
    words[:] = ["--same_data" if word == "--same-data" else word for word in words]
    algorithms, seeds, target = take(words, "--algorithms"), take(words, "--seeds"), take(words, "--target")
    hyper, parallel = take(words, "--hyper"), take(words, "--parallel") or "auto"
    trials = take(words, "--trials")
    several = "whole numbers with commas between, such as 0,1,2"
    return Asked(
        algorithms=tuple(name.strip() for name in algorithms.split(",")) if algorithms else (),
        seeds=None if seeds is None else tuple(number("--seeds", part, int, several) for part in seeds.split(",")),
        hyper=None if hyper is None else Path(hyper),
        budget=take(words, "--budget"),
        target=None if target is None else number("--target", target, float, "a number"),
        tune=take(words, "--tune"),
        trials=None if trials is None else number("--trials", trials, int, "a whole number"),
        same_data=flag(words, "--same_data"),
        parallel="auto" if parallel == "auto" else number("--parallel", parallel, int, "a whole number, or auto"),
        quiet=flag(words, "--quiet"),
    )


def is_comparison(folder: str) -> bool:
    """Whether a folder holds a comparison."""
    return (Path(folder) / DESCRIPTION).is_file()


def run(config: Mapping[str, Any], asked: Asked, title: str, out: Path, console: Console | None = None) -> None:
    """Compares methods on the experiment of a complete configuration, and prints the table.

    Raises:
        UserError: what `polyfed.compare` refuses, hyper-parameters that do not fit, or another comparison in `out`.
        RoundError: methods failed; the others are told.
    """
    experiment = from_config(config)
    methods = _methods(experiment, asked)
    search = None if asked.tune is None else _search(asked.tune)
    kept = {key: value for key, value in config.items() if key not in ("baselines", "seed")}
    description = {
        "config": kept,
        "methods": {label: described(method, Settings())["algorithm"] for label, method in methods.items()},
        "same_data": asked.same_data,
    }
    plan = _plan(description, methods, asked.seeds or (0, 1, 2), title, out)
    plan = replace(plan, reading=asked.reading(), search=search, trials=asked.trials)
    _carry_out(replace(plan, parallel=asked.parallel, quiet=asked.quiet), console)


def go_on(folder: Path, asked: Asked, rest: Sequence[str] = (), console: Console | None = None) -> None:
    """Goes on with the comparison in a directory, or reads a finished one again, and prints the table. `rest` are words of
    the command line that have no place here.

    Raises:
        UserError: something is asked for that the directory has decided, or the clients were made in Python.
        RoundError: as for `run`.
    """
    decided = {f.name: getattr(asked, f.name) for f in fields(Asked) if f.name not in _READING}
    if other := [
        *rest,
        *(f"--{name}" for name, value in decided.items() if value not in ((), None) and value is not False),
    ]:
        raise UserError(f"{folder} has decided what is compared, so {other[0]} has no place here; with a directory, "
                        "polyfed compare takes --budget, --target, --parallel and --quiet")  # fmt: skip
    kept = read_description(folder)
    experiment = kept.get("experiment")
    if experiment is None:
        raise UserError(f"the clients of {folder} were made in Python; go on with it there: polyfed.compare(clients, ..., "
                        f"out={str(folder)!r})")  # fmt: skip
    if lost := [*({"title", "seeds"} - kept.keys()), *({"config", "methods", "same_data"} - experiment.keys())]:
        raise UserError(f"{folder / DESCRIPTION} is damaged: it has no {lost[0]}; give the whole command again with another "
                        "--out")  # fmt: skip
    methods = {
        label: get(entry["name"])(**{name: value for name, value in entry.items() if name != "name"})
        for label, entry in experiment["methods"].items()
    }
    plan = _plan(experiment, methods, tuple(kept["seeds"]), kept["title"], folder)
    plan = replace(plan, reading=asked.reading(reading_of(kept)), search=kept.get("search"), trials=kept.get("trials"))
    _carry_out(replace(plan, parallel=asked.parallel, quiet=asked.quiet), console)


def _carry_out(plan: Plan, console: Console | None) -> None:
    found = carry_out(plan)
    show(found, console or Console())
    if found.failed:
        raise RoundError(f"no results of {', '.join(found.failed)}, for the reason told above: give other hyper-parameters "
                         "(--hyper FILE) and another --out, or leave the method out")  # fmt: skip


def _plan(
    description: Mapping[str, Any], methods: Mapping[str, Method], seeds: tuple[int, ...], title: str, out: Path
) -> Plan:
    config, same_data = description["config"], description["same_data"]

    def cast(seed: int) -> Cast:
        dealt = seeds[0] if same_data else seed
        found = participants(from_config({**config, "seed": dealt}))
        check_models(found.clients, found.pool.num_classes)
        # A run's `config.yaml` describes its clients only if its own seed deals them.
        told = config if dealt == seed else {k: v for k, v in config.items() if k not in ("data", "model")}
        names = found.pool.class_names if found.pool.task == "classification" else None
        facts = {"partition_fingerprint": found.partition_fingerprint}
        return Cast(found.clients, found.public, names, told, facts)

    settings = from_config(config).settings
    return Plan(title, methods, seeds, settings, cast, out=out, experiment=description)


def _methods(experiment: Experiment, asked: Asked) -> dict[str, Method]:
    """The methods by label. Each has the local training of the experiment's method, its own fields as the experiment or
    the file of hyper-parameters gives them, and otherwise its defaults."""
    known: dict[str, Method] = {name_of(experiment.algorithm): experiment.algorithm, **experiment.baselines}
    hyper = {} if asked.hyper is None else read_config(asked.hyper)
    labels = asked.algorithms or tuple(dict.fromkeys([*known, *hyper]))
    if unknown := [label for label in hyper if label not in labels]:
        raise UserError(f"{asked.hyper} has {unknown[0]!r}, which is not compared; {nearest(unknown[0], labels)}")
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"--algorithms has {twice[0]!r} twice; two kinds of one method need labels of their own in a file: "
                        f"--hyper, with {{name: {twice[0]}, ...}} below each")  # fmt: skip
    given = {label: _one(label, hyper.get(label), known, experiment, asked.hyper) for label in labels}
    return methods_of(given, like=experiment.algorithm)


def _one(label: str, entry: Any, known: Mapping[str, Method], experiment: Experiment, file: Path | None) -> Method:
    if not (entry is None or isinstance(entry, Mapping)):
        raise UserError(f"{file}: {label} must be a mapping of fields, got {entry!r}")
    # YAML has 1e-3 as a word.
    changes = {k: number_or_word(v) if isinstance(v, str) else v for k, v in dict(entry or {}).items()}
    name = str(changes.pop("name", label))
    kind = get(name)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := [key for key in changes if key not in names]:
        raise UserError(f"{file}: {name} has no field {unknown[0]!r}; {nearest(str(unknown[0]), names)}")
    try:
        if name in known:
            return replace(known[name], **changes)  # type: ignore[type-var]
        return by_name(name, experiment.algorithm, changes)
    except UserError as error:
        raise UserError(f"{file}: {label}: {error}" if entry else str(error)) from error


def _search(text: str) -> dict[str, list[Any] | str]:
    """The fields of `--tune` with their values or range.

    >>> _search("lr=0.001..0.3; mu=1; weighted=true,false")
    {'lr': '0.001..0.3', 'mu': [1], 'weighted': [True, False]}
    """
    if text == GRID:
        return {"lr": GRID}
    found: dict[str, list[Any] | str] = {}
    for part in text.split(";"):
        name, _, values = (word.strip() for word in part.partition("="))
        if not values or name in found:
            raise UserError("--tune takes 'grid', or each field with its values or range, such as "
                            f"'lr=0.001..0.3;mu=0.1,1', got {text!r}")  # fmt: skip
        whole = ".." in values or values == GRID
        found[name] = values if whole else [_WORDS.get(v.strip(), number_or_word(v.strip())) for v in values.split(",")]
    return found


def show(found: Comparison, console: Console) -> None:
    """Prints scores, costs, what was left out, and what may be said."""
    content = found.content
    who = f"{len(content['clients'])} clients, {_many(len(content['seeds']), 'seed')}"
    told = f"{content['score']} of {who}; {content['budget']['told']}"
    console.print(_scores(content, told))
    if content["reference"] is not None:
        console.print(_gains(content))
    console.print(_costs(content))
    for label, reason in found.left_out.items():
        console.print(f"left out {label}: {reason}", highlight=False, soft_wrap=True)
    for label, reason in found.failed.items():
        console.print(f"failed {label}: {reason}", highlight=False, soft_wrap=True)
    if content["tuning"] is not None:
        console.print(f"searched {content['tuning']['told']}", highlight=False, soft_wrap=True)
        for label, one in content["tuning"]["methods"].items():
            if one["chosen"]:
                chosen = ", ".join(f"{name} {_value(value)}" for name, value in one["chosen"].items())
                console.print(f"  {label}: {chosen} of {_many(one['runs'], 'run')}", highlight=False, soft_wrap=True)
    for sentence in found.verdicts:
        console.print(sentence, highlight=False, soft_wrap=True)
    for note in (content["tests"]["told"], *content["notes"]):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if found.out is not None:
        console.print(f"Everything about this comparison is in {found.out}", highlight=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _scores(content: Mapping[str, Any], title: str) -> Table:
    unit = "R²·100" if content["score"] == "r2" else "%"
    table = _table(title, (f"mean {unit}", "95 % interval", "worst client", "p10", "p90"))
    for label, method in content["methods"].items():
        s = method["statistics"]
        table.add_row(
            label, _hundred(s["mean"]), _span(s["interval"]), *(_hundred(s[name]) for name in ("worst", "p10", "p90"))
        )
    return table


def _gains(content: Mapping[str, Any]) -> Table:
    reference, best = content["reference"], content["best"]
    title = f"points gained over {reference}, clients that lose, and Holm's p; the best is {best}"
    table = _table(title, ("gain", "95 % interval", "lose", f"p ({reference})", "p (best)"))
    for label, method in content["methods"].items():
        s = method["statistics"]
        lose = "" if s["losers"] is None else f"{s['losers']} of {s['participants']}"
        gain = "" if label == reference else _hundred(s["gain"], "+.1f")
        spread = "" if label == reference else _span(s["gain_interval"], "+.1f")
        table.add_row(label, gain, spread, lose, _p(s["p_reference"]), _p(s["p_best"]))
    return table


def _costs(content: Mapping[str, Any]) -> Table:
    target = content["target"]["score"]
    goal = "a target (none)" if target is None else f"{100 * target:.1f} ({content['target']['told']})"
    columns = ("round", "MB", "seconds", "reached", "round", "MB", "seconds")
    table = _table(f"cost of a run up to there, and to reach {goal}", columns)
    for label, method in content["methods"].items():
        s = method["statistics"]
        rounds = sorted({number for number in s["rounds"] if number is not None})
        at = "–" if not rounds else f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
        reached = s["to_target"]
        table.add_row(
            label, at, _megabytes(s["bytes"]), _number(s["seconds"]), f"{reached['reached']} of {len(s['rounds'])}",
            _number(reached["round"]), _megabytes(reached["bytes"]), _number(reached["seconds"]),
        )  # fmt: skip
    return table


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _hundred(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else f"{100 * value:{form}}"


def _megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:.2f}"


def _span(interval: Sequence[float] | None, form: str = ".1f") -> str:
    return "–" if interval is None else f"{_hundred(interval[0], form)} to {_hundred(interval[1], form)}"


def _p(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['holm']:.2g}"
