"""Logs trained networks and comparisons to MLflow.

Each client's network becomes a model with a signature, which MLflow serves without polyfed. Each run of a comparison
becomes a child run of the comparison's run.
"""

import importlib
import inspect
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.values.validation import parse_json
from polyfed.report.export.folder import PREPROCESSING, SIGNATURE, export_model
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.monitoring.trackers import (
    MLFLOW_LINK_FILE,
    build_tracker,
    ensure_mlflow_experiment,
    read_mlflow_run_id,
)
from polyfed.simulation.storage.directory import read_metrics
from polyfed.simulation.storage.model_signature import SIGNATURE_SUFFIX, read_signature
from polyfed.simulation.storage.paths import safe_file_name

MODELS_TAG = "polyfed.models"  # tag of MLflow's run: how many networks it has
_PARENT = "mlflow.parentRunId"


def log_models_once_to_mlflow(folder: Path) -> int:
    """Logs a run's networks to MLflow unless they are there; returns how many.

    Returns the number of logged networks; one that cannot be exported is left out, with a warning.

    Args:
        folder: of a run that has ended; its `mlflow.json` names the run of MLflow.

    Returns:
        How many were logged. One that cannot be exported is left out, with a warning.
    """
    run_id = read_mlflow_run_id(folder)
    if run_id is None:
        return 0
    mlflow: Any = importlib.import_module("mlflow")
    server = mlflow.MlflowClient()
    if MODELS_TAG in server.get_run(run_id).data.tags:
        return 0
    clients = [read_signature(path)["client"] for path in sorted((folder / "models").glob(f"*{SIGNATURE_SUFFIX}"))]
    logged = 0
    with tempfile.TemporaryDirectory() as temporary:
        code = Path(temporary) / "polyfed_network.py"
        code.write_bytes(files("polyfed.report.export").joinpath("templates", "mlflow_model.py.txt").read_bytes())
        for client in clients:
            try:
                exported = export_model(folder, client, Path(temporary) / "networks" / safe_file_name(client))
            except UserError as error:
                warnings.warn(f"the network of {client!r} is not in MLflow: {error}", RuntimeWarning, stacklevel=2)
                continue
            with mlflow.start_run(run_id=run_id):
                _log_exported_model(exported, code, f"network-{safe_file_name(client)}".replace("%", "_"))
            logged += 1
    server.set_tag(run_id, MODELS_TAG, str(logged))
    return logged


def _log_exported_model(exported: Path, code: Path, name: str) -> None:
    pyfunc: Any = importlib.import_module("mlflow.pyfunc")
    new = "name" in inspect.signature(pyfunc.log_model).parameters  # since MLflow 3
    requirements = [f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "numpy")]
    pyfunc.log_model(
        **{"name" if new else "artifact_path": name},
        python_model=str(code),
        artifacts={"network": str(exported)},
        signature=mlflow_signature_of_folder(exported),
        pip_requirements=requirements,
    )


def mlflow_signature_of_folder(exported_folder: Path) -> Any:
    """Converts the `signature.json` of an exported folder to an MLflow `ModelSignature`.

    A table has one column each, numbers as double and categories as string; other inputs are one tensor each, with the
    batch as the first axis; the output is a tensor.
    """
    models: Any = importlib.import_module("mlflow.models")
    schemas: Any = importlib.import_module("mlflow.types.schema")
    signature = parse_json(read_file(exported_folder / SIGNATURE))
    table = exported_folder / PREPROCESSING
    if table.is_file():
        columns = parse_json(read_file(table))["columns"]
        kinds = schemas.DataType
        inputs = [
            schemas.ColSpec(kinds.double if entry["categories"] is None else kinds.string, entry["name"])
            for entry in columns
        ]
    else:
        single_input = len(signature["inputs"]) == 1
        inputs = [
            schemas.TensorSpec(np.dtype(entry["dtype"]), (-1, *entry["shape"]), None if single_input else entry["name"])
            for entry in signature["inputs"]
        ]
    out = signature["outputs"]
    outputs = [schemas.TensorSpec(np.dtype(out["dtype"]), (-1, *out["shape"]))]
    return models.ModelSignature(inputs=schemas.Schema(inputs), outputs=schemas.Schema(outputs))


def log_comparison_to_trackers(results: Mapping[str, Any], folder: Path, tracker_names: Sequence[str]) -> None:
    """Logs each run's rounds to TensorBoard or MLflow, for MLflow also the whole comparison.

    The comparison's run in MLflow has the mean scores and gains of the methods, the results, and the networks of the
    first seed's runs.

    Args:
        results: its results.
        folder: its directory.
        tracker_names: "tensorboard", "mlflow".
    """
    first = str(results["seeds"][0])
    parent = _write_comparison_run(results, folder) if "mlflow" in tracker_names else None
    for label, method in results["methods"].items():
        for seed, run in method["runs"].items():
            path = None if run["path"] is None else folder / run["path"]
            if path is None or not (path / "metrics.jsonl").is_file():
                continue
            round_count = len(read_metrics(path / "metrics.jsonl"))
            progress = build_tracker(list(tracker_names), path, SilentProgress())
            progress.start(label, round_count, round_count)
            progress.stop()
            if parent is not None and (run_id := read_mlflow_run_id(path)) is not None:
                importlib.import_module("mlflow").MlflowClient().set_tag(run_id, _PARENT, parent)
                if seed == first:
                    log_models_once_to_mlflow(path)


def _write_comparison_run(results: Mapping[str, Any], folder: Path) -> str:
    """Creates or updates the MLflow run of a comparison with its results, and returns the run's id."""
    mlflow: Any = importlib.import_module("mlflow")
    server = mlflow.MlflowClient()
    run_id = read_mlflow_run_id(folder)
    if run_id is None:
        tags = {"polyfed.comparison": str(results["title"]), "polyfed.directory": str(folder.resolve())}
        run_id = str(server.create_run(ensure_mlflow_experiment(server), tags=tags, run_name=str(folder)).info.run_id)
        write_file_atomically(folder / MLFLOW_LINK_FILE, json.dumps({"run_id": run_id}).encode())
    server.set_tag(run_id, "polyfed.best", str(results["best"]))
    for label, method in results["methods"].items():
        for name in ("mean", "gain", "worst"):
            if (value := method["statistics"][name]) is not None:
                server.log_metric(run_id, f"{label}/{name}", value)
    server.log_artifact(run_id, str(folder / "comparison.json"))
    server.set_terminated(run_id, "FINISHED")
    return run_id
