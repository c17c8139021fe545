"""The footer of the page: when results were made, of which data, by which command and configuration."""

import json
import os

import yaml
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report
from polyfed.report.data.provenance import read_provenance
from polyfed.report.data.run_groups import read_run_groups


def origin_of(folder):
    ((group,), _) = read_run_groups([folder])
    return read_provenance(group)


def test_a_run_says_when_it_was_made_and_how_it_is_made_again(write_run, tmp_path):
    data = {"name": "table", "path": "/home/someone/secret folder/brca.csv", "target": "relapse"}
    folder = write_run(tmp_path / "a", "fedavg", {"x": [0.5]}, data=data)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "workers": 3, "ray_address": "10.0.0.1:6379"}))
    told = {"data_fingerprint": "abc123", "versions": {"torch": "2.13"}, "host": {"cores": 2, "system": "Linux-host"}}
    (folder / "manifest.json").write_text(json.dumps(told))
    os.utime(folder / "metrics.jsonl", (0, 86400))
    origin = origin_of(folder)
    assert (origin.date, origin.fingerprint) == ("2 January 1970, 00:00 UTC", "abc123")
    assert (origin.command, origin.data_name) == ("polyfed run config.yaml", "brca")
    assert origin.versions == "torch 2.13, 2 cores"
    assert yaml.safe_load(origin.configuration)["data"] == {"name": "table", "path": "brca.csv", "target": "relapse"}
    show_report([folder], Console(quiet=True), out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert (
        '<h1>Brca: fedavg</h1>\n<p class="facts">Outcome: <b>relapse</b>. Results of 2 January 1970, 00:00 UTC.</p>'
        in text
    )
    assert "<title>Brca: fedavg – polyfed</title>" in text
    assert "<summary>Configuration (config.yaml)</summary><pre>" in text
    for hidden in ("someone", "10.0.0.1", "Linux-host"):
        assert hidden not in text


def test_a_comparison_says_the_command_that_makes_it_again(write_comparison, tmp_path):
    folder = write_comparison(tmp_path / "mine", {"north": 30, "south": 30}, seeds=(0, 1), keep=False)
    methods = {"local": {"name": "local"}, "fedavg": {"name": "fedavg"}}
    config = {"rounds": 2, "data": {"name": "heart"}}
    experiment = {"config": config, "methods": methods, "same_data": True, "resplit": None, "references": True}
    description = {"format": 2, "title": "mine", "seeds": [0, 1], "experiment": experiment, "search": None,
                   "fingerprints": {"0": "aa", "1": "bb"}}  # fmt: skip

    def told(**more):
        (folder / "comparison.yaml").write_text(yaml.safe_dump({**description, **more}, sort_keys=False))
        return origin_of(folder)

    start = "polyfed compare config.yaml --algorithms local,fedavg"
    assert told().command == f"{start} --seeds 0,1 --same-data --tune none --budget steps"
    assert (told().fingerprint, told().data_name, told().folder_name) == ("aa, bb", "heart", "mine")
    methods["fedrep"] = {"name": "fedrep"}  # does not suit the clients, so that it is not compared
    assert (
        told(methods={"local": {}, "fedavg": {}}).command
        == f"{start} --seeds 0,1 --same-data --tune none --budget steps"
    )
    del methods["fedrep"]
    assert (
        told(search={"lr": "grid,..."}, experiment={**experiment, "resplit": 2}).command
        == f"{start} --resplit 2 --budget steps"
    )
    assert (
        told(seeds=[0, 1, 2, 3, 4], search={"mu": [0.1, 1]}).command
        == f"{start} --same-data --tune 'mu=0.1,1' --budget steps"
    )
    results = json.loads((folder / "comparison.json").read_text())
    budgets = {"steps": None, "bytes": 5e6}
    for (kind, limit), repeats in zip(budgets.items(), (1, 2), strict=True):
        changed = results | {
            "budget": results["budget"] | {"kind": kind, "limit": limit},
            "folds": 3,
            "fold_repeats": repeats,
        }
        (folder / "comparison.json").write_text(json.dumps(changed))
        ending = {"steps": "--folds 3 --tune none --budget steps",
                  "bytes": "--folds 3 --fold-repeats 2 --tune none --budget bytes=5e+06"}[kind]  # fmt: skip
        assert told(experiment={**experiment, "folds": 3}).command == f"{start} {ending}"
    (folder / "comparison.json").write_text(json.dumps(results))
    renamed = {**experiment, "methods": {"mine": {"name": "fedavg"}}}
    assert told(experiment=renamed).command == ""  # no option gives a method a label
    assert told(experiment=None).configuration == ""
    show_report([folder], Console(quiet=True), out=tmp_path / "page.html")
    assert "save the configuration below as config.yaml" not in (tmp_path / "page.html").read_text()
    told()
    show_report([folder], Console(quiet=True), out=tmp_path / "command.html")
    footer = "<dt>To make it again, save the configuration below as config.yaml, then run</dt><dd><code>polyfed compare"
    assert footer in (tmp_path / "command.html").read_text()
    text = (tmp_path / "page.html").read_text()
    assert "made in Python; the directory does not hold them" in text
    assert "<h1>Join, or train alone? Mine</h1>" in text
