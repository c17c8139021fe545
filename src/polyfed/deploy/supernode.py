"""A site's SuperNode that hands messages to one long-lived process.

    python -m polyfed.deploy.supernode ...      as flower-supernode, with its options

Flower's own SuperNode starts a process for each message, which imports Flower, torch and polyfed and loads the site's data,
and installs the app that the server sent. This one speaks to the SuperLink by Flower's own client of its fleet interface,
and hands what comes to the site's process (`polyfed.deploy.worker`) over a pair of sockets. It neither asks for the app nor
executes it, and listens on no port. Should the process of the site die, the server is told at once, and another is started.

This uses parts of Flower that are not public. They are compared with what is known before the start (`parts`); where they
differ, or on Windows, or with options that only Flower's SuperNode has, or with POLYFED_SITE_PROCESS=off in the environment,
that is started instead, with a warning; with POLYFED_SITE_PROCESS=only nothing is.
"""

import argparse
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from polyfed.core.errors import UserError
from polyfed.core.files import read_file
from polyfed.core.text import clean
from polyfed.deploy.frames import Frame, FrameError, receive, send
from polyfed.deploy.internals import CALLBACKS, DiffersError, parts
from polyfed.deploy.logs import log_to_stderr
from polyfed.deploy.pace import Pace

_LOG = logging.getLogger("polyfed.supernode")
_STOP_SECONDS = 5.0


class DiedError(Exception):
    """The site's process has ended while it had a message."""


@final
class SiteProcess:
    """The site's process, seen from the SuperNode.

    Args:
        command: starts it; the number of its socket is added.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-P", "-m", "polyfed.deploy.worker")) -> None:
        self._command, self._config = list(command), ""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Its number, while it is there."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start(self) -> None:
        """Starts it, if it is not there. It begins to load before it is told what."""
        if self.pid is not None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen([*self._command, str(number)], pass_fds=[number], stdin=subprocess.DEVNULL)
        self._link = ours
        threading.Thread(target=_watch, args=(self._process, ours), daemon=True).start()
        if self._config:
            self._tell()

    def configure(self, config: str) -> None:
        """Tells it the node configuration, as JSON; those that are started later as well."""
        self._config = config
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next message will find
            assert self._link is not None
            send(self._link, Frame("start", self._config))

    def ask(self, frame: Frame) -> Frame:
        """Its answer to a letter.

        Raises:
            DiedError: it ended before it answered; another one has been started.
            FrameError: the letter is larger than it reads, or the answer is damaged.
        """
        for _ in range(2):
            self.start()
            assert self._link is not None
            try:
                send(self._link, frame)
                answer = receive(self._link)
            except (EOFError, FrameError, OSError) as error:
                if isinstance(error, FrameError) and type(error) is FrameError:
                    raise  # read to its end
                status = self.close()
                self.start()
                raise DiedError(f"the site's process has ended ({_status(status)})") from error
            if answer.kind != "again":
                return answer
            self.close()
        raise DiedError("the site's process asks for another again and again")

    def close(self) -> int | None:
        """Ends it; the status with which it ended."""
        link, process, self._link, self._process = self._link, self._process, None, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        if process is None:
            return None
        try:
            return process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _watch(process: "subprocess.Popen[bytes]", link: socket.socket) -> None:
    """Ends our waiting for a process that is dead, should a child of its still hold the other end."""
    process.wait()
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _status(status: int | None) -> str:
    if status is None:
        return "it could not be started"
    return f"signal {-status}" if status < 0 else f"exit {status}"


@final
class Carrier:
    """Carries messages between the SuperLink and the site's process.

    Args:
        flower: its inner parts.
        connection: what `connect` gives.
        site: the site's process.
    """

    def __init__(self, flower: Mapping[str, Any], connection: Sequence[Any], site: SiteProcess) -> None:
        if len(connection) != CALLBACKS:
            raise DiffersError(f"a connection of Flower has {len(connection)} parts")
        self._flower, self._site = flower, site
        _, self._receive, self._send, _, _, self._pull, self._push, self._confirm = connection

    def run(self, pace: Pace) -> NoReturn:
        """Serves until the process is ended, or the connection fails for good."""
        while True:
            time.sleep(pace.wait())
            if (received := self._receive()) is None:
                pace.asked()
            else:
                pace.came()
                self.serve(*received)
                pace.begin()

    def serve(self, message: Any, tree: Any) -> None:
        """Answers a message, whose content is still at the SuperLink."""
        began = time.monotonic()
        told = clean(f"{message.metadata.message_type} {message.metadata.group_id}").strip()
        try:
            reply = self._answer(message, tree)
            self._return(reply, time.monotonic() - began)
        except self._flower["ended"]:
            _LOG.warning("%s: not answered: the run has ended", told)
        except Exception as error:  # of hostile bytes Flower raises what it likes
            _LOG.warning("%s: not answered: %s: %s", told, type(error).__name__, clean(error)[:300])
        else:
            _LOG.info("%s: answered after %.2f s", told, time.monotonic() - began)

    def _answer(self, message: Any, tree: Any) -> Any:
        """The reply to a message."""
        from flwr.app import Error, Message

        from polyfed.deploy.records import parts_in, record_of

        run, number = message.metadata.run_id, tree.object_id
        wanted = list(dict.fromkeys(one.object_id for one in self._flower["walk"](tree)))
        # The server announces a message before it has sent all of it, mostly a moment before.
        contents = self._flower["pull"](wanted, lambda one: self._pull(run, one), initial_backoff=0.05, backoff_cap=2.0)
        self._confirm(run, number)
        whole = self._flower["inflate"](number, contents)
        whole.metadata.__dict__["_message_id"] = number
        try:
            answer = self._site.ask(Frame("letter", *parts_in(whole.content)))
        except DiedError as error:
            _LOG.error("%s", error)
            return Message(Error(_CRASHED, str(error)), reply_to=whole)
        except Exception as error:  # of hostile bytes numpy and Flower raise what they like
            _LOG.error("a message cannot be handed over: %s: %s", type(error).__name__, clean(error)[:300])
            return Message(Error(_RAISED, f"it is no message of polyfed ({type(error).__name__})"), reply_to=whole)
        return Message(record_of(answer.head, answer.scalars, answer.groups), reply_to=whole)

    def _return(self, reply: Any, seconds: float) -> None:
        """Sends a reply."""
        with self._flower["fixed"]():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            run, objects = reply.metadata.run_id, self._flower["nested"](reply)
            wanted, session = self._send(reply, self._flower["tree"](reply), seconds)
            self._flower["push"](
                objects, lambda one, content: self._push(run, session, one, content), object_ids_to_push=set(wanted)
            )


_RAISED, _CRASHED = 2, 8  # of Flower's codes of errors


def _parser() -> argparse.ArgumentParser:
    """Flower's options for a SuperNode that mean something here, and those of its runtime interface, which is not there."""
    parser = argparse.ArgumentParser(prog="python -m polyfed.deploy.supernode", allow_abbrev=False)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--root-certificates", type=Path, metavar="FILE")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--auth-supernode-private-key", type=Path, metavar="FILE")
    parser.add_argument("--node-config", default="")
    parser.add_argument("--max-retries", type=int)
    parser.add_argument("--max-wait-time", type=float)
    for unused in ("--host", "--port"):
        parser.add_argument(unused, help="for Flower's own SuperNode alone: this one listens on no port")
    return parser


