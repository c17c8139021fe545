"""What a method decides by the clients that it finds: said once, and kept in `manifest.json`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from polyfed.core.algorithm import Algorithm


class ResolvesAutoFields(ABC):
    """For a method one of whose fields may leave something to be decided before the first round."""

    @abstractmethod
    def resolved_fields(self, server_state: Any) -> Mapping[str, str]:
        """What was decided, by field, in a few words; empty where every field has the value that it says.

        Args:
            server_state: the server's, of any round.
        """


def resolved_fields_for_manifest(method: Algorithm[Any, Any], server_state: Any) -> dict[str, dict[str, str]]:
    """What `manifest.json` has of them, as `resolved_fields`; nothing without any.

    >>> from polyfed.algorithms import FedAvg
    >>> resolved_fields_for_manifest(FedAvg(), {})
    {}
    """
    fields = dict(method.resolved_fields(server_state)) if isinstance(method, ResolvesAutoFields) else {}
    return {"decided": fields} if fields else {}
