"""The site process: loaded once, fresh for each run, the bits of a simulation, and no longer there than its SuperNode."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from flwr.app import Message

import polyfed as pf
from polyfed.algorithms import FedAvg, PFedLA
from polyfed.deploy.flower.apps import run_deployment
from polyfed.deploy.flower.records import build_flower_record, parse_flower_record
from polyfed.deploy.flower.supernode import SiteProcess
from polyfed.deploy.protocol.framing import Frame, receive_frame, send_frame
from polyfed.deploy.protocol.wire import PROTOCOL
from polyfed.deploy.site.process.worker import SiteRunner
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.testing import small_clients

from ..conftest import NAMES, ONE, MemoryGrid, configuration
from ..test_parity import assert_same

SITE = """
import pathlib
from polyfed.testing import small_clients

CALLS = pathlib.Path(__file__).parent / "calls"

def client():
    with CALLS.open("a") as file:
        file.write("x")
    return small_clients()[0]
"""


@pytest.fixture
def config(tmp_path):
    """A node configuration; its `site.py` notes each call of `client()`."""
    (tmp_path / "site").mkdir()
    file = tmp_path / "site" / "site.py"
    file.write_text(SITE)
    yield {"client-id": "client-0", "site": str(file), "state-dir": str(tmp_path / "state"), "allow-disclosure": True}
    sys.modules.pop("polyfed_own_site", None)


def letter(kind="introduce", **words):
    method = describe_method_and_settings(FedAvg(lr=0.05), Settings(rounds=1))["algorithm"]
    return Frame("letter", json.dumps({"kind": kind, "protocol": PROTOCOL, "run": "a", "algorithm": method, **words}))


def architecture():
    from polyfed.core.nn.module_cache import cached_module

    return cached_module(small_clients()[0].model).architecture


def calls(config):
    file = Path(config["site"]).parent / "calls"
    return len(file.read_text()) if file.exists() else 0


def told(frame):
    return json.loads(frame.head)


def test_the_client_is_made_before_the_first_message_and_once(config):
    keeper = SiteRunner(config)
    keeper.try_to_load_site()
    assert calls(config) == 1
    first = letter(architecture=architecture())
    assert told(keeper.answer_frame_or_request_restart(first))["client"] == "client-0"
    for _ in range(3):  # refused after the client was looked at
        keeper.answer_frame_or_request_restart(
            letter("task", client="client-0", phase="local", round=1, state=7, seed=1, run_seed=1, keep=0)
        )
    assert calls(config) == 1


def test_each_run_begins_with_what_is_on_the_disk(config):
    """A process that has answered, or waited for long, or whose site.py has changed, asks for another."""
    first, now = letter(architecture=architecture()), [0.0]
    keeper = SiteRunner(config, clock=lambda: now[0])
    keeper.try_to_load_site()
    now[0] = 299.0
    assert keeper.answer_frame_or_request_restart(first).kind == "answer"
    assert keeper.answer_frame_or_request_restart(first).kind == "again"
    assert keeper.answer_frame_or_request_restart(letter("task")).kind == "answer", "a message of the same run does not"
    waited = SiteRunner(config, clock=lambda: now[0])
    waited.try_to_load_site()
    now[0] += 301.0
    assert waited.answer_frame_or_request_restart(first).kind == "again"
    for change in (lambda f: f.write_text(SITE + "\n# more\n"), lambda f: (f.parent / "nets.py").write_text("x = 1\n")):
        changed = SiteRunner(config, clock=lambda: now[0])
        changed.try_to_load_site()
        change(Path(config["site"]))
        assert changed.answer_frame_or_request_restart(first).kind == "again"
    assert SiteRunner(config, clock=lambda: now[0]).answer_frame_or_request_restart(letter("task")).kind == "answer"


def test_a_site_that_cannot_be_loaded_says_so_and_is_tried_again(config, caplog):
    """A crash in the middle of a run, and data that are there again a moment later."""
    file = Path(config["site"])
    file.write_text("raise RuntimeError('the disk of patient 17')\n")
    keeper = SiteRunner(config)
    keeper.try_to_load_site()
    answer = told(keeper.answer_frame_or_request_restart(letter("task")))
    assert answer == {"client": "client-0", "refused": "it cannot start (the reason is in its log)"}
    assert "patient 17" in caplog.text
    file.write_text(SITE.replace("    return small", "    raise KeyError('patient 17')\n    return small"))
    task = letter("task", client="client-0", phase="local", round=1, seed=1, run_seed=1, state=None, keep=0)
    assert (
        told(keeper.answer_frame_or_request_restart(task))["refused"] == "KeyError (its text is in the log of the site)"
    )
    assert (
        told(keeper.answer_frame_or_request_restart(task))["refused"] == "KeyError (its text is in the log of the site)"
    )
    assert calls(config) == 2, "tried with each message"


@pytest.mark.parametrize("head", ["", "[]", "{", "[" * 10_000, json.dumps({"kind": ["introduce"]}), "x" * (2**20 + 1)])
def test_letters_that_are_none_are_refused(config, head):
    assert "refused" in told(SiteRunner(config).answer_frame_or_request_restart(Frame("letter", head)))


class Kept:
    """A node's app that hands over to a site process's keeper, in frames on a socket; one that asks for another gets it."""

    def __init__(self):
        self.keeper, self.made = None, 0

    def __call__(self, message, context):
        sent = self._over(Frame("letter", *parse_flower_record(message.content)))
        answer = Frame("again") if self.keeper is None else self.keeper.answer_frame_or_request_restart(sent)
        if answer.kind == "again":
            self.keeper, self.made = SiteRunner(dict(context.node_config)), self.made + 1
            self.keeper.try_to_load_site()
            answer = self.keeper.answer_frame_or_request_restart(sent)
        back = self._over(answer)
        return Message(build_flower_record(back.head, back.scalars, back.groups), reply_to=message)

    def _over(self, frame):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_frame(ours, frame)  # small enough for the socket
            return receive_frame(theirs)


@pytest.mark.parametrize(
    "method", [FedAvg(lr=0.05), pytest.param(PFedLA(lr=0.05), marks=pytest.mark.thorough)], ids=["fedavg", "pfedla"]
)
def test_the_bits_are_those_of_a_simulation(tmp_path, nodes, method, monkeypatch):
    """With clients and networks that stay in memory from round to round; and a second run after the first."""
    monkeypatch.setattr("polyfed.deploy.flower.engine._POLL_SECONDS", 0.01)
    (tmp_path / "server.py").write_text(ONE)
    grid = MemoryGrid(nodes(small_clients()))
    for node in grid.nodes.values():
        node.app = Kept()
    words = configuration(method, sites=NAMES, file=str(tmp_path / "server.py"))
    run = run_deployment(grid, {**words, "out": str(tmp_path / "run")}, SilentProgress())
    assert_same(tmp_path, run, pf.federate(small_clients(), method, rounds=3, seed=3, workers=0))
    again = run_deployment(grid, {**words, "out": str(tmp_path / "again")}, SilentProgress())
    assert [{**row, "seconds": 0} for row in again.history] != []
    assert {node.app.made for node in grid.nodes.values()} == {2}, "one for each run"


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def site(config):
    found = SiteProcess()
    found.start_if_stopped()
    found.send_and_keep_node_config(json.dumps(config))
    yield found
    found.stop_and_get_exit_status()


def gone(process):
    """Whether a process ends within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_real_process_serves_and_is_replaced(site, config):
    first = letter(architecture=architecture())
    assert told(site.request_answer(first))["client"] == "client-0"
    before = site.pid
    os.kill(before, signal.SIGKILL)
    while site.pid is not None:
        time.sleep(0.01)
    assert "refused" in told(site.request_answer(letter("task", client="client-0", phase="none", round=1)))
    assert site.pid != before
    between = site.pid
    assert told(site.request_answer(first))["client"] == "client-0", "another run"
    assert site.pid != between
    assert calls(config) == 3


