"""Methods whose server half is a mean take `robust=`, and a rule takes the place of the mean in whole runs."""

import dataclasses
import json

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedDF, FedPAC, FedProto, HeteroFL, Scaffold
from polyfed.algorithms.base.averaging import Averaging
from polyfed.algorithms.base.robust_sum import NORMS_KEY
from polyfed.core.algorithm import ClientInfo, Message
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.robust.krum import Krum
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.storage.checkpoints.checkpoint import load_newest_checkpoint
from polyfed.testing import AlgorithmContract, example_of, small_clients
from tests.few_cases import few
from tests.stopped import Stop

RULES = ["clip", "clip:0.05", "median", "trimmed_mean:0.34", "krum:1", "multi_krum:1", "geometric_median:3"]
MEANS = [n for n, m in REGISTRY.items() if issubclass(m, Averaging) and m.aggregate is Averaging.aggregate]
honest = InProcessEngine.run


def takes(name, rule):
    try:
        return dataclasses.replace(example_of(name).build(), robust=rule)
    except UserError:
        return None


OF_EACH_KIND = ("clip", "median", "krum:1", "geometric_median:3")
CASES = [
    (name, rule)
    for name in MEANS
    for rule in (RULES if name == "fedavg" else OF_EACH_KIND)
    if takes(name, rule) is not None
]
FAST = {("fedavg", "krum:1"), ("scaffold", "clip"), ("flha_ghn", "median"), ("fedproto", "clip")}


@pytest.mark.parametrize(
    ("name", "rule"), [c if c in FAST else pytest.param(*c, marks=pytest.mark.thorough) for c in CASES]
)
@pytest.mark.one_case
def test_every_mean_runs_with_every_kind_of_rule_that_it_takes(name, rule):
    """And FedAvg with every rule."""
    example = example_of(name)
    run = pf.federate(
        example.clients(5), takes(name, rule), rounds=2, public=example.public(), workers=0, evaluate_every=2
    )
    expected = "clip:3.0x" if rule == "clip" else rule
    assert [record["robust"]["rule"] for record in run.history] == [expected] * 2


class Wide(AlgorithmContract):
    def clients(self, number=5):
        return super().clients(max(number, 5))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
class TestContract(Wide):
    @pytest.fixture
    def algorithm(self, rule):
        return FedAvg(lr=0.05, batch_size=8, robust=rule)

    def test_single_client_runs(self, algorithm):
        if algorithm.robust.startswith(("clip", "median", "geo")):
            pf.federate(small_clients(1), algorithm, rounds=1, workers=0)

    def test_partial_participation_runs(self, algorithm):
        if algorithm.robust.startswith(("clip", "median", "geo")):
            pf.federate(small_clients(4), algorithm, rounds=2, clients_per_round=2, workers=0)

    def test_resumed_equals_uninterrupted(self, algorithm, tmp_path):
        if algorithm.robust.startswith(("clip", "median", "geo")):  # rounds of two clients
            super().test_resumed_equals_uninterrupted(algorithm, tmp_path)


@pytest.mark.parametrize(
    "name", ["fedavg", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("scaffold", "fedavg_ft", "feddyn"))]
)
def test_a_bound_that_limits_nothing_changes_no_bit(name):
    method = example_of(name).build()
    plain = pf.federate(small_clients(4), method, rounds=3, workers=0)
    bounded = pf.federate(small_clients(4), dataclasses.replace(method, robust="clip:inf"), rounds=3, workers=0)
    assert all(
        torch.equal(tensor, bounded.model(i).state_dict()[n])
        for i in ("client-0", "client-3")
        for n, tensor in plain.model(i).state_dict().items()
    )
    assert all(record["robust"]["scaled"] == {} for record in bounded.history)


def lies(factor):
    """Has client-0 send its change times a factor."""

    def run(engine, tasks):
        for result in honest(engine, tasks):
            if result.task.client == "client-0" and result.reply is not None:
                start = result.task.message.tensors["model"]
                model = {
                    n: start[n] + factor * (t - start[n]) if t.is_floating_point() else t
                    for n, t in result.reply.tensors["model"].items()
                }
                result = dataclasses.replace(result, reply=Message({"model": model}, result.reply.scalars))
            yield result

    return run


