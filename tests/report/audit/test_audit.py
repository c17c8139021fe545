"""`pf.audit` finds the members of overfitted networks, guesses on untrained ones, and refuses what it cannot measure."""

import dataclasses
import json
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.cli.main import main
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor
from polyfed.report.audit.attack_rates import attack_auc, true_positive_rate
from polyfed.report.audit.attributes import columns_of_few_values, guess_attributes
from polyfed.report.audit.audit import _draw_half
from polyfed.report.audit.audit_file import read_audit
from polyfed.report.audit.likelihood_ratio import logit_scaled_confidence, score_members

MARK = 73591.25  # stands for a measurement of a patient


def network():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


def noise_clients(names=("north", "south"), n=24):
    """Labels are noise, so that whatever a network knows of them it has memorised."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2 * n + 12, 20, generator=generator), torch.randint(0, 2, (2 * n + 12,), generator=generator)
    return [
        pf.Client(name, network, (x[12 + k :: 2], y[12 + k :: 2]), (x[k:12:2], y[k:12:2]))
        for k, name in enumerate(names)
    ]


def saved_run(out, method, clients=None, rounds=1):
    clients = noise_clients() if clients is None else clients
    pf.federate(clients, method, rounds=rounds, out=out, workers=0, engine="inprocess", quiet=True)
    return clients


@pytest.mark.thorough
def test_overfitted_networks_reveal_their_members(tmp_path):
    method = pf.algorithms.Local(lr=0.1, momentum=0.9, local_epochs=30, batch_size=8)
    clients = saved_run(tmp_path / "run", method)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    seen = []
    report = pf.audit(tmp_path / "run", clients=clients, runs=4, on_run=seen.append)
    assert seen == [1, 2, 3, 4]
    assert report.shadow_runs == 4
    assert report.overall.auc.low > 0.8
    assert report.overall.tpr_at_10_percent.value > 0.5
    assert [entry.client for entry in report.clients] == ["north", "south"]
    assert {entry.examples for entry in report.clients} == {24}
    assert report.overall.examples == 48
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == sorted([*before, "audit.json"])
    assert "epsilon" in report.table()[-1]
    assert report.overall.epsilon is None
    assert report == pf.audit(tmp_path / "run", clients=clients, algorithm=method, runs=4)
    (only,) = pf.audit(tmp_path / "run", clients=clients, runs=4, client="south").clients
    assert only == report.clients[1]


def test_untrained_networks_reveal_nothing(tmp_path):
    clients = saved_run(tmp_path / "run", pf.algorithms.FedAvg(lr=1e-12))
    report = pf.audit(tmp_path / "run", clients=clients, runs=6)
    assert report.overall.auc.low < 0.5 < report.overall.auc.high
    assert report.overall.tpr_at_10_percent.low < 0.1 < report.overall.tpr_at_10_percent.high
    text = str(report)
    sentences = (
        "the server sees each client's reply", "Labels: the share", "An attack that fails shows nothing",
        "No number here is called safe",
    )  # fmt: skip
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_scores_without_signal_are_guesses_on_average():
    """Also with few runs, where some examples were in none of the others."""
    rng = np.random.default_rng(0)
    aucs = []
    for _ in range(200):
        confidences, members = rng.normal(size=(4, 40)), np.zeros((4, 40), bool)
        for row in members:
            row[rng.permutation(40)[:20]] = True
        rate = attack_auc(score_members(confidences, members).ravel(), members.ravel(), np.tile(np.arange(40), 4))
        aucs.append((rate.value, rate.low <= 0.5 <= rate.high))
    mean, covered = np.mean(aucs, axis=0)
    assert abs(mean - 0.5) < 0.02
    assert covered >= 0.9


@pytest.mark.thorough
def test_private_training_shows_its_epsilon(tmp_path):
    method = pf.algorithms.FedAvg(lr=0.1, privacy=pf.Privacy(target_epsilon=2.0))
    clients = saved_run(tmp_path / "run", method)
    report = pf.audit(tmp_path / "run", clients=clients, runs=4)
    assert 0 < report.overall.epsilon <= 2.0
    assert "ε" in str(report).splitlines()[0]


def coin_clients(n=96):
    """One column is a fair coin and the labels are noise, so that the coin of a row is known from training on it alone."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n + 8, 20, generator=generator), torch.randint(0, 2, (n + 8,), generator=generator)
    x[:, 4] = torch.randint(0, 2, (n + 8,), generator=generator) * 8.0 - 4.0
    examples = pf.Examples(x, y)
    return [pf.Client("north", network, examples.select(torch.arange(8, n + 8)), examples.head(8))]


