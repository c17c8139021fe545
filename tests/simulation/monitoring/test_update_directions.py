"""The cosine of each client's update to the mean is recorded, and a client that departs from the others is named."""

import dataclasses
import functools
import math
import random
import statistics

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.algorithm import Message
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring.update_directions import (
    SKETCH_SIZE,
    _values_and_medians_of_others,
    cosines_to_mean,
    describe_departing_clients,
    loss_change,
    sketch_update,
)
from polyfed.simulation.monitoring.update_norms import describe_round_warnings
from polyfed.testing import small_clients

honest = InProcessEngine.run


def cosine(one, other):
    return float(one @ other / one.norm() / other.norm())


def test_a_small_update_is_its_own_sketch():
    change = [torch.randn(3, 4), torch.randn(5)]
    assert torch.equal(sketch_update(change).numbers, torch.cat([c.flatten() for c in change]))


@pytest.mark.parametrize("sizes", [(30_000, 7, 9_000, 4_096), (5_000,), (4_095, 1, 1), (100, 200_000, 3)])
def test_sketches_keep_cosines(sizes):
    generator = torch.Generator().manual_seed(0)
    base, noise = ([torch.randn(size, generator=generator) for size in sizes] for _ in range(2))
    other = [0.6 * b + 0.8 * n for b, n in zip(base, noise, strict=True)]
    exact = cosine(torch.cat(base), torch.cat(other))
    one, two = sketch_update(base), sketch_update(other)
    assert len(one.numbers) == SKETCH_SIZE
    assert cosine(one.numbers, two.numbers) == pytest.approx(exact, abs=0.05)
    negative = sketch_update([-3 * change for change in base])
    assert cosine(one.numbers, negative.numbers) == pytest.approx(-1, abs=1e-5)


def test_a_sketch_is_the_signed_sum_of_pieces_wherever_tensors_begin():
    """The forms of tensors do not matter, only the order of numbers."""
    numbers = torch.randn(3 * SKETCH_SIZE + 17)
    pieces = [numbers[:10], numbers[10:5000], numbers[5000:5001], numbers[5001:]]
    assert torch.allclose(sketch_update([numbers]).numbers, sketch_update(pieces).numbers, atol=1e-5)


def test_a_huge_update_does_not_decide_what_the_mean_is():
    sketches = {i: sketch_update([torch.tensor([1.0, 0.1 * k])]) for k, i in enumerate("abcd")}
    sketches["liar"] = sketch_update([torch.tensor([-1000.0, 0.0])])
    cosines = cosines_to_mean(sketches)
    assert cosines["liar"] < -0.9
    assert all(cosines[i] > 0.9 for i in "abcd")


def test_of_networks_of_several_forms_the_most_frequent_compare():
    sketches = {i: sketch_update([torch.ones(2)]) for i in "ab"} | {"c": sketch_update([torch.ones(3)])}
    assert set(cosines_to_mean(sketches)) == {"a", "b"}
    assert cosines_to_mean({"a": sketches["a"]}) == {} == cosines_to_mean({})
    assert cosines_to_mean(dict.fromkeys("ab", sketch_update([torch.zeros(2)]))) == {}


def test_the_change_of_a_loss_is_to_the_last_round_of_the_client():
    records = [
        {"clients": {"a": {"train_loss": 1.0}}},
        {"clients": {"a": {}}},
        {"clients": {"a": {"train_loss": None}}},
    ]
    assert loss_change("a", 0.25, records) == -0.75
    assert loss_change("b", 0.25, records) is None
    assert loss_change("a", math.inf, records) is None


def rows(**values):
    return {client: dict(row) for client, row in values.items()}


def test_a_client_that_pulls_against_the_others_twice_is_named():
    clients = rows(
        **{i: {"update_cosine": 0.6, "update_norm": 1.0} for i in "abc"}, d={"update_cosine": -0.5, "update_norm": 1.0}
    )
    before = {"round": 4, "clients": clients}
    record = {"round": 5, "clients": clients}
    (sentence,) = describe_departing_clients(record, [before])
    assert sentence == (
        "round 5: the update of 'd' pulls against the others (cosine -0.50, their median 0.60): are its labels, its "
        "preprocessing and its loss those that all agreed on?"
    )
    assert describe_departing_clients(record) == []
    scattered = {"round": 4, "clients": rows(**{i: {"update_cosine": 0.1} for i in "abc"}, d=clients["d"])}
    assert describe_departing_clients({"round": 5, "clients": scattered["clients"]}, [scattered]) == []
    # Its large updates were those of the others; only the small ones at the end oppose them.
    agreed = {"round": 3, "clients": {**clients, "d": {"update_cosine": 0.6, "update_norm": 5.0}}}
    assert describe_departing_clients(record, [agreed] * 8 + [before] * 8) == []
    assert len(describe_departing_clients(record, [agreed] + [before] * 8)) == 1


def test_what_was_said_of_a_client_is_not_repeated_for_ten_rounds():
    clients = rows(
        **{i: {"update_cosine": 0.6, "update_norm": 1.0} for i in "abc"}, d={"update_cosine": -0.5, "update_norm": 1.0}
    )
    records, rounds = [], []
    for number in range(1, 25):
        record = {"round": number, "clients": clients}
        record["warnings"] = describe_departing_clients(record, records)
        rounds += [number] * len(record["warnings"])
        records.append(record)
    assert rounds == [2, 12, 22]


