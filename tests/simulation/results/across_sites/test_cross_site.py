"""Every client's model at every client: what the diagonal is, what a model makes of others' rows, when a cell is empty."""

import json

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, Local
from polyfed.core.evaluation.metrics import METRICS
from polyfed.simulation.results.across_sites import cross_site
from polyfed.simulation.results.across_sites.cross_site_scores import (
    CSV_FILE,
    FILE,
    average_cross_site,
    read_cross_site,
    write_cross_site,
)
from polyfed.simulation.results.across_sites.other_clients_examples import (
    IncompatibleExamplesError,
    adapt_test_examples_to_model_of,
)
from polyfed.tasks.survival import Survival
from polyfed.testing import small_clients


def table(seed, count=120, flip=False, **changes):
    draw = np.random.default_rng(seed)
    age, dose = draw.normal(50 + 5 * seed, 8, count), draw.normal(0, 1, count)
    risk = (age - 50 - 5 * seed) / 8 + dose
    ill = (risk + draw.normal(0, 0.5, count) > 0) ^ flip
    rows = {"age": age.tolist(), "sex": draw.choice(["f", "m"], count).tolist(), "dose": dose.tolist(),
            "ill": np.where(ill, "yes", "no").tolist()}  # fmt: skip
    return rows | changes


def site(name, seed, **options):
    tables = pf.data.split_table(table(seed, **options), "ill", None, name=name)
    return tables.build_clients(lambda: torch.nn.Linear(tables.num_features, tables.num_outputs))[0]


