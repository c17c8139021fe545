"""Computes hashes of clients, examples and networks, by which a resumed run checks that they have not changed."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import named_leaves
from polyfed.core.nn.module_cache import build_module, hash_tensors
from polyfed.core.state_dict import view_as_bytes
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.simulation.checks.requirements import architecture_keys_by_client, examples_by_split, stable_repr


def initial_weights_fingerprint(clients: Sequence[Client]) -> str:
    """Returns a short hash of the initial weights of all clients' networks, as built with seed 0.

    It tells networks with the same architecture but other weights of their own apart. Networks whose initial weights
    differ at each call, because they draw from more than torch's generator, are not hashed.
    """
    total, digest_by_model = hashlib.sha256(), dict[int, bytes]()
    for client in sorted(clients, key=lambda c: c.id):
        if client.model is not None and id(client.model) not in digest_by_model:
            first_digest, second_digest = (_hash_state_dict(build_module(client.model, seed=0)) for _ in range(2))
            digest_by_model[id(client.model)] = first_digest if first_digest == second_digest else b"varies"
        total.update(digest_by_model.get(id(client.model), b"none"))
    return total.hexdigest()[:16]


def _hash_state_dict(module: nn.Module) -> bytes:
    content = hashlib.blake2b()
    for name, tensor in module.state_dict().items():
        content.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        content.update(view_as_bytes(tensor).numpy().data)
    return content.digest()


def _describe_loss(client: Client) -> str:
    """Describes the loss function that a client sets for itself; "" if it uses the default loss of its task."""
    if isinstance(client.loss, nn.Module):
        return repr(client.loss) + hash_tensors(client.loss.state_dict())
    return "" if client.loss is None else stable_repr(client.loss)


def column_fingerprint(clients: Iterable[Client]) -> str:
    """Hashes the names of columns and categories of the clients' tables, which the data fingerprint leaves out.

    Returns:
        "" if no client has a table.
    """
    columns = {
        client.id: [(column.name, column.categories) for column in client.train.transform.columns]
        for client in sorted(clients, key=lambda c: c.id)
        if isinstance(client.train.transform, TablePreprocessor)
    }
    return hashlib.sha256(repr(columns).encode(errors="surrogatepass")).hexdigest()[:16] if columns else ""


def data_fingerprint(clients: Sequence[Client], public: Examples | None = None) -> str:
    """Hashes all clients (ids, tasks, architectures, examples) and public examples; a run resumes only with these."""
    digest_by_storage: dict[Any, str] = {}

    def digest(tensor: Tensor | None) -> str:
        if tensor is None:
            return "none"
        # Not keyed by id: clients may hold different views of one tensor, which is hashed once.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in digest_by_storage:
            raw = view_as_bytes(tensor).numpy()
            digest_by_storage[key] = f"{tuple(tensor.shape)}{tensor.dtype}{hashlib.blake2b(raw.data).hexdigest()}"
        return digest_by_storage[key]

    def digests(x: Any) -> Any:
        return digest(x) if isinstance(x, Tensor) else [(part, digest(tensor)) for part, tensor in named_leaves(x)]

    total, architecture_by_client = hashlib.sha256(), architecture_keys_by_client(clients)
    for client in sorted(clients, key=lambda c: c.id):
        total.update(repr((client.id, client.task.spec, architecture_by_client.get(client.id))).encode())
        total.update(_describe_loss(client).encode())
        for name, data in examples_by_split(client).items():
            total.update(
                repr((name, digests(data.x), digest(data.y), digest(data.index), stable_repr(data.transform))).encode()
            )
            for column in (data.group, data.time):  # `privacy` protects groups
                if column is not None:
                    total.update(repr((column, data.column(column).tolist())).encode(errors="surrogatepass"))
    if public is not None:
        total.update(repr((digests(public.x), digest(public.index))).encode())
    return total.hexdigest()[:16]
