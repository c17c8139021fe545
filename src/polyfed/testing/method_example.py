"""Builds clients, public examples and hyper-parameters that suit a given method, for tests that loop over all methods."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

import torch

from polyfed.algorithms import get
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.methods.method_card import card_of_method
from polyfed.core.seeds import torch_generator
from polyfed.testing.small_clients import small_adapter_clients, small_clients, small_image_clients

_QUICK_FIELDS: Mapping[str, Any] = {"lr": 0.05, "batch_size": 8}
"""Hyper-parameters with which a method learns something from a few examples; its own (`MethodCard.small`) go before."""


@final
@dataclass(frozen=True)
class MethodExample:
    """Builds clients, public examples and hyper-parameters with which a method trains in about a second.

    Args:
        method: the class of the method.
    """

    method: type[Algorithm[Any, Any]]

    @property
    def fields(self) -> Mapping[str, Any]:
        """Returns `{field: value}` for a short training: rate, batch size, and the card's `small`."""
        return {**_QUICK_FIELDS, **self._small}

    @property
    def _small(self) -> Mapping[str, Any]:
        card = card_of_method(self.method)
        return {} if card is None else card.small

    def build(self, **overrides: Any) -> Algorithm[Any, Any]:
        """Builds the method with hyper-parameters for a short training; those in `overrides` replace the default ones.

        Hyper-parameters in `overrides` that the method does not have are left out, and those that its card lists as
        `small` stay unchanged.
        """
        field_names = {field.name for field in fields(self.method) if field.init}  # type: ignore[arg-type]  # a dataclass
        values = {**self.fields, **{name: value for name, value in overrides.items() if name not in self._small}}
        return self.method(**{name: value for name, value in values.items() if name in field_names})

    def clients(self, number: int = 3) -> list[Client]:
        """Builds clients with a `SmallNet` that suit the method, with adapters if it requires them.

        Examples have six numbers; if the method provides the networks, clients have images and no networks.
        """
        if "adapters" in self.method.requires:
            return small_adapter_clients(number)
        return small_clients(number) if self.method.requires & MODEL_REQUIREMENTS else small_image_clients(number)

    def public(self, number: int = 60) -> Examples | None:
        """Builds public examples of the same shape as the clients' inputs; None if the method needs none."""
        if "public_data" not in self.method.requires:
            return None
        return as_examples(
            (torch.randn(number, 6, generator=torch_generator(8)), torch.zeros(number, dtype=torch.int64))
        )


def example_of(method: str | type[Algorithm[Any, Any]]) -> MethodExample:
    """Returns the `MethodExample` of a method, given by its name or class.

    Args:
        method: its name in the registry, or its class.

    Raises:
        UserError: an unknown name, with the nearest choices.

    >>> example_of("scaffold").build(momentum=0.5).momentum
    0.0
    >>> [client.id for client in example_of("fedpnas").clients(2)]
    ['client-0', 'client-1']
    """
    return MethodExample(get(method) if isinstance(method, str) else method)
