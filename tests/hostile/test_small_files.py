"""Small files beside those of runs: what is damaged is named with what to do, or counts as missing."""

import json
import time

import pyarrow as pa
import pytest
import yaml

import polyfed as pf
from polyfed.cli.commands.papers import cell_metrics
from polyfed.core.io.values.validation import call_turning_value_errors_into_user_errors, parse_yaml
from polyfed.data.formats.files import class_names_from_hub_metadata
from polyfed.data.formats.text import load_vocabulary
from polyfed.deploy.server.server_config import _parse_field_value
from polyfed.deploy.trial.local_trial import read_running_trial, trial_folder_of
from polyfed.deploy.trial.project import create_project
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.report.page.panels.method_views import WARM_START_FILE, html_warm_starts
from polyfed.simulation.monitoring.trackers import MLFLOW_LINK_FILE, read_mlflow_run_id
from polyfed.simulation.storage.integrity import describe_changed_files

NO_MAPPING = ["", "[", "[1]", "3", '"x"', "null", "NaN", '{"x": NaN}', "[" * 3000, "\xff"]


@pytest.mark.parametrize("text", [*NO_MAPPING, '{"a": 3}', '{"a": {"before": "high"}}', '{"a": {"before": true}}'])
def test_damaged_measures_are_named(tmp_path, text):
    (tmp_path / "measured.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        pf.UserError, match=r"measured.json is damaged \(.*\); delete it, and what it holds is computed again"
    ):
        cell_metrics._read_stored_measurements(tmp_path / "measured.json")


@pytest.mark.parametrize("text", [*NO_MAPPING, '{"run_id": 3}', '{"run_id": null}', "{}"])
def test_a_damaged_link_names_no_run_of_mlflow(tmp_path, text):
    (tmp_path / MLFLOW_LINK_FILE).write_text(text, encoding="latin-1")
    assert read_mlflow_run_id(tmp_path) is None
    (tmp_path / MLFLOW_LINK_FILE).write_text('{"run_id": "0123", "more": 1}')
    assert read_mlflow_run_id(tmp_path) == "0123"


@pytest.mark.thorough
@pytest.mark.parametrize("text", [*NO_MAPPING, "layer_types: !!python/object/apply:os.getcwd []", "a: &a [*a]", "2024-99-99",
                                  "layer_types: [{kind: linear, c_in: 1, c_out: .inf}]",
                                  "layer_types: [{kind: linear, c_in: 1, c_out: 2, 3: 4}]"])  # fmt: skip
