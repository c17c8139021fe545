"""`polyfed report` of damaged run directories: what is wrong is named with file and line, and what is sound is shown."""

import json
import re

import numpy as np
import pytest
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.data.run_records import read_checked_round_records
from polyfed.report.page.panels import method_views

SOUND = {"round": 3, "bytes_down_total": 1, "bytes_up_total": 1, "clients": {"x": {"accuracy": 0.5}}}
WRONG = {
    "has no bytes_down_total": {"round": 3},
    "it has no round": {"clients": {}},
    "its round is true": SOUND | {"round": True},
    "it is not a round": [1, 2],
    "round 3 has no clients": {key: value for key, value in SOUND.items() if key != "clients"},
    "not a mapping from ids": SOUND | {"clients": ["x"]},
    "the clients of round 3 are not a mapping": SOUND | {"clients": {"x": 0.5}},
    "accuracy of client 'x' in round 3 is \"x\"": SOUND | {"clients": {"x": {"accuracy": "x"}}},
    "in round 3 is NaN, which is not a number": SOUND | {"clients": {"x": {"accuracy": float("nan")}}},
    "in round 3 is true, which is not a number": SOUND | {"clients": {"x": {"accuracy": True}}},
    "bytes_up_total of round 3 is null, which is not a number": SOUND | {"bytes_up_total": None},
    "seconds_clients of round 3 is": SOUND | {"seconds_clients": "long"},
    "failures of round 3 are not a list": SOUND | {"failures": 3},
    "which is not a number; put back": SOUND | {"bytes_up_total": 10**400},
}
TEXTS = ("no JSON at all", "[" * 100_000, '{"round": 3, "se', "")


@pytest.mark.parametrize("told", WRONG)
def test_a_line_that_is_no_round_is_named(write_run, tmp_path, capsys, told):
    write_run(tmp_path / "a", "fedavg", {"x": [0.5, 0.6]})
    write_run(tmp_path / "a/baselines/local", "local", {"x": [0.5, 0.6]})
    file = tmp_path / "a/baselines/local/metrics.jsonl"
    with file.open("a") as opened:
        opened.write(json.dumps(WRONG[told]) + "\n")
    assert main(["report", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert f"{file}, line 3, is damaged: " in error
    assert told in error
    assert "put back a copy of the file from before, or make the run again" in error


@pytest.mark.parametrize("text", TEXTS)
def test_what_stands_before_other_rounds_cannot_be_half_a_line(write_run, tmp_path, text):
    file = write_run(tmp_path / "a", "fedavg", {"x": [0.5, 0.6, 0.7]}) / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], text, lines[2], ""]))
    with pytest.raises(UserError, match=re.escape(f"{file}, line 2, is damaged: it is not JSON")):
        read_run_groups([tmp_path / "a"])


@pytest.mark.parametrize("garbage", [b"garbage", b"garbage\n", b"\x8f\xff\x00{" * 50, b"<html>\n<body>\n", b"\n{}\n"])
def test_garbage_is_no_run_that_has_not_begun(write_run, tmp_path, garbage):
    write_run(tmp_path / "a", "fedavg", {})
    (tmp_path / "a/metrics.jsonl").write_bytes(garbage)
    with pytest.raises(UserError, match="line 1, is damaged: it is not JSON"):
        read_run_groups([tmp_path / "a"])


@pytest.mark.parametrize("cut", ['{"round": 4, "se', "{", "\0\0\0", '{"round": 4, "clients": {"東'])
def test_a_last_line_that_was_cut_off_does_not_count(write_run, tmp_path, cut):
    file = write_run(tmp_path / "a", "fedavg", {"x": [0.5, 0.6, 0.7]}, wanted=4) / "metrics.jsonl"
    whole = file.read_bytes()
    # A letter may be cut as well.
    file.write_bytes(whole + (cut.encode()[:-1] if "東" in cut else cut.encode()))
    ((setting,), _) = read_run_groups([tmp_path / "a"])
    assert (setting.methods[0].runs[0].rounds_done, setting.methods[0].mean_score_by_run) == (3, (0.7,))
    file.write_text(cut)
    with pytest.raises(UserError, match="no evaluated round yet; go on with it: polyfed resume"):
        read_run_groups([tmp_path / "a"])
    file.write_bytes(whole[:-1])  # all of it but the end of the line
    assert len(read_checked_round_records(file)) == 3
    file.write_bytes(whole.replace(b"\n", b"\r\n") + b"\n\n")
    assert len(read_checked_round_records(file)) == 3
    file.write_bytes(b"")
    assert read_checked_round_records(file) == []


def test_metrics_that_cannot_be_read_and_numbers_that_are_none(write_run, tmp_path):
    folder = write_run(tmp_path / "a", "fedavg", {"x": [0.5]})
    (folder / "config.yaml").write_text("rounds: many\nalgorithm: {name: fedavg}\n")
    with pytest.raises(UserError, match=r"seed and rounds in .*config\.yaml must be whole numbers"):
        read_run_groups([folder])
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl: Is a directory"):
        read_run_groups([folder])


def test_a_damaged_configuration_in_a_finished_comparison(write_run, comparison_of, tmp_path):
    scores = {"local": {0: {"north": 0.5, "east": 0.6}}, "fedavg": {0: {"north": 0.7, "east": 0.5}}}
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    content = comparison_of(scores)
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    for name, by_seed in scores.items():
        write_run(tmp_path / name / "seed-0", name, {client: [0.1, value] for client, value in by_seed[0].items()})
    broken = tmp_path / "fedavg/seed-0/config.yaml"
    for text in ("rounds: [1\n", "- a list\n"):
        broken.write_text(text)
        ((setting,), (note,)) = read_run_groups([tmp_path])
        runs = {line.label: line.runs[0] for line in setting.methods}
        assert runs["fedavg"].score_by_client == {"north": 0.7, "east": 0.5}
        assert (runs["fedavg"].folder, runs["fedavg"].config) == (None, {})
        assert runs["local"].folder == tmp_path / "local/seed-0"
        assert note.startswith(str(broken))
        assert note.endswith("Only its scores are shown.")
    content["methods"] = []
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"comparison\.json is damaged"):
        read_run_groups([tmp_path])


@pytest.fixture
def weighed(write_run, tmp_path):
    """A run of pFedLA, whose page has its weights."""
    folder = write_run(tmp_path / "a", "pfedla", {"x": [0.5], "y": [0.6]})
    (folder / "analysis").mkdir()
    alpha = np.full((2, 2, 2), 0.5, np.float32)
    arrays = {"alpha": alpha, "rows": ["x", "y"], "layers": ["conv1", "fc"], "clients": ["x", "y"]}
    np.savez_compressed(folder / "analysis/round-000000.npz", **arrays)
    return folder


def test_what_the_disk_refuses_loses_no_page(weighed, tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    def written():
        show_report([weighed], Console(quiet=True), out=tmp_path / "page.html")
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    before = sorted(weighed.rglob("*"))
    assert "Aggregation weights: who aggregates from whom" in (page := written())
    assert "Not shown" not in page
    assert sorted(weighed.rglob("*")) == before, "a report only reads"
    monkeypatch.setattr(method_views, "read_aggregation_weights", refuse)
    assert "Not shown: [Errno 13] Permission denied" in written()
