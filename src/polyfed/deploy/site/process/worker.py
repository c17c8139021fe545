"""Runs a site's long-lived process, which keeps torch, the network and the data in memory and answers message after
message.

    python -m polyfed.deploy.worker FD      the SuperNode (`polyfed.deploy.flower.supernode`) starts it and holds the other
                                            end of the socket FD

The process loads `site.py` and calls its `client()` as soon as it starts, before the first message. A run begins with an
introduction, for which the files on disk count: if the process has answered before, or has waited for long, or Python files
beside `site.py` have changed, it asks the SuperNode for a new process in its place. Between the messages of a run everything
stays in memory, also on a GPU, except the state of the run, which is on disk.

The process ends with the SuperNode, even in the middle of a message.
"""

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from polyfed.core.algorithm import Client
from polyfed.deploy.logs import send_logs_to_stderr
from polyfed.deploy.protocol.framing import BrokenStreamError, Frame, FrameError, receive_frame, send_frame
from polyfed.deploy.protocol.wire import SERVER_HEAD_BYTES, Envelope, PackedEnvelope, pack_envelope, parse_head
from polyfed.deploy.site.process.node_config import answer_or_refuse_message, build_site
from polyfed.deploy.site.site import Site

_FRESH_SECONDS = 300.0  # the largest age of a run's data when the run begins
_LOG = logging.getLogger("polyfed.site")


@final
class SiteRunner:
    """Keeps a site loaded in memory and answers the messages that its SuperNode passes on.

    Args:
        config: the node configuration.
        clock: returns the time in seconds.
    """

    def __init__(self, config: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._site: Site | None = None
        self._client: Client | None = None
        self._has_answered = False
        self._loaded_at, self._stamps = 0.0, _file_stamps(config)

    def try_to_load_site(self) -> None:
        """Loads `site.py` and builds the client; logs an error, and the next message tries again."""
        start = self._clock()
        try:
            self._get_site()
            self._get_client()
        except Exception:  # site.py may raise anything; the message that needs it gets the refusal
            _LOG.exception("site.py cannot be loaded now; the next message tries again")
        else:
            _LOG.info("site.py is loaded (%.1f s)", self._clock() - start)
        self._loaded_at = self._clock()

    def answer_frame_or_request_restart(self, frame: Frame) -> Frame:
        """Answers a message; asks for a new process if a run begins and the loaded data are stale."""
        if self._is_stale(frame):
            return Frame("again")
        self._has_answered = True
        unpack = lambda: PackedEnvelope(frame.head, frame.scalars, frame.groups, SERVER_HEAD_BYTES)  # noqa: E731
        return _to_frame(answer_or_refuse_message(self._config, self._get_site, unpack))

    def _is_stale(self, frame: Frame) -> bool:
        """Returns whether a message begins a run but the loaded data are too old or have changed."""
        try:
            is_introduction = parse_head(frame.head[:SERVER_HEAD_BYTES]).get("kind") == "introduce"
        except ValueError:
            return False
        is_old = self._has_answered or self._clock() - self._loaded_at > _FRESH_SECONDS
        return is_introduction and (is_old or _file_stamps(self._config) != self._stamps)

    def _get_site(self) -> Site:
        if self._site is None:
            site = build_site(self._config)
            self._build_client = site.client
            self._site = replace(site, client=self._get_client)
        return self._site

    def _get_client(self) -> Client:
        """Returns the site's client; only the first call builds it."""
        if self._client is None:
            self._client = self._build_client()
        return self._client


def _to_frame(envelope: Envelope) -> Frame:
    return Frame("answer", *pack_envelope(envelope))


def _file_stamps(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the modification time (ns) and size of `site.py` and of every Python file beside it, by file name."""
    stamps = {}
    for file in Path(str(config.get("site", ""))).parent.glob("*.py"):
        try:
            status = file.stat()
        except OSError:
            continue
        stamps[file.name] = (status.st_mtime_ns, status.st_size)
    return stamps


def answer_frames_until_closed(connection: socket.socket) -> None:
    """Answers the messages that arrive on a socket until the SuperNode closes it."""
    frames: queue.SimpleQueue[Frame | FrameError] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(connection, frames), daemon=True).start()
    first = frames.get()
    if not isinstance(first, Frame) or first.kind != "start":
        raise BrokenStreamError("the first frame is not a node configuration")
    runner = SiteRunner(parse_head(first.head))
    runner.try_to_load_site()
    while True:
        frame = frames.get()
        if isinstance(frame, FrameError):
            _LOG.error("%s", frame)
            answer = _to_frame(Envelope({"refused": "a message was damaged on its way to the site's process"}))
        else:
            answer = runner.answer_frame_or_request_restart(frame)
        send_frame(connection, answer)


def _read_frames(connection: socket.socket, frames: "queue.SimpleQueue[Frame | FrameError]") -> None:
    """Queues messages for the main thread; ends the process when the connection is closed."""
    while True:
        try:
            frames.put(receive_frame(connection))
        except (EOFError, BrokenStreamError, OSError) as error:
            # Even in the middle of a message: nobody waits for its answer, and files are written whole or not at all.
            if isinstance(error, BrokenStreamError):
                print(f"polyfed: {error}", file=sys.stderr, flush=True)
            os._exit(0 if isinstance(error, EOFError) else 1)
        except FrameError as error:
            frames.put(error)


def run_site_process_on_inherited_socket() -> None:
    """Runs the site's process on the socket whose file number is the first command-line argument."""
    os.umask(0o077)
    os.dup2(2, 1)  # prints of site.py go to the site's log
    send_logs_to_stderr()
    # The suppressed errors say that the SuperNode has ended.
    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(BrokenPipeError, ConnectionError):
        answer_frames_until_closed(connection)
