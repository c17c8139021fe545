"""Flower: clients at real sites, each behind a SuperNode; the server runs as a ServerApp on a SuperLink.

This file and `link.py` are the only ones that import flwr. It carries letters (`polyfed.deploy.wire`) as Flower's records:
the head as one JSON text, a group of tensors as one array of bytes, since Flower makes two HTTP objects of each array and
cannot carry bfloat16.
What is asked and answered is decided in `polyfed.deploy`.

Not a Flower `Strategy`: those send all clients the same record, end a run on replies with different keys, and average a NaN.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.deploy.agreeing import prepared_together
from polyfed.deploy.claims import changed_claim
from polyfed.deploy.internals import hasten
from polyfed.deploy.logs import log_to_stderr
from polyfed.deploy.node import answered, read_site
from polyfed.deploy.pace import Pace
from polyfed.deploy.records import parts_in, record_of
from polyfed.deploy.replies import evaluation_of, one_line, result_of
from polyfed.deploy.riding import letters_of
from polyfed.deploy.secure.conducting import Conductor
from polyfed.deploy.server import Server, prepare
from polyfed.deploy.tables import difference_of_tables
from polyfed.deploy.wire import HEAD_BYTES, ORDER_BYTES, Letter, Packed, parts_of, plain_head, size_of
from polyfed.simulation.engines.work import Engine, Phase, Result, Task
from polyfed.simulation.rounds import Federation
from polyfed.simulation.runs.checkpoint import Checkpoint
from polyfed.simulation.runs.progress import Lines, Progress
from polyfed.simulation.runs.results import Run

_LOG = logging.getLogger("polyfed.server")
_WHY_SECONDS = 10.0  # that a refusal waits for the answers of other sites, which may say why
_POLL_SECONDS = 0.2  # at least; Flower's own `send_and_receive` asks every 3 s
_LOOK_SECONDS = 5.0  # between two looks at whether nodes that have not replied are still those that got the message
_QUERY_SECONDS = 120.0  # for a site to say who it is: it starts Python, imports torch and loads its data
_LATER_SECONDS = 60.0  # Flower forgets a message well after our own limit, so that ours is what is told
_INTRODUCTION = 4096  # bytes in which it says who it is
_TYPES = {"local": "train", "evaluate": "evaluate", "export": "evaluate"}


def to_record(letter: Letter) -> RecordDict:
    """A letter as Flower's records: "head", "scalars" and "arrays".

    >>> import torch
    >>> from polyfed.core.algorithm import Message
    >>> letter = Letter({"kind": "task"}, Message({"model": {"w": torch.ones(2)}}, {"lr": 0.1}))
    >>> back = from_record(to_record(letter))
    >>> back.head, dict(back.body.scalars), back.body.tensors["model"]["w"]
    ({'kind': 'task'}, {'lr': 0.1}, tensor([1., 1.]))
    """
    return record_of(*parts_of(letter))


def from_record(record: RecordDict, most: int = ORDER_BYTES) -> Letter:
    """The letter in Flower's records, of whose head at most so many characters are read.

    Raises:
        UserError: they hold none, or a damaged one.
    """
    packed = packed_in(record, most)
    return Letter(plain_head(packed.head), packed.body())


def packed_in(record: RecordDict, most: int = HEAD_BYTES) -> Packed:
    """The letter in Flower's records, of which nothing has been read yet.

    Raises:
        UserError: they hold none, or too much.
    """
    try:
        return Packed(*parts_in(record), most)
    except Exception as error:  # of hostile bytes numpy and Flower raise what they like
        raise UserError(f"not a message of polyfed: {type(error).__name__}: {one_line(error)}") from error


# -- server -----------------------------------------------------------------------------------------------------------


@final
class Sites:
    """Which node is which site. Flower's nodes have random ids, so that each is asked once who it is.

    A node can only be the site under whose name the operator has registered its key (`flwr supernode register KEY --name
    north`). A site that is there keeps its place against another node of the same name.
    """

    def __init__(
        self, grid: Grid, wanted: Sequence[str], head: Mapping[str, Any], began: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._grid, self._wanted, self._head, self._began = grid, frozenset(wanted), head, began
        self._asked: dict[str, int] = {}  # message id -> node, of those who have not answered
        self._known: set[int] = set()
        self._unreadable: set[str] = set()
        self.nodes: dict[str, int] = {}
        self.told: dict[str, Mapping[str, Any]] = {}
        self.refused: dict[str, str] = {}
        self._answered: dict[str, Mapping[str, Any]] = {}  # what those who refuse have told of their tables

    def look(self) -> None:
        """Asks nodes that are new, and takes the answers that have come; `refused` is then who does not take part."""
        names = {node.node_id: node.name for node in self._grid.get_nodes()}
        for node in sorted(set(names) - self._known):
            letter = to_record(Letter(self._head))
            message = FlowerMessage(letter, node, "query", ttl=_QUERY_SECONDS)
            for sent in self._grid.push_messages([message]):
                self._known.add(node)
                self._asked[sent] = node
        for answer in pulled(self._grid, self._asked, self._unreadable):
            node = self._asked.pop(answer.metadata.reply_to_message_id, 0)
            if answer.has_error():
                self._known.discard(node)  # it may have been starting; it is asked again
                _LOG.warning("node %d could not say who it is: %s", node, one_line(answer.error.reason))
                continue
            try:
                head = from_record(answer.content).head if size_of(answer.content) <= _INTRODUCTION else {}
            except UserError as error:
                _LOG.warning("node %d stays out: %s", node, one_line(error))
                continue
            self._welcome(node, names, head)

    def _welcome(self, node: int, names: Mapping[int, str], head: Mapping[str, Any]) -> None:
        """Takes a node for the site that it says it is, if it can be."""
        client, name = one_line(head.get("client")), names.get(node, "")
        if client not in self._wanted:
            _LOG.warning(
                "node %d (%s) says that it is %r, which is not among the sites; it stays out", node, name, client
            )
        elif name != client:
            _LOG.warning("node %d says that it is %r, but is registered as %r; it stays out", node, client, name)
        elif self.nodes.get(client, node) != node and self.nodes[client] in names:
            _LOG.warning("node %d says that it is %r, which node %d is; it stays out", node, client, self.nodes[client])
        elif head.get("refused"):
            self.refused[client] = one_line(head["refused"])
            self._answered[client] = head
        elif changed := changed_claim(self.told.get(client) or self._began.get(client), head):
            self.nodes.pop(client, None)
            self.refused[client] = one_line(changed)
        else:
            # A site that comes back cannot weigh more than before: its first answers count.
            self.nodes[client] = node
            self.told.setdefault(client, head)
            self.refused.pop(client, None)

    def gather(self, seconds: float) -> Mapping[str, Mapping[str, Any]]:
        """Waits until all sites are there; what each has told.

        Raises:
            UserError: one is missing after that time, or refuses.
        """
        deadline = time.monotonic() + seconds
        while missing := sorted(self._wanted - set(self.nodes)):
            if time.monotonic() > deadline:
                there = ", ".join(sorted(self.nodes)) or "none"
                raise UserError(
                    f"after {seconds:g} s these sites are missing: {', '.join(missing)} (there are: {there}); start their "
                    "SuperNodes, or raise join-seconds"
                )
            self.look()
            if self.refused and (
                not self._may_say_why(missing) or time.monotonic() > deadline - seconds + _WHY_SECONDS
            ):
                client, reason = next(iter(self.refused.items()))
                why = difference_of_tables({**self.told, **self._answered})
                raise UserError(f"site {client!r} does not take part: {reason}{f'; {why}' if why else ''}")
            time.sleep(_POLL_SECONDS)
        return self.told

    def _may_say_why(self, missing: Sequence[str]) -> bool:
        """Whether the answers of other sites may tell why one refuses: because its table is not like theirs."""
        tables = any("table" in head for head in self._answered.values())
        return tables and any(client not in self.refused for client in missing)


def pulled(grid: Grid, waiting: Mapping[str, Any], unreadable: set[str]) -> Iterator[FlowerMessage]:
    """The replies that have come, each fetched by itself, so that one that cannot be read takes no other with it: its number
    is added to `unreadable`, and it is not asked for again."""
    for number in [number for number in waiting if number not in unreadable]:
        try:
            yield from grid.pull_messages([number])
        except Exception as error:  # of hostile bytes protobuf and Flower raise anything; Flower itself retries the net
            unreadable.add(number)
            reason = f"{type(error).__name__}: {one_line(error)}"
            _LOG.warning("the reply to message %s cannot be read: %s", number, reason)


@final
class FlowerEngine(Engine):
    """Sends each task to its site and takes the replies that come in time. All messages of a phase go at once, so that sites
    work side by side and one limit of time holds for all. The evaluation of a round goes with the training of the next, to a
    site that takes part in that as one message.

    Args:
        grid: Flower's connection to the nodes.
        sites: which of them is which.
        server: makes the heads of tasks.
    """

    block_bytes = 2**62
    rides = True

    def __init__(self, grid: Grid, sites: Sites, server: Server) -> None:
        self._grid, self._sites, self._server = grid, sites, server
        self._state: Any = None
        self._conductor: Conductor | None = None
        self._paces: dict[str, Pace] = {}  # client -> when to ask for its reply

    def follow(self, federation: Federation) -> None:
        """Learns from which of the server's states tasks are sent, so that the form of a reply is checked before its tensors
        are read."""
        tasks = federation.tasks

        def followed(
            phase: Phase, clients: Sequence[str], number: int, at: Checkpoint, limit: int = Engine.block_bytes
        ) -> Iterator[list[Task]]:
            self._state = at.state
            return tasks(phase, clients, number, at, limit)

        object.__setattr__(federation, "tasks", followed)  # frozen, but of this run alone
        if federation.settings.secure:
            self._conductor = Conductor(self._server, federation, self.exchange)

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Yields results as they come. A site that is not connected, does not answer in time or sends something else is a
        failure; its late reply is never asked for."""
        if self._conductor is not None and any(task.phase == "local" for task in tasks):
            yield from self._conductor.run(tasks, self._state)
            return
        asked: dict[str, list[Task]] = {}
        for task in tasks:
            asked.setdefault(task.client, []).append(task)
        letters = letters_of(tasks, self._server.order)
        for client, answer in self.exchange(letters, max((task.round for task in tasks), default=0)):
            for task in asked[client]:
                yield self._result(task, answer, both=len(asked[client]) > 1)

    def _result(self, task: Task, answer: Packed | str, both: bool = False) -> Result:
        """What a site's answer to a task, or to `both` training and evaluation, is worth."""
        if task.phase == "evaluate":
            return evaluation_of(task, answer, self._server, rode=both)
        try:
            if isinstance(answer, str):
                raise UserError(answer)
            told = self._sites.told[task.client]
            return result_of(task, answer, self._server, told, self._state, ridden=both)
        except UserError as error:
            return Result(task, failure=ClientError(task.round, task.client, task.phase, one_line(error)))

    def exchange(self, letters: Mapping[str, Letter], number: int) -> Iterator[tuple[str, Packed | str]]:
        """Sends a letter to each site, and yields what comes of it, as it comes: an answer, or why there is none."""
        limits = self._server.deployment
        self._sites.look()
        there = self._connected()
        waiting: dict[str, str] = {}
        for client, letter in letters.items():
            node = self._sites.nodes.get(client)
            if client in self._sites.refused:
                yield client, f"does not take part any more: {self._sites.refused[client]}"
                continue
            if node not in there or node is None:
                yield client, "is not connected; its SuperNode must run (flwr supernode list)"
                continue
            record = to_record(letter)
            ttl, kind = 2 * limits.round_seconds + _LATER_SECONDS, _TYPES.get(letter.head.get("phase", ""), "train")
            message = FlowerMessage(record, node, kind, ttl=ttl, group_id=str(number))
            # None is for a message that was not taken.
            if sent := [sent for sent in self._grid.push_messages([message]) if sent]:
                waiting[sent[0]] = client
            else:
                yield client, f"could not be sent {size_of(record)} bytes: the SuperLink refused the message"
        unreadable: set[str] = set()
        paces = {client: self._paces.setdefault(client, Pace(_POLL_SECONDS)) for client in waiting.values()}
        for pace in paces.values():
            pace.begin()
        deadline = time.monotonic() + limits.round_seconds
        look = time.monotonic() + _LOOK_SECONDS
        while waiting:
            if time.monotonic() > look:
                gone, look = self._started_anew(waiting, there), time.monotonic() + _LOOK_SECONDS
                for answer in pulled(self._grid, gone, unreadable):  # what came before that
                    gone.pop(answer.metadata.reply_to_message_id)
                    yield waiting.pop(answer.metadata.reply_to_message_id), self._packed(answer)
                for sent_before, client in gone.items():
                    waiting.pop(sent_before)
                    yield client, "its SuperNode was cut off, or started anew, before it replied; its part is lost"
            due = {sent_before: client for sent_before, client in waiting.items() if not paces[client].wait()}
            for answer in pulled(self._grid, due, unreadable):
                client = waiting.pop(answer.metadata.reply_to_message_id)
                paces[client].came()
                yield client, self._packed(answer)
            for client in set(due.values()) & set(waiting.values()):
                paces[client].asked()
            for sent_before in unreadable & set(waiting):
                yield waiting.pop(sent_before), "its reply cannot be read; the log of the server tells why"
            if waiting and time.monotonic() > deadline:
                for client in waiting.values():
                    yield (
                        client,
                        f"no reply within {limits.round_seconds:g} s (round-seconds); a later one is discarded",
                    )
                return
            if waiting:
                time.sleep(min(paces[client].wait() for client in waiting.values()))

    def _connected(self) -> Mapping[int, str]:
        """The nodes that are connected, and since when."""
        return {info.node_id: info.last_activated_at for info in self._grid.get_nodes()}

    def _started_anew(self, waiting: Mapping[str, str], before: Mapping[int, str]) -> dict[str, str]:
        """Messages to nodes that are connected, but no longer as they were: nobody there knows of the message. Flower itself
        finds a node that is away only while it is away, and one that starts at once may never be seen so."""
        now, nodes = self._connected(), self._sites.nodes
        return {
            sent: client
            for sent, client in waiting.items()
            if (node := nodes.get(client)) in now and node is not None and now[node] != before.get(node)
        }

    def close(self) -> None:
        """Nothing: the connection is Flower's."""

    def _packed(self, answer: FlowerMessage) -> Packed | str:
        """What a site's answer holds, of which nothing has been read, or why it holds nothing."""
        most = self._server.deployment.max_megabytes
        if answer.has_error():
            return f"Flower reports error {answer.error.code}: {one_line(answer.error.reason)}"
        if (size := size_of(answer.content)) > most * 2**20:
            return f"its reply has {size / 2**20:.1f} MB, above max-megabytes = {most:g}"
        try:
            return packed_in(answer.content)
        except UserError as error:
            return one_line(error)


