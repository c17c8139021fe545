"""Loads a client's model from a run directory together with its preprocessing, and predicts for new rows of a table.

The data of the run are not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.core.io.values.validation import DAMAGED_FILE_ERRORS, parse_json
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.methods.capabilities import BringsNetwork, wrap_network_if_method_wraps
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.module_cache import build_module, fill_module
from polyfed.core.state_dict import StateDict
from polyfed.core.tasks.task import Task
from polyfed.data.tabular.preprocessing import TablePreprocessor, encode_table, preprocessor_from_json
from polyfed.simulation.results.site_rows import predict_rows_by_site
from polyfed.simulation.storage.configuration import build_method, read_section
from polyfed.simulation.storage.directory import read_config, read_manifest
from polyfed.simulation.storage.integrity import check_model_unchanged
from polyfed.simulation.storage.model_signature import PREPROCESSING_SUFFIX, find_factory_of_signature, read_signature
from polyfed.simulation.storage.model_signature import SIGNATURE_SUFFIX as SIGNATURE
from polyfed.simulation.storage.paths import choose_stored_model

_BATCH = 4096


@final
@dataclass(frozen=True, eq=False)
class SavedModel:
    """Holds a client's personal network, and the preprocessing that converts rows of a table to its inputs.

    Attributes:
        network: in evaluation mode.
        prepared: converts rows to inputs, and knows the names of classes.
        client: id of the client, for warnings.
    """

    network: nn.Module
    prepared: TablePreprocessor
    client: str

    def predict(self, table: Any) -> dict[str, list[Any]]:
        """Predicts for each row of a `pyarrow.Table`, and returns `{column name: one value for each row}`.

        Returns:
            Columns: for classes `predicted` and a probability each; for labels a probability each; for regression the
                targets in their unit.

        Raises:
            UserError: a column is missing, or has another type than in the run.
        """
        return convert_outputs_to_columns(self.outputs(table), self.prepared.task, self.prepared.classes)

    def outputs(self, table: Any) -> Tensor:
        """Returns the network's outputs for each row of a `pyarrow.Table`, shape (n, ...); targets in their unit."""
        stored = encode_table(table, self.prepared.columns)
        self.prepared.warn_of_unlike_rows(stored, f"the rows for client {self.client!r}")
        with exclusive_single_torch_thread_with_grad(), torch.inference_mode():
            outputs = torch.cat([self.network(self.prepared(part)).float() for part in torch.split(stored, _BATCH)])
        return self.prepared.unscale_outputs(outputs)


def convert_outputs_to_columns(outputs: Tensor, task: Task, names: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Converts outputs to a table of predictions, `{column: a value for each row}`; the task decides which columns.

    Args:
        outputs: of a network; for regression in the unit of the table already.
        task: of the client.
        names: of the outputs; empty for their numbers.

    Raises:
        UserError: outputs are NaN or infinite.
    """
    if len(wrong_rows := (~torch.isfinite(outputs.flatten(1)).all(1)).nonzero().flatten()):
        raise UserError(
            f"the network's outputs are NaN or infinite for {format_row_numbers(wrong_rows.numpy())}: the values are far "
            "from those that it was trained on; correct them, or leave these rows out"
        )
    num_outputs = outputs.shape[1 if outputs.dim() > 3 else -1]  # images of outputs have them first, texts last
    return task.prediction_columns(outputs, names or list(map(str, range(num_outputs))))


def predict_saved_rows(folder: Path, rows: Any, client: str | None = None) -> dict[str, list[Any]]:
    """Predicts rows of a table by the run directory of a run on table data, as `SavedModel.predict` does.

    Args:
        folder: the run directory.
        rows: as `TablePreprocessor.encode` takes them.
        client: whose network predicts; None for the network of each row's site, or for the only one.

    Raises:
        UserError: as `load_saved_model`; or without a client, a row has no site or that of no client.
    """
    clients = list(_list_clients_by_file(folder).values())
    model = load_saved_model(folder, client or clients[0])
    if client is not None or len(clients) == 1:
        return model.predict(model.prepared.read(rows))
    outputs = predict_rows_by_site(
        rows, clients, model.prepared, lambda site, part: load_saved_model(folder, site).outputs(part)
    )
    return convert_outputs_to_columns(outputs, model.prepared.task, model.prepared.classes)


def load_saved_model(folder: str | Path, client: str | None = None) -> SavedModel:
    """Loads a client's model and preprocessing from the directory of a run on table data.

    Args:
        folder: the run directory.
        client: its id; None for the only one.

    Raises:
        UserError: there is no model of this client, its files are damaged, or its network needs code that is not
            trusted.
    """
    folder = expand_user_path(folder, "the run directory")
    config, models = read_config(folder), folder / "models"
    name = choose_stored_model(folder, _list_clients_by_file(folder), client)
    check_model_unchanged(folder, read_manifest(folder), name)
    try:
        prepared = preprocessor_from_json(parse_json(read_file(models / f"{name}{PREPROCESSING_SUFFIX}")))
        weights = read_safetensors(models / f"{name}.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the model of {name!r} in {models} cannot be read ({error}); run again, or put back a copy"
        ) from error
    method, owner = build_method(read_section(config, "algorithm")), client or name
    if isinstance(method, BringsNetwork) and not method.requires & MODEL_REQUIREMENTS:
        try:
            network = method.build_from_description(parse_json(read_file(models / f"{name}.json")))
        except (OSError, *DAMAGED_FILE_ERRORS) as error:
            raise UserError(
                f"the description of the network in {models / name}.json cannot be read ({error}); run again, or put back a "
                "copy"
            ) from error
        return SavedModel(_fill_for_evaluation(network, weights, folder), prepared, owner)
    try:
        factory = find_factory_of_signature(read_signature(models / f"{name}{SIGNATURE}"))
    except OSError as error:
        raise UserError(f"the signature of {name!r} in {models} cannot be read ({error}); put back a copy") from error
    if factory is None:
        raise UserError(
            f"the network of {owner!r} in {folder} was made in Python; predict there: "
            f"polyfed.load({str(folder)!r}).predict({owner!r}, rows, model=MyNetwork)"
        )
    network = wrap_network_if_method_wraps(method, build_module(factory, seed=0), weights)
    return SavedModel(_fill_for_evaluation(network, weights, folder), prepared, owner)


def _list_clients_by_file(folder: Path) -> dict[str, str]:
    """Returns the client of each stored model by the name of its files, which differs for ids with capitals or spaces."""
    names = sorted(
        path.name.removesuffix(PREPROCESSING_SUFFIX) for path in folder.glob(f"models/*{PREPROCESSING_SUFFIX}")
    )
    if not names:
        raise UserError(
            f"{folder} has no model with preprocessing: polyfed predict is for runs on a table (a CSV or Parquet file, or "
            "heart) that have ended; in Python, run.predict takes other inputs"
        )
    signatures = {name: folder / "models" / f"{name}{SIGNATURE}" for name in names}
    return {name: str(read_signature(path)["client"]) if path.is_file() else name for name, path in signatures.items()}


def _fill_for_evaluation(network: nn.Module, weights: StateDict, folder: str | Path) -> nn.Module:
    """Loads the weights into a network and sets it to evaluation mode; raises a `UserError` if they do not fit."""
    try:
        return fill_module(network, weights).eval()
    except ValueError as error:
        raise UserError(f"a network of {folder} is not the one that was trained: {error}") from error
