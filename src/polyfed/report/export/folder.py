"""Exports a client's trained network to a folder, and opens such a folder for predictions."""

import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict, final

import safetensors.torch
import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.errors import UserError
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import (
    check_regular_file,
    create_private_folder_if_missing,
    expand_user_path,
    flush_folder_to_disk,
    open_file_for_overwrite,
    read_file,
)
from polyfed.core.io.trusted_code import is_code_trusted
from polyfed.core.io.values.keyword_names import rename_keywords, suggest_keywords
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.machine.package_versions import package_versions
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.tasks.task import TaskSpec
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.tabular.preprocessing import TablePreprocessor, encode_table
from polyfed.report.export.export_target import NETWORK_FILES, Format, check_export_target
from polyfed.report.export.formats import serialize_network
from polyfed.report.export.model_card import build_model_card
from polyfed.report.export.trained_model import (
    TrainedModel,
    build_trained_network,
    read_architecture_description,
    read_preprocessor,
    read_trained_model,
    trained_model_of_run,
)
from polyfed.simulation.results.run import Run
from polyfed.simulation.results.saved_model import SavedModel, convert_outputs_to_columns
from polyfed.simulation.results.saved_run import SavedRun
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import build_method, describe_method_and_settings
from polyfed.simulation.storage.directory import encode_json
from polyfed.simulation.storage.model_signature import BuiltInNetwork, ModelInput

SIGNATURE, PREPROCESSING, WEIGHTS, CARD, INPUTS_SCRIPT = (
    "signature.json", "preprocessing.json", "weights.safetensors", "README.md", "inputs.py"
)  # fmt: skip
DESCRIPTION = "description.json"


class ExportedSignature(TypedDict):
    """Describes the fields that polyfed reads from an exported folder's `signature.json`."""

    client: str
    task: TaskSpec
    inputs: list[ModelInput]
    network: BuiltInNetwork | None
    algorithm: dict[str, Any] | None
    file: str | None


@rename_keywords(network="model", to="out")
@suggest_keywords
def export_model(
    run: Run | SavedRun | str | Path,
    client: str | None,
    out: str | Path,
    *,
    format: Format = "torchscript",
    model: Architecture | None = None,
) -> Path:
    """Writes a client's trained network to a new folder, which can be used without polyfed and without the data.

    The folder holds the network with its preprocessing as TorchScript or ONNX, its weights, its signature, and a model
    card (README.md). For rows of a table it also holds `inputs.py`, which reads them. The folder is written whole or
    not at all.

    Args:
        run: what `federate` or `load` returned, the directory of a run, or a site's folder of a run.
        client: its id; None for the only one.
        out: folder to create.
        format: "torchscript", "onnx" (pip install 'polyfed[export]'), or "weights" for these alone.
        model: builds the network, as `Client.model`, for a directory that does not say how: of clients that were made in
            Python, or of a site.

    Returns:
        The folder.

    Raises:
        UserError: no such client, `out` exists, the run has no models, the network cannot be written in this format, or it
            is code that nobody allowed; nothing has been written.

    >>> import tempfile
    >>> from polyfed.simulation.federate import federate
    >>> from polyfed.testing import small_clients
    >>> run = federate(small_clients(), "fedavg", rounds=1, workers=0)
    >>> folder = export_model(run, "client-0", tempfile.mkdtemp() + "/north")
    >>> sorted(path.name for path in folder.iterdir())
    ['README.md', 'network.ts', 'signature.json', 'weights.safetensors']
    """
    target = expand_user_path(out, "the folder to create")
    check_export_target(target, format)
    if isinstance(run, Run):
        if model is not None:
            raise UserError("model= is for directories; a run knows the networks of its clients")
        ids = list(run.federation.clients)
        if client is None and len(ids) != 1:
            raise UserError(f"the run has several clients; name one of {', '.join(ids)}")
        trained = trained_model_of_run(run, ids[0] if client is None else client)
    else:
        folder = run.out if isinstance(run, SavedRun) else expand_user_path(run, "the run directory")
        trained = read_trained_model(folder, client, model)
    contents = _folder_contents(trained, format)
    _write_folder(target, contents)
    return target


