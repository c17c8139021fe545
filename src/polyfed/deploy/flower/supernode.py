"""Runs a site's SuperNode, which passes the server's messages to one long-lived process with the site's data.

    python -m polyfed.deploy.supernode ...      as flower-supernode, with its options

Flower's own SuperNode starts a process for each message, which imports Flower, torch and polyfed and loads the site's data,
and installs the app that the server sent. This one connects to the SuperLink with Flower's client of the fleet interface,
and passes messages to the site's process (`polyfed.deploy.site.process.worker`) over a pair of sockets. It neither requests
nor executes the app, and listens on no port. If the site's process dies, the server is notified at once, and another
is started.

This uses parts of Flower that are not public. They are checked at the start (`import_private_flower_functions`). If they
differ, or on Windows, or with options that only Flower's SuperNode has, or with POLYFED_SITE_PROCESS=off in the
environment, Flower's own SuperNode is started instead, with a warning; POLYFED_SITE_PROCESS=only forbids that.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from polyfed.core.errors import UserError
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.deploy.contact import ContactRecorder
from polyfed.deploy.flower.polling import PollingSchedule
from polyfed.deploy.flower.private_api import CONNECTION_PARTS, UnsupportedFlowerError, import_private_flower_functions
from polyfed.deploy.flower.supernode_options import (
    build_supernode_parser,
    node_config_as_json,
    read_key_pair,
    read_root_certificates,
)
from polyfed.deploy.logs import send_logs_to_stderr
from polyfed.deploy.protocol.framing import Frame, FrameError, receive_frame, send_frame

_LOG = logging.getLogger("polyfed.supernode")
_STOP_SECONDS = 5.0


class SiteProcessDiedError(Exception):
    """Raised when the site's process ends before it has answered a message."""


