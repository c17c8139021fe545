"""A deployment in one process: a grid that hands messages to the ClientApp of each site, as a SuperNode would, in the
records that would travel. Each message gets a new context, as each gets a new process there."""

import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from polyfed.algorithms import FedAvg
from polyfed.deploy.flower import apps, engine
from polyfed.deploy.flower.apps import client_app, run_deployment
from polyfed.deploy.trial.project import write_site_key_pair
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.testing import small_clients

ALL = ",".join(
    ["num_examples", "train_loss", "errors"]
    + [
        f"{part}{metric}"
        for part in ("", "val_", "generated_", "server_", "trained_")
        for metric in ("accuracy", "loss")
    ]
    + [f"{part}val_{metric}" for part in ("generated_", "server_", "trained_") for metric in ("accuracy", "loss")]
)
"""Every number that the methods of these tests tell."""

SITE = """
from clients_of_a_test import CLIENTS

def client():
    return CLIENTS["{name}"]()
"""


ONE = "from polyfed.testing import SmallNet as model\n"
NAMES = "client-0,client-1,client-2"


def configuration(method, **words):
    """The words of a deployment with this method, as Flower gives them."""
    fields = describe_method_and_settings(method, Settings(rounds=1))["algorithm"]
    told = {f"algorithm.{name}": "null" if value is None else value for name, value in fields.items()}
    told = {name: str(value) if isinstance(value, list | dict) else value for name, value in told.items()}
    plain = {"max-update-norm": "off"}  # a simulation has no bound either
    return {"rounds": 3, "seed": 3, "on-error": "raise", "allow-disclosure": True, **plain, **told, **words}


@dataclass
class Node:
    """A SuperNode: its configuration, the name it was registered under, and its ClientApp."""

    config: dict[str, Any]
    name: str = ""
    app: Callable[[Message, Context], Message] = field(default_factory=client_app)
    online: bool = True
    since: str = "1"


class MemoryGrid(Grid):
    """Nodes in this process. `seen` records every message in both directions: (node, type, record)."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes, self.seen = nodes, []
        self._numbers, self._replies = itertools.count(1), {}
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # as the process of a ServerApp has

    def set_run(self, run):
        raise AssertionError("not used")

    @property
    def run(self):
        raise AssertionError("not used")

    def create_message(self, *arguments, **named):
        raise AssertionError("deprecated")

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("it polls every 3 s")

    def get_nodes(self):
        return [
            NodeInfo(node_id=i, name=node.name, last_activated_at=node.since)
            for i, node in self.nodes.items()
            if node.online
        ]

    def get_node_ids(self):
        return [info.node_id for info in self.get_nodes()]

    def push_messages(self, messages):
        sent = []
        for message in messages:
            number = str(next(self._numbers))
            message.metadata.__dict__["_message_id"] = number
            node = self.nodes[message.metadata.dst_node_id]
            self.seen.append((message.metadata.dst_node_id, message.metadata.message_type, message.content))
            context = Context(1, message.metadata.dst_node_id, dict(node.config), RecordDict(), {})
            reply = node.app(message, context)
            if reply is not None:  # None is a site that hangs
                if reply.has_content():
                    self.seen.append((message.metadata.dst_node_id, "reply", reply.content))
                self._replies[number] = reply
            sent.append(number)
        return sent

    def pull_messages(self, message_ids):
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Makes nodes of clients, each with a `site.py` of its own, for a grid. Every word of a node configuration can be given;
    what tells nothing but numbers is disclosed unless that is."""
    module = types.ModuleType("clients_of_a_test")
    module.CLIENTS = {}
    monkeypatch.setitem(sys.modules, "clients_of_a_test", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(apps, "send_logs_to_stderr", lambda: None)  # logs stay where pytest finds them

    def make(clients, **config) -> dict[int, Node]:
        found = {}
        for number, client in enumerate(clients, start=101):
            module.CLIENTS[client.id] = lambda client=client: client
            folder = tmp_path / "sites" / client.id
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "site.py").write_text(SITE.format(name=client.id))
            words = {
                "client-id": client.id,
                "site": str(folder / "site.py"),
                "state-dir": str(folder / "state"),
                "device": "cpu",
            }
            found[number] = Node({**words, "disclose": ALL, "allow-disclosure": True, **config}, client.id)
        return found

    yield make
    sys.modules.pop("polyfed_own_site", None)


@pytest.fixture
def run(tmp_path, nodes, monkeypatch):
    """Plays a deployment of three sites, the first of which is changed by `spoil(its node)`; the run."""
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.01)
    (tmp_path / "server.py").write_text(ONE)

    def play(spoil=None, method=None, grid=None, progress=None, **words):
        grid = grid or MemoryGrid(nodes(small_clients()))
        if spoil is not None:
            spoil(grid.nodes[101])
        given = {
            "on-error": "skip",
            "file": str(tmp_path / "server.py"),
            "sites": NAMES,
            **words,
            "out": str(tmp_path / words.get("out", "run")),
        }
        return run_deployment(grid, configuration(method or FedAvg(lr=0.05), **given), progress or SilentProgress())

    return play


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """Registered keys of four sites."""
    folder = tmp_path_factory.mktemp("keys")
    for number in range(4):
        write_site_key_pair(folder / f"client-{number}.key")
    return folder


@pytest.fixture
def secure_grid(nodes, keys):
    """Sites that take part in secure sums only; beside these they tell scores."""

    def make(clients, **config):
        words = {"secure": True, "peers": str(keys), "secure-threshold": 2, "allow-disclosure": False, **config}
        words.setdefault(
            "disclose", f"{ALL},{','.join(name.replace('server_', 'teacher_') for name in ALL.split(','))}"
        )
        found = nodes(clients, **words)
        for node in found.values():
            node.config.setdefault("key", str(keys / f"{node.config['client-id']}.key"))
        return MemoryGrid(found)

    return make


@pytest.fixture
def secure_play(tmp_path, monkeypatch):
    """Plays a deployment; the run."""
    monkeypatch.setattr("polyfed.deploy.flower.engine._POLL_SECONDS", 0.01)
    (tmp_path / "server.py").write_text(ONE)

    def run(grid, method=None, progress=None, out="run", **words):
        given = {"secure": True, "allow-disclosure": False, "file": str(tmp_path / "server.py"), **words}
        sites = ",".join(node.name for node in grid.nodes.values())
        return run_deployment(
            grid,
            configuration(method or FedAvg(lr=0.05), sites=sites, out=str(tmp_path / out), **given),
            progress or SilentProgress(),
        )

    return run
