"""What the results of a comparison support, in sentences for people. The terminal, the page and Python have the same."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.comparison.crossed import LEVEL

_DIGITS = 6  # after the point, at most
_NAMED = 8  # clients that a sentence lists
_LINES = 40  # sites up to which each has its sentence among the verdicts, also those of which nothing is decided


def amount(value: float, unit: str, label: str) -> str:
    """The size of a difference: of shares in points, of others as they are, with the score's name.

    >>> amount(-0.041, "%", "accuracy"), amount(0.041, "", "AUC"), amount(0.0004, "%", "accuracy")
    ('4.1 points', '0.041 of AUC', '0.04 points')
    """
    return f"{_rounded(value, unit)} {'points' if unit == '%' else f'of {label}'}"


def points(low: float, high: float, unit: str, label: str) -> str:
    """Two differences of one sign.

    >>> points(0.041, 0.06, "%", "accuracy"), points(-0.06, -0.041, "", "AUC")
    ('4.1 to 6.0 points', '0.041 to 0.060 of AUC')
    """
    least, most = sorted((low, high), key=abs)
    return f"{_rounded(least, unit)} to {amount(most, unit, label)}"


def _rounded(value: float, unit: str) -> str:
    """Its size, with more digits where the usual ones would show a difference as none."""
    size, digits = (100 * abs(value), 1) if unit == "%" else (abs(value), 3)
    while size and not round(size, digits) and digits < _DIGITS:
        digits += 1
    return f"{size:.{digits}f}"


def _side(value: float, unit: str, label: str) -> str:
    return f"{amount(value, unit, label)} {'worse' if value < 0 else 'better'}"


def answer(gain: float | None, interval: Sequence[float] | None, decided: bool) -> str:
    """ "join", "stay" or "undecided", from the interval of a gain; `decided` whether it may be read so.

    >>> answer(0.05, [0.04, 0.06], True), answer(-0.05, [-0.06, -0.04], True), answer(0.05, [-0.01, 0.1], True)
    ('join', 'stay', 'undecided')
    """
    if gain is None or interval is None or not decided or interval[0] <= 0 <= interval[1]:
        return "undecided"
    return "join" if interval[0] > 0 else "stay"


def answers(
    content: Mapping[str, Any], leader: str | None, why_not: str
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """For each site, and for the mean over sites: join, stay alone, or not decided.

    Args:
        content: of `comparison.json`, with statistics.
        leader: the method that did best of those that may be compared with the reference; None without one.
        why_not: why nothing is decided, whatever the intervals; empty if they decide.
    """
    reference = content["reference"]
    if reference is None:
        return [], None
    found = {} if leader is None else content["methods"][leader]["statistics"]
    sites = []
    for client in content["clients"] if content["same_clients"] else ():
        known = found.get("clients", {}).get(client, {})
        tested = min(sizes[client]["test"] for sizes in content["data"].values())
        sites.append(_one(content, client, leader, known.get("gain"), known.get("gain_interval"), tested, why_not))
    tested = min(sum(row["test"] for row in sizes.values()) for sizes in content["data"].values())
    mean = _one(content, None, leader, found.get("gain"), found.get("gain_interval"), tested, why_not)
    return sites, mean


def _one(
    content: Mapping[str, Any], client: str | None, leader: str | None, gain: float | None,
    interval: Sequence[float] | None, tested: int, why_not: str,
) -> dict[str, Any]:  # fmt: skip
    word = answer(gain, interval, not why_not)
    row = {"client": client, "answer": word, "method": leader, "gain": gain, "interval": interval}
    row |= {"test_examples": tested}
    return row | {"sentence": _sentence(content, row, why_not)}


def _sentence(content: Mapping[str, Any], row: Mapping[str, Any], why_not: str) -> str:
    who = "mean over clients" if row["client"] is None else row["client"]
    reference, leader, interval = content["reference"], row["method"], row["interval"]
    tested = f"{row['test_examples']} test example{'' if row['test_examples'] == 1 else 's'}"
    if leader is None:
        return f"{who}: not decided: {why_not or f'no method can be compared with {reference}'}"
    if interval is None:
        few = f"too few test examples for an interval of {leader}"
        return f"{who}: not decided: {why_not or (few if content['predictions'] else 'no predictions were kept')} ({tested})"
    unit, label = content["score_unit"], content["score_label"]
    rests = f"(best estimate {_side(row['gain'], unit, label)}; {tested})"
    much = points(interval[0], interval[1], unit, label)
    if row["answer"] == "join":
        return f"{who}: join with {leader}: {much} better than training alone on new examples {rests}"
    if row["answer"] == "stay":
        return f"{who}: stay alone: {leader} is {much} worse than training alone on new examples {rests}"
    low, high = (_side(end, unit, label) for end in interval)
    because = f"; {why_not}" if why_not else ""
    return f"{who}: not decided: {leader} is between {low} and {high} than training alone {rests}{because}"


def verdicts(sites: Sequence[Mapping[str, Any]], mean: Mapping[str, Any] | None) -> list[str]:
    """The sentences that are printed: of the mean, of the sites from the largest gain to the largest loss, and, of many
    sites, one for all of which nothing is decided."""
    if mean is None:
        return []
    ranked = sorted(sites, key=lambda row: (-(row["gain"] or 0.0), row["client"]))
    decided = [row["sentence"] for row in ranked if row["answer"] != "undecided"]
    unsure = [row for row in ranked if row["answer"] == "undecided"]
    if len(sites) <= _LINES:
        return [mean["sentence"], *decided, *(row["sentence"] for row in unsure)]
    return [mean["sentence"], *decided, f"not decided: {listed([row['client'] for row in unsure])}"]


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed([str(k) for k in range(10)])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def covers(content: Mapping[str, Any]) -> list[str]:
    """What is estimated, and what an answer does not cover."""
    seeds, resplit = len(content["seeds"]), content["resplit"]
    estimated = (
        "A gain is the difference of expected scores on new examples of the same sites, for methods trained on data like "
        "these; better is positive, whatever the score."
    )
    level = (
        f"All intervals of gains together hold in at least {100 * LEVEL:.0f} of 100 comparisons: those of the means of all "
        "methods, and those of all sites and methods."
    )
    if resplit:
        return [
            estimated,
            level,
            f"The examples of each site were dealt {resplit} times to training and test, each time with another seed; the "
            "intervals cover other seeds, other training examples and other test examples, and are corrected for what the "
            "dealings share (Nadeau and Bengio 2003).",
        ]
    if not content["same_clients"]:
        if seeds == 1:
            return [estimated, "One seed deals the data once, which gives no interval: give at least three."]
        return [
            estimated,
            level,
            f"Each of {seeds} seeds deals the data again; the intervals cover other seeds, other partitions and other "
            "examples of these data, and are corrected for what the dealings share (Nadeau and Bengio 2003). A "
            "client's name stands for other data in each seed, and has no answer of its own; --same-data deals once.",
        ]
    rest = (
        "The training examples are the same in all runs, so that the intervals leave out what other training examples would "
        "give; --resplit 10 (resplit=10 in Python) covers them too, and is the better answer where data are few."
    )
    if seeds == 1:
        once = (
            "With one seed the intervals are of these very networks on new test examples. They do not cover what another "
            "seed would give, so that nothing is decided: give at least three."
        )
        return [estimated, level, once, rest]
    return [estimated, level, f"The intervals cover other seeds, from {seeds}, and other test examples.", rest]


def notes(
    content: Mapping[str, Any], lost: Mapping[tuple[str, str], Sequence[str]], unclear: Sequence[str]
) -> list[str]:
    """What to bear in mind, sentences.

    Args:
        content: of `comparison.json`, with statistics.
        lost: by label and seed, clients for whom only other methods have a score.
        unclear: clients without an interval, because they have too few test examples.
    """
    found = [
        f"{label} has no score for {listed(clients)} with seed {seed}, and so no mean next to the others"
        for (label, seed), clients in lost.items()
    ]
    if unclear:
        found.append(f"{listed(unclear)}: too few test examples for an interval of {content['score_label']}, and not in "
                     "that of the mean")  # fmt: skip
    for label, searched in ((content["tuning"] or {}).get("methods") or {}).items():
        if worse := searched.get("diverged"):
            found.append(f"{label}: {_fields(worse[-1])} was better in the search, but diverged with another seed, so "
                         f"{_fields(searched['chosen'])} is compared")  # fmt: skip
    if content["best_by"] == "test" and len(content["methods"]) > 2:
        stopped = any(method["fields"].get("patience") is not None for method in content["methods"].values())
        why = "since patience stops training by the validation examples, " if stopped else ""
        found.append(
            f"{why}the best was chosen by the test examples on which it is reported; the intervals allow for that choice"
        )
    return found


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def told_budget(kind: str, limit: float | None, *, asked: bool, validated: bool) -> str:
    """How rounds were chosen: `asked`, whether the limit was given; `validated`, whether there were validation examples."""
    if kind == "best" and validated:
        return "each method at its best round by validation examples, with equal local training"
    if kind in ("best", "steps"):
        return "each method after all its rounds, with equal local training"
    if limit is None:
        return "each method after all its rounds: nothing was sent"
    amount = f"{limit / 2**20:.2f} MB" if kind == "bytes" else f"{limit:.1f} s of clients and server"
    whose = "" if asked else ", what the cheapest run spends in all"
    return f"each run at its last evaluated round within {amount}{whose}"


def told_target(asked: float | None, reference: str | None) -> str:
    """Where the target comes from."""
    if asked is not None:
        return "asked for"
    if reference is None:
        return "no method that trains alone has a score"
    return f"what {reference} reaches with the same seed at the compared round"
