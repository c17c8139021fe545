"""Networks and comparisons in MLflow: by a package that records what it is asked, and by MLflow itself."""

import importlib.util
import json
import shutil
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.cli.main import main
from polyfed.core.examples.examples import Normalise
from polyfed.models import ModelSpec
from polyfed.report.export.folder import export_model
from polyfed.report.export.mlflow_models import (
    MODELS_TAG,
    log_comparison_to_trackers,
    log_models_once_to_mlflow,
    mlflow_signature_of_folder,
)
from polyfed.simulation.monitoring import trackers
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.monitoring.trackers import build_tracker
from polyfed.simulation.results.saved_model import load_saved_model

pytestmark = pytest.mark.thorough

ROWS = {
    "age": np.linspace(40, 80, 40), "sex": list("fm") * 20, "ill": ["no", "yes", "yes", "no"] * 10,
    "town": ["north", "south"] * 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two sites on a table, whose networks a directory can build."""
    sites = pf.data.split_table(ROWS, "ill", "town")
    spec = ModelSpec("mlp", {"hidden": [4]}, (sites.num_features,), sites.num_outputs)
    out = tmp_path_factory.mktemp("tracked") / "run"
    pf.federate(sites.build_clients(spec), FedAvg(lr=0.1), rounds=2, workers=0, out=out)
    return out


@pytest.fixture
def here(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "run")


class Kept:
    """A server's memory, and the calls of a package that has its API."""

    def __init__(self):
        self.runs, self.models, self.active = {}, [], None

    # -- MlflowClient ---------------------------------------------------------------------------------------------

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="7")

    def create_run(self, experiment, tags, run_name):
        assert experiment == "7"
        number = f"run-{len(self.runs)}"
        data = types.SimpleNamespace(tags=dict(tags), metrics={}, params={}, history=[], artifacts=[])
        self.runs[number] = types.SimpleNamespace(
            data=data, info=types.SimpleNamespace(run_id=number, status="RUNNING")
        )
        return self.runs[number]

    def get_run(self, run_id):
        return self.runs[run_id]

    def update_run(self, run_id, status):
        self.runs[run_id].info.status = status

    def get_metric_history(self, run_id, key):
        return [one for one in self.runs[run_id].data.history if one.key == key]

    def log_batch(self, run_id, metrics=(), params=()):
        self.runs[run_id].data.history += metrics
        self.runs[run_id].data.params |= {one.key: one.value for one in params}

    def set_tag(self, run_id, key, value):
        self.runs[run_id].data.tags[key] = value

    def log_metric(self, run_id, key, value):
        self.runs[run_id].data.metrics[key] = value

    def log_artifact(self, run_id, path):
        self.runs[run_id].data.artifacts.append(path.rpartition("/")[2])

    def set_terminated(self, run_id, status):
        self.runs[run_id].info.status = status

    # -- mlflow ---------------------------------------------------------------------------------------------------

    def start_run(self, run_id):
        from contextlib import contextmanager

        @contextmanager
        def active():
            self.active = run_id
            yield
            self.active = None

        return active()

    def log_model(self, name, python_model, artifacts, signature, pip_requirements):
        module = importlib.util.spec_from_file_location("code_of_model", python_model)
        code = importlib.util.module_from_spec(module)
        module.loader.exec_module(code)
        self.made.load_context(types.SimpleNamespace(artifacts=artifacts))
        content = types.SimpleNamespace(name=name, run=self.active, signature=signature, needs=pip_requirements,
                                        predict=lambda given, made=self.made: made.predict(None, given))  # fmt: skip
        self.models.append(content)


@pytest.fixture
def mlflow(monkeypatch):
    kept = Kept()

    def module(name, **content):
        found = types.ModuleType(name)
        found.__dict__.update(content)
        found.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    def value(*names):
        return lambda *given, **more: types.SimpleNamespace(**dict(zip(names, given, strict=False)), **more)

    class Model:
        pass

    schemas = {
        "ColSpec": value("type", "name"), "TensorSpec": value("type", "shape", "name"), "Schema": list,
        "DataType": types.SimpleNamespace(double="double", string="string"),
    }  # fmt: skip
    module("mlflow", MlflowClient=lambda: kept, start_run=kept.start_run, MlflowException=KeyError)
    module("mlflow.entities", Param=value("key", "value"), Metric=value("key", "value", "time", "step"))
    module("mlflow.pyfunc", log_model=kept.log_model, PythonModel=Model)
    module(
        "mlflow.models", ModelSignature=value("inputs", "outputs"), set_model=lambda made: setattr(kept, "made", made)
    )
    module("mlflow.types")
    module("mlflow.types.schema", **schemas)
    return kept


