"""On Ray with regions each node adds up its own clients' replies: the same bits, and one sum a node on the way."""

import itertools
import os
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, PFedMe
from polyfed.core.messages.fixed_point import mean_from_fixed_point, parse_sum_message
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.engines.base import ClientTask, PartialSum, TaskResult
from polyfed.simulation.engines.ray import ray_actor, ray_payload, ray_sums
from polyfed.simulation.engines.ray import ray_engine as engine_module
from polyfed.simulation.engines.ray.ray_sums import WorkerSum, read_summed_reply
from polyfed.simulation.rounds.replies.regional_sums import RegionalSum, summed_reply_form
from polyfed.testing import SmallNet, small_clients
from tests.few_cases import few

METHOD = FedAvg(lr=0.05, batch_size=8)
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


def result_of(client, value):
    sent = pf.Message({"model": {"w": torch.zeros(4)}})
    task = ClientTask("local", 1, client, sent, None, 0, 0)
    reply = pf.Message({"model": {"w": torch.full((4,), value)}}, {"num_examples": 2, "train_loss": 0.5})
    return TaskResult(task, reply)


def test_a_worker_adds_what_the_driver_accepts_and_sends_no_weights():
    worker = WorkerSum(METHOD, 3, None)
    results, facts = zip(
        *(worker.keep_reply_for_sum(result_of(c, v)) for c, v in (("a", 1.0), ("b", 9.0), ("c", 3.0))), strict=True
    )
    assert [set(r.reply.tensors["sum"]) for r in results] == [{"layout"}] * 3
    assert summed_reply_form(results[0].reply).tensors["model"]["w"].tolist() == [0.0] * 4
    assert results[0].reply.scalars == {"num_examples": 2, "train_loss": 0.5}
    summed = read_summed_reply(facts[0], lambda: None)
    assert summed.nbytes == result_of("a", 1.0).reply.nbytes
    assert summed.measured.norm == 2.0
    worker.add_accepted_replies({"a": True, "b": False})
    worker.add_accepted_replies({"c": True})
    words, layout = parse_sum_message(worker.take_sum())
    mean, weight = mean_from_fixed_point(words, layout)
    assert (mean["model"]["w"].tolist(), weight) == ([2.0] * 4, 4)


@pytest.mark.parametrize("value", [float("nan"), 1e15])
def test_a_reply_that_no_sum_can_hold_is_a_failure_of_its_client(value):
    worker = WorkerSum(METHOD, 3, None)
    result, facts = worker.keep_reply_for_sum(result_of("a", value))
    assert (facts, result.reply, result.failure.client, result.failure.phase) == ({}, None, "a", "reply")


def test_a_reply_that_the_engine_has_in_no_sum_ends_the_round():
    worker, total = WorkerSum(METHOD, 2, None), RegionalSum(METHOD, 2)
    for client in ("a", "b"):
        result, _ = worker.keep_reply_for_sum(result_of(client, 1.0))
        total.add(client, result.reply)
    worker.add_accepted_replies({"a": True, "b": True})
    with pytest.raises(pf.RoundError, match="the reply of 'a' is in no sum"):
        total.mean()
    total.add_partial_sum(PartialSum(("a", "b"), worker.take_sum()))
    assert total.mean()["model"]["w"].tolist() == [1.0] * 4


def federate(clients, method=METHOD, **options):
    return pf.federate(clients, method, **({"rounds": 2, "seed": 3, "regions": 2} | options))