@pytest.mark.thorough
def test_a_column_is_guessed_of_rows_trained_on_and_not_of_others(tmp_path):
    clients = saved_run(tmp_path / "run", pf.algorithms.Local(lr=0.1, momentum=0.9, local_epochs=30, batch_size=8),
                        coin_clients())  # fmt: skip
    report = pf.audit(tmp_path / "run", clients=clients, runs=4)
    (entry,) = report.attributes
    assert (entry.column, entry.values, entry.examples) == ("column 5", 2, 96)
    assert entry.trained_on.low > 0.55
    assert entry.others.low < 0.5 < entry.others.high
    assert entry.most_frequent == pytest.approx(0.5, abs=0.15)
    assert "column 5" in str(report)
    assert "Tried on columns" in str(report)
    assert read_audit(tmp_path / "run") == report
    saved_run(tmp_path / "untrained", pf.algorithms.Local(lr=1e-12), clients)
    (untrained,) = pf.audit(tmp_path / "untrained", clients=clients, runs=4).attributes
    assert untrained.trained_on.low < untrained.most_frequent < untrained.trained_on.high


def test_columns_of_few_values_are_those_of_tables():
    generator = torch.Generator().manual_seed(0)
    assert columns_of_few_values(pf.Examples(torch.zeros(12, 1, 4, 4), torch.arange(12) % 2)) == {}
    assert columns_of_few_values(pf.Examples(torch.ones(12, 3), torch.arange(12) % 2)) == {}
    assert columns_of_few_values(pf.Examples(torch.randn(12, 3, generator=generator), torch.arange(12) % 2)) == {}
    assert columns_of_few_values(pf.Examples(torch.zeros(12, 3, dtype=torch.int64), torch.arange(12) % 2)) == {}
    columns = Column("age"), Column("sex", ("f", "m"))
    cells = torch.stack([torch.tensor([1.0, 1.0, 2.0, torch.nan]), torch.tensor([0.0, 1.0, 1.0, 1.0])], dim=1)
    table = pf.Examples(cells, torch.tensor([0, 1, 1, 1]), transform=TablePreprocessor(columns, (1.0,), (1.0,)))
    chosen = columns_of_few_values(table)
    assert {name: (place, values.tolist()) for name, (place, values, _) in chosen.items()} == {
        "age": (0, [1.0, 2.0]), "sex": (1, [1.0, 0.0]),
    }  # fmt: skip
    answers_sex = nn.Linear(3, 2)
    with torch.no_grad():
        answers_sex.weight.copy_(torch.tensor([[0.0, 9.0, -9.0], [0.0, -9.0, 9.0]]))
    guesses = guess_attributes(answers_sex, table)
    assert guesses["sex"].tolist() == [1.0] * 4  # the label is the sex
    assert guesses["age"].tolist()[:3] == [1.0, 1.0, 0.0]  # the network does not use it: the most frequent value
    assert np.isnan(guesses["age"][3])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_rates_are_those_of_a_count_over_all_thresholds(share):
    rng = np.random.default_rng(1)
    scores, members = np.round(rng.normal(size=120), 1), rng.random(120) < 0.4  # with ties
    scores[members] += 0.5
    best = 0.0
    for threshold in [np.inf, *scores]:
        if (scores[~members] >= threshold).mean() <= share:
            best = max(best, (scores[members] >= threshold).mean())
    units = np.arange(120)
    rate = true_positive_rate(scores, members, units, share)
    assert rate.value == pytest.approx(best)
    assert 0 <= rate.low <= rate.value <= rate.high <= 1
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[members] for b in scores[~members]]
    auc = attack_auc(scores, members, units)
    assert auc.value == pytest.approx(np.mean(pairs))
    assert auc.low < auc.value < auc.high
    repeated = attack_auc(np.tile(scores, 5), np.tile(members, 5), np.tile(units, 5))
    assert (repeated.low, repeated.high) == pytest.approx((auc.low, auc.high))  # repetitions add no evidence


def test_a_perfect_or_vain_attack_has_an_interval_too():
    scores, members = np.arange(40.0), np.arange(40) >= 20
    assert attack_auc(scores, members, np.arange(40)).low == pytest.approx(0.025 ** (1 / 40))
    vain = true_positive_rate(-scores, members, np.arange(40), 0.01)
    assert (vain.value, vain.low) == (0, 0)
    assert vain.high == pytest.approx(1 - 0.025 ** (1 / 20))


