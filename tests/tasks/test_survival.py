"""The task `survival`: losses, scores and Cox regression against numbers of lifelines, and a federation from end to end.

Numbers of lifelines 0.30.3 and scikit-survival 0.28.0 were computed once on the data of `_patients` (60 patients with tied
times and tied risks; 0.28.0's `concordance_index_ipcw` and `brier_score` on times without ties).
"""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from torch import nn

import polyfed as pf
from polyfed import Client, UserError
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.evaluation.simple_model import SimpleModelInputs
from polyfed.tasks import Survival, get_task
from polyfed.tasks.scores.survival_scores import c_index, integrated_brier, kaplan_meier, uno_c_index
from polyfed.tasks.simple_models.survival_models import (
    fit_cox_coefficients,
    fit_cross_validated_cox_coefficients,
    log_partial_likelihood,
)
from polyfed.tasks.survival_losses import cox_loss, hazard_loss

HAZARD = Survival(model="hazard", cuts=(2, 5, 8, 12))


def _patients():
    """Inputs, targets with tied times, targets without, and risks of 60 patients, of whom 37 have the event."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    time = np.ceil(rng.exponential(np.exp(-x @ [1, -0.5, 0])) * 10)
    censored = np.ceil(rng.exponential(1.5, size=60) * 10)
    event, time = (time <= censored).astype(float), np.minimum(time, censored)
    untied = np.round(time + np.random.default_rng(1).uniform(-0.4, 0.4, size=60), 4)
    return x, np.stack([time, event], 1), np.stack([untied, event], 1), np.round(x @ [0.8, -0.3, 0.4], 1)


X, Y, UNTIED, RISK = _patients()
RISKS = torch.from_numpy(RISK)[:, None]
HAZARDS = torch.from_numpy(np.round(-2 + RISK[:, None] + np.array([0, 0.2, 0.1, 0.5]), 2))


# -- losses -----------------------------------------------------------------------------------------------------------


def _partial_likelihood(log_risk, targets, *, efron):
    """Minus the log partial likelihood an event, risk set by risk set."""
    risk, total = log_risk.exp(), 0.0
    for time in targets[targets[:, 1] == 1, 0].unique():
        tied = (targets[:, 0] == time) & (targets[:, 1] == 1)
        at_risk = risk[targets[:, 0] >= time].sum()
        for k in range(int(tied.sum())):
            share = k / int(tied.sum()) if efron else 0.0
            total = total - torch.log(at_risk - share * risk[tied].sum())
        total = total + log_risk[tied].sum()
    return -total / targets[:, 1].sum()


@pytest.mark.parametrize("efron", [True, False])
def test_the_cox_loss_and_its_gradient_are_the_textbook_formula(efron):
    targets, log_risk = torch.from_numpy(Y), torch.from_numpy(RISK).requires_grad_()
    ours, theirs = cox_loss(log_risk, targets, efron=efron), _partial_likelihood(log_risk, targets, efron=efron)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    gradients = [torch.autograd.grad(value, log_risk)[0] for value in (ours, theirs)]
    assert torch.allclose(*gradients, atol=1e-12)
    assert torch.autograd.gradcheck(lambda z: cox_loss(z, targets, efron=efron), log_risk)  # finite differences


def test_the_cox_loss_depends_on_the_order_of_times_alone():
    changed = torch.from_numpy(np.stack([np.log1p(Y[:, 0]) ** 3, Y[:, 1]], 1))
    assert float(cox_loss(RISKS, changed)) == pytest.approx(float(cox_loss(RISKS, torch.from_numpy(Y))), abs=1e-12)
    rows = torch.randperm(60)
    assert float(cox_loss(RISKS[rows], torch.from_numpy(Y)[rows])) == pytest.approx(
        float(cox_loss(RISKS, torch.from_numpy(Y)))
    )


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_a_minibatch_without_an_event_or_with_huge_risks_is_no_nan(ties):
    task = Survival(ties=ties)
    outputs = torch.tensor([[1.0], [2.0]], requires_grad=True)
    task.loss(outputs, torch.tensor([[1.0, 0], [2.0, 0]])).backward()
    assert outputs.grad.tolist() == [[0.0], [0.0]]
    outputs = torch.tensor([[300.0], [-300.0], [300.0], [0.0]], requires_grad=True)
    loss = task.loss(outputs, torch.tensor([[1.0, 1], [2.0, 1], [2.0, 1], [2.0, 0]]))
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert bool(torch.isfinite(outputs.grad).all())


def test_the_hazard_loss_is_the_likelihood_of_each_patient():
    logits = torch.tensor([[0.3, -1.0, 0.5]])
    h = logits.sigmoid()[0]
    expected = {  # cuts 2, 4, 6
        (3.0, 1): -torch.log((1 - h[0]) * h[1]),
        (4.0, 1): -torch.log((1 - h[0]) * h[1]),  # an interval has its end
        (3.0, 0): -torch.log(1 - h[0]),  # censored in the second: only the first was survived
        (4.0, 0): -torch.log((1 - h[0]) * (1 - h[1])),
        (9.0, 1): -torch.log((1 - h).prod()),  # beyond the last cut
        (0.0, 1): -torch.log(h[0]),
        (0.0, 0): torch.tensor(0.0),
    }
    for targets, value in expected.items():
        assert float(hazard_loss(logits, torch.tensor([targets]), (2, 4, 6))) == pytest.approx(float(value), abs=1e-6)


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_lifelines_and_scikit_survival():
    tied, untied = torch.from_numpy(Y), torch.from_numpy(UNTIED)
    assert c_index(RISKS, tied) == pytest.approx(0.8263069139966274, abs=1e-14)
    assert uno_c_index(RISKS, untied) == pytest.approx(0.8119979996249777, abs=1e-14)
    brier = [0, 0.08232479, 0.16197456, 0.164107, 0.1688151]  # at 0 and the cuts
    assert integrated_brier(HAZARDS, untied, HAZARD.cuts) == pytest.approx(
        trapezoid(brier, [0, *HAZARD.cuts]) / 12, abs=1e-8
    )


def test_the_c_index_counts_pairs_by_hand():
    time, event = Y.T
    wins = pairs = 0.0
    for i in range(60):
        for j in range(60):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                wins += 1.0 if RISK[i] > RISK[j] else 0.5 * (RISK[i] == RISK[j])
    assert c_index(RISKS, torch.from_numpy(Y)) == pytest.approx(wins / pairs, abs=1e-14)


def test_scores_without_a_pair_or_with_infinite_outputs_are_undefined():
    none = torch.tensor([[1.0, 0], [2.0, 0]])
    assert math.isnan(c_index(torch.zeros(2, 1), none))
    assert math.isnan(uno_c_index(torch.zeros(2, 1), none))
    assert math.isnan(c_index(torch.tensor([[0.0], [math.inf]]), torch.tensor([[1.0, 1], [2.0, 1]])))
    assert math.isnan(integrated_brier(torch.zeros(2, 1), none, (5.0,)))  # nobody is followed so long
    assert c_index(torch.zeros(2, 1), torch.tensor([[1.0, 1], [2.0, 0]])) == 0.5  # constants rank by chance


def test_kaplan_meier_without_censoring_is_the_share_that_survives():
    times, survival = kaplan_meier(np.array([3.0, 1.0, 2.0, 2.0]), np.ones(4, bool))
    assert times.tolist() == [1, 2, 3]
    assert survival == pytest.approx([0.75, 0.25, 0])


def test_hazards_rank_by_expected_survival():
    outputs = torch.tensor([[2.0, 0.0], [-2.0, 0.0]])
    targets = torch.tensor([[1.0, 1], [9.0, 1]])
    assert c_index(outputs, targets) == 1.0
    columns = Survival(model="hazard", cuts=(3, 6)).prediction_columns(outputs, ["time", "event"])
    assert list(columns) == ["risk", "survival at 3", "survival at 6"]
    assert columns["survival at 6"][0] == pytest.approx(columns["survival at 3"][0] / 2)


# -- Cox regression ---------------------------------------------------------------------------------------------------


def test_cox_regression_is_that_of_lifelines_and_scikit_survival():
    efron, breslow = (
        [1.437751050379361, -0.34357896146405487, 0.14568019507345145],
        [1.350796754421026, -0.30208253020104187, 0.09034084155941123],
    )
    assert fit_cox_coefficients(X, Y, 0.0) == pytest.approx(efron, abs=1e-7)
    assert fit_cox_coefficients(X, Y, 0.0, efron=False) == pytest.approx(breslow, abs=1e-7)
    assert log_partial_likelihood(X, Y, fit_cox_coefficients(X, Y, 0.0)) == pytest.approx(-99.14645928266984, abs=1e-9)
    assert fit_cox_coefficients(X, Y, 3.0) == pytest.approx(
        [1.2436046442942787, -0.2954786837671575, 0.12755365437770957], abs=1e-7
    )


def test_a_linear_network_trained_to_convergence_is_cox_regression():
    linear, targets = nn.Linear(3, 1, bias=False).double(), torch.from_numpy(Y)
    optimiser = torch.optim.LBFGS(linear.parameters(), max_iter=200, tolerance_grad=1e-10)

    def closure():
        optimiser.zero_grad()
        loss = get_task("survival").loss(linear(torch.from_numpy(X)), targets)
        loss.backward()
        return loss

    optimiser.step(closure)
    assert linear.weight.detach().numpy()[0] == pytest.approx(fit_cox_coefficients(X, Y, 0.0), abs=1e-3)


def test_ridge_is_chosen_and_nothing_is_fitted_without_events():
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(60, 3))
    strong, weak = (
        np.abs(fit_cross_validated_cox_coefficients(SimpleModelInputs(x, Y, x, None), 0)).max() for x in (X, noise)
    )
    assert weak < 0.2 < strong
    groups = np.repeat(np.arange(20), 3)
    assert fit_cross_validated_cox_coefficients(SimpleModelInputs(X, Y, X, groups), 0).shape == (3,)
    censored = np.stack([Y[:, 0], np.zeros(60)], 1)
    assert not fit_cross_validated_cox_coefficients(SimpleModelInputs(X, censored, X, None), 0).any()


def test_the_simple_model_gives_hazards_of_its_own_baseline():
    inputs = SimpleModelInputs(X, UNTIED, X, None)
    (model,) = HAZARD.simple_models()
    hazards = model.fit(inputs, 4, 0)
    (cox,) = Survival().simple_models()
    assert (np.argsort(hazards[:, 0]) == np.argsort(cox.fit(inputs, 1, 0)[:, 0])).all()
    survival = HAZARD.to_predictions(torch.from_numpy(hazards)).mean(0)
    times, curve = kaplan_meier(UNTIED[:, 0], UNTIED[:, 1] == 1)
    assert survival == pytest.approx(curve[np.searchsorted(times, HAZARD.cuts, side="right") - 1], abs=0.06)


# -- the task ---------------------------------------------------------------------------------------------------------


def test_options_are_checked_and_travel_as_plain_values():
    assert get_task({"name": "survival", "model": "hazard", "cuts": [2, 5, 8, 12]}) == HAZARD
    assert HAZARD.spec == {"name": "survival", "model": "hazard", "cuts": [2.0, 5.0, 8.0, 12.0]}
    for options, words in [
        ({"model": "hazard"}, "hazards need the ends of their intervals"),
        ({"cuts": (1.0,)}, "cox takes none"),
        ({"model": "hazard", "cuts": (2.0, 2.0)}, "ascending"),
        ({"model": "hazard", "cuts": (0.0, 2.0)}, "positive"),
        ({"ties": "exact"}, "ties"),
        ({"model": "hazard", "cuts": ("a",)}, "cuts"),
    ]:
        with pytest.raises(UserError, match=words):
            Survival(**options)


def test_the_brier_score_is_of_hazards_only():
    with pytest.raises(UserError, match="needs survival curves, and Cox networks give risks alone"):
        resolve_metrics(["integrated_brier"], "survival")
    (brier,) = resolve_metrics(["integrated_brier"], HAZARD)
    assert not brier.higher_is_better
    assert brier(HAZARDS, torch.from_numpy(UNTIED)) == integrated_brier(HAZARDS, torch.from_numpy(UNTIED), HAZARD.cuts)


def test_hazards_need_one_output_an_interval():
    y = torch.from_numpy(Y).float()
    with pytest.raises(UserError, match=r"4 intervals of hazards needs \(batch, 4\)"):
        HAZARD.check_outputs((1,), y, "client 'north': train")
    with pytest.raises(UserError, match=r"Cox's model needs \(batch, 1\), whatever the two columns"):
        Survival().check_outputs((2,), y, "client 'north': train")


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(**columns):
    number = torch.arange(40)
    rows = {
        "age": (30 + number).tolist(),
        "days": (number % 9 + 1).tolist(),
        "hospital": ["north"] * 20 + ["south"] * 20,
    }
    return rows | {"died": (number % 4 == 0).long().tolist()} | columns


@pytest.mark.parametrize(
    "column", [["dead" if k % 4 == 0 else "alive" for k in range(40)], [2 if k % 4 == 0 else 1 for k in range(40)]]
)
def test_other_words_for_events_are_named_by_positive(column):
    positive = str(column[0])
    sites = pf.data.split_table(_table(died=column), "days", "hospital", event="died", positive=positive)
    assert sites.dataset.task == "survival"
    assert sites.feature_names == ("age",)
    assert sites.num_outputs == 1
    assert torch.equal(sites.dataset.train.y[:, 1], (torch.arange(40) % 4 == 0).float())
    (client, *_) = sites.build_clients(lambda: nn.Linear(1, 1))
    assert int(client.train.labels[:, 1].sum()) in (3, 4)  # of 5 at this site: splits are stratified by events
    assert client.train.labels[:, 0].max() > 5  # times keep their unit
    with pytest.raises(UserError, match=r"an event other than 1|holds texts \(.*\); say which value .*positive=..."):
        pf.data.split_table(_table(died=column), "days", "hospital", event="died")
    with pytest.raises(UserError, match="positive='gone' must be one of at most two values of 'died'"):
        pf.data.split_table(_table(died=column), "days", "hospital", event="died", positive="gone")


def test_values_of_an_event_are_named_only_where_they_are_frequent():
    with pytest.raises(UserError, match=r"event 'died' holds texts \('alive', 'dead'\); say which value is the event"):
        pf.data.split_table(_table(died=["alive", "dead"] * 20), "days", "hospital", event="died")
    with pytest.raises(UserError, match=r"event 'died' holds texts; say which value is the event"):
        pf.data.split_table(_table(died=["alive", "dead"] * 18 + ["Jane Doe"] * 4), "days", "hospital", event="died")


def test_columns_that_are_no_time_and_event_are_refused():
    with pytest.raises(
        UserError,
        match=r"survival has 2 target columns, time and event, got days; give target=\.\.\. and event=\.\.\.",
    ):
        pf.data.split_table(_table(), "days", "hospital", task="survival")
    with pytest.raises(UserError, match="event='died' is for survival, and the task is regression"):
        pf.data.split_table(_table(), "days", "hospital", event="died", task="regression")
    sites = pf.data.split_table(_table(), ["days", "died"], "hospital", task={"name": "survival", "ties": "breslow"})
    assert str(sites.dataset.task) == "survival(ties=breslow)"


# -- a federation -----------------------------------------------------------------------------------------------------


def _site(seed, n=150, share=0.6):
    """Patients of a site with proportional hazards, of whom about 40 % are censored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    time = torch.empty(n).exponential_(generator=generator) * torch.exp(-(x @ torch.tensor([1.0, -0.8, 0.5, 0.0]))) * 10
    end = torch.empty(n).exponential_(generator=generator) * 30 * share
    y = torch.stack([torch.minimum(time, end), (time <= end).float()], 1)
    return (x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])


