"""The unseen clients of an experiment: who they are, and that nobody who federates notices them."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

import polyfed as pf
from polyfed.cli.commands.options.configuration_parser import parse_configuration
from polyfed.cli.main import main
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import without_durations

CONFIG = {
    "data": {
        "name": "digits", "clients": 4, "unseen": 2, "examples_per_client": 60, "partition": {"name": "iid"},
    },
    "model": [{"name": "mlp", "hidden": [12, 12, 12][:n]} for n in (1, 2, 3)],
    "algorithm": {"name": "flha_ghn", "head": "factored", "rank": 4, "latent": 8, "batch_size": 16, "lr": 0.1},
    "rounds": 2,
    "seed": 3,
    "workers": 0,
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with the experiment in a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    Path("config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def experiment(**data):
    config = {**CONFIG, "data": {**CONFIG["data"], **data}}
    return build_experiment(parse_configuration([], config, "polyfed run"))


def first_cells(out):
    return [line.strip("│").split("│")[0].strip() for line in out.splitlines() if line.startswith("│")]


def test_newcomers_are_the_last_clients_with_their_data_and_networks():
    everyone, found = load_participants(experiment(unseen=0)), load_participants(experiment())
    assert everyone.unseen == ()
    assert [c.id for c in found.clients] == ["client-000", "client-001"]
    assert [c.id for c in found.unseen] == ["client-002", "client-003"]
    assert found.partition_fingerprint == everyone.partition_fingerprint
    assert found.classes == everyone.classes
    for one, other in zip(everyone.clients, (*found.clients, *found.unseen), strict=True):
        assert one.model == other.model
        assert torch.equal(one.train.index, other.train.index)
        assert torch.equal(one.test.index, other.test.index)


@pytest.mark.thorough
def test_a_run_with_newcomers_is_that_of_the_others_alone_and_resumed_without_them(here, capsys):
    assert main(["run", "config.yaml", "--out", "run", "--quiet", "--baselines", "[local]"]) == 0
    out = capsys.readouterr().out
    assert first_cells(out) == ["client-000", "client-001", "mean"]
    assert "client-002, client-003 took no part; `polyfed warmstart run` gives unseen clients their networks" in out
    alone = load_participants(experiment(unseen=0)).clients[:2]
    expected = pf.federate(alone, experiment().algorithm, rounds=2, seed=3, workers=0)
    assert without_durations(read_metrics(here / "run/metrics.jsonl")) == without_durations(expected.history)
    shutil.rmtree("run/checkpoint/round-000002")
    assert main(["resume", "run", "--quiet"]) == 0
    assert without_durations(read_metrics(here / "run/metrics.jsonl")) == without_durations(expected.history)
    names = sorted(file.name for file in Path("run/models").glob("*.safetensors"))
    assert names == [f"client-00{i}.safetensors" for i in (0, 1)]


@pytest.mark.thorough
def test_the_hint_leads_to_the_run_that_can(here, capsys):
    options = ["--algorithm", "local", "--rounds", "1", "--quiet"]
    assert main(["run", "config.yaml", *options, "--baselines", "[{name: flha_ghn, lr: 0.001}]", "--out", "with"]) == 0
    assert "took no part; `polyfed warmstart with/baselines/flha_ghn` gives" in capsys.readouterr().out
    assert main(["warmstart", "with/baselines/flha_ghn"]) == 0
    assert main(["run", "config.yaml", *options, "--out", "without"]) == 0
    assert "client-002, client-003 took no part\n" in capsys.readouterr().out


@pytest.mark.thorough
def test_data_shows_the_newcomers(here, capsys):
    assert main(["data", "config.yaml", "--plot", "with.png"]) == 0
    assert first_cells(capsys.readouterr().out) == [
        "client-000", "client-001", "client-002 (unseen client)", "client-003 (unseen client)"
    ]  # fmt: skip
    assert main(["data", "config.yaml", "--data.unseen", "0", "--plot", "without.png"]) == 0
    assert "unseen" not in capsys.readouterr().out
    assert Path("with.png").read_bytes() != Path("without.png").read_bytes()


def test_a_newcomers_network_is_tried_before_the_run(here, capsys):
    wrong = ["--model", "mlp,torch.nn:Identity", "--data.clients", "2", "--data.unseen", "1"]
    assert main(["run", "config.yaml", *wrong, "--out", "new"]) == 2
    assert "client 'client-001': its network has no parameters" in capsys.readouterr().err
    assert not Path("new").exists()