def test_medians_are_those_of_the_others():
    generator = random.Random(0)
    for size in range(3, 12):
        values = {i: generator.choice([0.1, 0.2, 0.3, -0.5, 1.0]) for i in "abcdefghijkl"[:size]}
        expected = {
            i: (value, statistics.median_high([other for j, other in values.items() if j != i]))
            for i, value in values.items()
        }
        assert _values_and_medians_of_others({i: {"x": value} for i, value in values.items()}, "x") == expected


@pytest.mark.filterwarnings("ignore:chol is 0 at Switzerland")
@pytest.mark.parametrize("method", [FedAvg(lr=0.05), FedAvg(lr=0.15)])
@pytest.mark.thorough
def test_of_four_honest_hospitals_that_differ_none_is_named(method):
    """Near the end the updates of honest sites cancel out: that is not a reason to suspect one."""
    for seed in range(2):
        sites = pf.data.heart(seed=seed)
        make_network = functools.partial(
            torch.nn.Linear, sites.num_features, 2
        )  # converges, so that updates cancel out
        run = pf.federate(sites.build_clients(make_network), method, rounds=30, seed=seed, workers=0, evaluate_every=30)
        assert not [sentence for record in run.history for sentence in record["warnings"]]
        assert min(row["update_cosine"] for record in run.history for row in record["clients"].values()) < -0.1


def test_a_client_whose_loss_rises_alone_is_named():
    clients = rows(**{i: {"train_loss": 0.5, "train_loss_change": -0.1} for i in "abc"})
    clients["d"] = {"train_loss": 2.0, "train_loss_change": 1.0}
    (sentence,) = describe_departing_clients({"round": 3, "clients": clients})
    assert sentence.startswith(
        "round 3: the training loss of 'd' rose from 1 to 2, and the others' did not (median 0.5)"
    )
    everybody = {i: {"train_loss": 2.0, "train_loss_change": 1.0} for i in "abcd"}
    assert describe_departing_clients({"round": 3, "clients": everybody}) == []


def test_a_mean_beyond_the_bound_of_all_sites_is_a_sentence_without_a_name():
    record = {"round": 2, "clients": {}, "robust": {"rule": "clip:1.0", "bound": 1.0, "norm_of_mean": 30.0}}
    (sentence,) = describe_departing_clients(record)
    assert "norm 30, and every site limits its own to 1: one of them does not, and nobody can see which" in sentence
    record["robust"]["norm_of_mean"] = 1.0 + 1e-9
    assert describe_departing_clients(record) == []


def flips(engine, tasks):
    """Has client-0 send minus its change, and client-1 what it has received."""
    for result in honest(engine, tasks):
        factor = {"client-0": -1.0, "client-1": 0.0}.get(result.task.client)
        if factor is not None and result.reply is not None:
            start = result.task.message.tensors["model"]
            model = {
                n: start[n] + factor * (t - start[n]) if t.is_floating_point() else t
                for n, t in result.reply.tensors["model"].items()
            }
            result = dataclasses.replace(result, reply=Message({"model": model}, result.reply.scalars))
        yield result


def test_a_run_names_who_departs_and_records_cosines_and_changes_of_the_loss(monkeypatch):
    clients = small_clients(6, alpha=None) if "alpha" in small_clients.__code__.co_varnames else small_clients(6)
    plain = pf.federate(clients, FedAvg(lr=0.01), rounds=2, workers=0)
    assert all(record["warnings"] == [] for record in plain.history)
    assert all("train_loss_change" not in row for row in plain.history[0]["clients"].values())
    first, second = (record["clients"]["client-2"] for record in plain.history)
    assert second["train_loss_change"] == second["train_loss"] - first["train_loss"]
    monkeypatch.setattr(InProcessEngine, "run", flips)
    run = pf.federate(clients, FedAvg(lr=0.01), rounds=3, workers=0)
    assert run.history[0]["clients"]["client-0"]["update_cosine"] < 0
    assert any("'client-1' sends back almost what it has received (norm 0," in s for s in run.history[0]["warnings"])
    assert not any("client-2" in s for record in run.history for s in record["warnings"])


def test_a_huge_update_does_not_make_the_two_others_idle():
    norms = {"a": 1.1, "b": 1.2, "huge": 500.0}
    rows = {name: {"update_norm": norm} for name, norm in norms.items()}
    assert describe_departing_clients({"round": 1, "clients": rows}) == []
    (sentence,) = describe_departing_clients({"round": 1, "clients": {**rows, "a": {"update_norm": 0.001}}})
    assert "'a' sends back almost what it has received (norm 0.001, the others' median 1.2)" in sentence


def test_nothing_of_it_in_secure_sums():
    run = pf.federate(small_clients(4), FedAvg(lr=0.01), rounds=2, workers=0, secure=True)
    fields = {name for record in run.history for row in record["clients"].values() for name in row}
    assert not fields & {"update_cosine", "update_norm", "train_loss_change"}
    assert describe_round_warnings(run.history[-1], run.history[:-1]) == []
