"""Flower: clients at real sites, each behind a SuperNode; the server runs as a ServerApp on a SuperLink.

This is the only file that imports flwr. It carries letters (`polyfed.deploy.wire`) as Flower's records: the head as one JSON
text, a group of tensors as one array of bytes, since Flower makes two HTTP objects of each array and cannot carry bfloat16.
What is asked and answered is decided in `polyfed.deploy`.

Not a Flower `Strategy`: those send all clients the same record, end a run on replies with different keys, and average a NaN.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyfed.algorithm import Message
from polyfed.deploy.server import Server, prepare
from polyfed.deploy.site import read_site
from polyfed.deploy.wire import Letter, pack_tree, plain_head, unpack_tree
from polyfed.engines.work import Engine, Result, Task
from polyfed.errors import ClientError, RoundError, UserError
from polyfed.evaluation import split_name
from polyfed.metrics import METRICS, named
from polyfed.runs.progress import Lines, Progress
from polyfed.runs.results import Run

_LOG = logging.getLogger("polyfed.server")
_POLL_SECONDS = 0.2  # Flower's own `send_and_receive` asks every 3 s
_QUERY_SECONDS = 120.0  # for a site to say who it is: it starts Python, imports torch and loads its data
_LATER_SECONDS = 60.0  # Flower forgets a message well after our own limit, so that ours is what is told
_LONGEST = 300  # characters of a site's sentence
_LARGEST = 1e12  # of its numbers
_INTRODUCTION = 4096  # bytes in which it says who it is
_PREFIX = re.compile(r"([a-z]{1,20}_){0,2}")
_TYPES = {"local": "train", "evaluate": "evaluate", "export": "evaluate"}


def to_record(letter: Letter) -> RecordDict:
    """A letter as Flower's records: "head", "scalars" and "arrays".

    >>> import torch
    >>> letter = Letter({"kind": "task"}, Message({"model": {"w": torch.ones(2)}}, {"lr": 0.1}))
    >>> back = from_record(to_record(letter))
    >>> back.head, dict(back.body.scalars), back.body.arrays["model"]["w"]
    ({'kind': 'task'}, {'lr': 0.1}, tensor([1., 1.]))
    """
    packed = {group: np.frombuffer(pack_tree(tree), dtype=np.uint8) for group, tree in letter.body.arrays.items()}
    return RecordDict(
        {
            "head": ConfigRecord({"json": json.dumps(dict(letter.head))}),
            "scalars": MetricRecord(dict(letter.body.scalars)),
            "arrays": ArrayRecord({group: Array(data) for group, data in packed.items()}),
        }
    )


def from_record(record: RecordDict) -> Letter:
    """The letter in Flower's records.

    Raises:
        UserError: they hold none, or a damaged one.
    """
    try:
        head = plain_head(str(record.config_records["head"]["json"]))
        scalars = dict(record.metric_records["scalars"].items())
        arrays = {
            group: unpack_tree(array.numpy().tobytes()) for group, array in record.array_records["arrays"].items()
        }
    except Exception as error:  # of hostile bytes numpy, zipfile and json raise what they like, RecursionError too
        raise UserError(f"not a message of polyfed: {type(error).__name__}: {one_line(error)}") from error
    return Letter(head, Message(arrays, scalars))  # type: ignore[arg-type]  # lists are refused with the other flaws


def size_of(record: RecordDict) -> int:
    """Bytes of arrays and texts in a record, before they are unpacked."""
    arrays = sum(len(array.data) for records in record.array_records.values() for array in records.values())
    texts = (text for records in record.config_records.values() for text in records.values())
    return arrays + sum(len(text) if isinstance(text, str | bytes) else 8 for text in texts)


def _log_to_stderr() -> None:
    """Shows what polyfed logs in the log of the process, which is Flower's."""
    logger = logging.getLogger("polyfed")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("polyfed: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Flower's own handler would show it again


# -- server -----------------------------------------------------------------------------------------------------------


@final
class Sites:
    """Which node is which site. Flower's nodes have random ids, so that each is asked once who it is.

    A node can only be the site under whose name the operator has registered its key (`flwr supernode register KEY --name
    north`). A site that is there keeps its place against another node of the same name.
    """

    def __init__(self, grid: Grid, wanted: Sequence[str], head: Mapping[str, Any]) -> None:
        self._grid, self._wanted, self._head = grid, frozenset(wanted), head
        self._asked: dict[str, int] = {}  # message id -> node, of those who have not answered
        self._known: set[int] = set()
        self._unreadable: set[str] = set()
        self.nodes: dict[str, int] = {}
        self.told: dict[str, Mapping[str, Any]] = {}

    def look(self) -> dict[str, str]:
        """Asks nodes that are new, and takes the answers that have come; returns who refuses to take part, and why."""
        names = {node.node_id: node.name for node in self._grid.get_nodes()}
        for node in sorted(set(names) - self._known):
            letter = to_record(Letter(self._head))
            message = FlowerMessage(letter, node, "query", ttl=_QUERY_SECONDS)
            for sent in self._grid.push_messages([message]):
                self._known.add(node)
                self._asked[sent] = node
        refused: dict[str, str] = {}
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
            if self._welcome(node, names, head):
                refused[str(head["client"])] = one_line(head["refused"])
        return refused

    def _welcome(self, node: int, names: Mapping[int, str], head: Mapping[str, Any]) -> bool:
        """Takes a node for the site that it says it is, if it can be; whether that site refuses."""
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
            return True
        else:
            self.nodes[client], self.told[client] = node, head
        return False

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
            for client, reason in self.look().items():
                raise UserError(f"site {client!r} does not take part: {reason}")
            time.sleep(_POLL_SECONDS)
        return self.told


def pulled(grid: Grid, waiting: Mapping[str, Any], unreadable: set[str]) -> Iterator[FlowerMessage]:
    """The replies that have come, each fetched by itself, so that one that cannot be read takes no other with it: its number
    is added to `unreadable`, and it is not asked for again."""
    for number in [number for number in waiting if number not in unreadable]:
        try:
            yield from grid.pull_messages([number])
        except (
            Exception
        ) as error:  # of hostile bytes protobuf and Flower raise what they like; Flower itself retries the net
            unreadable.add(number)
            reason = f"{type(error).__name__}: {one_line(error)}"
            _LOG.warning("the reply to message %s cannot be read: %s", number, reason)


@final
class FlowerEngine(Engine):
    """Sends each task to its site and takes the replies that come in time. All messages of a phase go at once, so that sites
    work side by side and one limit of time holds for all.

    Args:
        grid: Flower's connection to the nodes.
        sites: which of them is which.
        server: makes the heads of tasks.
    """

    block_bytes = 2**62

    def __init__(self, grid: Grid, sites: Sites, server: Server) -> None:
        self._grid, self._sites, self._server = grid, sites, server

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Yields results as they come. A site that is not connected, does not answer in time or sends something else is a
        failure; its late reply is never asked for."""
        limits = self._server.deployment
        for client, reason in self._sites.look().items():
            _LOG.warning("site %r does not take part any more: %s", client, reason)
        there = set(self._grid.get_node_ids())
        waiting: dict[str, Task] = {}
        for task in tasks:
            node = self._sites.nodes.get(task.client)
            if node not in there or node is None:
                yield _failed(task, "is not connected; its SuperNode must run (flwr supernode list)")
                continue
            letter = to_record(Letter(self._server.order(task), task.down))
            message = FlowerMessage(
                letter,
                node,
                _TYPES[task.phase],
                ttl=2 * limits.round_seconds + _LATER_SECONDS,
                group_id=str(task.round),
            )
            # None is for a message that was not taken.
            sent = [number for number in self._grid.push_messages([message]) if number]
            if sent:
                waiting[sent[0]] = task
            else:
                yield _failed(task, f"could not be sent {size_of(letter)} bytes: the SuperLink refused the message")
        unreadable: set[str] = set()
        deadline = time.monotonic() + limits.round_seconds
        while waiting:
            for answer in pulled(self._grid, waiting, unreadable):
                task = waiting.pop(answer.metadata.reply_to_message_id)
                yield self._result(task, answer)
            for number in unreadable & set(waiting):
                yield _failed(waiting.pop(number), "its reply cannot be read; the log of the server tells why")
            if waiting and time.monotonic() > deadline:
                for task in waiting.values():
                    yield _failed(
                        task, f"no reply within {limits.round_seconds:g} s (round-seconds); a later one is discarded"
                    )
                return
            if waiting:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Nothing: the connection is Flower's."""

    def _is_score(self, name: str) -> bool:
        """Whether a site may tell a number of this name."""
        found = split_name(name, [*METRICS.values(), *map(named, self._server.settings.metrics)])
        return found is not None and _PREFIX.fullmatch(found[0]) is not None

    def _result(self, task: Task, answer: FlowerMessage) -> Result:
        """What a site's answer to a task is worth."""
        server, limits = self._server, self._server.deployment
        if answer.has_error():
            return _failed(task, f"Flower reports error {answer.error.code}: {one_line(answer.error.reason)}")
        if (size := size_of(answer.content)) > limits.max_megabytes * 2**20:
            return _failed(task, f"its reply has {size / 2**20:.1f} MB, above max-megabytes = {limits.max_megabytes:g}")
        try:
            letter = from_record(answer.content)
        except UserError as error:
            return _failed(task, one_line(error))
        head = letter.head
        if head.get("refused"):
            return _failed(task, f"refuses: {one_line(head['refused'])}")
        asked = {"client": task.client, "run": server.run, "round": task.round, "phase": task.phase}
        if wrong := [name for name, value in asked.items() if head.get(name) != value]:
            return _failed(
                task, f"answers for {wrong[0]} {one_line(repr(head.get(wrong[0])))}, asked was {asked[wrong[0]]!r}"
            )
        if head.get("failure") is not None:
            return _failed(task, one_line(head["failure"]))
        metrics, seconds = head.get("metrics", {}), head.get("seconds", 0.0)
        if not isinstance(metrics, dict) or not all(
            self._is_score(n) and (v is None or _finite(v)) for n, v in metrics.items()
        ):
            return _failed(task, f"its metrics are no scores or losses: {one_line(repr(metrics))}")
        if task.phase == "local":
            allowed = server.algorithm.scalars_needed | {"train_loss", "num_examples"}
            scalars = {n: v for n, v in letter.body.scalars.items() if n in allowed}
            if wrong := [
                n
                for n, v in scalars.items()
                if isinstance(v, bool) or not isinstance(v, int | float) or abs(v) > _LARGEST
            ]:
                return _failed(
                    task, f"scalar {wrong[0]!r} is {one_line(repr(scalars[wrong[0]]))}, which is no number in reach"
                )
            known = self._sites.told[task.client].get("num_examples")
            if known is not None and scalars.get("num_examples", known) != known:
                return _failed(
                    task, f"tells num_examples {scalars['num_examples']}, and told {known} when the run began"
                )
            after = {"round": task.round}  # in place of the private state, which stays there
            reply = Message(letter.body.arrays, scalars)
            return Result(task, reply, after, seconds=float(seconds) if _finite(seconds) else 0.0)
        return Result(task, metrics=metrics, weights=None)


def _failed(task: Task, reason: str) -> Result:
    return Result(task, failure=ClientError(task.round, task.client, task.phase, reason))


def one_line(text: object) -> str:
    """What a site has written, short enough for a log, and without line breaks that would forge one.

    >>> one_line("a\\nb"), len(one_line("x" * 10_000))
    ('a b', 300)
    """
    shown = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * _LONGEST])
    return " ".join(shown.split())[:_LONGEST]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # nor NaN


def serve(grid: Grid, config: Mapping[str, Any], progress: Progress | None = None) -> Run:
    """Plays the run that a configuration describes (`polyfed.deploy.server.prepare`) with the sites behind a grid.

    Raises:
        UserError: the configuration does not fit, sites are missing, or one refuses.
        ClientError, RoundError: as `federate`.
    """
    server = prepare(config)
    sites = Sites(grid, server.deployment.sites, server.introduction())
    federation = server.federation(sites.gather(server.deployment.join_seconds))
    return server.play(federation, FlowerEngine(grid, sites, server), progress or Lines())


def server_app(config: Callable[[Context], Mapping[str, Any]] = lambda context: context.run_config) -> ServerApp:
    """The ServerApp of a project: `app = server_app()`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _log_to_stderr()
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
    _log_to_stderr()
    try:
        site, letter = read_site(config), from_record(message.content)
    except Exception:  # whatever site.py raises; the text may show what is the site's own
        logging.getLogger("polyfed.site").exception("this site cannot start")
        return Letter({"client": str(config.get("client-id")), "refused": "it cannot start (the reason is in its log)"})
    return site.answer(letter)
