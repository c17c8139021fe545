"""What the commands do when all is well: help, configurations, overrides, tables, streams."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from polyfed.cli.main import main
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import without_durations

SMALL = ["--data.clients", "2", "--data.examples_per_client", "30", "--rounds", "2", "--workers", "0"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def polyfed(capsys):
    """Runs a command that must succeed and returns its standard output and error."""

    def polyfed(*arguments):
        capsys.readouterr()
        status = main(arguments)
        out, err = capsys.readouterr()
        assert status == 0, err
        return out, err

    return polyfed


def metrics(folder):
    return without_durations(read_metrics(folder / "metrics.jsonl"))


def printed_config(polyfed, *arguments):
    return yaml.safe_load(polyfed("run", *arguments, "--print_config")[0])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(polyfed, arguments):
    out, err = polyfed(*arguments)
    assert err == ""
    assert all(re.search(rf"^  {command} ", out, re.MULTILINE) for command in ("run", "resume", "data", "list"))


def test_version(polyfed):
    assert re.fullmatch(r"polyfed \d+\.\d+\.\d+\n", polyfed("--version")[0])


def words_of(out):
    return " ".join(out.split())


def test_help_of_run_shows_its_own_options_and_those_of_the_method(polyfed, here):
    text = words_of(polyfed("run", "--algorithm", "fedprox", "--help")[0])
    for option in ("--out DIR", "--quiet", "--print-config", "--rounds ROUNDS", "--data.clients", "--baselines"):
        assert option in text
    assert "--algorithm.mu MU μ ≥ 0 (0.01, polyfed's choice; the paper chooses among 0.001, 0.01, 0.1 and 1)." in text
    assert "--algorithm.finetune-epochs" not in text
    assert "--algorithm.mu MU" not in polyfed("run", "--help")[0]
    assert "--algorithm.finetune-epochs" in polyfed("run", "--algorithm=fedavg_ft", "--help")[0]
    assert list(here.iterdir()) == []


def test_help_explains_each_of_the_fields_that_a_docstring_groups(polyfed):
    text = words_of(polyfed("run", "fedavg_digits", "--help-all")[0])
    assert "--algorithm.momentum MOMENTUM of SGD." in text
    assert "--algorithm.nesterov {true,false} of SGD." in text


def test_help_follows_data_partition_and_model(polyfed):
    chosen = ["--data", "emnist", "--data.partition", "shards", "--model", "resnet18"]
    text = polyfed("run", *chosen, "--help")[0]
    assert all(option in text for option in ("--data.subset", "--data.partition.k", "--model.width"))
    assert "--data.partition.alpha" not in text


@pytest.mark.parametrize("command", ["resume", "data", "list"])
def test_help_of_the_other_commands(polyfed, command):
    assert polyfed(command, "--help")[0].startswith(f"usage: polyfed {command}")


def test_a_printed_configuration_and_that_of_the_run_repeat_the_run(polyfed, here):
    options = [*SMALL, "--algorithm", "fedprox", "--algorithm.mu", "0.5", "--seed", "3"]
    (here / "that.yaml").write_text(polyfed("run", *options, "--print_config")[0])
    assert [path.name for path in here.iterdir()] == ["that.yaml"]
    polyfed("run", *options, "--out", "one")
    polyfed("run", "that.yaml", "--out", "two")
    polyfed("run", "one/config.yaml", "--out", "three")
    polyfed("run", "two", "--out", "four")
    expected = metrics(here / "one")
    assert len(expected) == 2
    for other in ("two", "three", "four"):
        assert metrics(here / other) == expected
    configs = [yaml.safe_load((here / name / "config.yaml").read_text()) for name in ("one", "two", "three")]
    assert configs[0] == configs[1] == configs[2] == yaml.safe_load((here / "that.yaml").read_text())


def test_options_win_over_the_file_and_the_file_over_defaults(polyfed, here):
    (here / "mine.yaml").write_text("rounds: 7\nseed: 5\nalgorithm: {name: fedprox, mu: 0.25, lr: 0.5}\n")
    config = printed_config(polyfed, "mine.yaml", "--seed", "6", "--algorithm.lr=0.125")
    assert (config["rounds"], config["seed"], config["clients_per_round"]) == (7, 6, 1.0)
    assert (config["algorithm"]["mu"], config["algorithm"]["lr"], config["algorithm"]["batch_size"]) == (
        0.25,
        0.125,
        32,
    )
    assert printed_config(polyfed, "--clients_per_round", "1")["clients_per_round"] == 1
    assert isinstance(printed_config(polyfed, "--clients_per_round", "1")["clients_per_round"], int)


def test_another_method_keeps_the_local_training_of_the_file_and_not_what_was_the_other_methods(polyfed, here):
    (here / "mine.yaml").write_text("algorithm: {name: fedprox, mu: 0.25, lr: 0.5, buffers: recompute}\n")
    algorithm = printed_config(polyfed, "mine.yaml", "--algorithm", "fedavg")["algorithm"]
    assert (algorithm["name"], algorithm["lr"], algorithm["buffers"]) == ("fedavg", 0.5, "average")
    assert "mu" not in algorithm
    assert printed_config(polyfed, "mine.yaml", "--algorithm", "fedprox")["algorithm"]["mu"] == 0.25


def test_other_data_keep_the_split_and_another_partition_starts_afresh(polyfed, here):
    (here / "mine.yaml").write_text(
        "data: {name: digits, common_test: 0.5, clients: 4, partition: {name: dirichlet, alpha: 0.1}}\n"
        "model: {name: mlp, hidden: [7]}\n"
    )
    data = printed_config(polyfed, "mine.yaml", "--data", "mnist", "--data.path", "x")["data"]
    assert (data["name"], data["path"], data["clients"], data["partition"]["alpha"]) == ("mnist", "x", 4, 0.1)
    assert "common_test" not in data
    config = printed_config(polyfed, "mine.yaml", "--data.partition", "quantity_skew", "--model", "cnn_small")
    assert config["data"]["partition"] == {"name": "quantity_skew", "alpha": 0.5, "min_examples": 10}
    assert config["data"]["common_test"] == 0.5
    assert config["model"]["hidden"] == 64


def test_a_mixture_of_networks(polyfed, here):
    models = printed_config(polyfed, "--model", "mlp,cnn_small", "--algorithm", "local")["model"]
    assert [model["name"] for model in models] == ["mlp", "cnn_small"]
    out, _ = polyfed("run", *SMALL, "--model", "mlp,cnn_small", "--algorithm", "local", "--out", "mixed")
    assert "local: 0 kB down, 0 kB up in 2 rounds" in out
    (here / "mixed.yaml").write_text("model: [mlp, {name: mlp, hidden: [3]}]\nalgorithm: local\n")
    assert [model["hidden"] for model in printed_config(polyfed, "mixed.yaml")["model"]] == [[64], [3]]
    assert printed_config(polyfed, "mixed.yaml", "--model", "mlp")["model"] == {"name": "mlp", "hidden": [64]}


def test_a_network_of_the_users(polyfed, here, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "nets_cli.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, *, width: int = 8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))\n"
    )
    polyfed("run", *SMALL, "--model", "nets_cli:net", "--model.width", "5", "--out", "run")
    assert yaml.safe_load((here / "run/config.yaml").read_text())["model"] == {"name": "nets_cli:net", "width": 5}


def test_the_table_results_on_stdout_progress_on_stderr(polyfed, here):
    out, err = polyfed("run", "fedavg_digits", "--rounds", "2", "--workers", "0", "--out", "run")
    assert "accuracy on each client's own test examples, after round 2" in out
    assert re.search(r"client\s.*trained on\s.*classes\s.*local\s.*fedavg\s.*gain", out)
    numbers = r"\d+\.\d %\W+\d+\.\d %\W+?[+-]\d+\.\d\W"
    assert len(re.findall(rf"^\W*client-00\d\W+40\W+\d+\W+{numbers}", out, re.MULTILINE)) == 6
    assert re.search(rf"^\W*mean\W+40\W+{numbers}", out, re.MULTILINE)
    assert "Everything about this run is in run" in out
    assert "gain: of fedavg over local. One seed: differences of a few points can be chance." in out
    assert out.endswith("Page: polyfed report run   Decide: polyfed compare run\n")
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "fedavg: round 1/2", "fedavg: round 2/2", "local: round 1/2", "local: round 2/2",
    ]  # fmt: skip
    produced = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    for folder in ("run", "run/baselines/local"):
        for name in ("config.yaml", "manifest.json", "metrics.jsonl", "models/client-000.safetensors"):
            assert f"{folder}/{name}" in produced
    manifest = json.loads((here / "run/manifest.json").read_text())
    assert {"seed", "data_fingerprint", "partition_fingerprint", "versions", "host"} <= manifest.keys()


def test_quiet_says_nothing_on_stderr_and_the_directory_has_a_default(polyfed, here):
    out, err = polyfed("run", *SMALL, "--quiet")
    assert err == ""
    (folder,) = (here / "runs").iterdir()
    assert re.fullmatch(r"fedavg-\d{8}-\d{6}", folder.name)
    assert f"Everything about this run is in runs/{folder.name}" in out


def test_resume_of_a_finished_run_prints_its_table(polyfed):
    table = polyfed("run", *SMALL, "--quiet", "--out", "run")[0]
    assert polyfed("resume", "run", "--quiet") == (table, "")
    assert polyfed("resume", "run") == (
        table,
        "This run was finished, and nothing was left to train. More rounds: polyfed resume run --rounds 4\n",
    )


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "algorithms": ["local", "fedavg", "fedavg_ft", "fedprox"],
        "data": ["digits", "fashion_mnist", "npz", "iid", "dirichlet", "natural"],
        "models": ["mlp", "cnn_582k", "resnet18", "vit"],
        "recipes": ["quickstart"],
    }.items(),
)
def test_list(polyfed, kind, names):
    out, err = polyfed("list", kind)
    assert err == ""
    assert all(re.search(rf"^{name} +\S.*\S", out, re.MULTILINE) for name in names)
    assert not {*names} - {*polyfed("list")[0].split()}


def test_list_says_what_a_method_requires(polyfed):
    out = polyfed("list", "algorithms")[0]
    one, several = out.index("methods for one architecture"), out.index("methods for different architectures")
    assert one < out.index("\nfedavg ") < several < out.index("\nlocal ")


@pytest.mark.parametrize("plot", [None, "mine.svg", "data.png"])
@pytest.mark.one_case
def test_data_prints_a_table_and_draws_it(polyfed, here, plot):
    out, err = polyfed("data", "fedavg_digits", "--data.clients", "3", *(["--plot", plot] if plot else []))
    assert err == ""
    assert out.startswith("training examples by class ")
    assert "partition" not in out
    assert len(re.findall(r"^\W*client-00\d", out, re.MULTILINE)) == 3
    assert [path.name for path in here.iterdir()] == ([plot] if plot else [])
    if plot:
        assert (here / plot).read_bytes().startswith(b"<?xml" if plot.endswith(".svg") else b"\x89PNG")


@pytest.mark.slow
def test_fashion_mnist_from_debians_package(here):
    source = ["--data", "fashion_mnist", "--data.path", "/usr/share/datasets/fashion-mnist"]
    small = ["--rounds", "1", "--data.clients", "3", "--data.examples_per_client", "50", "--out", "run"]
    method = ["--algorithm", "fedprox", "--algorithm.mu", "0.1"]
    command = [sys.executable, "-m", "polyfed", "run", *source, *method, *small]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedprox: round 1/1" in done.stderr
    assert len(re.findall(r"client-00\d\W+50\W", done.stdout)) == 3
    assert yaml.safe_load((here / "run/config.yaml").read_text())["algorithm"]["mu"] == 0.1


@pytest.mark.slow
def test_metrics_and_the_round_to_keep(polyfed, here):
    """Of a score that is not a share, in its own unit; the lower is the better."""
    words = ["--rounds", "3", "--workers", "0", "--data.val_fraction", "0.2", "--keep", "best"]
    out, err = polyfed("run", "fedavg_digits", *words, "--metrics", "log_loss,balanced_accuracy", "--out", "run")
    assert "log loss on each client's own test examples, after the round with the best validation score" in " ".join(
        out.split()
    )
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    values = [line["summary"]["val_log_loss"]["mean"] for line in lines]
    best = 1 + values.index(min(values))
    assert lines[-1]["best_round"] == best
    mean, other = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["best_round"]
        for folder in (here / "run", here / "run" / "baselines" / "local")
    )
    own = lines[mean - 1]["summary"]["log_loss"]["mean"]
    alone = [json.loads(line) for line in (here / "run/baselines/local/metrics.jsonl").read_text().splitlines()]
    base = alone[other - 1]["summary"]["log_loss"]["mean"]
    assert re.search(rf"mean .*{base:.3f}\W+{own:.3f}\W+?{re.escape(f'{base - own:+.3f}')}", out)
    assert f"log_loss {lines[2]['summary']['log_loss']['mean']:.3f}" in err
    assert "balanced_accuracy" in lines[0]["clients"]["client-000"]
    config = yaml.safe_load((here / "run/config.yaml").read_text())
    assert (config["metrics"], config["keep"]) == (["log_loss", "balanced_accuracy"], "best")
    again = polyfed("run", "run/config.yaml", "--out", "again")[0]
    assert again[: again.index("fedavg: ")] == out[: out.index("fedavg: ")]
