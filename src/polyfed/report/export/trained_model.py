"""Loads a client's trained network with its preprocessing and scores, from a run or a run directory."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from polyfed.algorithms import registry_name
from polyfed.comparison.statistics.score_intervals import mean_score_with_interval
from polyfed.core.algorithm import Algorithm, Architecture
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.values.validation import DAMAGED_FILE_ERRORS, parse_json
from polyfed.core.methods.capabilities import BringsNetwork, TrainsAuxiliaryNetwork, WrapsNetwork
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.module_cache import build_module, fill_module
from polyfed.core.state_dict import StateDict
from polyfed.data.tabular.preprocessing import TablePreprocessor, preprocessor_from_json
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.replies.secure_aggregation import effective_disclosures
from polyfed.simulation.storage.configuration import build_method, build_settings, read_section, restore_metrics
from polyfed.simulation.storage.directory import read_config, read_manifest, read_metrics
from polyfed.simulation.storage.integrity import check_model_unchanged
from polyfed.simulation.storage.model_signature import (
    PREPROCESSING_SUFFIX,
    SIGNATURE_SUFFIX,
    BuiltInNetwork,
    Signature,
    build_model_signature,
    find_factory_of_signature,
    read_signature,
    spec_from_signature,
)
from polyfed.simulation.storage.paths import choose_stored_model
from polyfed.simulation.storage.predictions import prediction_store as kept_predictions
from polyfed.simulation.storage.predictions.prediction_store import Predictions


@final
@dataclass(frozen=True)
class ClientScore:
    """Holds a network's score on the client's test examples, with its confidence interval or None."""

    label: str
    value: float
    interval: tuple[float, float] | None


@final
@dataclass(frozen=True, eq=False)
class TrainedModel:
    """Holds a client's trained network and what is exported with it, such as its signature, preprocessing and scores.

    Attributes: `network`, in evaluation mode on the CPU; `signature`; `preprocessor`, of a table;
    `architecture_description`, with which the method builds its own kind of network, or None; `class_names`, empty if
    nobody knows them; `algorithm`, None at a site; `kept_round` of
    `planned_rounds`, 0 if unknown; `seed`; `scores`; `disclosures`, words of `DISCLOSURES`; `never_trained`,
    whether the client took part in no round up to that one (False where nobody knows).
    """

    network: nn.Module
    signature: Signature
    preprocessor: TablePreprocessor | None
    architecture_description: Mapping[str, Any] | None
    class_names: tuple[str, ...]
    algorithm: Algorithm[Any, Any] | None
    kept_round: int
    planned_rounds: int
    seed: int | None
    scores: tuple[ClientScore, ...]
    disclosures: frozenset[str]
    never_trained: bool = False

    @property
    def method_name(self) -> str:
        """Returns the name of the training method; empty for a site's network, where it is not known."""
        return "" if self.algorithm is None else registry_name(self.algorithm)

    @property
    def method_summary(self) -> str:
        """Returns the first sentence of the docstring of the method's module, which names the method's paper."""
        module = sys.modules.get(type(self.algorithm).__module__)
        text = inspect.getdoc(module) or inspect.getdoc(type(self.algorithm)) or ""
        return " ".join(text.split("\n\n")[0].split())


def trained_model_of_run(run: Run, client: str) -> TrainedModel:
    """Returns a client's trained network, with its preprocessing and scores, from a run in memory.

    Raises:
        UserError: no client has this id.
    """
    _refuse_wrapped_network(run.federation.algorithm)
    network = run.model(client)
    owner, federation = run.federation.clients[client], run.federation
    transform, algorithm = owner.train.transform, federation.algorithm
    manifest = {} if run.out is None else read_manifest(run.out)
    description = None
    if isinstance(algorithm, BringsNetwork) and not algorithm.requires & MODEL_REQUIREMENTS:
        description = algorithm.describe_personal_network(network, owner)
    try:
        predictions = run.predictions(client)
    except UserError:  # they were not kept
        predictions = None
    preprocessor = transform if isinstance(transform, TablePreprocessor) else None
    return TrainedModel(
        network,
        build_model_signature(owner),
        preprocessor,
        description,
        owner.train.classes or _class_names(preprocessor, manifest),
        algorithm,
        run.kept_checkpoint.round,
        federation.settings.rounds,
        federation.settings.seed,
        _test_scores(predictions, federation.metrics),
        effective_disclosures(algorithm, federation.settings.secure),
        _never_trained(run.history, client, run.kept_checkpoint.round),
    )


def _never_trained(records: Sequence[Mapping[str, Any]], client: str, last_round: int) -> bool:
    """Returns whether a client trained in none of the rounds up to `last_round`."""
    rounds = [record for record in records if record["round"] <= last_round]
    return bool(rounds) and not any("seconds" in record["clients"].get(client, {}) for record in rounds)


def _refuse_wrapped_network(algorithm: Algorithm[Any, Any]) -> None:
    """Raises an error if the method wraps the network: the export would disclose stored data of the client."""
    if isinstance(algorithm, WrapsNetwork) and isinstance(algorithm, TrainsAuxiliaryNetwork):
        raise UserError(
            f"a network of {registry_name(algorithm)} has a second network beside it, and is not exported; use run.predict "
            "or run.model"
        )
    if isinstance(algorithm, WrapsNetwork):
        raise UserError(
            f"a network of {registry_name(algorithm)} holds representations of the client's training examples and is not "
            "exported; use run.predict or run.model, or export a run of fedavg, whose training is the same"
        )


