"""Checkpoints: whole or not there, never half."""

import pytest
import torch

from polyfed.errors import UserError
from polyfed.runs import checkpoint as checkpoints
from polyfed.runs.checkpoint import Checkpoint
from polyfed.runs.directory import RunDirectory, read_metrics


def make(number, value):
    mine = {"a/b": {"model": {"w": torch.full((3,), value)}}, "c": {"counter": 2}, "d": {}}
    return Checkpoint(number, {"model": {"w": torch.full((2, 2), value)}, "list": [1, 2.5, "x", None, True]}, mine)


def test_round_trip_and_only_two_are_kept(tmp_path):
    for number in (1, 2, 3):
        checkpoints.save(tmp_path, make(number, float(number)), {"a/b"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000002", "round-000003"]
    loaded, notes = checkpoints.load(tmp_path)
    assert notes == []
    assert (loaded.round, loaded.state["list"]) == (3, [1, 2.5, "x", None, True])
    assert torch.equal(loaded.state["model"]["w"], torch.full((2, 2), 3.0))
    assert loaded.minds["c"] == {"counter": 2}
    assert loaded.minds["d"] == {}
    assert torch.equal(loaded.minds["a/b"]["model"]["w"], torch.full((3,), 3.0))


def test_unchanged_private_state_is_linked_not_copied(tmp_path):
    checkpoints.save(tmp_path, make(1, 1.0), {"a/b"})
    checkpoints.save(tmp_path, make(2, 1.0), set())
    one, two = (tmp_path / f"round-00000{n}" / "client-a%2Fb.safetensors" for n in (1, 2))
    assert one.stat().st_ino == two.stat().st_ino
    checkpoints.save(tmp_path, make(3, 9.0), {"a/b"})
    assert checkpoints.load(tmp_path)[0].minds["a/b"]["model"]["w"][0] == 9.0


@pytest.mark.parametrize("name", ["server.safetensors", "client-a%2Fb.safetensors", "complete.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_used(tmp_path, name, damage):
    for number in (1, 2):
        checkpoints.save(tmp_path, make(number, float(number)), {"a/b"})
    path = tmp_path / "round-000002" / name
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    else:
        path.unlink()
    loaded, notes = checkpoints.load(tmp_path)
    assert loaded.round == 1
    assert len(notes) == 1
    assert "round-000002 is damaged" in notes[0]


def test_a_half_written_checkpoint_is_not_seen_and_is_cleaned_up(tmp_path):
    checkpoints.save(tmp_path, make(1, 1.0), {"a/b"})
    partial = tmp_path / ".partial-round-000002"
    partial.mkdir()
    (partial / "server.safetensors").write_bytes(b"half")
    assert checkpoints.load(tmp_path)[0].round == 1
    checkpoints.save(tmp_path, make(2, 2.0), {"a/b"})
    assert not partial.exists()
    assert checkpoints.load(tmp_path)[0].round == 2


def test_a_failure_while_writing_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, make(1, 1.0), {"a/b"})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(tmp_path, make(2, 2.0), {"a/b"})
    assert checkpoints.load(tmp_path)[0].round == 1


def test_nothing_to_load(tmp_path):
    assert checkpoints.load(tmp_path / "nowhere") == (None, [])


def test_metrics_after_the_checkpoint_and_half_lines_are_dropped(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    for number in (1, 2, 3):
        directory.append({"round": number})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "se')
    assert [r["round"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert [r["round"] for r in directory.keep_rounds(2)] == [1, 2]
    assert [r["round"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    with pytest.raises(UserError, match="does not hold rounds 1 to 5"):
        directory.keep_rounds(5)
    directory.close()


def test_a_run_directory_has_one_writer(tmp_path):
    """The lock is per process, so another process has to try."""
    import subprocess
    import sys

    directory = RunDirectory.create(tmp_path / "run")
    directory.write_config({})
    code = f"from polyfed.runs.directory import RunDirectory; RunDirectory.open({str(tmp_path / 'run')!r})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is writing to the run directory" in other.stderr
    directory.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