def _config(text: str, words: Callable[[list[str] | None], Mapping[str, Any]]) -> str:
    """The node configuration as JSON, from what Flower takes: words, or the name of a TOML file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return json.dumps(dict(words([text] if text else None)))
    except Exception as error:  # click's, and those of TOML and of files
        raise UserError(f"--node-config cannot be read: {getattr(error, 'message', error)}") from error


def _key(file: Path | None) -> Any:
    """The registered key and its public half.

    Raises:
        UserError: it cannot be read.
    """
    if file is None:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(read_file(file.expanduser()), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"--auth-supernode-private-key: {file} cannot be read ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"--auth-supernode-private-key: {file} is no key of an elliptic curve; ssh-keygen -t ecdsa -b 384"
        )
    return key, key.public_key()


def _authority(file: Path | None, insecure: bool) -> bytes | None:
    """The certificates that the SuperLink must be known by; None are the system's.

    Raises:
        UserError: they cannot be read.
    """
    if file is not None and insecure:
        raise UserError("--root-certificates and --insecure exclude each other")
    try:
        return None if file is None else read_file(file.expanduser())
    except OSError as error:
        raise UserError(f"--root-certificates: {file} cannot be read ({error.strerror})") from error


def _plain(words: Sequence[str], why: str) -> NoReturn:
    """Becomes Flower's own SuperNode."""
    _await()
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if (program := shutil.which("flower-supernode", path=beside)) is None:
        raise UserError("flower-supernode is missing; pip install 'polyfed[flower]'")
    if os.environ.get("POLYFED_SITE_PROCESS") == "only":
        raise UserError(
            f"no long-lived site process: {why}; flower-supernode may not serve (POLYFED_SITE_PROCESS=only)"
        )
    told = "flower-supernode serves this site instead: a process for each message, and with it the app that the server sends"
    print(f"polyfed: warning: no long-lived site process: {why}; {told}", file=sys.stderr, flush=True)
    os.execv(program, [program, *words])


def _await() -> None:
    """In a trial: until the SuperLink is there and knows the key, which a file tells. What takes time to import has been."""
    file = os.environ.get("POLYFED_AFTER")
    while file and not os.path.exists(file):
        time.sleep(0.05)


_REFUSED = (
    b"polyfed: ended by Ctrl-C, or refused by the SuperLink, whose log tells why: this machine's clock is wrong, or its key "
    b"is not the registered one\n"
)


def _ended(number: int, _frame: object) -> NoReturn:
    """SIGTERM, Ctrl-C, or Flower's client, which raises SIGINT when the SuperLink refuses this node, and says nothing."""
    if number == signal.SIGINT:
        os.write(2, _REFUSED)  # not by `logging`, in which the signal may have come
    raise SystemExit(0 if number == signal.SIGTERM else 130)


def main(words: list[str]) -> None:
    """Runs the SuperNode with these words.

    Raises:
        UserError: a file cannot be read, or the node configuration is none.
    """
    given, strange = _parser().parse_known_args(words)
    if os.name == "nt":
        _plain(words, "it needs a system of the kind of Unix")
    if os.environ.get("POLYFED_SITE_PROCESS") == "off":
        _plain(words, "POLYFED_SITE_PROCESS is off")
    if strange:
        _plain(words, f"{strange[0]} is an option of Flower's own SuperNode")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ended)
    site = SiteProcess()
    try:
        site.start()  # it imports torch while this process imports Flower
        try:
            flower = parts()
        except DiffersError as error:
            site.close()
            _plain(words, str(error))
        log_to_stderr()
        site.configure(_config(given.node_config, flower["words"]))
        authority, key = _authority(given.root_certificates, given.insecure), _key(given.auth_supernode_private_key)
        _await()
        with flower["connect"](
            given.superlink, given.insecure, authority, key, given.max_retries, given.max_wait_time
        ) as connection:
            _LOG.info("connected with %s as node %s", given.superlink, connection[0])
            Carrier(flower, connection, site).run(Pace())
        raise SystemExit(1)  # Flower's client has told why it gave up
    finally:
        site.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"polyfed: {error}")
