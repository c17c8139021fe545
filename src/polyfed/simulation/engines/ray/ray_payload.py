"""Puts the method, the clients and the settings of Ray's workers into the object store."""

import io
from collections.abc import Sequence
from typing import Any

import ray

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.trusted_code import trusted_names
from polyfed.core.messages.compressors import Compressor
from polyfed.simulation.engines.ray.object_store import StoredClient, store_clients
from polyfed.simulation.sources.source_clients import SourceClients

WorkerOptions = tuple[tuple[Metric, ...], Compressor | None]  # settings that the workers need
WorkerPayload = tuple[
    Algorithm[Any, Any],
    list[StoredClient] | SourceClients,
    str,
    list[tuple[type, str]],
    WorkerOptions,
    tuple[str, ...],
    int | None,
]


def put_payload(
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client] | SourceClients,
    device: str,
    options: WorkerOptions,
    num_parties: int | None,
) -> Any:
    """Puts method, clients and settings into the object store, and returns the reference for workers.

    Large tensors become objects of their own, which workers fetch when needed.
    """
    # A source is opened on each node, and its clients are made there: none travels.
    stored_clients = clients if isinstance(clients, SourceClients) else store_clients(clients, ray.put)
    try:
        pickler = _ClassNamePickler()
        pickler.dump((algorithm, stored_clients, options))
        return ray.put((algorithm, stored_clients, device, pickler.classes, options, trusted_names(), num_parties))
    except Exception as error:  # cloudpickle passes on whatever the object's own methods raise
        sentence = str(error).strip().splitlines()[0]
        raise UserError(
            f"a network, transform, metric or method cannot be sent to Ray's workers: {type(error).__name__}: {sentence}; "
            "keep open files, locks and generators out of what it refers to, or use engine='pool'"
        ) from error


class _ClassNamePickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Collects classes that are pickled by value and whose qualified name cloudpickle loses, such as `build.<locals>.Net`.

    An architecture's fingerprint, from which its initial weights derive, includes that name.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), buffer_callback=lambda buffer: None)
        self.classes: list[tuple[type, str]] = []

    def reducer_override(self, obj: Any) -> Any:
        """Returns what cloudpickle returns, and notes the class if its qualified name would be lost."""
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, type) and obj.__qualname__ != obj.__name__:
            self.classes.append((obj, obj.__qualname__))
        return reduced
