"""Checkpoints: whole or not there, never half."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.core.serialization import serialize_state
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.checkpoints.state_store import STORE_FILE
from polyfed.simulation.storage.directory import RunDirectory, read_metrics
from polyfed.simulation.storage.paths import safe_file_name
from tests.stored_states import change_rows, damage_states


def make(number, value):
    own = {"a/b": {"model": {"w": torch.full((3,), value)}}, "c": {"counter": 2}, "d": {}}
    return Checkpoint(number, {"model": {"w": torch.full((2, 2), value)}, "list": [1, 2.5, "x", None, True]}, own)


def test_round_trip_and_only_two_are_kept(tmp_path):
    for number in (1, 2, 3):
        checkpoints.save_checkpoint_and_remove_older(tmp_path, make(number, float(number)), number - 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000002", "round-000003", STORE_FILE]
    loaded, notes = checkpoints.load_newest_checkpoint(tmp_path)
    assert notes == []
    assert (loaded.round, loaded.state["list"]) == (3, [1, 2.5, "x", None, True])
    assert torch.equal(loaded.state["model"]["w"], torch.full((2, 2), 3.0))
    assert loaded.client_states["c"] == {"counter": 2}
    assert loaded.client_states["d"] == {}
    assert torch.equal(loaded.client_states["a/b"]["model"]["w"], torch.full((3,), 3.0))


def weights(folder):
    return float(checkpoints.load_newest_checkpoint(folder)[0].client_states["a/b"]["model"]["w"][0])


def save(folder, states, number, previous):
    """A checkpoint whose states of clients follow from those of the one before, as in a run."""
    checkpoints.save_checkpoint_and_remove_older(folder, Checkpoint(number, {}, states), previous)


def test_a_checkpoint_writes_the_states_that_changed_and_the_one_before_keeps_its_own(tmp_path):
    states, rows = make(1, 1.0).client_states, []
    for number in (1, 2, 3, 4):
        states = states | ({"a/b": {"model": {"w": torch.full((3,), 9.0)}}} if number == 3 else {})
        save(tmp_path, states, number, number - 1)
        rows.append(change_rows(tmp_path / STORE_FILE, "SELECT client, round FROM states ORDER BY round, client"))
    first = [(b"a/b", 1), (b"c", 1), (b"d", 1)]
    assert rows == [first, first, [*first, (b"a/b", 3)], [*first, (b"a/b", 3)]]
    assert weights(tmp_path) == 9.0
    assert checkpoints.load_round_checkpoint(tmp_path, 3).client_states["a/b"]["model"]["w"].tolist() == [9.0] * 3
    shutil.rmtree(tmp_path / "round-000004")
    shutil.rmtree(tmp_path / "round-000003")
    save(tmp_path, states, 5, 4)
    save(tmp_path, states, 6, 5)
    assert change_rows(tmp_path / STORE_FILE, "SELECT client, round FROM states ORDER BY round, client") == [
        (b"c", 1),
        (b"d", 1),
        (b"a/b", 3),
    ]


def test_the_checkpoint_before_has_the_states_of_its_round(tmp_path):
    states = make(1, 1.0).client_states
    save(tmp_path, states, 1, 0)
    save(tmp_path, states | {"a/b": {"model": {"w": torch.full((3,), 2.0)}}, "e": {"x": 1}}, 2, 1)
    (tmp_path / "round-000002" / "complete.json").unlink()
    loaded, (note,) = checkpoints.load_newest_checkpoint(tmp_path)
    assert "round-000002 is damaged" in note
    assert (weights(tmp_path), sorted(loaded.client_states)) == (1.0, ["a/b", "c", "d"])
    checkpoints.remove_newer_checkpoints(tmp_path, 1)
    assert weights(tmp_path) == 1.0
    assert change_rows(tmp_path / STORE_FILE, "SELECT client, until FROM states ORDER BY client") == [
        (b"a/b", None),
        (b"c", None),
        (b"d", None),
    ]


def test_a_damaged_state_of_an_idle_client_is_found_and_named_until_the_client_trains_again(tmp_path):
    """Checkpoints share it: none of them is whole."""
    states = make(1, 1.0).client_states
    for number in (1, 2, 3):
        save(tmp_path, states, number, number - 1)
    damage_states(tmp_path / STORE_FILE, "a/b")
    loaded, notes = checkpoints.load_newest_checkpoint(tmp_path)
    assert loaded is None
    assert [note.partition("is damaged ")[2] for note in notes] == [
        "(the state of client 'a/b' does not match its checksum)"
    ] * 2
    for number in (4, 5):  # the run that is in memory goes on
        save(tmp_path, states | {"a/b": {"model": {"w": torch.full((3,), 4.0)}}}, number, number - 1)
        assert checkpoints.load_newest_checkpoint(tmp_path)[1] == []


def test_nothing_is_taken_from_a_newer_damaged_checkpoint_and_it_does_not_count(tmp_path):
    for number in (3, 6):
        checkpoints.save_checkpoint_and_remove_older(tmp_path, make(number, float(number)), number - 3)
    (tmp_path / "round-000006" / "server.safetensors").write_bytes(b"")
    assert checkpoints.load_newest_checkpoint(tmp_path)[0].round == 3
    checkpoints.save_checkpoint_and_remove_older(tmp_path, make(4, 3.0), 3)
    assert sorted(p.name for p in tmp_path.glob("round-*")) == ["round-000003", "round-000004"]
    assert checkpoints.load_newest_checkpoint(tmp_path)[0].round == 4
    assert weights(tmp_path) == 3.0


def test_newer_checkpoints_can_be_dropped(tmp_path):
    for number in (9, 10):
        checkpoints.save_checkpoint_and_remove_older(tmp_path, make(number, float(number)), number - 1)
    checkpoints.remove_newer_checkpoints(tmp_path, 9)
    assert [p.name for p in tmp_path.glob("round-*")] == ["round-000009"]
    assert weights(tmp_path) == 9.0


def test_a_checkpoint_ahead_of_the_metrics_is_not_used(tmp_path):
    for number in (1, 2):
        checkpoints.save_checkpoint_and_remove_older(tmp_path / "checkpoint", make(number, float(number)), number - 1)
    loaded, (note,) = checkpoints.load_newest_checkpoint(tmp_path / "checkpoint", last_metrics_round=1)
    assert loaded.round == 1
    assert "metrics.jsonl does not hold rounds 1 to 2, which checkpoint" in note
    assert checkpoints.load_newest_checkpoint(tmp_path / "checkpoint", last_metrics_round=0)[0] is None


def test_a_checkpoint_under_another_name_is_not_whole(tmp_path):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, make(1, 1.0), 0)
    (tmp_path / "round-000001").rename(tmp_path / "round-000002")
    loaded, (note,) = checkpoints.load_newest_checkpoint(tmp_path)
    assert loaded is None
    assert "it is of round 1" in note


def test_file_names_are_short_and_differ_where_case_does_not_count():
    ids = ["a", "A", "é", "É", "a.b", "a%2Fb", "a/b", "a/B", "", "医" * 29, "医" * 30, "x" * 100, "x" * 101, "x" * 300]
    ids += [".", "..", ".a", ".partial-a", "con", "nul.txt"]
    found = [safe_file_name(i) for i in ids]
    assert len({name.lower() for name in found}) == len(ids)
    assert all(len(f".partial-client-{name}.safetensors".encode()) <= 255 for name in found)
    assert not any(name.startswith(".") or name in ("con", "nul.txt") for name in found)
    assert safe_file_name("console") == "console"
    assert [i for i in ids if safe_file_name(i) == i] == ["a", "a.b", "x" * 100]


@pytest.mark.parametrize("name", ["server.safetensors", "complete.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_used(tmp_path, name, damage):
    for number in (1, 2):
        checkpoints.save_checkpoint_and_remove_older(tmp_path, make(number, float(number)), number - 1)
    path = tmp_path / "round-000002" / name
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    else:
        path.unlink()
    loaded, notes = checkpoints.load_newest_checkpoint(tmp_path)
    assert loaded.round == 1
    assert len(notes) == 1
    assert "round-000002 is damaged" in notes[0]


ROW = "part = '' AND client = CAST('a/b' AS BLOB) AND round = 2"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("UPDATE pieces SET data = substr(data, 1, 40) WHERE id = (SELECT first FROM states WHERE {ROW})", "checksum"),
        (
            "UPDATE pieces SET data = CAST(data || x'00' AS BLOB) WHERE id = (SELECT first FROM states WHERE {ROW})",
            "checksum",
        ),
        ("DELETE FROM pieces WHERE id = (SELECT first FROM states WHERE {ROW})", "checksum"),
        ("UPDATE states SET hash = x'00' WHERE {ROW}", "checksum"),
        ("UPDATE states SET first = -7, pieces = 9223372036854775807 WHERE {ROW}", "checksum|cannot be read"),
        ("UPDATE states SET first = 9223372036854775807 WHERE {ROW}", "checksum|cannot be read"),
        ("UPDATE states SET hash = 'text' WHERE {ROW}", "checksum"),
        ("DELETE FROM states WHERE {ROW}", "does not hold the states of clients"),
        ("UPDATE states SET until = NULL WHERE round = 1", "does not hold the states of clients"),
        (
            "UPDATE states SET (hash, first) = (SELECT hash, first FROM states WHERE round = 1 AND client = "
            "CAST('a/b' AS BLOB)) WHERE {ROW}",
            "checksum",
        ),
        ("UPDATE states SET client = x'ff' WHERE {ROW}", "cannot be read"),
        ("CREATE TABLE more (x)", None),
    ],
)
@pytest.mark.one_case
def test_changed_rows_are_found_and_the_checkpoint_before_is_used(tmp_path, change, reason):
    for number in (1, 2):
        checkpoints.save_checkpoint_and_remove_older(tmp_path, make(number, float(number)), number - 1)
    change_rows(tmp_path / STORE_FILE, change.replace("{ROW}", ROW))
    loaded, notes = checkpoints.load_newest_checkpoint(tmp_path)
    if reason is None:
        assert loaded is None
        assert "it has other tables than the states of clients" in notes[0]
        return
    assert re.search(f"round-000002 is damaged .*({reason})", notes[0])
    assert loaded.round == 1


@pytest.mark.parametrize("content", [b"", b"x" * 5000, None])
def test_a_store_that_is_none_or_missing_is_named(tmp_path, content):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, make(1, 1.0), 0)
    store = tmp_path / STORE_FILE
    store.unlink() if content is None else store.write_bytes(content)
    loaded, (note,) = checkpoints.load_newest_checkpoint(tmp_path)
    assert loaded is None
    assert "states.sqlite" in note


def test_checkpoints_of_the_first_versions_are_read_and_gone_on_with(tmp_path):
    """They had a file for each client, and states without tensors in the server's file."""
    folder = tmp_path / "round-000001"
    folder.mkdir()
    name = f"client-{safe_file_name('a/b')}.safetensors"
    server = {"round": 1, "state": {"models": {"x": {}}}, "client_states": {"c": {"counter": 2}}, "files": ["a/b"]}
    content = {"server.safetensors": serialize_state(server), name: serialize_state({"w": torch.ones(3)})}
    for file, data in content.items():
        (folder / file).write_bytes(data)
    hashes = {file: hashlib.sha256(data).hexdigest() for file, data in content.items()}
    (folder / "complete.json").write_text(json.dumps({"bound": {}, "files": hashes}))
    loaded, notes = checkpoints.load_newest_checkpoint(tmp_path)
    assert (notes, loaded.round, loaded.state) == ([], 1, {"models": {"x": {}}})
    assert loaded.client_states["c"] == {"counter": 2}
    save(tmp_path, loaded.client_states | {"c": {"counter": 3}}, 2, 1)
    newest = checkpoints.load_newest_checkpoint(tmp_path)[0]
    assert torch.equal(newest.client_states["a/b"]["w"], torch.ones(3))
    assert (sorted(newest.client_states), newest.client_states["c"]) == (["a/b", "c"], {"counter": 3})
    (folder / name).unlink()
    with pytest.raises(UserError, match="round-000001 is missing or damaged"):
        checkpoints.load_round_checkpoint(tmp_path, 1)


