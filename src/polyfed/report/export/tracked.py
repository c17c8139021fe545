"""Trained networks and comparisons in MLflow: each client's network as a model with a signature, which MLflow serves without
polyfed; each run of a comparison as a run of its own below that of the comparison."""

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
from polyfed.core.files import read_file, replace_file
from polyfed.core.typed import from_json
from polyfed.report.export.folder import PREPROCESSING, SIGNATURE, export_model
from polyfed.simulation.runs.directory import read_metrics
from polyfed.simulation.runs.paths import file_name
from polyfed.simulation.runs.progress import Silent
from polyfed.simulation.runs.signature import ENDING, read_signature
from polyfed.simulation.tracking import LINK, experiment_of, run_of, tracked

MARK = "polyfed.models"  # tag of MLflow's run: how many networks it has
_PARENT = "mlflow.parentRunId"


def log_models(folder: Path) -> int:
    """Logs the clients' networks of a run directory that MLflow tracks, unless its run there has them.

    Args:
        folder: of a run that has ended; its `mlflow.json` names the run of MLflow.

    Returns:
        How many were logged. One that cannot be exported is left out, with a warning.
    """
    run_id = run_of(folder)
    if run_id is None:
        return 0
    mlflow: Any = importlib.import_module("mlflow")
    server = mlflow.MlflowClient()
    if MARK in server.get_run(run_id).data.tags:
        return 0
    clients = [read_signature(path)["client"] for path in sorted((folder / "models").glob(f"*{ENDING}"))]
    logged = 0
    with tempfile.TemporaryDirectory() as temporary:
        code = Path(temporary) / "polyfed_network.py"
        code.write_bytes(files("polyfed.report.export").joinpath("templates", "mlflow_model.py.txt").read_bytes())
        for client in clients:
            try:
                exported = export_model(folder, client, Path(temporary) / "networks" / file_name(client))
            except UserError as error:
                warnings.warn(f"the network of {client!r} is not in MLflow: {error}", RuntimeWarning, stacklevel=2)
                continue
            with mlflow.start_run(run_id=run_id):
                _log_one(exported, code, f"network-{file_name(client)}".replace("%", "_"))
            logged += 1
    server.set_tag(run_id, MARK, str(logged))
    return logged


def _log_one(exported: Path, code: Path, name: str) -> None:
    pyfunc: Any = importlib.import_module("mlflow.pyfunc")
    new = "name" in inspect.signature(pyfunc.log_model).parameters  # since MLflow 3
    requirements = [f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "numpy")]
    pyfunc.log_model(
        **{"name" if new else "artifact_path": name},
        python_model=str(code),
        artifacts={"network": str(exported)},
        signature=signature_of_export(exported),
        pip_requirements=requirements,
    )


def signature_of_export(exported: Path) -> Any:
    """An exported folder's signature as MLflow's: a column each of a table, numbers as double and categories as string; a
    tensor each of other inputs, the batch being the first axis; and a tensor of outputs."""
    models: Any = importlib.import_module("mlflow.models")
    schemas: Any = importlib.import_module("mlflow.types.schema")
    told = from_json(read_file(exported / SIGNATURE))
    table = exported / PREPROCESSING
    if table.is_file():
        columns = from_json(read_file(table))["columns"]
        kinds = schemas.DataType
        inputs = [
            schemas.ColSpec(kinds.double if one["categories"] is None else kinds.string, one["name"]) for one in columns
        ]
    else:
        alone = len(told["inputs"]) == 1
        inputs = [
            schemas.TensorSpec(np.dtype(one["dtype"]), (-1, *one["shape"]), None if alone else one["name"])
            for one in told["inputs"]
        ]
    out = told["outputs"]
    outputs = [schemas.TensorSpec(np.dtype(out["dtype"]), (-1, *out["shape"]))]
    return models.ModelSignature(inputs=schemas.Schema(inputs), outputs=schemas.Schema(outputs))


def log_comparison(content: Mapping[str, Any], folder: Path, names: Sequence[str]) -> None:
    """Tracks a finished comparison: the rounds of each run; with MLflow also a run for the comparison, the mean scores and
    gains of the methods, the results, and the networks of the first seed's runs.

    Args:
        content: its results.
        folder: its directory.
        names: "tensorboard", "mlflow".
    """
    first = str(content["seeds"][0])
    parent = _parent(content, folder) if "mlflow" in names else None
    for label, method in content["methods"].items():
        for seed, run in method["runs"].items():
            path = None if run["path"] is None else folder / run["path"]
            if path is None or not (path / "metrics.jsonl").is_file():
                continue
            done = len(read_metrics(path / "metrics.jsonl"))
            progress = tracked(list(names), path, Silent())
            progress.start(label, done, done)
            progress.stop()
            if parent is not None and (run_id := run_of(path)) is not None:
                importlib.import_module("mlflow").MlflowClient().set_tag(run_id, _PARENT, parent)
                if seed == first:
                    log_models(path)


def _parent(content: Mapping[str, Any], folder: Path) -> str:
    """MLflow's run of a comparison, with its results."""
    mlflow: Any = importlib.import_module("mlflow")
    server = mlflow.MlflowClient()
    run_id = run_of(folder)
    if run_id is None:
        tags = {"polyfed.comparison": str(content["title"]), "polyfed.directory": str(folder.resolve())}
        run_id = str(server.create_run(experiment_of(server), tags=tags, run_name=str(folder)).info.run_id)
        replace_file(folder / LINK, json.dumps({"run_id": run_id}).encode())
    server.set_tag(run_id, "polyfed.best", str(content["best"]))
    for label, method in content["methods"].items():
        for name in ("mean", "gain", "worst"):
            if (value := method["statistics"][name]) is not None:
                server.log_metric(run_id, f"{label}/{name}", value)
    server.log_artifact(run_id, str(folder / "comparison.json"))
    server.set_terminated(run_id, "FINISHED")
    return run_id