def _folder_contents(trained: TrainedModel, format: Format) -> dict[str, bytes]:
    """Builds the content of each file of the exported folder, by file name."""
    content, shape, checked = serialize_network(trained, format)
    file, version_by_package = NETWORK_FILES[format], package_versions()
    meaning = get_task(trained.signature["task"]).outputs_meaning
    if trained.preprocessor is not None and trained.preprocessor.target:
        meaning = "the targets, in the unit of the table."
    outputs = {"name": "outputs", "shape": list(shape), "dtype": "float32", "meaning": meaning}
    # By which method polyfed builds a network that the method brought.
    algorithm = None
    if trained.architecture_description is not None and trained.algorithm is not None:
        algorithm = describe_method_and_settings(trained.algorithm, Settings())["algorithm"]
    signature = {
        **trained.signature,
        "format": 1,
        "method": trained.method_name,
        "outputs": outputs,
        "classes": list(trained.class_names),
        "file": file,
        "algorithm": algorithm,
        "versions": version_by_package,
    }
    weights = {name: tensor.detach().contiguous().clone() for name, tensor in trained.network.state_dict().items()}
    file_contents = {
        SIGNATURE: encode_json(signature),
        WEIGHTS: safetensors.torch.save(weights),
        CARD: build_model_card(trained, file, outputs, outputs_checked=checked, versions=version_by_package).encode(),
    }
    if file is not None and content is not None:
        file_contents[file] = content
    if trained.preprocessor is not None:
        file_contents[PREPROCESSING] = encode_json(trained.preprocessor.to_json_dict())
        file_contents[INPUTS_SCRIPT] = (
            files("polyfed.report.export").joinpath("templates", "inputs.py.txt").read_bytes()
        )
    if trained.architecture_description is not None:
        file_contents[DESCRIPTION] = encode_json(trained.architecture_description)
    return file_contents


def _write_folder(target: Path, contents: dict[str, bytes]) -> None:
    """Writes files to a temporary folder, and renames it to `target` when all are on the disk."""
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}")
    try:
        create_private_folder_if_missing(partial, parents=True)
        try:
            for name, content in contents.items():
                with open_file_for_overwrite(partial / name, private=False) as file:
                    file.write(content)
            flush_folder_to_disk(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush_folder_to_disk(target.parent)
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}); choose another folder") from error


def is_exported_folder(folder: Path) -> bool:
    """Returns True if the folder contains a file `signature.json`, which `export_model` writes."""
    return (folder / SIGNATURE).is_file()


@final
class ExportedModel:
    """Opens a folder that `export_model` wrote for a network on a table, and predicts with the network.

    The network is built as in a run: by polyfed, or by code that the caller allowed.

    Args:
        folder: that `export_model` wrote.

    Attributes:
        prepared: converts rows to inputs, and knows how files of rows are read.

    Raises:
        UserError: the file is damaged, its inputs are not a table, or its network is code that nobody allowed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            content = parse_json(read_file(folder / SIGNATURE))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / SIGNATURE} cannot be read ({error}); export again") from error
        if error_text := validation_error(content, ExportedSignature):
            raise UserError(f"{folder / SIGNATURE} is damaged: {error_text}; export again")
        preprocessor = read_preprocessor(folder / PREPROCESSING)
        if preprocessor is None:
            kinds = ", ".join(input_spec["name"] for input_spec in content["inputs"])
            raise UserError(
                f"{folder} takes {kinds}, and polyfed predict reads tables; {folder / CARD} shows how to use it"
            )
        self.prepared: TablePreprocessor = preprocessor
        self._client: str = content["client"]
        self._script: Any = None
        self._network: nn.Module | None = None
        script = folder / NETWORK_FILES["torchscript"]  # type: ignore[operator]  # which is a name
        network_spec = content["network"]
        width = len(preprocessor.feature_names)
        if network_spec is not None and network_spec["input_shape"] != [width]:
            raise UserError(
                f"{folder / PREPROCESSING} gives {width} features, and its network takes {network_spec['input_shape']}: one "
                "of the two is of another model; export again"
            )
        is_user_code = network_spec is not None and ":" in network_spec["name"]
        if (
            content["algorithm"] is None
            and (network_spec is None or is_user_code)
            and script.is_file()
            and is_code_trusted(str(script))
        ):
            self._script = _load_script(script)
            return
        if content["algorithm"] is None and network_spec is None:
            raise UserError(
                f"{folder} holds its network as {script.name} alone, which is code; if you trust who wrote it, give "
                "--trust-code"
            )
        try:
            weights = read_safetensors(folder / WEIGHTS)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / WEIGHTS} cannot be read ({error}); export again") from error
        method = None if content["algorithm"] is None else build_method(content["algorithm"])
        description = None if method is None else read_architecture_description(folder / DESCRIPTION)
        self._network = build_trained_network(network_spec, weights, folder, None, method, description)

    def predict(self, table: Any) -> dict[str, list[Any]]:
        """Predicts every row of a table, as `polyfed.simulation.results.saved_model.SavedModel.predict` does."""
        if self._network is not None:
            return SavedModel(self._network, self.prepared, self._client).predict(table)
        stored = encode_table(table, self.prepared.columns)
        self.prepared.warn_of_unlike_rows(stored, f"the rows for client {self._client!r}")
        with exclusive_single_torch_thread_with_grad(), torch.inference_mode():
            outputs: Tensor = self._script(stored)
        return convert_outputs_to_columns(outputs, self.prepared.task, self.prepared.classes)


def _load_script(script: Path) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated
        try:
            return torch.jit.load(str(check_regular_file(script)))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise UserError(f"{script} cannot be read ({str(error).splitlines()[0]}); export again") from error
