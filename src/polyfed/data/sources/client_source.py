"""Defines the interface of a client source, which makes the clients of a large federation one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError


class ClientSource(Protocol):
    """Makes the clients of a federation when they are drawn; any object with these two members is a source.

    A source makes the same client each time that it is asked for it, in every process. For Ray, and where processes are not
    forked, it must be picklable. It may have a method `manifest()` that returns a `SourceManifest`.
    """

    @property
    def ids(self) -> Sequence[str]:
        """Returns the ids of all clients, each once."""
        ...

    def client(self, id: str) -> Client:
        """Makes the client with this id."""
        ...


@final
@dataclass(frozen=True, eq=False)
class SourceManifest:
    """Describes all clients of a source without making one of them; every part may be left out.

    Args:
        num_examples: numbers of training examples, in the order of the source's `ids`. With them the server sums replies as
            they come, and means are weighted by them.
        models: the different networks of the clients, as `Client.model`; for methods whose server must know them all before
            round 1. Empty: all clients have that of the first.
        model_of: for each client, in the order of `ids`, the place of its network in `models`; needed for several.
        fingerprint: a text that changes with the data; a run is resumed only with the same.

    Raises:
        UserError: numbers below 1, or a place that is none in `models`.

    >>> SourceManifest(num_examples=[20, 12]).num_examples
    array([20, 12])
    """

    num_examples: Sequence[int] | NDArray[np.int64] | None = None
    models: Sequence[Architecture] = ()
    model_of: Sequence[int] | NDArray[np.int64] | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, low in (("num_examples", 1), ("model_of", 0)):
            if (values := getattr(self, name)) is not None:
                array = np.asarray(values)
                if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or (len(array) and array.min() < low):
                    raise UserError(f"the manifest's {name} must be whole numbers from {low}, one for each client")
                object.__setattr__(self, name, array)
        if self.model_of is not None and len(self.model_of) and max(self.model_of) >= len(self.models):
            raise UserError(
                f"the manifest's model_of names network {max(self.model_of)}, and there are {len(self.models)}"
            )
        if len(self.models) > 1 and self.model_of is None:
            raise UserError(f"the manifest has {len(self.models)} models; model_of must say which client has which")


def is_client_source(value: Any) -> bool:
    """Returns True if an object is a client source: it has `ids`, and a method `client`.

    >>> is_client_source([]), is_client_source({})
    (False, False)
    """
    has_members = hasattr(value, "ids") and callable(getattr(value, "client", None))
    return has_members and not isinstance(value, Client | Mapping | type)
