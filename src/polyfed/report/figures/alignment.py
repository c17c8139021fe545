"""Measures how similar any two clients' representations of the same examples are (linear CKA), before and after a run.

FedHeNN's proximal term increases this similarity.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.alignment.pairwise_cka import pairwise_cka
from polyfed.alignment.representations import compute_representations
from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import concatenate_batches, first_leaf, input_spec_of, tree_map
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import build_module, fill_module, initial_state
from polyfed.simulation.results.run import Run
from polyfed.simulation.storage.directory import read_config
from polyfed.simulation.storage.paths import safe_file_name

if TYPE_CHECKING:
    pass

_MOST = 256  # examples that `pairwise_cka` compares


@final
@dataclass(frozen=True, eq=False)
class RepresentationAlignment:
    """Holds the linear CKA of any two clients' representations, before and after a run.

    Attributes:
        clients: the N clients' ids, ascending.
        cka_before: float64, (N, N), of the initial networks; 1 for clients of one architecture, which share initial weights.
        cka_after: float64, (N, N), of the personal networks after the last round.

    >>> alignment = RepresentationAlignment(("a", "b"), np.array([[1, 0.25], [0.25, 1]]), np.array([[1, 0.75], [0.75, 1]]))
    >>> alignment.mean_cka_of_initial_networks, alignment.mean_cka_of_trained_networks
    (0.25, 0.75)
    """

    clients: tuple[str, ...]
    cka_before: NDArray[np.float64]
    cka_after: NDArray[np.float64]

    @property
    def mean_cka_of_initial_networks(self) -> float:
        """Returns the mean linear CKA before training of any two clients' representations."""
        return _mean_over_pairs(self.cka_before)

    @property
    def mean_cka_of_trained_networks(self) -> float:
        """Returns the mean linear CKA after training of any two clients' representations."""
        return _mean_over_pairs(self.cka_after)


def measure_alignment(
    run: Run | str | Path,
    examples: Examples | None = None,
    rows: int = _MOST,
    *,
    clients: Sequence[Client] | None = None,
    module: str | Mapping[str, str] | None = None,
) -> RepresentationAlignment:
    """Measures the linear CKA of clients' networks on the same examples, before and after training.

    Works for any method with one network per client.

    Args:
        run: a run, or its directory, which is only read.
        examples: unseen examples; None takes test examples of all clients evenly, each prepared as for its owner's network.
        rows: number of examples to compare on, 2 to 256, taken evenly if there are more.
        clients: the clients of a run directory, as given to `federate`, or from
            `polyfed.simulation.experiment.rebuild_clients` if a file describes the run. Their training examples are not
            used.
        module: name of the module whose input is the representation, for all clients or by client's id; None finds the
            last linear layer of each network. For a FedHeNN run with a `module`, give the same.

    Raises:
        UserError: the run is missing, has no personal networks, or does not fit the clients and examples.

    >>> from polyfed.simulation.federate import federate
    >>> from polyfed.testing import small_clients
    >>> alignment = measure_alignment(federate(small_clients(), "local", rounds=1, workers=0))
    >>> alignment.clients, round(alignment.mean_cka_of_initial_networks, 6), alignment.mean_cka_of_trained_networks < 1
    (('client-0', 'client-1', 'client-2'), 1.0, True)
    """
    if not 2 <= rows <= _MOST:
        raise UserError(f"rows must be from 2 to {_MOST}, as many as are compared, got {rows}")
    if isinstance(run, Run):
        if clients is not None:
            raise UserError("clients are for a run directory; a Run has its own, so leave them out")
        all_clients = [client for _, client in sorted(run.federation.clients.items())]
        seed = run.federation.settings.seed
    else:
        all_clients, seed = _load_clients_and_seed(expand_user_path(run, "the run directory"), clients)
    if len(all_clients) < 2:
        raise UserError("the run has one client, so that there is no pair to compare; give a run of at least 2")
    shared_examples = _test_examples(all_clients, rows) if examples is None else _evenly_spaced_examples(examples, rows)
    before: list[Tensor] = []
    after: list[Tensor] = []
    with exclusive_single_torch_thread_with_grad():
        for client in all_clients:
            factory = client.model
            if factory is None:
                raise UserError(
                    f"client {client.id!r} has no network of its own (Client.model), so that its initial weights are "
                    "not known; give a run whose clients have one"
                )
            start = fill_module(build_module(factory, seed=0), initial_state(factory, seed))
            end = (
                run.model(client.id)
                if isinstance(run, Run)
                else _load_personal_model(expand_user_path(run), client.id, factory)
            )
            name = module.get(client.id) if isinstance(module, Mapping) else module
            for model, features in ((start, before), (end, after)):
                with _client_named_in_errors(client.id):
                    features.append(compute_representations(model.eval(), shared_examples, module=name))
    tables = [np.clip(pairwise_cka(features).numpy(), 0, 1) for features in (before, after)]
    return RepresentationAlignment(tuple(client.id for client in all_clients), tables[0], tables[1])


