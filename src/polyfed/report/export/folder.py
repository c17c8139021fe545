"""The exported folder: written as a whole or not at all, and read again."""

import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict, final

import safetensors.torch
import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.code import trusted
from polyfed.core.errors import UserError
from polyfed.core.files import check_file, make_folder, new_file, read_file, sync_folder, user_path
from polyfed.core.stored import read_tensors
from polyfed.core.threads import one_thread
from polyfed.core.typed import conforms, from_json
from polyfed.data.features import Prepared, encode
from polyfed.report.export.card import card
from polyfed.report.export.formats import FILES, Format, check_format, written
from polyfed.report.export.trained import (
    Trained,
    built,
    of_directory,
    of_run,
    read_description,
    read_prepared,
)
from polyfed.simulation.kept import KeptModel, answers
from polyfed.simulation.runs.configuration import described, method_of
from polyfed.simulation.runs.directory import as_json, versions
from polyfed.simulation.runs.results import Run
from polyfed.simulation.runs.signature import Input, Network
from polyfed.simulation.settings import Settings

SIGNATURE, PREPROCESSING, WEIGHTS, CARD, ROWS = (
    "signature.json", "preprocessing.json", "weights.safetensors", "README.md", "inputs.py"
)  # fmt: skip
DESCRIPTION = "description.json"
_MEANINGS = {
    "classification": "logits, whose softmax is the probability of each class.",
    "multilabel": "logits, whose sigmoid is the probability of each label.",
    "regression": "the targets.",
}


class Exported(TypedDict):
    """What `signature.json` of an exported folder holds, as far as polyfed reads it again."""

    client: str
    task: str
    inputs: list[Input]
    network: Network | None
    algorithm: dict[str, Any] | None
    file: str | None
    reading: dict[str, Any]


def export_model(
    run: Run | str | Path,
    client: str | None,
    to: str | Path,
    *,
    format: Format = "torchscript",
    network: Architecture | None = None,
) -> Path:
    """Writes a client's trained network to a new folder, from which it can be used without polyfed and without the data:
    the network with its preprocessing as TorchScript or ONNX, its weights, its signature, and a model card (README.md). For
    rows of a table also `inputs.py`, which reads them.

    Args:
        run: what `federate` returned, the directory of a run, or a site's folder of a run.
        client: its id; None for the only one.
        to: folder to create.
        format: "torchscript", "onnx" (pip install 'polyfed[export]'), or "weights" for these alone.
        network: builds the network, for a directory that does not say how: of clients that were made in Python, or of a
            site.

    Returns:
        The folder.

    Raises:
        UserError: no such client, `to` exists, the run has no models, the network cannot be written in this format, or it
            is code that nobody allowed; nothing has been written.

    >>> import tempfile
    >>> from polyfed.simulation.federation import federate
    >>> from polyfed.testing import small_clients
    >>> run = federate(small_clients(), "fedavg", rounds=1, workers=0)
    >>> folder = export_model(run, "client-0", tempfile.mkdtemp() + "/north")
    >>> sorted(path.name for path in folder.iterdir())
    ['README.md', 'network.ts', 'signature.json', 'weights.safetensors']
    """
    target = user_path(to, "the folder to create")
    check_format(format)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists; choose another folder")
    if isinstance(run, Run):
        if network is not None:
            raise UserError("network= is for directories; a run knows the networks of its clients")
        ids = list(run.federation.clients)
        if client is None and len(ids) != 1:
            raise UserError(f"the run has several clients; name one of {', '.join(ids)}")
        trained = of_run(run, ids[0] if client is None else client)
    else:
        trained = of_directory(user_path(run, "the run directory"), client, network)
    contents = _contents(trained, format)
    _write(target, contents)
    return target


