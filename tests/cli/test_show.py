"""`polyfed show`, and `--json` of `show`, `list` and `data`."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.cli.commands.list_command import ListedChoices
from polyfed.cli.commands.results.show_command import ShownDirectory, describe_directory
from polyfed.cli.main import main
from polyfed.core.io.values.validation import validation_error
from polyfed.testing import small_clients


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    here = tmp_path_factory.mktemp("show")
    words = {"tune": "none", "references": False, "parallel": 1, "quiet": True}
    pf.federate(small_clients(), pf.algorithms.FedAvg(), rounds=1, workers=0, out=here / "run", progress=False)
    pf.compare(small_clients(2), ["fedprox"], rounds=1, seeds=[0], out=here / "comparison", **words)
    for kind, file in (("run", "config.yaml"), ("comparison", "comparison.yaml")):
        (here / f"begun-{kind}").mkdir()
        (here / f"begun-{kind}" / file).write_bytes((here / kind / file).read_bytes())
    manifest = json.loads((here / "run" / "manifest.json").read_text())
    (here / "begun-run" / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "files"}))
    return here


@pytest.mark.parametrize("name", ["run", "comparison", "begun-run", "begun-comparison"])
def test_what_is_shown_has_the_documented_schema(folders, capsys, name):
    assert main(["show", str(folders / name), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert validation_error(content, ShownDirectory) is None
    assert content == json.loads(json.dumps(describe_directory(folders / name)))
    assert content["finished"] == (not name.startswith("begun"))
    assert content["format"] == 1
    assert content["next"]


def test_if_all_methods_diverge_the_first_is_told_and_the_directory_says_why(tmp_path, capsys):
    words = {"rounds": 1, "seeds": [0], "tune": "none", "references": False, "parallel": 1, "quiet": True}
    why = "lower lr or set clip_norm (method local, seed 0)"
    with pytest.raises(pf.ClientError, match=re.escape(why)):
        pf.compare(small_clients(2), [pf.algorithms.FedAvg(lr=1e38, local_epochs=3)], out=tmp_path / "c", **words)
    assert main(["report", str(tmp_path / "c")]) == 2
    assert f"{why}; change that, and give another --out" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "c")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "failed local: " in text
    assert "go on: " not in text


def test_a_comparison_shows_answers_a_table_its_files_and_what_to_do(folders, capsys):
    assert main(["show", str(folders / "comparison")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "fedprox",
        "comparison.json",
        "go on: polyfed report",
        "finished: 4 of 4 runs are done",
        "training alone",
        " accuracy in % ",
    ):
        assert part in text


def test_a_run_that_predicts_one_class_alone_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{37 * k % 63}.5,{int(k % 20 < 2)},{'north' if k < 100 else 'south'}" for k in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ill,site", *rows]))
    words = [
        "--data.target",
        "ill",
        "--data.site",
        "site",
        "--rounds",
        "2",
        "--algorithm.lr",
        "0.1",
        "--out",
        "r",
        "-q",
    ]
    assert main(["run", "t.csv", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fedavg scores as if it always predicted the most frequent class at north, south." in text
    assert "Accuracy says little where most test examples are of one class (90 % at north): --metrics auc" in text


def test_show_ends_with_what_run_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--data.clients", "3", "--data.unseen", "1", "--data.examples-per-client", "20", "--baselines", "[local]"]
    assert (
        main(["run", "--data", "digits", *words, "--rounds", "2", "--out", "r", "--quiet", "--algorithm", "fedprox"])
        == 0
    )
    end = capsys.readouterr().out
    assert main(["show", "r"]) == 0
    assert capsys.readouterr().out.endswith(end)
    for part in (
        "gain: of fedprox over local",
        "classes",
        "took no part",
        "Decide: polyfed comp",
    ):
        assert part in end
    assert main(["show", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next"] == ["polyfed report r", "polyfed compare r"]


def test_compare_as_json_has_the_documented_schema(tmp_path, monkeypatch, capsys):
    from polyfed.cli.commands.compare.compare_command import ShownPlan

    monkeypatch.chdir(tmp_path)
    words = [
        "--data.clients",
        "2",
        "--data.examples-per-client",
        "30",
        "--resplit",
        "2",
        "--rounds",
        "1",
        "--tune",
        "none",
    ]
    words = [
        "compare",
        "--data",
        "digits",
        *words,
        "--parallel",
        "1",
        "--no-references",
        "--out",
        "c",
        "--json",
        "--quiet",
    ]
    assert main([*words, "--plan"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert validation_error(plan, ShownPlan) is None
    assert plan.keys() == ShownPlan.__required_keys__
    assert not Path("c").exists()
    for command in (words, ["compare", "c", "--json", "--quiet"]):
        assert main(command) == 0
        content = json.loads(capsys.readouterr().out)
        assert validation_error(content, ShownDirectory) is None
        assert content == json.loads(json.dumps(describe_directory(Path("c"))))


def test_the_words_of_an_answer_in_python_are_in_the_table_of_json():
    page = Path(__file__, "../../../docs/json.md").resolve().read_text(encoding="utf-8")
    rows = re.findall(r"^\| `answer`.*?^$", page, re.MULTILINE | re.DOTALL)[0]
    shared = re.findall(r"^\| (`client`, .*) \| the same \|$", page, re.MULTILINE)[0]
    words = re.findall(r"`(\w+)`", shared) + re.findall(
        r"`(\w+)`", " ".join(r.split("|")[2] for r in rows.splitlines())
    )
    assert sorted(words) == sorted(field.name for field in dataclasses.fields(pf.Answer))


def test_an_unfinished_run_says_how_to_go_on(folders, capsys):
    assert main(["show", str(folders / "begun-run")]) == 0
    assert f"go on: polyfed resume {folders / 'begun-run'}" in capsys.readouterr().out.replace("\n", "")
    assert main(["show", str(folders / "begun-comparison")]) == 0
    said = "not finished: 0 of 4 runs are done, and 0 runs of the search"
    assert said in capsys.readouterr().out.replace("\n", " ")


def test_an_interrupted_search_is_counted(folders, tmp_path, capsys):
    shutil.copytree(folders / "begun-comparison", tmp_path / "c")
    shutil.copytree(folders / "run", tmp_path / "c" / "tuning" / "fedavg" / "lr=0.1")
    assert main(["show", str(tmp_path / "c")]) == 0
    assert "not finished: 0 of 4 runs are done, and 1 run of the search" in capsys.readouterr().out.replace("\n", " ")


def test_a_finished_comparison_is_resumed_as_json(folders, capsys):
    assert main(["resume", str(folders / "comparison"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"]


def test_a_subgroup_that_is_not_there_is_refused_before_anything_is_printed(folders, capsys):
    assert main(["report", str(folders / "comparison"), "--subgroup", "sex"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--subgroup 'sex': the test examples have no such column; the predictions have none other" in err
    assert "Name it before training (--data.subgroups sex)" in " ".join(err.split())


def test_a_finished_directory_does_not_advise_to_resume_it(folders, capsys):
    words = ["run", "--data", "blobs", "--out"]
    assert main([*words, str(folders / "run")]) == 2
    folder = folders / "run"
    more = f"polyfed.resume('{folder}', clients=..., rounds=N)"  # its clients were made in Python
    sentence = f"its run is finished (polyfed show {folder}; more rounds: {more}); choose"
    assert sentence in capsys.readouterr().err
    assert main([*words, str(folders / "begun-run")]) == 2
    assert "is not empty; continue it with" in capsys.readouterr().err


def test_a_run_without_a_manifest_says_so_and_shows_columns_that_fit(folders, capsys, tmp_path):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folders / "run" / name).read_bytes())
    assert main(["show", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "manifest.json is missing or damaged" in text
    assert "go on: polyfed report" in text, "polyfed resume refuses such a directory"
    assert "trained on" in text
    assert "…" not in text
    assert "val_" not in text


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 2
    assert "holds neither a run (config.yaml) nor a comparison" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["resume", "show", "report", "audit", "predict", "export", "warmstart"])
def test_a_directory_that_does_not_exist_is_said_to_be_missing(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    more = {"predict": [__file__], "export": ["--client", "a", "--out", "b"]}.get(command, [])
    assert main([command, "foldr", *more]) == 2
    assert capsys.readouterr().err == "polyfed: foldr does not exist; did you mean folder?\n"


@pytest.mark.parametrize("words", [["export", "--client", "a", "--out", "b"], ["predict", __file__], ["audit"]])
def test_a_comparison_is_refused_with_one_of_its_runs_where_a_run_is_needed(tmp_path, capsys, words):
    (tmp_path / "comparison.yaml").touch()
    words = [words[0], str(tmp_path), *words[1:]]
    assert main(words) == 2
    assert f"is a comparison; give one of its runs, such as {tmp_path}/METHOD/seed-0" in capsys.readouterr().err
    (tmp_path / "fedavg/seed-3").mkdir(parents=True)
    (tmp_path / "fedavg/seed-3/config.yaml").touch()
    assert main(words) == 2
    assert f"such as {tmp_path}/fedavg/seed-3\n" in capsys.readouterr().err


def test_show_imports_no_torch(folders):
    code = (
        "import sys; from polyfed.cli.main import main; "
        f"main(['show', {str(folders / 'run')!r}]); main(['show', {str(folders / 'comparison')!r}, '--json']); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_list_as_json_has_the_documented_schema(capsys):
    assert main(["list", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert validation_error(content, ListedChoices) is None
    assert {"fedavg", "flha_ghn"} <= {entry["name"] for entry in content["algorithms"]}
    assert main(["list", "models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"format", "models"}


def test_data_as_json_has_the_documented_schema(capsys, tmp_path, monkeypatch):
    from polyfed.cli.commands.run.class_counts_table import ShownClient

    monkeypatch.chdir(tmp_path)
    words = ["--data", "digits", "--data.clients", "2", "--data.examples-per-client", "20"]
    assert main(["data", *words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content.keys() == {"format", "class_names", "partition", "clients"}
    assert validation_error(content["clients"], list[ShownClient]) is None
    assert [client["train"] for client in content["clients"]] == [sum(c["classes"]) for c in content["clients"]]
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_the_encoding_of_the_output_lacks_is_escaped_and_ends_nothing(tmp_path):
    clients = [pf.Client("Zürich", c.model, c.train, c.test) for c in small_clients(1)]
    pf.federate(clients, "local", rounds=1, workers=0, out=tmp_path / "run", quiet=True)
    command = [sys.executable, "-m", "polyfed", "show", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, "Z\\xfcrich" in done.stdout, done.stderr) == (0, True, "")
