"""Asynchronous rounds: identities, schedules simulated by hand, the same bits on every engine and after a stop."""

import math

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, FedOpt, FedRep, Scaffold
from polyfed.core.algorithm import Message
from polyfed.core.errors import RunInterrupt, UserError
from polyfed.simulation.scheduling.asynchronous.idle_clients import IdleClients
from polyfed.simulation.scheduling.asynchronous.rebase import mix_model, rebase_update
from polyfed.simulation.scheduling.asynchronous.staleness import build_staleness_function
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few

GIVEN = {"workers": 0, "quiet": True}


def weights(run):
    return run.last.state["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def arrivals(run):
    """For each round: the clients whose replies it used, with their staleness."""
    rows = [record["clients"].items() for record in run.history]
    return [{client: row["staleness"] for client, row in clients if "staleness" in row} for clients in rows]


def clock(run):
    return [record["simulated_seconds"] for record in run.history]


class Line(torch.nn.Linear):
    """A network without buffers."""

    def __init__(self):
        super().__init__(6, 3)


def equal_clients(number=3):
    """Clients with 20 training examples each."""
    return [
        pf.Client(c.id, Line, (c.train.x[:20], c.train.y[:20]), (c.test.x, c.test.y), (c.val.x, c.val.y))
        for c in small_clients(number)
    ]


class Stop(pf.Callback):
    def __init__(self, after):
        self.after = after

    def on_round(self, record):
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", few([FedRep(), FedAvg(weighted=False), FedOpt(), Scaffold()], [FedRep()]))
def test_a_buffer_of_all_clients_is_the_synchronous_mean(method):
    """K = M = all: every reply is to the newest version, so that the bits are those of synchronous rounds, at any speeds."""
    clients = small_clients(4)
    plain = pf.federate(clients, method, rounds=2, **GIVEN)
    for speeds in (1.0, "uniform:1-20"):
        run = pf.federate(clients, method, rounds=2, asynchronous=pf.FedBuff(buffer=4), speeds=speeds, **GIVEN)
        assert same(weights(run), weights(plain))
        assert arrivals(run) == [dict.fromkeys((c.id for c in clients), 0)] * 2
    timed = pf.federate(clients, method, rounds=2, speeds="uniform:1-20", **GIVEN)
    assert same(weights(timed), weights(plain))
    assert clock(timed) == clock(run)  # a full buffer waits for the slowest, too


def test_fedasync_of_one_client_with_a_mixing_of_1_is_its_training():
    """Each update replaces the model: the same bits as one client of FedAvg, round by round."""
    clients = small_clients(1)
    alone = pf.federate(clients, FedAvg(lr=0.1), rounds=4, **GIVEN)
    run = pf.federate(clients, FedAvg(lr=0.1), rounds=4, asynchronous=pf.FedAsync(mixing=1.0), **GIVEN)
    assert same(weights(run), weights(alone))
    assert clock(run) == [20.0, 40.0, 60.0, 80.0]  # one example a second, where no speeds are given


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("constant", [1, 1, 1]),
        ("polynomial:0.5", [1, 1 / math.sqrt(2), 1 / math.sqrt(9)]),
        ("polynomial:1", [1, 1 / 2, 1 / 9]),
        ("hinge:10:4", [1, 1, 1 / 41]),
        ("hinge:0.5:0", [1, 1 / 1.5, 1 / 5]),
    ],
)
def test_staleness_functions_at_0_1_and_8(text, values):
    function = build_staleness_function(text)
    assert [function(staleness) for staleness in (0, 1, 8)] == pytest.approx(values, abs=1e-12)


