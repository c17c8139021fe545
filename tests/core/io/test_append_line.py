"""Lines that are added to a file: whole ones, whatever a full disk or a kill has left."""

import os
import resource

import pytest

from polyfed.core.io import atomic_files
from polyfed.core.io.atomic_files import append_line_and_flush


@pytest.mark.parametrize(
    ("before", "kept"),
    [("", ""), ("a\nb\n", "a\nb\n"), ("a\n{'b", "a\n"), ("{'b", ""), ("a\n" + "x" * 200, "a\n"), ("x" * 200, "")],
)
def test_what_is_left_of_a_line_is_cut_off_before_the_next(tmp_path, monkeypatch, before, kept):
    monkeypatch.setattr(atomic_files, "_BLOCK", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    append_line_and_flush(path, '{"round": 3}')
    assert path.read_text() == kept + '{"round": 3}\n'


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_line_for_which_there_is_no_room_leaves_nothing(tmp_path, room):
    path = tmp_path / "metrics.jsonl"
    append_line_and_flush(path, "first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            append_line_and_flush(path, "a longer second line")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "first\n"
    append_line_and_flush(path, "second")
    assert path.read_text() == "first\nsecond\n"


def test_a_line_that_does_not_reach_the_disk_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_line_and_flush(path, "first")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            append_line_and_flush(path, "second")
    assert path.read_text() == "first\n"
