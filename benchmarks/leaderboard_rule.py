"""The rule by which the committed leaderboard chose rates, for methods that join it: the best mean validation score.

`polyfed compare` chooses by the loss on validation examples since, and lets each client of `local` choose for itself. A row
that joins must have had the same choice as the others. So the search runs as today, with the first seed; of its runs the
one with the best mean validation score wins (mean over clients and the last three evaluated rounds, of equals the lower
validation loss), and the final runs have its rate.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from polyfed.algorithms import get

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


def without_option(words: Sequence[str], option: str) -> list[str]:
    """The words without an option and its value, if they have it.

    >>> without_option(["compare", "--trials", "12", "--quiet"], "--trials")
    ['compare', '--quiet']
    """
    place = words.index(option) if option in words else len(words)
    return [*words[:place], *words[place + 2 :]]


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


def keep_known_fields(tune: str, methods: Sequence[str]) -> str:
    """The search without the fields that none of the methods has, which `polyfed compare` refuses.

    >>> keep_known_fields("lr=grid;lam=0.1,1;clip_norm=null,10", ["local", "fedgh"])
    'lr=grid;clip_norm=null,10'
    """
    known = {field.name for method in methods for field in fields(get(method))}
    return ";".join(part for part in tune.split(";") if part.partition("=")[0] in known | {"grid"})


def choose_values(
    folder: Path, metric: str, rounds: int, searched: Sequence[str] = ("lr",)
) -> tuple[dict[str, Any], list[float]]:
    """The searched fields of the best run of a method's search, of those that it has, and the rates of all runs."""
    scored, tried = [], []
    for config in sorted(folder.glob("*/config.yaml")):
        algorithm = yaml.safe_load(config.read_text(encoding="utf-8"))["algorithm"]
        tried.append(algorithm["lr"])
        if (scores := last_scores(config.parent, metric, rounds)) is not None:
            scored.append((scores, {name: algorithm[name] for name in searched if name in algorithm}))
    if not scored:
        raise SystemExit(f"{folder}: no run of the search reached round {rounds}")
    return max(scored, key=lambda one: one[0])[1], sorted(tried)


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
    seeds, tune = value_of(words, "--seeds"), value_of(words, "--tune")
    search, final = out / "search", out / "final"
    specs = [one if isinstance(one, dict) else {"name": one} for one in json.loads(value_of(words, "--baselines"))]
    words = replaced(words, {"--tune": keep_known_fields(tune, ["local", *(one["name"] for one in specs)])})
    searched = [part.partition("=")[0] for part in tune.split(";")] if "=" in tune else ["lr"]
    tried = compared(replaced(words, {"--seeds": seeds.split(",")[0], "--out": str(search)}), search)
    labels = [label for label in tried["methods"] if label == "local" or label in only]
    metric = yaml.safe_load((search / "comparison.yaml").read_text(encoding="utf-8"))["metrics"][0]["name"]
    best = {label: choose_values(search / "tuning" / label, metric, tried["rounds"], searched) for label in labels}
    fixed = [{**one, **best[one["name"]][0]} for one in specs if one["name"] in best]  # others failed with every rate
    values = {"--tune": "none", "--baselines": json.dumps(fixed), "--out": str(final)}
    local_options = {f"--algorithm.{name}": json.dumps(value) for name, value in best["local"][0].items()}
    found = compared(without_option(replaced(words, values | local_options), "--trials"), final)
    edge = [f"lr of {label}" for label, (one, rates) in best.items() if one["lr"] in (rates[0], rates[-1])]
    methods = {label: {"chosen": one, "tried": rates} for label, (one, rates) in best.items()}
    return {**found, "tuning": {"sentence": tried["tuning"]["sentence"], "edge": edge, "methods": methods}}
