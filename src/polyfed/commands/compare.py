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
from polyfed.comparison import SEEDS, carry_out, search_of
from polyfed.contenders import ALWAYS, by_name, methods_of
from polyfed.data.resplit import resplit as dealt_anew
from polyfed.errors import RoundError, UserError, nearest
from polyfed.plans import Cast, Method, Plan
from polyfed.runs.comparison import DESCRIPTION, Comparison, read_description, reading_of
from polyfed.runs.configuration import described
from polyfed.runs.directory import read_config
from polyfed.runs.reading import Budget, Reading
from polyfed.settings import Settings
from polyfed.tuning import AUTO, GRID, NONE, number_or_word

_WORDS = {"true": True, "false": False, "null": None}
_READING = ("budget", "target", "parallel", "quiet")  # what may be asked of a directory


@final
@dataclass(frozen=True)
class Asked:
    """What the command line asks for beside the experiment.

    Args:
        algorithms: labels; empty for the experiment's method and its baselines.
        seeds: of the runs; None is 0 to 4, or one for each dealing of `resplit`.
        resplit: how many times each client's examples are dealt anew.
        hyper: a YAML file with the fields of methods, by label.
        budget, target: how results are read; None leaves what the directory says, or the defaults.
        tune: fields to search and their values or ranges, "lr=0.01,0.1;mu=0.01..1", or "none"; None and "grid" search the
            learning rate.
        trials: runs a method has in the search, by Optuna; None tries all combinations.
        same_data: the first seed deals the data for all.
        no_references: no simple models beside the methods.
        parallel: runs at once.
        quiet: no progress.
    """

    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    resplit: int | None = None
    hyper: Path | None = None
    budget: str | None = None
    target: float | None = None
    tune: str | None = None
    trials: int | None = None
    same_data: bool = False
    no_references: bool = False
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
    flags = {"--same-data": "--same_data", "--no-references": "--no_references"}
    words[:] = [flags.get(word, word) for word in words]
    algorithms, seeds, target = take(words, "--algorithms"), take(words, "--seeds"), take(words, "--target")
    hyper, parallel = take(words, "--hyper"), take(words, "--parallel") or "auto"
    trials, resplit = take(words, "--trials"), take(words, "--resplit")
    several = "whole numbers with commas between, such as 0,1,2"
    return Asked(
        algorithms=tuple(name.strip() for name in algorithms.split(",")) if algorithms else (),
        seeds=None if seeds is None else tuple(number("--seeds", part, int, several) for part in seeds.split(",")),
        resplit=None if resplit is None else number("--resplit", resplit, int, "a whole number"),
        hyper=None if hyper is None else Path(hyper),
        budget=take(words, "--budget"),
        target=None if target is None else number("--target", target, float, "a number"),
        tune=take(words, "--tune"),
        trials=None if trials is None else number("--trials", trials, int, "a whole number"),
        same_data=flag(words, "--same_data"),
        no_references=flag(words, "--no_references"),
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
    search = search_of(asked.tune or AUTO, asked.trials) if asked.tune in (None, NONE) else _search(asked.tune or "")
    kept = {key: value for key, value in config.items() if key not in ("baselines", "seed")}
    description = {
        "config": kept,
        "methods": {label: described(method, Settings())["algorithm"] for label, method in methods.items()},
        "same_data": asked.same_data,
        "resplit": asked.resplit,
        "references": not asked.no_references,
    }
    seeds = asked.seeds or tuple(range(SEEDS if asked.resplit is None else max(asked.resplit, 1)))
    plan = _plan(description, methods, seeds, title, out)
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
    needed = {"config", "methods", "same_data", "resplit", "references"}
    if lost := [*({"title", "seeds"} - kept.keys()), *(needed - experiment.keys())]:
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
    config, resplit = description["config"], description["resplit"]
    if resplit is not None and len(seeds) != resplit:
        raise UserError(f"--resplit {resplit} deals the data {resplit} times, with a seed each; got {len(seeds)} seeds")

    def cast(seed: int) -> Cast:
        dealt = seeds[0] if description["same_data"] or resplit is not None else seed
        found = participants(from_config({**config, "seed": dealt}))
        check_models(found.clients, found.pool.num_classes)
        if resplit is not None:
            again = dealt_anew(found.clients, resplit)[seeds.index(seed)]
            found = replace(found, clients=again)
            dealt = -1  # no file describes these clients
        # A run's `config.yaml` describes its clients only if its own seed deals them.
        told = config if dealt == seed else {k: v for k, v in config.items() if k not in ("data", "model")}
        names = found.pool.class_names if found.pool.task == "classification" else None
        facts = {"partition_fingerprint": found.partition_fingerprint}
        return Cast(found.clients, found.public, names, told, facts)

    settings = from_config(config).settings
    return Plan(
        title, methods, seeds, settings, cast, out=out, experiment=description, metrics=settings.metrics, resplit=resplit,
        references=description["references"],
    )  # fmt: skip


def _methods(experiment: Experiment, asked: Asked) -> dict[str, Method]:
    """The methods by label. Each has the local training of the experiment's method, its own fields as the experiment or
    the file of hyper-parameters gives them, and otherwise its defaults."""
    known: dict[str, Method] = {name_of(experiment.algorithm): experiment.algorithm, **experiment.baselines}
    hyper = {} if asked.hyper is None else read_config(asked.hyper)
    always = [label for label in hyper if label in ALWAYS]  # which are compared unasked
    labels = tuple(dict.fromkeys([*asked.algorithms, *always] if asked.algorithms else [*known, *hyper]))
    if unknown := [label for label in hyper if label not in labels]:
        raise UserError(f"{asked.hyper} has {unknown[0]!r}, which is not compared; {nearest(unknown[0], labels)}")
    if twice := [label for label in asked.algorithms if asked.algorithms.count(label) > 1]:
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
    """Prints what may be said, scores, costs, and what was left out."""
    content = found.content

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    who = f"{len(content['clients'])} clients, {_many(len(content['seeds']), 'seed')}"
    for sentence in (*content["warnings"], *found.verdicts, *content["covers"]):
        say(sentence)
    console.print(_scores(content, f"{content['score_label']} of {who}; {content['budget']['told']}"))
    if content["reference"] is not None:
        console.print(_gains(content))
    console.print(_costs(content))
    for label, reason in found.left_out.items():
        say(f"left out {label}: {reason}")
    for label, reason in found.failed.items():
        say(f"failed {label}: {reason}")
    if content["tuning"] is not None:
        say(f"searched {content['tuning']['told']}")
        for label, one in content["tuning"]["methods"].items():
            if one["chosen"]:
                chosen = ", ".join(f"{name} {_value(value)}" for name, value in one["chosen"].items())
                say(f"  {label}: {chosen} of {_many(one['runs'], 'run')}")
    for label, course in content["convergence"].items():
        if course["converged"] is not True:
            say(f"{label}: {course['told']}")
    for note in content["notes"]:
        say(f"note: {note}")
    if found.out is not None:
        say(f"Everything about this comparison is in {found.out}")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _unit(content: Mapping[str, Any]) -> str:
    return str(content["score_unit"])


def _scores(content: Mapping[str, Any], title: str) -> Table:
    unit = _unit(content)
    table = _table(title, (f"mean {unit}".strip(), "95 % interval", "worst client", "p10", "p90"))
    for label, method in content["methods"].items():
        s = method["statistics"]
        spread = (_score(s[name], unit) for name in ("worst", "p10", "p90"))
        table.add_row(label, _score(s["mean"], unit), _span(s["interval"], unit), *spread)
    for name, one in content["references"].items():
        known = [score for score in one["scores"].values() if score is not None]
        least = (min if content["higher_is_better"] else max)(known, default=None)
        table.add_row(f"({name})", _score(one["mean"], unit), "", _score(least, unit), "", "", style="dim")
    return table


def _gains(content: Mapping[str, Any]) -> Table:
    reference, best, unit = content["reference"], content["best"], _unit(content)
    how = "points gained" if unit == "%" else f"gain of {content['score_label']}"
    title = (
        f"{how} over {reference} (positive is better), clients that lose, and p; best by {content['best_by']}: {best}"
    )
    table = _table(title, ("gain", "95 % interval", "lose", f"p ({reference})", "p (best)"))
    for label, method in content["methods"].items():
        s = method["statistics"]
        lose = "" if s["losers"] is None else f"{s['losers']} of {s['participants']}"
        gain = "" if label == reference else _score(s["gain"], unit, "+")
        spread = "" if label == reference else _span(s["gain_interval"], unit, "+")
        table.add_row(label, gain, spread, lose, _p(s["p_reference"]), _p(s["p_best"]))
    return table


def _costs(content: Mapping[str, Any]) -> Table:
    target, unit = content["target"]["score"], _unit(content)
    goal = "a target (none)" if target is None else f"{_score(target, unit)} ({content['target']['told']})"
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


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _score(value: float | None, unit: str, sign: str = "") -> str:
    """A share in per cent, any other score as it is.

    >>> _score(0.8123, "%"), _score(0.8123, ""), _score(0.05, "%", "+")
    ('81.2', '0.812', '+5.0')
    """
    if value is None:
        return "–"
    return f"{100 * value:{sign}.1f}" if unit == "%" else f"{value:{sign}.3f}"


def _megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:.2f}"


def _span(interval: Sequence[float] | None, unit: str, sign: str = "") -> str:
    return "–" if interval is None else f"{_score(interval[0], unit, sign)} to {_score(interval[1], unit, sign)}"


def _p(found: float | None) -> str:
    return "" if found is None else f"{found:.2g}"