def _network():
    return nn.Linear(4, 1)


def _clients(task="survival", network=_network):
    return [Client(f"site{k}", network, *_site(k), task=task) for k in range(3)]


class _Stops(pf.Callback):
    def on_round(self, record):
        if record["round"] == 4:
            raise KeyboardInterrupt


def test_fedavg_orders_patients_and_is_resumed(tmp_path):
    method = pf.algorithms.FedAvg(lr=0.3, batch_size=0, local_epochs=3)
    options = {"rounds": 10, "metrics": ["c_index", "uno_c_index"], "progress": False}
    with pytest.raises(KeyboardInterrupt):
        pf.federate(_clients(), method, out=tmp_path / "run", callbacks=[_Stops()], checkpoint_every=1, **options)
    run = pf.resume(tmp_path / "run", clients=_clients(), progress=False)
    assert run.table() == pf.federate(_clients(), method, **options).table()
    mean = run.table()[-1]
    assert mean["c_index"] > 0.7
    assert mean["uno_c_index"] > 0.65
    assert run.predict("site0", _site(0)[1][0]).shape == (75, 1)


@pytest.mark.thorough
def test_a_comparison_has_intervals_references_and_curves(tmp_path):
    from polyfed.cli.main import main

    out = tmp_path / "cmp"
    methods = {"fedavg": pf.algorithms.FedAvg(lr=0.3, batch_size=0, local_epochs=3)}
    result = pf.compare(_clients(), methods, rounds=6, seeds=[0, 1], out=out, progress=False)
    content = result.results
    assert content["score"] == "c_index"
    assert content["references"].keys() == {"cox_ridge", "pooled", "pooled_cox_ridge"}
    assert content["references"]["cox_ridge"]["mean"] > 0.7
    assert not content["references"]["pooled_cox_ridge"]["alone"]
    assert all(row["interval"] for row in content["answers"])
    assert "events" in content["answers"][0]["basis"]
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Kaplan-Meier curves of risk groups" in page
    assert "high risk: at risk" in page
    assert "censored" in page


