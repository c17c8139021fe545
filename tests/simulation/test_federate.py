"""The round loop: cohorts, records, faults caused on purpose, resume from Python."""

import json
import time
from dataclasses import dataclass, replace

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import Ditto, FedAvg, FedProx, Local, PFedLA
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import RunDirectory
from polyfed.testing import assert_runs_equal, small_clients, without_durations
from tests.few_cases import few


@dataclass(frozen=True, kw_only=True)
class Faulty(FedAvg):
    """FedAvg in which one client's reply goes wrong in a chosen way."""

    fault: str = "nan"
    victim: str = "client-1"

    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        if client.id != self.victim:
            return reply, client_state
        model, scalars = dict(reply.tensors["model"]), dict(reply.scalars)
        if self.fault == "nan":
            model["head.weight"][0, 0] = float("nan")
        elif self.fault == "inf":
            model["head.bias"][1] = float("inf")
        elif self.fault == "missing":
            del model["head.bias"]
        elif self.fault == "unexpected":
            model["passengers"] = torch.ones(2)
        elif self.fault == "shape":
            model["head.bias"] = torch.zeros(4)
        elif self.fault == "dtype":
            model["head.bias"] = model["head.bias"].double()
        elif self.fault == "scalar":
            scalars["train_loss"] = float("nan")
        elif self.fault == "group":
            return Message({"model": model, "extra": {"w": torch.ones(1)}}, scalars), client_state
        elif self.fault == "raise":
            raise ZeroDivisionError("nothing to divide by")
        elif self.fault == "none":
            return None, client_state
        return Message({"model": model}, scalars), client_state


FAULTS = {
    "nan": "tensor 'head.weight' has NaN or infinite values",
    "inf": "tensor 'head.bias' has NaN or infinite values",
    "missing": "tensor 'head.bias' is missing",
    "unexpected": "tensor 'passengers' is unexpected",
    "shape": r"tensor 'head.bias' has shape \(4,\), expected \(3,\)",
    "dtype": "tensor 'head.bias' has dtype torch.float64, expected torch.float32",
    "scalar": "scalar 'train_loss' is nan",
    "group": r"the reply holds the groups \['extra', 'model'\], expected \['model'\]",
    "raise": "ZeroDivisionError: nothing to divide by",
}


@pytest.mark.parametrize(
    ("fault", "workers"),
    [
        *((fault, 0) for fault in FAULTS),
        *(pytest.param(fault, 2, marks=() if fault in ("nan", "raise") else pytest.mark.thorough) for fault in FAULTS),
    ],
)
def test_a_bad_reply_is_refused_with_client_tensor_and_reason(fault, workers):
    method = Faulty(fault=fault, lr=0.05)
    with pytest.raises(pf.ClientError, match=f"round 1, client 'client-1', phase '(reply|local)': .*{FAULTS[fault]}"):
        pf.federate(small_clients(), method, rounds=1, workers=workers)


@pytest.mark.parametrize("fault", few(FAULTS, [*FAULTS][::3]))
@pytest.mark.one_case
def test_skipping_goes_on_as_if_the_client_had_not_been_there(fault):
    run = pf.federate(small_clients(), Faulty(fault=fault, lr=0.05), rounds=2, workers=0, on_error="skip")
    for record in run.history:
        (failure,) = record["failures"]
        assert failure["client"] == "client-1"
        assert failure["phase"] in ("reply", "local")
        assert "bytes_up" not in record["clients"]["client-1"]
    others = [c for c in small_clients() if c.id != "client-1"]
    alone = pf.federate(others, FedAvg(lr=0.05), rounds=2, workers=0)
    for name, tensor in alone.last.state["model"].items():
        assert torch.equal(tensor, run.last.state["model"][name])


def test_a_reply_that_is_no_message():
    with pytest.raises(pf.ClientError, match="the reply is a NoneType, not a Message"):
        pf.federate(small_clients(), Faulty(fault="none"), rounds=1, workers=0)


