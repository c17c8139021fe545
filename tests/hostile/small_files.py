"""The kinds of files beside those of runs: of sites, projects and federations, and what commands keep. See `fuzz`."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
import yaml

import polyfed as pf
from polyfed.algorithms import PFedLA
from polyfed.cli.commands.papers import cell_metrics
from polyfed.cli.commands.run import warmstart_command
from polyfed.core.errors import UserError
from polyfed.core.serialization import serialize_state
from polyfed.data.formats.files import class_names_from_hub_metadata
from polyfed.data.formats.text import build_vocabulary, load_vocabulary
from polyfed.deploy.privacy.accountant import record_message_and_get_epsilon
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.wire import pack_tensors, parse_head, read_tensor_specs, unpack_tensors
from polyfed.deploy.server.server_config import _parse_field_value
from polyfed.deploy.site.private_state import (
    InvalidSiteStateError,
    check_or_record_client_identity,
    read_private_state,
    write_private_state_and_delete_older,
)
from polyfed.deploy.trial.local_trial import read_running_trial, trial_folder_of
from polyfed.deploy.trial.project import create_project
from polyfed.graphs.architecture import LayerType
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.report.figures import aggregation
from polyfed.report.page.panels import method_views
from polyfed.simulation.monitoring import trackers
from polyfed.testing import small_clients

METHOD = {"name": "local", "lr": 0.1, "schedule": "constant", "clip_norm": None}


def small_kinds(folder: Path, kind, as_json, as_yaml, made: Path):
    """The kinds, each with a file in `folder`; `made` is a run that can be resumed."""
    return {
        **of_a_site(folder, kind, as_json),
        **of_a_project(folder, kind, as_json, as_yaml),
        **of_commands(folder, kind, as_json),
        **of_messages(folder, kind, as_json),
        "checkpoint, sums right": forged(folder, kind, as_json, made),
    }


def of_a_site(folder, kind, as_json):
    """Private state, with and without the right sum; marks of a run; the book of what has left."""
    run, book = folder / "site" / "run-a", folder / "site" / "privacy.json"
    write_private_state_and_delete_older(run, "north", 3, METHOD, {"model": {"w": torch.ones(3)}, "seen": 2}, 0)
    sealed = folder / "sealed" / "run-a"
    shutil.copytree(run, sealed)
    check_or_record_client_identity(folder / "site" / "run-b", "north", "0123")
    with warnings.catch_warnings(action="ignore"):
        record_message_and_get_epsilon(book, "data", ReplyProtection(clip_norm=1.0, noise_multiplier=2.0))
    file = sealed / "private" / "round-000003.state"
    _, head, state = file.read_bytes().split(b"\n", 2)

    def with_sum(value):
        rest = as_json(value) + b"\n" + state
        return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest

    def own(where):
        def read():
            with asked():
                read_private_state(where, "north", 3, METHOD)

        return read

    def marks():
        with asked():
            check_or_record_client_identity(folder / "site" / "run-b", "north", "0123")

    marked = folder / "site" / "run-b" / "run.json"
    return {
        "site: private state": kind(run / "private" / "round-000003.state", None, None, own(run)),
        "site: state, sum right": kind(file, with_sum, json.loads(head), own(sealed)),
        "site: run.json": kind(marked, as_json, json.loads(marked.read_bytes()), marks),
        "site: privacy.json": kind(
            book,
            as_json,
            json.loads(book.read_bytes()),
            lambda: record_message_and_get_epsilon(book, "data", ReplyProtection()),
        ),
    }


class asked:
    """What a site refuses is told as a refusal, which counts here."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, InvalidSiteStateError):
            raise UserError(str(error)) from error


def of_a_project(folder, kind, as_json, as_yaml):
    """The catalogue of layers, `trial.json`, `pyproject.toml`, and a field of a method in it."""
    types = LayerType("conv2d", 3, 8, (3, 3), (1, 1)), LayerType("linear", 8, 2)
    catalogue = folder / "catalogue.yaml"
    LayerCatalogue(types).write_yaml(catalogue)
    project = create_project(folder / "project", ["north", "south"])
    noted = trial_folder_of(project) / "trial.json"
    noted.parent.mkdir(exist_ok=True)
    noted.write_text(json.dumps({"port": 9092, "sites": ["north"], "processes": {"north": 123}}))
    field = folder / "field.txt"
    field.write_text('{"name": "mlp", "hidden": [16, 8]}')
    toml = project.app_folder / "pyproject.toml"

    def configured():
        found = project.read_server_configuration()
        assert isinstance(found, dict)
        project.read_site_names()

    def trial():
        found = read_running_trial(project)
        assert found is None or str(found["port"])

    return {
        "catalogue.yaml": kind(catalogue, as_yaml, yaml.safe_load(catalogue.read_text()),
                               lambda: LayerCatalogue.read_yaml(catalogue)),
        "trial.json": kind(noted, as_json, json.loads(noted.read_text()), trial),
        "pyproject.toml": kind(toml, as_toml, dict(project.read_server_configuration()), configured),
        "a field of the app": kind(field, as_json, json.loads(field.read_text()),
                                   lambda: _parse_field_value(field.read_text(errors="replace"))),
    }  # fmt: skip


