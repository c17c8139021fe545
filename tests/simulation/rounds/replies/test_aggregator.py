"""A reply of the right form that breaks the server's state is found, left out and named; no other client pays for it."""

import math
from dataclasses import dataclass

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg
from polyfed.core.algorithm import Message
from polyfed.core.state_dict import iter_tensors
from polyfed.testing import small_clients

SMALL = {
    "pfedhn": {"hidden": 8, "local_steps": 5},
    "pfedla": {"hidden": 8, "embedding_dim": 8},
    "heur_pfedla": {"hidden": 8, "embedding_dim": 8},
    "fedavg_kd": {"teacher": "mlp"},
    "fedrep": {"local_epochs": 1},
}


def filled_with(value):
    def change(reply):
        tensors = {
            group: {n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in tree.items()}
            for group, tree in reply.tensors.items()
        }
        return Message(tensors, reply.scalars)

    return change


def without_its_first_tensor(reply):
    model = dict(reply.tensors["model"])
    model.pop(next(iter(model)))
    return Message({"model": model}, reply.scalars)


def wider(reply):
    return Message({"model": {n: torch.cat([t, t]) for n, t in reply.tensors["model"].items()}}, reply.scalars)


def hostile(name, change, who):
    """The method, but for replies of these clients, which they change."""
    kind = REGISTRY[name]

    class Hostile(kind):
        def local_update(self, message, client_state, client, seed):
            reply, after = super().local_update(message, client_state, client, seed)
            return (change(reply) if client.id in who and reply.tensors else reply), after

    return Hostile(lr=0.05, batch_size=8, **SMALL[name])


CASES = [
    ("pfedhn", filled_with(3e38), "reply"),
    ("pfedla", filled_with(1e15), "reply"),
    ("heur_pfedla", filled_with(1e15), "reply"),
    ("fedavg_kd", wider, "aggregate"),
    ("fedrep", without_its_first_tensor, "aggregate"),
]
WHO = [{"client-0", "client-3"}, *(pytest.param({i}, marks=pytest.mark.thorough) for i in ("client-0", "client-2"))]


@pytest.mark.parametrize("who", WHO, ids=lambda who: "+".join(sorted(who)))
@pytest.mark.parametrize(("name", "change", "phase"), CASES, ids=[name for name, *_ in CASES])
@pytest.mark.one_case
def test_a_reply_that_would_break_the_state_is_left_out(name, change, phase, who):
    run = pf.federate(small_clients(5), hostile(name, change, who), rounds=3, workers=0, on_error="skip")
    assert {(f["client"], f["phase"]) for f in run.history[0]["failures"]} == {(i, phase) for i in who}
    for record in run.history:
        assert {f["client"] for f in record["failures"]} <= who, record["failures"]
    honest = [row for row in run.table() if row["client"] not in who | {"mean"}]
    assert all(row["loss"] is not None and math.isfinite(row["loss"]) for row in honest)


@dataclass(frozen=True, kw_only=True)
class Inverse(FedAvg):
    """Works with all replies at once, with numbers that it cannot do with: 1/0, or an error of its own."""

    fails: bool = False

    def aggregate(self, server_state, replies, server):
        after = super().aggregate(server_state, replies, server)
        if self.fails and any(float(r.tensors["model"]["head.bias"].abs().sum()) == 0 for r in replies.values()):
            raise ZeroDivisionError("a bias is 0")
        factor = sum(1 / (1 / r.tensors["model"]["head.bias"].abs().sum()) for r in replies.values())
        nothing = [1 / r.tensors["model"]["head.bias"].abs().sum() for r in replies.values()]
        return {"model": after["model"], "factor": factor, "sum": sum(nothing)}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("who", WHO, ids=lambda who: "+".join(sorted(who)))
def test_a_state_that_is_not_finite_is_traced_to_its_replies(fails, who):
    class Hostile(Inverse):
        def local_update(self, message, client_state, client, seed):
            reply, after = super().local_update(message, client_state, client, seed)
            return (filled_with(0.0)(reply) if client.id in who else reply), after

    method = Hostile(lr=0.05, fails=fails)
    run = pf.federate(small_clients(5), method, rounds=2, workers=0, on_error="skip")
    for record in run.history:
        assert {(f["client"], f["phase"]) for f in record["failures"]} == {(i, "aggregate") for i in who}
    assert all(bool(torch.isfinite(t).all()) for t in iter_tensors(run.last.state) if t.is_floating_point())
    error, match = (ZeroDivisionError, "a bias is 0") if fails else (pf.RoundError, f"for the replies of '{min(who)}'")
    with pytest.raises(error, match=match):
        pf.federate(small_clients(5), method, rounds=2, workers=0)


def test_a_client_cannot_claim_more_examples_than_it_has():
    class Boasts(FedAvg):
        def local_update(self, message, client_state, client, seed):
            reply, after = super().local_update(message, client_state, client, seed)
            return Message(reply.tensors, {**reply.scalars, "num_examples": 10**9}), after

    with pytest.raises(pf.ClientError, match="num_examples is 1000000000, more than the 20 that the client has"):
        pf.federate(small_clients(2), Boasts(lr=0.05), rounds=1, workers=0)


def test_too_few_that_are_left_end_the_round():
    method = hostile("fedrep", without_its_first_tensor, {"client-0"})
    with pytest.raises(pf.RoundError, match="round 1 has 2 replies that can be aggregated, min_replies is 3"):
        pf.federate(small_clients(3), method, rounds=1, workers=0, on_error="skip", min_replies=3)
