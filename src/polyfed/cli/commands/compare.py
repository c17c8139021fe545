"""What the command `compare` does: methods and seeds of an experiment, and the table."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from polyfed.algorithms import name_of
from polyfed.cli.commands.asked import Asked
from polyfed.cli.commands.terminal import Table, say
from polyfed.comparison.choices import chosen_words
from polyfed.comparison.compare import SEEDS, carry_out, search_of
from polyfed.comparison.contenders import ALWAYS, by_name, methods_of
from polyfed.comparison.directory import DESCRIPTION, Comparison, read_description, reading_of
from polyfed.comparison.plans import Cast, Method, Plan
from polyfed.comparison.trials import number_or_word
from polyfed.comparison.tuning import AUTO, NONE
from polyfed.comparison.values import GRID, GRID_AND_MORE, MORE
from polyfed.core.code import written
from polyfed.core.errors import RoundError, UserError, nearest
from polyfed.data.resplit import public_prepared_again
from polyfed.data.resplit import resplit as dealt_anew
from polyfed.simulation.checks import check_models
from polyfed.simulation.experiment import Experiment, check_cluster, facts_of, from_config, participants
from polyfed.simulation.runs.configuration import described, kind_of, method_of
from polyfed.simulation.runs.directory import read_config
from polyfed.simulation.settings import Settings
from polyfed.simulation.tracking import check

_WORDS = {"true": True, "false": False, "null": None}
_READING = ("budget", "target", "parallel", "quiet", "logger")  # what may be asked of a directory


def run(config: Mapping[str, Any], asked: Asked, title: str, out: Path, console: Console | None = None) -> None:
    """Compares methods on the experiment of a complete configuration, and prints the table.

    Raises:
        UserError: what `polyfed.compare` refuses, hyper-parameters that do not fit, or another comparison in `out`.
        RoundError: methods failed; the others are told.
    """
    check(asked.logger)
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
    _carry_out(replace(plan, parallel=asked.parallel, quiet=asked.quiet), console, asked.logger)


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
                        "polyfed compare takes --budget, --target, --parallel, --logger and --quiet")  # fmt: skip
    check(asked.logger)
    _carry_out(plan_of(folder, asked), console, asked.logger)


def plan_of(folder: Path, asked: Asked) -> Plan:
    """What a directory has decided, with what may be asked of it.

    Raises:
        UserError: its description is damaged, or the clients were made in Python.
    """
    kept = read_description(folder)
    experiment = kept.get("experiment")
    if experiment is None:
        raise UserError(f"the clients of {folder} were made in Python; go on with it there: polyfed.compare(clients, ..., "
                        f"out={str(folder)!r})")  # fmt: skip
    needed = {"config", "methods", "same_data", "resplit", "references"}
    if lost := [*({"title", "seeds"} - kept.keys()), *(needed - experiment.keys())]:
        raise UserError(f"{folder / DESCRIPTION} is damaged: it has no {lost[0]}; give the whole command again with another "
                        "--out")  # fmt: skip
    methods = {label: method_of(entry) for label, entry in experiment["methods"].items()}
    plan = _plan(experiment, methods, tuple(kept["seeds"]), kept["title"], folder)
    plan = replace(plan, reading=asked.reading(reading_of(kept)), search=kept.get("search"), trials=kept.get("trials"))
    return replace(plan, parallel=asked.parallel, quiet=asked.quiet)


def _carry_out(plan: Plan, console: Console | None, logger: Sequence[str] = ()) -> None:
    found = carry_out(plan)
    show(found, console or Console())
    if logger and found.out is not None:
        # imported late: most comparisons do without
        from polyfed.report.export.tracked import log_comparison

        log_comparison(found.results, found.out, logger)
        say(console or Console(), f"tracked with {', '.join(logger)}")
    if found.failed:
        raise RoundError(f"no results of {', '.join(found.failed)}, for the reason told above: give other hyper-parameters "
                         "(--method-config FILE) and another --out, or leave the method out")  # fmt: skip


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
            found = replace(found, clients=again, public=public_prepared_again(found.public, again))
            dealt = -1  # no file describes these clients
        # A run's `config.yaml` describes its clients only if its own seed deals them.
        told = config if dealt == seed else {k: v for k, v in config.items() if k not in ("data", "model")}
        names = found.pool.class_names if found.pool.task == "classification" else None
        return Cast(found.clients, found.public, names, told, facts_of(found))

    settings = from_config(config).settings
    check_cluster(settings)
    return Plan(
        title, methods, seeds, settings, cast, out=out, experiment=description, metrics=settings.metrics, resplit=resplit,
        references=description["references"],
    )  # fmt: skip


def _methods(experiment: Experiment, asked: Asked) -> dict[str, Method]:
    """The methods by label. Each has the local training of the experiment's method, its own fields as the experiment or
    the file of hyper-parameters gives them, and otherwise its defaults."""
    known: dict[str, Method] = {_name(experiment.algorithm): experiment.algorithm, **experiment.baselines}
    method_config = {} if asked.method_config is None else read_config(asked.method_config)
    always = [label for label in method_config if label in ALWAYS]  # which are compared unasked
    labels = tuple(dict.fromkeys([*asked.algorithms, *always] if asked.algorithms else [*known, *method_config]))
    if unknown := [label for label in method_config if label not in labels]:
        raise UserError(
            f"{asked.method_config} has {unknown[0]!r}, which is not compared; {nearest(unknown[0], labels)}"
        )
    if twice := [label for label in asked.algorithms if asked.algorithms.count(label) > 1]:
        raise UserError(f"--algorithms has {twice[0]!r} twice; two kinds of one method need labels of their own in a file: "
                        f"--method-config, with {{name: {twice[0]}, ...}} below each")  # fmt: skip
    # A label becomes the name of a folder, and ":" is none's.
    given = {
        label.replace(":", "."): _one(label, method_config.get(label), known, experiment, asked.method_config)
        for label in labels
    }
    return methods_of(given, like=experiment.algorithm)


def _name(method: Method) -> str:
    return written(type(method)) or name_of(method)


def _one(label: str, entry: Any, known: Mapping[str, Method], experiment: Experiment, file: Path | None) -> Method:
    if not (entry is None or isinstance(entry, Mapping)):
        raise UserError(f"{file}: {label} must be a mapping of fields, got {entry!r}")
    # YAML has 1e-3 as a word.
    changes = {k: number_or_word(v) if isinstance(v, str) else v for k, v in dict(entry or {}).items()}
    name = str(changes.pop("name", label))
    kind = kind_of(name)
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

    >>> _search("lr=0.001..0.3; mu=1,2,...; weighted=true,false")
    {'lr': '0.001..0.3', 'mu': [1, 2, '...'], 'weighted': [True, False]}
    """
    if text in (GRID, GRID_AND_MORE):
        return {"lr": text}
    found: dict[str, list[Any] | str] = {}
    for part in text.split(";"):
        name, _, values = (word.strip() for word in part.partition("="))
        if not values or name in found:
            raise UserError("--tune takes 'grid', or each field with its values or range, such as "
                            f"'lr=0.001..0.3;mu=0.1,1', got {text!r}")  # fmt: skip
        whole = ".." in values.removesuffix(MORE) or values in (GRID, GRID_AND_MORE)
        found[name] = values if whole else [_WORDS.get(v.strip(), number_or_word(v.strip())) for v in values.split(",")]
    return found


