"""By what a search chooses: the loss on all validation examples, and of a client that trains alone its own."""

import math

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedProx, Local
from polyfed.comparison.execution import final_runs
from polyfed.comparison.planning.budget import Budget
from polyfed.comparison.storage.comparison_directory import load_comparison
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.comparison.tuning.ranking import (
    POOLED_LOSS_WEIGHT,
    SearchRun,
    format_chosen_fields,
    rank_runs_by_pooled_loss,
    rank_runs_for_one_client,
)
from polyfed.core.errors import ClientError
from polyfed.testing import small_clients
from tests.comparison.losses import set_loss

# Which loss decides is set here; the validation examples are those that were trained on.
pytestmark = pytest.mark.filterwarnings("ignore:validation examples that are also training examples:UserWarning")
QUICK = {"rounds": 3, "seeds": [0, 1], "references": False, "parallel": 1, "quiet": True}


def tried(rate, losses, sizes, dropped=(), scores=None):
    """A run of the search; `losses` are lists by client, one a round. All runs begin with a loss of 0.9, in round 1."""
    losses = {client: [0.9, *own] for client, own in losses.items()}
    scores = scores and [0.5, *scores]
    history = [
        {"round": t + 1, "clients": {c: {"val_loss": own[t], "val_auc": 0.5} for c, own in losses.items()},
         "summary": {"val_auc": {"mean": 0.5 if scores is None else scores[t]}}}
        for t in range(len(next(iter(losses.values()))))
    ]  # fmt: skip
    return SearchRun("any", {"lr": rate}, history, Budget(), sizes, "auc", frozenset(dropped))


SIZES = {"large": 180, "small": 18}


def test_a_small_site_does_not_outvote_a_large_one_whatever_the_metric_says():
    """Eighteen patients with one negative have the better score, and the lower mean over sites, with a rate that learns
    nothing; each example counts once."""
    poor = tried(0.003, {"large": [0.6] * 3, "small": [0.4] * 3}, SIZES, scores=[0.9] * 3)
    fair = tried(0.1, {"large": [0.5] * 3, "small": [0.7] * 3}, SIZES, scores=[0.1] * 3)
    assert rank_runs_by_pooled_loss([poor, fair], frozenset(SIZES))[0] is fair


def test_equal_losses_go_to_the_steadier_and_then_to_the_smaller_rate():
    wild = tried(0.1, {"large": [0.9, 0.5, 0.5, 0.5, 0.9, 0.5]}, SIZES)
    calm = tried(0.3, {"large": [0.9, 0.5, 0.5, 0.5, 0.5, 0.5]}, SIZES)
    less = tried(0.2, {"large": [0.9, 0.5, 0.5, 0.5, 0.5, 0.5]}, SIZES)
    order = rank_runs_by_pooled_loss([wild, calm, less], frozenset({"large"}))
    assert [one.fields["lr"] for one in order] == [0.2, 0.3, 0.1]


def test_each_site_alone_has_its_own_rate_as_far_as_its_examples_say():
    """A large site goes by its own loss. Of a small one the loss of all counts too, as so many examples."""
    low = tried(0.01, {"large": [0.3] * 3, "small": [0.5] * 3}, SIZES)
    high = tried(0.1, {"large": [0.6] * 3, "small": [0.45] * 3}, SIZES)
    assert rank_runs_for_one_client([low, high], "large")[0][0] is low
    assert rank_runs_for_one_client([low, high], "small")[0][0] is low  # by the loss of all
    clear = tried(0.1, {"large": [0.31] * 3, "small": [0.1] * 3}, SIZES)
    assert rank_runs_for_one_client([low, clear], "small")[0][0] is clear
    assert rank_runs_for_one_client([low, clear], "large")[0][0] is low
    assert rank_runs_for_one_client([low, clear], "nobody") == []


def test_the_round_is_the_sites_own_too():
    one = tried(0.1, {"large": [0.5, 0.4, 0.3, 0.2, 0.1], "small": [0.5, 0.4, 0.5, 3.0, 4.0]}, SIZES)
    rounds = {client: rank_runs_for_one_client([one], client)[0][1] for client in SIZES}
    assert rounds["small"] < rounds["large"] == 5


@pytest.mark.parametrize("exploded", [1e30, None])
def test_a_site_that_explodes_or_fails_has_no_say_in_the_choice_of_the_others(exploded):
    safe = tried(0.01, {"large": [0.5] * 3, "small": [0.6] * 3}, SIZES)
    bold = tried(0.1, {"large": [0.3] * 3, "small": [exploded] * 3}, SIZES)
    assert rank_runs_for_one_client([safe, bold], "large")[0][0] is bold
    assert rank_runs_for_one_client([safe, bold], "small")[0][0] is safe
    assert rank_runs_by_pooled_loss([safe, bold], frozenset(SIZES))[0] is safe


