"""The sum of a round's replies, to which a run adds each reply as it comes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.state_dict import RunningMean, StateDict


class ReplySum(Mapping[str, Message], ABC):
    """Stands for the replies of a round in `Averaging.aggregate`. Only their weighted sum is held; as a mapping it has those
    replies that are kept by themselves: all if the method needs single ones, otherwise none."""

    def __init__(self) -> None:
        self._kept: dict[str, Message] = {}

    def __getitem__(self, client_id: str) -> Message:
        """Returns a reply that is kept."""
        return self._kept[client_id]

    def __iter__(self) -> Iterator[str]:
        """Yields the clients whose replies are kept."""
        return iter(self._kept)

    def __len__(self) -> int:
        """Counts the replies that are kept."""
        return len(self._kept)

    @property
    @abstractmethod
    def client_ids(self) -> Sequence[str]:
        """The clients whose replies were added, in the order of ids."""

    @abstractmethod
    def add(self, client_id: str, reply: Message) -> None:
        """Adds the reply of one client.

        Raises:
            ValueError: its tensors are not those of the first reply.
        """

    @abstractmethod
    def mean(self) -> Mapping[str, StateDict]:
        """Returns the weighted mean of the replies: group -> tensors."""


@final
class PlainReplySum(ReplySum):
    """Sums replies as they are, in the order of ids.

    Args:
        groups: the groups of a reply that are summed.
        weighted: by the number of training examples; False counts every client the same.
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
        """The clients whose replies were added, in the order of ids."""
        return self._mean.client_ids

    def add(self, client_id: str, reply: Message) -> None:
        """Adds n_i·θ_i.

        Raises:
            IncompatibleTensorsError: its tensors are not those of the first reply.
        """
        tensors = {f"{g}/{n}": t for g in self._groups for n, t in reply.tensors.get(g, {}).items()}
        self._mean.add(client_id, tensors, reply.scalars["num_examples"] if self._weighted else 1.0)
        if self._keeps_replies:
            self._kept[client_id] = reply

    def mean(self) -> dict[str, dict[str, Tensor]]:
        """Returns Σ_i n_i·θ_i / Σ_i n_i: group -> tensors."""
        mean: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        for key, tensor in self._mean.mean().items():
            group, _, name = key.partition("/")
            mean[group][name] = tensor
        return mean
