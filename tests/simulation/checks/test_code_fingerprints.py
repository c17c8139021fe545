"""A run that is resumed with other code of the user's own says so, and one with the same code does not."""

import json
import warnings

import pytest
import torch

import polyfed as pf
from polyfed.simulation.checks.code_fingerprints import code_fingerprint

NET = """
import torch
SCALE, calls = {scale}, 0

def activate(x):
    {comment}
    return torch.{function}(x)

class Net(torch.nn.Module):
    instances, GAIN = 0, {gain}
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(3, 2), 0
        Net.instances += 1

    def forward(self, x):
        global calls
        calls += 1
        if stop and calls > stop:
            raise KeyboardInterrupt
        return {forward}

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing={smoothing})
stop = {stop}
"""
WORDS = {
    "scale": 1.0, "comment": "'says nothing'", "function": "tanh", "forward": "activate(self.layer(x)) * SCALE * self.GAIN",
    "gain": 1.0,
    "smoothing": 0.1, "stop": 0,
}  # fmt: skip


def clients(**words):
    code = {"__name__": "code_of_a_user"}
    exec(NET.format(**{**WORDS, **words}), code)  # noqa: S102
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(24) % 2
    sets = (x[:16], y[:16]), (x[16:], y[16:])
    return [pf.Client(i, code["Net"], *sets, loss=code["loss"]) for i in "ab"]


@pytest.fixture
def started(tmp_path):
    people = clients()
    run = pf.federate(people, "fedavg", rounds=2, workers=0, quiet=True, out=tmp_path / "run")
    assert run.out is not None
    return run.out


CHANGES = {
    "forward": ({"forward": "activate(2 * self.layer(x)) * SCALE"}, "Net"),
    "a function that forward calls": ({"function": "relu"}, "Net"),
    "a constant": ({"scale": 2.0}, "Net"),
    "a constant of the class": ({"gain": 2.0}, "Net"),
    "the loss": ({"smoothing": 0.2}, "loss"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_changed_is_named(started, change):
    words, name = CHANGES[change]
    with pytest.warns(UserWarning, match=f"the code of {name} is not that with which the run began"):
        pf.resume(started, clients=clients(**words), progress=False)


@pytest.mark.parametrize(
    "words", [{}, {"comment": "'another docstring'"}, {"comment": "# no docstring"}, {"stop": 10**6}]
)
def test_the_same_code_raises_no_alarm(started, words):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.resume(started, clients=clients(**words), progress=False)


def test_runs_of_earlier_versions_and_other_pythons_are_not_compared(started):
    manifest = json.loads((started / "manifest.json").read_text())
    assert set(manifest["code"]) == {"python", "Net", "loss"}
    manifest["code"]["python"] = "another"
    (started / "manifest.json").write_text(json.dumps(manifest))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.resume(started, clients=clients(scale=3.0), progress=False)


def test_code_of_packages_is_not_covered():
    plain = [pf.Client("a", lambda: torch.nn.Linear(3, 2), *[(torch.ones(4, 3), torch.arange(4) % 2)] * 2)]
    assert code_fingerprint(plain, pf.algorithms.FedAvg()) == {}
    people = clients()
    assert code_fingerprint(people, pf.algorithms.FedAvg()) == code_fingerprint(people[:1], pf.algorithms.FedProx())