def run_alone(clients, **words):
    return pf.federate(clients, Local(lr=0.3, local_epochs=5), rounds=2, workers=0, **words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    clients = [site("north", 0), site("south", 1), site("odd", 2, flip=True)]
    return run_alone(clients, metrics=["accuracy", "auc"], out=tmp_path_factory.mktemp("runs") / "a", cross_site=True)


def test_the_diagonal_is_the_score_of_the_run(run):
    rows = {row["client"]: row for row in run.table()}
    for metric in ("accuracy", "auc"):
        for k, row in enumerate(run.cross_site().matrix(metric)):
            assert row[k].value == pytest.approx(rows[row[k].patients_of][metric])
            assert row[k].difference is None


def test_a_cell_is_what_predict_makes_of_the_others_rows(run):
    clients = run.federation.clients
    outputs = run.predict("north", clients["south"].test.x)
    accuracy = float((outputs.argmax(1) == clients["south"].test.labels).float().mean())
    (cell,) = [c for c in run.cross_site().cells
               if (c.model_of, c.patients_of, c.metric) == ("north", "south", "accuracy")]  # fmt: skip
    assert cell.value == pytest.approx(accuracy)
    assert cell.low < cell.value < cell.high
    assert cell.difference == pytest.approx(accuracy - run.cross_site().matrix()[0][0].value, abs=1)
    assert cell.examples == len(clients["south"].test)


def test_the_test_rows_of_a_client_are_its_own(run):
    clients = run.federation.clients
    for client in clients.values():
        assert len(client.test.x) == len(client.test)
    names = [column.name for column in clients["south"].train.transform.columns]
    rows = [dict(zip(names, values, strict=True)) for values in clients["south"].test.x.tolist()]
    raw = [row | {"sex": "fm"[int(row["sex"])]} for row in rows]
    torch.testing.assert_close(run.predict("north", raw), run.predict("north", clients["south"].test.x))


def test_sentences_say_what_is_decided(run):
    scores = run.cross_site()
    assert "The model of odd serves north, south worse than their own." in scores.sentences()
    assert "odd worse than their own" in " ".join(scores.sentences())
    text = str(scores)
    assert text.splitlines()[1].split() == ["model", "of", "north", "odd", "south"]
    assert text.count("[") >= 3


@pytest.mark.thorough
def test_equally_good_models_are_seldom_told_apart():
    """Forty federations of six sites with guesses for outputs: one at a time, the intervals would decide in most of them."""
    draw, told = np.random.default_rng(0), 0
    targets = torch.arange(60) % 2
    clients = [
        pf.Client(f"c{k}", None, (torch.zeros(2, 1), targets[:2]), (torch.zeros(60, 1), targets)) for k in range(6)
    ]
    for _ in range(40):
        parts = {
            (METRICS["auc"].name, owner.id, client.id): cross_site._score_with_pseudo_values(
                METRICS["auc"], client.task, torch.from_numpy(draw.normal(size=(60, 2))), targets, np.arange(60), 50
            )
            for owner in clients
            for client in clients
        }
        cells = [
            cross_site._build_cell(METRICS["auc"], owner, client, parts, 30) for owner in clients for client in clients
        ]
        told += any(
            cell.difference_low is not None and cell.difference_low * cell.difference_high > 0 for cell in cells
        )
        alone = [cross_site._build_cell(METRICS["auc"], clients[0], client, parts, 1) for client in clients[1:]]
        assert all(one.difference_low > cell.difference_low for one, cell in zip(alone, cells[1:6], strict=True))
    assert told <= 5


def test_a_c_index_of_four_events_has_no_interval():
    task, times = Survival(), torch.arange(30.0)
    for events, has_interval in ((4, False), (5, True)):
        targets = torch.stack([times, (times < events).float()], dim=1)
        score = cross_site._score_with_pseudo_values(
            task.default_metric, task, -times[:, None], targets, np.arange(30), 50
        )
        assert (score.pseudo_values is not None) is has_interval


def test_the_files_hold_the_matrix(run, tmp_path):
    assert run.cross_site_scores is not None
    assert read_cross_site(run.out) == run.cross_site_scores
    lines = (run.out / CSV_FILE).read_text().splitlines()
    assert lines[0].startswith("model_of,patients_of,metric,value,low,high,difference")
    assert len(lines) == 1 + 2 * 9
    assert read_cross_site(tmp_path) is None
    (tmp_path / FILE).write_text('{"format": 1}')
    with pytest.raises(pf.UserError, match="is damaged"):
        read_cross_site(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(pf.UserError, match="cannot be read"):
        read_cross_site(tmp_path)
    content = json.loads((run.out / FILE).read_text())
    content["cells"][0].pop("low")
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(pf.UserError, match="other fields"):
        read_cross_site(tmp_path)


def test_a_run_that_was_not_asked_computes_it_on_demand(tmp_path):
    run = pf.federate(small_clients(2), FedAvg(), rounds=1, workers=0, out=tmp_path / "a")
    assert run.cross_site_scores is None
    assert not (tmp_path / "a" / FILE).exists()
    assert len(run.cross_site().cells) == 4
    with pytest.raises(pf.UserError, match="there is no score 'auc'"):
        run.cross_site().matrix("auc")


def test_a_resumed_run_has_it_too(tmp_path):
    clients = small_clients(2)
    first = pf.federate(clients, FedAvg(), rounds=1, workers=0, out=tmp_path / "a", cross_site=True)
    (tmp_path / "a" / FILE).unlink()
    again = pf.resume(tmp_path / "a", clients=clients)
    assert again.cross_site_scores == first.cross_site_scores == read_cross_site(tmp_path / "a")


def test_different_architectures_serve_one_another():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=draw), torch.arange(60) % 2
    wide = lambda: torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))  # noqa: E731
    clients = [
        pf.Client("a", lambda: torch.nn.Linear(4, 2), (x[:20], y[:20]), (x[20:30], y[20:30])),
        pf.Client("b", wide, (x[30:50], y[30:50]), (x[50:], y[50:])),
    ]
    values = [cell.value for row in run_alone(clients).cross_site().matrix() for cell in row]
    assert all(value is not None for value in values)


