"""A client's personal network with all that its use needs and what there is to say of it, of a run or its directory."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from polyfed.algorithms import name_of
from polyfed.comparison.crossed import score_interval
from polyfed.comparison.directory import DESCRIPTION
from polyfed.comparison.directory import read_description as read_description_of
from polyfed.core.algorithm import MODEL_WORDS, Algorithm, Architecture, BringsNetwork
from polyfed.core.errors import UserError, nearest
from polyfed.core.files import read_file
from polyfed.core.metrics import Metric, metrics_of
from polyfed.core.scratch import fill, new_module
from polyfed.core.stored import read_tensors
from polyfed.core.tree import Tree
from polyfed.core.typed import UNREADABLE, from_json
from polyfed.core.wrapping import WrapsNetwork
from polyfed.data.features import Prepared, from_description
from polyfed.simulation.runs import predictions as kept_predictions
from polyfed.simulation.runs.configuration import method_of, metrics_again, section, settings_of
from polyfed.simulation.runs.directory import read_config, read_manifest, read_metrics
from polyfed.simulation.runs.paths import file_name
from polyfed.simulation.runs.predictions import Predictions
from polyfed.simulation.runs.results import Run
from polyfed.simulation.runs.signature import (
    ENDING,
    PREPROCESSING,
    Network,
    Signature,
    read_signature,
    signature_of,
    spec_of,
)
from polyfed.simulation.secure import disclosed

READING = ("missing", "delimiter", "decimal", "encoding")  # fields of the source `table` that say how a file is read


@final
@dataclass(frozen=True)
class Score:
    """On a client's own test examples; `interval` is None where there is none."""

    label: str
    value: float
    interval: tuple[float, float] | None


@final
@dataclass(frozen=True, eq=False)
class Trained:
    """What is exported.

    Attributes: `network`, in evaluation mode on the CPU; `signature`; `prepared`, of a table; `description`, with which
    the method builds its own kind of network, or None; `class_names`, empty if nobody knows them; `reading`, how files of a
    table are read; `algorithm`, None at a site; `round` of `rounds`, 0 if unknown; `seed`; `scores`; `discloses`, words of
    `DISCLOSURES`; `absent`, whether the client took part in no round up to that one (False where nobody knows).
    """

    network: nn.Module
    signature: Signature
    prepared: Prepared | None
    description: Mapping[str, Any] | None
    class_names: tuple[str, ...]
    reading: Mapping[str, Any]
    algorithm: Algorithm[Any, Any] | None
    round: int
    rounds: int
    seed: int | None
    scores: tuple[Score, ...]
    discloses: frozenset[str]
    absent: bool = False

    @property
    def method(self) -> str:
        """Its name; empty at a site."""
        return "" if self.algorithm is None else name_of(self.algorithm)

    @property
    def source(self) -> str:
        """Which equations the method is, in the words of its module: "FedAvg: ... (McMahan et al., AISTATS 2017, ...)."."""
        module = sys.modules.get(type(self.algorithm).__module__)
        text = inspect.getdoc(module) or inspect.getdoc(type(self.algorithm)) or ""
        return " ".join(text.split("\n\n")[0].split())


def of_run(run: Run, client: str) -> Trained:
    """The network of a client of a run.

    Raises:
        UserError: no client has this id.
    """
    _check_bare(run.federation.algorithm)
    network = run.model(client)
    owner, federation = run.federation.clients[client], run.federation
    transform, algorithm = owner.train.transform, federation.algorithm
    manifest = {} if run.out is None else read_manifest(run.out)
    described = None
    if isinstance(algorithm, BringsNetwork) and not algorithm.requires & MODEL_WORDS:
        described = algorithm.description(network, owner)
    try:
        found = run.predictions(client)
    except UserError:  # they were not kept
        found = None
    prepared = transform if isinstance(transform, Prepared) else None
    return Trained(
        network, signature_of(owner), prepared, described, _names(prepared, manifest), _reading(run.out), algorithm,
        run.kept.round, federation.settings.rounds, federation.settings.seed, _scores(found, federation.metrics),
        disclosed(algorithm, federation.settings.secure), _absent(run.history, client, run.kept.round),
    )  # fmt: skip


def _absent(records: Sequence[Mapping[str, Any]], client: str, last: int) -> bool:
    """Whether the records of rounds tell that a client trained in none up to this one."""
    rounds = [record for record in records if record["round"] <= last]
    return bool(rounds) and not any("seconds" in record["clients"].get(client, {}) for record in rounds)


def _check_bare(algorithm: Algorithm[Any, Any]) -> None:
    """Refuses a personal network with something of the client's data around it, which an export would give away."""
    if isinstance(algorithm, WrapsNetwork):
        raise UserError(
            f"a network of {name_of(algorithm)} holds representations of the client's training examples and is not "
            "exported; use run.predict or run.model, or export a run of fedavg, whose training is the same"
        )