@pytest.mark.parametrize("rule", few(RULES, RULES[::3]))
@pytest.mark.one_case
def test_a_liar_moves_the_model_by_few_norms(rule, monkeypatch):
    """Of five, one sends −1,000 times its change: the plain mean moves by almost a hundred norms, every rule by few."""
    monkeypatch.setattr(InProcessEngine, "run", lies(-1000.0))

    def step(robust):
        run = pf.federate(small_clients(5), FedAvg(lr=0.05, robust=robust), rounds=1, workers=0)
        start = run.federation.initial_checkpoint().state["model"]
        theta = run.model("client-1").state_dict()
        return run, torch.cat(
            [(theta[n] - start[n]).flatten() for n in theta if start[n].is_floating_point()]
        ).norm().item()

    norms = [row["update_norm"] for row in step(None)[0].history[0]["clients"].values()]
    usual = sorted(norms)[2]
    assert step(None)[1] > 50 * usual
    run, moved = step(rule)
    assert moved < 3 * usual
    if rule.startswith("clip"):
        assert run.history[0]["robust"]["scaled"]["client-0"] < 0.05


def test_the_adaptive_bound_follows_the_last_rounds_and_is_stored(tmp_path):
    method = FedAvg(lr=0.05, robust="clip:1x")
    whole = pf.federate(small_clients(4), method, rounds=8, workers=0, out=tmp_path / "whole")
    norms = [sorted(row["update_norm"] for row in r["clients"].values())[1] for r in whole.history]
    bounds = [record["robust"]["bound"] for record in whole.history]
    assert bounds[0] == pytest.approx(norms[0])
    assert bounds[6] == pytest.approx(sorted(norms[1:6])[2])
    newest = load_newest_checkpoint(tmp_path / "whole/checkpoint")[0]
    assert newest.state[NORMS_KEY] == pytest.approx(norms[3:])


