"""Short hashes of what a run is about: clients, their examples and networks. A run may only be resumed with the same."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.examples import Examples
from polyfed.core.inputs import leaves
from polyfed.core.scratch import architecture_without_ties, hash_of, new_module, scratch
from polyfed.core.tied import further_names
from polyfed.simulation.checks import architectures, sets_of, stable_repr


def first_weights(clients: Sequence[Client]) -> str:
    """A short hash of the weights with which the clients' networks begin at seed 0: the fingerprint knows their forms alone,
    and networks that come with weights of their own have the same. Networks that begin otherwise at each call, because they
    draw from more than torch's generator, do not count."""
    total, seen = hashlib.sha256(), dict[int, bytes]()
    for client in sorted(clients, key=lambda c: c.id):
        if client.model is not None and id(client.model) not in seen:
            once, again = (_digest(new_module(client.model, seed=0)) for _ in range(2))
            seen[id(client.model)] = once if once == again else b"varies"
        total.update(seen.get(id(client.model), b"none"))
    return total.hexdigest()[:16]


def _digest(module: nn.Module) -> bytes:
    content = hashlib.blake2b()
    for name, tensor in module.state_dict().items():
        content.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.digest()


def _loss(client: Client) -> str:
    """A client's own loss, in a few words; empty for the task's."""
    if isinstance(client.loss, nn.Module):
        return repr(client.loss) + hash_of(client.loss.state_dict())
    return "" if client.loss is None else stable_repr(client.loss)


def of_former_version(before: str, clients: Sequence[Client], public: Examples | None) -> str:
    """Why a run with the fingerprint `before` cannot go on, if a former version made it of these clients; else empty."""
    modules = {c.id: scratch(c.model).module for c in clients if c.model is not None}
    further = next(filter(None, map(further_names, modules.values())), None)
    if not further:
        return ""
    kinds = {client: architecture_without_ties(module) for client, module in modules.items()}
    if before != fingerprint(clients, public, kinds):
        return ""
    second, first = next(iter(further.items()))
    return (
        f"its networks have weights under several names ({second!r} is {first!r}), and it was begun by a version of polyfed "
        "that kept such weights once for each name; this version keeps them once, and cannot go on from that. Finish the "
        "run with the version that began it, or begin another in another folder. What it has written can be read as ever"
    )


def fingerprint(
    clients: Sequence[Client], public: Examples | None = None, kinds: Mapping[str, str] | None = None
) -> str:
    """A short hash of every example of every client, of ids, tasks and architectures, and of the public examples: a run
    may only be resumed with the same. `kinds` are names of architectures in place of those of this version."""
    seen: dict[Any, str] = {}

    def digest(tensor: Tensor | None) -> str:
        if tensor is None:
            return "none"
        # Not by id: clients may hold different views of one store, which is read once.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in seen:
            raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            seen[key] = f"{tuple(tensor.shape)}{tensor.dtype}{hashlib.blake2b(raw.data).hexdigest()}"
        return seen[key]

    def digests(x: Any) -> Any:
        return digest(x) if isinstance(x, Tensor) else [(part, digest(tensor)) for part, tensor in leaves(x)]

    total = hashlib.sha256()
    kinds = architectures(clients) if kinds is None else kinds
    for client in sorted(clients, key=lambda c: c.id):
        total.update(repr((client.id, client.task, kinds.get(client.id))).encode())
        total.update(_loss(client).encode())
        for name, data in sets_of(client).items():
            total.update(
                repr((name, digests(data.x), digest(data.y), digest(data.index), stable_repr(data.transform))).encode()
            )
    if public is not None:
        total.update(repr((digests(public.x), digest(public.index))).encode())
    return total.hexdigest()[:16]
