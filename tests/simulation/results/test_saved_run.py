"""A run and a comparison are read from their directories without clients."""

import copy
import json
import pickle
import re
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from pyarrow.csv import read_csv
from torch import nn

import polyfed as pf
from polyfed.cli.main import main
from polyfed.comparison.storage.comparison import Comparison
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards
from polyfed.simulation.results.saved_run import SavedRun
from polyfed.simulation.storage.directory import read_manifest
from polyfed.simulation.storage.run_files import RunFiles
from polyfed.testing import small_clients
from polyfed.testing.small_clients import SmallNet
from tests.few_cases import few


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("saved") / "run"
    return pf.federate(small_clients(), pf.algorithms.FedAvg(), rounds=2, workers=0, out=out, progress=False)


def test_a_run_is_read_without_its_clients(run):
    saved = pf.load(run.out)
    assert isinstance(saved, SavedRun)
    assert saved.table() == run.table()
    assert saved.table("best") == run.table("best")
    assert list(saved.history) == list(run.history)
    assert saved.config["rounds"] == 2
    assert saved.files.is_finished
    assert saved.class_names == run.class_names
    assert re.fullmatch(r"SavedRun\(fedavg, 3 clients, 2 of 2 rounds, accuracy [\d.]+, out='.*run'\)", repr(saved))


def test_a_network_in_python_is_built_by_the_callers_function(run):
    saved = pf.load(run.out)
    with pytest.raises(pf.UserError, match=r"function in Python.*give it: model=MyNetwork, or"):
        saved.model("client-0")
    x = torch.arange(12.0).view(2, 6)
    assert torch.equal(saved.predict("client-0", x, model=SmallNet), run.predict("client-0", x))
    with pytest.warns(DeprecationWarning, match=r"predict\(build=...\) is deprecated; write model=..."):
        assert torch.equal(saved.predict("client-0", x, build=SmallNet), run.predict("client-0", x))
    with pytest.raises(TypeError, match=r"predict\(\) got build= and model=, which are one; leave build= out"):
        saved.predict("client-0", x, build=SmallNet, model=SmallNet)
    with pytest.raises(pf.UserError, match="no network of a client 'client-9'"):
        saved.model("client-9")


def test_a_network_of_a_module_is_imported_if_its_code_is_trusted(run, tmp_path):
    saved, x, path = pf.load(run.out), torch.arange(12.0).view(2, 6), "polyfed.testing.small_clients:SmallNet"
    with pytest.raises(pf.UserError, match=rf"or import it: polyfed\.trust_code\('{path}'\), if you trust that code"):
        saved.predict("client-0", x)
    with pytest.raises(pf.UserError, match="were made in Python, and only that can build them"):
        pf.export_model(run.out, "client-0", tmp_path / "a", format="weights")
    with restore_trusted_names_afterwards():
        pf.trust_code(path)
        assert torch.equal(saved.predict("client-0", x), run.predict("client-0", x))
        pf.export_model(run.out, "client-0", tmp_path / "a", format="weights")
    clients = [replace(client, model=lambda: SmallNet()) for client in small_clients()]
    local = pf.federate(clients, "local", rounds=1, workers=0, progress=False, out=tmp_path / "b")
    with pytest.raises(pf.UserError, match=r"give it: model=MyNetwork$"):
        pf.load(local.out).model("client-0")


def test_another_network_than_that_of_the_run_is_refused_with_what_to_give(run):
    with pytest.raises(
        pf.UserError, match=r"weights do not fit .*; give as model=... the function that built it in that run"
    ):
        pf.load(run.out).predict("client-0", torch.zeros(2, 6), model=lambda: torch.nn.Linear(6, 3))


def test_a_saved_run_is_exported_like_its_directory(run, tmp_path):
    folder = pf.export_model(pf.load(run.out), "client-0", tmp_path / "a", format="weights", model=SmallNet)
    assert (folder / "weights.safetensors").is_file()
    with pytest.raises(pf.UserError, match=r"holds neither a run .*; it is an exported network: see its README.md"):
        pf.load(folder)
    with pytest.warns(
        DeprecationWarning, match=r"export_model\((to|network)=...\) is deprecated; write (out|model)=..."
    ):
        pf.export_model(run, "client-0", to=tmp_path / "b", format="weights", network=None)
    with pytest.raises(pf.UserError, match="client-9"):
        pf.audit(run, client="client-9")