def of_directory(folder: Path, client: str | None, network: Architecture | None = None) -> Trained:
    """The network of a client that a run directory keeps, or a site in its folder of a run. The data are not read.

    Args:
        folder: of the run, which has ended.
        client: its id; None for the only one.
        network: builds the network, where the directory does not say how.

    Raises:
        UserError: there is none of this client, its files are damaged, or its network cannot be built.
    """
    path, signature = _kept(folder, client)
    try:
        weights = read_tensors(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); run again, or put back a copy") from error
    config = read_config(folder) if (folder / "config.yaml").exists() else {}
    algorithm: Any = method_of(section(config, "algorithm")) if config else None
    if algorithm is not None:
        _check_bare(algorithm)
    prepared = read_prepared(path.with_name(f"{path.stem}{PREPROCESSING}"))
    description = None
    if isinstance(algorithm, BringsNetwork) and not algorithm.requires & MODEL_WORDS:  # type: ignore[attr-defined]
        description = read_description(path.with_suffix(".json"))
    found = built(signature["network"], weights, folder, network, algorithm, description)
    metrics, settings = metrics_of(None, signature["task"]), settings_of(config) if config else None
    if settings is not None:
        try:
            metrics = metrics_again(settings, None, signature["task"], folder)
        except UserError:  # one of the user's own, which was given in Python
            metrics = metrics_of([m for m in settings.metrics if ":" not in m] or None, signature["task"])
    try:
        kept = kept_predictions.read(folder, signature["client"])
    except UserError:
        kept = None
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    shown = frozenset[str]() if algorithm is None or settings is None else disclosed(algorithm, settings.secure)
    return Trained(
        found, signature, prepared, description, _names(prepared, read_manifest(folder)), _reading(folder), algorithm,
        0 if kept is None else kept.round, 0 if settings is None else settings.rounds,
        None if settings is None else settings.seed, _scores(kept, metrics), shown,
        _absent(records, signature["client"], len(records) if kept is None else kept.round),
    )  # fmt: skip


def _kept(folder: Path, client: str | None) -> tuple[Path, Signature]:
    """The weights of a client and what they belong to."""
    models = folder / "models"
    known = sorted(path.name.removesuffix(ENDING) for path in models.glob(f"*{ENDING}"))
    if not known:
        if list(models.glob("*.safetensors")):
            raise UserError(
                f"{models} does not say what its networks take, as that of an older polyfed: `polyfed resume {folder}` "
                "writes it"
            )
        if (folder / "config.yaml").exists() and "deployment" in read_config(folder):
            raise UserError(
                f"{folder} is of a run of real sites, whose models are at the sites: each exports its own there, from the "
                "run's folder in its state-dir"
            )
        raise UserError(f"{folder} has no models; give the directory of a run that has ended")
    ids = {name: read_signature(models / f"{name}{ENDING}") for name in known}
    if client is None and len(known) > 1:
        named = ", ".join(one["client"] for one in ids.values())
        raise UserError(f"{folder} has models of several clients; give --client with one of {named}")
    name = known[0] if client is None else file_name(client)
    if name not in ids:
        raise UserError(
            f"{folder} has no model of client {client!r}; {nearest(str(client), [s['client'] for s in ids.values()])}"
        )
    return models / f"{name}.safetensors", ids[name]


def read_prepared(path: Path) -> Prepared | None:
    """The preprocessing in a file; None if there is no such file.

    Raises:
        UserError: it is damaged.
    """
    if not path.is_file():
        return None
    try:
        return from_description(from_json(read_file(path)))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); put back a copy") from error


def read_description(path: Path) -> Mapping[str, Any]:
    """With what a method builds its own kind of network.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        content = from_json(read_file(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), and the method builds its network from it; run again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no description of a network; run again, or put back a copy")
    return content


def built(
    spec: Network | None,
    weights: Tree,
    folder: Path,
    factory: Architecture | None = None,
    method: Any = None,
    description: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A network with its weights, in evaluation mode: by a factory, by the method that brings it, or by its spec.

    Raises:
        UserError: nothing says how to build it, it is code that nobody allowed, or the weights do not fit.
    """
    if factory is None and description is not None and isinstance(method, BringsNetwork):
        try:
            module = method.build(description)
        except UNREADABLE as error:
            raise UserError(f"the description of the network in {folder} is damaged ({error}); run again") from error
    elif factory is None and spec is None:
        raise UserError(
            f"the networks of {folder} were made in Python, and only that can build them: polyfed.export_model(run, ...) "
            "after the run, or polyfed.export_model(folder, client, to, network=factory)"
        )
    else:
        module = new_module(factory or spec_of(spec), seed=0)  # type: ignore[arg-type]  # one of them is there
    try:
        return fill(module, weights).eval().requires_grad_(False)
    except ValueError as error:
        raise UserError(f"the network of {folder} is not the one that was trained: {error}") from error


def _names(prepared: Prepared | None, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    return prepared.classes if prepared is not None else tuple(manifest.get("class_names") or ())


def _reading(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / "config.yaml").exists():
        return {}
    config, above = read_config(folder), folder.resolve().parents[1:2]
    if "data" not in config and above and (above[0] / DESCRIPTION).exists():  # a comparison keeps it for all its runs
        config = (read_description_of(above[0]).get("experiment") or {}).get("config") or {}
    data = config.get("data")
    if not isinstance(data, dict) or data.get("name") != "table":
        return {}
    return {name: data[name] for name in READING if name in data}


def _scores(found: Predictions | None, metrics: tuple[Metric, ...]) -> tuple[Score, ...]:
    if found is None:
        return ()
    scores = []
    for metric in metrics:
        told = score_interval(metric, [found.outputs], found.targets)
        if told is not None:
            low, high = (min(max(end, 0.0), 1.0) for end in told[1:]) if metric.unit == "%" else told[1:]  # of shares
            scores.append(Score(metric.label, told[0], (low, high)))
        elif torch.isfinite(torch.tensor(value := metric(found.outputs, found.targets))):
            scores.append(Score(metric.label, value, None))
    return tuple(scores)
