"""`polyfed flower`: help of its own for each command, and `--json` of `status` and `doctor`."""

import json
from types import SimpleNamespace

import pytest

from polyfed.cli.commands.deploy.doctor_command import DoctorReport
from polyfed.cli.commands.deploy.flower_command import DeploymentStatus
from polyfed.cli.main import main
from polyfed.core.io.values.validation import validation_error
from polyfed.deploy.trial import local_trial

ACTIONS = ("init", "up", "run", "status", "doctor", "health")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment") / "fed"
    assert main(["flower", "init", str(folder), "--sites", "north,south"]) == 0
    return folder


@pytest.mark.parametrize("action", ACTIONS)
def test_each_command_has_help_of_its_own(action, capsys):
    assert main(["flower", action, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: polyfed flower {action} DIR")
    assert text.count("usage:") == 1
    assert f"example: polyfed flower {action} " in text
    assert len(text.splitlines()) <= 25


def test_help_of_all_has_a_line_for_each(capsys):
    assert main(["flower", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-len(ACTIONS) :]] == list(ACTIONS)


def answer_of_flower(_, arguments):
    rows = {"supernode": {"nodes": [{"node-id": 1, "status": "online"}]}, "list": {"runs": [{"run-id": 7}]}}
    return SimpleNamespace(stdout=json.dumps(rows[arguments[0]]), stderr="")


def connect(monkeypatch, project):
    """Writes a configuration of Flower with a connection."""
    monkeypatch.setenv("FLWR_HOME", str(project))
    (project / "config.toml").write_text("[superlink.fed]\naddress = 'a:1'\n")


def test_status_as_json_has_the_documented_schema(project, capsys, monkeypatch):
    connect(monkeypatch, project)
    monkeypatch.setattr(local_trial, "run_flwr", answer_of_flower)
    run = project / "runs" / "run-1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("algorithm: {name: local}\nrounds: 3\n")
    (run / "metrics.jsonl").write_text(json.dumps({
        "round": 1, "summary": {},
        "failures": [{"client": "north", "phase": "local", "reason": "gone"}], "warnings": ["slow"],
        "clients": {"south": {"accuracy": 0.5, "bytes_down": 1, "bytes_up": 2}}}) + "\n")  # fmt: skip
    assert main(["flower", "status", str(project), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert validation_error(status, DeploymentStatus) is None
    assert (status["nodes"], status["runs"]) == ([{"node-id": 1, "status": "online"}], [{"run-id": 7}])
    newest = status["newest_run"]
    assert (newest["round"], newest["rounds"], newest["sites"]["south"]["accuracy"]) == (1, 3, 0.5)
    assert newest["failures"][0]["client"] == "north"
    assert main(["flower", "status", str(project)]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("trial: none runs", "online", "round 1 of 3", "north, local: gone"))
    (project / "runs" / "run-2").mkdir()
    (project / "runs" / "run-2" / "metrics.jsonl").symlink_to("nowhere")  # a copy that lost its target
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2}\n{"round": 3, "clients": [], "summary": {}}\n')  # by a hand
    assert main(["flower", "status", str(project)]) == 0
    assert "round 1 of 3" in capsys.readouterr().out


def test_status_says_why_nobody_answers(project, capsys, monkeypatch):
    connect(monkeypatch, project)
    monkeypatch.setattr(local_trial, "run_flwr", lambda *_: SimpleNamespace(stdout="", stderr="refused"))
    assert main(["flower", "status", str(project), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert validation_error(status, DeploymentStatus) is None
    assert (status["nodes"], status["reasons"]) == (None, {"nodes": "refused", "runs": "refused"})
    assert main(["flower", "status", str(project)]) == 0
    assert "nodes, runs: the SuperLink does not answer (refused)" in capsys.readouterr().out
    (project / "config.toml").unlink()
    assert main(["flower", "status", str(project)]) == 0
    assert f"type `polyfed flower up {project}`" in capsys.readouterr().out


def test_doctor_as_json_has_the_documented_schema(project, capsys):
    status = main(["flower", "doctor", str(project), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert validation_error(report, DoctorReport) is None
    assert status == (1 if report["wrong"] else 0)
    assert {finding["level"] for finding in report["findings"]} <= {"ok", "note", "wrong"}
    (project / "app" / "pyproject.toml").write_text("[tool.flwr.app.config]\nrounds = 0\n")
    assert main(["flower", "doctor", str(project), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["wrong"] >= 1
    assert "wrong in" in err


@pytest.mark.parametrize(
    "content", [None, "", "[superlink.other]\naddress = 'a:1'\n"], ids=["no file", "empty", "another"]
)
def test_a_run_without_a_trial_or_a_connection_says_what_to_do(content, project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    if content is not None:
        (tmp_path / "flower").mkdir()
        (tmp_path / "flower" / "config.toml").write_text(content)
    assert main(["flower", "run", str(project)]) == 2
    text = capsys.readouterr().err
    assert f"no trial of {project} runs" in text
    assert "has no connection [superlink.fed]" in text
    assert f"type `polyfed flower up {project}`" in text
    assert (tmp_path / "flower" / "config.toml").exists() is (content is not None)


FLWR = """#!/bin/sh
[ "$1" = run ] && echo "Successfully started run 7"
[ "$1" = list ] && echo '{"runs": [{"run-id": "8", "status": "finished:completed"}, {"run-id": "7", %s}]}'
exit 0
"""


@pytest.mark.parametrize(
    ("row", "status", "sentence"),
    [
        ('"status": "finished:completed"', 0, ""),
        (
            '"status": "finished:failed", "status-details": "ServerApp failed with exception: a site refuses"',
            1,
            "the run has ended after 1 of 1 rounds (a site refuses)",
        ),
        ('"status": "finished:stopped"', 1, "(finished:stopped)"),
        ("nonsense", 1, "(the SuperLink does not answer)"),
    ],
)
def test_a_run_that_failed_does_not_show_the_records_of_an_earlier_one(
    row, status, sentence, project, tmp_path, monkeypatch, capsys
):
    """Flower's command ends with status 0, and the directory has all rounds, as where a finished run is resumed."""
    (tmp_path / "flwr").write_text(FLWR % row)
    (tmp_path / "flwr").chmod(0o700)
    monkeypatch.setattr(local_trial, "find_flwr_command", lambda: str(tmp_path / "flwr"))
    connect(monkeypatch, project)
    run = tmp_path / "run-1"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: {name: local}\nrounds: 1\n")
    (run / "metrics.jsonl").write_text('{"round": 1, "summary": {}, "clients": {}}\n')
    assert main(["flower", "run", str(project), "--resume", str(run)]) == status
    out, err = capsys.readouterr()
    assert sentence in err
    assert "Successfully started run 7" in err
    assert ("round 1" in out) == (status == 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("rounds=abc", "rounds must be a whole number of at least 1, got 'abc'"),
        ("roundz=3", "the configuration has no 'roundz'; did you mean rounds?"),
        ("algorithm.lrr=0.1", "algorithm.lrr is not a field of the method"),
        ("rounds=3", "runs is not empty; choose another"),
    ],
)
@pytest.mark.one_case
def test_a_run_that_the_server_would_refuse_is_not_sent(change, sentence, tmp_path, monkeypatch, capsys):
    project = tmp_path / "fed"
    assert main(["flower", "init", str(project)]) == 0
    connect(monkeypatch, project)
    monkeypatch.setattr(local_trial, "find_flwr_command", lambda: "/nowhere/flwr")
    (project / "runs" / "run-1").mkdir(parents=True)
    out = str(project / "runs") if change == "rounds=3" else str(project / "new")
    assert main(["flower", "run", str(project), "--out", out, "--set", change]) == 2
    assert sentence in capsys.readouterr().err
    taken = ("--set", "algorithm.name=fedavg", "--set", "asynchronous.rule=fedasync", "--set", "evaluate-every=10")
    main(["flower", "run", str(project), "--allow-disclosure", *taken, "--set", "secure=false"])
    assert "/nowhere/flwr" in capsys.readouterr().err  # which would have sent it


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["algorithm.name=fedavgg"], "did you mean fedavg"),
        (["num-server-rounds=2"], "the configuration has no 'num-server-rounds'; did you mean rounds?"),
        (["algorithm.name=fedprox", "algorithm.muu=1"], "algorithm.muu is not a field of the method; did you mean mu?"),
        (["rounds=two"], "rounds must be a whole number"),
        (["metrics=auk"], "metrics has 'auk', which sites do not know"),
        (["algorithm.name=fedavg", "secure=false"], "polyfed flower run DIR --allow-disclosure"),
    ],
)
@pytest.mark.one_case
def test_a_wrong_configuration_is_refused_before_flower_is_asked(tmp_path, monkeypatch, capsys, changes, sentence):
    project = tmp_path / "fed"
    assert main(["flower", "init", str(project), "--sites", "north,south"]) == 0
    connect(monkeypatch, project)
    monkeypatch.setattr(local_trial, "find_flwr_command", lambda: pytest.fail("Flower was called"))
    assert main(["flower", "run", str(project), *(word for change in changes for word in ("--set", change))]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("action", ["up", "doctor"])
@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999"])
def test_a_port_that_none_can_be_is_refused(action, port, project, capsys):
    assert main(["flower", action, str(project), f"--port={port}"]) == 2
    assert f"--port must be a port from 1 to 65535, got '{port}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nonsense", "--address must be HOST:PORT, such as federation.example.org:443, got 'nonsense'"),
        ("server.invalid:443", "--address is for the folder of a server or of a site, and "),
    ],
)
def test_an_address_that_is_none_or_that_a_project_has_no_use_for_is_refused(project, capsys, address, sentence):
    assert main(["flower", "doctor", str(project), "--address", address]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert not out


def test_the_command_without_words_prints_its_help_and_an_error_an_example(capsys):
    assert main(["flower"]) == 0
    assert "usage: polyfed flower init|up|run" in capsys.readouterr().out
    assert main(["flower", "init"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("takes one folder, got none; example: polyfed flower init fed --sites north,south\n")
    assert main(["resume"]) == 2
    assert "got none; usage: polyfed resume DIR [--rounds N] [--json] [--quiet]" in capsys.readouterr().err