def test_each_clients_network_is_a_model_with_a_signature(here, mlflow):
    assert log_models_once_to_mlflow(here) == 0  # a run that is not tracked
    follow(here)
    assert log_models_once_to_mlflow(here) == 2
    assert [one.name for one in mlflow.models] == ["network-north", "network-south"]
    one = mlflow.models[0]
    assert one.run == trackers.read_mlflow_run_id(here) == "run-0"
    assert [(c.type, c.name) for c in one.signature.inputs] == [("double", "age"), ("string", "sex")]
    assert [(t.type, t.shape) for t in one.signature.outputs] == [(np.dtype("float32"), (-1, 2))]
    assert [need.partition("==")[0] for need in one.needs] == ["torch", "numpy"]
    assert mlflow.runs["run-0"].data.tags[MODELS_TAG] == "2"
    assert log_models_once_to_mlflow(here) == 0  # they are there


@pytest.mark.filterwarnings("ignore:column .sex. has categories")
def test_the_model_answers_as_polyfed_does(here, mlflow, tmp_path):
    follow(here)
    kept = shutil.copytree(export_model(here, "south", tmp_path / "again"), tmp_path / "moved")
    log_models_once_to_mlflow(here)
    code = mlflow.made
    code.load_context(types.SimpleNamespace(artifacts={"network": str(kept)}))
    frame = pd.DataFrame({"sex": ["m", None, "x"], "age": [50.0, np.nan, 77], "more": [1, 2, 3]})
    logits = torch.from_numpy(code.predict(None, frame))
    from polyfed.data.tabular.table_reader import read_table

    with pytest.warns(UserWarning, match="which the table of the run did not have"):
        wanted = load_saved_model(here, "south").predict(read_table(frame))
    assert logits.softmax(1)[:, 1].tolist() == pytest.approx(wanted["probability of yes"], abs=1e-6)


def follow(folder):
    progress = build_tracker("mlflow", folder, SilentProgress())
    progress.start("fedavg", 2, 2)
    progress.stop()


def test_a_comparison_is_a_run_with_its_runs_below(here, mlflow):
    content = {"seeds": [0, 1], "title": "t", "best": "fedavg", "methods": {"fedavg": {
        "runs": {"0": {"path": "run"}, "1": {"path": None}}, "statistics": {"mean": 0.5, "gain": None, "worst": 0.4},
    }}}  # fmt: skip
    for _ in range(2):  # nothing twice
        log_comparison_to_trackers(content, here.parent, ["mlflow"])
        parent, below = mlflow.runs["run-0"].data, mlflow.runs["run-1"].data
        assert (parent.metrics, set(parent.artifacts)) == (
            {"fedavg/mean": 0.5, "fedavg/worst": 0.4},
            {"comparison.json"},
        )
        assert below.tags["mlflow.parentRunId"] == "run-0"
        assert {metric.step for metric in below.history} == {1, 2}
        assert (len(mlflow.runs), len(mlflow.models)) == (2, 2)