def serve(grid: Grid, config: Mapping[str, Any], progress: Progress | None = None) -> Run:
    """Plays the run that a configuration describes (`polyfed.deploy.server.prepare`) with the sites behind a grid.

    Raises:
        UserError: the configuration does not fit, sites are missing, or one refuses.
        ClientError, RoundError: as `federate`.
    """
    server = prepare(config)
    sites = Sites(grid, server.deployment.sites, server.introduction(), server.began)
    told = sites.gather(server.deployment.join_seconds)
    first, server = server, prepared_together(server, told, partial(FlowerEngine, grid, sites))
    if server is not first:  # sites are introduced anew, with what they have agreed on
        sites = Sites(grid, server.deployment.sites, server.introduction(), server.began)
        told = sites.gather(server.deployment.join_seconds)
    federation, engine = server.federation(told), FlowerEngine(grid, sites, server)
    engine.follow(federation)
    return server.play(federation, engine, progress or Lines(norms=True), told)


def server_app(config: Callable[[Context], Mapping[str, Any]] = lambda context: context.run_config) -> ServerApp:
    """The ServerApp of a project: `app = server_app()`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log_to_stderr()
        hasten()
        try:
            serve(grid, config(context))
        except (UserError, ClientError, RoundError) as error:
            _LOG.error("%s", " ".join(str(error).split()))
            raise

    return app


# -- site -------------------------------------------------------------------------------------------------------------


def client_app() -> ClientApp:
    """The ClientApp of a project: `app = client_app()`. What it does is said by the site's own node configuration."""
    app = ClientApp()

    def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
        return FlowerMessage(to_record(_answer(message, context.node_config)), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app


def _answer(message: FlowerMessage, config: Mapping[str, Any]) -> Letter:
    log_to_stderr()
    return answered(config, lambda: read_site(config), lambda: packed_in(message.content, ORDER_BYTES))
