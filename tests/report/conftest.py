"""Run directories whose scores are known, since they are written here."""

import json
import random

import numpy as np
import pytest
import yaml


@pytest.fixture(scope="session")
def write_run():
    """Writes a run directory.

    Arguments: the folder; scores of each client, round by round (None: not defined; a list of None: never evaluated);
    rounds wanted; MB and seconds of a round.
    """

    def write_run(
        folder,
        method,
        scores,
        *,
        seed=0,
        wanted=None,
        megabytes=1,
        seconds=0.5,
        score="accuracy",
        fields=None,
        data=None,
    ):
        folder.mkdir(parents=True)
        config = {
            "rounds": wanted or max((len(values) for values in scores.values()), default=1),
            "seed": seed,
            "data": data or {"name": "cifar10", "partition": {"name": "dirichlet", "alpha": 0.3}},
            "algorithm": {"name": method, "lr": 0.1, **(fields or {})},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
            for k in range(max((len(values) for values in scores.values()), default=0)):
                clients = {client: {"seconds": 0.1} for client in scores}
                for client, values in scores.items():
                    if values[k] != "not evaluated":
                        clients[client][score] = values[k]
                record = {
                    "round": k + 1, "seconds": 9.0, "seconds_clients": seconds / 2, "seconds_server": seconds / 2,
                    "bytes_down_total": (k + 1) * megabytes * 2**19, "bytes_up_total": (k + 1) * megabytes * 2**19,
                    "clients": clients, "summary": {}, "failures": [],
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
        return folder

    return write_run


@pytest.fixture(scope="session")
def learning():
    """Scores of so many clients that rise towards a level, by rounds."""

    def learning(clients, rounds, level, seed=0):
        draw = random.Random(seed)
        ids = [f"client-{k:03d}" for k in range(clients)] if isinstance(clients, int) else clients
        own = {client: draw.gauss(0, 0.06) for client in ids}
        rise = 1 - np.exp(-np.arange(1, rounds + 1) / 3)
        return {client: np.clip(level * rise + own[client], 0, 1).tolist() for client in ids}

    return learning


@pytest.fixture(scope="session")
def comparison_of():
    """The content of `comparison.json`, as `polyfed.runs.comparison` tells it, of given scores: method -> seed -> client."""

    def comparison_of(scores, reference="local"):
        def mean(values):
            values = list(values)
            return sum(values) / len(values)

        methods = {}
        for label, by_seed in scores.items():
            runs = {
                str(seed): {
                    "path": f"{label}/seed-{seed}", "round": 2, "scores": found, "mean": mean(found.values()),
                    "validation": None, "bytes": 2**21, "seconds": 3.0,
                    "curve": [[1, 0.1, 2**20, 1.5], [2, mean(found.values()), 2**21, 3.0]], "to_target": None,
                }
                for seed, found in by_seed.items()
            }  # fmt: skip
            middle = mean(run["mean"] for run in runs.values())
            other = {"p_reference": None if label == reference else {"p": 0.01, "holm": 0.043}, "p_best": None}
            reached = {"reached": 1, "round": 2.0, "bytes": 3 * 2**20, "seconds": 3.0}
            statistics = {"mean": middle, "interval": [middle - 0.02, middle + 0.02], **other, "to_target": reached}
            methods[label] = {"name": label, "fields": {}, "evaluated": "", "runs": runs, "statistics": statistics}
        first = next(iter(scores.values()))
        told = {"train": 10, "test": 5, "classes": [7, 3]}
        return {
            "format": 1, "title": "mine", "task": "classification", "score": "accuracy", "rounds": 2, "seeds": [*first],
            "clients": sorted(next(iter(first.values()))), "same_clients": True, "class_names": ["cat", "dog"],
            "data": {str(seed): dict.fromkeys(found, told) for seed, found in first.items()},
            "budget": {"kind": "steps", "limit": None, "told": "equal local steps"}, "reference": reference,
            "best": "fedavg", "best_by": "test", "target": {"score": 0.55, "told": "asked for"},
            "tests": {"clients": 2, "smallest_p": 0.5, "told": "Wilcoxon over 2 clients cannot give less than p = 0.5"},
            "methods": methods, "left_out": {"fedbn": "fedbn needs one architecture"},
            "failed": {"fedprox": "round 1, client 'north', phase 'reply': it diverged"},
            "verdicts": ["north gains 4.1 to 6.0 points with fedavg"], "notes": ["3 seeds: intervals are wide"],
            "tuning": None,
        }  # fmt: skip

    return comparison_of
