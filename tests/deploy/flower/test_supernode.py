"""The SuperNode and its site process: deaths that are caused, Flower's inner parts, and the way back to Flower's own."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Error, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.supercore.run import RunNotRunningException

from polyfed.core.errors import UserError
from polyfed.deploy.flower import private_api, supernode
from polyfed.deploy.flower.private_api import (
    UnsupportedFlowerError,
    import_private_flower_functions,
    try_to_shorten_reply_polling,
)
from polyfed.deploy.flower.records import build_flower_record, parse_flower_record
from polyfed.deploy.flower.supernode import MessageLoop, SiteProcess, SiteProcessDiedError
from polyfed.deploy.protocol import framing
from polyfed.deploy.protocol.framing import Frame, FrameError, send_frame
from polyfed.deploy.trial.project import write_site_key_pair

BEGIN = """
import os, signal, socket, subprocess, sys, time
from polyfed.deploy.protocol.framing import Frame, receive_frame, send_frame
link = socket.socket(fileno=int(sys.argv[-1]))
start = receive_frame(link)
assert start.kind == "start"
while True:
    frame = receive_frame(link)
    if frame.head == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif frame.head == "leave a child and die":
        subprocess.Popen(["sleep", "30"], pass_fds=[link.fileno()])
        os.kill(os.getpid(), signal.SIGKILL)
    elif frame.head == "again" and not os.path.exists(start.head):
        open(start.head, "w").close()
        send_frame(link, Frame("again"))
    elif frame.head == "always again":
        send_frame(link, Frame("again"))
    elif frame.head == "garbage":
        link.sendall(b"pfed" + bytes([0, 0, 0, 2]) + bytes(8) + b"[]")
    elif frame.head == "no frame":
        link.sendall(b"x" * 100)
    else:
        send_frame(link, Frame("answer", f"{os.getpid()} {start.head}", frame.scalars, frame.groups))
"""


@pytest.fixture
def site(tmp_path):
    """A site's process that answers with its number, or does what it is told."""
    found = SiteProcess((sys.executable, "-c", BEGIN))
    found.start_if_stopped()
    found.send_and_keep_node_config(str(tmp_path / "mark"))
    yield found
    found.stop_and_get_exit_status()


def ask(site, head="hello"):
    return site.request_answer(Frame("letter", head))


def test_one_process_serves_all_messages(site, tmp_path):
    frame = Frame("letter", "hello", {"lr": 0.1}, {"model": os.urandom(2**20)})
    answers = [site.request_answer(frame) for _ in range(3)]
    assert {answer.head for answer in answers} == {f"{site.pid} {tmp_path / 'mark'}"}
    assert all((answer.scalars, answer.groups) == (frame.scalars, frame.groups) for answer in answers)


def test_a_process_that_was_killed_while_it_was_idle_is_replaced(site):
    before = site.pid
    os.kill(before, signal.SIGKILL)
    while site.pid is not None:
        time.sleep(0.01)
    assert int(ask(site).head.split()[0]) not in (before, os.getpid())


@pytest.mark.parametrize("how", ["die", "leave a child and die"])
def test_a_death_in_the_middle_of_a_message_is_told_at_once_and_the_next_is_answered(site, how):
    """Also where a child of its holds the other end."""
    before, began = site.pid, time.monotonic()
    with pytest.raises(SiteProcessDiedError, match="signal 9"):
        ask(site, how)
    assert time.monotonic() - began < 4
    assert site.pid not in (None, before), "another has been started already"
    assert ask(site).head.startswith(str(site.pid))


def test_a_process_that_asks_for_another_gets_one_and_the_letter_goes_to_that(site):
    before = site.pid
    assert ask(site, "again").head.startswith(str(site.pid))
    assert site.pid != before
    with pytest.raises(SiteProcessDiedError, match="again and again"):
        ask(site, "always again")


def test_a_damaged_answer_stops_nothing(site):
    before = site.pid
    with pytest.raises(FrameError):
        ask(site, "garbage")
    assert ask(site).head.startswith(str(before))
    with pytest.raises(SiteProcessDiedError):
        ask(site, "no frame")
    assert ask(site).head.startswith(str(site.pid))


