"""Defines `Answer`: whether one client, or the mean over clients, gains by joining."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from polyfed.core.errors import UserError, did_you_mean


@final
@dataclass(frozen=True)
class Answer:
    """Holds the answer to the question whether a client should join the federation.

    Attributes:
        client: its id; None for the mean over clients.
        decision: "join" if the whole interval is above 0, "stay" if it is below 0, "undecided" otherwise.
        method: the compared method.
        gain: its gain on new examples over the best that the client has alone, positive where the method is better; None
            if it could not be estimated.
        low: lower end of the gain's interval; None without an interval.
        high: its upper end.
        alternative: the best that the client has alone, such as "local" or "ridge".
        test_examples: number of examples that the gain was measured on.
        sentence: the answer, or the reason why there is none.

    >>> print(Answer("north", "join", "fedavg", 0.03, 0.01, 0.05, "local", 200, "north: join with fedavg"))
    north: join with fedavg
    """

    client: str | None
    decision: Literal["join", "stay", "undecided"]
    method: str | None
    gain: float | None
    low: float | None
    high: float | None
    alternative: str | None
    test_examples: int | None
    sentence: str

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, value in vars(self).items() if name != "sentence"]
        return f"Answer({', '.join(fields)})"

    def __str__(self) -> str:
        return self.sentence


def list_answers(results: Mapping[str, Any]) -> list[Answer]:
    """Lists the answers in the results of a comparison: the mean first, then each client; none of a mere plan.

    >>> list_answers({"mean_answer": {"client": None, "answer": "stay", "sentence": "mean: stay alone"}})[0].decision
    'stay'
    """
    mean = results.get("mean_answer")
    return [_read_answer(entry) for entry in ([] if mean is None else [mean, *(results.get("answers") or ())])]


def find_answer(answers: Sequence[Answer], client: str | None) -> Answer:
    """Finds the answer for a client, or with None for the mean.

    Raises:
        UserError: there is none for this client.
    """
    for answer in answers:
        if answer.client == client:
            return answer
    if not answers:
        raise UserError("this comparison has no answers; print(comparison) says why")
    names = [answer.client for answer in answers if answer.client is not None]
    raise UserError(f"no answer for a client {client!r}; {did_you_mean(str(client), names)}")


def _read_answer(entry: Mapping[str, Any]) -> Answer:
    low, high = entry.get("interval") or (None, None)
    return Answer(
        client=entry["client"],
        decision=entry["answer"],
        method=entry.get("method"),
        gain=entry.get("gain"),
        low=low,
        high=high,
        alternative=entry.get("over"),
        test_examples=entry.get("test_examples"),
        sentence=str(entry.get("sentence") or ""),
    )
