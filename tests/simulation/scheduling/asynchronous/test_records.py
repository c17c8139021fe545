"""Simulated time stands in the records, tables and on the page; runs without it are as they were."""

import json

import polyfed as pf
from polyfed.report.data.run_groups import read_run_groups
from polyfed.testing import small_clients

GIVEN = {"rounds": 3, "workers": 0, "quiet": True, "speeds": "uniform:1-20"}


def test_records_tables_and_page(tmp_path):
    rule = pf.FedBuff(buffer=2)
    run = pf.federate(small_clients(3), "fedavg", out=tmp_path / "run", asynchronous=rule, **GIVEN)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["simulated_seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert {row["simulated_seconds"] for row in run.table()} == {seconds[-1]}
    frame = run.to_frame()
    assert sorted(set(frame["simulated_seconds"])) == sorted(set(seconds))
    page = run.report().read_text(encoding="utf-8")
    assert "Simulated time" in page
    assert "sites&#39; stated speeds" in page


def test_synchronous_and_asynchronous_runs_stand_side_by_side(tmp_path):
    """Whom the server waits for is not another question: both runs are lines of one table."""
    for name, rule in (("waiting", None), ("buffered", pf.FedBuff(buffer=2))):
        pf.federate(small_clients(3), "fedavg", out=tmp_path / name, asynchronous=rule, **GIVEN)
    (group,) = read_run_groups([tmp_path / "waiting", tmp_path / "buffered"])[0]
    assert len(group.methods) == 2
    assert len({method.label for method in group.methods}) == 2
    assert all(run.simulated_seconds is not None for method in group.methods for run in method.runs)


def test_plain_runs_have_no_simulated_time(tmp_path):
    run = pf.federate(small_clients(3), "fedavg", out=tmp_path / "run", rounds=1, workers=0, quiet=True)
    assert "simulated_seconds" not in run.history[0]
    assert "simulated_seconds" not in run.table()[0]
    assert "Simulated time" not in run.report().read_text(encoding="utf-8")
    assert run.last.schedule is None