def test_pictures_have_a_tensor_in_the_signature(mlflow, tmp_path):
    x = torch.randint(256, (12, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = pf.Examples(x, torch.arange(12) % 3, transform=Normalise((0.3,), (0.2,)))
    parts = [data.select(rows) for rows in torch.arange(12).split(6)]
    run = pf.federate([pf.Client("a", ModelSpec("mlp", {}, (1, 8, 8), 3), *parts)], "local", rounds=1, workers=0)
    signature = mlflow_signature_of_folder(export_model(run, "a", tmp_path / "a"))
    assert [(t.type, t.shape, t.name) for t in signature.inputs] == [(np.dtype("uint8"), (-1, 1, 8, 8), None)]


def test_a_network_that_cannot_be_exported_costs_no_other(here, mlflow):
    follow(here)
    told = json.loads((here / "models/north.signature.json").read_text())
    (here / "models/north.signature.json").write_text(json.dumps({**told, "network": None}))
    with pytest.warns(
        RuntimeWarning, match=r"the network of 'north' is not in MLflow: .*north.signature.json was changed"
    ):
        assert log_models_once_to_mlflow(here) == 1
    assert [one.name for one in mlflow.models] == ["network-south"]


@pytest.mark.slow
def test_commands_log_networks_of_runs_and_comparisons(mlflow, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "1", "--workers", "0", "--quiet", "--data.clients", "2", "--model", "mlp"]
    assert main(["run", "fedavg_digits", *words, "--baselines", "[]", "--logger", "mlflow", "--out", "r"]) == 0
    assert "MLflow has 2 networks of this run" in capsys.readouterr().err
    assert len(mlflow.models) == 2
    more = ["--algorithms", "local,fedavg", "--seeds", "0,1", "--tune", "none", "--no-references", "--parallel", "1"]
    assert main(["compare", "fedavg_digits", *words, *more, "--out", "c"]) == 0
    before = set(mlflow.runs)
    assert main(["compare", "c", "--quiet", "--logger", "mlflow"]) == 0
    assert "tracked with mlflow" in capsys.readouterr().out
    new = [run for number, run in mlflow.runs.items() if number not in before]
    (parent,) = [run for run in new if "polyfed.comparison" in run.data.tags]
    below = [run for run in new if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    methods = {"local", "fedavg", "fedavg_ft"}
    assert sorted(run.data.tags["polyfed.method"] for run in below) == sorted([*methods, *methods])
    assert {run.info.status for run in new} == {"FINISHED"}
    assert {f"{method}/mean" for method in methods} <= parent.data.metrics.keys()
    assert parent.data.artifacts == ["comparison.json"]
    assert len(mlflow.models) == 2 + 2 * len(methods)  # the networks of the first seed
    assert main(["compare", "c", "--quiet", "--logger", "mlflow"]) == 0
    assert len(mlflow.runs) == len(before) + len(new)
    assert len(mlflow.models) == 2 + 2 * len(methods)


def test_a_server_that_fails_at_the_end_costs_no_run(mlflow, tmp_path, monkeypatch, capsys):
    from polyfed.report.export import mlflow_models as module

    def gone(*_, **__):
        raise ConnectionError("the server has gone")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_log_exported_model", gone)
    words = ["--rounds", "1", "--workers", "0", "--quiet", "--data.clients", "2", "--baselines", "[]"]
    with pytest.warns(RuntimeWarning, match="not in MLflow: the server has gone; polyfed resume r tries again"):
        assert main(["run", "fedavg_digits", *words, "--logger", "mlflow", "--out", "r"]) == 0
    monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the package are not ours
def test_mlflow_serves_what_polyfed_predicts(here, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    import mlflow.pyfunc

    from polyfed.data.tabular.table_reader import read_table

    follow(here)
    assert log_models_once_to_mlflow(here) == 2
    run_id = trackers.read_mlflow_run_id(here)
    assert mlflow.MlflowClient().get_run(run_id).info.status == "FINISHED"
    model = mlflow.pyfunc.load_model(f"runs:/{run_id}/network-south")
    frame = pd.DataFrame({"age": [50.0, np.nan, 77], "sex": ["m", "f", "f"]})
    logits = torch.from_numpy(np.asarray(model.predict(frame)))
    wanted = load_saved_model(here, "south").predict(read_table(frame))
    assert logits.softmax(1)[:, 1].tolist() == pytest.approx(wanted["probability of yes"], abs=1e-6)
    assert [str(column.type) for column in model.metadata.signature.inputs] == ["DataType.double", "DataType.string"]
    content = {"seeds": [0], "title": "t", "best": "fedavg", "methods": {"fedavg": {
        "runs": {"0": {"path": "run"}}, "statistics": {"mean": 0.5, "gain": None, "worst": 0.4}}}}  # fmt: skip
    (tmp_path / "comparison.json").write_text("{}")
    log_comparison_to_trackers(content, tmp_path, ["mlflow"])
    parent = json.loads((tmp_path / "mlflow.json").read_text())["run_id"]
    assert mlflow.MlflowClient().get_run(run_id).data.tags["mlflow.parentRunId"] == parent
