"""The page has the cosine of each client's update by round, and says what a robust rule did."""

import html
import json
import os
import shutil

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.cli.commands.deploy.flower_command import show_newest_run
from polyfed.cli.commands.results.report_command import show_report
from polyfed.report.page.panels.update_directions import DIRECTIONS_HEADING, describe_robust_rule
from polyfed.testing import small_clients


def page_of(folder):
    show_report([folder], Console(record=True, width=200, quiet=True))
    return html.unescape((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    return pf.federate(
        small_clients(4), FedAvg(lr=0.05, robust="clip:0.01"), rounds=2, workers=0, out=tmp_path / "runs/run-1"
    )


def test_the_page_has_cosines_and_the_rule(run, tmp_path):
    page = page_of(tmp_path / "runs/run-1")
    assert DIRECTIONS_HEADING in page
    assert f"{run.history[1]['clients']['client-2']['update_cosine']:.2f}" in page
    assert "Replies are combined by the rule clip:0.01; its bound on the norm of an update was 0.01 in round 2." in page
    assert "The update of client-0 was scaled down in 2 rounds" in page


def test_the_status_of_a_deployment_has_the_bound(run, tmp_path, capsys):
    file = tmp_path / "runs/run-1/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sites": sorted(run.federation.clients)}))
    assert json.loads(file.read_text())["started"].endswith("+00:00")
    copy = shutil.copytree(tmp_path / "runs/run-1", tmp_path / "runs/run-0")
    older = json.loads(file.read_text()) | {"started": "2021-03-01T09:00:00.000+00:00"}
    (copy / "manifest.json").write_text(json.dumps(older))
    os.utime(copy / "metrics.jsonl", (4e9, 4e9))
    show_newest_run(tmp_path / "runs", Console(width=200))
    printed = capsys.readouterr().out
    assert "the bound on updates was 0.01; scaled down to it: client-0 (times " in printed
    assert "update_cosine" in printed
    assert "run-1" in printed


def test_a_page_of_secure_sums_has_no_cosine(tmp_path):
    pf.federate(small_clients(3), FedAvg(lr=0.05), rounds=1, workers=0, secure=True, out=tmp_path / "run")
    assert DIRECTIONS_HEADING not in page_of(tmp_path / "run")


def test_a_damaged_report_of_a_rule_is_passed_over():
    assert describe_robust_rule([{"round": 1, "robust": {"rule": "median"}}, {"round": 2, "robust": 7}]) == [
        "Replies are combined by the rule median."
    ]
    assert describe_robust_rule([{"round": 1, "robust": {"rule": "clip", "bound": "x", "scaled": {"a": None}}}])
    assert describe_robust_rule([{"round": 1}]) == []
