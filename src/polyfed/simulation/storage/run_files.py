"""Reads those files of a run directory that describe how the run went, without importing torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.values.validation import parse_json
from polyfed.simulation.storage.directory import read_config, read_manifest, read_metrics
from polyfed.simulation.storage.metrics_table import build_metrics_table, find_metric_names


@final
@dataclass(frozen=True)
class RunFiles:
    """Holds a run's configuration, its manifest (data, packages, machine), and a record per round.

    Attributes:
        config: the content of `config.yaml`.
        manifest: the content of `manifest.json`; empty if that is missing.
        history: the records of `metrics.jsonl`.
        num_examples, num_test_examples: numbers of training and test examples, of the clients whose networks are stored.
    """

    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    num_examples: Mapping[str, int]
    num_test_examples: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> "RunFiles":
        """Reads the configuration, manifest and records of a run from its directory.

        Raises:
            UserError: `folder` is not a run directory, or its configuration is damaged.
        """
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is not a run directory: it has no config.yaml")
        config = read_config(folder)
        if not isinstance(config.get("algorithm"), Mapping):
            raise UserError(f"{folder / 'config.yaml'} names no algorithm, so that it is not of a run")
        history = [record for record in read_metrics(folder / "metrics.jsonl") if _is_record(record)]
        return cls(config, read_manifest(folder), history, *_read_num_examples(folder))

    @property
    def method(self) -> str:
        """Returns the name of the run's method."""
        return str(self.config["algorithm"].get("name"))

    @property
    def planned_rounds(self) -> int | None:
        """Returns the number of rounds that the configuration asks for; None if it names no number."""
        rounds = self.config.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def is_finished(self) -> bool:
        """Returns True if the networks are written and all rounds are done, or a callback stopped the run."""
        stopped = isinstance(self.manifest.get("stopped"), Mapping)
        return bool(self.manifest.get("files")) and (stopped or len(self.history) == self.planned_rounds)

    @property
    def metric_names(self) -> list[str]:
        """Returns the names of the run's metrics, first the metric by which rounds are compared."""
        score = self.manifest.get("score")
        return find_metric_names(self.history, score.get("name") if isinstance(score, Mapping) else None)

    @property
    def score(self) -> tuple[str, float] | None:
        """Returns the deciding metric and its last mean over clients; None if there is none."""
        for record in reversed(self.history):
            for name in self.metric_names[:1]:
                if (mean := record["summary"].get(name, {}).get("mean")) is not None:
                    return name, mean
        return None

    @property
    def client_ids(self) -> list[str]:
        """Returns the ids of all clients that occur in the records of the rounds."""
        return list(dict.fromkeys(client for record in self.history for client in record["clients"]))

    def describe(self) -> str:
        """Returns one line of text with the method, the number of clients, the rounds and the score."""
        score = self.score
        scored = "not evaluated" if score is None else f"{score[0]} {score[1]:.3g}"
        rounds = f"{len(self.history)} of {self.planned_rounds} rounds"
        return f"{self.method}, {len(self.client_ids)} clients, {rounds}, {scored}"

    def table(self, at: Literal["last", "best"] = "last") -> list[dict[str, Any]]:
        """Returns the last or best evaluated round's metrics as dicts, by client and as means.

        Raises:
            UserError: no round has been evaluated, or "best" without validation examples.
        """
        if at not in ("last", "best"):
            raise UserError(f"table(at=) must be 'last' or 'best', got {at!r}")
        if not (evaluated := [record for record in self.history if record["summary"]]):
            raise UserError("no round of this run has been evaluated yet")
        record = evaluated[-1]
        if at == "best":
            name, sign = f"val_{(self.metric_names or ['loss'])[0]}", 1
            if self.config.get("keep") == "loss":
                name, sign = "val_loss", -1
            elif (self.manifest.get("score") or {}).get("higher_is_better") is False:
                sign = -1
            scores = [(r["summary"].get(name, {}).get("mean"), r) for r in evaluated]
            defined = [(sign * mean, r) for mean, r in scores if mean is not None]
            if not defined:
                raise UserError("table(at='best') needs validation examples, which this run had none of")
            record = max(defined, key=lambda pair: pair[0])[1]
        return build_metrics_table(record, self.client_ids, self.num_examples, self.metric_names)


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, Mapping)
        and isinstance(record.get("round"), int)
        and all(isinstance(record.get(part), Mapping) for part in ("clients", "summary"))
        and all(isinstance(value, Mapping) for part in ("clients", "summary") for value in record[part].values())
    )


def _read_num_examples(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the numbers of training and of test examples by client, from the signatures of the stored networks."""
    counts: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for path in sorted((folder / "models").glob("*.signature.json")):
        try:
            signature = parse_json(read_file(path))
            for by_client, part in zip(counts, ("train", "test"), strict=True):
                by_client[str(signature["client"])] = int(signature["examples"][part])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged one is refused where its network is used
    return counts
