"""A comparison on the disk: `comparison.yaml` says what is compared, `comparison.json` holds the results.

A comparison directory holds one run directory per method and seed, `METHOD/seed-K` (`METHOD/FIELDS/seed-K` where the best
of a search diverged), and

- `comparison.yaml`, written before the first run: everything that decides results (methods with all fields, seeds, settings,
  metrics, clients' fingerprints, the experiment), `searched_at`, the budget for which a
  search chose ("best" if it is missing), and `reading`, how results are read (budget and target);
- `comparison.json`, written when all runs are finished, as below. Paths in it are relative to the directory; scores are
  fractions as in `metrics.jsonl` (0.81, not 81); `null` is "not defined", a `Score` is a number or null.

```
{
  "format": 2,
  "title": "quickstart",                     a name for headings
  "task": "classification",                  or "multilabel", "regression"
  "score": "accuracy",                       the metric that decides
  "score_label": "accuracy", "score_unit": "%" or "", "higher_is_better": true,
  "level": 0.95,                             of all intervals of gains together
  "rounds": 20,                              of each run
  "seeds": [0, 1, 2],
  "clients": ["north", ...],                 sorted; the same ids in each seed
  "same_clients": false,                     true: an id is the same participant in each seed; only then are there answers
                                             client by client. false: each seed deals the data again
  "resplit": null | 5,                       how many times each client's examples were dealt again, one seed each
  "class_names": ["0", ...] or null,
  "data": {"0": {"north": {"train": 24, "val": 6, "test": 14, "classes": [3, 0, ...] or null,
                           "rarest": [4, 1] or null}, ...}, "1": ...},   by seed; test examples of the rarest class, which
  "budget": {"kind": "best" | "steps" | "bytes" | "seconds", "limit": null | number, "sentence": "a sentence"},
  "target": {"score": 0.81 or null, "sentence": "a sentence"},      mean of those of "to_target" below
  "reference": "local" or null,              label of the method that trains alone, which gains are over
  "best": "fedhenn",                         label of the best mean; null if no method has one
  "best_by": "validation" | "test",          what it was chosen on
  "leader": "fedhenn",                       the best besides the reference of those that had converged: answers are about it
  "answers": [{"client": "north", "answer": "join" | "stay" | "undecided", "method": "fedhenn", "gain": Score,
               "interval": [low, high] or null, "over": "ridge", the best that the client has alone, which the gain is over
               "gains": {"local": {"gain": Score, "interval": ...}, "ridge": ...}, over each, as if it were the only one
               "test_examples": 120, "rarest": 4 or null, of the rarest class, where that limits the score
               "basis": "120 test examples, 4 of the rarer class", "sentence": "north: join with ..."}, ...],
  "mean_answer": the same with "client": null; or null without a reference
  "verdicts": ["mean over clients: ...", "north: join with fedhenn: ...", ...],      the sentences of these answers
  "covers": [sentences: what is estimated, and what is not covered],
  "warnings": [sentences for the top],
  "convergence": {"local": {"converged": true | false | null, "sentence": "a sentence", "advice": "what helps"}, ...},
  "references": {"logistic_regression": {"sentence": "a sentence", "scores": {"north": Score, ...}, "mean": Score,
                 "alone": true,              whether a client has it alone, and so a rival of the leader: then also
                 "runs": {"0": {"north": Score, ...}}, "interval": ..., "gain": Score, "gain_interval": ...,
                 "clients": {"north": {"gain": Score, "gain_interval": ...}}}, ...},
  "left_out": [sentences: what of that was not fitted],
  "predictions": true,                       whether predictions of the compared rounds were kept; without, no intervals
  "methods": {                               in the order of the table; by label, which is also the folder
    "local": {
      "name": "local",                       of the registry, or the class
      "fields": {"lr": 0.05, ...},           all hyper-parameters
      "evaluated": "",                       what is scored, where fields decide; mostly empty
      "runs": {                              by seed, as text
        "0": {
          "path": "local/seed-0" or null,    run directory (metrics.jsonl, models, predictions); null: kept in memory
          "round": 20 or null,               the compared round; null: not one evaluated round is within the budget
          "rounds": {"north": 12, ...},      only where each client ends alone: its own; "round" is then the last of them;
                                             its predictions are kept, models/ are of the run's round
          "scores": {"north": Score, ...},   per client at that round; empty where round is null
          "mean": Score,                     over clients; null if one lacks a score that another method has
          "validation": Score,               mean validation score at that round; null without validation examples
          "bytes": 123456, "seconds": 4.21,  down + up, and clients + server without evaluation, up to that round
          "curve": [[round, mean score, bytes, seconds], ...],      every evaluated round, also beyond the budget
          "to_target": {"round": 8, "bytes": ..., "seconds": ...} or null      first evaluated round that reaches the target
        }, ...
      },
      "statistics": {                        gains are positive where the method is better, whatever the score
        "mean": Score, "interval": [low, high] or null,             over seeds and test examples, by itself
        "worst": Score, "p10": Score, "p90": Score,                 over clients, mean over seeds; p10 is near the worst
        "gain": Score, "gain_interval": [low, high] or null,        over the reference; together with those of other methods
        "gain_per_seed": [0.02, ...] or null,
        "losers": 2 or null,                 participants whose score is worse than the reference's
        "participants": 8 or null,           clients, mean over seeds; if not the same clients, those of each seed
        "p_reference": 0.047 or null,        of the mean gain over the reference, corrected for the number of methods
        "p_best": 0.2 or null,               against the best, corrected for all pairs of methods; null for the best itself
        "rounds": [20, 20, 20],              compared round by seed
        "bytes": mean, "seconds": mean,
        "to_target": {"reached": 3, "round": mean, "bytes": mean, "seconds": mean}     means null unless all seeds reach it
        "clients": {"north": {"mean": Score, "gain": Score, "gain_interval": [low, high] or null, "p": 0.03 or null,
                              "test_examples": 120, "verdict": "gains" | "loses" | "undecided" | null}, ...}
      }                                      verdict null: the reference itself, clients that differ from seed to seed
    }, ...                                   or lack a score in one. p and intervals of clients hold for all of them together
  },
  "skipped": {"fedavg": "fedavg needs one architecture, but ..."},       methods that the federation does not suit, and why
  "failed": {"fedprox": "round 3, ...: training diverged ..."},            methods of which a run failed, and why
  "notes": ["...", ...],                                                   what else to bear in mind, sentences
  "tuning": null or {"sentence": "a sentence", "by": "validation loss", "edge": ["lr of fedavg"], "methods": {"fedavg":
            {"chosen": {"lr": 0.1}, "diverged": [{"lr": 0.3}], "runs": 5,
             "tried": [{"fields": {"lr": 0.1}, "loss": 0.4, "validation": 0.8}, ...],
             "by_client": {"north": {"lr": 0.3}, ...}, "rounds": {"north": 12, ...}}},    what each client of local chose
            "rounds": {"fedavg": 12}, "losses": {"fedavg": [[1, 0.9], ...]}}     rounds: chosen on held-out examples
}
```
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml

from polyfed.comparison.budget import Budget, ResultCriteria
from polyfed.comparison.storage.continuation import describe_conflict, describe_first_difference
from polyfed.comparison.storage.results_schema import ComparisonDescription, results_error
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder, expand_user_path, read_file, write_file_atomically
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.simulation.storage.directory import list_changes, read_config, read_manifest, read_metrics, to_plain_values
from polyfed.simulation.storage.paths import safe_file_name

DESCRIPTION, RESULTS = "comparison.yaml", "comparison.json"
RESULTS_FORMAT = 2  # of the results
SELECTION_RULE = (
    "loss"  # by what rates and rounds are chosen; before, by the mean validation score, with no word in the description
)


@final
@dataclass(frozen=True)
class Comparison:
    """Methods next to one another on the same clients.

    Attributes: `results`, as the top of this module documents them; `out`, the directory or None.
    """

    results: Mapping[str, Any]
    out: Path | None = None

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.results['methods'])}; {len(self.results['seeds'])} seeds, out={self.out})"

    @property
    def verdicts(self) -> Sequence[str]:
        """What the intervals support, in words."""
        return list(self.results["verdicts"])

    @property
    def skipped(self) -> Mapping[str, str]:
        """Methods that the federation does not suit, each with the reason."""
        return dict(self.results["skipped"])

    @property
    def failed(self) -> Mapping[str, str]:
        """Methods of which a run could not be completed, each with the reason."""
        return dict(self.results.get("failed", {}))

    def table(self) -> list[dict[str, Any]]:
        """One row a method: `method`; `mean` over clients and seeds with its interval `low`, `high`; `worst` client, `p10`
        and `p90`; `gain` over training alone with `gain_low`, `gain_high`; `losers`, the clients that lose by joining; the
        corrected `p_reference` and `p_best`; `megabytes` (2^20 bytes) and `seconds` of a run; None where not defined."""
        rows = []
        for label, method in self.results["methods"].items():
            statistics = method["statistics"]
            low, high = statistics["interval"] or (None, None)
            gain_low, gain_high = statistics["gain_interval"] or (None, None)
            rows.append(
                {
                    "method": label,
                    "mean": statistics["mean"],
                    "low": low,
                    "high": high,
                    **{name: statistics[name] for name in ("worst", "p10", "p90")},
                    "gain": statistics["gain"],
                    "gain_low": gain_low,
                    "gain_high": gain_high,
                    "losers": statistics["losers"],
                    **{name: statistics[name] for name in ("p_reference", "p_best")},
                    "megabytes": None if statistics["bytes"] is None else statistics["bytes"] / 2**20,
                    "seconds": statistics["seconds"],
                }
            )
        return rows


def load_comparison(folder: str | Path) -> Comparison:
    """A finished comparison from its directory.

    Raises:
        UserError: there is none, or it is not finished.
    """
    folder = expand_user_path(folder, "the folder of the comparison")
    path = folder / RESULTS
    if not (Path(folder) / DESCRIPTION).exists():
        raise UserError(f"{folder} is not the directory of a comparison: it has no {DESCRIPTION}")
    if not path.is_file():
        raise UserError(f"the comparison in {folder} is not finished; go on with it: polyfed compare {folder}")
    try:
        content = parse_json(read_file(path))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        if content.get("format") == RESULTS_FORMAT and (wrong := results_error(content)):
            raise ValueError(wrong)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); make it again: polyfed compare {folder}") from error
    if content.get("format") != RESULTS_FORMAT:
        raise UserError(
            f"{path} has format {content.get('format')}, this version of polyfed reads {RESULTS_FORMAT}; make it again: "
            f"polyfed compare {folder}"
        )
    return Comparison(content, Path(folder))


def write_comparison_results(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the results; the file is the old one or the new one at any moment."""
    write_file_atomically(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False).encode())