def test_a_half_written_checkpoint_is_not_seen_and_is_cleaned_up(tmp_path):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, make(1, 1.0), 0)
    partial = tmp_path / ".partial-round-000002"
    partial.mkdir()
    (partial / "server.safetensors").write_bytes(b"half")
    assert checkpoints.load_newest_checkpoint(tmp_path)[0].round == 1
    checkpoints.save_checkpoint_and_remove_older(tmp_path, make(2, 2.0), 1)
    assert not partial.exists()
    assert checkpoints.load_newest_checkpoint(tmp_path)[0].round == 2


def test_a_failure_while_writing_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, make(1, 1.0), 0)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save_checkpoint_and_remove_older(tmp_path, make(2, 2.0), 1)
    assert checkpoints.load_newest_checkpoint(tmp_path)[0].round == 1


def test_nothing_to_load(tmp_path):
    assert checkpoints.load_newest_checkpoint(tmp_path / "nowhere") == (None, [])


def test_metrics_after_the_checkpoint_and_half_lines_are_dropped(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    for number in (1, 2, 3):
        directory.append_record({"round": number})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "se')
    assert [r["round"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert [r["round"] for r in directory.truncate_metrics_after(2)] == [1, 2]
    assert [r["round"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    with pytest.raises(UserError, match="does not hold rounds 1 to 5"):
        directory.truncate_metrics_after(5)
    directory.close()


def test_a_run_directory_has_one_writer(tmp_path):
    """The system's lock is per process, so another process has to try too."""
    import subprocess
    import sys

    directory = RunDirectory.create(tmp_path / "run")
    directory.write_config({})
    code = (
        f"from polyfed.simulation.storage.directory import RunDirectory; RunDirectory.open({str(tmp_path / 'run')!r})"
    )
    with pytest.raises(UserError, match="another process is writing to the directory"):  # a thread of this one, say
        RunDirectory.open(tmp_path / "run")
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is writing to the directory" in other.stderr  # that attempt released no lock
    directory.close()
    RunDirectory.open(tmp_path / "run").close()


@pytest.mark.parametrize("content", ["", '{"round": 1}\n{"round": 3}\n', '{"round": 1}\n{"rou', '{"round": 2}\n'])
def test_rounds_told_are_those_without_a_gap(tmp_path, content):
    directory = RunDirectory.create(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(content)
    assert directory.last_complete_round() == int(content.startswith('{"round": 1}'))
    directory.close()


def test_a_round_is_on_the_disk_when_it_has_been_appended(tmp_path, monkeypatch):
    directory, synced = RunDirectory.create(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda d: synced.append(os.readlink(f"/proc/self/fd/{d}")))
    directory.append_record({"round": 1})
    assert synced == [str(tmp_path / "metrics.jsonl"), str(tmp_path)]
    directory.append_record({"round": 2})
    assert synced[2:] == [str(tmp_path / "metrics.jsonl")]
    directory.close()


def test_what_a_start_left_behind_counts_as_empty_and_anything_else_does_not(tmp_path):
    for name in (".lock", ".partial-config.yaml", "manifest.json"):
        (tmp_path / name).touch()
    RunDirectory.create(tmp_path).close()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty; choose another"):
        RunDirectory.create(tmp_path)


@dataclass
class Odd:
    x: int = 1


@pytest.mark.parametrize("value", [Odd(), torch.zeros(1), Path("a"), {1, 2}, np.zeros(2), 1j])
def test_what_yaml_cannot_hold_is_refused_with_its_place(value):
    with pytest.raises(UserError, match=r"method.steps\[1\] is a .*, which config.yaml cannot hold"):
        to_plain_values({"steps": (1, value)}, "method")


def test_numpy_scalars_and_tuples_become_plain():
    value = to_plain_values(
        {"a": np.float32(0.5), "b": (np.int64(2), np.bool_(True), None), "c": np.str_("x")}, "method"
    )
    assert value == {"a": 0.5, "b": [2, True, None], "c": "x"}
    assert [type(v) for v in (value["a"], *value["b"], value["c"])] == [float, int, bool, type(None), str]
