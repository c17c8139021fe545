"""Checks a client of a source when it is first drawn, as the clients of a list are checked before round 1."""

import warnings
from collections.abc import Mapping
from typing import Any, final

from polyfed.core.algorithm import Algorithm, Architecture, Client, DataSpec
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.examples.pytree import input_spec_of
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.core.training.config import LocalTraining
from polyfed.data.sources.client_source import ClientSource
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.clients.client_init import check_client_init
from polyfed.simulation.checks.clients.data_leakage import warn_of_test_leakage
from polyfed.simulation.checks.clients.token_range import check_tokens_in_vocabulary
from polyfed.simulation.checks.networks.network_layers import cached_module_of, check_batch_norm_gets_no_single_example
from polyfed.simulation.checks.networks.trial_forward import output_shape
from polyfed.simulation.checks.settings.training_options import check_training_options


def make_client(source: ClientSource, client: str) -> Client:
    """Makes a client of a source.

    Raises:
        UserError: the source fails, or makes something else.
    """
    try:
        new_client = source.client(client)
    except UserError:
        raise
    except Exception as error:  # whatever a user's source raises
        raise UserError(f"the source cannot make client {client!r}: {describe_exception(error)}") from error
    if not isinstance(new_client, Client):
        raise UserError(f"source.client({client!r}) must return a polyfed.Client, got {type(new_client).__name__}")
    if new_client.id != client:
        raise UserError(
            f"source.client({client!r}) returned the client {new_client.id!r}; it must have the id that was asked for"
        )
    return new_client


@final
class DrawnClientChecker:
    """Checks the clients of a source one by one against its first client, with the error messages of lists of clients.

    Networks and forms of inputs are checked once each; labels, tokens and sizes of minibatches at every client.

    Args:
        source: makes the clients.
        algorithm: the method of the run.
        first: the first client, which has been checked already.
        network: the network of the method, if it brings one for all clients.
        data_spec: the form of the data for which the server has built its state, if the method asks for one.
        num_examples, architectures: what the server knows of the clients; empty where it knows nothing.
    """

    def __init__(
        self,
        source: ClientSource,
        algorithm: Algorithm[Any, Any],
        first: Client,
        network: Architecture | None,
        data_spec: DataSpec | None,
        num_examples: Mapping[str, int],
        architectures: Mapping[str, str],
    ) -> None:
        self._source, self._algorithm, self._network, self._data_spec = source, algorithm, network, data_spec
        self._num_examples, self._architectures = num_examples, architectures
        self._first_id, self._task, self._classes = first.id, str(first.task), first.train.classes
        self._preprocessing = first.train.transform if isinstance(first.train.transform, TablePreprocessor) else None
        self._shapes: dict[Any, dict[str, tuple[int, ...]]] = {}  # of the outputs, by kind of client and split
        self._checked: set[str] = {first.id}

    def check_once(self, client: Client) -> None:
        """Raises a `UserError` if a client does not suit the others, or the method; checks each client once.

        Raises:
            UserError: as `federate` raises it for a list of clients.
        """
        if client.id not in self._checked:
            self._check(client)
            self._checked.add(client.id)

    def check_number_of_examples(self, client: Client) -> None:
        """Raises a `UserError` if a client has not the number of examples that the source's manifest says."""
        number = self._num_examples.get(client.id, len(client.train))
        if number != len(client.train):
            raise UserError(
                f"client {client.id!r} has {len(client.train)} training examples, and the source's manifest says {number}"
            )

    def _check(self, client: Client) -> None:
        self.check_number_of_examples(client)
        if str(client.task) != self._task:
            tasks = sorted({str(client.task), self._task})
            raise UserError(f"clients of one federation must have one task, got {' and '.join(tasks)}")
        if client.train.classes != self._classes:
            raise UserError(
                f"client {client.id!r}: its labels are texts of other classes than those of {self._first_id!r}; the clients "
                "of a source are numbered one by one, so give labels as numbers"
            )
        self._check_preprocessing(client)
        warn_of_test_leakage([client])
        if (limit := client.task.target_warning(client.train.labels, client.test.labels)) is not None:
            warnings.warn(f"client {client.id!r} has {limit}", UserWarning, stacklevel=2)
        shapes = self._check_kind(client)
        architecture = self._architectures.get(client.id)
        if architecture and client.model is not None and cached_module_of(client).architecture != architecture:
            raise UserError(
                f"client {client.id!r} has another network than the source's manifest says (that of {self._first_id!r}, "
                "where it says none); name all networks in models, and in model_of which client has which"
            )
        self._check_examples(client, shapes)

    def _check_preprocessing(self, client: Client) -> None:
        transform = client.train.transform
        if (
            isinstance(transform, TablePreprocessor)
            and transform.scope == "federated"
            and transform != self._preprocessing
        ):
            raise UserError(
                f"client {client.id!r}: its table has another preprocessing than that of {self._first_id!r}, and the "
                "clients of a source cannot agree on one; fit one before, and give it to all"
            )

    def _check_kind(self, client: Client) -> dict[str, tuple[int, ...]]:
        """Checks a client's network on the form of its inputs if no client before had both; returns the output's shapes."""
        has_network = client.model is not None and self._network is None
        splits = requirements.examples_by_split(client)
        kind = (
            cached_module_of(client).architecture if has_network else "",
            *((name, str(input_spec_of(data.x)), repr(data.transform)) for name, data in splits.items()),
        )
        if kind not in self._shapes:
            if not isinstance(self._algorithm, BringsNetwork):
                requirements.check_networks_run([client])
            elif self._network is not None:
                requirements.check_networks_run([client], factory=self._network)
            pair = [make_client(self._source, self._first_id), client]
            requirements.check_clients_suit_method(pair, self._algorithm)
            check_client_init([client], self._algorithm)
            self._shapes[kind] = {
                name: output_shape(cached_module_of(client).module, data, f"client {client.id!r}")
                for name, data in splits.items()
                if has_network
            }
        return self._shapes[kind]

    def _check_examples(self, client: Client, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, data in requirements.examples_by_split(client).items():
            if name in shapes:
                check_tokens_in_vocabulary(cached_module_of(client).module, data, f"client {client.id!r}: {name}")
                client.task.check_outputs(shapes[name], data.labels, f"client {client.id!r}: {name}")
        spec = self._data_spec
        if spec is not None and (outputs := requirements.num_outputs_needed(client)) > spec.outputs:
            raise UserError(
                f"client {client.id!r} has labels for {outputs} outputs, and the network has {spec.outputs}, as the first "
                f"client {self._first_id!r} needs; give that client an example of the last class"
            )
        check_batch_norm_gets_no_single_example([client], self._algorithm, {"batch_size": None}, self._network)
        if isinstance(self._algorithm, LocalTraining):
            check_training_options([client], self._algorithm)