def test_too_few_replies_end_the_run_and_leave_the_last_round_saved(tmp_path):
    method = Faulty(fault="nan", lr=0.05)
    with pytest.raises(pf.RoundError, match="round 1 has 2 valid replies of 3, min_replies is 3"):
        pf.federate(small_clients(), method, rounds=1, workers=0, on_error="skip", min_replies=3, out=tmp_path / "a")
    with pytest.raises(pf.RoundError, match="0 valid replies of 1"):
        pf.federate([small_clients(2)[1]], method, rounds=1, workers=0, on_error="skip")


def test_a_failure_late_in_a_run_keeps_the_rounds_before(tmp_path):
    last_good = 3

    @dataclass(frozen=True, kw_only=True)
    class Late(Averaging):
        def dispatch(self, server_state, client_info):
            message = super().dispatch(server_state, client_info)
            return Message(message.tensors, {**message.scalars, "round": client_info.round})

        def local_update(self, message, client_state, client, seed):
            if message.scalars["round"] > last_good:
                raise ArithmeticError("late")
            return super().local_update(message, client_state, client, seed)

    with pytest.raises(pf.ClientError, match="round 4"):
        pf.federate(small_clients(), Late(), rounds=6, workers=0, out=tmp_path / "run", checkpoint_every=5)
    last_good = 9
    run = pf.resume(tmp_path / "run", clients=small_clients(), algorithm=Late())
    assert_runs_equal(run, pf.federate(small_clients(), FedAvg(), rounds=6, workers=0))


def test_cohorts_are_the_same_for_every_method_and_change_from_round_to_round():
    def cohorts(method, seed):
        run = pf.federate(
            small_clients(6), method, rounds=6, clients_per_round=2, seed=seed, workers=0, evaluate_every=6
        )
        return [[i for i, row in r["clients"].items() if "bytes_down" in row] for r in run.history]

    fedavg = cohorts(FedAvg(), 0)
    assert fedavg == cohorts(Local(), 0) == cohorts(FedProx(mu=1, local_epochs=3), 0)
    assert all(len(c) == 2 for c in fedavg)
    assert len({tuple(c) for c in fedavg}) > 1
    assert fedavg != cohorts(FedAvg(), 1)


@pytest.mark.parametrize(("sample", "size"), [(1.0, 10), (0.25, 3), (0.01, 1), (1, 1), (7, 7)])
def test_cohort_sizes(sample, size):
    federation = Federation({c.id: c for c in small_clients(10)}, FedAvg(), Settings(clients_per_round=sample))
    assert {len(federation.sample_round_clients(r)) for r in range(1, 5)} == {size}


def test_all_clients_of_a_round_see_the_state_of_its_start():
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Watching(FedAvg):
        def local_update(self, message, client_state, client, seed):
            seen.append(message.tensors["model"]["head.weight"].abs().sum().item())
            return super().local_update(message, client_state, client, seed)

    pf.federate(small_clients(), Watching(lr=0.5), rounds=3, workers=0)
    assert [len(set(seen[i : i + 3])) for i in (0, 3, 6)] == [1, 1, 1]
    assert len(set(seen)) == 3


