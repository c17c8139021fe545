"""`polyfed warmstart`: what is printed and written, what is refused."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import polyfed as pf
from polyfed.cli.commands.options.configuration_parser import parse_configuration
from polyfed.cli.main import main
from polyfed.core.evaluation.evaluate import evaluate
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code
from polyfed.models import ModelSpec
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.results.unseen_clients import (
    build_unseen_client,
    compare_with_scratch,
    compute_warm_start,
    load_trained_server,
)
from polyfed.simulation.storage.directory import read_config
from polyfed.simulation.storage.integrity import hash_settings_that_affect_results

CONFIG = {
    "data": {
        "name": "digits", "clients": 4, "unseen": 2, "examples_per_client": 60, "partition": {"name": "iid"},
    },
    "model": [{"name": "mlp", "hidden": [12, 12, 12][:n]} for n in (1, 2, 3)],
    "algorithm": {"name": "flha_ghn", "head": "factored", "rank": 4, "latent": 8, "batch_size": 16, "lr": 0.1},
    "rounds": 2,
    "seed": 3,
}  # fmt: skip
NETS = """
from torch import nn
def narrow(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, num_classes))
def two(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
"""


def experiment(**data):
    config = {**CONFIG, "data": {**CONFIG["data"], **data}}
    return build_experiment(parse_configuration(["--workers", "0"], config, "polyfed run"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run directory of a federation of two clients and two unseen clients."""
    folder = tmp_path_factory.mktemp("warmstart") / "run"
    found = load_participants(experiment())
    e = experiment()
    pf.federate(
        found.clients, e.algorithm, rounds=2, seed=3, workers=0, out=folder, config=e.config,
        facts={"partition_fingerprint": found.partition_fingerprint},
    )  # fmt: skip
    return folder


def rewrite(folder, config):
    """Another configuration, as if the run had begun with it."""
    Path(folder, "config.yaml").write_text(yaml.safe_dump(config))
    files = [Path(folder, "manifest.json"), *Path(folder, "checkpoint").glob("*/complete.json")]
    for file in files:
        content = json.loads(file.read_text())
        owner = content if file.name == "manifest.json" else content["bound"]
        owner["config_sha256" if owner is content else "config"] = hash_settings_that_affect_results(config)
        file.write_text(json.dumps(content))


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A current directory with a copy of the run, and networks of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copytree(made, "run")
    Path("unseen_nets.py").write_text(NETS)
    return tmp_path


@pytest.fixture
def polyfed(here, capsys):
    """Runs a command that must succeed and returns its standard output."""

    def polyfed(*arguments):
        capsys.readouterr()
        status = main(["warmstart", *arguments])
        out, err = capsys.readouterr()
        assert (status, err) == (0, ""), err
        return out

    return polyfed


@pytest.fixture
def refused(here, capsys):
    """Runs a command that must be refused, with one sentence and nothing on disk, and returns the sentence."""

    def refused(*arguments):
        before = files_of(here)
        capsys.readouterr()
        status = main(["warmstart", *arguments])
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), err
        assert re.fullmatch(r"polyfed: [^\n]+\n", err), err
        assert files_of(here) == before
        return err

    return refused


def files_of(folder):
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in folder.rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }


