"""Sends the server's messages to the sites through Flower, and collects their replies.

An envelope (`polyfed.deploy.protocol.wire`) travels as Flower's records: the header as one JSON text, a group of tensors as
bytes (`records`). The other folders of `polyfed.deploy` decide on requests and answers.

This is not a Flower `Strategy`: those send all clients the same record, end a run on replies with different keys, and
average a NaN.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from polyfed.core.errors import ClientError, UserError
from polyfed.core.io.text.terminal_text import fold_spelling
from polyfed.deploy.flower.envelopes import (
    envelope_from_record,
    envelope_to_record,
    packed_envelope_from_record,
    pull_arrived_replies,
)
from polyfed.deploy.flower.pending_requests import PendingRequests
from polyfed.deploy.flower.polling import PollingSchedule
from polyfed.deploy.protocol.handshake import describe_changed_introduction
from polyfed.deploy.protocol.piggyback import build_envelope_per_client
from polyfed.deploy.protocol.table_summary import describe_table_difference
from polyfed.deploy.protocol.wire import SITE_HEAD_BYTES, Envelope, FailureReason, PackedEnvelope, count_record_bytes
from polyfed.deploy.server.reply_validation import parse_evaluation_result_or_failure, parse_task_result, sanitize_line
from polyfed.deploy.server.secure_rounds import SecureRoundServer
from polyfed.deploy.server.server import DeploymentServer
from polyfed.simulation.engines.base import ClientTask, Engine, Phase, RealTimeEngine, TaskResult
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint

_LOG = logging.getLogger("polyfed.server")
_REASON_SECONDS = 10.0  # a refusal waits so long for the answers of other sites, which may explain it
_POLL_SECONDS = 0.2  # the shortest wait; Flower's own `send_and_receive` polls every 3 s
_NODE_CHECK_SECONDS = 5.0  # between two checks for nodes that have restarted since they got a message
_QUERY_SECONDS = 120.0  # for a site's introduction: it starts Python, imports torch and loads its data
_MAX_INTRODUCTION_BYTES = SITE_HEAD_BYTES


@final
class SiteRegistry:
    """Records which Flower node belongs to which site, and what each site has reported about its data and network.

    Flower's nodes have random ids, so the server asks each new node once for its introduction. A node can only be the site
    under whose name the operator has registered its key (`flwr supernode register KEY --name north`). No other node
    can replace a connected site.

    Args:
        grid: Flower's connection to the nodes.
        site_names: names of the sites that take part.
        head: header of the introduction.
        first_introductions: in a resumed run, the introductions when it began.
    """

    def __init__(
        self,
        grid: Grid,
        site_names: Sequence[str],
        head: Mapping[str, Any],
        first_introductions: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._grid, self._site_names, self._head, self._first_introductions = (
            grid, frozenset(site_names), head, first_introductions,
        )  # fmt: skip
        self._pending_nodes: dict[str, int] = {}  # message id -> node that has not answered yet
        self._queried_nodes: set[int] = set()
        self._unreadable: set[str] = set()
        self.nodes: dict[str, int] = {}
        self.introductions: dict[str, Mapping[str, Any]] = {}
        self.refusals: dict[str, str] = {}
        self._refusal_heads: dict[str, Mapping[str, Any]] = {}  # headers of refusals, with summaries of tables

    def query_new_nodes_and_register_answers(self) -> None:
        """Sends each new Flower node the question which site it is, and registers the sites whose answers have arrived."""
        names = {node.node_id: node.name for node in self._grid.get_nodes()}
        for node in sorted(set(names) - self._queried_nodes):
            record = envelope_to_record(Envelope(self._head))
            message = FlowerMessage(record, node, "query", ttl=_QUERY_SECONDS)
            for message_id in self._grid.push_messages([message]):
                self._queried_nodes.add(node)
                self._pending_nodes[message_id] = node
        for answer in pull_arrived_replies(self._grid, self._pending_nodes, self._unreadable):
            node = self._pending_nodes.pop(answer.metadata.reply_to_message_id, 0)
            if answer.has_error():
                self._queried_nodes.discard(node)  # it may have been starting; it is asked again
                _LOG.warning("node %d could not say who it is: %s", node, sanitize_line(answer.error.reason))
                continue
            try:
                if (nbytes := count_record_bytes(answer.content)) > _MAX_INTRODUCTION_BYTES:
                    raise UserError(f"its introduction has {nbytes} bytes; at most {_MAX_INTRODUCTION_BYTES} are read")
                head = envelope_from_record(answer.content).head
            except UserError as error:
                _LOG.warning("node %d (%s) stays out: %s", node, names.get(node, ""), sanitize_line(error))
                continue
            self._admit_node(node, names, head)

    def _admit_node(self, node: int, names: Mapping[int, str], head: Mapping[str, Any]) -> None:
        """Registers a Flower node as the site that it claims to be, or records why it is not accepted."""
        client, name = sanitize_line(head.get("client")), names.get(node, "")
        if client not in self._site_names:
            alike = next((i for i in self._site_names if fold_spelling(i) == fold_spelling(client)), None)
            hint = "" if alike is None else f" (it looks like {alike!a}; write both alike)"
            written = repr(client) if alike is None else ascii(client)  # which tells accents apart
            _LOG.warning(
                "node %d (%s) says that it is %s, which is not among the sites%s; it stays out",
                node,
                name,
                written,
                hint,
            )
        elif name != client:
            _LOG.warning("node %d says that it is %r, but is registered as %r; it stays out", node, client, name)
        elif self.nodes.get(client, node) != node and self.nodes[client] in names:
            _LOG.warning("node %d says that it is %r, which node %d is; it stays out", node, client, self.nodes[client])
        elif head.get("refused"):
            self.refusals[client] = sanitize_line(head["refused"])
            self._refusal_heads[client] = head
        elif changed := describe_changed_introduction(
            self.introductions.get(client) or self._first_introductions.get(client), head
        ):
            self.nodes.pop(client, None)
            self.refusals[client] = sanitize_line(changed)
        else:
            # A site that comes back cannot weigh more than before: its first answers count.
            self.nodes[client] = node
            self.introductions.setdefault(client, head)
            self.refusals.pop(client, None)

    def wait_for_all_introductions(self, timeout_seconds: float) -> Mapping[str, Mapping[str, Any]]:
        """Waits until all sites are connected, and returns by site the header in which it describes itself.

        Raises:
            UserError: a site is missing after so many seconds, or refuses.
        """
        deadline = time.monotonic() + timeout_seconds
        while missing := sorted(self._site_names - set(self.nodes)):
            if time.monotonic() > deadline:
                present = ", ".join(sorted(self.nodes)) or "none"
                raise UserError(
                    f"after {timeout_seconds:g} s these sites are missing: {', '.join(missing)} (there are: {present}); "
                    "start their SuperNodes, or raise join-seconds"
                )
            self.query_new_nodes_and_register_answers()
            if self.refusals and (
                not self._others_may_explain(missing) or time.monotonic() > deadline - timeout_seconds + _REASON_SECONDS
            ):
                client, reason = next(iter(self.refusals.items()))
                difference = describe_table_difference({**self.introductions, **self._refusal_heads})
                raise UserError(
                    f"site {client!r} does not take part: {reason}{f'; {difference}' if difference else ''}"
                )
            time.sleep(_POLL_SECONDS)
        return self.introductions

    def _others_may_explain(self, missing: Sequence[str]) -> bool:
        """Returns whether sites that have not answered may have tables that explain a refusal."""
        tables = any("table" in head for head in self._refusal_heads.values())
        return tables and any(client not in self.refusals for client in missing)


@final
class FlowerEngine(RealTimeEngine):
    """Sends each task of a round to its site through Flower, and collects the replies that arrive in time.

    All messages of a phase are sent at once, so that sites work in parallel and share one time limit. The evaluation of a
    round travels with the training of the next, in one message to a site that does both. In asynchronous runs training
    tasks are started, and their results taken as they come.

    Args:
        grid: Flower's connection to the nodes.
        sites: maps sites to nodes.
        server: builds the headers of tasks.
    """

    max_block_bytes = 2**62
    overlaps_evaluation = True

    def __init__(self, grid: Grid, sites: SiteRegistry, server: DeploymentServer) -> None:
        self._grid, self._sites, self._server = grid, sites, server
        self._server_state: Any = None
        self._secure_rounds: SecureRoundServer | None = None
        self._schedules: dict[str, PollingSchedule] = {}  # client -> when to ask for its reply
        self._requests: PendingRequests | None = None  # of an asynchronous run, by client as all that follow
        self._tasks_at_work: dict[str, ClientTask] = {}
        self._new_results: dict[str, TaskResult] = {}
        self._results: dict[str, TaskResult] = {}

    def bind_federation(self, federation: Federation) -> None:
        """Sets the federation whose server state this engine needs to check the replies to its tasks."""
        tasks = federation.build_task_blocks

        def tasks_with_state(
            phase: Phase, clients: Sequence[str], number: int, at: Checkpoint, limit: int = Engine.max_block_bytes
        ) -> Iterator[list[ClientTask]]:
            self._server_state = at.state
            return tasks(phase, clients, number, at, limit)

        object.__setattr__(federation, "build_task_blocks", tasks_with_state)  # frozen, but only this run uses it
        if federation.settings.secure:
            self._secure_rounds = SecureRoundServer(self._server, federation, self.exchange)

    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Sends tasks, and yields one result per task as replies arrive; without a valid reply in time, a failure."""
        if self._results and any(task.phase == "local" for task in tasks):
            for task in tasks:
                yield replace(self._results.pop(task.client), task=task)
            return
        if self._secure_rounds is not None and any(task.phase == "local" for task in tasks):
            yield from self._secure_rounds.run_secure_round(tasks, self._server_state)
            return
        tasks_by_client: dict[str, list[ClientTask]] = {}
        for task in tasks:
            tasks_by_client.setdefault(task.client, []).append(task)
        envelopes = build_envelope_per_client(tasks, self._server.build_task_head)
        for client, answer in self.exchange(envelopes, max((task.round for task in tasks), default=0)):
            for task in tasks_by_client[client]:
                yield self._parse_answer(task, answer, with_evaluation=len(tasks_by_client[client]) > 1)

    def _parse_answer(
        self, task: ClientTask, answer: PackedEnvelope | str, with_evaluation: bool = False
    ) -> TaskResult:
        """Returns a task's result from the site's answer; an invalid or missing answer is a failure."""
        if task.phase == "evaluate":
            return parse_evaluation_result_or_failure(task, answer, self._server, piggybacked=with_evaluation)
        try:
            if isinstance(answer, str):
                raise UserError(answer)
            introduction = self._sites.introductions[task.client]
            return parse_task_result(
                task, answer, self._server, introduction, self._server_state, with_evaluation=with_evaluation
            )
        except UserError as error:
            return TaskResult(task, failure=ClientError(task.round, task.client, task.phase, sanitize_line(error)))

    def exchange(
        self, envelopes: Mapping[str, Envelope], round_number: int
    ) -> Iterator[tuple[str, PackedEnvelope | FailureReason]]:
        """Sends one message per site, and yields (site, reply) as they arrive, or (site, reason) without a reply."""
        self._sites.query_new_nodes_and_register_answers()
        requests = self._build_requests(self._schedules)
        yield from requests.send(envelopes, round_number)
        while requests.clients:
            yield from requests.collect()
            time.sleep(requests.seconds_until_poll())

    def start(self, tasks: Sequence[ClientTask]) -> None:
        """Sends training tasks to idle sites, and returns at once; a site that is not connected has ended."""
        self._sites.query_new_nodes_and_register_answers()
        if self._requests is None:
            self._requests = self._build_requests({})
        self._tasks_at_work |= {task.client: task for task in tasks}
        envelopes = build_envelope_per_client(tasks, self._server.build_task_head)
        for client, reason in self._requests.send(envelopes, max(task.round for task in tasks)):
            self._end_task(client, reason)

    def wait_for_results(self) -> Sequence[TaskResult]:
        """Waits for the answers of sites at work, and returns the results of all tasks that have ended since."""
        while self._requests is not None and self._requests.clients and not self._new_results:
            for client, answer in self._requests.collect():
                self._end_task(client, answer)
            if not self._new_results:
                time.sleep(self._requests.seconds_until_poll())
        self._results |= self._new_results
        newest, self._new_results = self._new_results, {}
        return list(newest.values())

    def _end_task(self, client: str, answer: PackedEnvelope | FailureReason) -> None:
        self._new_results[client] = self._parse_answer(self._tasks_at_work.pop(client), answer)

    def _build_requests(self, schedules: dict[str, PollingSchedule]) -> PendingRequests:
        return PendingRequests(
            self._grid,
            self._sites.nodes,
            self._sites.refusals,
            self._unpack_answer,
            schedules,
            round_seconds=self._server.deployment.round_seconds,
            poll_seconds=_POLL_SECONDS,
            node_check_seconds=_NODE_CHECK_SECONDS,
        )

    def _unpack_answer(self, answer: FlowerMessage) -> PackedEnvelope | str:
        """Returns a site's message, still packed, or a text that says why there is none."""
        max_megabytes = self._server.deployment.max_megabytes
        if answer.has_error():
            return f"Flower reports error {answer.error.code}: {sanitize_line(answer.error.reason)}"
        if (size := count_record_bytes(answer.content)) > max_megabytes * 2**20:
            return f"its reply has {size / 2**20:.1f} MB, above max-megabytes = {max_megabytes:g}"
        try:
            return packed_envelope_from_record(answer.content)
        except UserError as error:
            return sanitize_line(error)