def test_records_have_what_the_design_says(tmp_path):
    run = pf.federate(
        small_clients(),
        FedAvg(lr=0.1),
        rounds=3,
        clients_per_round=2,
        workers=0,
        evaluate_every=2,
        out=tmp_path / "run",
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == run.history
    first, second, third = lines
    assert first["summary"] == {}
    assert set(second["summary"]) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert set(third["summary"]["accuracy"]) == {"mean", "weighted_mean", "std", "min", "p10", "p90"}
    taking_part = first["clients"]
    assert len(taking_part) == 2
    message = FedAvg().dispatch(run.last.state, run.federation.client_info("client-0", 1))
    for row in taking_part.values():
        assert row["bytes_down"] == row["bytes_up"] == message.nbytes
    assert third["bytes_down_total"] == sum(r["bytes_down"] for r in lines) == 6 * message.nbytes
    weights = {c.id: len(c.train) for c in small_clients()}
    expected = sum(weights[i] * row["train_loss"] for i, row in taking_part.items()) / sum(
        weights[i] for i in taking_part
    )
    assert first["train_loss"] == pytest.approx(expected)
    assert sorted(p.name for p in (tmp_path / "run" / "models").glob("*.safetensors")) == [
        f"client-{k}.safetensors" for k in range(3)
    ]


def test_best_round_is_chosen_on_validation_and_read_from_the_history():
    run = pf.federate(small_clients(), FedAvg(lr=0.3), rounds=6, workers=0)
    scores = [r["summary"]["val_accuracy"]["mean"] for r in run.history]
    assert run.best_round == 1 + scores.index(max(scores))
    best = run.history[run.best_round - 1]
    assert run.table(at="best")[-1]["accuracy"] == best["summary"]["accuracy"]["mean"]
    without = [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients()]
    with pytest.raises(UserError, match="needs validation examples"):
        pf.federate(without, FedAvg(), rounds=1, workers=0).table(at="best")


def test_global_test_set_is_reported_beside_the_clients_own():
    common = small_clients(1)[0].test
    clients = [pf.Client(c.id, c.model, c.train, c.test, global_test=common) for c in small_clients()]
    rows = pf.federate(clients, FedAvg(), rounds=1, workers=0).table()
    assert rows[0]["global_accuracy"] == rows[1]["global_accuracy"]
    assert rows[0]["global_loss"] != rows[1]["loss"]


def test_the_table_has_the_columns_of_the_design():
    rows = pf.federate(small_clients(), Local(), rounds=1, workers=0).table()
    assert [row["client"] for row in rows] == ["client-0", "client-1", "client-2", "mean"]
    assert {"client", "accuracy", "loss", "num_examples"} <= rows[0].keys()
    assert rows[-1]["accuracy"] == pytest.approx(sum(r["accuracy"] for r in rows[:-1]) / 3)


def test_a_personal_model_is_a_module_of_its_own():
    run = pf.federate(small_clients(), Local(lr=0.1), rounds=1, workers=0)
    one, other = run.model("client-0"), run.model("client-1")
    assert one is not run.model("client-0")
    assert not torch.equal(one.head.weight, other.head.weight)
    client = small_clients()[0]
    accuracy = (one(client.test.x).argmax(1) == client.test.y).double().mean().item()
    assert accuracy == run.table()[0]["accuracy"]
    with pytest.raises(UserError, match="no client 'client-7' in this run; did you mean"):
        run.model("client-7")
    with pytest.raises(UserError, match=r"the id of a client comes first, .* got Tensor$"):
        run.predict(client.test.x, "client-0")


def test_resume_needs_the_same_clients(tmp_path):
    pf.federate(small_clients(), FedAvg(), rounds=1, workers=0, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"made in Python.*polyfed.resume"):
        pf.resume(tmp_path / "run")
    with pytest.raises(UserError, match="the clients are not those of the run"):
        pf.resume(tmp_path / "run", clients=small_clients(2))
    changed = small_clients()
    changed[0].train.x[0, 0] += 1
    with pytest.raises(UserError, match="data fingerprint"):
        pf.resume(tmp_path / "run", clients=changed)
    run = pf.resume(tmp_path / "run", clients=small_clients())
    assert run.last.round == 1


def test_checkpoints_every_few_rounds(tmp_path):
    pf.federate(small_clients(), FedAvg(), rounds=5, workers=0, out=tmp_path / "run", checkpoint_every=2)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoint").glob("round-*"))
    assert names == ["round-000004", "round-000005"]


def test_a_run_directory_must_be_new(tmp_path):
    pf.federate(small_clients(), FedAvg(), rounds=1, workers=0, out=tmp_path / "run")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(
        UserError,
        match=r"run is not empty; its run is finished \(polyfed show .*run; more rounds: .*\); choose another out",
    ):
        pf.federate(small_clients(), FedAvg(), rounds=1, workers=0, out=tmp_path / "run")
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    RunDirectory.open(tmp_path / "run").close()


def test_bad_input_leaves_nothing_on_disk(tmp_path):
    for bad in (
        {"rounds": 0},
        {"clients_per_round": 0.0},
        {"clients_per_round": 9},
        {"engine": "warp"},
        {"workers": -1},
        {"device": "abacus"},
    ):
        with pytest.raises(UserError):
            pf.federate(small_clients(), FedAvg(), **({"rounds": 1, "out": tmp_path / "run"} | bad))
        assert list(tmp_path.iterdir()) == []


def test_learning_rates_of_the_rounds_follow_the_schedule():
    method = FedAvg(lr=0.5, schedule="cosine", batch_size=0)
    run = pf.federate(small_clients(), method, rounds=4, workers=0)
    constant = pf.federate(small_clients(), replace(method, schedule="constant"), rounds=4, workers=0)
    assert without_durations(run.history)[0]["train_loss"] == without_durations(constant.history)[0]["train_loss"]
    assert without_durations(run.history)[3]["train_loss"] != without_durations(constant.history)[3]["train_loss"]


def test_messages_of_a_round_need_not_fit_into_memory_at_once(monkeypatch):
    """With a limit that one message exceeds, each client is a block of its own; nothing else changes."""
    whole = pf.federate(small_clients(), PFedLA(lr=0.05), rounds=2, workers=0)
    started = []
    good = InProcessEngine.run

    def run(self, tasks):
        started.append([task.client for task in tasks])
        return good(self, tasks)

    monkeypatch.setattr(Engine, "max_block_bytes", 1)
    monkeypatch.setattr(InProcessEngine, "run", run)
    alone = pf.federate(small_clients(), PFedLA(lr=0.05), rounds=2, workers=0)
    assert started == [["client-0"], ["client-1"], ["client-2"]] * 4  # training and evaluation
    assert without_durations(alone.history) == without_durations(whole.history)


def test_messages_of_one_model_are_one_block():
    federation = Federation({c.id: c for c in small_clients()}, FedAvg(), Settings(rounds=1))
    at = Checkpoint(0, federation.algorithm.server_init(federation.server_context()), {})
    assert [
        len(block) for block in federation.build_task_blocks("local", list(federation.clients), 1, at, max_bytes=1000)
    ] == [3]


def test_time_of_server_and_clients_is_told_apart():
    @dataclass(frozen=True, kw_only=True)
    class SlowServer(Averaging):
        def dispatch_all(self, server_state, client_infos):
            for who in client_infos:
                time.sleep(0.02)
                yield self.dispatch(server_state, who)

        def aggregate(self, server_state, replies, server):
            time.sleep(0.1)
            return super().aggregate(server_state, replies, server)

    (record,) = pf.federate(small_clients(), SlowServer(local_epochs=1), rounds=1, workers=0).history
    assert 0.16 <= record["seconds_server"] < 0.16 + record["seconds_clients"] + 0.2
    assert record["seconds"] >= record["seconds_server"] + record["seconds_clients"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_network_that_stays_with_its_client_and_diverges_ends_the_run_before_it_is_saved(tmp_path, workers):
    """What travels is sound: only the personal models are pulled so hard that they go astray. No run goes on from such a
    state, so a checkpoint that has one would stop whoever reads the run again."""
    method, clients = Ditto(lr=0.1, lam=1e30, local_epochs=2, batch_size=4), small_clients()
    with pytest.raises(pf.ClientError, match=r"private state: tensor 'model/.*' has NaN .*lower lr") as found:
        pf.federate(clients, method, rounds=3, out=tmp_path / "run", workers=workers)
    assert found.value.round == 1


def test_a_run_of_an_own_method_says_on_resume_that_it_must_be_given(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class OwnMean(Averaging):
        pass

    pf.federate(small_clients(2), OwnMean(lr=0.05), rounds=1, workers=0, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"is a run of 'OwnMean', which is not a method of polyfed: give it, resume"):
        pf.resume(tmp_path / "run", clients=small_clients(2))
    assert len(pf.resume(tmp_path / "run", clients=small_clients(2), algorithm=OwnMean(lr=0.05)).history) == 1
