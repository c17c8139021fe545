"""A network to take away: the folder gives what the run gives, without polyfed and without the data, or is not written."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Normalise
from polyfed.data.tabular.table_reader import read_table
from polyfed.models import ModelSpec
from polyfed.report.export import formats
from polyfed.report.export.folder import ExportedModel, export_model
from polyfed.report.export.standalone_module import StandaloneModule, draw_random_inputs
from polyfed.report.export.trained_model import read_trained_model, trained_model_of_run
from polyfed.simulation.results.saved_model import load_saved_model
from polyfed.testing import small_clients

CSV = """age;sex;lab;code;outcome;hospital
61,5;f;2,5;1;no;north
;m;NA;2;yes;north
70;f;-1;1;yes;north
55;;0,25;2;no;north
61;f;2;3;no;south
80;m;1,5;2;yes;south
70,25;f;-1;1;yes;south
;m;0,25;2;no;south
"""
NEW = """lab;sex;age;code
unknown;f;50;1
3,5;x;;2
-1;;61,75;9
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A run of the command line on a table, by folder."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "patients.csv").write_text(CSV.replace("NA", "unknown"))
    (folder / "new.csv").write_text(NEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = [
            "--data",
            "table",
            "--data.path",
            "patients.csv",
            "--data.target",
            "outcome",
            "--data.site",
            "hospital",
        ]
        words += ["--data.decimal", ",", "--data.missing", "unknown", "--data.categorical", "code"]
        words += ["--rounds", "2", "--quiet", "--workers", "0", "--data.test-fraction", "0.5", "--out", "run"]
        with pytest.warns(UserWarning, match="networks get 0: site 'north': 'age'"):  # of its two training rows
            assert main(["run", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def images():
    """A run of two clients with pictures of uint8, networks by a spec and by a function."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (24, 1, 8, 8), generator=draw, dtype=torch.uint8)
    data = pf.Examples(x, torch.arange(24) % 3, transform=Normalise((0.3,), (0.2,)))
    one, two, three, four = (data.select(rows) for rows in torch.arange(24).split(6))
    spec = ModelSpec("cnn_small", {}, (1, 8, 8), 3)
    clients = [pf.Client("a/b", spec, one, two), pf.Client("b", lambda: spec(), three, four)]
    return pf.federate(clients, "local", rounds=1, workers=0)


def module_of(file):
    """A Python file as a module, as one would import it who has nothing else."""
    spec = importlib.util.spec_from_file_location(f"exported_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:column")
def test_a_table_goes_out_and_gives_the_same_without_polyfed(table, monkeypatch, capsys):
    monkeypatch.chdir(table)
    assert main(["export", "run", "--client", "north", "-o", "out/north"]) == 0
    folder = table / "out/north"
    wanted = load_saved_model("run", "north").predict(read_table("new.csv", missing=["unknown"], decimal=","))
    assert ExportedModel(folder).predict(read_table("new.csv", missing=["unknown"], decimal=",")) == wanted
    text = (folder / "inputs.py").read_text()
    assert "polyfed" not in text
    inputs = module_of(folder / "inputs.py")
    rows = torch.from_numpy(inputs.of_csv("new.csv"))
    prepared = load_saved_model("run", "north").prepared
    stored = prepared.encode(read_table("new.csv", missing=["unknown"], decimal=","))
    assert torch.equal(torch.nan_to_num(rows, -7.0), torch.nan_to_num(stored, -7.0))
    Path("marked.csv").write_text(
        Path("new.csv").read_text(encoding="utf-8"), encoding="utf-8-sig"
    )  # as Excel saves it
    assert inputs.of_csv("marked.csv").tobytes() == rows.numpy().tobytes()
    shares = torch.jit.load(str(folder / "network.ts"))(rows).softmax(1)
    for i, name in enumerate(inputs.NAMES):
        assert shares[:, i].tolist() == pytest.approx(wanted[f"probability of {name}"], abs=1e-6)
    capsys.readouterr()
    assert main(["predict", "out/north", "new.csv", "--out", "one.csv"]) == 0
    assert main(["predict", "run", "new.csv", "--client", "north", "--out", "two.csv"]) == 0
    assert (table / "one.csv").read_text() == (table / "two.csv").read_text()


def test_the_card_has_what_one_must_know(table):
    folder = export_model(table / "run", "south", table / "carded", format="weights")
    told = (folder / "README.md").read_text()
    for word in ("McMahan", "| training | 2 |", "| test | 2 |", "2 rounds", "weights: a network's weights after training",
                 "age, sex, lab, code", "In this order: no, yes", "| accuracy |",
                 "| accuracy of always predicting the most frequent class |", "## Limits of use"):  # fmt: skip
        assert word in told, word
    signature = json.loads((folder / "signature.json").read_text())
    assert signature["inputs"] == [{"name": "rows", "shape": [4], "dtype": "float64", "normalise": None}]
    assert signature["outputs"]["shape"] == [2]
    assert signature["classes"] == ["no", "yes"]


def test_the_lines_of_the_card_run(images, tmp_path, monkeypatch, capsys):
    folder = export_model(images, "a/b", tmp_path / "pictures")
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    with pytest.warns((DeprecationWarning, FutureWarning), match="TorchScript|torch.jit"):
        exec(compile(code, "card", "exec"), {})  # noqa: S102
    assert "tensor" in capsys.readouterr().out
    assert len(code.splitlines()) <= 5


def test_what_is_written_is_the_network_with_its_preprocessing(images, tmp_path):
    trained = trained_model_of_run(images, "b")
    whole = StandaloneModule(trained).eval()
    x = draw_random_inputs(trained, 4, seed=3)[0]
    assert x.dtype == torch.uint8
    assert torch.equal(whole.ready[0](x), Normalise((0.3,), (0.2,))(x))
    assert torch.allclose(whole(x), images.predict("b", x), atol=1e-6)
    assert trained.signature["network"] is None
    assert trained_model_of_run(images, "a/b").signature["network"]["name"] == "cnn_small"


def test_targets_of_regression_come_in_their_unit():
    draw = np.random.default_rng(0)
    frame = {"a": draw.normal(size=30), "cost": 1000 + 200 * draw.normal(size=30), "town": ["n", "s"] * 15}
    sites = pf.data.split_table(frame, "cost", "town")
    run = pf.federate(sites.build_clients(lambda: nn.Linear(1, 1)), "local", rounds=1, workers=0)
    rows = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
    found = StandaloneModule(trained_model_of_run(run, "n")).eval()(rows)
    wanted = run.predict("n", {"a": [0.5, -1.0]})
    assert torch.allclose(found, wanted)
    assert found.mean() > 100


def test_a_column_that_did_not_vary_is_0_in_what_is_taken_away_too(tmp_path):
    draw = np.random.default_rng(0)
    frame = {"a": draw.normal(size=30), "chol": np.zeros(30), "ill": [0, 1] * 15}
    sites = pf.data.split_table(frame, "ill", None, name="n")
    run = pf.federate(sites.build_clients(lambda: nn.Linear(2, 2)), "local", rounds=1, workers=0)
    rows = torch.tensor([[0.5, 0.0], [0.5, 240.0]], dtype=torch.float64)
    found = StandaloneModule(trained_model_of_run(run, "n")).eval()(rows)
    assert torch.equal(found[0], found[1])
    folder = export_model(run, "n", tmp_path / "out")
    assert torch.equal(torch.jit.load(str(folder / "network.ts"))(rows), found)


class Structured(nn.Module):
    """Takes two inputs by name, and returns what transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, image, more):
        return {"logits": self.layer(torch.cat([image.flatten(1), more[0]], 1)), "loss": None}


def test_several_inputs_are_flat_tensors_with_names(tmp_path):
    draw = torch.Generator().manual_seed(0)
    image = torch.randint(256, (12, 1, 2, 2), generator=draw, dtype=torch.uint8)
    x = {"image": image, "more": (torch.randn(12, 1, generator=draw),)}
    y = torch.arange(12) % 2
    parts = [
        ({"image": x["image"][rows], "more": (x["more"][0][rows],)}, y[rows]) for rows in torch.arange(12).split(6)
    ]
    run = pf.federate([pf.Client("a", Structured, *parts)], "local", rounds=1, workers=0)
    trained = trained_model_of_run(run, "a")
    assert [(one["name"], one["dtype"]) for one in trained.signature["inputs"]] == [
        ("image", "uint8"),
        ("more/0", "float32"),
    ]
    assert trained.signature["tree"] == {"image": 0, "more": [1]}
    found = StandaloneModule(trained).eval()(image, x["more"][0])
    assert torch.allclose(found, run.predict("a", x), atol=1e-6)
    content, shape, checked = formats.serialize_network(trained, "torchscript")
    assert content
    assert (shape, checked) == ((2,), True)


class Jumps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x):
        return self.layer(x.flatten(1)) * (2 if len(x) > 2 else 1)


def test_a_way_that_depends_on_the_inputs_is_refused(tmp_path):
    x = torch.rand(6, 1, 8, 8)
    run = pf.federate(
        [pf.Client("a", Jumps, (x[:3], torch.arange(3)), (x[3:], torch.arange(3)))], "local", rounds=1, workers=0
    )
    with pytest.raises(
        UserError, match=r"cannot be written as torchscript .*other outputs for 3 examples.*format='weights'"
    ):
        export_model(run, "a", tmp_path / "a")
    assert not list(tmp_path.iterdir())
    assert export_model(run, "a", tmp_path / "a", format="weights").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--client", "nort", "--to", "x"], "no model of client 'nort'; did you mean north"),
        (["run", "--to", "x"], "has models of several clients; give --client with one of north, south"),
        (["run", "--client", "north", "--to", "patients.csv"], "patients.csv exists; choose another folder"),
        (["run", "--client", "north"], "needs a folder to create: --out FOLDER"),
        (["run", "--client", "north", "--to", "x", "--format", "pickle"], "unknown format 'pickle'"),
        (["run", "--client", "north", "--to", "x", "--form", "onnx"], "unknown option --form; did you mean --format"),
        (["nothing", "--client", "north", "--to", "x"], "nothing does not exist"),
        (["run", "south", "--to", "x"], "takes one run directory, got run and south"),
        (["run", "--client", "north", "--to", "x", "--model", "no_such:net"], "there is no module 'no_such'"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(table, monkeypatch, capsys, words, message):
    monkeypatch.chdir(table)
    before = sorted(path.name for path in table.iterdir())
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in table.iterdir()) == before


def test_a_run_of_python_needs_its_network(tmp_path):
    x, y = torch.rand(6, 4), torch.arange(6) % 2
    client = pf.Client("a", lambda: nn.Linear(4, 2), (x[:3], y[:3]), (x[3:], y[3:]))
    run = pf.federate([client], "local", rounds=1, workers=0, out=tmp_path / "r")
    with pytest.raises(UserError, match="were made in Python, and only that can build them"):
        export_model(tmp_path / "r", "a", tmp_path / "a")
    again = read_trained_model(tmp_path / "r", None, lambda: nn.Linear(4, 2))
    assert torch.equal(again.network.weight, run.model("a").weight)
    with pytest.raises(UserError, match="is not the one that was trained"):
        read_trained_model(tmp_path / "r", "a", lambda: nn.Linear(4, 3))
    (tmp_path / "r/config.yaml").unlink()  # as in a site's folder
    alone = export_model(tmp_path / "r", "a", tmp_path / "site", model=lambda: nn.Linear(4, 2), format="weights")
    assert "the run's method is in the records of the server" in (alone / "README.md").read_text()
    (tmp_path / "r/models/a.signature.json").unlink()
    with pytest.raises(UserError, match="as that of an older polyfed: `polyfed resume"):
        export_model(tmp_path / "r", "a", tmp_path / "a")


def test_a_failure_while_writing_leaves_nothing(images, tmp_path, monkeypatch):
    from contextlib import contextmanager

    from polyfed.report.export import folder

    @contextmanager
    def full(path, **words):
        raise OSError(28, "No space left on device", str(path))
        yield

    monkeypatch.setattr(folder, "open_file_for_overwrite", full)
    with pytest.raises(UserError, match=r"cannot write .* \(No space left on device\)"):
        export_model(images, "b", tmp_path / "b", format="weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:columns that had one value")
def test_code_in_an_exported_folder_needs_the_word(table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(table)
    folder = export_model("run", "north", tmp_path / "n")
    content = json.loads((folder / "signature.json").read_text())
    (folder / "signature.json").write_text(json.dumps({**content, "network": None}))
    assert main(["predict", str(folder), "new.csv"]) == 2
    assert "network.ts alone, which is code; if you trust who wrote it, give --trust-code" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="which the table of the run did not have"):
        assert main(["predict", str(folder), "new.csv", "--trust-code"]) == 0
    assert "probability of yes" in capsys.readouterr().out
    (folder / "signature.json").write_text('{"client": 3}')
    assert main(["predict", str(folder), "new.csv"]) == 2
    assert "signature.json is damaged" in capsys.readouterr().err


def test_pictures_are_not_predicted_from_a_file(images, tmp_path, capsys):
    folder = export_model(images, "b", tmp_path / "b", format="weights")
    (tmp_path / "x.csv").write_text("a\n1\n")
    assert main(["predict", str(folder), str(tmp_path / "x.csv")]) == 2
    assert "takes images, and polyfed predict reads tables" in capsys.readouterr().err


@pytest.mark.slow
def test_the_network_of_a_search_is_built_by_its_method(tmp_path):
    x, y = torch.rand(16, 3, 8, 8), torch.arange(16) % 2
    method = pf.algorithms.FedPNAS(channels=2, base_cells=1, base_nodes=1, personal_nodes=1)
    clients = [pf.Client(n, None, (x[i : i + 4], y[:4]), (x[i + 4 : i + 8], y[:4])) for n, i in (("a", 0), ("b", 8))]
    run = pf.federate(clients, method, rounds=1, workers=0, out=tmp_path / "r")
    one, two = trained_model_of_run(run, "a"), read_trained_model(tmp_path / "r", "a")
    inputs = draw_random_inputs(one, 3, seed=1)
    assert torch.equal(StandaloneModule(one).eval()(*inputs), StandaloneModule(two).eval()(*inputs))
    folder = export_model(tmp_path / "r", "a", tmp_path / "a", format="weights")
    assert (folder / "description.json").is_file()
    (tmp_path / "r/models/a.json").unlink()
    with pytest.raises(UserError, match="the method builds its network from it"):
        read_trained_model(tmp_path / "r", "a")


@pytest.fixture
def onnx(monkeypatch):
    """Packages that record what they are asked; the network itself answers."""
    asked = types.SimpleNamespace(exported=None, checked=None, sessions=0, off=0.0)

    def export(whole, inputs, stream, **words):
        asked.exported, asked.whole = words, whole
        stream.write(b"onnx bytes")

    class Session:
        def __init__(self, content, providers):
            assert content == b"onnx bytes"
            asked.sessions += 1

        def run(self, outputs, given):
            with torch.no_grad():
                return [asked.whole(*map(torch.from_numpy, given.values())).numpy() + asked.off]

    def module(name, **content):
        found = types.ModuleType(name)
        found.__dict__.update(content)
        found.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, found)

    checker = types.SimpleNamespace(check_model=lambda content: setattr(asked, "checked", content))
    module("onnx", checker=checker)
    module("onnxruntime", InferenceSession=Session)
    monkeypatch.setattr(torch.onnx, "export", export)
    return asked


