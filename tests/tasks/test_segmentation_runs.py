"""Segmentation from clients to the page: the four systems, comparisons that go on, and images only where asked."""

from dataclasses import replace

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.cli.main import main
from polyfed.data.sources.blobs import SITES, Blobs
from polyfed.simulation.storage.predictions.prediction_store import read_predictions

OPTIONS = {"lr": 0.05, "local_epochs": 1, "batch_size": 4}


def sites(task="segmentation"):
    pool = Blobs(images=(6, 6, 7, 8), image_size=16).load()
    x, y = pool.train.batch(torch.arange(len(pool.train)))
    clients = []
    for site, width in zip(SITES[:3], (2, 3, 4), strict=True):
        rows = torch.from_numpy((pool.columns["site"] == site).nonzero()[0])
        train, test = rows[:-2], rows[-2:]
        model = pf.models.ModelSpec("unet", {"width": width, "depth": 1}, (1, 16, 16), 2)
        clients.append(pf.Client(site, model, (x[train], y[train]), (x[test], y[test]), task=task))
    rest = torch.from_numpy((pool.columns["site"] == SITES[3]).nonzero()[0])
    return clients, x[rest]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("flha_ghn", OPTIONS),
        ("fedhenn", {**OPTIONS, "rad_size": 8, "rad_batch": 4}),
    ],
)
def test_methods_for_different_networks_train_u_nets_of_three_widths(method, options):
    clients, public = sites()
    run = pf.federate(clients, REGISTRY[method](**options), rounds=2, seed=0, workers=0, public=public)
    scores = [row["dice"] for row in run.history[-1]["clients"].values()]
    assert all(0 <= score <= 1 for score in scores)


@pytest.mark.parametrize("method", ["pfedla", "fedavg"])
@pytest.mark.one_case
def test_methods_for_one_network_train_it(method):
    clients, _ = sites()
    alike = [pf.Client(c.id, clients[0].model, c.train, c.test, task=c.task) for c in clients]
    run = pf.federate(alike, REGISTRY[method](**OPTIONS), rounds=2, seed=0, workers=0)
    assert all(0 <= row["dice"] <= 1 for row in run.history[-1]["clients"].values())


@pytest.mark.parametrize(
    ("method", "words"), [("fedpnas", "fedpnas brings networks"), ("fedproto", "one class per example")]
)
def test_methods_that_cannot_segment_say_so_before_the_first_round(method, words):
    clients, _ = sites()
    with pytest.raises(pf.UserError, match=words):
        pf.federate(clients, REGISTRY[method](), rounds=1, seed=0, workers=0)


@pytest.mark.thorough
def test_a_comparison_keeps_scores_alone_and_goes_on_with_and_without_references(tmp_path):
    clients, _ = sites()
    out = tmp_path / "comparison"
    words = {"rounds": 2, "tune": "none", "parallel": 1, "quiet": True, "out": out}
    methods = {name: REGISTRY[name](**OPTIONS) for name in ("local", "flha_ghn")}
    first = pf.compare(clients, methods, seeds=[0], references=True, **words)
    (folder, *_) = sorted(path.parent for path in out.rglob("predictions"))
    kept = read_predictions(folder, "east")
    assert kept.outputs.shape == (2, 3)
    assert kept.targets.shape == (2,)
    written = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    second = pf.compare(clients, methods, seeds=[0], references=False, **words)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == written
    assert str(first).split("\n")[0] == str(second).split("\n")[0]
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Dice" in page
    assert "data:image/png" not in page


@pytest.mark.thorough
def test_the_page_has_images_only_if_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data", "blobs", "--data.images", "[6,6,6,6]", "--data.image_size", "16", "--data.partition", "natural"]
    words += ["--data.partition.column", "site", "--model", "unet", "--model.width", "2", "--algorithm", "fedavg"]
    assert main(["run", *words, "--rounds", "2", "--workers", "0", "--quiet", "--out", "run"]) == 0
    assert main(["report", "run"]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "data:image/png" not in page
    assert main(["report", "run", "--images"]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") >= 8  # four sites, best and worst (and middle) of 2 test images each
    assert "treat it as their data" in page
    assert "Not shown" not in page


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{"folds": 2}, {"seeds": [0]}])
def test_a_page_made_in_python_has_the_images_of_the_clients_that_it_is_given(tmp_path, more):
    clients = [replace(client, model=sites()[0][0].model) for client in sites()[0]]
    words = {"rounds": 1, "tune": "none", "parallel": 1, "quiet": True, "references": False}
    found = pf.compare(clients, {"fedavg": REGISTRY["fedavg"](**OPTIONS)}, **words, **more, out=tmp_path / "c")
    assert "data:image/png" not in found.report().read_text(encoding="utf-8")
    page = found.report(images_of=clients).read_text(encoding="utf-8")
    assert page.count("data:image/png") >= 2 * len(clients)
    assert "Not shown" not in page
    others = [replace(client, test=client.train) for client in clients]
    run = pf.federate(clients, "local", rounds=1, progress=False, out=tmp_path / "run")
    assert "data:image/png" in run.report(images_of=clients).read_text(encoding="utf-8")
    page = pf.load(tmp_path / "run").report(images_of=others).read_text(encoding="utf-8")
    assert "data:image/png" not in page
    assert "and those of the run had" in page
