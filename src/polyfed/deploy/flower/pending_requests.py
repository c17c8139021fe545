"""Defines `PendingRequests`, the messages to sites that have not been answered yet."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from polyfed.deploy.flower.envelopes import envelope_to_record, pull_arrived_replies
from polyfed.deploy.flower.polling import PollingSchedule
from polyfed.deploy.protocol.wire import Envelope, FailureReason, PackedEnvelope, count_record_bytes

_TTL_MARGIN_SECONDS = 60.0  # Flower forgets a message well after our own limit, so that ours is reported
_MESSAGE_TYPES = {"local": "train", "evaluate": "evaluate", "export": "evaluate"}


@final
@dataclass(frozen=True)
class _Request:
    """Describes a message that waits for an answer: to whom, until when, and since when its node had been connected."""

    client: str
    deadline: float
    node_activation: str


@final
class PendingRequests:
    """Sends messages to sites, and fetches their answers as they come, one by one.

    Args:
        grid: Flower's connection to the nodes.
        nodes: site -> its Flower node; the registry changes it.
        refusals: site -> why it does not take part any more; the registry changes it.
        unpack_answer: reads an answer, or returns why there is none.
        schedules: site -> when to ask for its answer; filled here.
        round_seconds: how long a site has for its answer.
        poll_seconds: the shortest wait between two questions for an answer.
        node_check_seconds: between two checks for nodes that have restarted since they got a message.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        refusals: Mapping[str, str],
        unpack_answer: Callable[[FlowerMessage], PackedEnvelope | FailureReason],
        schedules: dict[str, PollingSchedule],
        *,
        round_seconds: float,
        poll_seconds: float,
        node_check_seconds: float,
    ) -> None:
        self._grid, self._nodes, self._refusals, self._unpack_answer = grid, nodes, refusals, unpack_answer
        self._schedules, self._round_seconds, self._poll_seconds = schedules, round_seconds, poll_seconds
        self._node_check_seconds = node_check_seconds
        self._waiting: dict[str, _Request] = {}  # by message id
        self._unreadable: set[str] = set()
        self._next_node_check = 0.0

    @property
    def clients(self) -> list[str]:
        """Returns the sites whose answers have not come."""
        return [request.client for request in self._waiting.values()]

    def send(
        self, envelopes: Mapping[str, Envelope], round_number: int
    ) -> Iterator[tuple[str, PackedEnvelope | FailureReason]]:
        """Sends one message per site, and yields (site, reason) for each that cannot be sent."""
        connected = self._activation_by_node()
        for client, envelope in envelopes.items():
            node = self._nodes.get(client)
            if client in self._refusals:
                yield client, f"does not take part any more: {self._refusals[client]}"
                continue
            if node not in connected or node is None:
                yield client, "is not connected; its SuperNode must run (flwr supernode list)"
                continue
            record = envelope_to_record(envelope)
            ttl = 2 * self._round_seconds + _TTL_MARGIN_SECONDS
            kind = _MESSAGE_TYPES.get(envelope.head.get("phase", ""), "train")
            message = FlowerMessage(record, node, kind, ttl=ttl, group_id=str(round_number))
            # Flower returns None for a message that it does not accept.
            if accepted := [message_id for message_id in self._grid.push_messages([message]) if message_id]:
                deadline = time.monotonic() + self._round_seconds
                self._waiting[accepted[0]] = _Request(client, deadline, connected[node])
                self._schedules.setdefault(client, PollingSchedule(self._poll_seconds)).start_new_wait()
            else:
                yield client, f"could not be sent {count_record_bytes(record)} bytes: the SuperLink refused the message"
        self._next_node_check = time.monotonic() + self._node_check_seconds

    def collect(self) -> Iterator[tuple[str, PackedEnvelope | FailureReason]]:
        """Yields (site, answer) for each answer that has come, and (site, reason) for each that will not come any more."""
        if time.monotonic() > self._next_node_check:
            self._next_node_check = time.monotonic() + self._node_check_seconds
            lost = self._messages_to_restarted_nodes()
            yield from self._pull(lost)  # replies from before the restart
            for message_id in lost & self._waiting.keys():
                client = self._waiting.pop(message_id).client
                yield client, "its SuperNode was cut off, or restarted, before it replied; its part is lost"
        now = time.monotonic()
        expired = {message_id for message_id, request in self._waiting.items() if now > request.deadline}
        due = {i for i, request in self._waiting.items() if not self._schedules[request.client].seconds_until_poll()}
        yield from self._pull(due | expired)
        for message_id in due & self._waiting.keys():
            self._schedules[self._waiting[message_id].client].record_empty_poll()
        for message_id in self._unreadable & self._waiting.keys():
            yield self._waiting.pop(message_id).client, "its reply cannot be read; the server's log says why"
        for message_id in expired & self._waiting.keys():
            yield (
                self._waiting.pop(message_id).client,
                f"no reply within {self._round_seconds:g} s (round-seconds); a later one is discarded",
            )

    def seconds_until_poll(self) -> float:
        """Returns how many seconds to wait before the next call of `collect`; 0 if no answer is awaited."""
        return min((self._schedules[client].seconds_until_poll() for client in self.clients), default=0.0)

    def _pull(self, message_ids: set[str]) -> Iterator[tuple[str, PackedEnvelope | FailureReason]]:
        """Yields the answers to these messages that have come."""
        awaited = {message_id: None for message_id in self._waiting if message_id in message_ids}
        for answer in pull_arrived_replies(self._grid, awaited, self._unreadable):
            client = self._waiting.pop(answer.metadata.reply_to_message_id).client
            self._schedules[client].record_arrival_time()
            yield client, self._unpack_answer(answer)

    def _activation_by_node(self) -> Mapping[int, str]:
        """Returns for each connected Flower node the time since which it has been connected."""
        return {info.node_id: info.last_activated_at for info in self._grid.get_nodes()}

    def _messages_to_restarted_nodes(self) -> set[str]:
        """Returns the ids of unanswered messages whose Flower node has restarted since, so that no reply will come.

        Flower itself notices a missing node only while it is missing, and so not a quick restart.
        """
        activated_now = self._activation_by_node()
        return {
            message_id
            for message_id, request in self._waiting.items()
            if (node := self._nodes.get(request.client)) in activated_now
            and node is not None
            and activated_now[node] != request.node_activation
        }