def test_onnx_is_compared_by_its_runtime(images, tmp_path, onnx, monkeypatch):
    folder = export_model(images, "b", tmp_path / "b", format="onnx")
    assert (folder / "network.onnx").read_bytes() == onnx.checked == b"onnx bytes"
    assert onnx.exported["input_names"] == ["images"]
    assert onnx.exported["dynamic_axes"] == {"images": {0: "n"}, "outputs": {0: "n"}}
    assert onnx.sessions == 1
    assert "onnxruntime.InferenceSession('network.onnx')" in (folder / "README.md").read_text()
    onnx.off = 0.5
    with pytest.raises(UserError, match=r"cannot be written as onnx .*other outputs"):
        export_model(images, "b", tmp_path / "c", format="onnx")
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    folder = export_model(images, "b", tmp_path / "c", format="onnx")
    assert "onnxruntime was not installed" in (folder / "README.md").read_text()


def test_without_onnx_it_is_said(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"format onnx needs the package onnx.*polyfed\[export\]"):
        export_model(images, "b", tmp_path / "b", format="onnx")


@pytest.mark.parametrize("buffers", ["local", "average"])
@pytest.mark.one_case
def test_the_card_of_a_client_that_never_took_part_says_so(tmp_path, buffers):
    method = pf.algorithms.FedAvg(buffers=buffers)
    run = pf.federate(small_clients(4), method, rounds=1, clients_per_round=1, workers=0, out=tmp_path / "run")
    took = {i for record in run.history for i, row in record["clients"].items() if "train_loss" in row}
    assert len(took) == 1
    for client in run.federation.clients:
        for source, place in ((run, "of_run"), (tmp_path / "run", "of_directory")):
            folder = export_model(
                source, client, tmp_path / f"{client}-{place}", format="weights",
                **({} if source is run else {"model": run.federation.clients[client].model}),
            )  # fmt: skip
            told = (folder / "README.md").read_text()
            assert ("never trained it" in told) == (client not in took)
            assert ("trained by `fedavg`" in told) == (client in took)
            assert ("estimated on the training examples" in told) == (client not in took and buffers == "local")
