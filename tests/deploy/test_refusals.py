"""What is refused before anything is trained: configurations, and by sites what their owners do not want."""

import json

import pytest
import torch
from flwr.app import Message

import polyfed as pf
from polyfed.algorithms import Local
from polyfed.deploy.wire import Letter
from polyfed.engines.flower import from_record, to_record
from polyfed.errors import UserError
from polyfed.testing import small_clients

from .conftest import MemoryGrid

BAD = {
    "no algorithm.name": ({"algorithm.name": ""}, "lacks algorithm.name"),
    "unknown word": ({"round-second": 3.0}, "did you mean round-seconds"),
    "unknown field": ({"algorithm.mu": 3.0}, "algorithm.mu is no field of the method"),
    "no sites": ({"sites": " , "}, "sites must name at least one site"),
    "time": ({"round-seconds": 0.0}, "round-seconds must be positive"),
    "too many replies": ({"min-replies": 9}, "min_replies=9 is more than"),
    "no file": ({"file": ""}, "name a Python file with a function model"),
    "wrong file": ({"file": "/nowhere.py"}, "file: ./nowhere.py. is not a Python file"),
    "consent": ({"allow-disclosure": False}, "fedavg discloses weights of the sites to the server"),
    "resume": ({"resume": True}, "cannot read"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused_before_anything_is_sent(tmp_path, run, nodes, case):
    words, sentence = BAD[case]
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.raises(UserError, match=sentence):
        run(grid=grid, **words)
    assert not grid.seen
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"allow-disclosure": False}, "fedavg discloses weights to the server, which this site does not allow"),
        ({"methods": "flha_ghn, local"}, "this site runs flha_ghn, local only, not fedavg"),
        ({"clip-norm": 1.0, "noise-multiplier": 1.0, "disclose": ""}, "set algorithm.weighted = false"),
        ({"clip-norm": -1.0}, "it cannot start"),
        ({"state": "x"}, "it cannot start"),
    ],
)
def test_a_site_has_its_own_say(tmp_path, run, nodes, words, sentence):
    grid = MemoryGrid(nodes(small_clients(), **words))
    with pytest.raises(UserError, match=f"'client-0' does not take part: .*{sentence}"):
        run(grid=grid)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "sites" / "client-0").glob("state/*/private"))


def test_a_site_loads_no_code_that_the_server_names(nodes):
    """A teacher of one's own is module:factory, which in a simulation is one's own code."""
    node = nodes(small_clients())[101]
    algorithm = {"name": "distillation", "teacher": {"name": "os:getcwd"}}
    letter = Letter(
        {"kind": "introduce", "protocol": 2, "run": "a", "algorithm": algorithm, "architecture": None, "told": []}
    )
    assert "would load 'os:getcwd' at this site" in from_record(_asked(node, letter)).head["refused"]


def test_another_architecture_or_task_does_not_take_part(run, nodes):
    other = [pf.Client(c.id, lambda: torch.nn.Linear(6, 3), c.train, c.test) for c in small_clients()]
    with pytest.raises(UserError, match="its network is not that of the federation"):
        run(grid=MemoryGrid(nodes(other)))
    mixed = small_clients()
    mixed[1] = pf.Client("client-1", lambda: torch.nn.Linear(6, 1), (mixed[1].train.x, mixed[1].train.x[:, :1]),
                         (mixed[1].test.x, mixed[1].test.x[:, :1]), task="regression")  # fmt: skip
    with pytest.raises(UserError, match="one task"):
        run(grid=MemoryGrid(nodes(mixed)), method=Local(lr=0.05))


def test_a_server_of_another_protocol_is_told(nodes, tmp_path):
    node = nodes(small_clients())[101]
    letter = Letter({"kind": "introduce", "protocol": 0, "run": "a"})
    assert "speaks protocol 0" in from_record(_asked(node, letter)).head["refused"]


@pytest.mark.parametrize("run_id", ["../../etc", "", "a" * 99, 7])
def test_a_run_cannot_be_named_so_that_it_leaves_the_folder(nodes, tmp_path, run_id):
    node = nodes(small_clients())[101]
    letter = Letter(
        {
            "kind": "introduce",
            "protocol": 2,
            "run": run_id,
            "algorithm": {"name": "local"},
            "architecture": None,
            "told": [],
        }
    )
    assert "is no identifier of a run" in from_record(_asked(node, letter)).head["refused"]
    assert json.dumps(sorted(p.name for p in (tmp_path / "sites" / "client-0").iterdir())) == '["site.py"]'


def _asked(node, letter):
    grid = MemoryGrid({101: node})
    (number,) = grid.push_messages([Message(to_record(letter), 101, "query")])
    (answer,) = grid.pull_messages([number])
    return answer.content
