"""Reads a comparison's advice to each site: join the federation, train on its own data only, or undecided."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from polyfed.core.errors import UserError
from polyfed.core.io.text.site_words import name_sites
from polyfed.report.data.small_counts import hide_small_counts

AnswerKind = Literal["join", "stay", "undecided"]
ANSWER_LABELS: Mapping[AnswerKind, str] = {"join": "Join", "stay": "Stay alone", "undecided": "Not decided"}


@final
@dataclass(frozen=True)
class SiteAnswer:
    """Holds the advice to one site, "join", "stay" or "undecided", and the numbers behind it.

    Args:
        client: the site; None for the mean over sites.
        kind: "join", "stay" or "undecided".
        method: with which to join; None without one.
        gain: over the best that the site has alone, positive where it is better; None where it is not defined.
        interval: its ends; None where there is none.
        test_examples: on which it rests; None where that is not known.
        sentence: as the comparison says it.
        compared_with: what the site has alone that does best, in the name that the comparison gives it.
        basis: what it rests on, in words.
        rarest: test examples of the rarest class, or events, where they limit the score; else None.
        has_several_rivals: whether the gain is over the best of several, and not over one.

    Raises:
        UserError: `kind` is none of the three.

    >>> answer = SiteAnswer("north", "join", sentence="north: join with fedavg: 4.1 to 6.0 points better")
    >>> answer.sentence_without_site_and_advice()
    'with fedavg: 4.1 to 6.0 points better.'
    """

    client: str | None
    kind: AnswerKind
    method: str | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    test_examples: int | None = None
    sentence: str = ""
    compared_with: str = ""
    basis: str = ""
    rarest: int | None = None
    has_several_rivals: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ANSWER_LABELS:
            raise UserError(
                f"an answer is one of {', '.join(ANSWER_LABELS)}, got {self.kind!r}; make it again: polyfed compare DIR"
            )

    @property
    def is_unanswerable(self) -> bool:
        """Returns whether the site's data say next to nothing, because its interval is missing or too wide."""
        return self.kind == "undecided" and (
            self.interval is None or "cannot answer" in self.sentence_without_site_and_advice()
        )

    def name_of_rarest(self) -> str:
        """Returns what `rarest` counts, from the words of the basis.

        >>> basis = "120 test examples, fewer than 5 of the rarer class (ill)"
        >>> SiteAnswer("north", "join", basis=basis, rarest=4).name_of_rarest()
        'rarer class'
        >>> SiteAnswer("north", "join", basis="120 test examples, 37 events", rarest=37).name_of_rarest()
        'events'
        """
        words = hide_small_counts(self.basis).partition(", ")[2] if self.rarest is not None else ""
        return re.sub(r"^(fewer than )?\d+ (of the )?", "", words.partition(" (")[0])

    def sentence_without_site_and_advice(self) -> str:
        """Returns the sentence without the site's name and the advice, which the page shows before it."""
        subject = "mean over clients" if self.client is None else name_sites([self.client])
        text = self.sentence.removeprefix(f"{subject}: ").removeprefix(f"{self.client}: ")
        text = (
            text.removeprefix("not decided: ")
            .removeprefix("join ")
            .removeprefix("stay alone")
            .removeprefix(":")
            .strip()
        )
        return f"{text.rstrip('.') or 'there is no interval'}."


def parse_site_answers(comparison_results: Mapping[str, Any]) -> list[SiteAnswer]:
    """Reads the advice to each site from `comparison.json`; empty without advice.

    Raises:
        UserError: one of them is damaged.
    """
    return [_parse_answer(entry) for entry in comparison_results.get("answers") or ()]


def parse_answer_for_mean_over_sites(comparison_results: Mapping[str, Any]) -> SiteAnswer | None:
    """Reads the advice for the mean over sites from `comparison.json`; None without it.

    Raises:
        UserError: the entry is damaged.
    """
    entry = comparison_results.get("mean_answer")
    return None if entry is None else _parse_answer(entry)


def _parse_answer(entry: Any) -> SiteAnswer:
    try:
        ends = entry.get("interval")
        return SiteAnswer(
            None if entry["client"] is None else str(entry["client"]),
            entry["answer"],
            entry.get("method"),
            None if entry.get("gain") is None else float(entry["gain"]),
            None if ends is None else (float(ends[0]), float(ends[1])),
            None if entry.get("test_examples") is None else int(entry["test_examples"]),
            hide_small_counts(str(entry.get("sentence") or "")),
            str(entry.get("over") or ""),
            hide_small_counts(str(entry.get("basis") or "")),
            None if entry.get("rarest") is None else int(entry["rarest"]),
            len(entry.get("gains") or ()) > 1,
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"an answer is damaged: {entry!r} ({type(error).__name__}: {error}); make it again: polyfed compare "
                        "DIR") from error  # fmt: skip
