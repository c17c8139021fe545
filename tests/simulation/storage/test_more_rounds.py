"""More rounds for a run: it becomes, bit by bit, the run that had them from its beginning; or it is refused, untouched."""

import re
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg
from polyfed.core.errors import UserError
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_config, read_metrics
from polyfed.testing import small_clients

TIMES = ("seconds", "server_seconds", "seconds_by_phase", "time")


def records(folder):
    """The records of all rounds, without what a clock measured."""

    def without_times(value):
        if isinstance(value, dict):
            return {key: without_times(item) for key, item in value.items() if "second" not in key and key not in TIMES}
        return value

    return [without_times(record) for record in read_metrics(folder / "metrics.jsonl")]


def linear_network():
    return torch.nn.Linear(6, 3)


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
@pytest.mark.one_case
def test_more_rounds_are_those_of_a_longer_run(name, tmp_path):
    pf.federate(small_clients(), name, rounds=2, out=tmp_path / "a", quiet=True)
    pf.federate(small_clients(), name, rounds=4, out=tmp_path / "b", quiet=True)
    run = pf.resume(tmp_path / "a", clients=small_clients(), rounds=4, quiet=True)
    assert len(run.history) == 4
    assert records(tmp_path / "a") == records(tmp_path / "b")
    models = [files(tmp_path / letter / "models") for letter in "ab"]
    assert models[0] == models[1]
    assert read_config(tmp_path / "a") == read_config(tmp_path / "b")
    assert describe_changed_files_of_run(tmp_path / "a") == []
    again = pf.resume(tmp_path / "a", clients=small_clients(), rounds=5, quiet=True)  # and once more
    assert len(again.history) == 5
    assert len(pf.resume(tmp_path / "a", clients=small_clients(), quiet=True).history) == 5


@pytest.mark.parametrize(
    ("algorithm", "settings", "rounds", "reason"),
    [
        (FedAvg(), {}, 1, "has 2 rounds, and rounds=1 would be fewer: a run only gets more"),
        (FedAvg(), {}, 0, "rounds=0 must be a whole number of at least 1"),
        (
            FedAvg(schedule="cosine"),
            {},
            3,
            "the learning rate follows schedule='cosine' over all rounds; start another run",
        ),
        (pf.algorithms.FedKD(), {}, 3, "FedKD plans by the number of all rounds"),
        (
            FedAvg(privacy=pf.Privacy(noise_multiplier=1.0)),
            {},
            3,
            "the budget of privacy is spent in the rounds of the run",
        ),
        (
            FedAvg(),
            {"evaluate_every": 3},
            3,
            "round 2 was evaluated as the last, which evaluate_every=3 does not do later",
        ),
    ],
)
@pytest.mark.one_case
def test_what_would_be_another_run_is_refused_and_nothing_changes(algorithm, settings, rounds, reason, tmp_path):
    clients = [pf.Client(c.id, linear_network, c.train, c.test, c.val) for c in small_clients()]
    pf.federate(clients, algorithm, rounds=2, out=tmp_path / "a", quiet=True, **settings)
    before = files(tmp_path / "a")
    with pytest.raises(UserError, match=re.escape(reason)):
        pf.resume(tmp_path / "a", clients=clients, rounds=rounds, quiet=True)
    assert files(tmp_path / "a") == before


def test_a_stop_between_the_two_files_harms_nothing(tmp_path, monkeypatch):
    pf.federate(small_clients(), "fedavg", rounds=2, out=tmp_path / "a", quiet=True)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("polyfed.simulation.storage.more_rounds.write_file_atomically", fail)
        with pytest.raises(KeyboardInterrupt):
            pf.resume(tmp_path / "a", clients=small_clients(), rounds=3, quiet=True)
    assert len(pf.resume(tmp_path / "a", clients=small_clients(), quiet=True).history) == 2
    assert len(pf.resume(tmp_path / "a", clients=small_clients(), rounds=3, quiet=True).history) == 3
    text = (tmp_path / "a/config.yaml").read_text()
    (tmp_path / "a/config.yaml").write_text(text.replace("rounds: 3", "rounds: 9"))
    with pytest.raises(UserError, match="was changed since the run began"):
        pf.resume(tmp_path / "a", clients=small_clients(), quiet=True)


def test_every_method_that_reads_the_number_of_rounds_says_so():
    folder = Path(pf.__file__).parent / "algorithms"
    reading = re.compile(r"(?<!lr_at\(client_info\.round, )\b(?:client_info|server)\.rounds\b")
    modules = {
        f"polyfed.algorithms.{path.relative_to(folder).with_suffix('').as_posix().replace('/', '.')}"
        for path in folder.rglob("*.py")
        if reading.search(path.read_text())
    }
    planning = {name for name, kind in REGISTRY.items() if modules & {base.__module__ for base in kind.__mro__}}
    assert planning == {name for name, kind in REGISTRY.items() if "plans_all_rounds" in kind.traits}
    assert {"fedkd", "fedavg_kd", "depthfl", "fedpnas"} <= planning