def test_three_clients_as_simulated_by_hand():
    """20 examples each, at 20, 10 and 4 examples a second: updates take 1, 2 and 5 s. K = 2, M = 3.

    t=0: all start from version 0. t=1: client-0 replies (it waits for the update). t=2: client-1 replies: update 1; both
    start again from version 1. t=3: client-0. t=4: client-1: update 2, both start from version 2. t=5: client-0 (from
    version 2) and client-2 (from version 0) reply at once: update 3. Client-0 and client-2 start at 5; client-1 replies at
    6 from version 2, client-0 at 6 from version 3: update 4.
    """
    speeds = {"client-0": 20.0, "client-1": 10.0, "client-2": 4.0}
    rule = pf.FedBuff(buffer=2, concurrency=3)
    run = pf.federate(equal_clients(), "fedavg", rounds=4, asynchronous=rule, speeds=speeds, **GIVEN)
    assert clock(run) == [2.0, 4.0, 5.0, 6.0]
    assert arrivals(run) == [
        {"client-0": 0, "client-1": 0},
        {"client-0": 0, "client-1": 0},
        {"client-0": 0, "client-2": 2},
        {"client-0": 0, "client-1": 1},
    ]
    flights = run.last.schedule["flights"]
    assert flights["clients"] == {"client-2": {"started": 5.0, "finishes": 10.0, "version": 3}}
    assert set(flights["versions"]) == {"3"}
    assert run.table()[-1]["simulated_seconds"] == 6.0
    assert run.history[2]["clients"]["client-2"]["update_seconds"] == 5.0


def test_the_update_of_a_stale_reply_by_hand():
    """Two clients, K = 1: the second's reply starts from version 0 and counts 1/√2 of its change, added to version 1."""
    clients = equal_clients(2)
    rule = pf.FedBuff(buffer=1)
    speeds = {"client-0": 20.0, "client-1": 15.0}
    one = pf.federate(clients, "fedavg", rounds=1, asynchronous=rule, speeds=speeds, **GIVEN)
    two = pf.federate(clients, "fedavg", rounds=2, asynchronous=rule, speeds=speeds, **GIVEN)
    assert arrivals(two) == [{"client-0": 0}, {"client-1": 1}]
    start = pf.federate(clients, FedAvg(lr=1e-30), rounds=1, **GIVEN)  # nothing moves: the initial weights
    alone = pf.federate(clients[1:], "fedavg", rounds=1, **GIVEN)  # what client-1 makes of them
    for name, tensor in weights(two).items():
        change = weights(alone)[name].double() - weights(start)[name].double()
        expected = weights(one)[name].double() + change / math.sqrt(2)
        torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=0)


def test_fedasync_mixes_models():
    clients, speeds = equal_clients(2), {"client-0": 20.0, "client-1": 15.0}
    rule = pf.FedAsync(mixing=0.5, staleness="polynomial:1")
    one = pf.federate(clients, "fedavg", rounds=1, asynchronous=rule, speeds=speeds, **GIVEN)
    two = pf.federate(clients, "fedavg", rounds=2, asynchronous=rule, speeds=speeds, **GIVEN)
    alone = pf.federate(clients[1:], "fedavg", rounds=1, **GIVEN)
    for name, tensor in weights(two).items():  # α_τ = 0.5·1/2
        expected = 0.75 * weights(one)[name] + 0.25 * weights(alone)[name]
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


ASYNCHRONOUS = {
    "fedbuff": {"asynchronous": pf.FedBuff(buffer=2, concurrency=3)},
    "fedasync": {"asynchronous": pf.FedAsync(concurrency=0.8)},
    "oort": {"asynchronous": pf.FedBuff(buffer=2, concurrency=3), "sampler": "oort"},
    "available": {
        "asynchronous": pf.FedBuff(buffer=2, concurrency=2),
        "sampler": "available",
        "availability": {f"client-{k}": [[k, 4 + k], [9, 10 + k]] for k in range(5)},
    },
    "compressed": {"asynchronous": pf.FedBuff(buffer=2, concurrency=3), "compress": "topk:0.5", "bandwidth": 500.0},
}


@pytest.mark.parametrize("name", few(ASYNCHRONOUS, [*ASYNCHRONOUS][:1]))
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, name):
    clients, given = small_clients(5), {"rounds": 7, "speeds": "uniform:1-20", **ASYNCHRONOUS[name], **GIVEN}
    whole = pf.federate(clients, "fedavg", **given)
    with pytest.raises(RunInterrupt):
        pf.federate(clients, "fedavg", out=tmp_path / "run", callbacks=[Stop(4)], **given)
    resumed = pf.resume(tmp_path / "run", clients=clients, workers=0, quiet=True)
    assert clock(resumed) == clock(whole) == sorted(clock(whole))
    assert arrivals(resumed) == arrivals(whole)
    assert_runs_equal(resumed, whole)
    assert max(max(staleness.values()) for staleness in arrivals(whole)) > 0