def test_a_process_that_cannot_start_is_told_with_each_message():
    site = SiteProcess((sys.executable, "-c", "raise SystemExit(3)"))
    site.start_if_stopped()
    site.send_and_keep_node_config("{}")
    for _ in range(2):
        with pytest.raises(SiteProcessDiedError, match="exit 3"):
            ask(site)
    site.stop_and_get_exit_status()


def test_nobody_else_can_open_the_connection(site):
    """It has no name, and the other end is in the process alone."""
    assert site._socket.getsockname() in ("", b"")
    assert not site._socket.get_inheritable()


# -- messages ---------------------------------------------------------------------------------------------------------


def message(record):
    """As the server sends it to node 7."""
    found = make_message(Metadata(1, "", 1, 7, "", "3", time.time(), 600.0, "train"), content=record)
    found.metadata.__dict__["_message_id"] = found.object_id
    return found


class Link:
    """A SuperLink's fleet interface in memory: `connection` is what Flower's client gives."""

    def __init__(self, *messages, flaw=None, raised=RuntimeError):
        self.flower, self.flaw, self.raised = import_private_flower_functions(), flaw, raised
        self.objects, self.queue, self.sent, self.pushed, self.confirmed = {}, [], [], {}, []
        for one in messages:
            self.objects |= {k: v.deflate() for k, v in self.flower["nested"](one).items()}
            self.queue.append((one, self.flower["tree"](one)))
        self.connection = (
            7, lambda: self.queue.pop(0) if self.queue else None, self.send, None, None, self.pull, self.push,
            lambda run, number: self.confirmed.append(number),
        )  # fmt: skip

    def pull(self, run, number):
        if self.flaw == "pull":
            raise self.raised("x")
        return self.objects[number]

    def send(self, reply, tree, seconds):
        if self.flaw == "send":
            raise self.raised("x")
        self.sent.append((reply, tree))
        return {one.object_id for one in self.flower["walk"](tree)}, "session"

    def push(self, run, session, number, content):
        assert (run, session) == (1, "session")
        self.pushed[number] = content

    def replies(self):
        """As the server reads them."""
        return [self.flower["inflate"](tree.object_id, dict(self.pushed)) for _, tree in self.sent]


def served(link, site):
    carrier = MessageLoop(link.flower, link.connection, site)
    while link.queue:
        carrier.answer_message_or_log_error(*link.queue.pop(0))


def echo(frame):
    return Frame("answer", frame.head, frame.scalars, frame.groups)


@pytest.mark.parametrize("size", [0, 10, 9 * 2**20])
def test_a_letter_and_its_answer_travel_as_they_are(size):
    parts_sent = ('{"kind": "task"}', {"lr": 0.1, "n": 3}, {"model": os.urandom(size), "more": b"x"})
    link = Link(message(build_flower_record(*parts_sent)))
    sent = link.queue[0][0]
    served(link, SimpleNamespace(request_answer=echo))
    (reply,) = link.replies()
    assert parse_flower_record(reply.content) == parts_sent
    assert link.confirmed == [sent.object_id]
    assert reply.metadata.reply_to_message_id == sent.object_id
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (7, 1)


