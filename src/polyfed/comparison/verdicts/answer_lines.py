"""Writes a comparison's answers as lines, one for the mean and each client, alike for terminals, Python and notebooks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.io.text.site_words import say_sites_of

ANSWER_WORDS = {"join": "join", "stay": "stay alone", "undecided": "not decided"}
MAX_CLIENTS = 8
_MOST_DIGITS = 6  # after the decimal point


@final
@dataclass(frozen=True)
class AnswerLines:
    """Holds the answers of a comparison as lines.

    Attributes:
        heading: says of what the gains are.
        rows: kind of answer ("join", "stay", "undecided"), name, and gain or reason: the mean, then clients, those with an
            answer first.
        rest: counts the clients that are left out; empty without any.
    """

    heading: str
    rows: tuple[tuple[str, str, str], ...]
    rest: str

    def to_text(self) -> list[str]:
        """Returns the lines with their columns aligned.

        >>> AnswerLines("Gain in AUC", (("join", "mean", "fedavg +0.1"), ("undecided", "VA", "local +0.0")), "").to_text()
        ['Gain in AUC', 'join         mean  fedavg +0.1', 'not decided  VA    local +0.0']
        """
        cells = [(ANSWER_WORDS[kind], name, text) for kind, name, text in self.rows]
        width, name_width = (max((len(row[column]) for row in cells), default=0) for column in (0, 1))
        lines = [f"{word:{width}}  {name:{name_width}}  {text}" for word, name, text in cells]
        return [self.heading, *lines, *([f"{self.rest} (comparison.answers)"] if self.rest else [])]


def build_answer_lines(results: Mapping[str, Any], max_clients: int | None = MAX_CLIENTS) -> AnswerLines | None:
    """Returns the answers of a comparison as lines; None if it has no answer about the mean.

    Args:
        results: the content of `comparison.json`.
        max_clients: of more clients the rest is counted; None for all.
    """
    mean, answers = results.get("mean_answer"), list(results.get("answers") or ())
    if mean is None:
        return None
    names, (number, total) = results.get("clients") or (), mean.get("clients") or (0, 0)
    points = "points of " if results["score_unit"] == "%" else ""
    heading = (
        f"Gain in {points}{results['score_label']} on new examples, with its {100 * results['level']:.0f} % interval"
    )
    ranked = sorted(answers, key=rank_of_answer)
    ranked.sort(key=lambda row: row["answer"] == "undecided")
    rows = tuple(
        (
            row["answer"],
            row["client"] or say_sites_of(names, f"mean over {f'{number} of {total} ' * (number < total)}clients"),
            say_sites_of(names, describe_answer(row, results["score_unit"])),
        )
        for row in (mean, *ranked[:max_clients])
    )
    hidden = [] if max_clients is None else [row["answer"] for row in ranked[max_clients:]]
    counts = [(hidden.count(kind), word) for kind, word in ANSWER_WORDS.items()]
    rest = ", ".join(f"{count} {say_sites_of(names, 'clients')}: {word}" for count, word in counts if count)
    return AnswerLines(heading, rows, f"and {rest}" if rest else "")


def rank_of_answer(answer: Mapping[str, Any]) -> tuple[float, str]:
    """Returns the key that sorts answers from the largest gain to the largest loss; those without a gain are last."""
    return math.inf if answer["gain"] is None else -answer["gain"], answer["client"]


def describe_answer(row: Mapping[str, Any], unit: str) -> str:
    """Describes an answer's gain in a few words; of one without a usable interval the reason.

    >>> describe_answer({"answer": "join", "method": "fedavg", "gain": 0.041, "interval": [0.01, 0.062],
    ...                  "over_words": "training alone", "sentence": ""}, "%")
    'fedavg +4.1 [+1.0, +6.2] over training alone'
    >>> describe_answer({"answer": "undecided", "method": "fedavg", "gain": None, "interval": None,
    ...                  "over": "local", "sentence": "north: not decided: no predictions were kept (9 test examples)"}, "%")
    'no predictions were kept (9 test examples)'
    """
    reason = str(row["sentence"]).partition("not decided: ")[2]
    if row["gain"] is None or row["interval"] is None or ("(best estimate " not in row["sentence"] and reason):
        return reason
    low, high = (_format_gain(end, unit) for end in row["interval"])
    more = row["sentence"].rpartition("); ")
    doubt = f"; {more[2]}" if row["answer"] == "undecided" and more[1] else ""
    over = row.get("over_words") or row.get("over")  # results of an earlier release have neither
    compared = f" over {over}" if over else ""
    return f"{row['method']} {_format_gain(row['gain'], unit)} [{low}, {high}]{compared}{doubt}"


def _format_gain(value: float, unit: str) -> str:
    """Formats a gain with its sign, with more digits where the usual number of digits would show 0.

    >>> [_format_gain(gain, "%") for gain in (0.041, 0.0003, 0.0)]
    ['+4.1', '+0.03', '+0.0']
    """
    scaled, digits = (100 * value, 1) if unit == "%" else (value, 3)
    while scaled and not round(scaled, digits) and digits < _MOST_DIGITS:
        digits += 1
    return f"{scaled + 0.0:+.{digits}f}"
