"""What is read is a regular file of a sane size; anything else is a sentence at once, and nothing waits."""

import ast
import errno
import io
import json
import os
import re
import socket
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import polyfed
from polyfed.core.errors import UserError
from polyfed.core.io.array_files import read_npy, read_npz, read_safetensors
from polyfed.core.io.atomic_files import (
    check_regular_file,
    expand_user_path,
    open_atomic_file,
    open_file,
    open_lock_file,
    read_file,
    read_text_file,
    remove_file_or_folder,
    write_file_atomically,
)
from tests.special_files import endless, folder, nowhere, pipe, sparse

SOURCE = Path(polyfed.__file__).parent


def of_a_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        place = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(place)


def circle(path):
    path.symlink_to(path.name)


SPECIAL = {
    pipe: "it is a named pipe",
    endless: "it is a device",
    sparse: "it has 1048576 MiB, and at most",
    nowhere: "it is a symbolic link to 'nothing-here', which does not exist",
    folder: "Is a directory",
    of_a_socket: "it is a socket",
    circle: "symbolic links",
}


@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "read", [read_file, read_text_file, check_regular_file, open_file, read_safetensors, read_npz, read_npy]
)
def test_what_is_no_regular_file_of_a_sane_size_is_a_sentence(tmp_path, make, read):
    make(tmp_path / "file")
    with pytest.raises(UserError, match=f"^cannot read .*file: .*{SPECIAL[make]}"):
        read(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_its_owner_has_closed_is_a_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("a")
    file.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        read_file(file)


def test_a_refusal_of_the_system_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a")
    real = os.open

    def refuse(path, *more, **words):
        if str(path).endswith("file"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *more, **words)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"^cannot read .*file: Permission denied"):
        read_file(tmp_path / "file")


def test_what_is_missing_stays_the_exception_of_python(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "file")


def test_regular_files_and_links_to_them_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n\xc3\xa4")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == b"a\r\nb\rc\n\xc3\xa4"
    assert read_text_file(tmp_path / "link") == (tmp_path / "link").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="at most 0 MiB"):
        read_file(tmp_path / "file", 8)
    assert len(read_file(tmp_path / "file", 9)) == 9


def test_a_pipe_in_place_of_a_lock_is_not_waited_for(tmp_path):
    pipe(tmp_path / ".lock")
    with pytest.raises(UserError, match="it is a named pipe"):
        open_lock_file(tmp_path / ".lock")


# -- what headers claim ----------------------------------------------------------------------------------------------


def header(shape, kind="<f8"):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": kind, "fortran_order": False, "shape": shape})
    return content.getvalue()


@pytest.mark.parametrize("shape", [(10**11,), (10**6, 10**6), (2**62, 4), (9,)])
def test_an_array_whose_header_claims_more_than_there_is(tmp_path, shape):
    (tmp_path / "a.npy").write_bytes(header(shape) + bytes(64))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header(shape) + bytes(64))
    for read, name in ((read_npy, "a.npy"), (read_npz, "a.npz")):
        with pytest.raises(ValueError, match=r"the header of .* claims \d+ bytes, and there are 64"):
            read(tmp_path / name)


def test_an_archive_that_unpacks_to_more_than_is_sane(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header((2**20,)) + bytes(2**23))
    assert (tmp_path / "a.npz").stat().st_size < 2**15
    with pytest.raises(UserError, match=r"would unpack to 8 MiB, and at most 1 MiB are read of it"):
        read_npz(tmp_path / "a.npz", max_bytes=2**20)
    assert read_npz(tmp_path / "a.npz")["x"].shape == (2**20,)