def test_a_site_without_events_is_named_and_the_others_are_compared():
    clients = _clients()
    parts = [(x, y * torch.tensor([1.0, 0.0])) for x, y in _site(7, 20)]
    clients.append(Client("quiet", _network, *parts, task="survival"))
    with pytest.warns(
        UserWarning, match="client 'quiet' has no event among its 10 training examples, which add nothing"
    ):
        run = pf.federate(clients, pf.algorithms.FedAvg(lr=0.3), rounds=2, progress=False)
    rows = {row["client"]: row for row in run.table()}
    assert rows["quiet"]["c_index"] is None
    assert rows["site0"]["c_index"] is not None


@pytest.mark.thorough
def test_few_events_are_what_an_answer_says(tmp_path):
    clients = _clients()
    x, y = _site(8, 60)[1]
    y[:, 1] = 0.0
    y[0] = torch.tensor([0.01, 1.0])  # one event: without this patient there is no C-index
    clients.append(Client("rare", _network, _site(8, 60)[0], (x, y), task="survival"))
    methods = {"fedavg": pf.algorithms.FedAvg(lr=0.3, batch_size=0)}
    result = pf.compare(clients, methods, rounds=6, seeds=[0], references=False, progress=False)
    said = "\n".join(result.verdicts)
    assert "rare: too few events among the test examples for an interval of C-index" in said + str(result.results)
    (answer,) = (row for row in result.results["answers"] if row["client"] == "rare")
    assert "30 test examples, 1 event" in answer["basis"]
