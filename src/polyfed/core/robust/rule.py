"""Defines what all rules of robust aggregation have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, spec_mismatch, state_dict_spec


class RobustRule(ABC):
    """Defines a rule by which the server combines the replies of a round, in place of their plain mean.

    Final subclasses are frozen dataclasses, listed in `polyfed.core.robust.parse.RULES`; `str` gives the text that
    `parse_robust_rule` reads.
    """

    word: ClassVar[str]
    """The name of the rule in `robust="..."`."""
    is_weighted: ClassVar[bool] = False
    """Says whether the rule weighs clients by their numbers of examples; if not, every client counts the same."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns the text from which `parse_robust_rule` builds this rule again."""

    def client_count_error(self, num_clients: int) -> str | None:
        """Returns half a sentence on why the rule cannot combine so many replies; None if it can."""
        return None


class CombiningRule(RobustRule, ABC):
    """Defines a rule that needs all replies of a round at once, so that the server holds them until the last has come."""

    @abstractmethod
    def combine(self, tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Combines the clients' tensors into one state dict of the same names, shapes and types.

        The result does not depend on the order of the clients.

        Args:
            tensors_by_client: client id -> tensors, with the same names, shapes and types.
            weights: client id -> weight; an unweighted rule ignores them.

        Raises:
            IncompatibleTensorsError: names, shapes or types of two clients differ.
        """


def check_same_form_and_sort_ids(tensors_by_client: Mapping[str, StateDict]) -> list[str]:
    """Checks that all clients' tensors have the same names, shapes and types, and returns the sorted ids.

    Raises:
        IncompatibleTensorsError: the tensors of a client are not those of the first.
    """
    ids = sorted(tensors_by_client)
    expected = state_dict_spec(tensors_by_client[ids[0]])
    for client_id in ids[1:]:
        if difference := spec_mismatch(tensors_by_client[client_id], expected):
            raise IncompatibleTensorsError(ids[0], client_id, difference)
    return ids


def names_of_distances(tensors: StateDict) -> list[str]:
    """Returns the names of floating-point tensors, by which distances are measured; all if there are none.

    A counter of BatchNorm tells how many minibatches a client has, in numbers that outweigh all differences of weights.
    """
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()] or list(tensors)


def stack_as_double(tensors_by_client: Mapping[str, StateDict], ids: list[str], name: str) -> Tensor:
    """Returns one tensor of all clients as the rows of a float64 matrix, (clients, numbers)."""
    return torch.stack([tensors_by_client[i][name].detach().reshape(-1).to(torch.float64) for i in ids])


def cast_like_original(values: Tensor, original: Tensor) -> Tensor:
    """Returns float64 numbers in the original's shape and type; rounds for whole numbers, halves up."""
    values = values.reshape(original.shape)
    if original.is_floating_point():
        return values.to(original.dtype)
    return (values + 0.5).floor().to(original.dtype)
