"""`averaged_over`: the mean over the last round's clients, or over all clients' latest models, as the result of a run."""

from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.algorithms import FedAvg, FedAvgFT, FedHeNNHomo, FedProx
from polyfed.core.errors import RunInterrupt
from polyfed.core.evaluation.evaluate import evaluate_client_with_outputs
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import AlgorithmContract, assert_runs_equal, small_clients
from polyfed.testing.algorithm_contract import _InterruptAfter

TRAINING: dict[str, Any] = {"lr": 0.05, "batch_size": 8}
RAD: dict[str, Any] = {"rad_size": 20, "rad_batch": 8, "eta0": 1.0, "local_epochs": 1}
PUBLIC = torch.randn(40, 6, generator=torch.Generator().manual_seed(8)), torch.zeros(40, dtype=torch.int64)
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "unweighted": (FedAvg, {"weighted": False}),
    "fedprox": (FedProx, {"mu": 0.1, "buffers": "local"}),
    "fedavg_ft": (FedAvgFT, {}),
    "fedhenn_homo": (FedHeNNHomo, RAD),
}


def made(name: str, averaged_over: str) -> pf.Algorithm:
    kind, fields = METHODS[name]
    method: pf.Algorithm = kind(averaged_over=averaged_over, **TRAINING | fields)
    return method


def federate(method: pf.Algorithm, **settings: Any) -> Any:
    wanted = {"rounds": 4, "seed": 3, "workers": 0, "clients_per_round": 2}
    wanted |= {"public": PUBLIC} if "public_data" in method.requires else {}
    return pf.federate(small_clients(5), method, **wanted | settings)