def as_toml(value) -> bytes:
    """A table as TOML, the values of its fields as JSON, which TOML has too but for `null` and mappings."""
    try:
        rows = value.items() if isinstance(value, dict) else [("x", value)]
        lines = [f"{json.dumps(str(key))} = {json.dumps(item)}" for key, item in rows]
    except RecursionError:
        lines = ["x = " + "[" * 5000 + "]" * 5000]
    return "\n".join(["[tool.flwr.app.config]", *lines]).encode(errors="replace")


def of_commands(folder, kind, as_json):
    """What `reproduce` has measured, the link to MLflow, curves of warm starts, a vocabulary, weights for plots, and what a
    Parquet file tells of classes."""
    kept, link, curves = (
        folder / "measured.json",
        folder / trackers.MLFLOW_LINK_FILE,
        folder / method_views.WARM_START_FILE,
    )
    curves.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({"pfedla, warm": {"before": 0.5, "after": None}}))
    link.write_text(json.dumps({"run_id": "0123"}))
    curves.write_text(json.dumps({"new": {"score": "accuracy", "warm": [0.1, 0.5], "scratch": [None, 0.4]}}))
    words, table = folder / "vocabulary.json", folder / "classes.json"
    words.write_text(json.dumps(list(build_vocabulary(["b a", "a c"], size=5).tokens)))
    table.write_text(json.dumps({"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}))
    weights = folder / "weights"
    with warnings.catch_warnings(action="ignore"):
        pf.federate(small_clients(), PFedLA(lr=0.1), rounds=1, workers=0, out=weights)
    array = weights / "analysis" / "round-000001.npz"
    assert array.is_file()
    assert np.load(array).files

    def warm():
        method_views.html_warm_starts(folder, "k")
        warmstart_command._add_curves_to_file(curves, {})

    def classes():
        rows = pa.table({"label": [0, 1]}).replace_schema_metadata({b"huggingface": table.read_bytes()})
        found = class_names_from_hub_metadata(rows, "label")
        assert found is None or all(isinstance(name, str) for name in found)

    def measured():
        assert all(isinstance(value, dict) for value in cell_metrics._read_stored_measurements(kept).values())

    def linked():
        assert isinstance(trackers.read_mlflow_run_id(folder), str | None)

    return {
        "measured.json": kind(kept, as_json, json.loads(kept.read_text()), measured),
        "mlflow.json": kind(link, as_json, json.loads(link.read_text()), linked),
        "unseen/curves.json": kind(curves, as_json, json.loads(curves.read_text()), warm),
        "vocabulary": kind(words, as_json, json.loads(words.read_text()), lambda: load_vocabulary(words)),
        "classes of Parquet": kind(table, as_json, json.loads(table.read_text()), classes),
        "analysis/*.npz": kind(array, None, None, lambda: aggregation.read_aggregation_weights(weights)),
    }


def of_messages(folder, kind, as_json):
    """Heads and groups of tensors, as sites send them."""
    head, group = folder / "head.json", folder / "group"
    head.write_text(json.dumps({"client": "north", "run": "a", "round": 1, "metrics": {"accuracy": 0.5}}))
    group.write_bytes(pack_tensors({"w": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.int64)}))
    data = group.read_bytes()
    length = int.from_bytes(data[:8], "little")

    def packed(value):
        text = as_json(value)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    def unpacked():
        read_tensor_specs(group.read_bytes())
        unpack_tensors(group.read_bytes())

    return {
        "message: head": kind(head, as_json, json.loads(head.read_text()),
                              lambda: parse_head(head.read_text(errors="replace"))),
        "message: tensors": kind(group, packed, json.loads(data[8 : 8 + length]), unpacked),
    }  # fmt: skip


def forged(folder, kind, as_json, made):
    """The server's file of a checkpoint, with a sum that fits whatever is in it."""
    run = folder / "forged"
    shutil.copytree(made, run)
    shutil.rmtree(run / "checkpoint" / "round-000001")  # else the run would go on from there
    newest = run / "checkpoint" / "round-000002"
    file, sums = newest / "server.safetensors", newest / "complete.json"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    structure = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["structure"])
    tensors = safetensors.torch.load(data)

    def packed(value):
        return bytes(safetensors.torch.save(tensors, metadata={"structure": as_json(value).decode()}))

    def resumed():
        told = json.loads(sums.read_text())
        told["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        sums.write_text(json.dumps(told))
        shutil.rmtree(folder / "once more", ignore_errors=True)
        shutil.copytree(run, folder / "once more")
        with warnings.catch_warnings(action="ignore"):
            pf.resume(folder / "once more", clients=small_clients())

    assert serialize_state({"a": 1})
    return kind(file, packed, structure, resumed)
