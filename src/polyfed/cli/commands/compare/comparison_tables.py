"""Prints the results of a comparison: tables if they are wanted, and the answers last."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console

from polyfed.cli.commands.compare.answer_lines import print_answers
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.tuning.ranking import format_chosen_fields
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.text.site_words import client_heading, say_sites_of


def show_comparison(comparison: Comparison, console: Console, *, with_tables: bool = False) -> None:
    """Prints the methods that were left out or failed, and the answers of a comparison.

    Args:
        comparison: a finished comparison.
        console: where to print.
        with_tables: whether to print each method's scores, gains and costs, what was searched, and what the answers cover.
    """
    if with_tables:
        _print_tables(comparison, console)
    for label, reason in comparison.skipped.items():
        print_line(console, f"left out {label}: {reason}")
    for label, reason in comparison.failed.items():
        print_line(console, f"failed {label}: {reason}", style="red")
    print_answers(comparison.results, comparison.out, console)


def _print_tables(comparison: Comparison, console: Console) -> None:
    results = comparison.results
    say_sites = partial(say_sites_of, results["clients"])
    participants_text = f"{len(results['clients'])} clients, {count_with_noun(len(results['seeds']), 'seed')}"
    console.print(
        _scores_table(
            results, say_sites(f"{results['score_label']} of {participants_text}; {results['budget']['sentence']}")
        )
    )
    if results["reference"] is not None:
        console.print(_gains_table(results))
    console.print(_costs_table(results))
    if results["tuning"] is not None:
        print_line(console, say_sites(f"searched {results['tuning']['sentence']}"))
        for label, tuning in results["tuning"]["methods"].items():
            if field_text := format_chosen_fields(tuning):
                print_line(console, f"  {label}: {field_text} of {count_with_noun(tuning['runs'], 'run')}")
    for label, convergence in results["convergence"].items():
        if convergence["converged"] is not True:
            print_line(console, say_sites(f"{label}: {convergence['sentence']}"))
    for note in results["notes"]:
        print_line(console, say_sites(f"note: {note}"))
    for line in _cross_site_lines(comparison):
        print_line(console, line)
    for sentence in (*results["verdicts"], *results["covers"]):
        print_line(console, say_sites(sentence))


def _cross_site_lines(comparison: Comparison) -> list[str]:
    """Returns lines on every site's model at every other site, alone and of the best method, if computed."""
    lines: list[str] = []
    for label in dict.fromkeys((comparison.results["reference"], comparison.results["best"])):
        if label is not None:
            with suppress(UserError):  # they were not asked for
                lines += [f"{label}:", *str(comparison.cross_site(label)).splitlines()]
    return lines


def _new_table(title: str, columns: Sequence[str]) -> PlainTable:
    table = PlainTable(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _score_unit(content: Mapping[str, Any]) -> str:
    return str(content["score_unit"])


def _scores_table(content: Mapping[str, Any], title: str) -> PlainTable:
    unit = _score_unit(content)
    table = _new_table(
        title, (f"mean {unit}".strip(), "95 % interval", f"worst {client_heading(content['clients'])}", "p10", "p90")
    )
    for label, method in content["methods"].items():
        s = method["statistics"]
        spread = (_format_score(s[name], unit) for name in ("worst", "p10", "p90"))
        table.add_row(label, _format_score(s["mean"], unit), _format_interval(s["interval"], unit), *spread)
    for name, reference in content["references"].items():
        defined_scores = [score for score in reference["scores"].values() if score is not None]
        worst_score = (min if content["higher_is_better"] else max)(defined_scores, default=None)
        ends = _format_interval(reference["interval"], unit) if reference.get("interval") else ""
        table.add_row(
            f"({name})",
            _format_score(reference["mean"], unit),
            ends,
            _format_score(worst_score, unit),
            "",
            "",
            style="dim",
        )
    return table


def _gains_table(content: Mapping[str, Any]) -> PlainTable:
    reference, best, unit = content["reference"], content["best"], _score_unit(content)
    gain_text = "points gained" if unit == "%" else f"gain of {content['score_label']}"
    losers = f"{client_heading(content['clients'])}s that lose"
    title = f"{gain_text} over {reference} (positive is better), {losers}, and p; best by {content['best_by']}: {best}"
    table = _new_table(title, ("gain", "95 % interval", "lose", f"p ({reference})", "p (best)"))
    for label, method in content["methods"].items():
        s = method["statistics"]
        lose = "" if s["losers"] is None else f"{s['losers']} of {s['participants']}"
        gain = "" if label == reference else _format_score(s["gain"], unit, "+")
        spread = "" if label == reference else _format_interval(s["gain_interval"], unit, "+")
        table.add_row(label, gain, spread, lose, _format_p_value(s["p_reference"]), _format_p_value(s["p_best"]))
    for name, simple_model in content["references"].items():
        if simple_model.get("gain") is not None:
            table.add_row(
                f"({name})",
                _format_score(simple_model["gain"], unit, "+"),
                _format_interval(simple_model["gain_interval"], unit, "+"),
                style="dim",
            )
    return table


def _costs_table(content: Mapping[str, Any]) -> PlainTable:
    target, unit = content["target"]["score"], _score_unit(content)
    goal = "a target (none)" if target is None else f"{_format_score(target, unit)} ({content['target']['sentence']})"
    columns = ("round", "MB", "seconds", "reached", "round", "MB", "seconds")
    table = _new_table(f"cost of a run up to there, and to reach {goal}", columns)
    for label, method in content["methods"].items():
        s = method["statistics"]
        rounds = sorted({number for number in s["rounds"] if number is not None})
        rounds_text = "–" if not rounds else f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
        reached = s["to_target"]
        table.add_row(
            label,
            rounds_text,
            _format_megabytes(s["bytes"]),
            _format_number(s["seconds"]),
            f"{reached['reached']} of {len(s['rounds'])}",
            _format_number(reached["round"]),
            _format_megabytes(reached["bytes"]),
            _format_number(reached["seconds"]),
        )
    return table


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _format_score(value: float | None, unit: str, sign: str = "") -> str:
    """Formats a share in per cent, and any other score as a number.

    >>> _format_score(0.8123, "%"), _format_score(0.8123, ""), _format_score(0.05, "%", "+")
    ('81.2', '0.812', '+5.0')
    """
    if value is None:
        return "–"
    return f"{100 * value:{sign}.1f}" if unit == "%" else f"{value:{sign}.3f}"


def _format_megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:.2f}"


def _format_interval(interval: Sequence[float] | None, unit: str, sign: str = "") -> str:
    return (
        "–"
        if interval is None
        else f"{_format_score(interval[0], unit, sign)} to {_format_score(interval[1], unit, sign)}"
    )


def _format_p_value(p_value: float | None) -> str:
    return "" if p_value is None else f"{p_value:.2g}"
