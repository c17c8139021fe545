"""Sums the clients' replies of a round, one after another as they arrive."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.state_dict import RunningMean, StateDict


class ReplySum(Mapping[str, Message], ABC):
    """Holds the weighted sum of the clients' replies in a round, in place of the replies themselves.

    `Averaging.aggregate` gets it as a mapping from client ids to the replies that are stored singly: all replies if the
    method needs them, otherwise none.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Message] = {}

    def __getitem__(self, client_id: str) -> Message:
        """Returns the reply of a client, if single replies are stored."""
        return self._kept[client_id]

    def __iter__(self) -> Iterator[str]:
        """Yields the ids of the clients whose single replies are stored."""
        return iter(self._kept)

    def __len__(self) -> int:
        """Returns the number of single replies that are stored."""
        return len(self._kept)

    @property
    @abstractmethod
    def client_ids(self) -> Sequence[str]:
        """Returns, sorted, the ids of the clients whose replies were added."""

    @property
    def server_state_entries(self) -> Mapping[str, Any]:
        """Returns what the server state must remember of this round's sum, by key; empty if nothing."""
        return {}

    @property
    def report(self) -> Mapping[str, Any]:
        """Returns what a robust rule did with the replies, for the record of the round; empty without a rule.

        It is complete once `mean` was taken.
        """
        return {}

    @abstractmethod
    def add(self, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds one client's reply to the sum.

        Args:
            client_id, reply: of the client.
            message: the server's message that it answers; only a robust rule reads it.

        Raises:
            ValueError: the reply's tensors differ in name or shape from those of the first reply.
        """

    @abstractmethod
    def mean(self) -> Mapping[str, StateDict]:
        """Returns the weighted mean of the replies, as `{group: {tensor name: tensor}}`."""


@final
class PlainReplySum(ReplySum):
    """Sums the clients' unencrypted replies, weighted by numbers of training examples, in the order of client ids.

    Args:
        groups: the groups of a reply that are summed.
        weighted: weighs replies by the number of training examples; False counts every client the same.
        expected: id -> number of examples of the clients that are expected; None if unknown. See `RunningMean`.
        keeps_replies: whether single replies are kept, too.
    """

    def __init__(
        self, groups: Sequence[str], *, weighted: bool, expected: Mapping[str, float] | None, keeps_replies: bool
    ) -> None:
        super().__init__()
        self._groups, self._weighted, self._keeps_replies = groups, weighted, keeps_replies
        self._mean = RunningMean(expected if weighted or expected is None else dict.fromkeys(expected, 1.0))

    @property
    def client_ids(self) -> Sequence[str]:
        """Returns, sorted, the ids of the clients whose replies were added."""
        return self._mean.client_ids

    def add(self, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds one client's reply, multiplied by its number of examples.

        Raises:
            IncompatibleTensorsError: the reply's tensors differ in name or shape from those of the first reply.
        """
        tensors = flatten_groups(reply, self._groups)
        self._mean.add(client_id, tensors, reply.scalars["num_examples"] if self._weighted else 1.0)
        if self._keeps_replies:
            self._kept[client_id] = reply

    def mean(self) -> dict[str, dict[str, Tensor]]:
        """Returns the mean of the replies, weighted by numbers of examples, as `{group: {tensor name: tensor}}`."""
        return split_into_groups(self._mean.mean(), self._groups)


def flatten_groups(reply: Message, groups: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of some groups of a reply in one state dict, under the names GROUP/NAME."""
    return {f"{g}/{n}": t for g in groups for n, t in reply.tensors.get(g, {}).items()}


def split_into_groups(tensors: StateDict, groups: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of a state dict from `flatten_groups` by group and name."""
    state_dict: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        state_dict[group][name] = tensor
    return state_dict
