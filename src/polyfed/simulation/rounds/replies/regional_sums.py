"""Sums the replies of a round by region: each region forwards one sum, and the server adds up the regions'.

Sums are in 64-bit fixed point (`polyfed.core.messages.fixed_point`), which has no order: any regions give the same bits, and
so do secure sums.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch

from polyfed.algorithms import registry_name
from polyfed.algorithms.base.averaging import Averaging
from polyfed.algorithms.base.reply_sum import ReplySum
from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import RoundError, UserError
from polyfed.core.messages.fixed_point import SumLayout
from polyfed.core.messages.lora import adapter_averaging_mode
from polyfed.core.robust.clip import Clip
from polyfed.core.robust.parse import parse_robust_rule
from polyfed.core.state_dict import StateDict
from polyfed.simulation.engines.base import PartialSum
from polyfed.simulation.rounds.replies.secure_aggregation import SecureSum, supports_secure_sum
from polyfed.simulation.settings import Regions


def find_region(client: str, regions: Regions) -> str:
    """Returns a client's region by the mapping, or by a checksum of its id for a number of regions.

    >>> find_region("north", {"north": "europe"}), find_region("north", 1)
    ('europe', '0')
    """
    if isinstance(regions, int):
        return str(zlib.crc32(client.encode()) % regions)
    return regions[client]


def supports_regions(algorithm: Algorithm[Any, Any]) -> bool:
    """Returns True if a method's replies can be summed by region."""
    try:
        check_regions(algorithm, 1, ())
    except UserError:
        return False
    return True


def check_regions(algorithm: Algorithm[Any, Any], regions: Regions, client_ids: Iterable[str]) -> None:
    """Raises a `UserError` if a method's replies cannot be summed by region, or if a client has no region.

    Raises:
        UserError: the method or its robust rule needs single replies, or a client has no region.
    """
    name = registry_name(algorithm)
    if not supports_secure_sum(algorithm):
        raise UserError(
            f"regions=... forwards one sum of replies per region, and {name} needs each reply by itself, or none; leave "
            "regions out, or take a method whose server half is a mean, such as fedavg"
        )
    if adapter_averaging_mode(algorithm) is not None:
        raise UserError(
            "regions=... sums replies of one form, and with adapters=... ranks differ; leave one of them out"
        )
    rule = parse_robust_rule(getattr(algorithm, "robust", None))
    if rule is not None and not (isinstance(rule, Clip) and rule.times_median is None):
        raise UserError(
            f"regions=... forwards one sum of replies per region, and robust='{rule}' compares the replies of all clients; "
            "give a number, robust='clip:C', which each region applies to its own clients, or leave one of them out"
        )
    if isinstance(regions, Mapping) and (missing := next((i for i in client_ids if i not in regions), None)):
        raise UserError(
            f"regions has no region for the client {missing!r}; name one for every client, or give a number"
        )


def summed_reply_form(reply: Message | None) -> Message:
    """Returns a reply's names, shapes and scalars with zeros that take no memory."""
    assert reply is not None
    groups = SumLayout.from_byte_tensor(reply.tensors["sum"]["layout"]).meta_tensors()
    return Message(
        {
            group: {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        },
        reply.scalars,
    )


@final
class RegionalSum(ReplySum):
    """Sums the replies of each region by itself, and the regions' sums at the end.

    Its memory grows with the number of regions whose clients replied, not with the number of clients.

    Args:
        method: the method that the replies belong to.
        regions: the region of each client, or their number.
    """

    def __init__(self, method: Averaging, regions: Regions) -> None:
        super().__init__()
        self._method, self._regions = method, regions
        self._sums: dict[str, SecureSum] = {}
        self._ids_by_region: dict[str, list[str]] = {}
        self._ids_added_elsewhere: set[str] = set()
        self._total = SecureSum(method)

    @property
    def client_ids(self) -> list[str]:
        """Returns, in ascending order, the ids of the clients whose replies were added."""
        return sorted(i for ids in self._ids_by_region.values() for i in ids)

    @property
    def report(self) -> Mapping[str, Any]:
        """Returns the bound on updates, and the norm of the update of their mean; empty without a bound."""
        return self._total.report

    @property
    def bytes_by_region(self) -> dict[str, int]:
        """Returns the number of bytes that each region forwards to the server: region -> bytes of its sum."""
        nbytes = next((part.nbytes for part in self._sums.values()), 0)
        return dict.fromkeys(sorted(self._ids_by_region), nbytes)

    def add(self, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds a client's reply, encoded by `encode_reply_in_fixed_point`, to the sum of its region.

        A reply without words is noted only: the engine adds it up itself, and `add_partial_sum` gets the sum.

        Raises:
            UserError: the reply's layout differs from that of the region's first reply.
        """
        region = find_region(client_id, self._regions)
        self._ids_by_region.setdefault(region, []).append(client_id)
        if "words" in reply.tensors["sum"]:
            self._sums.setdefault(region, SecureSum(self._method)).add(client_id, reply, message)
            return
        self._ids_added_elsewhere.add(client_id)
        self._total.note_message_for_bound(message)

    def add_partial_sum(self, partial_sum: PartialSum) -> None:
        """Adds the sum that an engine has made of the replies of some clients."""
        self._ids_added_elsewhere.difference_update(partial_sum.clients)
        place = ", ".join(partial_sum.clients[:1])
        self._sums.setdefault(f"engine:{place}", SecureSum(self._method)).add(place, partial_sum.message)

    def mean(self) -> Mapping[str, StateDict]:
        """Returns the weighted mean of all regions' replies, as `{group: {tensor name: tensor}}`."""
        if self._ids_added_elsewhere:
            raise RoundError(
                f"the reply of {min(self._ids_added_elsewhere)!r} is in no sum that the engine has returned"
            )
        for part in self._sums.values():
            self._total.add_sum(part)
        return self._total.mean()