def by_hand(method: Any, rounds: int, per_round: int) -> tuple[Any, dict[str, dict[str, Tensor]], dict[str, float]]:
    """The server's state after some rounds, and what each client sent last, with its number of examples."""
    clients = {c.id: c for c in small_clients(5)}
    public = as_examples(PUBLIC) if "public_data" in method.requires else None
    at = Federation(clients, method, Settings(rounds=rounds, seed=3, clients_per_round=per_round), public)
    states: dict[str, Any] = {}
    latest: dict[str, dict[str, Tensor]] = {}
    examples: dict[str, float] = {}
    with exclusive_single_torch_thread_with_grad():
        state = method.server_init(at.server_context())
        for number in range(1, rounds + 1):
            replies = {}
            for i in at.sample_round_clients(number):
                own = states.get(i) or method.client_init(clients[i], 3)
                down = method.dispatch(state, at.client_info(i, number))
                replies[i], states[i] = method.local_update(down, own, clients[i], 10 * number)
                latest[i] = dict(replies[i].tensors["model"])
                examples[i] = replies[i].scalars["num_examples"] if method.weighted else 1.0
            state = method.aggregate(state, replies, at.server_context())
    return (state, at), latest, examples


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_the_result_is_the_mean_over_all_latest_models(name: str) -> None:
    """By the definition, with a client that was never drawn, and others last drawn in different rounds."""
    method = made(name, "all")
    (state, at), latest, examples = by_hand(method, rounds=3, per_round=2)
    assert 2 < len(latest) < 5
    message = method.dispatch(state, at.client_info("client-0", 3, "evaluate"))
    for group, tree in message.tensors["model"].items():
        total: Any = sum(examples[i] * latest[i][group].double() for i in latest)
        if not tree.is_floating_point():
            assert torch.equal(tree, (total / sum(examples.values()) + 0.5).floor().to(tree.dtype))
            continue
        torch.testing.assert_close(tree.double(), total / sum(examples.values()), rtol=1e-6, atol=1e-7)
    last = method.dispatch(state, at.client_info("client-0", 4)).tensors["model"]
    assert {n: t.tolist() for n, t in last.items()} == {n: t.tolist() for n, t in message.tensors["cohort"].items()}
    assert not torch.equal(last["head.weight"], message.tensors["model"]["head.weight"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_training_is_the_same_and_the_other_mean_is_evaluated_beside_it(name: str) -> None:
    cohort, everyone = federate(made(name, "cohort")), federate(made(name, "all"))
    theirs, ours = cohort.last.state["model"], everyone.last.state["model"]
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[n], ours[n]) for n in theirs)
    assert "latest" not in cohort.last.state
    prefix, differ = "server_" if name == "fedhenn_homo" else "", 0
    for one, other in zip(cohort.history, everyone.history, strict=True):
        assert (one["train_loss"], one["bytes_up"]) == (other["train_loss"], other["bytes_up"])
        for i, row in one["clients"].items():
            again = other["clients"][i]
            assert (row[f"{prefix}accuracy"], row[f"{prefix}loss"]) == (again["cohort_accuracy"], again["cohort_loss"])
            assert "cohort_loss" not in row
            differ += row[f"{prefix}loss"] != again[f"{prefix}loss"]
    assert differ > 5


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_where_everyone_took_part_in_the_last_round_both_are_one(name: str) -> None:
    run = federate(made(name, "all"), clients_per_round=1.0, rounds=2)
    for row in run.history[-1]["clients"].values():
        prefix = "server_" if name == "fedhenn_homo" else ""
        assert (row[f"{prefix}loss"], row[f"{prefix}accuracy"]) == (row["cohort_loss"], row["cohort_accuracy"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedavg", "fedhenn_homo"])
def test_the_evaluated_network_is_the_returned_one_and_a_stopped_run_goes_on_to_the_bit(
    name: str, tmp_path: Any
) -> None:
    method = made(name, "all")
    whole = federate(method)
    with pytest.raises(RunInterrupt):
        federate(method, out=tmp_path / "run", progress=_InterruptAfter(2))
    public = {"public": PUBLIC} if name == "fedhenn_homo" else {}
    resumed = pf.resume(tmp_path / "run", clients=small_clients(5), **public)
    assert_runs_equal(whole, resumed)
    for client in resumed.federation.clients.values():
        metrics, _ = evaluate_client_with_outputs(resumed.model(client.id), client, resumed.federation.metrics)
        recorded = resumed.history[-1]["clients"][client.id]
        assert {n: recorded[n] for n in metrics} == metrics


def test_an_unseen_client_gets_the_result(tmp_path: Any) -> None:
    """What is sent to someone who never took part is the result, before the first reply the initial model."""
    method = made("fedavg", "all")
    (state, at), _, _ = by_hand(method, rounds=2, per_round=1)
    who = at.client_info("client-4", 2, "evaluate")
    sent, result = method.dispatch(state, who).tensors["model"], method.result_models(state)["model"]  # type: ignore[attr-defined]
    assert all(torch.equal(sent[n], result[n]) for n in sent)
    start = method.server_init(at.server_context())
    first = method.dispatch(start, who).tensors
    assert all(torch.equal(first["model"][n], t) for n, t in start["model"].items())


def test_who_needs_single_replies_says_so() -> None:
    assert FedHeNNHomo().averaged_over == "all"
    assert not FedHeNNHomo().aggregates_by_sum
    assert FedHeNNHomo(averaged_over="cohort").aggregates_by_sum
    for kind in (FedAvg, FedAvgFT, FedProx):
        assert kind().averaged_over == "cohort"
        assert kind().aggregates_by_sum
        assert not kind(averaged_over="all").aggregates_by_sum
    with pytest.raises(pf.UserError, match="averaged_over"):
        FedAvg(averaged_over="last")  # type: ignore[arg-type]


def test_a_mean_of_all_is_nearer_to_everyones_optimum() -> None:
    """A closed form: client i's data lie at c_i, one unit's bias is the model, and local training takes it to c_i.
    With one client a round, θ(t) is that client's c; θ_all is the mean of all, of which the mean squared error is least."""
    centres, clients = [0.0, 2.0, 7.0], []

    def constant() -> torch.nn.Module:
        net = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(net.weight).requires_grad_(False)
        return net

    for k, centre in enumerate(centres):
        data = torch.zeros(4, 1), torch.full((4, 1), centre)
        clients.append(pf.Client(f"client-{k}", constant, data, data, task="regression"))
    method = FedAvg(averaged_over="all", lr=0.2, local_steps=80)
    run = pf.federate(clients, method, rounds=12, seed=1, clients_per_round=1, workers=0)
    assert len(run.last.state["latest"]) == 3
    bias = run.model("client-0").state_dict()["bias"].item()
    assert bias == pytest.approx(sum(centres) / 3, abs=1e-5)
    assert run.last.state["model"]["bias"].item() == pytest.approx(
        next(c for k, c in enumerate(centres) if "bytes_up" in run.history[-1]["clients"].get(f"client-{k}", {})),
        abs=1e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "unweighted", "fedprox", "fedavg_ft"])
class TestContract(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name: str) -> Any:
        return made(name, "all")
