"""Methods that are compared by name train as the others do; one that cannot says where the value came from."""

from dataclasses import dataclass

import pytest

import polyfed as pf
from polyfed import algorithms
from polyfed.algorithms.base.averaging import Averaging
from polyfed.cli.main import main
from polyfed.comparison.planning.method_selection import build_method_with_training_of


@dataclass(frozen=True, kw_only=True)
class Plain(Averaging):
    """A method that is derived for plain SGD, as SCAFFOLD is."""

    def __post_init__(self):
        super().__post_init__()
        self._require(self.momentum == 0, "momentum", "0")


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(algorithms.REGISTRY, "plain", Plain)


def test_a_refused_value_is_traced_to_the_method_it_came_from(plain):
    with pytest.raises(pf.UserError) as refused:
        build_method_with_training_of("plain", pf.algorithms.FedAvg(momentum=0.9))
    assert "Plain: momentum must be 0, got 0.9; momentum=0.9 is taken over from fedavg" in str(refused.value)
    assert "give plain a momentum of its own" in str(refused.value)
    assert build_method_with_training_of("plain", pf.algorithms.FedAvg(momentum=0.9), {"momentum": 0.0}).momentum == 0.0


def test_a_refused_value_of_the_methods_own_is_not_blamed_on_another(plain):
    with pytest.raises(pf.UserError) as refused:
        build_method_with_training_of("plain", pf.algorithms.FedAvg(), {"momentum": 0.5})
    assert str(refused.value) == "Plain: momentum must be 0, got 0.5"


def test_the_command_says_so_too(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyfed.cli.commands.options.early_checks.ALGORITHMS", algorithms.REGISTRY)
    words = ["compare", "fedavg_digits", "--algorithm.momentum", "0.9", "--algorithms", "plain"]
    assert main(words) == 2
    assert "momentum=0.9 is taken over from fedavg" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir()), "work was begun"