def _contents(trained: Trained, format: Format) -> dict[str, bytes]:
    """Files by name."""
    content, shape, checked = written(trained, format)
    file, known = FILES[format], versions()
    meaning = _MEANINGS[trained.signature["task"]]
    if trained.prepared is not None and trained.prepared.target:
        meaning = "the targets, in the unit of the table."
    outputs = {"name": "outputs", "shape": list(shape), "dtype": "float32", "meaning": meaning}
    # By which method polyfed builds a network that the method brought.
    algorithm = None
    if trained.description is not None and trained.algorithm is not None:
        algorithm = described(trained.algorithm, Settings())["algorithm"]
    told = {
        **trained.signature, "format": 1, "method": trained.method, "outputs": outputs, "classes": list(trained.class_names),
        "file": file, "reading": dict(trained.reading), "algorithm": algorithm, "versions": known,
    }  # fmt: skip
    weights = {name: tensor.detach().contiguous().clone() for name, tensor in trained.network.state_dict().items()}
    found = {
        SIGNATURE: as_json(told),
        WEIGHTS: safetensors.torch.save(weights),
        CARD: card(trained, file, outputs, checked=checked, versions=known).encode(),
    }
    if file is not None and content is not None:
        found[file] = content
    if trained.prepared is not None:
        found[PREPROCESSING] = as_json(trained.prepared.described())
        found[ROWS] = files("polyfed.report.export").joinpath("templates", "inputs.py.txt").read_bytes()
    if trained.description is not None:
        found[DESCRIPTION] = as_json(trained.description)
    return found


def _write(target: Path, contents: dict[str, bytes]) -> None:
    """Writes a folder beside its place and gives it its name when all is on the disk."""
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}")
    try:
        make_folder(partial, parents=True)
        try:
            for name, content in contents.items():
                with new_file(partial / name, private=False) as file:
                    file.write(content)
            sync_folder(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}); choose another folder") from error


def is_exported(folder: Path) -> bool:
    """Whether a folder is one that `export_model` wrote."""
    return (folder / SIGNATURE).is_file()


@final
class Opened:
    """An exported folder of a network on a table, opened for predictions. Its network is built as in a run: by polyfed, or
    as code that the caller allowed.

    Args:
        folder: that `export_model` wrote.

    Raises:
        UserError: it is damaged, its inputs are no table, or its network is code that nobody allowed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            content = from_json(read_file(folder / SIGNATURE))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / SIGNATURE} cannot be read ({error}); export again") from error
        if wrong := conforms(content, Exported):
            raise UserError(f"{folder / SIGNATURE} is damaged: {wrong}; export again")
        self.reading: dict[str, Any] = content["reading"]
        prepared = read_prepared(folder / PREPROCESSING)
        if prepared is None:
            kinds = ", ".join(one["name"] for one in content["inputs"])
            raise UserError(
                f"{folder} takes {kinds}, and polyfed predict reads tables; {folder / CARD} shows how to use it"
            )
        self._prepared: Prepared = prepared
        self._client: str = content["client"]
        self._script: Any = None
        self._network: nn.Module | None = None
        script = folder / FILES["torchscript"]  # type: ignore[operator]  # which is a name
        known = content["network"]
        own = known is not None and ":" in known["name"]
        if content["algorithm"] is None and (known is None or own) and script.is_file() and trusted(str(script)):
            self._script = _load_script(script)
            return
        if content["algorithm"] is None and known is None:
            raise UserError(
                f"{folder} holds its network as {script.name} alone, which is code; if you trust who wrote it, give "
                "--trust-code"
            )
        try:
            weights = read_tensors(folder / WEIGHTS)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / WEIGHTS} cannot be read ({error}); export again") from error
        method = None if content["algorithm"] is None else method_of(content["algorithm"])
        description = None if method is None else read_description(folder / DESCRIPTION)
        self._network = built(known, weights, folder, None, method, description)

    def predict(self, table: Any) -> dict[str, list[Any]]:
        """As `polyfed.simulation.kept.KeptModel.predict`."""
        if self._network is not None:
            return KeptModel(self._network, self._prepared, self._client).predict(table)
        stored = encode(table, self._prepared.columns)
        self._prepared.warn_of_constants(stored, f"the rows for client {self._client!r}")
        with one_thread(), torch.inference_mode():
            found: Tensor = self._script(stored)
        return answers(found, self._prepared)


def _load_script(script: Path) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated
        try:
            return torch.jit.load(str(check_file(script)))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise UserError(f"{script} cannot be read ({str(error).splitlines()[0]}); export again") from error
