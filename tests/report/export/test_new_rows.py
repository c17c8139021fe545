"""Rows that come after the run are read as the run's table was, by polyfed and by the script of an export."""

import json
import shutil
import warnings

import pytest
import torch

import polyfed as pf
from polyfed.cli.main import main
from polyfed.models import ModelSpec
from polyfed.report.export.folder import export_model

from .test_export import module_of


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """A run made in Python of a table in which 0 and -9 stand for no value, and the folder of its network."""
    folder = tmp_path_factory.mktemp("codes")
    rows = [f"{40 + n};{(180 + n) * (n % 3 > 0)};{n % 2};north" for n in range(24)]
    (folder / "rows.csv").write_text("\n".join(["age;chol;ill;hospital", *rows]) + "\n")
    sites = pf.data.split_table(folder / "rows.csv", "ill", "hospital", missing=["chol=0", "-9"], delimiter=";")
    clients = sites.build_clients(ModelSpec("mlp", {}, (sites.num_features,), sites.num_outputs))
    run = pf.federate(clients, "local", rounds=1, workers=0, out=folder / "run")
    export_model(folder / "run", "north", folder / "out")
    return run, folder


def test_what_stands_for_no_value_does_so_in_new_rows_wherever_they_are_predicted(codes, tmp_path, capsys):
    run, folder = codes
    wanted = run.predict("north", [{"age": 50, "chol": None}, {"age": 51, "chol": None}, {"age": None, "chol": 200}])
    new = tmp_path / "new.csv"
    new.write_text("age;chol\n50;0\n51;0.0\n-9.0;200\n")
    assert torch.equal(run.predict("north", str(new)), wanted)
    inputs = module_of(folder / "out" / "inputs.py")
    outputs = torch.jit.load(str(folder / "out" / "network.ts"))(torch.from_numpy(inputs.of_csv(new)))
    assert torch.allclose(outputs, wanted, atol=1e-6)
    for place in ("run", "out"):
        assert main(["predict", str(folder / place), str(new), "--out", str(tmp_path / f"{place}.csv")]) == 0
        lines = (tmp_path / f"{place}.csv").read_text().splitlines()[1:]
        found = [float(line.split(",")[-1]) for line in lines]
        assert found == pytest.approx(wanted.softmax(1)[:, 1].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "text",
    ["age;chol\ninf;1\n", "age;chol\n1e40;1\n", "age;age;chol\n1;2;3\n", "age;chol\n1\n", "age;chol\n1;2;3\n",
     "age;chol\nold;1\n", "age\n1\n", "age;chol\n", ""],
)  # fmt: skip
def test_what_polyfed_refuses_the_script_of_an_export_refuses(codes, tmp_path, text):
    run, folder = codes
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(pf.UserError):
        run.predict("north", tmp_path / "new.csv")
    with pytest.raises(ValueError, match=r"row|column|names|numbers"):
        module_of(folder / "out" / "inputs.py").of_csv(tmp_path / "new.csv")


def test_numbers_in_another_unit_are_told(codes):
    with pytest.warns(UserWarning, match=r"'age' is typically more than 10 standard deviations away.*same unit"):
        codes[0].predict("north", {"age": [600.0, 720.0], "chol": [200.0, 210.0]})  # months
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes[0].predict("north", {"age": [60.0, 600.0, 50.0], "chol": [200.0, 210.0, None]})


@pytest.mark.parametrize("name", ["north.safetensors", "north.preprocessing.json"])
def test_a_model_that_was_changed_is_neither_used_nor_exported(codes, tmp_path, capsys, name):
    run = shutil.copytree(codes[1] / "run", tmp_path / "run")
    file = run / "models" / name
    content = bytearray(file.read_bytes())
    content[content.rindex(b"0")] ^= 1
    file.write_bytes(content)
    assert main(["predict", str(run), str(codes[1] / "rows.csv")]) == 2
    assert f"{name} was changed since the run wrote it" in capsys.readouterr().err
    with pytest.raises(pf.UserError, match="was changed since the run wrote it"):
        export_model(run, "north", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_whose_preprocessing_is_of_another_model_is_refused(codes, tmp_path, capsys):
    folder = shutil.copytree(codes[1] / "out", tmp_path / "out")
    content = json.loads((folder / "preprocessing.json").read_text())
    content |= {"columns": content["columns"][:1], "mean": [50.0], "spread": [1.0]}
    (folder / "preprocessing.json").write_text(json.dumps(content))
    assert main(["predict", str(folder), str(codes[1] / "rows.csv")]) == 2
    assert "gives 1 features, and its network takes [3]" in capsys.readouterr().err