def test_a_site_whose_training_failed_in_a_run_does_not_choose_it():
    safe = tried(0.01, {"large": [0.5] * 3, "small": [0.6] * 3}, SIZES)
    bold = tried(0.1, {"large": [0.3] * 3, "small": [0.1] * 3}, SIZES, dropped=["small"])
    assert rank_runs_for_one_client([safe, bold], "small")[0][0] is safe


def test_words_for_what_was_chosen():
    tuned = {"chosen": {"lr": 0.1}, "by_client": {"a": {"lr": 0.1, "momentum": 0.9}, "b": {"lr": 0.1, "momentum": 0.9}}}
    assert format_chosen_fields(tuned) == "lr 0.1, momentum 0.9"
    assert format_chosen_fields({"chosen": {}}) == ""


def favouring(best):
    """`play` with validation losses that are lowest at each client where lr is nearest to a number."""

    def wrapped(good):
        def play(plan, jobs, *rest):
            played, failed = good(plan, jobs, *rest)
            for job, one in played.items():
                for record in one.history:
                    losses = {}
                    for client, rate in best.items():
                        used = job.method.options_for(client).lr if isinstance(job.method, Local) else job.method.lr
                        losses[client] = math.log(used / rate) ** 2 + 1 / record["round"]
                    set_loss(record, losses)
            return played, failed

        return play

    return wrapped


def two(val=None):
    """Two clients with 200 validation examples each."""
    rows = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3
    return [pf.Client(c.id, c.model, c.train, c.test, val=rows if val is None else val) for c in small_clients(2)]


BEST = {"client-0": 0.01, "client-1": 1.0}


def prepare(monkeypatch, best=BEST):
    for module in (hyperparameter_search, final_runs):
        monkeypatch.setattr(module, "execute_or_load_runs", favouring(best)(module.execute_or_load_runs))


@pytest.mark.thorough
def test_local_is_compared_with_a_rate_for_each_client(monkeypatch, tmp_path):
    prepare(monkeypatch)
    words = QUICK | {"tune": {"lr": [0.01, 0.1, 1.0]}, "out": tmp_path / "a"}
    found = pf.compare(two(), ["fedprox"], **words)
    told = found.results["tuning"]["methods"]
    assert told["local"]["by_client"] == {client: {"lr": rate} for client, rate in BEST.items()}
    assert told["fedprox"]["chosen"] == {"lr": 0.1}
    assert "by_client" not in told["fedprox"]
    assert found.results["methods"]["local"]["fields"]["by_client"] == {c: {"lr": rate} for c, rate in BEST.items()}
    assert "each client of local chose for itself" in found.results["tuning"]["sentence"]
    assert {"lr of local at client-0", "lr of local at client-1"} & set(found.results["tuning"]["edge"]) == set()
    assert any("local at client-0, client-1" in text for text in found.results["warnings"])
    run = found.results["methods"]["local"]["runs"]["0"]
    assert run["rounds"] == {"client-0": 2, "client-1": 2}  # the means of three neighbours have round 2 alone
    assert load_comparison(tmp_path / "a").results == found.results
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")}
    assert pf.compare(two(), ["fedprox"], **words).results == found.results
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")} == before


def test_the_search_goes_on_on_either_side_for_clients_that_choose_alone(monkeypatch):
    prepare(monkeypatch, {"client-0": 1e-5, "client-1": 1e5})
    found = pf.compare(two(), ["fedprox"], **QUICK | {"seeds": [0], "rounds": 1}, tune={"lr": [0.01, 0.1, ...]})
    rates = [one["fields"]["lr"] for one in found.results["tuning"]["methods"]["local"]["tried"]]
    assert sorted(rates) == [0.0001, 0.001, 0.01, 0.1, 1.0, 10.0]


