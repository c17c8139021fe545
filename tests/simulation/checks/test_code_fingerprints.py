"""A run that is resumed with other code of the user's own says so, and one with the same code does not."""

import json
import warnings
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

import polyfed as pf
from polyfed.core.examples.examples import PartwiseTransform
from polyfed.simulation.checks.code_fingerprints import code_fingerprint, find_changed_code, warn_of_changed_code

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
@pytest.mark.one_case
def test_code_that_changed_is_named(started, change):
    words, name = CHANGES[change]
    with pytest.warns(UserWarning, match=f"the code of {name} is not that with which the run began"):
        pf.resume(started, clients=clients(**words), progress=False)


@pytest.mark.parametrize(
    "words", [{}, {"comment": "'another docstring'"}, {"comment": "# no docstring"}, {"stop": 10**6}]
)
@pytest.mark.one_case
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


class Scale:
    def __init__(self, factor):
        self.factor, self.means = factor, torch.zeros(2000)

    def __call__(self, x, generator=None):
        return x * self.factor - self.means[:3]


class ScaleModule(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.register_buffer("means", torch.full((3,), factor))

    def forward(self, x):
        return x * self.factor - self.means


@dataclass(frozen=True)
class ScaleByTensor:
    factors: torch.Tensor

    def __call__(self, x):
        return x * self.factors[:3]


def shift(x, generator=None, by=1.0):
    return x + by


def scale_by(factor):
    return lambda x, generator=None: factor * x


def of_one_line(factor):
    return [lambda x: x, lambda x: 2 * x][int(factor > 1)]


HOLDERS = {
    "an object": Scale, "a module": ScaleModule, "a partial": lambda factor: partial(shift, by=factor),
    "a closure": scale_by, "a method": lambda factor: Scale(factor).__call__,
    "a tensor that prints short": lambda factor: ScaleByTensor(torch.arange(2000.0) + 1e-7 * factor),
    "a list in an object": lambda factor: Scale([Scale(factor), {"factor": factor}]),
}  # fmt: skip
PLACES = ("transform", "augment", "part", "loss")


def clients_with(holder, place):
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    data = pf.Examples(x, torch.arange(24) % 2)
    if place in ("transform", "augment"):
        data = replace(data, **{place: holder})
    elif place == "part":
        data = replace(data, x=(x,), transform=PartwiseTransform({"0": holder}))
    client = pf.Client(
        "a", partial(torch.nn.Linear, 3, 2), data.select(torch.arange(16)), data.select(torch.arange(16, 24))
    )
    if place == "loss":
        client = replace(client, loss=holder)
    return [client, replace(client, id="b")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.one_case
def test_values_that_a_transform_augmentation_or_loss_holds_are_compared(holder, place):
    before, same, other = (
        code_fingerprint(clients_with(HOLDERS[holder](factor), place), pf.algorithms.FedAvg())
        for factor in (2.0, 2.0, 3.0)
    )
    assert before == same
    with pytest.warns(UserWarning, match=r"the values that .* holds are not those with which the run began"):
        warn_of_changed_code(find_changed_code(before, other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_changed_code(find_changed_code(before, same))


def test_functions_of_one_name_are_all_compared():
    first, second = of_one_line(0.0), of_one_line(2.0)
    assert first.__qualname__ == second.__qualname__
    one, two = clients_with(first, "transform"), clients_with(second, "transform")
    two = [replace(two[0], id="b")]
    fingerprints = [code_fingerprint(people, pf.algorithms.FedAvg()) for people in ([*one, *two], [*one, *one])]
    assert fingerprints[0] != fingerprints[1]


def test_a_resumed_run_with_other_values_says_so(tmp_path):
    people = clients_with(Scale(2.0), "transform")
    pf.federate(people, "fedavg", rounds=1, workers=0, quiet=True, out=tmp_path / "run")
    with pytest.warns(UserWarning, match="the values that Scale holds are not those"):
        pf.resume(tmp_path / "run", clients=clients_with(Scale(3.0), "transform"), workers=0, quiet=True)


def test_a_run_that_is_resumed_with_other_versions_says_so(started):
    manifest = json.loads((started / "manifest.json").read_text())
    manifest["versions"] |= {"torch": "1.0", "safetensors": "0.1"}
    (started / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(
        UserWarning, match=r"was begun with torch 1\.0, and is resumed with torch 2.*may have other bits"
    ):
        pf.resume(started, clients=clients(), progress=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (lambda: clients(), lambda: clients(function="relu"), "the code of Net is not that"),
        (lambda: clients_with(Scale(2.0), "transform"), lambda: clients_with(Scale(3.0), "transform"),
         "the values that Scale holds are not those"),
    ],
)  # fmt: skip
def test_a_comparison_that_reads_finished_runs_of_other_code_says_so(tmp_path, before, after, words):
    quick = {
        "rounds": 1,
        "budget": "steps",
        "tune": "none",
        "seeds": 1,
        "references": False,
        "parallel": 1,
        "quiet": True,
    }
    pf.compare(before(), ["fedavg"], **quick, out=tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.compare(before(), ["fedavg"], **quick, out=tmp_path / "c")
    with pytest.warns(
        UserWarning, match=f"{words} with which the run began: finished runs of the comparison are read as"
    ):
        pf.compare(after(), ["fedavg"], **quick, out=tmp_path / "c")