def test_intervals_of_rates_include_that_of_the_threshold():
    rng, members, truth = (
        np.random.default_rng(2),
        np.arange(200) < 100,
        NormalDist().cdf(2 - NormalDist().inv_cdf(0.9)),
    )
    rates = [true_positive_rate(rng.normal(2.0 * members), members, np.arange(200), 0.1) for _ in range(200)]
    assert np.mean([rate.low <= truth <= rate.high for rate in rates]) >= 0.93
    scores = np.arange(200.0)[::-1]  # all members before all others, but too few others to know where 1 % of them begin
    few, many = (true_positive_rate(scores, members, np.arange(200), share) for share in (0.01, 0.1))
    assert (few.value, few.low, few.high) == (1, 0, 1)
    assert many.low > 0.9


def test_confidences_stay_finite():
    outputs = torch.tensor([[500.0, -500.0, 0.0], [torch.inf, 0.0, 0.0], [torch.nan, 0.0, 0.0]])
    confidence = logit_scaled_confidence(outputs, torch.tensor([1, 0, 0]))
    assert confidence[0] == -1000
    assert np.isfinite(confidence).all()


def test_halves_are_of_whole_groups():
    examples = pf.Examples(torch.zeros(12, 2), torch.arange(12) % 2, group=np.repeat(np.arange(4), 3))
    rows = _draw_half(examples, seed=3)
    assert len(rows) == 6
    assert set(np.bincount(rows // 3)) <= {0, 3}
    assert list(rows) == list(_draw_half(examples, seed=3))


def test_what_cannot_be_audited_is_refused_with_a_sentence(tmp_path):
    run = tmp_path / "run"
    clients = saved_run(run, pf.algorithms.Local())
    for few in (3, 0, True, 4.0):
        with pytest.raises(pf.UserError, match="runs of an audit must be a whole number of at least 4, got "):
            pf.audit(run, clients=clients, runs=few)
    with pytest.raises(pf.UserError, match="were made in Python; give them: polyfed"):
        pf.audit(run)
    with pytest.raises(pf.UserError, match="is not a run directory: it has no config"):
        pf.audit(tmp_path)
    with pytest.raises(pf.UserError, match="no client 'nroth'; did you mean north"):
        pf.audit(run, clients=clients, client="nroth")
    with pytest.raises(pf.UserError, match="the clients are not those of the run"):
        pf.audit(run, clients=noise_clients(n=20))
    with pytest.raises(pf.UserError, match=r"algorithm must be the method of the run, such as .*, got 'local'"):
        pf.audit(run, clients=clients, algorithm="local")
    with pytest.raises(pf.UserError, match="on_run must be a function"):
        pf.audit(run, clients=clients, on_run=3)
    (tmp_path / "comparison.yaml").touch()
    with pytest.raises(pf.UserError, match=r"is a comparison; give one of its runs, such as .*/METHOD/seed-0"):
        pf.audit(tmp_path)
    with pytest.raises(pf.UserError, match="algorithm is not that of the run"):
        pf.audit(run, clients=clients, algorithm=pf.algorithms.FedAvg())


def own_score(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())


def test_a_metric_of_the_users_own_is_needed_where_it_chose_the_round(tmp_path):
    clients = [dataclasses.replace(client, val=client.test.select(torch.arange(3))) for client in noise_clients()]
    clients = [dataclasses.replace(client, test=client.test.select(torch.arange(3, 6))) for client in clients]
    options = {"rounds": 2, "keep": "best", "metrics": [own_score], "workers": 0, "quiet": True}
    pf.federate(clients, pf.algorithms.Local(), out=tmp_path / "run", **options)
    with pytest.raises(pf.UserError, match="the metric 'own_score' chose, which is not built in"):
        pf.audit(tmp_path / "run", clients=clients)
    assert pf.audit(tmp_path / "run", clients=clients, metrics=[own_score], runs=4).shadow_runs == 4


def test_other_tasks_and_tiny_clients_are_refused(tmp_path):
    x, y = torch.randn(8, 20), torch.zeros(8, 2)
    regression = [pf.Client("north", network, (x, y), (x + 1, y), task="regression")]
    saved_run(tmp_path / "a", pf.algorithms.Local(), regression)
    with pytest.raises(pf.UserError, match="task of client 'north' is regression"):
        pf.audit(tmp_path / "a", clients=regression)
    tiny = saved_run(tmp_path / "b", pf.algorithms.Local(), noise_clients(n=3))
    with pytest.raises(pf.UserError, match="client 'north' has 3 training examples"):
        pf.audit(tmp_path / "b", clients=tiny)


def test_the_report_shows_no_data(tmp_path):
    x = torch.full((8, 20), MARK)
    clients = [pf.Client("north", network, (x, torch.arange(8) % 2), (x[:4] + 1, torch.arange(4) % 2))]
    saved_run(tmp_path / "run", pf.algorithms.Local(lr=1e-9), clients)
    report = pf.audit(tmp_path / "run", clients=clients, runs=4)
    shown = [repr(report), str(report), repr(report.table()), json.dumps(report.to_json_dict())]
    assert not any(form in text for text in shown for form in ("73591", "7.3591", "7.36e"))


@pytest.mark.thorough
def test_the_command_prints_a_table_or_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "1", "--workers", "0", "--quiet", "--data.clients", "2", "--baselines", "[]", "--out", "run"]
    assert main(["run", "fedavg_digits", *words]) == 0
    capsys.readouterr()
    assert main(["audit", "run", "--runs", "4", "--iterations", "5", "--restarts", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert list(content) == [
        "format",
        "method",
        "shadow_runs",
        "clients",
        "overall",
        "sentences",
        "messages",
        "attributes",
    ]
    assert json.loads((tmp_path / "run" / "audit.json").read_text()) == content
    assert (tmp_path / "run" / "audit.json").stat().st_mode & 0o777 == 0o600
    rates = {"auc", "tpr_at_1_percent", "tpr_at_10_percent"}
    assert set(content["overall"]) == {"client", "examples", "epsilon", *rates}
    assert all(set(content["overall"][name]) == {"value", "low", "high"} for name in rates)
    images = content["messages"]
    assert [entry["client"] for entry in images] == [entry["client"] for entry in content["clients"]]
    assert all(entry["best_psnr"] > 0 and entry["senders"] == 1 for entry in images)
    assert "5 iterations, 1 restart," in " ".join(content["sentences"])
    assert "audit: 4 of 4 runs" in err
    assert main(["audit", "run", "--runs", "3"]) == 2
    assert "runs of an audit must be a whole number of at least 4, got 3" in capsys.readouterr().err
    only = ["--client", content["clients"][0]["client"], "--iterations", "0"]
    assert main(["audit", "run", "--runs", "4", *only]) == 0
    out = capsys.readouterr().out
    assert "TPR at 1 % FPR" in out
    assert "not attacked: 0 iterations" in out
    assert "% right (last layer), guess" in out
    assert main(["audit", "run", "--restarts", "0"]) == 2
    assert "restarts of an audit must be a whole number of at least 1, got 0" in capsys.readouterr().err
    assert main(["report", "run"]) == 0
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "Audit: what networks and messages reveal" in page
    assert "PSNR of images in dB" in page
    assert "No number here is called safe" in page


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ("[" * 100_000, "is damaged"),
        (
            '{"format": 9, "method": "", "shadow_runs": 4, "clients": [], "overall": ALL, "sentences": []}',
            "has format 9",
        ),
    ],
)
def test_a_damaged_result_of_an_audit_is_named(tmp_path, text, flaw):
    rate = '{"value": 0.5, "low": 0.1, "high": 0.9}'
    entry = '{"client": "all", "examples": 4, "auc": R, "tpr_at_1_percent": R, "tpr_at_10_percent": R, "epsilon": null}'
    assert read_audit(tmp_path) is None
    (tmp_path / "audit.json").write_text(text.replace("ALL", entry.replace("R", rate)))
    with pytest.raises(pf.UserError, match=rf"audit\.json {flaw}"):
        read_audit(tmp_path)


def test_a_sum_is_said_to_be_one(tmp_path):
    clients = noise_clients(("north", "south", "west"))
    pf.federate(clients, pf.algorithms.FedAvg(), rounds=1, out=tmp_path / "run", secure=True, workers=0, quiet=True)
    report = pf.audit(tmp_path / "run", clients=clients, runs=4)
    assert {entry.senders for entry in report.messages} == {3}
    assert [entry.note for entry in report.messages] == ["inputs are not images"] * 3
    assert "the server sees the sum of 3 clients" in str(report)


def test_the_result_is_frozen():
    from polyfed.report.audit.audit_report import AuditReport

    assert AuditReport.__dataclass_params__.frozen
    assert {field.name for field in dataclasses.fields(AuditReport)} >= {"clients", "overall", "sentences"}