def test_predictions_of_a_saved_run_are_those_of_the_run(run):
    saved, kept = pf.load(run.out).predictions("client-0"), run.predictions("client-0")
    assert torch.equal(saved.outputs, kept.outputs)
    assert torch.equal(saved.targets, kept.targets)


def _read_all_but_times(folder):
    """Returns the manifest without times, models, predictions and configuration, and the names of checkpoints."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    manifest = {k: v for k, v in read_manifest(folder).items() if k not in ("started", "auto")}
    parts = {path: data for path, data in files.items() if path.parts[0] in ("models", "predictions", "config.yaml")}
    return manifest, parts, {path.parts[:2] for path in files if path.parts[0] == "checkpoint"}


@pytest.mark.parametrize(
    ("method", "options"),
    few([("fedavg", {"keep": "best"}), ("ditto", {}), ("flha_ghn", {})], [("fedavg", {"keep": "best"})]),
)
def test_a_run_in_memory_is_saved_as_one_with_a_directory(tmp_path, method, options):
    options = {"rounds": 3, "workers": 0, "progress": False, "checkpoint_every": 9} | options
    run = pf.federate(small_clients(), method, **options)
    pf.federate(small_clients(), method, out=tmp_path / "written", **options)
    for name in ("first", "second"):  # saving leaves the run in memory as it was
        assert run.save(tmp_path / name) == tmp_path / name
        saved, written = (_read_all_but_times(tmp_path / folder) for folder in (name, "written"))
        assert saved == written
        assert list(pf.load(tmp_path / name).history) == list(run.history)
    x = torch.arange(12.0).view(2, 6)
    shutil.rmtree(tmp_path / "first")
    assert torch.equal(pf.load(tmp_path / "second").predict("client-0", x, model=SmallNet), run.predict("client-0", x))
    assert pf.resume(tmp_path / "second", clients=small_clients(), workers=0, progress=False).table() == run.table()
    with pytest.raises(pf.UserError, match=r"is not empty; .*choose another out=.*, or remove it"):
        run.save(tmp_path / "second")
    with pytest.raises(
        pf.UserError, match=r"is in .*second already; load it, .*, or copy it, shutil.copytree\('.*third"
    ):
        replace(run, out=tmp_path / "second").save(tmp_path / "third")


def test_classes_and_probabilities_are_those_of_the_command(tmp_path):
    rows = {"age": range(20), "ill": ["no", "yes"] * 10, "site": ["north"] * 10 + ["south"] * 10}
    sites = pf.data.split_table(rows, "ill", "site")
    clients = sites.build_clients(pf.models.ModelSpec("mlp", {}, (1,), 2))
    run = pf.federate(clients, "fedavg", rounds=1, workers=0, progress=False, out=tmp_path / "run")
    (tmp_path / "new.csv").write_text("age\n3\n40\n")
    table = run.predict_table("north", tmp_path / "new.csv")
    assert list(table) == ["predicted", "probability of no", "probability of yes"]
    assert (
        main(["predict", str(run.out), str(tmp_path / "new.csv"), "--client", "north", "--out", str(tmp_path / "o")])
        == 0
    )
    written = read_csv(tmp_path / "o").to_pydict()
    for other in (written, pf.load(run.out).predict_table("north", {"age": [3, 40]})):
        assert other["predicted"] == table["predicted"]
        for name in list(table)[1:]:
            assert other[name] == pytest.approx(table[name])


def test_classes_named_by_texts_are_those_of_predictions(tmp_path):
    x, y = torch.randn(4, 8, 4), ["cat", "dog"] * 4
    clients = [pf.Client(str(k), lambda: nn.Linear(4, 2), (x[k], y), (x[k + 2], y)) for k in range(2)]
    run = pf.federate(clients, "fedavg", rounds=1, workers=0, progress=False, out=tmp_path / "run")
    table = run.predict_table("0", x[0])
    assert table["predicted"] == [("cat", "dog")[k] for k in run.predict("0", x[0]).argmax(1)]
    assert pf.load(run.out).predict_table("0", x[0], model=lambda: nn.Linear(4, 2)) == table


def test_a_comparison_gives_its_runs(tmp_path):
    compared = pf.compare(small_clients(2), "fedavg", rounds=1, seeds=[3, 5], tune="none", out=tmp_path / "c", quiet=True,
                          references=False)  # fmt: skip
    assert compared.run("fedavg").out == tmp_path / "c" / "fedavg" / "seed-3"
    assert compared.run("local", seed=5).config["seed"] == 5
    with pytest.raises(pf.UserError, match="fedavg has no run with seed=4; choices: 3, 5"):
        compared.run("fedavg", seed=4)
    with pytest.raises(pf.UserError, match="no method 'fedavgg' in this comparison; did you mean fedavg"):
        compared.run("fedavgg")


def test_run_and_comparison_write_their_page(run, tmp_path):
    page = run.report(tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert pf.load(run.out).report() == run.out / "report.html"


def test_a_table_is_printed_in_columns(run):
    comparison = Comparison({"methods": {"local": {"statistics": defaultdict(lambda: None, seconds=0.12345)}}})
    for table in (run.table(), pf.load(run.out).table(), comparison.table()):
        heading, *lines = str(table).splitlines()
        assert heading.split() == list(table[0])
        assert [line.split()[0] for line in lines] == [next(iter(row.values())) for row in table]
        assert json.loads(json.dumps(table)) == table
    assert str(comparison.table()).split()[-2:] == ["–", "0.123"]


def test_several_runs_are_put_on_one_page(run, tmp_path):
    pf.federate(small_clients(), "local", rounds=2, workers=0, out=tmp_path / "local", progress=False)
    page = pf.write_report([run, tmp_path / "local"], out=tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert "fedavg" in text
    assert "local" in text
    assert pf.write_report(pf.load(run.out)) == run.out / "report.html"
    with pytest.raises(pf.UserError, match=r'kept in memory; say where the page goes, report\("page.html"\)'):
        pf.write_report([run, replace(run, out=None)])
    unsaved = pf.federate(small_clients(), "local", rounds=2, workers=0, progress=False)
    pages = unsaved.report(tmp_path / "unsaved.html"), pf.load(tmp_path / "local").report()
    assert len({page.read_text(encoding="utf-8").count("<td") for page in pages}) == 1
    with pytest.raises(pf.UserError, match="does not exist"):
        pf.write_report(tmp_path / "nothing")


def test_an_unfinished_run_is_read(run, tmp_path):
    (tmp_path / "config.yaml").write_bytes((run.out / "config.yaml").read_bytes())
    files = RunFiles.read(tmp_path)
    assert not files.is_finished
    assert pf.load(tmp_path).files.describe() == "fedavg, 0 clients, 0 of 2 rounds, not evaluated"
    with pytest.raises(pf.UserError, match="no round of this run has been evaluated"):
        pf.load(tmp_path).table()


@pytest.mark.thorough
def test_a_comparison_prints_its_answers(tmp_path):
    words = {"tune": "none", "references": False, "parallel": 1, "quiet": True}
    made = pf.compare(small_clients(2), ["fedprox"], rounds=1, seeds=[0, 1], out=tmp_path / "c", **words)
    assert pf.load(tmp_path / "c").results == pf.load(str(tmp_path / "c")).results
    assert str(pf.load(tmp_path / "c")) == str(made) != repr(made)
    assert all(f"not decided  {name}" in str(made) for name in ("mean over clients", *made.results["clients"]))
    assert "\n" not in repr(made)


def test_an_attribute_that_is_not_there_suggests_the_nearest(run):
    comparison = Comparison({"methods": {}, "best": "fml"})
    for holder, name, near in (
        (run, "predict_proba", r"'Run' object has no attribute 'predict_proba'; did you mean predict_table\?"),
        (run, "models", r"'Run' object has no attribute 'models'; did you mean model\?"),
        (pf.load(run.out), "hystory", r"'SavedRun' object has no attribute 'hystory'; did you mean history\?"),
        (comparison, "runs", r"'Comparison' object has no attribute 'runs'; did you mean run\?"),
        (comparison, "best", r"did you mean results\['best'\]\?"),
        (comparison, "_ipython_canary", "no attribute '_ipython_canary'$"),
    ):
        with pytest.raises(AttributeError, match=near):
            getattr(holder, name)
    assert copy.copy(run) == run
    assert pickle.loads(pickle.dumps(comparison)) == comparison  # noqa: S301  # made a moment ago


def test_the_version_is_that_of_the_command():
    from importlib.metadata import version

    assert pf.__version__ == version("polyfed")
    assert "__version__" in dir(pf)