def test_damaged_catalogues_are_named(tmp_path, text):
    (tmp_path / "catalogue.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(pf.UserError, match=r"the layer catalogue .*catalogue.yaml|catalogue.yaml, layer type 1"):
        LayerCatalogue.read_yaml(tmp_path / "catalogue.yaml")


@pytest.mark.parametrize(
    "text", ["", "[tool", "tool = 3", "[tool.flwr]\napp = []", "[tool.flwr.app]\nconfig = 1", "x = " + "[" * 3000]
)
@pytest.mark.one_case
def test_a_damaged_project_is_named(tmp_path, text):
    project = create_project(tmp_path / "project", ["north", "south"])
    (project.app_folder / "pyproject.toml").write_text(text)
    with pytest.raises(pf.UserError, match=r"pyproject.toml (is not valid TOML|lacks the table)"):
        project.read_server_configuration()


@pytest.mark.thorough
@pytest.mark.parametrize("text", [*NO_MAPPING, '{"port": "x", "sites": [], "processes": {}}', '{"port": 1}'])
def test_a_damaged_note_of_a_trial_is_no_trial(tmp_path, text):
    project = create_project(tmp_path / "project", ["north"])
    trial_folder_of(project).mkdir(exist_ok=True)
    (trial_folder_of(project) / "trial.json").write_text(text, encoding="latin-1")
    assert read_running_trial(project) is None


@pytest.mark.thorough
def test_a_damaged_field_of_the_app_is_named():
    assert _parse_field_value('{"name": "mlp"}') == {"name": "mlp"}
    for text in ("{", "[1", "[" * 3000, "{a: &a [*a]}"):
        with pytest.raises(pf.UserError, match="in the configuration is not a list, mapping or null"):
            _parse_field_value(text)


CURVES = [
    {"a": {"score": "x", "warm": [1.0], "scratch": []}},
    {"": {"score": "x", "warm": [], "scratch": []}},
    {"a": {"score": 3, "warm": [], "scratch": []}},
    [1],
]


@pytest.mark.parametrize("curves", CURVES)
def test_damaged_curves_are_named(tmp_path, curves):
    (tmp_path / WARM_START_FILE).parent.mkdir()
    (tmp_path / WARM_START_FILE).write_text(json.dumps(curves))
    with pytest.raises(pf.UserError, match=r"curves.json is damaged \(.*\); run polyfed warmstart again"):
        html_warm_starts(tmp_path, "k")


@pytest.mark.parametrize("text", ["[" * 3000, '[1, "a"]', "{}", "NaN", "\xff"])
def test_damaged_vocabularies_are_named(tmp_path, text):
    (tmp_path / "words.json").write_text(text, encoding="latin-1")
    with pytest.raises(pf.UserError, match=r"words.json'"):
        load_vocabulary(tmp_path / "words.json")


@pytest.mark.parametrize(
    "told", [b"", b"[1]", b"\xff", b'{"info": 3}', b'{"info": {"features": {"label": {"names": "cat"}}}}']
)
def test_a_parquet_file_whose_metadata_are_damaged_names_no_classes(told):
    assert (
        class_names_from_hub_metadata(pa.table({"label": [0]}).replace_schema_metadata({b"huggingface": told}), "label")
        is None
    )


def test_mistakes_of_the_program_are_not_called_damaged_files():
    """A catch-all would blame the file for them."""
    for mistake in (AttributeError, KeyError, IndexError, RuntimeError, RecursionError):
        with pytest.raises(mistake):
            call_turning_value_errors_into_user_errors(
                lambda mistake=mistake: (_ for _ in ()).throw(mistake("a typo")), "algorithm"
            )
    with pytest.raises(pf.UserError, match=r"algorithm has an invalid value \(OverflowError: too large\)"):
        call_turning_value_errors_into_user_errors(
            lambda: (_ for _ in ()).throw(OverflowError("too large")), "algorithm"
        )


def test_where_a_yaml_file_is_wrong_is_told():
    with pytest.raises(ValueError, match="line 2, column 5: mapping values are not allowed"):
        parse_yaml("a: 1\nb: c: d")


def test_names_in_a_manifest_that_no_file_can_have_are_no_files(tmp_path):
    """The counts found it: `report` ended in "File name too long"."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    names = ["models/" + "9" * 5000, "models//a", "../outside", "loop", "\0", "models/a/b"]
    (tmp_path.parent / "outside").write_text("x")
    found = describe_changed_files(tmp_path, {}, {"files": dict.fromkeys(names, "0" * 64)}, {}, include_outputs=True)
    assert found == [
        f"{tmp_path / 'models/a'} was changed since the run wrote it; `polyfed resume {tmp_path}` writes it again"
    ]


BOMBS = {
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "merged mappings": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    "a value that holds itself": "a: &a {b: [*a]}",
    "lists": "[" * 200_000,
    "dashes": "- " * 200_000,
    "closed lists": "[" * 200_000 + "]" * 200_000,
    "mappings": "{a: " * 200_000,
    "keys": "? " * 200_000,
    "lines": "\n".join(" " * i + "a:" for i in range(2000)),
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_yaml_of_few_bytes_takes_neither_time_nor_the_process(text):
    """libyaml itself would end the process with a fault of memory, or take hours."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"levels deep|maximum nesting depth|more than 2000000 values|holds itself"):
        parse_yaml(text)
    assert time.monotonic() - began < 5


def test_aliases_and_merged_mappings_are_read_as_ever():
    text = "base: &b {x: 1, y: [1, 2]}\nmore: {<<: *b, x: 2}\nsame: *b\n"
    assert parse_yaml(text) == yaml.safe_load(text)
