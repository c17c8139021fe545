"""What is written goes where it should, is its owner's alone, and a full disk says what to do."""

import ast
import errno
import os
import re
import stat
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.algorithms import Local
from polyfed.cli.main import main
from polyfed.core.io import atomic_files
from polyfed.testing import assert_runs_equal, small_clients

pytestmark = pytest.mark.slow  # .ci/run has it

SOURCE = Path(pf.__file__).parent
FIRST = ["--algorithm", "local", "--data.clients", "2", "--rounds", "2", "--workers", "0", "--quiet"]
ONE = ["--seeds", "0", "--tune", "none", "--no-references"]
WRITE = {
    "write_text",
    "write_bytes",
    "mkdir",
    "makedirs",
    "savefig",
    "save_file",
    "savez",
    "savez_compressed",
    "touch",
    "OSFile",
}


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")]}


def test_what_a_run_a_report_and_a_comparison_leave_is_their_owners_alone(tmp_path, monkeypatch, umask):
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert main(["run", *FIRST, "--algorithm", "pfedla", "--baselines", "[local]", "--out", "new/run"]) == 0
    assert main(["report", "new/run"]) == 0
    assert (
        main(
            [
                "compare",
                *FIRST,
                "--algorithms",
                "local",
                "--seeds",
                "0",
                "--tune",
                "none",
                "--no-references",
                "--out",
                "c",
            ]
        )
        == 0
    )
    assert main(["report", "c"]) == 0
    for folder in (Path("new/run"), Path("c")):
        found = modes(folder)
        assert len(found) > 15
        for name, mode in found.items():
            # Pictures can be passed on; nobody else reaches them where they are.
            loose = name.startswith("report/") and name.endswith(".png")
            assert mode == (0o700 if (folder / name).is_dir() else 0o644 if loose else 0o600), name
    assert stat.S_IMODE(Path("new").stat().st_mode) == 0o755  # not the run's
    assert main(["report", "new/run", "--out", "page.html"]) == 0
    assert stat.S_IMODE(Path("page.html").stat().st_mode) == 0o644  # to pass on


def test_no_link_is_followed(tmp_path):
    """The review's attack, at every name that a run writes and at every partial name."""
    whole = pf.federate(small_clients(), Local(lr=0.1), rounds=3, workers=0, out=tmp_path / "whole")
    pf.federate(small_clients(), Local(lr=0.1), rounds=3, workers=0, out=tmp_path / "run")
    out, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("precious")
    for path in [path for path in out.rglob("*") if path.is_file()]:
        path.with_name(f".partial-{path.name}").symlink_to(victim)
        if path.parent.name in ("models", "predictions"):
            path.unlink()
            path.symlink_to(victim)
    (out / ".partial-report.html").symlink_to(victim)
    (out / "report.html").symlink_to(victim)
    # The last round was lost, so that everything is written again.
    (out / "metrics.jsonl").write_text("".join((out / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]))
    with pytest.warns(RuntimeWarning, match="the one before it is used|left out"):
        run = pf.resume(out, clients=small_clients())
    assert_runs_equal(run, whole)
    assert main(["report", str(out)]) == 0
    assert victim.read_text() == "precious"
    assert not [path for path in out.rglob("*") if path.is_symlink() and path.name.startswith(".partial-") is False]


