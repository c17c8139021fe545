"""Tracking: loggers get each round's numbers once, however often a run is stopped; what is missing is said before work."""

import json
import shutil
import sys

import pytest

from polyfed.algorithms import FedAvg
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.simulation.federate import federate, resume
from polyfed.simulation.monitoring import trackers
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.monitoring.trackers import Logger, build_tracker, flatten_numbers, list_loggers_of_run
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import small_clients
from polyfed.testing.algorithm_contract import _InterruptAfter

pytestmark = pytest.mark.thorough
ROUNDS = 5


class Paper(Logger):
    """Appends to a file of the run directory, as a server would that remembers."""

    fails_at = None

    def check_reachable(self):
        pass

    def open_and_get_last_logged_round(self, folder, title, rounds_done):
        self.file = folder / "paper.jsonl"
        self.title = title
        return max(logged(folder), default=0)

    def log(self, round, values):
        if round == Paper.fails_at:
            raise ConnectionError("the server has gone")
        with self.file.open("a") as file:
            file.write(json.dumps([round, values]) + "\n")

    def close(self, *, finished):
        self.file.with_name("closed").write_text(f"{self.title} {finished}")


def logged(folder):
    """Round -> numbers, of which a second time would be a failure."""
    file, found = folder / "paper.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        number, values = json.loads(line)
        assert number not in found
        found[number] = values
    return found


@pytest.fixture
def paper(monkeypatch):
    monkeypatch.setitem(trackers.LOGGERS, "paper", Paper)
    monkeypatch.setattr(trackers, "check_extra_installed", lambda *_: None)
    monkeypatch.setattr(Paper, "fails_at", None)


def play(out, names="paper", rounds=ROUNDS):
    progress = build_tracker(names, out, SilentProgress()) if names else SilentProgress()
    return federate(
        small_clients(), FedAvg(lr=0.1), rounds=rounds, workers=0, checkpoint_every=2, out=out, progress=progress
    )


def go_on(out, names="paper"):
    return resume(out, clients=small_clients(), progress=build_tracker(names, out, SilentProgress()))


def lose(out, after):
    """What kill -9 leaves: the checkpoints up to round `after`, and all that was told of later rounds."""
    for path in (out / "checkpoint").iterdir():
        if path.name.startswith("round-") and int(path.name.removeprefix("round-").split(".")[0]) > after:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def expected(out):
    return {record["round"]: flatten_numbers(record) for record in read_metrics(out / "metrics.jsonl")}


def test_numbers_are_all_of_a_record():
    record = {"round": 2, "train_loss": None, "clients": {"a/b": {"accuracy": 0.5, "loss": None}}, "failures": [{"x": 1}],
              "summary": {"accuracy": {"mean": 0.5}}, "analysis": {"k": True}}  # fmt: skip
    assert flatten_numbers(record) == {"round": 2.0, "clients/a/b/accuracy": 0.5, "summary/accuracy/mean": 0.5}


def test_each_round_is_logged_as_metrics_has_it(tmp_path, paper):
    run = play(tmp_path / "run")
    assert logged(run.out) == expected(run.out)
    assert len(logged(run.out)) == ROUNDS
    assert "summary/accuracy/mean" in logged(run.out)[ROUNDS]
    assert (run.out / "closed").read_text() == "fedavg True"


def test_a_killed_run_logs_no_round_twice(tmp_path, paper):
    out = tmp_path / "run"
    play(out)
    before = logged(out)
    lose(out, after=2)
    go_on(out)
    assert logged(out) == before
    assert list(expected(out)) == list(range(1, ROUNDS + 1))


def test_rounds_without_tracking_are_added(tmp_path, paper):
    out = tmp_path / "run"
    play(out, names="")
    assert not logged(out)
    go_on(out)
    assert logged(out) == expected(out)