@final
class SiteProcess:
    """Starts the process that trains and evaluates at a site, exchanges messages with it, and stops it.

    Args:
        command: the command that starts it; the number of its socket is added.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-P", "-m", "polyfed.deploy.worker")) -> None:
        self._command, self._config = list(command), ""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Returns the id of the site's process; None if the process is not running."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start_if_stopped(self) -> None:
        """Starts the site's process, unless it is already running; the new process imports torch at once."""
        if self.pid is not None:
            return
        self.stop_and_get_exit_status()
        own_socket, child_socket = socket.socketpair()
        with child_socket:
            descriptor = child_socket.fileno()
            self._process = subprocess.Popen(
                [*self._command, str(descriptor)], pass_fds=[descriptor], stdin=subprocess.DEVNULL
            )
        self._socket = own_socket
        threading.Thread(target=_close_after_exit, args=(self._process, own_socket), daemon=True).start()
        if self._config:
            self._send_config()

    def send_and_keep_node_config(self, config_json: str) -> None:
        """Sends the node configuration (JSON) to the site's process, and to each one started later."""
        self._config = config_json
        self._send_config()

    def _send_config(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended, which the next message will notice
            assert self._socket is not None
            send_frame(self._socket, Frame("start", self._config))

    def request_answer(self, frame: Frame) -> Frame:
        """Sends a message to the site's process, which it starts if needed, and returns the answer.

        Raises:
            SiteProcessDiedError: the process ended before it answered; another one has been started.
            FrameError: the frame is larger than the process reads, or the answer is damaged.
        """
        for _ in range(2):
            self.start_if_stopped()
            assert self._socket is not None
            try:
                send_frame(self._socket, frame)
                answer = receive_frame(self._socket)
            except (EOFError, FrameError, OSError) as error:
                if isinstance(error, FrameError) and type(error) is FrameError:
                    raise  # the frame was read to its end, so that the connection can still be used
                status = self.stop_and_get_exit_status()
                self.start_if_stopped()
                raise SiteProcessDiedError(f"the site's process has ended ({_describe_exit(status)})") from error
            if answer.kind != "again":
                return answer
            self.stop_and_get_exit_status()
        raise SiteProcessDiedError("the site's process asks for a new process again and again")

    def stop_and_get_exit_status(self) -> int | None:
        """Stops the site's process and returns its exit status; None if no process was started."""
        connection, process, self._socket, self._process = self._socket, self._process, None, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is None:
            return None
        try:
            return process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _close_after_exit(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    """Closes this end of the socket once the process has ended, since a child may hold the other end open."""
    process.wait()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "it could not be started"
    return f"signal {-status}" if status < 0 else f"exit {status}"


@final
class MessageLoop:
    """Receives the server's messages, lets the site's process answer them, and sends the replies back.

    Args:
        private_flower_functions: Flower's private parts (`import_private_flower_functions`).
        connection: the parts of a connection to the SuperLink.
        site: the site's process.
        contact: records that the server was reached; None records nothing.
    """

    def __init__(
        self,
        private_flower_functions: Mapping[str, Any],
        connection: Sequence[Any],
        site: SiteProcess,
        contact: ContactRecorder | None = None,
    ) -> None:
        if len(connection) != CONNECTION_PARTS:
            raise UnsupportedFlowerError(f"a connection of Flower has {len(connection)} parts")
        self._flower, self._site = private_flower_functions, site
        self._contact = contact or ContactRecorder({}, "", None)
        _, self._receive, self._send, _, _, self._pull, self._push, self._confirm = connection

    def answer_messages_forever(self, schedule: PollingSchedule) -> NoReturn:
        """Answers Flower's messages until a signal ends this process or the connection fails for good."""
        while True:
            time.sleep(schedule.seconds_until_poll())
            received = self._receive()
            self._contact.record_answer()
            if received is None:
                schedule.record_empty_poll()
            else:
                schedule.record_arrival_time()
                self._contact.record_start_or_end_of_task(begins=True)
                self.answer_message_or_log_error(*received)
                self._contact.record_start_or_end_of_task(begins=False)
                schedule.start_new_wait()

    def answer_message_or_log_error(self, message: Any, object_tree: Any) -> None:
        """Passes a message to the site's process, and its reply to the server; logs errors.

        Args:
            message: the message, without its content, which is still at the SuperLink.
            object_tree: ids of the content's objects.
        """
        start = time.monotonic()
        label = sanitise_for_terminal(f"{message.metadata.message_type} {message.metadata.group_id}").strip()
        try:
            reply = self._build_reply(message, object_tree)
            self._send_reply(reply, time.monotonic() - start)
        except self._flower["ended"]:
            _LOG.warning("%s: not answered: the run has ended", label)
        except Exception as error:  # on hostile bytes Flower may raise anything
            _LOG.warning("%s: not answered: %s: %s", label, type(error).__name__, sanitise_for_terminal(error)[:300])
        else:
            _LOG.info("%s: answered after %.2f s", label, time.monotonic() - start)

    def _build_reply(self, message: Any, tree: Any) -> Any:
        """Downloads a message's content, passes it to the site's process, and returns the reply."""
        from flwr.app import Error, Message

        from polyfed.deploy.flower.records import build_flower_record, parse_flower_record

        run_id, message_id = message.metadata.run_id, tree.object_id
        object_ids = list(dict.fromkeys(node.object_id for node in self._flower["walk"](tree)))
        # The server announces a message a moment before it has sent all of it, so early pulls may fail.
        contents = self._flower["pull"](
            object_ids, lambda node: self._pull(run_id, node), initial_backoff=0.05, backoff_cap=2.0
        )
        self._confirm(run_id, message_id)
        full_message = self._flower["inflate"](message_id, contents)
        full_message.metadata.__dict__["_message_id"] = message_id
        try:
            answer = self._site.request_answer(Frame("letter", *parse_flower_record(full_message.content)))
        except SiteProcessDiedError as error:
            _LOG.error("%s", error)
            return Message(Error(_ERROR_CRASHED, str(error)), reply_to=full_message)
        except Exception as error:  # on hostile bytes numpy and Flower may raise anything
            _LOG.error(
                "a message cannot be handed over: %s: %s", type(error).__name__, sanitise_for_terminal(error)[:300]
            )
            return Message(
                Error(_ERROR_RAISED, f"it is not a message of polyfed ({type(error).__name__})"), reply_to=full_message
            )
        return Message(build_flower_record(answer.head, answer.scalars, answer.groups), reply_to=full_message)

    def _send_reply(self, reply: Any, seconds: float) -> None:
        """Sends a reply, and uploads those of its objects that the SuperLink does not have yet."""
        with self._flower["fixed"]():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            run_id, objects = reply.metadata.run_id, self._flower["nested"](reply)
            missing_ids, session = self._send(reply, self._flower["tree"](reply), seconds)
            self._flower["push"](
                objects,
                lambda object_id, content: self._push(run_id, session, object_id, content),
                object_ids_to_push=set(missing_ids),
            )


_ERROR_RAISED, _ERROR_CRASHED = 2, 8  # Flower's error codes


def _exec_flower_supernode(arguments: Sequence[str], reason: str) -> NoReturn:
    """Replaces this process by Flower's own SuperNode, and prints a warning with the reason."""
    _wait_for_trial()
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if (program := shutil.which("flower-supernode", path=search_path)) is None:
        raise UserError("flower-supernode is missing; pip install 'polyfed[flower]'")
    if os.environ.get("POLYFED_SITE_PROCESS") == "only":
        raise UserError(
            f"no long-lived site process: {reason}; flower-supernode may not serve (POLYFED_SITE_PROCESS=only)"
        )
    consequence = (
        "flower-supernode serves this site instead: a process for each message, and with it the app that the server "
        "sends"
    )
    print(f"polyfed: warning: no long-lived site process: {reason}; {consequence}", file=sys.stderr, flush=True)
    os.execv(program, [program, *arguments])


def _wait_for_trial() -> None:
    """Waits, in a local trial, for the file that shows that the SuperLink runs and knows this site's key."""
    file = os.environ.get("POLYFED_AFTER")
    while file and not os.path.exists(file):
        time.sleep(0.05)


_REFUSAL_TEXT = (
    b"polyfed: ended by Ctrl-C, or refused by the SuperLink, whose log says why: this machine's clock is wrong, or its key "
    b"is not the registered one\n"
)


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    """Ends this process on SIGTERM, Ctrl-C, or the SIGINT by which Flower's client reports a refusal of this node."""
    if number == signal.SIGINT:
        os.write(2, _REFUSAL_TEXT)  # not by `logging`, which the signal may have interrupted
    raise SystemExit(0 if number == signal.SIGTERM else 130)


def run_supernode(arguments: list[str]) -> None:
    """Runs the SuperNode until a signal, or until the SuperLink refuses it.

    Raises:
        UserError: a file or the node configuration cannot be read.
    """
    options, unknown = build_supernode_parser().parse_known_args(arguments)
    if os.name == "nt":
        _exec_flower_supernode(arguments, "it needs a system of the kind of Unix")
    if os.environ.get("POLYFED_SITE_PROCESS") == "off":
        _exec_flower_supernode(arguments, "POLYFED_SITE_PROCESS is off")
    if unknown:
        _exec_flower_supernode(arguments, f"{unknown[0]} is an option of Flower's own SuperNode")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on_signal)
    site = SiteProcess()
    try:
        site.start_if_stopped()  # it imports torch while this process imports Flower
        try:
            flower = import_private_flower_functions()
        except UnsupportedFlowerError as error:
            site.stop_and_get_exit_status()
            _exec_flower_supernode(arguments, str(error))
        send_logs_to_stderr()
        node_config = node_config_as_json(options.node_config, flower["words"])
        site.send_and_keep_node_config(node_config)
        authority = read_root_certificates(options.root_certificates, options.insecure)
        key = read_key_pair(options.auth_supernode_private_key)
        contact = ContactRecorder(json.loads(node_config), options.superlink, options.root_certificates)
        _wait_for_trial()
        with flower["connect"](
            options.superlink, options.insecure, authority, key, options.max_retries, options.max_wait_time
        ) as connection:
            _LOG.info("connected with %s as node %s", options.superlink, connection[0])
            MessageLoop(flower, connection, site, contact).answer_messages_forever(PollingSchedule())
        raise SystemExit(1)  # Flower's client has logged why it gave up
    finally:
        site.stop_and_get_exit_status()


def run_from_command_line() -> None:
    """Runs `main` with the command line's arguments, and exits with an error message if it raises a `UserError`."""
    try:
        run_supernode(sys.argv[1:])
    except UserError as error:
        sys.exit(f"polyfed: {error}")
