"""A model of a run directory with the preprocessing that belongs to it: all that predictions for new rows need. The data of
the run are not read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import MODEL_WORDS, Algorithm, BringsNetwork
from polyfed.core.errors import UserError, nearest
from polyfed.core.files import read_file, user_path
from polyfed.core.metrics import probabilities
from polyfed.core.scratch import fill, new_module
from polyfed.core.stored import read_tensors
from polyfed.core.threads import one_thread
from polyfed.core.tree import Tree
from polyfed.core.typed import from_json
from polyfed.core.wrapping import wrap_network
from polyfed.data.features import Prepared, encode, from_description
from polyfed.models import ModelSpec
from polyfed.simulation.runs.configuration import method_of, section
from polyfed.simulation.runs.directory import read_config
from polyfed.simulation.runs.paths import file_name
from polyfed.simulation.runs.signature import ENDING as SIGNATURE
from polyfed.simulation.runs.signature import PREPROCESSING as _ENDING
from polyfed.simulation.runs.signature import read_signature, spec_of

_BATCH = 4096


@final
@dataclass(frozen=True, eq=False)
class KeptModel:
    """A client's personal network with what makes its inputs.

    Attributes: `network`, in evaluation mode; `prepared`, which reads rows and knows the names of classes; `client`, whose
    it is, for warnings.
    """

    network: nn.Module
    prepared: Prepared
    client: str

    def predict(self, table: Any) -> dict[str, list[Any]]:
        """What the network says of the rows of a `pyarrow.Table`, as columns: for classes `predicted` and a probability
        each; for labels a probability each; for regression the targets in their unit.

        Raises:
            UserError: a column is missing, or holds something else than in the run.
        """
        stored = encode(table, self.prepared.columns)
        self.prepared.warn_of_constants(stored, f"the rows for client {self.client!r}")
        with one_thread(), torch.inference_mode():
            outputs = torch.cat([self.network(self.prepared(part)).float() for part in torch.split(stored, _BATCH)])
        return answers(self.prepared.outputs(outputs), self.prepared)


def answers(outputs: Tensor, prepared: Prepared) -> dict[str, list[Any]]:
    """Outputs as columns: for classes `predicted` and a probability each; for labels a probability each; for regression the
    targets, which are in their unit already."""
    names = prepared.classes
    if prepared.task == "regression":
        return {name: outputs[:, i].tolist() for i, name in enumerate(names)}
    shares = probabilities(outputs, prepared.task)
    columns: dict[str, list[Any]] = {}
    if prepared.task == "classification":
        columns["predicted"] = [names[i] for i in shares.argmax(axis=1)]
    return columns | {f"probability of {name}": shares[:, i].tolist() for i, name in enumerate(names)}


def load_model(folder: str | Path, client: str | None = None) -> KeptModel:
    """The model of a client of a run whose data were a table.

    Args:
        folder: the run directory.
        client: its id; None for the only one.

    Raises:
        UserError: there is none of this client, its files are damaged, or its network is code that nobody allowed.
    """
    folder = user_path(folder, "the run directory")
    config, models = read_config(folder), folder / "models"
    known = sorted(path.name.removesuffix(_ENDING) for path in models.glob(f"*{_ENDING}"))
    if not known:
        raise UserError(
            f"{folder} has no model with preprocessing: polyfed predict is for runs of --data table that have ended"
        )
    name = (known[0] if len(known) == 1 else "") if client is None else file_name(client)
    if not name:
        raise UserError(f"{folder} has models of several clients; give --client with one of {', '.join(known)}")
    if name not in known:
        raise UserError(f"{folder} has no model of client {client!r}; {nearest(str(client), known)}")
    try:
        prepared = from_description(from_json(read_file(models / f"{name}{_ENDING}")))
        weights = read_tensors(models / f"{name}.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the model of {name!r} in {models} cannot be read ({error}); run again, or put back a copy"
        ) from error
    method, owner = method_of(section(config, "algorithm")), client or name
    if isinstance(method, BringsNetwork) and not method.requires & MODEL_WORDS:
        described = from_json(read_file(models / f"{name}.json"))
        return KeptModel(fill(method.build(described), weights).eval(), prepared, owner)
    told = models / f"{name}{SIGNATURE}"
    spec = read_signature(told)["network"] if told.is_file() else None
    if spec is not None:
        return KeptModel(
            _filled(wrap_network(method, new_module(spec_of(spec), seed=0), weights), weights, folder), prepared, owner
        )
    return KeptModel(_network(config, owner, prepared, weights, folder, method), prepared, owner)


def _filled(network: nn.Module, weights: Tree, folder: str | Path) -> nn.Module:
    try:
        return fill(network, weights).eval()
    except ValueError as error:
        raise UserError(f"a network of {folder} is not the one that was trained: {error}") from error


def _network(
    config: Mapping[str, Any],
    client: str,
    prepared: Prepared,
    weights: Tree,
    folder: str | Path,
    method: Algorithm[Any, Any],
) -> nn.Module:
    model = config.get("model")
    if model is None:
        raise UserError(
            f"the networks of {folder} were made in Python; predict there: polyfed.resume(...).predict(...)"
        )
    by_site = isinstance(model, Mapping) and not isinstance(model.get("name"), str)
    several = [model[client]] if by_site and client in model else model if isinstance(model, list) else [model]
    fitting: list[tuple[ModelSpec, nn.Module]] = []
    for one in several:
        arguments = {key: value for key, value in one.items() if key != "name"}
        spec = ModelSpec(one["name"], arguments, (len(prepared.features),), len(prepared.classes))
        network = wrap_network(method, new_module(spec, seed=0), weights)
        if _forms(network.state_dict()) == _forms(weights) and spec not in [known for known, _ in fitting]:
            fitting.append((spec, network))
    if len(fitting) != 1:
        raise UserError(f"{len(fitting)} of the networks of {folder} have the form of the weights of client {client!r}, "
                        "where one must; use polyfed.resume(...).predict(...) in Python")  # fmt: skip
    return fill(fitting[0][1], weights).eval()


def _forms(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