def test_patients_are_the_units_of_intervals():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 3, generator=draw), torch.randint(0, 2, (200,), generator=draw)
    x, y = x[:20].repeat(10, 1), y[:20].repeat(10)  # 20 patients of ten equal rows
    patients = {"patient": [k % 20 for k in range(200)]}

    def width(group):
        test = pf.Examples(x, y, columns=patients, group=group)
        client = pf.Client("a", lambda: torch.nn.Linear(3, 2), (x[:20] + 9, y[:20]), test)
        (cell,) = run_alone([client]).cross_site().cells
        return cell.high - cell.low

    assert width("patient") > 2.5 * width(None)


def test_columns_and_categories_are_found_by_name():
    north = site("north", 0)
    other = table(1, sex=(["m", "x"] * 60))
    other = {name: other[name] for name in ("sex", "dose", "age", "ill")} | {"lab": [1.0, 2.0] * 60}
    tables = pf.data.split_table(other, "ill", None, name="south")
    south = tables.build_clients(lambda: torch.nn.Linear(tables.num_features, tables.num_outputs))[0]
    examples, _ = adapt_test_examples_to_model_of(north, south)
    position = [column.name for column in south.train.transform.columns].index
    names = [column.name for column in north.train.transform.columns]
    assert torch.equal(examples.x[:, names.index("age")], south.test.x[:, position("age")])
    sex = examples.x[:, names.index("sex")]
    assert set(sex.tolist()) == {1.0, -1.0}, "m by north's code, and x as none of its categories"
    with pytest.raises(IncompatibleExamplesError, match="north has no column 'lab', which the model of south reads"):
        adapt_test_examples_to_model_of(south, north)
    cells = run_alone([north, south]).cross_site().matrix()
    assert cells[1][0].value is None
    assert "no column 'lab'" in cells[1][0].reason
    assert cells[0][1].value is not None


def test_classes_are_found_by_name():
    north, south = site("north", 0), site("south", 1, ill=["yes", "perhaps"] * 60)
    with pytest.raises(IncompatibleExamplesError, match="class 'perhaps', which the model of north does not know"):
        adapt_test_examples_to_model_of(north, south)
    _, convert = adapt_test_examples_to_model_of(
        site("a", 0, ill=["no", "perhaps", "yes"] * 40), site("b", 1, ill=["yes", "perhaps"] * 60)
    )
    assert convert(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[2.0, 3.0]]


@pytest.mark.filterwarnings("ignore:column 'dose' nearly is the target")
def test_targets_in_their_own_scale():
    def made(name, seed, shift):
        rows = table(seed) | {"cost": [shift + 3 * d for d in table(seed)["dose"]]}
        tables = pf.data.split_table(rows, "cost", None, name=name, drop="ill", task="regression")
        return tables.build_clients(lambda: torch.nn.Linear(tables.num_features, 1))[0]

    north, south = made("north", 0, 100.0), made("south", 1, 100.0)
    run = run_alone([north, south], metrics=["mae"])
    cell = run.cross_site().matrix()[0][1]
    outputs = run.predict("north", south.test.x)
    truth = south.test.transform.unscale_outputs(south.test.labels)
    spread = south.train.transform.target[0][1]
    assert cell.value == pytest.approx(float((outputs - truth).abs().mean()) / spread, rel=1e-4)


def images_with_masks(seed):
    x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0.5).long()