def test_private_states_go_on_from_the_clients_own_last_reply(tmp_path):
    clients, method = small_clients(4), FedRep(local_epochs=2)
    given = {"rounds": 6, "speeds": "uniform:1-20", "asynchronous": pf.FedBuff(buffer=2, concurrency=3), **GIVEN}
    whole = pf.federate(clients, method, **given)
    with pytest.raises(RunInterrupt):
        pf.federate(clients, method, out=tmp_path / "run", callbacks=[Stop(2)], **given)
    assert_runs_equal(pf.resume(tmp_path / "run", clients=clients, workers=0, quiet=True), whole)


def test_the_pool_gives_the_same_bits():
    clients = small_clients(5)
    given = {"rounds": 5, "speeds": "lognormal:1.0", "asynchronous": pf.FedBuff(buffer=2, concurrency=4), "quiet": True}
    assert_runs_equal(
        pf.federate(clients, "fedavg", engine="pool", workers=2, **given),
        pf.federate(clients, "fedavg", workers=0, **given),
    )


def test_a_checkpoint_with_a_damaged_schedule_is_not_used(tmp_path):
    from dataclasses import replace

    from polyfed.simulation.rounds.start.state_validation import StateValidator

    rule = pf.FedBuff(buffer=1, concurrency=3)
    run = pf.federate(small_clients(3), "fedavg", rounds=2, asynchronous=rule, speeds="uniform:1-20", **GIVEN)
    validator, schedule = StateValidator(run.federation), run.last.schedule
    assert validator.state_error(run.last, run.history) is None
    client, flight = next(iter(schedule["flights"]["clients"].items()))

    def error(**changes):
        flights = {**schedule["flights"], **changes}
        return validator.state_error(replace(run.last, schedule={**schedule, "flights": flights}), run.history)

    assert f"{client!r} is at work in it from version 9 on" in error(clients={client: {**flight, "version": 9}})
    assert "'stranger' is at work in it, who is not in the federation" in error(clients={"stranger": flight})
    assert "clients must be a mapping" in error(clients=3)
    misshapen = {number: {"model": {"w": torch.zeros(1)}} for number in schedule["flights"]["versions"]}
    assert "the server's state" in error(versions=misshapen)
    assert "the schedule must be a mapping" in validator.state_error(replace(run.last, schedule={}), run.history)


def test_buffers_are_mixed_and_counters_rounded():
    def message(w, var, batches):
        tensors = {
            "w": torch.tensor([w]),
            "bn.running_var": torch.tensor([var]),
            "bn.num_batches_tracked": torch.tensor(batches),
        }
        return Message({"model": tensors})

    rebased = rebase_update(message(3.0, 0.1, 14), message(1.0, 5.0, 10), message(10.0, 1.0, 20), 0.5).tensors["model"]
    assert rebased["w"].item() == 11.0
    assert rebased["bn.running_var"].item() == pytest.approx(0.55)  # 1 + 0.5·(0.1 − 5) would be negative
    assert rebased["bn.num_batches_tracked"].item() == 17
    assert mix_model(message(3.0, 0.1, 14), message(10.0, 1.0, 20), 1.0).tensors["model"]["w"].item() == 3.0
    with pytest.raises(ValueError, match="tensor 'v' of group 'model' was not in the server's message"):
        rebase_update(Message({"model": {"v": torch.ones(1)}}), Message(), Message(), 1.0)


def test_robust_rules_compare_rebased_replies():
    clients = equal_clients(5)
    given = {"rounds": 4, "speeds": "uniform:1-20", "asynchronous": pf.FedBuff(buffer=4, concurrency=5), **GIVEN}
    clipped = pf.federate(clients, FedAvg(robust="clip:0.001"), **given)
    start = pf.federate(clients, FedAvg(lr=1e-30), rounds=1, **GIVEN)
    moved = math.sqrt(sum(float((weights(clipped)[n] - weights(start)[n]).square().sum()) for n in weights(start)))
    assert 0.0005 < moved <= 0.004001  # at most 0.001 in each of four updates
    assert pf.federate(clients, FedAvg(robust="median"), **given).history[-1]["robust"]["rule"] == "median"