@pytest.mark.parametrize(
    "name", ["checkpoint", "models", "predictions", "analysis", "report", "metrics.jsonl", ".lock"]
)
def test_a_link_in_place_of_a_folder_or_of_the_metrics_is_refused(tmp_path, monkeypatch, name, capsys):
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    Path("elsewhere/file").write_text("precious")
    assert main(["run", *FIRST, "--algorithm", "pfedla", "--checkpoint-every", "2", "--out", "run"]) == 0
    target = Path("run") / name
    if target.is_dir():
        for path in sorted(target.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        target.rmdir()
    else:
        target.unlink(missing_ok=True)
    target.symlink_to(Path("elsewhere/file").resolve() if "." in name else Path("elsewhere").resolve())
    for path in Path("run/checkpoint").glob("*/*") if name != "checkpoint" else ():
        path.write_bytes(b"")
    status = main(["report", "run"] if name == "report" else ["resume", "run", "--quiet"])
    told = capsys.readouterr()
    assert status in ((0,) if name == "report" else (1, 2))
    assert os.listdir("elsewhere") == ["file"]
    assert Path("elsewhere/file").read_text() == "precious"
    assert "Traceback" not in told.err
    assert name == "report" or name in told.err or re.search("checkpoint|symbolic link", told.err)


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_full_disk_names_the_file_and_what_to_do(tmp_path, monkeypatch, operation, capsys):
    """The disk is full from the n-th write on; when there is room again, the run goes on to the same end."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", *FIRST, "--out", "whole"]) == 0
    refused = 0
    for number in range(0, 60, 3):
        with monkeypatch.context() as patch:
            full(patch, number, operation)
            status = main(["run", *FIRST, "--out", f"run-{number}"])
        told = " ".join(capsys.readouterr().err.split())
        if status == 0:
            break
        refused += 1
        assert status in (1, 2)
        assert "Traceback" not in told
        assert "No space left on device" in told
        if not Path(f"run-{number}/config.yaml").exists():
            assert main(["run", *FIRST, "--out", f"run-{number}"]) == 0
            continue
        assert re.search(rf"go on with (`polyfed resume run-{number}`|the same command)", told)
        assert re.search(rf"No space left on device: run-{number}(/\S+)?; ", told), told
        assert main(["resume", f"run-{number}", "--quiet"]) == 0
    assert refused > 3
    for folder in ("models", "predictions"):
        for path in Path("whole", folder).iterdir():
            assert Path(f"run-{number - 3}", folder, path.name).read_bytes() == path.read_bytes()


def full(patch, number, operation):
    """Lets so many writes pass, and none after."""
    left = [number]
    good = {"write": atomic_files.os.fdopen, "fsync": atomic_files.os.fsync}[operation]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return good(descriptor)

    def fdopen(descriptor, mode="r", *more, **words):
        more = (mode, *more)
        if mode == "rb":  # what is read finds room
            return good(descriptor, *more, **words)
        left[0] -= 1
        if left[0] >= 0:
            return good(descriptor, *more, **words)
        os.close(descriptor)
        return good(os.open("/dev/full", os.O_RDWR), *more, **words)

    patch.setattr(
        atomic_files.os, "fdopen" if operation == "write" else "fsync", fdopen if operation == "write" else fsync
    )


def test_a_full_disk_in_a_comparison_names_the_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", *FIRST, *ONE, "--algorithms", "local,fedavg", "--out", "c"]
    for parallel in ("1", "2"):
        with monkeypatch.context() as patch:
            full(patch, 9, "fsync")
            assert main([*words, "--parallel", parallel]) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert re.search(r"No space left on device: c/\S+; .* go on with `polyfed compare c`$", told), told
    assert main(words) == 0


def test_nothing_is_written_in_another_way():
    """Calls that write to the disk, outside of `core.files`; what a user names a path for may stay."""
    allowed = {
        "data/formats/text.py": "a vocabulary, to a path of the user's",
        "data/sources/published/xray.py": "a cache, at a path of the user's",
        "graphs/catalogue.py": "a catalogue, to a path of the user's; it is public",
        "cli/commands/deploy/flower_command.py": "a temporary copy of the app, in a folder of its own",
        "data/tabular/schema.py": "a table's schema, to a path of the user's",
        "report/export/mlflow_models.py": "its own code, in a temporary folder",
        "simulation/storage/directory.py": "into memory",
        "data/plot.py": "into memory",
        "data/sources/by_client/row_index.py": "into memory",
    }
    # A project of Flower's is a tree of files that a user asks for, and its trial runs beside it.
    projects = {f"deploy/{name}.py" for name in ("trial/project", "trial/local_trial", "flower/superlink")}
    for file in SOURCE.rglob("*.py"):
        name = str(file.relative_to(SOURCE))
        if name == "core/io/atomic_files.py" or name in projects:
            continue
        found = {call for call in map(writes, ast.walk(ast.parse(file.read_text(encoding="utf-8")))) if call}
        assert not found or name in allowed, (name, found)


def writes(node):
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    if called in WRITE:
        return called
    if called == "save" and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("np", "torch"):
        return called
    if called == "open":
        constants = [a.value for a in [*node.args, *(w.value for w in node.keywords)] if isinstance(a, ast.Constant)]
        if any(isinstance(value, str) and re.fullmatch(r"[wax]b?\+?|r\+b?", value) for value in constants):
            return called
    return None


def test_the_list_would_find_a_new_one():
    for line in (
        "p.write_text(s)",
        "open(p, 'w')",
        "p.open('ab')",
        "p.open(mode='x')",
        "p.mkdir()",
        "np.save(p, x)",
        "arrow.OSFile(p)",
    ):
        assert writes(ast.parse(line).body[0].value), line
    for line in ("open(p)", "p.open('rb')", "p.read_text()", "io.BytesIO()"):
        assert not writes(ast.parse(line).body[0].value), line


def test_a_full_disk_says_the_call_that_goes_on_with_a_run_of_python(tmp_path, monkeypatch):
    """Of a run whose clients were made in Python, both where it is trained and where it is resumed."""
    clients, call = small_clients(2), re.escape("go on with `polyfed.resume('run', clients=...)`")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        full(patch, 20, "fsync")
        with pytest.raises(OSError, match=call):
            pf.federate(clients, Local(lr=0.1), rounds=3, workers=0, out="run")
    with monkeypatch.context() as patch:
        full(patch, 0, "fsync")
        with pytest.raises(OSError, match=call):
            pf.resume("run", clients=clients)
    assert_runs_equal(pf.resume("run", clients=clients), pf.federate(clients, Local(lr=0.1), rounds=3, workers=0))