def test_whole_arrays_are_read(tmp_path):
    arrays = {
        "x": np.arange(6.0).reshape(2, 3),
        "s": np.array(["a", "ß"]),
        "n": np.array(3),
        "e": np.zeros((0, 4), np.uint8),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = read_npz(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    assert all(
        np.array_equal(found[name], value) and found[name].dtype == value.dtype for name, value in arrays.items()
    )
    assert read_npz(tmp_path / "a.npz", ["x", "other"]).keys() == {"x"}
    np.save(tmp_path / "a.npy", arrays["x"])
    assert np.array_equal(read_npy(tmp_path / "a.npy"), arrays["x"])


def packed(told, rest=b""):
    text = json.dumps(told).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        bytes(64),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**8) + bytes(100),
        packed({"w": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, bytes(8)),
        packed({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 8]}}, bytes(8)),
        packed({"w": {"dtype": "F32", "shape": [2], "data_offsets": "many"}}, bytes(8)),
        packed({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(9)),
        packed([1, 2]),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_tensors_whose_header_lies(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_safetensors(tmp_path / "a.safetensors")


def test_whole_tensors_are_read(tmp_path):
    tensors = {"w": torch.arange(6.0).view(2, 3), "e": torch.zeros(0, 2), "n": torch.tensor(3)}
    (tmp_path / "a.safetensors").write_bytes(safetensors.torch.save(tensors, {"made": "by a test"}))
    found = read_safetensors(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "none.safetensors").write_bytes(safetensors.torch.save({}))
    assert read_safetensors(tmp_path / "none.safetensors") == {}


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", " ", "\t", "a\0b", "~no-such-user-here/runs", 3, None])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(UserError, match=r"^out "):
        expand_user_path(path, "out")


def test_the_home_folder_is_meant_by_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_user_path("~/runs/a") == tmp_path / "runs/a"
    assert expand_user_path(Path("~")) == tmp_path
    assert expand_user_path("runs/~a") == Path("runs/~a")
    assert expand_user_path(".") == Path()


# -- every reader ----------------------------------------------------------------------------------------------------

READERS = {
    "open", "read_bytes", "read_text", "memory_map", "read_csv", "loadtxt", "genfromtxt", "fromfile", "memmap", "load_file",
    "safe_open", "ParquetFile", "file_digest",
}  # fmt: skip
LOADERS = {"np", "numpy", "torch", "torch.jit", "json", "yaml", "pickle", "tomllib", "safetensors.torch"}
LOADERS |= {"pq", "pyarrow.parquet"}
GUARDED = ("check_regular_file(", "open_file(", "read_file(", "read_text_file(")
ALLOWED = {  # file -> how many such calls, and why
    # Nothing is read from a file of somebody else's.
    "simulation/storage/checkpoints/state_store.py": (1, "creates the file"),
    "data/sources/by_client/table_clients.py": (3, "two streams of `open_file`, and a copy that it wrote itself"),
    "cli/commands/options/recipes.py": (2, "recipes that polyfed ships"),
    "cli/static_registry.py": (1, "polyfed's own source"),
    "__init__.py": (1, "polyfed's own source"),
    "core/machine/memory_limit.py": (1, "the system says how much memory there is"),
    "data/sources/published/vision.py": (1, "the digits that come with scikit-learn"),
    "report/page/elements.py": (1, "the page's own style and scripts"),
    "cli/main.py": (1, "what is left to print goes nowhere"),
    "data/sources/published/heart.py": (1, "the hospitals that polyfed ships"),
    "deploy/trial/project.py": (1, "templates that polyfed ships"),
    "report/export/mlflow_models.py": (1, "templates that polyfed ships"),
    "report/export/formats.py": (1, "bytes in memory"),
    "report/data/subgroup_columns.py": (1, "a stream of `open_file`"),
    "core/serialization.py": (1, "bytes in memory"),
    "deploy/protocol/wire.py": (1, "bytes in memory"),
    # What is opened is guarded before, or written.
    "core/io/atomic_files.py": (5, "the guard itself, and what writes"),
    "core/io/array_files.py": (3, "a stream of `open_file`"),
    "data/formats/images.py": (1, "bytes in memory, or a stream of `open_file`"),
    "data/formats/files.py": (4, "after `check_regular_file` of the same path"),
    "data/formats/lazy_images.py": (2, "`read_bytes` of encoded images, which is guarded"),
    "data/tabular/csv_reader.py": (1, "after `open_file` of the same path"),
    "simulation/storage/predictions/predictions_parquet.py": (2, "a stream of `open_file`"),
    "simulation/storage/integrity.py": (1, "a stream of `open_file`"),
    "deploy/trial/local_trial.py": (1, "a log that is written"),
    # No file at all.
    "simulation/federate.py": (1, "a run directory is opened"),
    "deploy/server/server.py": (1, "a run directory is opened"),
    "deploy/server/server_config.py": (1, "a run directory is opened"),
    "report/export/folder.py": (1, "templates that polyfed ships"),
}


def reading_calls(text):
    """The calls by which Python text reads files without the guard."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            reads = name in READERS or (name in ("load", "read_table", "read_schema") and owner in LOADERS)
            if reads and not any(guard in ast.unparse(node) for guard in GUARDED):
                yield ast.unparse(node)


def test_every_read_of_a_file_is_guarded():
    texts = {file.relative_to(SOURCE).as_posix(): file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")}
    named = re.compile("|".join([*READERS, r"\.load\(", "read_table", "read_schema"]))  # parsing takes long
    found = {file: list(reading_calls(text)) for file, text in texts.items() if named.search(text)}
    for file, calls in found.items():
        most, _ = ALLOWED.get(file, (0, ""))
        assert len(calls) <= most, f"{file} reads files without polyfed.core.io.atomic_files: {calls}"
    assert not (idle := [file for file in ALLOWED if not found.get(file)]), f"no longer needed: {idle}"


@pytest.mark.parametrize("text", ["path.read_bytes()", "open(p)", "np.load(p)", "pq.read_csv(p)", "p.open('rb')"])
def test_an_unguarded_read_is_found(text):
    assert list(reading_calls(text))
    assert not list(reading_calls("np.load(open_file(p))"))


def test_removing_a_link_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove_file_or_folder(tmp_path / "link")
    assert (tmp_path / "folder/file").read_text() == "precious"
    for name in ("folder/file", "folder", "folder"):  # the last is not there any more
        remove_file_or_folder(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_two_that_write_one_file_at_once_leave_the_whole_file_of_one(tmp_path):
    page = tmp_path / "report.html"
    with open_atomic_file(page) as first:
        first.write(b"first, ")
        with open_atomic_file(page) as second:
            second.write(b"the second page")
        assert page.read_bytes() == b"the second page"
        first.write(b"to its end")
    assert page.read_bytes() == b"first, to its end"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_name_of_255_bytes_can_be_written_and_an_error_leaves_the_old_file(tmp_path):
    file = tmp_path / ("a" * 250 + ".html")
    with open_atomic_file(file) as new:
        new.write(b"old")
    with pytest.raises(TypeError), open_atomic_file(file) as new:
        new.write("no bytes")
    assert os.listdir(tmp_path) == [file.name]
    assert file.read_bytes() == b"old"


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    with pytest.raises(FileNotFoundError) as no_folder:
        write_file_atomically(tmp_path / "nowhere" / "a.csv", b"")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as no_file:
        write_file_atomically(tmp_path / "folder", b"")
    assert [error.value.filename for error in (no_folder, no_file)] == [
        str(tmp_path / "nowhere" / "a.csv"),
        str(tmp_path / "folder"),
    ]
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_cannot_be_removed_is_named_in_full(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError) as error:
        remove_file_or_folder(tmp_path / "a")
    assert error.value.filename == str(tmp_path / "a")