def survival_times(seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(20, 2, generator=draw)
    return x, torch.stack([torch.rand(20, generator=draw) + 0.1, torch.ones(20)], dim=1)


@pytest.mark.parametrize(
    ("task", "network", "draw_examples"),
    [
        ("segmentation", lambda: torch.nn.Conv2d(1, 2, 1), images_with_masks),
        ("survival", lambda: torch.nn.Linear(2, 1), survival_times),
    ],
)
def test_outputs_of_another_form_than_the_targets_are_scored(task, network, draw_examples):
    clients = [
        pf.Client(name, network, train=draw_examples(k), test=draw_examples(k + 5), task=task)
        for k, name in enumerate(("north", "south"))
    ]
    matrix = run_alone(clients).cross_site().matrix()
    cells = [cell for row in matrix for cell in row]
    assert all(cell.value is not None for cell in cells)
    assert all(0 <= cell.low <= cell.high <= 1 for cell in cells if cell.low is not None)


def test_other_inputs_leave_a_cell_empty():
    x, y = torch.zeros(20, 5), torch.arange(20) % 2
    clients = [
        pf.Client("a", lambda: torch.nn.Linear(3, 2), (x[:, :3], y), (x[:, :3] + 1, y)),
        pf.Client("b", lambda: torch.nn.Linear(5, 2), (x, y), (x + 1, y)),
    ]
    (first, second), _ = run_alone(clients).cross_site().matrix()
    assert first.value is not None
    assert second.reason == "inputs are torch.float32 of shape (5,) at b and torch.float32 of shape (3,) at a"
    assert "Empty cells: inputs are" in " ".join(run_alone(clients).cross_site().sentences())


@pytest.mark.parametrize("positives", [1, 4])
def test_a_site_with_few_positives_has_a_score_and_no_interval(positives):
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(20, dtype=torch.int64)
    y[:positives] = 1
    client = pf.Client("a", lambda: torch.nn.Linear(3, 2), (x + 9, y), (x, y))
    (cell,) = run_alone([client], metrics=["auc"]).cross_site().cells
    assert cell.value is not None
    assert (cell.low, cell.high) == (None, None)


def test_the_mean_over_seeds_makes_no_interval_shorter(run):
    scores = run.cross_site()
    mean = average_cross_site([scores, scores])
    assert mean == scores


@pytest.mark.thorough
def test_a_comparison_keeps_the_matrix_of_each_compared_run(tmp_path):
    words = {"rounds": 1, "tune": {"lr": [0.1, 0.2]}, "references": False, "parallel": 1, "quiet": True}
    clients = small_clients(2)
    comparison = pf.compare(clients, ["fedavg"], seeds=[0, 1], out=tmp_path / "c", cross_site=True, **words)
    files = {path.parent.relative_to(tmp_path / "c").parts[0] for path in (tmp_path / "c").rglob(FILE)}
    assert files == {"local", "fedavg", "fedavg_ft"}, "and none of the search"
    runs = [read_cross_site(tmp_path / "c" / "fedavg" / f"seed-{seed}") for seed in (0, 1)]
    assert comparison.cross_site("fedavg") == average_cross_site(runs)
    with pytest.raises(pf.UserError, match="no method 'fedprox'"):
        comparison.cross_site("fedprox")
    with pytest.raises(pf.UserError, match=r"give out=\.\.\."):
        pf.compare(clients, ["fedavg"], seeds=[0], cross_site=True, **words)
    plain = pf.compare(clients, ["fedavg"], seeds=[0], out=tmp_path / "d", **words)
    with pytest.raises(pf.UserError, match="have no scores of every client's model"):
        plain.cross_site("local")


def test_between_real_sites_it_is_refused():
    from polyfed.deploy.server.server_config import build_or_restore_server

    config = {"sites": "a,b", "out": "run", "rounds": 1, "algorithm.name": "local", "cross-site": True}
    with pytest.raises(pf.UserError, match="models would travel between sites"):
        build_or_restore_server(config)


def test_it_is_a_yes_or_no():
    with pytest.raises(pf.UserError, match="cross_site must be true or false"):
        pf.federate(small_clients(2), FedAvg(), rounds=1, cross_site="yes")


def test_a_method_with_its_own_messages_for_all_clients(tmp_path):
    run = pf.federate(small_clients(3), "pfedla", rounds=1, workers=0)
    scores = run.cross_site()
    rows = {row["client"]: row for row in run.table()}
    for k, row in enumerate(scores.matrix()):
        assert row[k].value == pytest.approx(rows[row[k].patients_of]["accuracy"])
    write_cross_site(scores, tmp_path)
    assert read_cross_site(tmp_path) == scores
