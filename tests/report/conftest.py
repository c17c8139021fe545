"""Run directories whose scores are known, since they are written here."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
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
    """The content of `comparison.json`, of given scores: method -> seed -> client."""

    from polyfed.comparison.storage.comparison_directory import RESULTS_FORMAT

    def comparison_of(scores, reference="local", **more):
        def mean(values):
            values = [value for value in values if value is not None]
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
            other = {"p_reference": None if label == reference else 0.043, "p_best": None}
            reached = {"reached": 1, "round": 2.0, "bytes": 3 * 2**20, "seconds": 3.0}
            statistics = {"mean": middle, "interval": [middle - 0.02, middle + 0.02], **other, "to_target": reached}
            methods[label] = {"name": label, "fields": {}, "evaluated": "", "runs": runs, "statistics": statistics}
        first = next(iter(scores.values()))
        told = {"train": 10, "test": 5, "classes": [7, 3]}
        return {
            "format": RESULTS_FORMAT,
            "title": "mine",
            "task": "classification",
            "score": "accuracy",
            "rounds": 2,
            "seeds": [*first],
            "clients": sorted(next(iter(first.values()))),
            "same_clients": True,
            "class_names": ["cat", "dog"],
            "data": {str(seed): dict.fromkeys(found, told) for seed, found in first.items()},
            "budget": {"kind": "steps", "limit": None, "sentence": "equal local steps"},
            "reference": reference,
            "best": "fedavg",
            "best_by": "test",
            "target": {"score": 0.55, "sentence": "asked for"},
            "methods": methods,
            "skipped": {"fedbn": "fedbn needs one architecture"},
            "failed": {"fedprox": "round 1, client 'north', phase 'reply': it diverged"},
            "verdicts": ["north gains 4.1 to 6.0 points with fedavg"],
            "notes": ["3 seeds: intervals are wide"],
            "tuning": None,
            "level": 0.95,
            **more,
        }

    return comparison_of


@pytest.fixture(scope="session")
def write_predictions():
    """Writes `predictions/ID.parquet` of a run directory.

    Arguments: the folder; the client; outputs by round, each (n, K); targets; further columns.
    """

    def write_predictions(folder, client, outputs, targets, **columns):
        from polyfed import Client, Examples
        from polyfed.simulation.storage.paths import safe_file_name
        from polyfed.simulation.storage.predictions import predictions_parquet

        known = torch.as_tensor(np.asarray(targets))
        examples = Examples(torch.zeros(len(known), 1), known, columns=columns)
        tasks = {(True, 1): "regression", (True, 2): "multilabel"}
        task = tasks.get((known.is_floating_point(), known.dim()), "classification")
        found = {
            number: {"test": torch.as_tensor(np.asarray(values), dtype=torch.float32)}
            for number, values in outputs.items()
        }
        file = folder / "predictions" / f"{safe_file_name(client)}.parquet"
        predictions_parquet.write_outputs_of_client(file, Client(client, None, examples, examples, task=task), found)

    return write_predictions


@pytest.fixture(scope="session")
def write_comparison(write_run, write_predictions, comparison_of):
    """Writes a finished comparison with answers and, unless `keep` is false, predictions.

    Arguments: the folder; test examples by site; seeds; how well each method tells the classes apart; classes.
    """

    def write_comparison(folder, sites, *, seeds=(0, 1, 2), methods=None, classes=2, keep=True, **more):
        from polyfed.core.evaluation.metrics import METRICS

        methods = methods or {"local": 1.0, "fedavg": 1.6, "fedrep": 1.3}
        metric = METRICS["auc"]
        draw = np.random.default_rng(0)
        scores = {label: {seed: {} for seed in seeds} for label in methods}
        folder.mkdir(parents=True)
        (folder / "comparison.yaml").write_text("title: mine\n")
        for site, size in sites.items():
            targets = draw.integers(0, classes, size)
            columns = {"sex": draw.choice(["f", "m"], size).tolist(), "age": draw.integers(20, 90, size).tolist()}
            noise = draw.normal(size=(size, classes))  # an example that is hard is so for every method
            for label, skill in methods.items():
                for seed in seeds:
                    place = folder / label / f"seed-{seed}"
                    place.mkdir(parents=True, exist_ok=True)
                    outputs = noise + 0.4 * draw.normal(size=(size, classes)) + skill * np.eye(classes)[targets]
                    if keep:
                        write_predictions(place, site, {1: -outputs, 2: outputs}, targets, **columns)
                    found = metric(torch.tensor(outputs), torch.tensor(targets))
                    scores[label][seed][site] = found if found == found else None
        for label in methods:
            for seed in seeds:
                (folder / label / f"seed-{seed}/config.yaml").write_text(f"algorithm: {{name: {label}}}\n")
        answers = []
        kinds = ("join", "undecided", "stay")
        spans = {"join": [0.041, 0.06], "undecided": [-0.012, 0.03], "stay": [-0.05, -0.01]}
        for k, (site, size) in enumerate(sorted(sites.items())):
            kind = kinds[k % 3]
            answers.append({"client": site, "answer": kind, "method": "fedavg", "gain": sum(spans[kind]) / 2,
                            "interval": spans[kind], "test_examples": size, "over": "local",
                            "over_words": "training alone", "sentence": f"{site}: words of {site}"})  # fmt: skip
        mean = {"client": None, "answer": "join", "method": "fedavg", "gain": 0.03, "interval": [0.01, 0.05],
                "test_examples": sum(sites.values()), "over": "local", "over_words": "training alone",
                "sentence": "mean over clients: join with fedavg: 0.010 to 0.050 better in AUC"}  # fmt: skip
        new = {"score": "auc", "score_label": "AUC", "score_unit": "", "higher_is_better": True, "answers": answers,
               "mean_answer": mean, "covers": ["The gain is what is expected on new examples of the site.",
               "It does not cover a change of patients or of devices."],
               "warnings": ["Methods were not tuned (--tune none)"],
               "convergence": {"fedavg": {"converged": True, "sentence": "the score no longer rises"}},
               "class_names": ["healthy", "sick"] if classes == 2 else [str(k) for k in range(classes)],
               "references": {"logistic_regression": {"sentence": "Logistic regression of each site alone.",
                              "scores": dict.fromkeys(sites, 0.71), "mean": 0.71}}}  # fmt: skip
        content = comparison_of(scores, **{**new, **more})
        content["notes"] = ["the test gives p = 0.5"]
        (folder / "comparison.json").write_text(json.dumps(content))
        return folder

    return write_comparison


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window and without a network; `open(page, width)` shows a page."""
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    assert chromium, "there is no Chromium to show the page with: apt-get install chromium chromium-driver"
    assert driver, "there is no driver for Chromium: apt-get install chromium-driver"
    try:
        from selenium import webdriver
    except ImportError:
        pytest.fail(
            "there is no selenium to drive Chromium with: pip install selenium, or make test-slow after make test"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in (
        "--headless=new",
        "--disable-gpu",
        "--hide-scrollbars",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    found.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield found
    found.quit()