def _mean_over_pairs(table: NDArray[np.float64]) -> float:
    number = len(table)
    return float((table.sum() - np.trace(table)) / (number * (number - 1)))


def _load_clients_and_seed(folder: Path, clients: Sequence[Client] | None) -> tuple[list[Client], int]:
    """Returns the clients of a run sorted by id, and the seed of the run in `folder`."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run directory: it has no config.yaml")
    config = read_config(folder)
    if clients is None:
        # The caller says whether data may be read again: a report only reads the run directory.
        source = (
            "from polyfed.simulation.experiment import rebuild_clients; from polyfed.simulation.storage.directory import "
            "read_config; clients, _ = rebuild_clients(read_config(folder), folder)"
            if "data" in config
            else "they were made in Python"
        )
        raise UserError(f"{folder} does not hold its clients; give them, measure_alignment(..., clients=...): {source}")
    sorted_clients = sorted(clients, key=lambda client: client.id)
    id_by_file = {safe_file_name(client.id): client.id for client in sorted_clients}
    stored_names = {file.stem for file in (folder / "models").glob("*.safetensors") if not file.name.startswith(".")}
    if not stored_names:
        raise UserError(
            f"{folder} has no personal models (models/*.safetensors); finish the run, `polyfed resume {folder}`"
        )
    if stored_names != id_by_file.keys():
        mismatches = [f"no model of client {id_by_file[name]!r}" for name in sorted(id_by_file.keys() - stored_names)]
        mismatches += [f"a model {name!r} of none of the clients" for name in sorted(stored_names - id_by_file.keys())]
        raise UserError(f"{folder} has {mismatches[0]}; give all clients of this run, and only them")
    return sorted_clients, int(config.get("seed", 0))


def _load_personal_model(folder: Path, client: str, factory: Architecture) -> nn.Module:
    """Loads a client's personal network from the run directory."""
    file = folder / "models" / f"{safe_file_name(client)}.safetensors"
    try:
        return fill_module(build_module(factory, seed=0), read_safetensors(file))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read as the network of client {client!r} ({error}); give the clients of this run, or "
            "run it again"
        ) from error


def _evenly_spaced_examples(examples: Examples, rows: int) -> Examples:
    """Selects at most `rows` of the examples, at evenly spaced positions."""
    number = min(rows, len(examples))
    if number < 2:
        raise UserError(f"examples must be at least 2, got {len(examples)}; give more")
    places = torch.linspace(0, len(examples) - 1, number).long()
    return examples.select(places.to(examples.device))


def _test_examples(clients: Sequence[Client], rows: int) -> Examples:
    """Selects test examples of all clients, each prepared as its owner's network needs it.

    Every client contributes the same number, plus or minus one, as far as it has them.
    """
    inputs: list[Any] = []
    for k, client in enumerate(clients):
        number = min((k + 1) * rows // len(clients) - k * rows // len(clients), len(client.test))
        if number:
            places = torch.linspace(0, len(client.test) - 1, number).long()
            inputs.append(tree_map(Tensor.cpu, client.test.batch(places.to(client.test.device))[0]))
    if sum(len(first_leaf(x)) for x in inputs) < 2:
        raise UserError("the clients have fewer than 2 test examples; give examples=...")
    if len(forms := {input_spec_of(x) for x in inputs}) > 1:
        forms_text = " and ".join(sorted(map(str, forms)))
        raise UserError(
            f"the clients' inputs differ in form ({forms_text}); networks can be compared on common inputs only"
        )
    x = concatenate_batches(inputs)
    return Examples(x, torch.zeros(len(first_leaf(x))))


@contextmanager
def _client_named_in_errors(client: str) -> Iterator[None]:
    """Adds the client's id to errors that are raised inside the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"client {client!r}: {error}") from error
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(
            f"client {client!r}: its network does not take these examples ({error}); give examples=... of its form"
        ) from error