@pytest.mark.parametrize(
    ("robust", "rule", "flaw"),
    [
        ("median", "fedasync", "of fewer than 3 replies it leaves none out, and a server update has 1"),
        ("krum", pf.FedBuff(buffer=4), "needs at least 2f \\+ 3 = 5 clients a round"),
    ],
)
def test_robust_rules_that_a_buffer_has_too_few_replies_for_are_refused_before_round_1(robust, rule, flaw):
    with pytest.raises(UserError, match=f"{flaw}.*a round is one buffer of replies"):
        pf.federate(equal_clients(6), FedAvg(robust=robust), rounds=2, speeds=5.0, asynchronous=rule, **GIVEN)


def test_privacy_counts_each_server_update():
    method = FedAvg(privacy=pf.Privacy(noise_multiplier=1.0), local_epochs=1)
    run = pf.federate(
        equal_clients(3), method, rounds=2, asynchronous=pf.FedBuff(buffer=2), speeds="uniform:1-20", **GIVEN
    )
    plain = pf.federate(equal_clients(3), method, rounds=2, **GIVEN)
    assert run.history[-1]["epsilon"] == plain.history[-1]["epsilon"]  # a client replies at most once an update


def test_a_failure_leaves_its_place_in_the_buffer_empty():
    clients = small_clients(3)

    bad = pf.Client(
        "client-1", clients[1].model, (clients[1].train.x, clients[1].train.y), clients[1].test, loss=_explode
    )
    run = pf.federate(
        [clients[0], bad, clients[2]], "fedavg", rounds=2, asynchronous=pf.FedBuff(buffer=2), on_error="skip", **GIVEN
    )
    assert [
        failure["client"] for record in run.history for failure in record["failures"] if failure["phase"] == "local"
    ]
    assert all(math.isfinite(value) for value in clock(run))


def _explode(outputs, targets):
    if outputs.requires_grad:
        raise RuntimeError("no memory")
    return torch.nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"asynchronous": {"rule": "fedbuff", "buffer": 0}},
            "FedBuff: buffer must be a whole number of at least 1, got 0",
        ),
        ({"asynchronous": {"rule": "fedbuf"}}, "unknown asynchronous.rule 'fedbuf'; did you mean fedbuff"),
        ({"asynchronous": {"rule": "fedbuff", "mixing": 1}}, "asynchronous fedbuff has no field 'mixing'"),
        ({"asynchronous": 3}, r"asynchronous must be polyfed.FedBuff\(...\), .*, got 3"),
        ({"asynchronous": pf.FedBuff(buffer=9)}, "buffer=9 waits for more clients than the 3 there are"),
        (
            {"asynchronous": pf.FedBuff(buffer=2, concurrency=4)},
            "concurrency=4 asks for more clients than the 3 there are",
        ),
        (
            {"asynchronous": pf.FedBuff(buffer=2), "min_replies": 3},
            "min_replies=3 is more than the 2 replies of a server",
        ),
        ({"asynchronous": pf.FedBuff(buffer=2), "secure": True}, "secure=True sums the replies of one round"),
        ({"asynchronous": pf.FedBuff(buffer=2), "regions": 2}, "regions=... sums the replies of one round"),
        ({"asynchronous": "fedasync", "speeds": -2.0}, "speeds must be a positive number"),
        ({"asynchronous": "fedasync", "speeds": {"client-0": 1.0}}, "speeds has nothing for client 'client-1'"),
        ({"asynchronous": "fedasync", "availability": {"client-0": [[0, 9]]}}, "availability has nothing for client"),
    ],
)
def test_bad_input(options, sentence):
    with pytest.raises(UserError, match=sentence):
        pf.federate(small_clients(3), "fedavg", rounds=1, **options, **GIVEN)