def test_aggregate_of_all_replies_equals_the_sum_as_they_come():
    method = FedAvg(robust="clip:0.5")
    state = {"model": {"w": torch.tensor([1.0, 1.0])}}
    replies = {
        i: Message({"model": {"w": torch.tensor(value)}}, {"num_examples": n})
        for i, value, n in (("a", [1.0, 1.25], 1), ("b", [4.0, 5.0], 3))
    }
    total = method.empty_reply_sum(None, state)
    for i, reply in replies.items():
        method.add_reply(total, i, reply, method.dispatch(state, ClientInfo(i)))
    streamed, whole = method.aggregate(state, total, None), method.aggregate(state, replies, None)
    assert torch.equal(streamed["model"]["w"], whole["model"]["w"])
    assert whole["model"]["w"].tolist() == pytest.approx([1 + 0.75 * 0.3, 1 + 0.25 * 0.25 + 0.75 * 0.4])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: HeteroFL(robust="clip"), "does more with the replies than to take their mean"),
        (lambda: FedDF(robust="clip"), "does more with the replies"),
        (lambda: FedAvg(averaged_over="all", robust="median"), "keeps single replies, which only robust='clip'"),
        (lambda: FedPAC(robust="krum"), "keeps single replies"),
        (lambda: FedProto(robust="median"), "sums over the classes"),
        (lambda: FedAvg(adapters="svd", robust="clip"), "adapters of several ranks"),
        (lambda: FedAvg(robust="clip:0"), "a bound of 0 would let no client"),
        (lambda: FedAvg(robust="trimed_mean"), "did you mean trimmed_mean"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(build, words):
    with pytest.raises(UserError, match=words):
        build()


def test_too_few_clients_are_refused_before_round_1():
    with pytest.raises(UserError, match=r"fedavg: robust='krum:1' is not possible: .* 2f \+ 3 = 5 .* a round has 4"):
        pf.federate(small_clients(4), FedAvg(robust=Krum(1)), rounds=1, workers=0)
    with pytest.raises(UserError, match="leaves out none of 3 clients"):
        pf.federate(small_clients(6), FedAvg(robust="trimmed_mean"), rounds=1, workers=0, clients_per_round=3)


def test_too_few_replies_end_the_run_with_a_sentence(monkeypatch):
    def fails(engine, tasks):
        for result in honest(engine, tasks):
            if result.task.client == "client-0" and result.task.phase == "local":
                result = dataclasses.replace(result, failure=ClientError(1, "client-0", "local", "lost"), reply=None)
            yield result

    monkeypatch.setattr(InProcessEngine, "run", fails)
    with pytest.raises(RoundError, match=r"cannot combine the 4 replies .* set min_replies"):
        pf.federate(small_clients(5), FedAvg(robust="krum:1"), rounds=1, workers=0, on_error="skip")


@pytest.mark.parametrize("rule", ["krum", "median"])
def test_secure_sums_refuse_rules_that_need_single_replies(rule):
    with pytest.raises(UserError, match=r"secure=True hides .* 'clip:C': then each site limits its own update"):
        pf.federate(small_clients(5), FedAvg(robust=rule), rounds=1, secure=True, workers=0)


def norms_and_medians(method):
    """Of each round: the norms of the updates in a run without secure sums, and what a run with them followed."""
    plain = pf.federate(small_clients(3), method, rounds=5, workers=0)
    secure = pf.federate(small_clients(3), dataclasses.replace(method, robust="clip"), rounds=5, workers=0, secure=True)
    norms = [[row["update_norm"] for row in record["clients"].values()] for record in plain.history]
    return norms, [record["robust"] for record in secure.history], (plain, secure)


def test_in_secure_sums_the_bound_follows_the_median_by_counts():
    norms, reports, (plain, secure) = norms_and_medians(FedAvg(lr=0.05))
    for of_round, report in zip(norms, reports, strict=True):
        assert report["bound"] == 3 * report["median"]
        assert report["updates"] == 3
        # Nothing was scaled, so that both runs have the same norms.
        assert report["within_bound"] == 3
        assert report["within_median"] == sum(norm <= report["median"] for norm in of_round)
    assert all(min(n) / 2 < r["median"] < 2 * max(n) for n, r in zip(norms[2:], reports[2:], strict=True))
    assert all("update_norm" not in row for record in secure.history for row in record["clients"].values())
    for name, tensor in plain.model("client-0").state_dict().items():
        assert torch.allclose(tensor, secure.model("client-0").state_dict()[name], atol=1e-6)


def test_a_resumed_run_follows_the_median_on(tmp_path):
    method = FedAvg(lr=0.05, robust="clip")
    whole = pf.federate(small_clients(3), method, rounds=4, workers=0, secure=True)

    with pytest.raises(KeyboardInterrupt):
        pf.federate(small_clients(3), method, rounds=4, workers=0, secure=True, out=tmp_path / "run", progress=Stop(2))
    resumed = pf.resume(tmp_path / "run", clients=small_clients(3))
    assert [record["robust"] for record in resumed.history] == [record["robust"] for record in whole.history]


def test_in_a_secure_sum_every_part_keeps_the_bound():
    """The mean of the clipped parts is that of the plain run, up to fixed point; nothing of a single norm is recorded."""
    method = FedAvg(lr=0.05, robust="clip:0.01")
    plain = pf.federate(small_clients(3), method, rounds=2, workers=0)
    secure = pf.federate(small_clients(3), method, rounds=2, workers=0, secure=True)
    for name, tensor in plain.model("client-0").state_dict().items():
        assert torch.allclose(tensor, secure.model("client-0").state_dict()[name], atol=1e-6)
    report = secure.history[-1]["robust"]
    assert set(report) == {"rule", "bound", "norm_of_mean"}
    assert 0 < report["norm_of_mean"] <= 0.01 * (1 + 1e-6)
    assert all("update_norm" not in row for row in secure.history[-1]["clients"].values())


def test_a_bound_that_limits_nothing_changes_no_bit_of_a_secure_sum():
    plain = pf.federate(small_clients(3), Scaffold(lr=0.05), rounds=2, workers=0, secure=True)
    bounded = pf.federate(small_clients(3), Scaffold(lr=0.05, robust="clip:inf"), rounds=2, workers=0, secure=True)
    for name, tensor in plain.model("client-0").state_dict().items():
        assert torch.equal(tensor, bounded.model("client-0").state_dict()[name])


def test_the_rule_is_in_the_configuration_and_read_from_there(tmp_path):
    run = pf.federate(small_clients(5), FedAvg(robust=Krum(1)), rounds=1, workers=0, out=tmp_path / "run")
    assert "robust: krum:1" in (tmp_path / "run" / "config.yaml").read_text()
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["robust"] == {"rule": "krum:1"}
    assert pf.resume(tmp_path / "run", clients=small_clients(5)).history == run.history