def rows(out):
    """The cells of the tables, by the first of their row."""
    cells = [[c.strip() for c in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def spec(*hidden):
    return ModelSpec("mlp", {"hidden": hidden}, (1, 8, 8), 10)


def started(client, model):
    changed, _ = build_unseen_client(model, client.train, test=client.test, id=client.id)
    return compute_warm_start(load_trained_server("run"), changed)


@pytest.mark.thorough
def test_all_newcomers_get_their_networks(polyfed, here):
    before = files_of(here / "run")
    out = polyfed("run")
    found = load_participants(experiment())
    for client, model in zip(found.unseen, (spec(12, 12, 12), spec(12)), strict=True):
        expected = started(client, model)
        assert rows(out)[client.id] == [
            "mlp", "60", "100 %", f"{expected.before['accuracy']:.3f}", f"{expected.after['accuracy']:.3f}"
        ]  # fmt: skip
        network = model()
        network.load_state_dict(load_file(f"run/unseen/{client.id}.safetensors"))
        assert evaluate(network, client.test, "classification") == expected.after
        x = client.test.batch(torch.arange(len(client.test)))[0]
        with torch.no_grad():
            assert torch.equal(network.eval()(x), expected.model(x))
    after = files_of(here / "run")
    assert {n for n in after if before.get(n) != after[n]} == {f"unseen/client-00{i}.safetensors" for i in (2, 3)}
    assert before.items() <= after.items()
    assert polyfed("run") == out


def test_one_newcomer_with_another_network_and_file(polyfed, here):
    before = files_of(here / "run")
    out = polyfed(
        "run", "--unseen=client-003", "--model", "mlp", "--model.hidden", "[12,20]", "--out", "new.safetensors"
    )
    (client,) = load_participants(experiment()).unseen[1:]
    expected = started(client, spec(12, 20))
    assert list(rows(out)) == ["client-003"]
    generated = 12 * 64 + 12
    assert rows(out)["client-003"][2] == f"{100 * generated / (generated + 20 * 13 + 10 * 21):.1f} %"
    assert "client-003: mlp with hidden=(12, 20)" in out
    assert re.search(r"client-003: not generated but drawn: fc2.weight, fc2.bias \(.*linear-12-20-k-s-g1-b1", out)
    assert files_of(here / "run") == before
    weights = load_file("new.safetensors")
    assert all(torch.equal(value, expected.model.state_dict()[name]) for name, value in weights.items())


def test_a_client_changes_its_network(polyfed):
    out = polyfed("run", "--client", "client-000", "--model=unseen_nets:narrow")
    client = load_participants(experiment()).clients[0]
    with restore_trusted_names_afterwards():
        trust_code("unseen_nets:narrow")
        expected = started(client, ModelSpec("unseen_nets:narrow", {}, (1, 8, 8), 10))
    numbers = ["60", "100 %", f"{expected.before['accuracy']:.3f}", f"{expected.after['accuracy']:.3f}"]
    assert rows(out)["client-000"] == ["unseen_nets:narrow", *numbers]
    assert Path("run/unseen/client-000.safetensors").is_file()


def test_a_newcomer_with_its_own_data(polyfed, here):
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (50, 1, 8, 8), np.uint8), np.arange(50) % 10
    np.savez("own.npz", x_train=x, y_train=y)
    own = ["--data", "npz", "--data.path", "own.npz", "--model", "mlp", "--model.hidden", "[12,12]"]
    out = polyfed("run", *own)
    assert rows(out)["unseen"][:3] == ["mlp", "35", "100 %"]  # the run's test_fraction, 0.3
    assert "unseen: scored on 15 examples of its own, which were held out" in out
    assert "unseen: scored on 10 examples of its own" in polyfed("run", *own, "--data.test_fraction", "0.2")
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    out = polyfed("run", *own)
    assert rows(out)["unseen"][1] == "50"
    assert "unseen: scored on 20 examples\n" in out
    assert rows(polyfed("run", *own, "--data.test_fraction=0.5"))["unseen"][1] == "25"
    assert Path("run/unseen/unseen.safetensors").is_file()


def test_the_source_of_the_run_is_the_default_of_own_data(polyfed):
    out = polyfed("run", "--data.common_test", "0.5", "--model", "mlp", "--model.hidden", "[12]")
    assert rows(out)["unseen"][1] == str(1797 - round(1797 / 2))


def test_a_run_made_in_python_serves_own_data(here, polyfed, refused):
    config = read_config("run")
    for section in ("data", "model", "baselines"):
        config.pop(section)
    rewrite("run", config)
    assert "the clients of run were made in Python; give the unseen client's data and network here" in refused("run")
    assert rows(polyfed("run", "--data", "digits", "--model", "mlp", "--model.hidden", "[12]"))["unseen"][2] == "100 %"


def test_training_goes_on_from_both_starts(polyfed):
    rates = ("--lr", "0.2", "--scratch-lr", "0.1")
    out = polyfed("run", "--unseen", "client-002", "--epochs", "3", *rates, "--plot", "curves.png")
    client = load_participants(experiment()).unseen[0]
    server, expected = load_trained_server("run"), started(client, spec(12, 12, 12))
    curves = compare_with_scratch(server, expected, 3, lr=0.2, scratch_lr=0.1)
    table = rows(out)
    assert [table[str(epoch)] for epoch in range(4)] == [
        [f"{warm:.3f}", f"{scratch:.3f}"] for warm, scratch in zip(curves.warm, curves.scratch, strict=True)
    ]
    assert table["client-002"][3] == table["0"][0]
    assert f"what training from scratch has after 3 ({curves.scratch[3]:.3f})" in out or "does not reach" in out
    told = "both in the same batches at rate 0.2, from scratch 0.1, momentum started afresh each epoch; drawn in curves.png"
    assert told in out
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads(Path("run/unseen/curves.json").read_text())  # for the page of `polyfed report`
    assert kept == {"client-002": {"score": "accuracy", "warm": list(curves.warm), "scratch": list(curves.scratch)}}


def test_text_data_and_global_scores(here, polyfed):
    config = read_config("run")
    config["data"] |= {"common_test": 0.2, "global_test": 30}
    found = load_participants(build_experiment(config))
    pf.federate(found.clients, build_experiment(config).algorithm, rounds=1, workers=0, out="common", config=config)
    out = polyfed("common", "--unseen", "client-002")
    assert re.search(r"global +│? ?global|global as", out)
    assert len(rows(out)["client-002"]) == 7


REFUSED = {
    "": "takes a run directory before its options, got none",
    "--epochs 3": "takes a run directory before its options, got none",
    "nowhere": "nowhere does not exist",
    "run stray": "unexpected argument 'stray'",
    "run --unseen client-009": "the run has no unseen client 'client-009'; did you mean",
    "run --unseen client-000": "the run has no unseen client 'client-000'",
    "run --client client-002 --model mlp": "the run has no client 'client-002'",
    "run --client client-000": "--client client-000 needs --model NAME",
    "run --client client-000 --unseen client-002": "not both",
    "run --data digits": "--data needs --model NAME",
    "run --data digits --model mlp --unseen client-002": "leave --unseen and --client out",
    "run --data digits --model mlp --data.test_fraction 0": "is left to score on; give --data.test_fraction",
    "run --data digits --model mlp --data.test_fraction 1.5": "test_fraction must be at least 0 and below 1",
    "run --data npz --data.path no.npz --model mlp": "no.npz",
    "run --data digitz --model mlp": "unknown data 'digitz'; did you mean digits?",
    "run --data.clients 3": "unknown option --data.clients; digits has no 'clients': choices: augment, common_test, name,",
    "run --data.partition iid": "unknown option --data.partition.name; choices: --data",
    "run --rounds 3": "unknown option --rounds; did you mean --unseen",
    "run --algorithm.lr 3": "unknown option --algorithm.lr; choices: --client, --data, --epochs,",
    "run --epoch 3": "unknown option --epoch; did you mean --epochs",
    "run --print_config": "unknown option --print-config",
    "run --model mpl": "unknown model 'mpl'; did you mean mlp?",
    "run --model.hidden [3]": "a mixture of networks takes its fields from a YAML file",
    "run --model mlp,cnn_small": "--model takes one network here",
    "run --model unseen_nets:two": "client 'client-002': its network has 2 outputs, but the data have 10 classes",
    "run --model unseen_nets:none": "has no 'none'",
    "run --epochs x": "--epochs must be a whole number, got 'x'",
    "run --epochs -1": "--epochs must be at least 0, got -1",
    "run --epochs 2 --lr x": "--lr must be a number, got 'x'",
    "run --epochs 2 --lr -1": "--lr must be positive, got -1.0",
    "run --epochs 2 --lr nan": "--lr must be positive, got nan",
    "run --epochs 2 --scratch-lr 0": "--scratch-lr must be positive, got 0.0",
    "run --scratch-lr 1": "--scratch-lr is for training after the warm start; give --epochs too",
    "run --lr 1": "--lr is for training after the warm start; give --epochs too",
    "run --plot x.png": "--plot is for training after the warm start; give --epochs too",
    "run --epochs 2 --plot x.pdf": "a picture must end in .png or .svg, got 'x.pdf'",
    "run --epochs 2 --plot no/x.png": "there is no folder no; make it first",
    "run --out x.safetensors": "--out names one file, but there are 2 unseen clients",
    "run --unseen client-002 --out x.pt": "--out must be a file that ends in .safetensors, got 'x.pt'",
    "run --unseen client-002 --out no/x.safetensors": "there is no folder no; make it first",
    "run --unseen client-002 --out run/models/client-000.safetensors": "lies among the files of the run",
    "run --unseen client-002 --out run/x.safetensors": "lies among the files of the run",
    "run --out": "--out needs a value",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(refused, command):
    assert REFUSED[command] in refused(*command.split())


def test_damage_and_other_runs_are_refused(here, refused):
    shutil.copytree("run", "other")
    for file in Path("other/checkpoint").rglob("server.safetensors"):
        file.write_bytes(b"")
    assert "no checkpoint of the run in other is whole" in refused("other")
    shutil.rmtree("other/checkpoint")
    assert "has no checkpoint yet" in refused("other")
    main(["run", "--rounds", "1", "--workers", "0", "--data.clients", "2", "--quiet", "--out", "plain"])
    assert "plain: fedavg cannot give weights to a network that took no part" in refused("plain")
    manifest = Path("run/manifest.json")
    manifest.write_text(
        re.sub(r'"partition_fingerprint": "\w+"', '"partition_fingerprint": "00"', manifest.read_text())
    )
    assert "are no longer divided as in the run (partition 00, now" in refused("run")


def test_a_run_without_newcomers_says_what_there_is(here, refused):
    config = read_config("run")
    config["data"]["unseen"] = 0
    rewrite("run", config)
    assert "run kept no unseen clients (data.unseen is 0); give --client ID --model NAME" in refused("run")


def test_a_result_that_cannot_be_written_leaves_the_old_one(here, capsys, monkeypatch):
    assert main(["warmstart", "run", "--unseen", "client-002"]) == 0
    file = Path("run/unseen/client-002.safetensors")
    before, printed = file.read_bytes(), capsys.readouterr().out
    assert printed

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyfed.simulation.storage.directory.os.fsync", full)
    assert main(["warmstart", "run", "--unseen", "client-002", "--model", "unseen_nets:narrow"]) == 2
    out, err = capsys.readouterr()
    assert (out, "cannot write run/unseen/client-002.safetensors: No space left on device" in err) == ("", True)
    assert file.read_bytes() == before


@pytest.mark.slow
def test_the_document_shows_what_runs(here, capsys):
    text = (Path(__file__).parents[2] / "docs/unseen_clients.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    Path("example.py").write_text(block)
    done = subprocess.run([sys.executable, "-W", "error", "example.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.0 {}\n")
    Path("my_nets.py").write_text(NETS.replace("narrow", "make"))
    np.savez("mine.npz", x_train=np.zeros((20, 1, 8, 8), np.uint8), y_train=np.arange(20) % 10)
    (commands,) = re.findall(r"```\n(polyfed run.*?)```", text, flags=re.DOTALL)
    for line in (
        commands.replace("\\\n", " ").replace("--epochs 20", "--epochs 1").replace("runs/ghn", "new").splitlines()
    ):
        short = ["--rounds", "1", "--workers", "0", "--data.examples_per_client", "20", "--quiet"]
        words = shlex.split(line)[1:]
        assert main([*words, *(short if words[0] == "run" else [])]) == 0, capsys.readouterr().err
    assert Path("mine.safetensors").is_file()


def test_help_names_the_options(capsys):
    for words in (["warmstart", "--help"], ["warmstart", "run", "-h"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"--{name}" in out for name in ("unseen ID", "client ID", "epochs E", "plot FILE", "out FILE"))
        assert "--model.hidden" not in out
        assert "--rounds" not in out
    assert main(["warmstart", "--data", "npz", "--model", "cnn_small", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--data.path" in out
    assert "--model.channels" in out
