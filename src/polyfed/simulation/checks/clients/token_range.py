"""Checks before the first round that all tokens in the clients' data are in the vocabularies of their networks."""

from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import call_network, named_leaves
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.seeds import temporary_rng_seed


def check_tokens_in_vocabulary(module: nn.Module, data: Examples, name: str) -> None:
    """Raises a `UserError` for a token that has no row in an embedding of the network.

    Only the examples with the largest and the least number are run, and only where these are outside an embedding.

    Args:
        module: the network; a copy of it is run.
        data: the examples; only parts of inputs that are integers, and are not transformed, are looked at.
        name: whose examples they are, for the error: "client 'north': train".

    Raises:
        UserError: a token is outside; the message has its row.
    """
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    if not sizes or data.transform is not None:
        return
    for _, store in named_leaves(data.x):
        if (
            store.is_floating_point()
            or store.dtype in (torch.bool, torch.uint8)
            or store.dim() < 2
            or not store.numel()
        ):
            continue
        part = store if data.index is None else store[data.index]
        axes = tuple(range(1, part.dim()))
        for row in (int(part.amax(axes).argmax()), int(part.amin(axes).argmin())):
            if not 0 <= int(part[row].min()) <= int(part[row].max()) < min(sizes):
                _run_row(module, data, row, name)


def _run_row(module: nn.Module, data: Examples, row: int, name: str) -> None:
    def check(embedding: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(embedding, nn.Embedding)
        if not arguments or not isinstance(arguments[0], Tensor):
            return
        low, high, size = int(arguments[0].min()), int(arguments[0].max()), embedding.num_embeddings
        if low < 0 or high >= size:
            raise UserError(
                f"{name} row {row} has the token {low if low < 0 else high}, but the embedding of its network has a "
                f"vocabulary of {size} (0 to {size - 1}); all sites need one vocabulary, and a network for all of it"
            )

    copy = deep_copy(module)
    handles = [part.register_forward_pre_hook(check) for part in copy.modules() if isinstance(part, nn.Embedding)]
    try:
        with torch.no_grad(), temporary_rng_seed(0):
            call_network(copy.eval(), data.batch(torch.tensor([row], device=data.device))[0])
    except UserError:
        raise
    except Exception:  # whatever else the user's network raises is found by the trial run
        return
    finally:
        for handle in handles:
            handle.remove()
