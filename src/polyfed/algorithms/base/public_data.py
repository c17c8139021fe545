"""Provides the base class of methods that use public examples, which belong to no client: how clients receive, check
and store them.
"""

import hashlib
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.algorithm import Client, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import first_leaf, flatten_inputs, input_spec_of, named_leaves, unflatten_inputs
from polyfed.core.state_dict import StateDict, view_as_bytes
from polyfed.core.training.config import LocalTraining

_RANGE_FACTOR = 3.0
"""Limits public examples: they may exceed the range of a client's inputs by this many times that range."""


@dataclass(frozen=True, kw_only=True)
class PublicDataMethod(LocalTraining, ABC):
    """Sends public examples, which belong to no client, to all clients, which check that these are always the same, and
    can keep them.

    The server state has the examples as "public", and as "holders" the clients that already have them; a client keeps
    them as "public", or their hash as "pool_hash".

    Args:
        pool_once: sends the public examples to a client once, and afterwards only row numbers (False, polyfed's choice).
            Clients keep them, in memory and in checkpoints.
    """

    pool_once: bool = False

    # -- server ---------------------------------------------------------------------------------------------------

    def _stored_public_tensors(self, server: ServerContext) -> dict[str, Tensor]:
        """Returns the public examples as stored, before the transform that prepares them.

        Raises:
            UserError: clients are to keep them and values are missing, which no private state may hold.
        """
        assert server.public is not None  # `requires` names "public_data"
        stored = {name: part.cpu() for name, part in flatten_inputs(server.public.raw_inputs).items()}
        if self.pool_once and any(part.is_floating_point() and bool(part.isnan().any()) for part in stored.values()):
            raise UserError(
                f"{type(self).__name__}: public examples lack values, and clients cannot keep such from round to round; "
                "set pool_once to false, so that they are sent in each round"
            )
        return stored

    def _pool_group(self, server_state: Mapping[str, Any], client_id: str) -> dict[str, StateDict]:
        """Returns the message group "public" with all public examples, or no group for a client that already has them."""
        return {} if self.pool_once and client_id in server_state["holders"] else {"public": server_state["public"]}

    def _holders_after_round(self, server_state: Mapping[str, Any], client_ids: Any) -> list[str]:
        """Returns the sorted ids of the clients that have the public examples after a round with these clients."""
        return sorted({*server_state["holders"], *client_ids}) if self.pool_once else []

    # -- client ---------------------------------------------------------------------------------------------------

    def _public_examples(self, message: Message, client_state: Mapping[str, Any], client: Client) -> Examples:
        """Returns all public examples of message or client state, prepared as the client's own are."""
        pool = message.tensors.get("public") or client_state.get("public")
        if pool is None:
            raise UserError(
                f"client {client.id!r} was sent the public examples in an earlier round, and lost them with its private "
                "state; start the run again, or set pool_once to false"
            )
        return convert_public_examples_to_client_form(pool, client)

    def _pool_state(self, message: Message, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the client state's public examples under `pool_once`, and their hash once received.

        Raises:
            UserError: the public examples are not those of the first round. A server that chose others for each round could
                infer a network's weights from its representations.
        """
        received = message.tensors.get("public")
        public = dict(received or client_state.get("public", {})) if self.pool_once else {}
        pool_hash = client_state.get("pool_hash") if received is None else _hash_tensors(received)
        if pool_hash != client_state.get("pool_hash", pool_hash):
            raise UserError(
                f"{type(self).__name__}: the public examples are not those of the first round, and a client does not show "
                "what its network makes of others; start the run again if they are meant to be"
            )
        return {**({"public": public} if public else {}), **({} if pool_hash is None else {"pool_hash": pool_hash})}


def convert_public_examples_to_client_form(parts: StateDict, client: Client) -> Examples:
    """Converts received public examples to the form of the client's inputs, with labels 0.

    Raises:
        UserError: the examples have another form, or values far outside the range of the client's own, with which a server
            could probe its network.

    >>> mine = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    >>> len(convert_public_examples_to_client_form({"x": torch.ones(3, 2)}, Client("north", None, mine, mine)))
    3
    """
    device, form = client.train.device, input_spec_of(client.train.x)
    try:
        x = unflatten_inputs({name: part.to(device) for name, part in parts.items()}, form)
    except UserError as error:
        raise UserError(f"client {client.id!r}: the public examples: {error}; give such (public=...)") from error
    for (_, part), (_, client_part) in zip(named_leaves(x), named_leaves(client.train.x), strict=True):
        _validate_range(part, client_part, client)
    if input_spec_of(x) != form:
        raise UserError(
            f"client {client.id!r}: the public examples are {input_spec_of(x)}, its inputs are {form}; give public examples "
            "(public=...) of the same form"
        )
    return Examples(x, torch.zeros(len(first_leaf(x)), device=device), transform=client.train.transform)


def _validate_range(x: Tensor, client_inputs: Tensor, client: Client) -> None:
    if not x.is_floating_point() or not client_inputs.is_floating_point():
        return
    if getattr(client.train.transform, "is_rowwise", False):  # a table's, which fills in missing values
        x, client_inputs = x[~x.isnan()], client_inputs[~client_inputs.isnan()]
        if not x.numel() or not client_inputs.numel():
            return
    low, high = (float(end) for end in torch.aminmax(client_inputs))
    margin = _RANGE_FACTOR * max(high - low, 1.0)
    least, most = (float(end) for end in torch.aminmax(x))
    if not low - margin <= least <= most <= high + margin:
        raise UserError(
            f"client {client.id!r}: the public examples go from {least:.4g} to {most:.4g}, its own inputs from "
            f"{low:.4g} to {high:.4g}; give public examples of the same scale"
        )


def _hash_tensors(pool: StateDict) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name in sorted(pool):
        content.update(view_as_bytes(pool[name]).numpy().data)
    return content.hexdigest()
