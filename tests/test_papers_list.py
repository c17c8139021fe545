"""docs/papers.md lists every table and figure of the four papers with a command that works and what was measured; runs at
the papers' own length stop, go on, and are collected."""

import argparse
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from polyfed.algorithms import registry_name
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.cli.commands.papers.paper_tables import find_table, load_papers
from polyfed.simulation.storage.directory import read_metrics

ROOT = Path(__file__).parent.parent
# As printed: the last table and figure of each paper. Captions number them from 1 without a gap.
LAST = {"flha": (7, 7), "fedhenn": (3, 3), "pfedla": (3, 7), "fedpnas": (3, 4)}
CLAIMS = {  # of the text and of appendices, without a table or figure
    "flha": ("Algorithm 1", "Section 4.2", "Section 4.3", "Section 5.4", "Appendix B", "Appendix D"),
    "fedhenn": ("Algorithm 1", "Algorithm 2", "Section 4.1", "Section 4.2", "Lemma 3.2"),
    "fedpnas": ("Algorithm 1", "Algorithm 2", "Proposition 1"),
    "pfedla": ("Algorithm 1", "Algorithm 2"),
}


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])


@pytest.fixture
def made():
    import papers_list

    return papers_list


@pytest.fixture(scope="module")
def rows():
    """The page's rows by paper: what it is in the paper, what it shows, command, state."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").partition("## At the papers' own length")[0]
    names = {"FLHA-GHN": "flha", "FedHeNN": "fedhenn", "pFedLA": "pfedla", "FedPNAS": "fedpnas"}
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return {
        names[title]: [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines() if "|" in line][
            2:
        ]
        for title, body in zip(sections[::2], sections[1::2], strict=True)
    }


def test_the_page_is_made_of_the_recipes_and_the_measurements(made, tmp_path):
    made.write(ROOT / "benchmarks" / "results" / "papers", tmp_path)
    ours, again = ((folder / "papers.md").read_text(encoding="utf-8") for folder in (ROOT / "docs", tmp_path))
    assert ours == again, "run python benchmarks/papers.py page"


@pytest.mark.parametrize("paper", LAST)
def test_every_table_and_figure_of_the_papers_is_on_the_page(rows, paper):
    tables, figures = LAST[paper]
    printed = {*(f"Table {n + 1}" for n in range(tables)), *(f"Figure {n + 1}" for n in range(figures)), *CLAIMS[paper]}
    assert {row[0] for row in rows[paper]} - {"polyfed's own"} == printed


@pytest.mark.parametrize(("paper", "letters"), [("flha", "ABCDEFGH"), ("fedpnas", "ABCDEF")])
def test_every_appendix_is_named(made, paper, letters):
    text = made.APPENDICES[paper]
    assert [
        letter for letter in letters if not re.search(rf"\b{letter}\b", text.removeprefix("Its appendices: "))
    ] == []
    assert text in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


def test_every_entry_of_the_recipes_is_on_the_page(rows):
    for name, paper in load_papers().items():
        commands = [row[2] for row in rows[name]]
        for table in paper.tables.values():
            command = f"`polyfed reproduce {name} {table.name}`"
            assert command in commands or table.reason_not_run.split("`")[1] in " ".join(commands), command


def test_every_command_on_the_page_is_accepted(rows):
    listed = [row[2].strip("`") for of in rows.values() for row in of if row[2] != "–"]
    assert len(listed) > 30
    for command in map(shlex.split, listed):
        if command[:2] == ["polyfed", "reproduce"]:
            table = find_table(command[2], command[3])
            assert table.name == command[3]
            assert table.cells
            assert not table.reason_not_run
        elif command[1] in ("run", "data"):
            variant = command[command.index("--variant") + 1]
            configuration_parser.parse_configuration(
                command[5:], read_recipe(command[2]).configuration("paper", variant), "polyfed run"
            )
        else:
            assert command == ["polyfed", "graph", "flha_arch1", "--input", "3,32,32"]


def test_a_state_names_the_data_and_the_seeds_of_the_measurement(made, rows):
    by_command = {row[2]: row[3] for of in rows.values() for row in reversed(of)}
    checked = 0
    for file in sorted((ROOT / "benchmarks" / "results" / "papers").glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if "cells" not in content or not content["reduced"]:
            continue
        state = by_command[f"`polyfed reproduce {content['paper']} {content['table']}`"]
        measured, _, rest = state.partition(". ")
        seeds = {len(cell["seeds"]) for cell in content["cells"]}
        assert all(made.NUMBERS[n] in measured for n in seeds), file.name
        data = {
            content["options"][content["options"].index("--data.name") + 1]
            if "--data.name" in content["options"]
            else made.data_of(cell["recipe"], cell["variant"], content["scale"])
            for cell in content["cells"]
        }
        named = re.fullmatch(r"scale cpu: (.+); .+ seeds?", measured)[1]
        assert set(re.split(", | and ", named)) == {made.DATA[name] for name in data}, file.name
        missing = re.match(r"Not on ([^.]+)", rest)
        assert not missing or not {made.DATA[name] for name in data} & set(re.split(", | and ", missing[1])), file.name
        checked += 1
    assert checked > 25


def test_what_belongs_to_a_table(made):
    assert [made.belongs(name, "table2") for name in ("table2", "table2b", "table2_forms", "table20", "fig2")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert not made.belongs("table2", "")


def test_an_entry_without_a_measurement_says_so(made, tmp_path):
    said = made.state(find_table("flha", "table1"), tmp_path)
    assert said.startswith("not measured")
    assert made.state(find_table("flha", "fig6"), tmp_path) == "not measured"


def test_every_run_at_the_papers_length_has_its_recipe_and_its_methods():
    import paper_scale

    for plan in paper_scale.PLANS.values():
        experiment = paper_scale.experiment_of(plan)
        methods = {registry_name(experiment.algorithm), *experiment.baselines}
        assert set(plan.methods) <= methods
        assert experiment.settings.rounds >= 200
        assert plan.methods[0] == registry_name(experiment.algorithm)
        assert any(
            cell.paper
            for cell in paper_scale.cells_of(find_table(plan.paper, plan.table), plan, plan.methods[0], plan.methods[0])
        )


@pytest.fixture
def scale(monkeypatch, tmp_path):
    import paper_scale

    monkeypatch.setattr(paper_scale, "SCALE", "smoke")
    monkeypatch.setattr(paper_scale, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        paper_scale,
        "PLANS",
        {"pfedla": paper_scale.Plan("pfedla", "table1", "pfedla_table1", "fashion_mnist-10", ("local",), 1, 2)},
    )
    return paper_scale


@pytest.mark.thorough
def test_a_run_at_the_papers_length_stops_after_its_hours_and_goes_on(scale, tmp_path, capsys):
    def given(hours, until=None):
        return argparse.Namespace(runs=str(tmp_path), hours=hours, data=[], only=None, workers=0, until=until)

    def reached():
        return json.loads((tmp_path / "results" / "pfedla.json").read_text(encoding="utf-8"))["methods"]["local"]

    scale.run("pfedla", given(0))
    assert (reached()["round"], list(reached()["by_round"]["accuracy"])) == (1, ["1"])
    for _ in range(2):  # the second call has nothing to do
        scale.run("pfedla", given(1, until=2))
        assert reached()["round"] == 2
    scale.run("pfedla", given(1))
    found, records = reached(), read_metrics(tmp_path / "pfedla" / "local" / "metrics.jsonl")
    assert (found["round"], list(found["by_round"]["accuracy"])) == (3, ["1", "2", "3"])
    (cell,) = found["cells"]
    accuracies = [row["accuracy"] for row in records[-1]["clients"].values()]
    assert cell["polyfed"] == pytest.approx(100 * sum(accuracies) / len(accuracies))
    assert (cell["printed"], cell["at_round"]) == ("85.83 ± 0.17", 3)
    assert found["hours"] == pytest.approx(sum(record["seconds"] for record in records) / 3600, abs=1e-3)

    shutil.move(tmp_path / "pfedla", tmp_path / "elsewhere")
    scale.collect("pfedla", given(1))
    assert reached() == found  # without its directory a method keeps what the file says
    shutil.move(tmp_path / "elsewhere", tmp_path / "pfedla")
    config = tmp_path / "pfedla" / "local" / "config.yaml"
    config.write_text(re.sub(r"lr: [0-9.]+", "lr: 0.5", config.read_text(encoding="utf-8")), encoding="utf-8")
    capsys.readouterr()
    scale.collect("pfedla", given(1))
    assert "left out, its algorithm has {'lr': 0.5}, and the recipe's {'lr': 0.05}" in capsys.readouterr().out
    assert json.loads((tmp_path / "results" / "pfedla.json").read_text(encoding="utf-8"))["methods"] == {}