def show(found: Comparison, console: Console) -> None:
    """Prints what may be said, scores, costs, and what was left out."""
    content = found.results

    who = f"{len(content['clients'])} clients, {_many(len(content['seeds']), 'seed')}"
    for sentence in (*content["warnings"], *found.verdicts, *content["covers"]):
        say(console, sentence)
    console.print(_scores(content, f"{content['score_label']} of {who}; {content['budget']['sentence']}"))
    if content["reference"] is not None:
        console.print(_gains(content))
    console.print(_costs(content))
    for label, reason in found.skipped.items():
        say(console, f"left out {label}: {reason}")
    for label, reason in found.failed.items():
        say(console, f"failed {label}: {reason}")
    if content["tuning"] is not None:
        say(console, f"searched {content['tuning']['sentence']}")
        for label, one in content["tuning"]["methods"].items():
            if chosen := chosen_words(one):
                say(console, f"  {label}: {chosen} of {_many(one['runs'], 'run')}")
    for label, course in content["convergence"].items():
        if course["converged"] is not True:
            say(console, f"{label}: {course['sentence']}")
    for note in content["notes"]:
        say(console, f"note: {note}")
    if found.out is not None:
        say(console, f"Everything about this comparison is in {found.out}")


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
        ends = _span(one["interval"], unit) if one.get("interval") else ""
        table.add_row(f"({name})", _score(one["mean"], unit), ends, _score(least, unit), "", "", style="dim")
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
    for name, one in content["references"].items():
        if one.get("gain") is not None:
            table.add_row(
                f"({name})", _score(one["gain"], unit, "+"), _span(one["gain_interval"], unit, "+"), style="dim"
            )
    return table


def _costs(content: Mapping[str, Any]) -> Table:
    target, unit = content["target"]["score"], _unit(content)
    goal = "a target (none)" if target is None else f"{_score(target, unit)} ({content['target']['sentence']})"
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