def read_description(folder: str | Path) -> dict[str, Any]:
    """The content of `comparison.yaml`.

    Raises:
        UserError: it is missing or damaged.
    """
    path = expand_user_path(folder, "the folder of the comparison") / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{folder} is not the directory of a comparison: it has no {DESCRIPTION}")
    content = read_config(path)
    if wrong := validation_error(content, ComparisonDescription):
        raise UserError(f"{path} is damaged: {wrong}; give the whole command again with another --out")
    return content


def load_result_criteria(description: Mapping[str, Any]) -> ResultCriteria:
    """How the results of a comparison were last read."""
    stored = description.get("reading") or {}
    return ResultCriteria(Budget.parse(stored.get("budget", "best")), stored.get("target"))


def write_description(folder: Path, description: Mapping[str, Any], criteria: ResultCriteria) -> None:
    """Writes `comparison.yaml`; one that is there must describe runs that this one has, too. Reading them otherwise needs no
    other runs.

    Raises:
        UserError: `folder` holds something else, or a comparison of something else.
    """
    content = to_plain_values(description, "comparison")
    try:
        if not folder.exists():
            create_private_folder(folder, parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error
    if (folder / DESCRIPTION).exists():
        before = read_description(folder)
        if content.get("choices") != before.get("choices"):
            raise UserError(
                f"{folder} was begun by an earlier version of polyfed, which chose learning rates and rounds by the mean "
                "validation score, and for all clients of local alike. Its results can still be shown (polyfed report "
                f"{folder}); to compare anew, give the whole command again with another --out"
            )
        if differs := describe_conflict(before, content):
            raise UserError(
                f"{folder} holds a comparison of something else: {differs}; choose another --out, or ask for what it holds"
            )
    elif any(not entry.name.startswith(".partial-") for entry in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no comparison; choose another --out")
    content["reading"] = {"budget": str(criteria.budget), "target": criteria.target}
    write_file_atomically(folder / DESCRIPTION, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def load_finished_history(
    folder: Path, rounds: int, clients: Sequence[str], seed: int, method: Mapping[str, Any], data_fingerprint: str
) -> list[dict[str, Any]] | None:
    """Reads the history of a finished run: its rounds are recorded, all or up to where a callback stopped it, and its models
    and predictions are written. Returns None if the run is not finished.

    Args:
        folder: of the run.
        rounds, clients, seed: of the run that is asked for.
        method: with its fields, as `config.yaml` has it.
        data_fingerprint: the fingerprint of the clients, as `manifest.json` has it.

    Raises:
        UserError: the folder has another run, or what says which is damaged.
    """
    if not (folder / "config.yaml").exists():
        return None
    config = read_config(folder)
    stored_run = {"seed": config.get("seed"), "algorithm": config.get("algorithm"), "rounds": config.get("rounds")}
    expected_run = {"seed": seed, "algorithm": dict(method), "rounds": rounds}
    manifest = read_manifest(folder)
    stored_fingerprint = manifest.get("data_fingerprint", data_fingerprint)  # one that is lost is no other
    if differs := describe_first_difference(
        {**stored_run, "clients": stored_fingerprint}, {**expected_run, "clients": data_fingerprint}
    ):
        raise UserError(
            f"{folder} does not hold the run that belongs there: {differs}; remove it, or choose another --out"
        )
    if changed := list_changes(folder, include_outputs=False):
        raise UserError(f"{changed[0]}. A comparison reads finished runs: make this one again by removing {folder}")
    history = read_metrics(folder / "metrics.jsonl")
    if manifest and not manifest.get("files"):
        return None  # it was stopped while it wrote models and predictions
    stopped_round = manifest.get("stopped", {}).get("round", rounds)  # where a callback stopped it
    if [record["round"] for record in history] != list(range(1, int(stopped_round) + 1)):
        return None
    if not all(isinstance(record.get(part), dict) for record in history for part in ("clients", "summary")):
        return None
    if list_changes(folder):
        return None  # models or predictions, which are written again
    models = [folder / "models" / f"{safe_file_name(client)}.safetensors" for client in clients]
    return history if all(path.is_file() and path.stat().st_size > 0 for path in models) else None