@pytest.mark.slow
def test_a_damaged_frame_does_not_end_it(site):
    site.request_answer(letter(architecture=architecture()))
    before = site.pid
    site._socket.sendall(b"pfed" + (2).to_bytes(4, "big") + bytes(8) + b"[]")
    assert told(receive_frame(site._socket))["refused"] == "a message was damaged on its way to the site's process"
    assert "refused" in told(site.request_answer(letter("task", client="other")))
    assert site.pid == before


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_supernode_whatever_it_does(config, busy):
    """Also in the middle of a training, and also when the SuperNode was killed."""
    if busy:
        Path(config["site"]).write_text("import time\n" + SITE.replace("    return", "    time.sleep(600)\n    return"))
    site = SiteProcess()
    site.start_if_stopped()
    site.send_and_keep_node_config(json.dumps(config))
    while not calls(config):
        time.sleep(0.05)
    process = site.pid
    site._socket.shutdown(socket.SHUT_RDWR)
    assert gone(process)
    site.stop_and_get_exit_status()


@pytest.mark.slow
def test_what_site_py_prints_is_no_frame(config):
    text = Path(config["site"]).read_text()
    Path(config["site"]).write_text("import os\nprint('hello', flush=True)\nos.system('echo hello')\n" + text)
    site = SiteProcess()
    site.start_if_stopped()
    site.send_and_keep_node_config(json.dumps(config))
    assert told(site.request_answer(letter(architecture=architecture())))["client"] == "client-0"
    site.stop_and_get_exit_status()
