"""From a CSV file to an answer by the command line: run, page, prediction; networks by the names of sites."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest

import polyfed as pf
from polyfed.cli.commands.results.predict_command import PredictedRows
from polyfed.cli.main import main
from polyfed.comparison.storage.load import load
from polyfed.core.io.values.validation import validation_error
from polyfed.simulation.storage.directory import read_config, read_metrics


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    with open("patients.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "sex", "score", "outcome", "hospital"])
        for i in range(120):
            age = draw.normal(60, 10)
            ill = "yes" if age + draw.normal(0, 5) > 60 else "no"
            site = ["St. Mary", "north", "south"][i % 3]
            writer.writerow(["" if i % 9 == 0 else round(age, 3), "fm"[i % 2], round(draw.normal(), 4), ill, site])
    return tmp_path


RUN = [
    "run",
    "--data",
    "table",
    "--data.path",
    "patients.csv",
    "--data.target",
    "outcome",
    "--rounds",
    "3",
    "--quiet",
    "--algorithm.lr",
    "0.5",
]
BY_SITE = [*RUN, "--data.site", "hospital"]


def test_a_csv_file_is_run_and_its_models_predict(table, capsys):
    assert main([*BY_SITE, "--algorithm", "local", "--metrics", "auc,accuracy", "--out", "r"]) == 0
    assert read_config("r")["data"]["partition"] == {"name": "natural", "column": "hospital", "order": "all"}
    record = read_metrics(table / "r/metrics.jsonl")[-1]
    assert sorted(record["clients"]) == ["St. Mary", "north", "south"]
    assert record["summary"]["auc"]["mean"] > 0.7
    assert "St. Mary" in capsys.readouterr().out
    assert main(["predict", "r", "patients.csv", "--client", "St. Mary"]) == 0
    assert "probability of yes" in capsys.readouterr().out
    (table / "patients.csv").rename(table / "new.csv")  # the data of the run are not needed
    assert main(["predict", "r", "new.csv", "--client", "north", "--out", "answers.csv"]) == 0
    answers = list(csv.DictReader((table / "answers.csv").read_text().splitlines()))
    assert [int(row["row"]) for row in answers] == list(range(1, 121))
    assert {row["predicted"] for row in answers} == {"yes", "no"}
    assert all(abs(float(row["probability of yes"]) + float(row["probability of no"]) - 1) < 1e-9 for row in answers)


def test_a_column_that_did_not_vary_in_training_is_told_of_when_it_varies_later(table, capsys):
    lines = (table / "patients.csv").read_text().splitlines()
    for name, chol in (("patients.csv", "0"), ("new.csv", "240")):
        (table / name).write_text("\n".join([f"chol,{lines[0]}", *(f"{chol},{line}" for line in lines[1:])]))
    assert main([*BY_SITE, "--algorithm", "local", "--out", "r"]) == 0
    assert main(["predict", "r", "patients.csv", "--client", "north", "--out", "answers.csv"]) == 0
    with pytest.warns(UserWarning, match="networks get 0: the rows for client 'north': 'chol'"):
        assert main(["predict", "r", "new.csv", "--client", "north", "--out", "later.csv"]) == 0
    assert (table / "later.csv").read_text() == (table / "answers.csv").read_text()


def test_each_row_is_predicted_by_the_network_of_its_site(table, capsys):
    assert main([*BY_SITE, "--algorithm", "local", "--rounds", "1", "--out", "r"]) == 0
    assert main(["predict", "r", "patients.csv", "--out", "each.csv"]) == 0
    each, rows = ((table / name).read_text().splitlines() for name in ("each.csv", "patients.csv"))
    for site in ("St. Mary", "north", "south"):
        assert main(["predict", "r", "patients.csv", "--client", site, "--out", f"{site}.csv"]) == 0
        by_site = (table / f"{site}.csv").read_text().splitlines()
        assert [row == of_site for row, of_site in zip(each, by_site, strict=True)] == [
            line.endswith(f",{site}") or not place for place, line in enumerate(rows)
        ]
    written = pf.load("r").predict_table("patients.csv")
    assert [line.split(",")[1] for line in each[1:]] == [f'"{name}"' for name in written["predicted"]]
    capsys.readouterr()
    for name, old, new, refusal in (
        ("no site", "hospital", "ward", "of St. Mary, north, south, or a table with the column 'hospital', for the"),
        ("empty", ",south", ",", "site: column 'hospital' has no value in rows 3, 6, 9, 12, 15 and 35 more"),
        ("other", ",north", ",norht", "and 35 more: no client of this run is called 'norht'; did you mean north?"),
    ):
        (table / f"{name}.csv").write_text("\n".join(rows).replace(old, new))
        assert main(["predict", "r", f"{name}.csv"]) == 2
        assert refusal in capsys.readouterr().err
    assert main(["predict", "r", "no site.csv", "--client", "St. Mary"]) == 0
    (table / "latin.csv").write_bytes("\n".join(rows).replace("south", "süd").encode("latin-1"))
    assert main(["predict", "r", "latin.csv"]) == 2
    assert "invalid start byte); save the file as UTF-8" in capsys.readouterr().err  # there is no --data.encoding


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "r", "small.csv"], "has models of several clients; give --client with one of north, south, or a"),
        (["predict", "r", "patients.csv", "--client", "nort"], "no model of client 'nort'; did you mean north?"),
        (["predict", "c", "patients.csv"], "neither a run directory (config.yaml) nor a folder of polyfed export"),
        (["predict", "r"], "takes a run directory and a CSV or Parquet file, got r"),
        (["predict", "r", "patients.csv", "--clint", "x"], "unknown option --clint"),
        (["predict", "r", "small.csv", "--client", "north"], "features: the table has no column 'age'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(table, capsys, words, message):
    (table / "c").mkdir()
    rows = (table / "patients.csv").read_text().replace("St. Mary", "north")
    (table / "patients.csv").write_text(rows)
    (table / "small.csv").write_text("sex\nf\n")
    assert main([*BY_SITE, "--algorithm", "local", "--out", "r"]) == 0
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_networks_by_the_names_of_sites(table, capsys):
    (table / "my_nets.py").write_text(
        "from polyfed.models import build\ndef wide(**a): return build('mlp', **a, hidden=(9,))\n"
    )
    networks = "{south: my_nets:wide, north: {name: mlp, hidden: [4]}, St. Mary: mlp}"
    assert main([*BY_SITE, "--algorithm", "local", "--model", networks, "--out", "r"]) == 0
    assert read_config("r")["model"]["north"] == {"name": "mlp", "hidden": [4]}
    from safetensors.numpy import load_file

    widths = {path.name[:5]: len(load_file(path)["fc1.bias"]) for path in (table / "r/models").glob("*.safetensors")}
    assert widths == {"south": 9, "north": 4, "St.%2": 64}
    (table / "again.yaml").write_text((table / "r/config.yaml").read_text())
    assert main(["run", "again.yaml", "--out", "again", "--quiet"]) == 2
    assert "give --trust-code" in capsys.readouterr().err
    assert main(["run", "again.yaml", "--out", "again", "--quiet", "--trust-code"]) == 0
    assert (table / "again/metrics.jsonl").exists()
    assert main(["predict", "r", "patients.csv", "--client", "south", "--trust-code"]) == 0
    assert main([*BY_SITE, "--model", "{north: mlp}", "--out", "x"]) == 2
    assert "model gives no network for 'St. Mary', 'south'; it names north" in capsys.readouterr().err
    assert main([*BY_SITE, "--model", "{north}", "--out", "x"]) == 2
    assert "--model takes a network, or one for each site" in capsys.readouterr().err


def test_options_of_a_table_without_their_section_are_told(table, capsys):
    plain = ["patients.csv", "--target", "outcome", "--site", "hospital"]
    assert main(["data", *plain]) == 2
    assert "unknown option --target; did you mean --data.target?" in capsys.readouterr().err
    for words, refusal in (
        (["-data.target", "outcome"], "unknown option -data.target; did you mean --data.target?"),
        (["--data-site", "hospital"], "unknown option --data-site; did you mean --data.site?"),
        (["outcome", "--data.site", "hospital"], "unexpected argument 'outcome'; options begin with --"),
    ):
        assert main(["data", "patients.csv", *words]) == 2
        assert refusal in capsys.readouterr().err
    assert main(["compare", *plain]) == 2
    assert "number, got 'outcome'; for the column to predict give --data.target" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:column 'hospital' has", "ignore:1 of 121 rows")
def test_a_site_of_one_row_may_be_another_spelling(table, capsys):
    rows = (table / "patients.csv").read_text()
    (table / "patients.csv").write_text(
        rows + next(row for row in rows.splitlines() if "north" in row).replace("north", "North")
    )
    assert main(["data", "patients.csv", "--data.target", "outcome", "--data.site", "hospital"]) == 2
    assert "North has 1 example, too few to test on; it may be another spelling of north" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_told_with_what_is_near(table, capsys):
    for name, started in {"c": "2021-03-01T09:00:00+00:00", "a": "2021-03-01T08:00:00.123+00:00", "b": None}.items():
        (table / "runs" / name).mkdir(parents=True)
        if started is not None:
            (table / "runs" / name / "manifest.json").write_text(json.dumps({"started": started}))
    assert main(["resume", "nowhere"]) == 2  # a copy of a run is as old as the run
    assert capsys.readouterr().err == "polyfed: nowhere does not exist; newest in runs: runs/b, runs/c, runs/a\n"
    (table / "scans/north/ill").mkdir(parents=True)
    assert main(["look", "scans"]) == 2
    assert capsys.readouterr().err.endswith("--data imagefolder --data.path scans --data.layout site/class\n")


@pytest.mark.filterwarnings("ignore:there is one client")
def test_a_table_of_one_site_is_not_compared(table, capsys):
    rows = (table / "patients.csv").read_text().splitlines()
    (table / "patients.csv").write_text("\n".join([rows[0], *(row for row in rows if row.endswith("north"))]))
    assert main(["compare", *BY_SITE[1:], "--algorithms", "fedavg", "--out", "c"]) == 2
    assert "north is the one site, and nobody can join it" in capsys.readouterr().err


def test_a_page_is_html(table, capsys):
    assert main(["report", "run", "--out", "page.pdf"]) == 2
    assert "--out must be an HTML file (.html), which a browser prints to PDF" in capsys.readouterr().err
    assert main(["-v"]) == 2
    assert "unknown option -v; give a command" in capsys.readouterr().err


def test_a_table_without_a_site_is_not_divided_unasked(table, capsys):
    assert main([*RUN, "--out", "r"]) == 2
    assert "give --data.site with the column that says which client a row belongs to" in capsys.readouterr().err
    assert main([*RUN, "--data.partition", "iid", "--data.clients", "4", "--out", "r"]) == 0
    assert main([*BY_SITE, "--data.partition", "iid", "--data.clients", "4", "--out", "s"]) == 2
    sentence = "--data.site hospital makes a client of each site, and the partition iid assigns all rows"
    assert sentence in capsys.readouterr().err, "the answers would not be the hospitals'"
    assert main([*BY_SITE, "--data.clients", "2", "--out", "s"]) == 2
    assert "would leave out" in capsys.readouterr().err


def test_data_are_shown_for_labels_and_amounts_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{k},{k % 2},{int(k < 3)},{1000.5 + k},{'ab'[k // 10]}" for k in range(20)]
    (tmp_path / "t.csv").write_text("x,fever,cough,cost,ward\n" + "\n".join(lines) + "\n")
    words = ["data", "--data", "table", "--data.path", "t.csv", "--data.site", "ward", "--data.test-fraction", "0.2"]
    assert main([*words, "--data.target", "fever,cough", "--data.drop", "cost", "--plot", "data.png"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[1::2] for row in rows][1][:1] == ["b"]
    assert rows[1][5] == "·"  # nobody at b coughs
    assert {row[7] for row in rows} == {"8"}
    assert (tmp_path / "data.png").exists()
    assert main([*words, "--data.target", "cost", "--data.drop", "fever,cough", "--plot", "other.png"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert abs(float(rows[0][3]) - 1005) < 2
    assert abs(float(rows[1][3]) - 1015) < 2
    assert not (tmp_path / "other.png").exists()


REFUSED_WITHOUT_TORCH = """
import sys
from polyfed.cli.main import main

