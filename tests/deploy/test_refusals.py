"""What is refused before anything is trained: configurations, and by sites what their owners do not want."""

import pytest
import torch
from flwr.app import Message

import polyfed as pf
from polyfed.algorithms import REGISTRY, Local
from polyfed.cli.commands.deploy.flower_command import _flatten_configuration, _unfinished_run_message
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import cached_module
from polyfed.deploy.flower.engine import envelope_from_record, envelope_to_record
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.deploy.trial.project import DeploymentProject, create_project
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint, save_checkpoint_and_remove_older
from polyfed.simulation.storage.directory import RunDirectory
from polyfed.testing import small_clients

from .conftest import MemoryGrid

INTRODUCE = {"kind": "introduce", "protocol": PROTOCOL, "run": "a", "architecture": None}
BAD = {
    "no algorithm.name": ({"algorithm.name": ""}, "lacks algorithm.name"),
    "unknown word": ({"round-second": 3.0}, "did you mean round-seconds"),
    "unknown field": ({"algorithm.mu": 3.0}, "algorithm.mu is not a field of the method"),
    "no sites": ({"sites": " , "}, "sites must name at least one site"),
    "time": ({"round-seconds": 0.0}, "round-seconds must be positive"),
    "too many replies": ({"min-replies": 9}, "min_replies=9 is more than"),
    "no file": ({"file": ""}, "name a Python file with a function model"),
    "wrong file": ({"file": "/nowhere.py"}, "file: ./nowhere.py. is not a Python file"),
    "consent": ({"allow-disclosure": False}, "fedavg discloses weights of the sites to the server"),
    "resume": ({"resume": True}, "cannot read"),
    "a run is there": ({"out": "sites"}, "sites is not empty"),
}


def test_a_new_project_has_a_configuration_that_the_server_takes(tmp_path):
    """Every word of `app/pyproject.toml`, as Flower gives it to the server."""
    config = _flatten_configuration(
        create_project(tmp_path / "federation", ["north", "south"]).read_server_configuration()
    )
    config = DeploymentProject(tmp_path / "federation").resolve_paths(config)
    assert config["file"] == str(tmp_path / "federation" / "server" / "server.py")
    server = build_or_restore_server({**config, "out": str(tmp_path / "run")})  # without anybody's consent
    assert server.settings == Settings(rounds=10, on_error="skip", secure=True)
    assert server.deployment.sites == ("north", "south")
    assert isinstance(server.algorithm, REGISTRY["fml"])


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
    algorithm = {"name": "fedavg_kd", "teacher": {"name": "os:getcwd"}}
    letter = Envelope(
        {"kind": "introduce", "protocol": PROTOCOL, "run": "a", "algorithm": algorithm, "architecture": None}
    )
    assert "would load 'os:getcwd' at this site" in envelope_from_record(_asked(node, letter)).head["refused"]


@pytest.mark.parametrize("method", ["local", "fedhenn", "flha_ghn", "fedrep", "pfedhn"])
def test_a_site_says_of_itself_what_its_method_needs_whatever_it_is_asked(tmp_path, nodes, method):
    """A server asks every site for everything, and whether its architecture is this one."""
    client = small_clients()[0]
    LayerCatalogue.from_graphs([graph_of_client(client)]).write_yaml(tmp_path / "catalogue.yaml")
    fields = {"catalogue": str(tmp_path / "catalogue.yaml")} if method == "flha_ghn" else {}
    algorithm = REGISTRY[method](**fields)
    own = cached_module(client.model).architecture
    nosy = {"told": ["architecture", "form", "num_examples"], "algorithm": {"name": method, **fields}}
    heads = [
        envelope_from_record(
            _asked(nodes([client], disclose="")[101], Envelope({**INTRODUCE, **nosy, "architecture": guess}))
        ).head
        for guess in (own, "another")
    ]
    needs = algorithm.requires
    wanted = {"client", "task"} | ({"architecture"} if "architectures" in needs else set())
    wanted |= {"form"} if needs & {"one_data_spec", "one_input_spec"} else set()
    wanted |= {"num_examples"} & algorithm.scalars_needed
    assert set(heads[0]) == wanted
    if "one_architecture" in needs:  # which the server knows, since it brings it
        assert "its network is not that of the federation" in heads[1]["refused"]
    else:
        assert heads[1] == heads[0], "the site tells whether its architecture is the one that the server names"


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
    letter = Envelope({"kind": "introduce", "protocol": 0, "run": "a"})
    assert "speaks protocol 0" in envelope_from_record(_asked(node, letter)).head["refused"]


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"name": "fedavg", "server_momentum": 0.9}, "FedAvg has no field 'server_momentum'"),
        ({"name": "fedavg9"}, "unknown algorithm 'fedavg9'"),
        ({"name": "fedavg", "lr": {"warm": 3}}, "FedAvg: lr must be a number, got {'warm': 3}"),
    ],
)
def test_a_method_of_another_version_is_told_with_the_version(nodes, caplog, algorithm, sentence):
    """Also by a site that does not disclose texts of errors, since this one does not depend on its data."""
    (node,) = nodes(small_clients(1), disclose="").values()
    refusal = envelope_from_record(_asked(node, Envelope({**INTRODUCE, "algorithm": algorithm}))).head["refused"]
    assert refusal.startswith(f"polyfed {pf.__version__} at this site cannot run the server's method: {sentence}")
    assert refusal.endswith("server and sites need the same version of polyfed")
    assert [record.message for record in caplog.records] == [f"refused: {refusal}"]  # and no traceback


@pytest.mark.parametrize("run_id", ["../../etc", "", "a" * 99, 7])
def test_a_run_cannot_be_named_so_that_it_leaves_the_folder(nodes, tmp_path, run_id):
    node = nodes(small_clients())[101]
    letter = Envelope(
        {
            "kind": "introduce",
            "protocol": PROTOCOL,
            "run": run_id,
            "algorithm": {"name": "local"},
            "architecture": None,
        }
    )
    assert "is not an identifier of a run" in envelope_from_record(_asked(node, letter)).head["refused"]
    found = {p.name for p in (tmp_path / "sites" / "client-0").iterdir()}
    assert found - {"__pycache__"} == {"site.py"}  # Python's own, of site.py, unless bytecode is not written


def _asked(node, letter):
    grid = MemoryGrid({101: node})
    (number,) = grid.push_messages([Message(envelope_to_record(letter), 101, "query")])
    (answer,) = grid.pull_messages([number])
    return answer.content


def test_a_run_that_ended_before_its_first_record_can_go_on_from_its_checkpoint(tmp_path):
    """The record of round 1 is written after the exchange of round 2, its checkpoint before."""
    assert "--resume" not in _unfinished_run_message(tmp_path, tmp_path / "run-1", [], 3, "failed")
    directory = RunDirectory.create(tmp_path / "run-1")
    save_checkpoint_and_remove_older(directory.checkpoint_folder, Checkpoint(1, {"model": {"w": torch.ones(2)}}, {}), 0)
    directory.close()
    told = _unfinished_run_message(tmp_path, tmp_path / "run-1", [], 3, "failed")
    assert told.endswith(f"polyfed flower run {tmp_path} --resume {tmp_path}/run-1`")
    assert _unfinished_run_message(tmp_path, tmp_path / "run-2", [{"round": 2}], 3, "failed").startswith(
        "the run has ended after 2 of 3 rounds (failed)"
    )
