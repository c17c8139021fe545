"""`polyfed look` from a CSV file to text, JSON and a page, and the matrix of every site's model at every site."""

import csv
import json
import random
import re

import pyarrow.csv
import pyarrow.parquet
import pytest
import yaml

from polyfed.cli.main import main
from tests.few_cases import few


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    draw = random.Random(0)
    with open("patients.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "chol", "lab", "outcome", "hospital"])
        for i in range(160):
            site = "north" if i % 2 else "south"
            age = draw.gauss(60, 10)
            chol = 0 if site == "south" else round(draw.gauss(240, 40))
            lab = "" if site == "south" and i > 5 else round(draw.gauss(0, 1), 3)
            writer.writerow([round(age, 2), chol, lab, int(age + draw.gauss(0, 5) > 60), site])
    return tmp_path


WORDS = ["--data.target", "outcome", "--data.site", "hospital"]
CODED = "chol is 0 at south (80 of 80 values), never at north"


def test_a_csv_file_is_looked_at(table, capsys):
    assert main(["look", "patients.csv", *WORDS, "--out", "look.html"]) == 0
    out, _ = capsys.readouterr()
    assert CODED in out
    assert "lab is empty or nearly so at south (fewer than 5 of 80 rows have a value)" in out
    page = (table / "look.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "The sites&#39; data side by side" in page
    assert "https://" not in page
    assert "<li>chol is 0 at south" in page  # as the column is written
    assert "chol (orange: a number that may stand for &#34;not measured&#34;)" in page


def test_what_is_said_of_the_whole_table_stands_last(table, capsys):
    lines = (table / "patients.csv").read_text().splitlines()
    numbers = [f"{10_000 + 7919 * (k + 1) % 89_989}" for k in range(160)]
    rows = [f"{number},{line}" for number, line in zip(["nummer", *numbers], lines, strict=True)]
    (table / "patients.csv").write_text("\n".join([*rows, "99999,40,210,0.1,1,west"]) + "\n")
    assert main(["look", "patients.csv", *WORDS]) == 0
    out, err = capsys.readouterr()
    assert "- too few examples to be divided into training and test: west (1).\n  A run refuses such a site;" in out
    assert out.splitlines()[-1].startswith("- Column 'nummer' looks like an identifier (161 different whole numbers in")
    assert "leave it out (--data.drop nummer)" in out
    assert "identifier" not in err
    assert main(["look", "patients.csv", *WORDS, "--json", "--out", "look.html"]) == 0
    assert "column 'nummer' looks like" in json.loads(capsys.readouterr().out)["warnings"][0]
    assert "<li>Column &#39;nummer&#39; looks like" in (table / "look.html").read_text(encoding="utf-8")
    assert main(["run", "patients.csv", *WORDS, "--data.drop", "nummer"]) == 2
    assert "keep the largest alone (--data.partition.order largest --data.clients 2)" in capsys.readouterr().err


def test_json_and_what_real_sites_would_show(table, capsys):
    assert main(["look", "patients.csv", *WORDS, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {finding["column"] for finding in content["findings"]} >= {"chol", "lab"}
    assert main(["look", "patients.csv", *WORDS, "--between-sites", "--data.preprocess", "federated"]) == 0
    out, _ = capsys.readouterr()
    assert "fewer than 5 of 80 rows have a value" in out


def test_recipes_and_data_sets_by_name(table, capsys):
    assert main(["look", "digits", "--data.clients", "3", "--data.partition", "iid"]) == 0
    assert "client-002: 100 examples" in capsys.readouterr().out
    assert main(["look", "patients.csv", *WORDS, "--out", "look.txt"]) == 2
    assert "--out must be an HTML file" in capsys.readouterr().err
    assert main(["look", "patients.csv"]) == 2
    assert main(["look", "--help"]) == 0
    assert main(["--help"]) == 0
    assert "  look [RECIPE|config.yaml|DATA]" in capsys.readouterr().out


def test_the_matrix_in_a_run_and_on_its_page(table, capsys):
    words = ["run", "--data", "table", "--data.path", "patients.csv", *WORDS, "--algorithm", "local", "--rounds", "1",
             "--quiet", "--workers", "0", "--cross-site", "--out", "r"]  # fmt: skip
    with pytest.warns(UserWarning, match=re.escape(CODED)):
        assert main(words) == 0
    out = capsys.readouterr().out
    assert "of every site's model (rows) on every site's test examples (columns)" in out
    assert (table / "r" / "cross_site.json").exists()
    assert main(["report", "r"]) == 0
    page = (table / "r" / "report.html").read_text(encoding="utf-8")
    assert "every site&#39;s model at every site" in page
    assert "patients of south" in page
    assert 'class="own"' in page
    assert page.count(CODED[1:]) == 2  # at the top, and in "The sites' data side by side"


@pytest.mark.thorough
def test_the_matrix_in_a_comparison(table, capsys):
    words = ["compare", "--data", "table", "--data.path", "patients.csv", *WORDS, "--algorithms", "local,fedavg",
             "--rounds", "1", "--resplit", "2", "--tune", "none", "--no-references", "--quiet", "--parallel", "1",
             "--cross-site", "--out", "c"]  # fmt: skip
    with pytest.warns(UserWarning, match=re.escape(CODED)):
        assert main(words) == 0
    assert (table / "c" / "local" / "seed-0" / "cross_site.csv").exists()
    assert main(["compare", "c", "--cross-site"]) == 2
    assert main(["report", "c"]) == 0
    page = (table / "c" / "report.html").read_text(encoding="utf-8")
    assert "every site&#39;s model at every site" in page
    assert page.count(CODED[1:]) == 2  # at the top, and in "The sites' data side by side"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("words", [["data"], ["data", "--json"], ["look"], ["look", "--json", "--out", "look.html"]])
@pytest.mark.parametrize("target", few(["cost", "ward"], ["cost"]))
def test_nothing_printed_is_the_value_of_a_row(polyfed, words, target):
    rows = [(f"P{k}", 3000 + 7 * k + visit, 6000 + 7 * k, f"ward{k % 2}") for k in range(60) for visit in range(2)]
    (polyfed.here / "a.csv").write_text(
        "pid,cost,lab,ward\n" + "".join(f"{p},{c}.5,{b}.5,{w}\n" for p, c, b, w in rows)
    )
    out = polyfed(words[0], "a.csv", "--data.target", target, "--data.site", "pid", *words[1:])
    content = json.loads(out) if "--json" in words else {}
    content.pop("edges", None)  # of all rows
    text = json.dumps(content) if content else out
    assert not [value for row in rows for value in (f"{row[1]}", f"{row[2]}") if value in text]
    assert "100 %" not in text
    assert len(out.splitlines()) < 60 or content
    if words == ["look", "--json"]:
        assert {row["categories"]["ward0"] for row in content["columns"] if row["column"] == "ward"} == {"<5"}
    if words[0] == "data" and content:
        assert {client["classes"] for client in content["clients"]} == {None}


@pytest.mark.parametrize("explicit", [False, True])
def test_what_training_refuses_is_listed_with_its_option_and_hides_nothing_else(polyfed, explicit):
    rows = [
        f"{50 + k % 20},S-{k},2026-01-{k % 28 + 1:02},{'n/k' if k % 9 == 0 else k},{'' if k == 7 else k % 2},"
        f"{'' if k == 9 else 'ns'[k % 2]}\n"
        for k in range(60)
    ]
    (polyfed.here / "odd.csv").write_text("age,serial,day,lab,ill,ward\n" + "".join(rows))
    words = ["--data.target", "ill", "--data.site", "ward"]
    words += ["--data.columns", "age,serial,day,lab"] if explicit else []
    out = polyfed("look", "odd.csv", *words, "--out", "look.html")
    assert "age\n  n " in out
    refusals = [line for line in out.splitlines() if line.startswith("- Training refuses this: ")]
    options = ["--data.missing-site drop", "--data.missing-target drop", "--data.drop serial", "--data.drop day",
               "--data.missing n/k"]  # fmt: skip
    assert [option in refusal for option, refusal in zip(options, refusals, strict=True)] == [True] * 5
    assert "Training refuses this" in (polyfed.here / "look.html").read_text(encoding="utf-8")
    assert len(json.loads(polyfed("look", "odd.csv", *words, "--json"))["warnings"]) >= 5
    assert main(["run", "odd.csv", *words]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["patients.csv", *WORDS, "--data.missing", "chol=0"],
        ["heart", "--rounds", "4", "--model", "mlp,mlp", "--algorithm", "ditto", "--algorithm.lr", "0.5"],
        ["--data", "digits", "--data.clients", "3", "--data.partition", "iid"],
    ],
)
@pytest.mark.one_case
def test_a_look_writes_its_options_for_other_commands(table, words, capsys):
    assert main(["look", *words, "--out", "data.yaml"]) == 0
    assert capsys.readouterr().out.endswith("\nThe options are in data.yaml. Next: polyfed compare data.yaml\n")
    assert len((table / "data.yaml").read_text().splitlines()) < 30
    for command in ("run", "compare"):
        printed = []
        for start in (words, ["data.yaml"]):
            assert main([command, *start, "--print-config"]) == 0
            printed.append(yaml.safe_load(capsys.readouterr().out))
        assert printed[0] == printed[1]
    assert main(["look", *words, "--out", "data.yaml"]) == 0  # its own file is replaced
    (table / "data.yaml").write_text("mine: 1\n")
    assert main(["look", *words, "--out", "data.yaml"]) == 2
    assert "data.yaml exists; choose another --out" in capsys.readouterr().err


def test_options_that_training_refuses_are_not_recommended(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{k % 7},{'' if k == 3 else k % 2},{'north' if k > 3 else 'tiny'}" for k in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,ill,site", *rows]))
    words = ["look", "rows.csv", "--data.target", "ill", "--data.site", "site", "--out", "data.yaml"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "give this command again with the options named there" in printed
    assert "Next: polyfed compare" not in printed
    assert "with fewer than 5 examples it only trains, and gets no answer" in printed
    assert main([*words, "--data.missing-target", "drop"]) == 0
    assert capsys.readouterr().out.endswith("Next: polyfed compare data.yaml\n")


def test_a_table_of_texts_alone_is_looked_at(tmp_path, capsys):
    rows = [f"{'fm'[k % 2]},{['no', 'yes'][k % 3 % 2]},{'north' if k > 40 else 'south'}" for k in range(100)]
    (tmp_path / "rows.csv").write_text("\n".join(["sex,ill,site", *rows]))
    for more in ([], ["--between-sites"]):  # sites of different sizes
        assert main(["look", str(tmp_path / "rows.csv"), "--data.target", "ill", "--data.site", "site", *more]) == 0
        assert "sex\n  north" in capsys.readouterr().out


def test_quiet_prints_the_path_of_the_page_alone(table, capsys):
    words = ["look", "patients.csv", *WORDS, "--quiet"]
    assert main(words) == 2
    assert "--quiet leaves nothing to print without --out" in capsys.readouterr().err
    assert main([*words, "--out", "quiet.html"]) == 0
    assert capsys.readouterr().out == "quiet.html\n"


def test_a_text_na_is_missing_in_a_csv_file_and_a_category_in_a_parquet_file_unless_it_is_named(tmp_path, capsys):
    rows = {"site": ["a", "b"] * 20, "ill": [0, 0, 1, 1] * 10, "group": ["NA", "red"] * 10 + ["red", "NA"] * 10}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    pyarrow.csv.write_csv(pyarrow.table(rows), tmp_path / "rows.csv")
    missing = []
    for file, *more in (["rows.csv"], ["rows.parquet"], ["rows.parquet", "--data.missing", "NA"]):
        assert main(["look", str(tmp_path / file), "--data.site", "site", "--data.target", "ill", *more]) == 0
        missing.append(" NA 50 %" not in capsys.readouterr().out)
    assert missing == [True, False, True]
