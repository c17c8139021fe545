"""The rule by which the committed leaderboard chose rates, for methods that join it: the best mean validation score.

`polyfed compare` chooses by the loss on validation examples since, and lets each client of `local` choose for itself. A row
that joins must have had the same choice as the others. So the search runs as today, with the first seed; of its runs the
one with the best mean validation score wins (mean over clients and the last three evaluated rounds, of equals the lower
validation loss), and the final runs have its rate.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

RULE = "chosen by the best mean validation score of the last 3 evaluated rounds"


def value_of(words: Sequence[str], option: str) -> str:
    """The word after an option."""
    return words[words.index(option) + 1]


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words with other values after some of the options; one that is missing is added."""
    changed = list(words)
    for option, value in values.items():
        if option in changed:
            changed[changed.index(option) + 1] = value
        else:
            changed += [option, value]
    return changed


def last_scores(folder: Path, metric: str, rounds: int) -> tuple[float, float] | None:
    """Mean validation score and minus the mean validation loss of a run's last three evaluated rounds, over the clients
    that have validation examples; None if the run did not reach its last round.
    """
    if not (folder / "metrics.jsonl").exists():  # it diverged in its first round
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for client in (client for line in lines for client in line["clients"].values()):
        if client.get("val_loss", 0) is None:  # not finite
            client["val_loss"] = math.inf
    evaluated = [one["clients"] for one in lines if any(f"val_{metric}" in c for c in one["clients"].values())]
    if not evaluated or lines[-1]["round"] != rounds:
        return None
    means = [
        [fmean(one[key] for one in clients.values() if key in one) for clients in evaluated[-3:]]
        for key in (f"val_{metric}", "val_loss")
    ]
    return fmean(means[0]), -fmean(means[1])


def choose_rate(folder: Path, metric: str, rounds: int) -> tuple[float, list[float]]:
    """The rate of the best run of a method's search, and all that were tried."""
    scored = {}
    for config in sorted(folder.glob("*/config.yaml")):
        lr = yaml.safe_load(config.read_text(encoding="utf-8"))["algorithm"]["lr"]
        scored[lr] = last_scores(config.parent, metric, rounds)
    finished = {lr: scores for lr, scores in scored.items() if scores is not None}
    if not finished:
        raise SystemExit(f"{folder}: no run of the search reached round {rounds}")
    return max(finished, key=lambda lr: finished[lr]), sorted(scored)


def compare_by_score(
    words: Sequence[str], out: Path, only: Sequence[str], compared: Callable[[list[str], Path], dict[str, Any]]
) -> dict[str, Any]:
    """The results of a comparison of `local` and the methods named, with rates chosen by the rule of the leaderboard.

    Args:
        words: those of `polyfed compare`, with a search.
        out: the folder of both comparisons, `search` and `final`.
        only: the methods' names.
        compared: runs `polyfed compare` with words, and reads the results.
    """
    seeds = value_of(words, "--seeds")
    search, final = out / "search", out / "final"
    tried = compared(replaced(words, {"--seeds": seeds.split(",")[0], "--out": str(search)}), search)
    labels = [label for label in tried["methods"] if label == "local" or label in only]
    metric = yaml.safe_load((search / "comparison.yaml").read_text(encoding="utf-8"))["metrics"][0]["name"]
    rates = {label: choose_rate(search / "tuning" / label, metric, tried["rounds"]) for label in labels}
    specs = [one if isinstance(one, dict) else {"name": one} for one in json.loads(value_of(words, "--baselines"))]
    fixed = [
        {**one, "lr": rates[one["name"]][0]} for one in specs if one["name"] in rates
    ]  # others failed with every rate
    values = {"--tune": "none", "--baselines": json.dumps(fixed), "--out": str(final)}
    found = compared(replaced(words, {**values, "--algorithm.lr": str(rates["local"][0])}), final)
    edge = [f"lr of {label}" for label, (lr, all_of_it) in rates.items() if lr in (all_of_it[0], all_of_it[-1])]
    methods = {label: {"chosen": {"lr": lr}, "tried": all_of_it} for label, (lr, all_of_it) in rates.items()}
    return {**found, "tuning": {"sentence": tried["tuning"]["sentence"], "edge": edge, "methods": methods}}