@pytest.mark.thorough
def test_a_choice_that_diverges_with_another_seed_gives_way_for_that_client_alone(monkeypatch, tmp_path):
    prepare(monkeypatch)
    good = final_runs.execute_or_load_runs

    def diverging(plan, jobs, *rest):
        played, failed = good(plan, jobs, *rest)
        wrong = [
            job for job in played if isinstance(job.method, Local) and job.method.options_for("client-1").lr == 1.0
        ]
        failure = ClientError(1, "client-1", "local", "diverged")
        return {j: one for j, one in played.items() if j not in wrong}, failed | dict.fromkeys(wrong, failure)

    monkeypatch.setattr(final_runs, "execute_or_load_runs", diverging)
    words = QUICK | {"tune": {"lr": [0.01, 0.1, 1.0]}, "out": tmp_path / "a"}
    found = pf.compare(two(), ["fedprox"], **words)
    told = found.results["tuning"]["methods"]["local"]
    assert told["by_client"] == {"client-0": {"lr": 0.01}, "client-1": {"lr": 0.1}}
    assert told["diverged"] == [{"client": "client-1", "lr": 1.0}]
    assert any("local at client-1: lr 1.0 was better" in note and "lr 0.1 is compared" in note
               for note in found.results["notes"])  # fmt: skip
    assert pf.compare(two(), ["fedprox"], **words).results == found.results


@pytest.mark.thorough
def test_a_rate_with_which_one_client_diverges_is_there_for_the_others():
    """The loss of the first client is a million times as steep: a rate that suits the second lets it diverge."""

    def steep(outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss.detach() + 1e6 * (loss - loss.detach())

    first, second = (pf.Client(c.id, c.model, c.train, c.test, val=c.train) for c in small_clients(2))
    wild = pf.Client(first.id, first.model, first.train, first.test, val=first.train, loss=steep)
    found = pf.compare([wild, second], [FedProx(batch_size=4)], **QUICK, tune={"lr": [1e-8, 1.0]})
    told = found.results["tuning"]["methods"]["local"]["by_client"]
    assert told == {wild.id: {"lr": 1e-8}, second.id: {"lr": 1.0}}
    assert "local" in found.results["methods"]


@pytest.mark.thorough
def test_where_each_seed_deals_the_data_again_all_clients_have_one_choice(monkeypatch, tmp_path):
    prepare(monkeypatch)
    found = pf.compare(two(), ["fedprox"], **QUICK, tune={"lr": [0.01, 0.1, 1.0]})
    assert "by_client" in found.results["tuning"]["methods"]["local"]
    from polyfed.comparison.compare import run_comparison
    from polyfed.comparison.plan import ComparisonPlan
    from polyfed.comparison.planning.client_set import ClientSet
    from polyfed.comparison.planning.method_selection import select_methods
    from polyfed.simulation.settings import Settings

    casts = {0: ClientSet(tuple(two())), 1: ClientSet(tuple(two((torch.zeros(200, 6), torch.arange(200) % 3))))}
    plan = ComparisonPlan(
        "",
        select_methods(["fedprox"]),
        (0, 1),
        Settings(rounds=3),
        casts.__getitem__,
        parallel_runs=1,
        quiet=True,
        search_space={"lr": [0.01, 0.1, 1.0]},
    )
    told = run_comparison(plan).results["tuning"]["methods"]["local"]
    assert "by_client" not in told
    assert told["chosen"] == {"lr": 0.1}


@pytest.mark.parametrize(("field", "values"), [("label_smoothing", [0.0, 0.1]), ("class_weights", [None, "balanced"])])
def test_what_changes_the_meaning_of_the_loss_is_not_searched(field, values):
    with pytest.raises(pf.UserError, match=f"{field} cannot be searched: it changes the meaning of the loss"):
        pf.compare(two(), ["fedprox"], **QUICK, tune={field: values})


@pytest.mark.thorough
def test_a_clients_own_loss_chooses_ends_and_leaves_out_models_of_another_loss():
    """The own loss is lowest where the task's is highest; nothing is learned by it, so that the first round is best."""

    def own(outputs, targets):
        return -nn.functional.cross_entropy(outputs, targets)

    clients = [pf.Client(c.id, c.model, c.train, c.test, val=c.val, loss=own) for c in small_clients(2)]
    run = pf.federate(clients, Local(lr=0.1), rounds=2)
    assert all(
        record["clients"][c]["val_loss"] < 0 for record in run.history for c in run.federation.client_registry.ids
    )
    found = pf.compare(clients, ["fedprox"], **QUICK | {"references": True, "seeds": [0]}, tune={"lr": [1e-9, 0.1]})
    assert found.results["references"].keys() == {"pooled"}
    assert any("loss of their own" in sentence for sentence in found.results["left_out"])
    assert found.results["tuning"]["methods"]["fedavg"]["chosen"] == {"lr": 0.1}  # where its loss falls


def test_the_weight_of_all_is_that_of_the_simulation():
    assert POOLED_LOSS_WEIGHT in (5, 10, 20, 50, 100)
