"""The answers of a comparison, site by site: join, stay alone, or not decided, in words for those who decide."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from polyfed.core.errors import UserError

Kind = Literal["join", "stay", "undecided"]
NAMES: Mapping[Kind, str] = {"join": "Join", "stay": "Stay alone", "undecided": "Not decided"}


@final
@dataclass(frozen=True)
class Answer:
    """What a comparison answers a site.

    Args:
        client: the site; None for the mean over sites.
        kind: "join", "stay" or "undecided".
        method: with which to join; None without one.
        gain: over the best that the site has alone, positive where it is better; None where it is not defined.
        interval: its ends; None where there is none.
        test_examples: on which it rests; None where that is not known.
        sentence: as the comparison says it.
        over: what the site has alone that does best, in the name that the comparison gives it.
        basis: what it rests on, in words.

    Raises:
        UserError: `kind` is none of the three.

    >>> Answer("north", "join", sentence="north: join with fedavg: 4.1 to 6.0 points better").words()
    'with fedavg: 4.1 to 6.0 points better.'
    """

    client: str | None
    kind: Kind
    method: str | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    test_examples: int | None = None
    sentence: str = ""
    over: str = ""
    basis: str = ""

    def __post_init__(self) -> None:
        if self.kind not in NAMES:
            raise UserError(
                f"an answer is one of {', '.join(NAMES)}, got {self.kind!r}; make it again: polyfed compare DIR"
            )

    def words(self) -> str:
        """The sentence without the name of the site and without the answer, which stands before it."""
        said = self.sentence.removeprefix(f"{'mean over clients' if self.client is None else self.client}: ")
        if self.kind == "undecided":  # what a simple model does alone is said before
            before, _, after = said.partition("not decided: ")
            said = before + after
        said = said.removeprefix("join ").removeprefix("stay alone").removeprefix(":").strip()
        return f"{said.rstrip('.') or 'there is no interval'}."


def read_answers(content: Mapping[str, Any]) -> list[Answer]:
    """The answers to the sites, in the order in which the comparison has them; empty where it names no sites.

    Raises:
        UserError: one of them is damaged.
    """
    return [_answer(one) for one in content.get("answers") or ()]


def read_mean(content: Mapping[str, Any]) -> Answer | None:
    """The answer for the mean over sites; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    found = content.get("mean_answer")
    return None if found is None else _answer(found)


def _answer(told: Any) -> Answer:
    try:
        ends = told.get("interval")
        return Answer(
            None if told["client"] is None else str(told["client"]),
            told["answer"],
            told.get("method"),
            None if told.get("gain") is None else float(told["gain"]),
            None if ends is None else (float(ends[0]), float(ends[1])),
            None if told.get("test_examples") is None else int(told["test_examples"]),
            str(told.get("sentence") or ""),
            str(told.get("over") or ""),
            str(told.get("basis") or ""),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"an answer is damaged: {told!r} ({type(error).__name__}: {error}); make it again: polyfed compare "
                        "DIR") from error  # fmt: skip