def test_a_server_that_goes_does_not_end_the_run(tmp_path, paper, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(Paper, "fails_at", 3)
    with pytest.warns(
        RuntimeWarning, match="not tracked with paper from here on: the server has gone; polyfed resume adds"
    ):
        run = play(out)
    assert run.last.round == ROUNDS
    assert list(logged(out)) == [1, 2]
    monkeypatch.setattr(Paper, "fails_at", None)
    go_on(out)
    assert logged(out) == expected(out)


def test_a_stopped_run_is_not_called_finished(tmp_path, paper):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        federate(
            small_clients(),
            FedAvg(),
            rounds=ROUNDS,
            workers=0,
            out=out,
            progress=build_tracker("paper", out, _InterruptAfter(3)),
        )
    assert (out / "closed").read_text() == "fedavg False"
    go_on(out)
    assert logged(out) == expected(out)
    assert (out / "closed").read_text() == "fedavg True"


def test_the_command_tracks_baselines_too(tmp_path, paper, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyfed.cli.commands.options.early_checks._LOGGERS", {"paper": None})
    monkeypatch.setattr("polyfed.cli.commands.options.early_checks.check_extra_installed", lambda *_: None)
    words = ["fedavg_digits", "--rounds", "1", "--workers", "0", "--quiet", "--out", "run", "--logger", "paper"]
    assert main(["run", *words]) == 0
    for folder in (tmp_path / "run", tmp_path / "run" / "baselines" / "local"):
        assert logged(folder) == expected(folder)
        assert len(logged(folder)) == 1


def test_what_was_tracked_before(tmp_path):
    assert list_loggers_of_run(tmp_path) == []
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "mlflow.json").write_text("{}")
    assert list_loggers_of_run(tmp_path) == ["tensorboard", "mlflow"]


def test_a_missing_package_is_said_before_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["run", "fedavg_digits", "--logger", "mlflow"]) == 2
    assert capsys.readouterr().err == (
        "polyfed: --logger mlflow needs the package mlflow, which is not installed: pip install 'polyfed[tracking]'\n"
    )
    assert main(["run", "fedavg_digits", "--logger", "tensorbord"]) == 2
    assert (
        "cannot track with 'tensorbord'; did you mean tensorboard? Choices: mlflow, tensorboard"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_a_server_that_cannot_be_reached_is_said_before_work(tmp_path, paper, monkeypatch):
    def reach(self):
        raise ConnectionError("refused\nand more")

    monkeypatch.setattr(Paper, "check_reachable", reach)
    with pytest.raises(UserError, match=r"^cannot track with paper: refused$"):
        play(tmp_path / "run")
    assert not list(tmp_path.iterdir())


# -- the packages themselves ------------------------------------------------------------------------------------------


def read_events(out):
    """Tag -> [(step, value)], as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(out):
    from mlflow import MlflowClient

    client, run_id = MlflowClient(), json.loads((out / "mlflow.json").read_text())["run_id"]
    names = client.get_run(run_id).data.metrics
    return {name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)] for name in names}


def as_series(out):
    found = {}
    for number, values in expected(out).items():
        for name, value in values.items():
            found.setdefault(name, []).append((number, value))
    return found


def check_series(told, out):
    series = as_series(out)
    assert told.keys() == series.keys()
    for name, values in series.items():
        assert [step for step, _ in told[name]] == [step for step, _ in values], name
        if "seconds" not in name:  # a round that is played again takes another time
            assert [v for _, v in told[name]] == pytest.approx([v for _, v in values], rel=1e-6), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the packages are not ours
def test_tensorboard_reads_back_what_metrics_has(tmp_path):
    out = tmp_path / "run"
    play(out, "tensorboard")
    check_series(read_events(out), out)
    lose(out, after=2)
    assert list_loggers_of_run(out) == ["tensorboard"]
    go_on(out, "tensorboard")
    check_series(read_events(out), out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_tensorboard_could_not_write_is_added_when_the_run_goes_on(tmp_path, monkeypatch):
    good = trackers.TensorBoard.log

    def full(self, round, values):
        if round == 2:
            raise OSError("no space left on device")
        good(self, round, values)

    out = tmp_path / "run"
    monkeypatch.setattr(trackers.TensorBoard, "log", full)
    with pytest.warns(RuntimeWarning, match="not tracked with tensorboard from here on: .*no space"):
        play(out, "tensorboard")
    assert [step for step, _ in read_events(out)["seconds"]] == [1]
    monkeypatch.setattr(trackers.TensorBoard, "log", good)
    lose(out, after=3)
    go_on(out, "tensorboard")
    check_series(read_events(out), out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_back_what_metrics_has(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    from mlflow import MlflowClient

    out = tmp_path / "run"
    play(out, "mlflow")
    check_series(read_mlflow(out), out)
    lose(out, after=2)
    assert list_loggers_of_run(out) == ["mlflow"]
    go_on(out, "mlflow")
    check_series(read_mlflow(out), out)
    client = MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("polyfed").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["algorithm.name"] == "fedavg"
    assert (found.data.params["rounds"], float(found.data.params["algorithm.lr"])) == (str(ROUNDS), 0.1)
    # the server has lost it: a new run with all rounds
    client.delete_experiment(found.info.experiment_id)
    (out / "mlflow.json").write_text('{"run_id": "no such run"}')
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    go_on(out, "mlflow")
    check_series(read_mlflow(out), out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_any_client_id(tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    out = tmp_path / "run"
    clients = [replace(client, id=f"Zürich #{k} (ä)") for k, client in enumerate(small_clients())]
    federate(clients, FedAvg(), rounds=1, workers=0, out=out, progress=build_tracker("mlflow", out, SilentProgress()))
    assert "clients/Z_rich _0 ___/accuracy" in read_mlflow(out)
