"""Says where the network of a comparison's answer is, and how to train it on nearly all rows."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from polyfed.comparison.storage.comparison_directory import DESCRIPTION, RESULTS, load_comparison, read_description
from polyfed.core.errors import UserError, did_you_mean
from polyfed.simulation.storage.directory import read_config


def check_is_run_of_client(folder: Path, client: str | None, command: str) -> None:
    """Raises a `UserError` if a folder is a comparison: it names the run whose network the answer for this client means.

    Args:
        folder: of a run, or of a comparison.
        client: whose network is wanted; None for the answer of the mean.
        command: with which to go on; {run} in it stands for the run.
    """
    from polyfed.cli.commands.options.early_checks import check_is_no_comparison

    if not (folder / DESCRIPTION).is_file() or not (folder / RESULTS).is_file():
        check_is_no_comparison(folder)
        return
    results = load_comparison(folder).results
    answers = {answer["client"]: answer for answer in results.get("answers") or ()}
    if answers and client is not None and client not in answers:
        raise UserError(f"{folder} has no client {client!r}; {did_you_mean(client, map(str, answers))}")
    answer = answers.get(client, results.get("mean_answer") or {})
    method = results["reference"] if answer.get("answer") == "stay" else answer.get("method")
    runs = sorted(file.parent for file in folder.glob(f"{method}/**/seed-*/config.yaml"))
    if not runs:
        check_is_no_comparison(folder)
    train_command = _build_run_command(folder, results, str(method), runs[0])
    part = "one fold, trained without the rows of that fold" if results.get("folds") else "one seed"
    raise UserError(
        f"{folder} is a comparison; the answer for {client if client in answers else 'the mean'} is of {method}: "
        f"{command.format(run=shlex.quote(str(runs[0])))} (the network of {part}"
        f"{f'; on nearly all rows: {train_command}, and give its directory' if train_command else ''})"
    )


def _build_run_command(folder: Path, results: Mapping[str, Any], method: str, run: Path) -> str:
    """Returns the command that trains a method of a comparison, with its hyper-parameters, on nearly all rows.

    It is "" for data that were given in Python.
    """
    from polyfed.cli.commands.options.configuration_parser import parse_configuration

    experiment = read_description(folder).get("experiment")
    if experiment is None:
        return ""
    stored, method_fields = experiment["config"], read_config(run)["algorithm"]
    rounds = [number for number in results["methods"][method]["statistics"]["rounds"] if number is not None]
    config = {**{key: stored[key] for key in ("data", "model", "loss")}, "algorithm": method_fields}
    data = {key: value for key, value in stored["data"].items() if key in ("name", "path", "site")}
    minimal_config = {"data": data, "algorithm": {"name": method_fields["name"]}}
    options = list(_list_differing_options(config, parse_configuration([], minimal_config, "polyfed run")))
    start = (
        [data["path"]]
        if data["name"] == "table"
        else ["--data", data["name"], *_list_differing_options(data, {}, "--data.")]
    )
    site = ["--data.site", data["site"]] if data["name"] == "table" and data["site"] is not None else []
    best_round = str(round(median(rounds or [results["rounds"]])))
    words = [*start, *site, *options, "--algorithm", method_fields["name"], "--rounds", best_round]
    return shlex.join(["polyfed", "run", *words, "--data.test-fraction", "0.05"])


def _list_differing_options(
    config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "--"
) -> Iterator[str]:
    """Yields the options, each with its value, by which a configuration differs from the defaults."""
    for key, value in config.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _list_differing_options(value, default, f"{prefix}{key}.")
        elif json.dumps(value) != json.dumps(default):
            yield from (f"{prefix}{key}".replace("_", "-"), value if isinstance(value, str) else json.dumps(value))