table = ["--data.target", "ill", "--data.site", "hospital"]
commands = [
    ["look", "patients.csv", "--data.target", "il", "--data.site", "hospital"],
    ["data", "patients.csv", *table, "--data.drop", "agee"],
    ["run", "patient.csv", *table],
    ["compare", "patients.csv", "--data.target", "ill", "--data.event", "died", "--data.site", "hospital"],
    ["predict", "exported", "nowhere.csv"],
    ["predict", "exported", "patients.csv"],
    ["predict", "run", "patients.csv"],
    ["predict", "run", "patients.csv", "--client", "nort"],
]
assert [main(words) for words in commands] == [2] * len(commands)
assert "torch" not in sys.modules
"""


def test_files_columns_and_clients_that_are_not_there_are_refused_without_torch(tmp_path):
    (tmp_path / "patients.csv").write_text("\ufeffage,ill,hospital\n61,1,north\n", encoding="utf-8")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/signature.json").write_text("{}")
    (tmp_path / "exported/preprocessing.json").write_text(
        '{"columns": [{"name": "age"}, {"name": "chol"}], "reading": {"delimiter": ","}}'
    )
    (tmp_path / "run/models").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("data: {name: table}")
    for name in ("north", "south"):
        (tmp_path / f"run/models/{name}.preprocessing.json").write_text("{}")
        (tmp_path / f"run/models/{name}.signature.json").write_text(f'{{"client": "{name}"}}')
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("polyfed: ").partition(";")[0] for line in done.stderr.splitlines()]
    assert lines == [
        "target: the table has no column 'il'",
        "drop: the table has no column 'agee'",
        "'patient.csv' does not exist",
        "target: the table has no column 'died'",
        "'nowhere.csv' does not exist",
        "features: the table has no column 'chol'",
        "run has models of several clients",
        "run has no model of client 'nort'",
    ]


def test_untuned_defaults_are_told(table, capsys):
    words = [*BY_SITE[: BY_SITE.index("--quiet")], *BY_SITE[BY_SITE.index("--quiet") + 1 :]]
    at = words.index("--algorithm.lr")
    assert main([*words, "--out", "tuned"]) == 0
    assert "untuned" not in capsys.readouterr().err
    assert main([*words[:at], *words[at + 2 :], "--out", "default"]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("learning rate 0.01 is a default, untuned for these data: --algorithm.lr; polyfed compare")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_is_also_trained_alone_and_small_tests_are_marked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [f"{k * 7 % 11},{'north' if k < 100 else 'tiny'},{k % 2}\n" for k in range(110)]
    (tmp_path / "a.csv").write_text("lab,ward,ill\n" + "".join(rows))
    words = ["run", "a.csv", "--data.target", "ill", "--data.site", "ward", "--rounds", "1", "--quiet"]
    assert main([*words, "--algorithm", "fedavg", "--out", "a"]) == 0
    out = capsys.readouterr().out
    assert "gain: of fedavg over local" in out
    lines = {line.split()[1]: line.split() for line in out.splitlines() if line.startswith("│ ")}
    assert lines["tiny"][5:7] == ["3", "*"]
    assert lines["north"][5] == "30"
    assert "* 1 site with fewer than 10 test examples: such a score says little" in out
    assert main([*words, "--algorithm", "local", "--out", "b"]) == 0
    assert "gain" not in capsys.readouterr().out
    assert main([*words, "--baselines", "[]", "--out", "c"]) == 0
    assert "local" not in capsys.readouterr().out


SURVIVAL = ["compare", "patients.csv", "--data.site", "hospital", "--data.event", "outcome"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [],
            "survival needs --data.target with the time until the event, and --data.event with 1 where it happened; the col",
        ),
        (
            ["--data.time", "age"],
            "--data.time age only orders rows: did you mean --data.target age? the columns: age, sex",
        ),
        (
            ["--data.target", "outcome", "--data.time", "age"],
            "column 'outcome' is named twice, as a target and as another target, the event, the site, the group or the "
            "time; give each its own column: survival needs --data.target with the time until the event, and --data.event "
            "with 1 where it happened; --data.time age only orders rows: did you mean --data.target age?",
        ),
        (
            ["--data.hospital", "sex"],
            "unknown option --data.hospital; table has no 'hospital': did you mean --data.site?",
        ),
        (["--data.visit", "sex"], "did you mean --data.time or --data.group?"),
    ],
)
def test_options_of_survival_and_of_columns_by_other_names_are_hinted_at(table, capsys, words, sentence):
    assert main([*SURVIVAL, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_misspelt_option_is_named_before_a_missing_site_column(table, capsys):
    assert main(["compare", "patients.csv", "--data.targt", "outcome"]) == 2
    assert "unknown option --data.targt; table has no 'targt': did you mean target?" in capsys.readouterr().err


def test_a_table_that_cannot_be_loaded_is_refused_in_one_sentence(table, capsys):
    assert main([*SURVIVAL, "--data.target", "score", "--data.task", "regression"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("polyfed: target 'outcome' holds texts, and regression needs numbers")
    assert err.count("\n") == 1


@pytest.mark.thorough
def test_a_finished_run_and_its_baselines_go_on_to_more_rounds(table, capsys):
    words = ["run", "patients.csv", "--data.target", "outcome", "--data.site", "hospital", "--quiet"]
    assert main([*words, "--rounds", "1", "--out", "short", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["rounds"], shown["methods"]) == ("run", 1, ["fedavg", "local"])
    assert main(["show", "short", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown
    assert main([*words, "--rounds", "2", "--out", "long"]) == 0
    capsys.readouterr()
    assert main(["resume", "short", "--rounds", "2", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds_done"] == 2
    for folder in ("models", "baselines/local/models"):
        for file in (table / "long" / folder).glob("*.safetensors"):
            assert file.read_bytes() == (table / "short" / folder / file.name).read_bytes()
    capsys.readouterr()
    assert load("short").class_names == ("no", "yes")
    assert main(["resume", "short", "--rounds", "1"]) == 2
    assert (
        "the run in short has 2 rounds, and --rounds 1 would be fewer: a run only gets more" in capsys.readouterr().err
    )
    assert main(["resume", "short", "--quiet"]) == 0
    assert main(["resume", "short"]) == 0
    assert "nothing was left to train. More rounds: polyfed resume short --rounds 4" in capsys.readouterr().err
    assert main(["predict", "short", "patients.csv", "--client", "north", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert validation_error(content, PredictedRows) is None
    assert [row["row"] for row in content["predictions"]] == list(range(1, 121))
    assert {row["predicted"] for row in content["predictions"]} == {"no", "yes"}
    assert main(["predict", "short", "patients.csv", "--client", "north", "--json", "--out", "p.csv"]) == 2