HOSTILE = {
    "other records": RecordDict({"x": ConfigRecord({"a": 1})}),
    "no head": RecordDict({"head": ConfigRecord({}), "body": ConfigRecord({})}),
    "a head that is a number": RecordDict({"head": ConfigRecord({"json": 3}), "body": ConfigRecord({})}),
    "texts": RecordDict({"head": ConfigRecord({"json": ""}), "body": ConfigRecord({"#lr": "a"})}),
    "a name without a kind": RecordDict({"head": ConfigRecord({"json": ""}), "body": ConfigRecord({"lr": 1})}),
    "an empty name": RecordDict({"head": ConfigRecord({"json": ""}), "body": ConfigRecord({"": 1})}),
    "many numbers": RecordDict(
        {"head": ConfigRecord({"json": ""}), "body": ConfigRecord({f"#{k}": 1 for k in range(1001)})}
    ),
    "a large head": build_flower_record("x" * 2000, {}, {}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_letter_gets_an_error_and_the_next_message_is_served(case, monkeypatch):
    monkeypatch.setattr(framing, "_MAX_HEAD_BYTES", 1000)
    link = Link(message(HOSTILE[case]), message(build_flower_record("{}", {}, {})))
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def ask(frame):
            send_frame(ours, frame)  # a large one is not sent
            return echo(frame)

        served(link, SimpleNamespace(request_answer=ask))
    first, second = link.replies()
    assert (first.has_error(), first.error.code) == (True, 2)
    assert second.has_content()


def test_the_death_of_the_process_is_flowers_error_of_a_crash():
    def ask(frame):
        raise SiteProcessDiedError("the site's process has ended (signal 9)")

    link = Link(message(build_flower_record("{}", {}, {})))
    served(link, SimpleNamespace(request_answer=ask))
    (reply,) = link.replies()
    assert reply.error == Error(8, "the site's process has ended (signal 9)")


@pytest.mark.parametrize("flaw", ["pull", "send"])
@pytest.mark.parametrize(
    ("raised", "told"), [(RunNotRunningException, "the run has ended"), (RuntimeError, "RuntimeError: x")]
)
def test_a_run_that_has_ended_is_logged_and_waited_out(flaw, raised, told, caplog):
    """Flower's own sign of it is not an Exception."""
    link = Link(message(build_flower_record("{}", {}, {})), flaw=flaw, raised=raised)
    served(link, SimpleNamespace(request_answer=echo))
    assert not link.sent
    assert f"train 3: not answered: {told}" in caplog.text


# -- Flower's inner parts -----------------------------------------------------------------------------------------------


def test_the_installed_flower_is_the_one_that_is_known():
    found = import_private_flower_functions()
    assert set(found) == set(private_api._INTERNALS)
    source = inspect.getsource(found["connect"])
    assert source.count("                send,\n                get_run,\n                get_fab,\n") == 1, (
        "the order of parts"
    )


@pytest.mark.parametrize("name", sorted(private_api._INTERNALS))
def test_a_part_that_differs_is_noticed(monkeypatch, name):
    module, attribute, wanted = private_api._INTERNALS[name]
    monkeypatch.setitem(private_api._INTERNALS, name, (module, attribute, (*wanted, "more")))
    with pytest.raises(UnsupportedFlowerError, match="takes"):
        import_private_flower_functions()
    for other in ((module, "missing", wanted), ("flwr.missing", attribute, wanted)):
        monkeypatch.setitem(private_api._INTERNALS, name, other)
        with pytest.raises(UnsupportedFlowerError, match="has no"):
            import_private_flower_functions()


def test_a_connection_with_other_parts_is_refused():
    with pytest.raises(UnsupportedFlowerError, match="7 parts"):
        MessageLoop({}, range(7), None)


def test_the_grid_asks_again_sooner(monkeypatch):
    from flwr.superlink.grid import http_grid

    plain = http_grid.pull_objects
    monkeypatch.setattr(http_grid, "pull_objects", plain)
    assert try_to_shorten_reply_polling()
    assert try_to_shorten_reply_polling(), "twice in one process"
    assert http_grid.pull_objects.func is plain
    assert http_grid.pull_objects.keywords == {"initial_backoff": 0.05, "backoff_cap": 2.0}
    assert "pull_objects(" in inspect.getsource(http_grid.HttpGrid.pull_messages)
    for other in (lambda ids, pull: None, None):
        monkeypatch.setattr(http_grid, "pull_objects", other)
        assert not try_to_shorten_reply_polling()
        assert http_grid.pull_objects is other


class _ExecutedError(Exception):
    pass


@pytest.fixture
def plain(monkeypatch):
    """What becomes of this process: (program, words)."""
    found = []

    def execv(program, words):
        found.append((Path(program).name, words[1:]))
        raise _ExecutedError

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    return found


WORDS = ["--superlink", "127.0.0.1:1", "--port", "9094", "--node-config", 'client-id="a"']


@pytest.mark.parametrize(
    "more", [["--isolation", "process"], ["--trusted-entities", "x"], ["--health-server-address=a"]]
)
def test_options_of_flowers_own_supernode_lead_there(plain, capsys, more):
    with pytest.raises(_ExecutedError):
        supernode.run_supernode([*WORDS, *more])
    assert plain == [("flower-supernode", [*WORDS, *more])]
    assert f"warning: no long-lived site process: {more[0]} is an option" in capsys.readouterr().err


def test_the_environment_leads_there_too_when_it_may_connect(plain, capsys, monkeypatch, tmp_path):
    """In a trial not before the SuperLink knows its key."""
    monkeypatch.setenv("POLYFED_SITE_PROCESS", "off")
    monkeypatch.setenv("POLYFED_AFTER", str(tmp_path / "ready"))
    waits = []
    monkeypatch.setattr(
        supernode.time, "sleep", lambda s: (waits.append(s), len(waits) > 2 and (tmp_path / "ready").touch())
    )
    with pytest.raises(_ExecutedError):
        supernode.run_supernode(WORDS)
    assert len(waits) == 3
    assert plain == [("flower-supernode", WORDS)]
    assert "POLYFED_SITE_PROCESS is off" in capsys.readouterr().err


def test_who_wants_nothing_else_gets_nothing_else(plain, monkeypatch):
    """Flower's own would execute the server's app."""
    monkeypatch.setenv("POLYFED_SITE_PROCESS", "only")
    with pytest.raises(UserError, match="--isolation is an option of Flower's own SuperNode; flower-supernode may not"):
        supernode.run_supernode([*WORDS, "--isolation", "process"])
    assert not plain


def test_another_flower_is_served_by_its_own_supernode(plain, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(supernode, "SiteProcess", lambda: SimpleNamespace(
        start_if_stopped=lambda: started.append(1), stop_and_get_exit_status=lambda: started.append(0)))  # fmt: skip
    monkeypatch.setattr(private_api, "version", lambda name: "1.43.0")
    with pytest.raises(_ExecutedError):
        supernode.run_supernode(WORDS)
    assert plain == [("flower-supernode", WORDS)]
    assert "warning: no long-lived site process: Flower 1.43.0 has not been tried" in capsys.readouterr().err
    assert started[:2] == [1, 0], "its own process has ended before"


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(supernode, "SiteProcess", lambda: SimpleNamespace(
        start_if_stopped=lambda: None, stop_and_get_exit_status=lambda: None,
        send_and_keep_node_config=lambda config: None))  # fmt: skip
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    monkeypatch.setattr(supernode, "send_logs_to_stderr", lambda: None)
    write_site_key_pair(tmp_path / "key")
    (tmp_path / "rsa").write_text("nothing")
    for words, sentence in (
        (["--root-certificates", str(tmp_path / "none")], "--root-certificates: .* cannot be read"),
        (["--root-certificates", str(tmp_path / "key"), "--insecure"], "exclude each other"),
        (["--auth-supernode-private-key", str(tmp_path / "rsa")], "--auth-supernode-private-key: .* cannot be read"),
        (["--node-config", "a=[ b=1"], "--node-config"),
    ):
        with pytest.raises(UserError, match=sentence):
            supernode.run_supernode([*WORDS, *words])


def test_the_supernode_needs_neither_torch_nor_more_of_flower_than_it_uses():
    """Before Flower is known to fit, nothing of it; never torch, which is the site process's."""
    modules = "[m for m in ('torch', 'flwr', 'numpy') if m in sys.modules]"
    code = f"import sys, polyfed.deploy.flower.supernode as s; print({modules})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == []


@pytest.mark.parametrize(("number", "status", "told"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 0, False)])
def test_a_refusal_is_told_when_it_ends(capfd, number, status, told):
    """Flower's client raises SIGINT when the SuperLink answers 401, and says nothing."""
    with pytest.raises(SystemExit) as ended:
        supernode._exit_on_signal(number, None)
    assert ended.value.code == status
    assert ("refused by the SuperLink, whose log says why" in capfd.readouterr().err) is told
