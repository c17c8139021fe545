"""What the results of a comparison support, in sentences for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.runs.statistics import FEWEST_EXAMPLES, LEVEL, MANY, Interval, interval, smallest_p, sure

_NAMED = 8  # clients that a sentence lists


def points(low: float, high: float, score: str = "accuracy") -> str:
    """Two differences of scores in words: of accuracy in percentage points, of AUC and R² as they are.

    >>> points(0.041, 0.06), points(-0.041, 0.06, "auc")
    ('4.1 to 6.0 points', '-0.041 to 0.060 of AUC')
    """
    if score == "accuracy":
        return f"{_zero(100 * low, 1):.1f} to {_zero(100 * high, 1):.1f} points"
    return f"{_zero(low, 3):.3f} to {_zero(high, 3):.3f} of {'R²' if score == 'r2' else 'AUC'}"


def _zero(value: float, digits: int) -> float:
    return round(value, digits) + 0.0  # no "-0.0"


def within_scale(spread: Interval, score: str, least: float) -> tuple[float, float]:
    """The ends of an interval, without what no accuracy or AUC, or difference of two, can be; R² has no lower end."""
    return (spread.low, spread.high) if score == "r2" else (max(spread.low, least), min(spread.high, 1.0))


def verdicts(content: Mapping[str, Any], leader: str | None, contenders: int) -> list[str]:
    """What the intervals of the best method beside the reference support, in words.

    Args:
        content: of `comparison.json`, with statistics.
        leader: the method that did best, of those beside the reference; None without one.
        contenders: from how many it was chosen. The best of several gains by chance more often than each of them, so that
            its own interval is widened for all of them (Bonferroni).
    """
    reference = content["reference"]
    if leader is None or reference is None:
        return []
    found = content["methods"][leader]["statistics"]
    gains = found["gain_per_seed"]
    spread = None if None in gains else interval(gains, 1 - (1 - LEVEL) / contenders)
    if spread is None:
        return []
    score = content["score"]
    low, high = within_scale(spread, score, -1.0)
    chosen = f", at {100 * LEVEL:.0f} % for the best of {contenders}" if contenders > 1 else ""
    if not sure(gains):
        gain = points(low, high, score).partition(" to ")[2]
        told = [
            f"{leader} against {reference}: {gain} in each of {len(gains)} seeds, too few to say how far that varies"
        ]
    elif low > 0:
        told = [f"{leader} gains {points(low, high, score)} over {reference}, mean over clients{chosen}"]
    elif high < 0:
        told = [
            f"{leader}, the best of the others, loses {points(-high, -low, score)} against {reference}: train alone{chosen}"
        ]
    else:
        told = [f"{leader} against {reference}: {points(low, high, score)}, mean over clients{chosen}, includes 0; these "
                f"{len(content['seeds'])} seeds do not tell them apart"]  # fmt: skip
    clients = found["clients"]
    for client, of_client in sorted(clients.items(), key=lambda item: -(item[1]["gain"] or 0.0)):
        if of_client["verdict"] in ("gains", "loses"):
            low, high = of_client["gain_interval"]
            if of_client["verdict"] == "gains":
                told.append(f"{client} gains {points(low, high, score)} with {leader}")
            else:
                told.append(f"{client} loses {points(-high, -low, score)} with {leader}: let it keep its own model")
    if unsure := [client for client, of_client in clients.items() if of_client["verdict"] == "open"]:
        named = ", ".join(unsure[:_NAMED]) + (f" and {len(unsure) - _NAMED} more" if len(unsure) > _NAMED else "")
        told.append(f"nothing can be said of {named}")
    return told


def notes(content: Mapping[str, Any], lost: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """What to bear in mind, sentences. `lost`: by label and seed, clients for whom only other methods have a score."""
    seeds = len(content["seeds"])
    found = [
        f"{label} has no score for {', '.join(clients[:_NAMED])}{' and more' if len(clients) > _NAMED else ''} with seed "
        f"{seed}, and so no mean beside the others"
        for (label, seed), clients in lost.items()
    ]
    if seeds == 1:
        found.append("one seed gives no interval and no verdict: give at least three")
    elif seeds < MANY:
        found.append(f"intervals over {seeds} seeds are Student's, which holds what varies about evenly to both sides")
    if not content["same_clients"] and seeds > 1:
        found.append("each seed deals the data anew, so that a client's name stands for other data and there are no "
                     "verdicts client by client; --same_data deals them once")  # fmt: skip
    if content["same_clients"] and seeds > 1 and content["score"] == "accuracy":
        found.append(f"a client's verdict needs {FEWEST_EXAMPLES} of its test examples to change sides, whatever its "
                     "interval; each by itself is wrong in one of 20 cases, and more often where the method was chosen as "
                     "the best by the same scores")  # fmt: skip
    if content["best_by"] == "test" and len(content["methods"]) > 2:
        found.append("the best was chosen on the test examples on which it is reported, which flatters it a little; with "
                     "validation examples (--data.val_fraction) it is chosen on those")  # fmt: skip
    return found


def told_budget(kind: str, limit: float | None, *, asked: bool) -> str:
    """How rounds were chosen: `asked`, whether the limit was given."""
    if kind == "steps":
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


def told_tests(clients: int, others: int, methods: int) -> str:
    """What a test over so few clients can find."""
    pairs = methods * (methods - 1) // 2
    least = smallest_p(clients)
    return (
        f"Wilcoxon over {clients} clients cannot give less than p = {least:.2g}, after Holm's correction "
        f"{min(1.0, least * max(others, 1)):.2g} against the reference and {min(1.0, least * max(pairs, 1)):.2g} against "
        "the best, where all pairs count"
    )