def test_bad_options():
    for rule, field, value in [
        (pf.FedBuff, "server_lr", 0), (pf.FedBuff, "concurrency", 1.5), (pf.FedBuff, "buffer", 2.0),
        (pf.FedAsync, "mixing", 1.5), (pf.FedAsync, "mixing", 0), (pf.FedAsync, "concurrency", 0),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=rf"{rule.__name__}: {field} must be .*, got {value}"):
            rule(**{field: value})
    for text in ("linear", "polynomial", "polynomial:-1", "hinge:1", None):
        with pytest.raises(
            UserError, match=f"staleness must be 'constant', 'polynomial:A' or 'hinge:A:B' .*, got {text!r}"
        ):
            pf.FedBuff(staleness=text)


@pytest.mark.parametrize(
    ("method", "rule", "sentence"),
    [
        (
            "pfedla",
            "fedbuff",
            "needs a method whose server takes the mean of the clients' weights, and pfedla does not",
        ),
        ("fedproto", "fedbuff", "and fedproto does not; methods that do: .*fedavg, feddyn"),
        (FedAvg(averaged_over="all"), "fedbuff", "and fedavg does not"),
        (FedOpt(), "fedasync", "the server of fedopt makes a step of its own; give asynchronous=fedbuff"),
    ],
)
def test_methods_without_a_mean(method, rule, sentence):
    with pytest.raises(UserError, match=sentence):
        pf.federate(small_clients(3), method, rounds=1, asynchronous={"rule": rule, "concurrency": 2}, **GIVEN)


def test_a_changed_file_of_speeds_stops_a_resumed_run(tmp_path):
    (tmp_path / "devices.csv").write_text("client,speed\nclient-0,1\nclient-1,2\nclient-2,3\n")
    given = {"rounds": 4, "speeds": str(tmp_path / "devices.csv"), **GIVEN}
    with pytest.raises(RunInterrupt):
        pf.federate(small_clients(3), "fedavg", out=tmp_path / "run", callbacks=[Stop(2)], **given)
    (tmp_path / "devices.csv").write_text("client,speed\nclient-0,1\nclient-1,2\nclient-2,4\n")
    with pytest.raises(UserError, match="the files with speeds, bandwidth or availability have changed"):
        pf.resume(tmp_path / "run", clients=small_clients(3), quiet=True)


def test_it_learns_in_less_simulated_time_than_rounds_that_wait():
    """Ten clients, of which one is 20 times slower: the buffer reaches the accuracy of synchronous rounds far earlier."""
    clients = equal_clients(10)
    speeds = {c.id: 1.0 if c.id == "client-9" else 20.0 for c in clients}
    method = FedAvg(lr=0.02)

    def seconds_to(run, accuracy):
        return next(r["simulated_seconds"] for r in run.history if r["summary"]["accuracy"]["mean"] >= accuracy)

    waiting = pf.federate(clients, method, rounds=8, speeds=speeds, **GIVEN)
    buffered = pf.federate(clients, method, rounds=20, speeds=speeds, asynchronous=pf.FedBuff(buffer=4), **GIVEN)
    start = waiting.history[0]["summary"]["accuracy"]["mean"]
    goal = max(r["summary"]["accuracy"]["mean"] for r in waiting.history)
    assert goal > start
    assert 5 * seconds_to(buffered, goal) < seconds_to(waiting, goal)


def test_compare_leaves_out_what_has_no_mean():
    found = pf.compare(
        small_clients(3), ["fedavg", "fedproto"], rounds=2, seeds=[0], tune="none", references=False, quiet=True,
        asynchronous=pf.FedBuff(buffer=2), speeds="uniform:1-20",
    )  # fmt: skip
    assert {row["method"] for row in found.table()} >= {"local", "fedavg"}
    assert "fedproto does not" in found.results["skipped"]["fedproto"]


def test_idle_clients_are_listed_without_a_list():
    ids = tuple(f"{k:03d}" for k in range(50))
    for busy in ([], ["000"], ["049", "000", "001"], ["007", "008", "030"], list(ids)):
        idle = IdleClients(ids, busy)
        expected = [client for client in ids if client not in busy]
        assert list(idle) == [idle[k] for k in range(len(idle))] == expected
        with pytest.raises(IndexError):
            idle[len(idle)]
