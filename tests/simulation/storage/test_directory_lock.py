"""The lock of a run's or comparison's directory."""

import os
import time

import pytest

from polyfed import federate, resume
from polyfed.core.errors import UserError
from polyfed.simulation.storage.directory_lock import lock_directory
from polyfed.testing import small_clients


def test_partial_files_of_killed_processes_do_not_accumulate(tmp_path):
    (tmp_path / "models").mkdir()
    stale = [tmp_path / ".partial-0a", tmp_path / "models" / ".partial-1b"]
    kept = [
        tmp_path / ".partial-2c",
        tmp_path / "models" / "north.pt",
    ]  # of a report that is being written; no partial file
    for file in (*stale, *kept):
        file.write_text("half")
    for file in (*stale, kept[1]):
        os.utime(file, (time.time() - 7200,) * 2)
    with lock_directory(tmp_path):
        assert not any(file.exists() for file in stale)
        assert all(file.exists() for file in kept)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.one_case
def test_run_whose_directory_is_moved_stops_and_can_be_resumed(tmp_path, replaced):
    out, moved = tmp_path / "run", tmp_path / "moved"

    def move(record):
        if record["round"] == 2:
            out.rename(moved)
            if replaced:  # by what another process, such as one that empties folders, left there
                out.mkdir()
                (out / ".lock").touch()

    clients = small_clients()
    with pytest.raises(UserError, match="was deleted or moved while polyfed wrote to it"):
        federate(clients, "fedavg", rounds=4, seed=0, out=out, progress=move)
    assert [p.name for p in out.glob("*")] == [".lock"] * replaced
    assert [record["round"] for record in resume(moved, clients=clients).history] == [1, 2, 3, 4]
