"""Pipes, devices, sparse files of a terabyte, links to nothing and folders in place of files: a sentence and status 2, at
once, from every command that reads them."""

import csv
import gzip
import json
import shutil
import struct
import time
import warnings
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.core.io.text.terminal_text import escape_spreadsheet_formula
from polyfed.data.formats.files import read_idx_file
from polyfed.data.formats.images import MAX_PIXELS, decode_images, read_images
from polyfed.data.formats.text import load_vocabulary
from polyfed.data.sources.registry import SOURCES
from polyfed.data.tabular.schema import read_schema
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.simulation.storage.predictions import prediction_store as predictions
from polyfed.simulation.storage.predictions import predictions_parquet
from tests.few_cases import few
from tests.special_files import endless, folder, nowhere, pipe, sparse

SPECIAL = [pipe, endless, sparse, nowhere, folder]
special = pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A finished run on a table, which nobody changes."""
    place = tmp_path_factory.mktemp("original")
    rows = [f"{k % 7},{'ab'[k % 2]},{'yes' if k % 3 else 'no'},{'north' if k < 30 else 'south'}" for k in range(60)]
    (place / "table.csv").write_text("\n".join(["age,sex,ill,site", *rows]) + "\n")
    words = ["--data", "table", "--data.path", str(place / "table.csv"), "--data.target", "ill", "--data.site", "site"]
    more = [
        "--model",
        "mlp",
        "--rounds",
        "1",
        "--algorithm",
        "fedavg",
        "--workers",
        "0",
        "--quiet",
        "--baselines",
        "[]",
    ]
    assert main(["run", *words, *more, "--out", str(place / "run")]) == 0
    return place


@pytest.fixture
def run(original, tmp_path):
    """A copy of the run."""
    shutil.copytree(original / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def said(capsys):
    """Carries out a command that must end in one sentence and status 2, at once; the sentence."""

    def said(*words):
        capsys.readouterr()
        began = time.monotonic()
        status = main([str(word) for word in words])
        error = capsys.readouterr().err.strip()
        assert status == 2, error
        assert error.startswith("polyfed: ")
        assert "\n" not in error
        assert "Traceback" not in error
        assert time.monotonic() - began < 20  # of a machine under load; a file that hangs takes for ever
        return error

    return said


def put(make, file):
    """Puts something special in the place of a file."""
    file.unlink()
    make(file)


@special
@pytest.mark.parametrize("name", few(["config.yaml", "manifest.json", "metrics.jsonl"], ["manifest.json"]))
@pytest.mark.one_case
def test_report_and_resume(run, said, make, name):
    put(make, run / name)
    assert name in said("report", run)
    assert name in said("resume", run)


@special
def test_run_and_compare_of_a_file(tmp_path, said, make):
    make(tmp_path / "mine.yaml")
    for command in ("run", "compare", "data"):
        assert "mine.yaml" in said(command, tmp_path / "mine.yaml")


@special
@pytest.mark.parametrize("ending", [".safetensors", ".preprocessing.json", ".signature.json"])
@pytest.mark.one_case
def test_predict_and_export(run, original, said, tmp_path, make, ending):
    put(make, run / "models" / f"north{ending}")
    if ending != ".signature.json":
        assert "north" in said("predict", run, original / "table.csv", "--client", "north")
    assert "north" in said("export", run, "--client", "north", "--to", tmp_path / "to")
    assert not (tmp_path / "to").exists()


@special
@pytest.mark.one_case
def test_predict_of_a_table_that_is_none(run, said, tmp_path, make):
    make(tmp_path / "rows.csv")
    assert "rows.csv" in said("predict", run, tmp_path / "rows.csv", "--client", "north")


@special
@pytest.mark.parametrize(
    "name", few(["weights.safetensors", "signature.json", "preprocessing.json"], ["signature.json"])
)
@pytest.mark.one_case
def test_predict_from_an_exported_folder(run, original, said, tmp_path, make, name):
    assert main(["export", str(run), "--client", "north", "--to", str(tmp_path / "to")]) == 0
    put(make, tmp_path / "to" / name)
    said("predict", tmp_path / "to", original / "table.csv")


@special
@pytest.mark.one_case
def test_predictions_and_checkpoints(run, said, make):
    put(make, run / "predictions" / "north.parquet")
    with pytest.raises(UserError, match=r"north\.parquet"):
        predictions.read_predictions(run, "north")
    put(make, next((run / "checkpoint").glob("round-*")) / "server.safetensors")
    assert "checkpoint" in said("resume", run)


@special
@pytest.mark.parametrize("name", ["comparison.yaml", "comparison.json"])
def test_compare(tmp_path, said, make, name):
    (tmp_path / "comparison.yaml").write_text("format: 1\n")
    (tmp_path / "comparison.json").write_text("{}")
    put(make, tmp_path / name)
    assert "comparison" in said("compare", tmp_path)


FILES = {"table": "a.csv", "parquet": "a.parquet", "npz": "a.npz", "imagelist": "a.csv", "sentiment140": "a.csv"}


@special
@pytest.mark.parametrize("source", few(sorted(FILES.keys() & SOURCES.keys()), ["table", "npz"]))
def test_data_sources(tmp_path, said, make, source):
    make(tmp_path / FILES[source])
    extra = {"table": ["--data.target", "y"]}.get(source, [])
    said("data", "--data", source, "--data.path", tmp_path / FILES[source], *extra)


@special
def test_files_that_are_read_by_functions(tmp_path, make):
    make(tmp_path / "file")
    for read in (read_schema, LayerCatalogue.read_yaml, load_vocabulary, read_idx_file):
        with pytest.raises(UserError, match="file"):
            read(tmp_path / "file")
    with pytest.raises(UserError, match="file"):
        read_images([tmp_path / "file"], "L", 8)


# -- what is small and becomes large ---------------------------------------------------------------------------------


def png(width, height):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [60_000, 16_000])
def test_a_picture_of_gigapixels(tmp_path, side):
    assert side**2 > MAX_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL's own, of half as many
        with pytest.raises(UserError, match="pixels"):
            decode_images([png(side, side)], "L", 8)


def test_a_gigapixel_picture_that_says_it_is_a_jpeg():
    header = (
        b"\xff\xd8\xff\xc0\x00\x11\x08" + struct.pack(">HH", 65000, 65000) + b"\x03\x01\x11\x00\x02\x11\x01\x03\x11\x01"
    )
    with pytest.raises(UserError, match="an image of the data"):
        decode_images([header + bytes(100)], "RGB")


@pytest.mark.parametrize("shape", [(10**9, 28, 28), (2**32 - 1,) * 3, (10,)])
def test_an_idx_file_that_claims_more_than_it_has(tmp_path, shape):
    content = struct.pack(">HBB", 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + bytes(9)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError):
        read_idx_file(tmp_path / "a.gz")


def test_an_idx_file_that_unpacks_to_more_than_it_says(tmp_path):
    content = struct.pack(">HBBI", 0, 8, 1, 10) + bytes(2**24)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="11 values"):
        read_idx_file(tmp_path / "a.gz")


def test_predictions_with_more_rows_than_a_run_keeps(run, monkeypatch):
    monkeypatch.setattr(predictions_parquet, "MOST_ROWS", 2_000)
    file, number = run / "predictions" / "north.parquet", 300_000
    old = pq.read_table(file)
    row = {name: old.column(name)[0].as_py() for name in ("round", "split", "example")}
    kinds = {name: old.schema.field(name).type for name in row}
    table = pa.table({name: pa.repeat(pa.scalar(value, kinds[name]), number) for name, value in row.items()})
    pq.write_table(table.replace_schema_metadata(old.schema.metadata), file)
    assert file.stat().st_size < 2**20
    with pytest.raises(UserError, match="claims 300000 rows with 0 outputs, more than a run keeps"):
        predictions.read_predictions(run, "north")


def test_an_archive_whose_header_lies(tmp_path, said):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((4, 2)), y_train=np.zeros(4, int))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole.replace(b"(4, 2)", b"(4e9,)"[:6]).replace(b"(4,), }", b"(99999,"))
    said("data", "--data", "npz", "--data.path", tmp_path / "a.npz")


def test_deep_json_and_yaml_that_grows(run, said):
    (run / "manifest.json").write_text("[" * 100_000)
    said("resume", run)
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 12)]
    (run / "config.yaml").write_text("\n".join(lines))
    assert "values" in said("report", run)
    assert "values" in said("run", run / "config.yaml")


def test_metrics_nested_deeply_or_with_numbers_that_are_none(run, said):
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n" + "[" * 100_000 + "\n")
    assert "line 2" in said("report", run)


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["run --out", "compare --out", "report", "resume", "predict", "warmstart"])
def test_empty_paths(said, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["rows.csv"] if words == "predict" else []
    quick = ["--data", "digits", "--model", "mlp", "--rounds", "1"] if "--out" in words else []
    assert "empty" in said(*words.split(), "", *more, *quick)
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_by_a_tilde(run, original, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["report", "~/run", "--out", "~/page.html"]) == 0
    assert (tmp_path / "page.html").is_file()
    assert main(["resume", "~/run", "--quiet"]) == 0
    shutil.copy(original / "table.csv", tmp_path / "rows.csv")
    assert main(["predict", "~/run", "~/rows.csv", "--client", "north", "--out", "~/said.csv"]) == 0
    assert (tmp_path / "said.csv").is_file()
    assert main(["export", "~/run", "--client", "north", "--to", "~/exported"]) == 0
    assert (tmp_path / "exported/README.md").is_file()
    assert not (tmp_path / "~").exists()


# -- spreadsheets ----------------------------------------------------------------------------------------------------

FORMULAS = ["=1+1", "+a", "-a", "@SUM(A1)", "＝1+1"]


@pytest.mark.filterwarnings("ignore:column 'kind' has '=1.1' and:UserWarning")
def test_no_cell_of_a_csv_file_is_a_formula(tmp_path, capsys):
    names = [*FORMULAS, "-1", "1e-3", "ill"]
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["age", "kind"], *([k % 9, names[k % len(names)]] for k in range(180))])
    words = ["--data", "table", "--data.path", str(tmp_path / "t.csv"), "--data.target", "kind", "--data.clients", "2"]
    more = [
        "--data.partition",
        "iid",
        "--model",
        "mlp",
        "--rounds",
        "6",
        "--algorithm",
        "fedavg",
        "--algorithm.lr",
        "0.5",
    ]
    assert main(["run", *words, *more, "--workers", "0", "--quiet", "--out", str(tmp_path / "run")]) == 0
    client = next((tmp_path / "run/models").glob("*.safetensors")).stem
    out = tmp_path / "said.csv"
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "t.csv"), "--client", client, "--out", str(out)]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert escape_spreadsheet_formula("\ta") == "'\ta"  # which a table read from a file cannot hold
    cells = {cell for row in rows for cell in row}
    assert all(escape_spreadsheet_formula(cell) == cell for cell in cells)
    assert {row[rows[0].index("predicted")] for row in rows[1:]} <= {"-1", "1e-3", "ill", *(f"'{n}" for n in FORMULAS)}


def test_a_target_called_like_a_formula(tmp_path):
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["age", "=cmd()"], *([k % 9, 0.5 * k] for k in range(40))])
    words = [
        "--data",
        "table",
        "--data.path",
        str(tmp_path / "t.csv"),
        "--data.target",
        "=cmd()",
        "--data.clients",
        "2",
    ]
    more = ["--data.partition", "iid", "--model", "mlp", "--rounds", "1", "--algorithm", "fedavg", "--workers", "0"]
    assert main(["run", *words, *more, "--quiet", "--out", str(tmp_path / "run")]) == 0
    client = next((tmp_path / "run/models").glob("*.safetensors")).stem
    out = tmp_path / "said.csv"
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "t.csv"), "--client", client, "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").splitlines()[0] == '"row","\'=cmd()"'
