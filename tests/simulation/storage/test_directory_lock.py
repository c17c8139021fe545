"""The lock of a run's or comparison's directory."""

import os
import time

from polyfed.simulation.storage.directory_lock import lock_directory


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