def same_run(one, other):
    states = [list(iter_tensors(r.last.state)) for r in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    left_out = {"seconds", "seconds_clients", "seconds_server", "clients", "failures"}
    for ours, theirs in zip(one.history, other.history, strict=True):
        assert {k: v for k, v in ours.items() if k not in left_out} == {
            k: v for k, v in theirs.items() if k not in left_out
        }
        for client, row in ours["clients"].items():
            assert {k: v for k, v in row.items() if k != "seconds"} == {
                k: v for k, v in theirs["clients"][client].items() if k != "seconds"
            }


@pytest.fixture
def collected(monkeypatch):
    """The sums that have come to the driver, round by round."""
    sums, collect = [], engine_module.collect_node_sums

    def note(*what):
        sums.append(collect(*what))
        return sums[-1]

    monkeypatch.setattr(engine_module, "collect_node_sums", note)
    return sums


class Lost(RayError):
    """What Ray says of an actor that is gone."""


class Reference:
    """A result that is there already."""

    def __init__(self, value):
        self.value = value


class Actor:
    """Runs at once in this process; dies in its `dies_at`th task, with all that it has."""

    def __init__(self, real, dies_at):
        self.real, self.dies_at, self.tasks = real, dies_at, 0

    def __getattr__(self, name):
        def remote(*words):
            self.tasks += name == "run"
            if self.tasks == self.dies_at:
                return Reference(Lost("gone"))
            return Reference(getattr(self.real, name)(*arguments_of(words)))

        return SimpleNamespace(remote=remote)


def value_of(reference):
    """What `ray.get` returns of a reference or a list of them, and what takes its place as an argument."""
    if isinstance(reference, list):
        return [value_of(part) for part in reference]
    if isinstance(reference.value, Exception):
        raise reference.value
    return reference.value


def arguments_of(words):
    """References inside lists stay references, as with Ray."""
    return [value_of(word) if isinstance(word, Reference) else word for word in words]


class Remote:
    """A class or a function that Ray would run elsewhere; deaths are those of the actors, in the order of their start."""

    def __init__(self, target, deaths):
        self.target, self.deaths = target, deaths

    def options(self, **_):
        return self

    def remote(self, *words):
        if isinstance(self.target, type):
            return Actor(self.target(), self.deaths.pop(0) if self.deaths else None)
        return Reference(self.target(*arguments_of(words)))


@pytest.fixture
def ray_in_this_process(monkeypatch):
    """In place of Ray: everything at once in this process, with two nodes in turn. Returns the list of deaths to come."""
    deaths, killed = [], []
    nodes, turns = itertools.cycle(["first", "second"]), itertools.count()

    def wait(references, **_):
        return [references[next(turns) % len(references)]], []

    fake = SimpleNamespace(
        remote=lambda target: Remote(target, deaths), get=value_of, put=Reference, kill=killed.append,
        wait=wait, is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 2}, cloudpickle=ray.cloudpickle,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: next(nodes)),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
    )  # fmt: skip
    for module in (engine_module, ray_sums, ray_payload, ray_actor):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(ray_sums, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    monkeypatch.setattr(engine_module, "connect_to_ray_if_needed", lambda address, workers: False)
    return deaths


CASES = {
    "all": (METHOD, {}, []),
    "a sample, compressed": (METHOD, {"clients_per_round": 4, "compress": "int8"}, []),
    "a worker dies with a sum": (METHOD, {}, [3, None]),
    "a bound on updates": (FedAvg(lr=0.05, batch_size=8, robust="clip:0.05"), {}, [2]),
    "all train and some count": (PFedMe(lr=0.05, personal_lr=0.05), {"clients_per_round": 3}, []),
}


@pytest.mark.filterwarnings("ignore:round 1, client")
@pytest.mark.parametrize("case", few(CASES, ["a worker dies with a sum", "all train and some count"]))
@pytest.mark.one_case
def test_sums_of_nodes_have_the_bits_of_one_process(ray_in_this_process, collected, case):
    method, words, deaths = CASES[case]
    ray_in_this_process += deaths
    clients = small_clients(6)
    run = federate(clients, method, engine="ray", workers=2, **words)
    same_run(run, federate(clients, method, workers=0, **words))
    assert bool(run.history[0]["failures"]) == bool(deaths)
    assert [sum(len(part.clients) for part in sums) for sums in collected if sums] == [
        words.get("clients_per_round", 6)
    ] * 2
    assert max(len(sums) for sums in collected) == 2  # one for each node


def test_a_reply_that_is_lost_and_cannot_be_computed_again_ends_the_round(ray_in_this_process):
    ray_in_this_process += [3, 1, 1, 1, 1]  # the others die at their first task
    with pytest.warns(RuntimeWarning, match="died"), pytest.raises((pf.RoundError, pf.ClientError)):
        federate(small_clients(6), engine="ray", workers=1)


@pytest.mark.slow
def test_two_nodes_send_a_sum_each_and_the_bits_are_those_of_one_process(monkeypatch, collected):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.add_node(num_cpus=1)
        words = {"engine": "ray", "workers": 2, "ray_address": cluster.address}
        clients = small_clients(6)
        run = federate(clients, clients_per_round=5, compress="int8", **words)
        same_run(run, federate(clients, clients_per_round=5, compress="int8", workers=0))
        assert [sum(len(part.clients) for part in sums) for sums in collected if sums] == [5, 5]
        assert max(len(sums) for sums in collected) == 2
        everyone = PFedMe(lr=0.05, personal_lr=0.05)  # all train, and those drawn count
        drawn = {"clients_per_round": 3}
        same_run(federate(clients, everyone, **drawn, **words), federate(clients, everyone, **drawn, workers=0))
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_worker_that_dies_with_a_sum_loses_no_reply(tmp_path):
    """The last client ends its worker, which has summed others: they are computed again, and nobody counts twice."""
    marker, parent = tmp_path / "died", os.getpid()

    class Dying(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = SmallNet()

        def forward(self, x):
            if self.training and os.getpid() != parent and not marker.exists():
                marker.touch()
                os._exit(7)
            return self.inner(x)

    *others, small = small_clients(5)
    few = small.train.x[:4], small.train.labels[:4]  # the longest begin first
    clients = [*others, pf.Client("killer", Dying, few, small.test)]
    method = pf.algorithms.FML(lr=0.05)  # networks of two architectures, of which a shared one is averaged
    ray.init(address="local", num_cpus=1, **QUIET)
    try:
        with pytest.warns(RuntimeWarning, match=r"client 'killer': worker process \d+ .* died"):
            run = federate(clients, method, engine="ray", workers=1)
    finally:
        ray.shutdown()
    assert marker.exists()
    same_run(run, federate(clients, method, workers=0))
