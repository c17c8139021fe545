"""Code of the user's by `module:name`, on every command: a source, a partition, a network, a method, a loss and a metric."""

import pytest

from polyfed.cli.main import main
from polyfed.simulation.storage.directory import read_config, read_manifest, read_metrics

MINE = '''
from dataclasses import dataclass
from typing import final
import numpy as np
import torch
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.evaluation.metrics import Metric
from polyfed.data import Partition
from polyfed.data.pooled_dataset import Source, build_pooled_dataset

@final
@dataclass(frozen=True)
class Blobs(Source):
    """Points around two places.

    Args:
        number: of points.
    """
    number: int = 60
    def load(self):
        y = torch.arange(self.number) % 2
        x = torch.randn(self.number, 3, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None]
        return build_pooled_dataset((x, y), None, ("a", "b"))

@final
@dataclass(frozen=True)
class Halves(Partition):
    """The first half and the second."""
    def __call__(self, labels, num_clients, seed, columns=None):
        return np.array_split(np.arange(len(labels)), num_clients)

@final
@dataclass(frozen=True, kw_only=True)
class Half(Averaging):
    """The mean of the last model and of the replies'.

    Args:
        share: of the replies' mean.
    """
    share: float = 0.5
    def server_step(self, state, mean, who):
        old, new = state["model"], mean["model"]
        return {**state, "model": {n: (1 - self.share) * old[n] + self.share * new[n] for n in old}}

def hits(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())

def net(input_shape, num_classes, width=5):
    return torch.nn.Sequential(torch.nn.Linear(*input_shape, width), torch.nn.ReLU(), torch.nn.Linear(width, num_classes))

class Contrary(torch.nn.Module):
    """Cross-entropy of the other class: what trains on it gets everything wrong."""
    def forward(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, 1 - targets)

class Needs(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()

misses = Metric("misses", lambda outputs, targets: 1 - hits(outputs, targets), higher_is_better=False)
number = 3
'''
RUN = [
    "--data",
    "my_own:Blobs",
    "--data.number",
    "80",
    "--data.partition",
    "my_own:Halves",
    "--data.clients",
    "2",
    "--algorithm",
    "my_own:Half",
    "--algorithm.share",
    "0.8",
    "--metrics",
    "my_own:hits,my_own:misses",
    "--model",
    "my_own:net",
    "--loss",
    "my_own:Contrary",
    "--rounds",
    "2",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import sys

    yield tmp_path
    sys.modules.pop("my_own", None)


def test_every_kind_of_own_code_runs_and_resumes(folder, capsys):
    assert main(["run", *RUN, "--quiet", "--out", "r"]) == 0
    config = read_config("r")
    assert config["data"]["name"] == "my_own:Blobs"
    assert config["data"]["number"] == 80
    assert config["data"]["partition"] == {"name": "my_own:Halves"}
    assert config["algorithm"]["name"] == "my_own:Half"
    assert config["algorithm"]["share"] == 0.8
    assert config["metrics"] == ["my_own:hits", "my_own:misses"]
    assert config["model"] == {"name": "my_own:net", "width": 5}
    assert config["loss"] == "my_own:Contrary"
    summary = read_metrics(folder / "r/metrics.jsonl")[-1]["summary"]
    assert summary["hits"]["mean"] == pytest.approx(1 - summary["misses"]["mean"])
    capsys.readouterr()
    assert main(["resume", "r", "--quiet"]) == 2
    assert "give --trust-code" in capsys.readouterr().err
    assert main(["resume", "r", "--quiet", "--trust-code"]) == 0
    assert main(["run", "r/config.yaml", "--quiet", "--out", "again"]) == 2
    assert main(["run", "r/config.yaml", "--quiet", "--out", "again", "--trust-code"]) == 0
    assert read_metrics(folder / "again/metrics.jsonl")[-1]["summary"] == summary
    assert main(["data", *RUN]) == 0
    assert main(["report", "r"]) == 0
    assert "hits" in capsys.readouterr().out


@pytest.mark.thorough
def test_own_methods_are_compared(folder, capsys):
    words = ["--algorithms", "local,my_own:Half", "--seeds", "0,1", "--same-data", "--tune", "none", "--no-references"]
    rounds = ["--rounds", "8", "--algorithm.lr", "0.3"]
    assert main(["compare", *RUN, *rounds, *words, "--quiet", "--out", "c"]) == 0
    assert "my_own.Half" in capsys.readouterr().out
    for method in (
        "local",
        "my_own.Half",
    ):  # all with the loss that makes them wrong, the source, partition and network
        folder_of_run = folder / "c" / method / "seed-0"
        assert read_metrics(folder_of_run / "metrics.jsonl")[-1]["summary"]["hits"]["mean"] < 0.3
        assert set(read_manifest(folder_of_run)["class_names"]) == {"a", "b"}
    assert read_config("c/my_own.Half/seed-0")["model"] == {"name": "my_own:net", "width": 5}
    assert main(["compare", "c", "--quiet"]) == 0  # reads the answers that are stored, and runs no code
    again = ["compare", "c", "--quiet", "--budget", "bytes"]
    assert main(again) == 2  # what the directory names is not typed
    assert "give --trust-code" in capsys.readouterr().err
    assert main([*again, "--trust-code"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "my_own:Half"], "source 'my_own:Half': it must be a dataclass on Source, got class Half"),
        (
            ["--data.partition", "my_own:hits"],
            "partition 'my_own:hits': it must be a dataclass on Partition, got function",
        ),
        (
            ["--algorithm", "my_own:Blobs"],
            "method 'my_own:Blobs': it must be a dataclass on Algorithm, got class Blobs",
        ),
        (["--metrics", "my_own:number"], "metric 'my_own:number': 'number' in"),
        (["--metrics", "my_own:htis"], "has no 'htis'; did you mean hits?"),
        (["--loss", "my_own:number"], "loss 'my_own:number': 'number' in"),
        (["--loss", "my_own:Needs"], "loss 'my_own:Needs': it cannot be made without arguments"),
        (["--loss", "cross_entropy"], "'cross_entropy' does not name a loss; write it as module:name"),
        (["--algorithm", "my_won:Half"], "method 'my_won:Half': there is no module 'my_won'"),
    ],
)
def test_what_is_not_of_its_kind_is_refused(folder, capsys, words, message):
    assert main(["run", *words, "--out", "r"]) == 2
    assert message in capsys.readouterr().err