def read_trained_model(folder: Path, client: str | None, network: Architecture | None = None) -> TrainedModel:
    """Loads a client's network with preprocessing and scores from a run or a site's folder.

    Args:
        folder: of the run, which has ended.
        client: its id; None for the only one.
        network: builds the network, where the directory does not say how.

    Raises:
        UserError: there is no network of this client, its files are damaged, or its network cannot be built.
    """
    path, signature = _find_model(folder, client)
    manifest = read_manifest(folder)
    check_model_unchanged(folder, manifest, path.stem)
    try:
        weights = read_safetensors(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); run again, or put back a copy") from error
    config = read_config(folder) if (folder / "config.yaml").exists() else {}
    algorithm: Any = build_method(read_section(config, "algorithm")) if config else None
    if algorithm is not None:
        _refuse_wrapped_network(algorithm)
    preprocessor = read_preprocessor(path.with_name(f"{path.stem}{PREPROCESSING_SUFFIX}"))
    description = None
    if isinstance(algorithm, BringsNetwork) and not algorithm.requires & MODEL_REQUIREMENTS:  # type: ignore[attr-defined]
        description = read_architecture_description(path.with_suffix(".json"))
    module = build_trained_network(
        signature["network"],
        weights,
        folder,
        network or (find_factory_of_signature(signature) if signature["network"] is None else None),
        algorithm,
        description,
    )
    metrics, settings = resolve_metrics(None, signature["task"]), build_settings(config) if config else None
    if settings is not None:
        try:
            metrics = restore_metrics(settings, None, signature["task"], folder)
        except UserError:  # one of the user's own, which was given in Python
            metrics = resolve_metrics([m for m in settings.metrics if ":" not in m] or None, signature["task"])
    try:
        predictions = kept_predictions.read_predictions(folder, signature["client"])
    except UserError:
        predictions = None
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    disclosures = (
        frozenset[str]() if algorithm is None or settings is None else effective_disclosures(algorithm, settings.secure)
    )
    return TrainedModel(
        module,
        signature,
        preprocessor,
        description,
        _class_names(preprocessor, manifest),
        algorithm,
        0 if predictions is None else predictions.round,
        0 if settings is None else settings.rounds,
        None if settings is None else settings.seed,
        _test_scores(predictions, metrics),
        disclosures,
        _never_trained(records, signature["client"], len(records) if predictions is None else predictions.round),
    )


def _find_model(folder: Path, client: str | None) -> tuple[Path, Signature]:
    """Returns the path of a client's weights, and the signature of the network that they belong to."""
    models = folder / "models"
    model_names = sorted(path.name.removesuffix(SIGNATURE_SUFFIX) for path in models.glob(f"*{SIGNATURE_SUFFIX}"))
    if not model_names:
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
    ids = {name: read_signature(models / f"{name}{SIGNATURE_SUFFIX}") for name in model_names}
    name = choose_stored_model(folder, {name: signature["client"] for name, signature in ids.items()}, client)
    return models / f"{name}.safetensors", ids[name]


def read_preprocessor(path: Path) -> TablePreprocessor | None:
    """Reads from a file the preprocessing that was fitted to a table; None if the file does not exist.

    Raises:
        UserError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return preprocessor_from_json(parse_json(read_file(path)))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); put back a copy") from error


def read_architecture_description(path: Path) -> Mapping[str, Any]:
    """Reads from a JSON file the description from which a method builds a client's network, as a dict.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        content = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), and the method builds its network from it; run again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no description of a network; run again, or put back a copy")
    return content


def build_trained_network(
    spec: BuiltInNetwork | None,
    weights: StateDict,
    folder: Path,
    factory: Architecture | None = None,
    method: Any = None,
    description: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Builds a client's network with its trained weights, in evaluation mode.

    It is built by `factory` if given, else by the method from its description, else from the spec.

    Raises:
        UserError: nothing says how to build it, it is code that nobody allowed, or the weights do not fit.
    """
    if factory is None and description is not None and isinstance(method, BringsNetwork):
        try:
            module = method.build_from_description(description)
        except DAMAGED_FILE_ERRORS as error:
            raise UserError(f"the description of the network in {folder} is damaged ({error}); run again") from error
    elif factory is None and spec is None:
        raise UserError(
            f"the networks of {folder} were made in Python, and only that can build them: polyfed.export_model(run, ...) "
            "after the run, or polyfed.export_model(folder, client, out, model=factory)"
        )
    else:
        module = build_module(factory or spec_from_signature(spec), seed=0)  # type: ignore[arg-type]  # one of them is there
    try:
        return fill_module(module, weights).eval().requires_grad_(False)
    except ValueError as error:
        raise UserError(f"the network of {folder} is not the one that was trained: {error}") from error


def _class_names(preprocessor: TablePreprocessor | None, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    return preprocessor.classes if preprocessor is not None else tuple(manifest.get("class_names") or ())


def _test_scores(predictions: Predictions | None, metrics: tuple[Metric, ...]) -> tuple[ClientScore, ...]:
    if predictions is None:
        return ()
    scores = []
    for metric in metrics:
        estimate = mean_score_with_interval(
            metric, [predictions.outputs], predictions.targets, groups=predictions.groups
        )
        if estimate is not None:
            low, high = (
                (min(max(end, 0.0), 1.0) for end in estimate[1:]) if metric.is_from_zero_to_one else estimate[1:]
            )
            scores.append(ClientScore(metric.label, estimate[0], (low, high)))
        elif torch.isfinite(torch.tensor(value := metric(predictions.outputs, predictions.targets))):
            scores.append(ClientScore(metric.label, value, None))
        targets = predictions.targets
        if metric.name == "accuracy" and targets.dim() == 1 and not targets.is_floating_point():
            share = int(targets.bincount().max()) / len(targets)
            scores.append(ClientScore(f"{metric.label} of always predicting the most frequent class", share, None))
    return tuple(scores)
