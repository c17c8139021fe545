"""Defines `ClientRegistry`, which holds all that the server knows about the clients."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import final

from polyfed.core.algorithm import Architecture, Client, DataSpec
from polyfed.core.tasks.task import Task as TaskKind
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.graphs.contraction import ContractionOptions
from polyfed.simulation.checks import requirements


@final
@dataclass(frozen=True)
class ClientRegistry:
    """Holds what the server knows of clients: no examples, of networks only what the method requires.

    Attributes:
        ids: sorted.
        task: of all clients.
        num_examples: numbers of training examples, of the clients that report them.
        architectures: the key of each client's architecture, by client id.
        models: a factory of each architecture, by key.
        layer_catalogue, data_spec: as in `ServerContext`.

    Raises:
        ValueError: ids that are not sorted.

    >>> from polyfed.testing import small_clients
    >>> roster = ClientRegistry.from_clients(small_clients(2), requires=frozenset())
    >>> roster.ids, dict(roster.num_examples), roster.models
    (('client-0', 'client-1'), {'client-0': 20, 'client-1': 26}, {})
    """

    ids: tuple[str, ...]
    task: TaskKind
    num_examples: Mapping[str, int] = field(default_factory=dict)
    architectures: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Architecture] = field(default_factory=dict)
    layer_catalogue: LayerCatalogue | None = None
    data_spec: DataSpec | None = None

    def __post_init__(self) -> None:
        if list(self.ids) != sorted(self.ids):
            raise ValueError(f"ids must be sorted, got {self.ids}")

    @classmethod
    def from_clients(cls, clients: Sequence[Client], requires: Set[str]) -> "ClientRegistry":
        """Builds the registry of what the server knows about simulated clients, limited to what the method requires."""
        architecture_by_client, models, catalogue = {}, {}, None
        if requires & {"one_architecture", "architectures"}:
            architecture_by_client = requirements.architecture_keys_by_client(clients)
            models = {
                architecture_by_client[c.id]: c.model
                for c in sorted(clients, key=lambda c: c.id)
                if c.model is not None
            }
        if "layer_catalogue" in requires:
            contraction = ContractionOptions("layers" if "norms_in_layers" in requires else "nodes")
            catalogue = LayerCatalogue.from_graphs(
                graph_of_client(client, contraction=contraction) for client in clients
            )
        return cls(
            ids=tuple(sorted(client.id for client in clients)),
            task=clients[0].task,
            num_examples={client.id: len(client.train) for client in clients},
            architectures=architecture_by_client,
            models=models,
            layer_catalogue=catalogue,
            data_spec=requirements.common_data_spec(clients) if "one_data_spec" in requires else None,
        )
