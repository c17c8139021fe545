"""Labels that are texts: one numbering for all clients, kept with the run, its page, and exported networks."""

import json

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.deploy.site.admission import call_client_factory
from polyfed.simulation.storage.directory import read_manifest
from polyfed.testing import assert_runs_equal

WORDS = {"rounds": 2, "workers": 0, "progress": False}
NAMES = ("dead", "ill", "well")


def network():
    return nn.Linear(2, 3)


def examples(seed, classes, n=12):
    numbers = torch.arange(n) % len(classes)
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)) + numbers[:, None]
    return x, [classes[number] for number in numbers.tolist()]


def texts(numbered=False):
    """Two sites: one has nobody who is dead, the other nobody who is ill."""
    clients = []
    for seed, classes in enumerate((("well", "ill"), ("well", "dead"))):
        (x, train), (z, test) = examples(seed, classes), examples(seed + 5, classes)
        if numbered:
            train, test = ([NAMES.index(label) for label in labels] for labels in (train, test))
        clients.append(pf.Client(f"c{seed}", network, (x, train), (z, test)))
    return clients


def test_a_number_means_the_same_at_every_client(tmp_path):
    run = pf.federate(texts(), "fedavg", out=tmp_path / "run", **WORDS)
    assert_runs_equal(run, pf.federate(texts(numbered=True), "fedavg", **WORDS))
    assert run.class_names == NAMES
    assert read_manifest(tmp_path / "run")["class_names"] == list(NAMES)
    assert pf.federate(texts(numbered=True), "fedavg", out=tmp_path / "b", **WORDS).class_names is None
    assert "class_names" not in read_manifest(tmp_path / "b")
    assert run.predict("c0", torch.zeros(4, 2)).shape == (4, 3)
    assert_runs_equal(pf.resume(tmp_path / "run", clients=texts(), progress=False), run)


def test_names_are_on_the_page_and_go_with_the_network(tmp_path):
    run = pf.federate(texts(), "fedavg", out=tmp_path / "run", **WORDS)
    page = run.report().read_text("utf-8")
    assert all(name in page for name in NAMES)
    pf.export_model(run, "c0", tmp_path / "exported")
    assert any(
        list(NAMES) == json.loads(file.read_text("utf-8")).get("classes")
        for file in (tmp_path / "exported").glob("*.json")
    )


def test_a_comparison_names_the_classes(tmp_path):
    words = {"rounds": 1, "seeds": 2, "tune": "none", "references": False, "parallel": 1, "quiet": True}
    found = pf.compare(texts(), "fedavg", out=tmp_path / "c", **words)
    assert found.results["class_names"] == list(NAMES)
    assert found.results["data"]["0"]["c0"]["classes"] == [0, 6, 6]
    assert pf.compare(texts(), "fedavg", **(words | {"resplit": 2})).results["class_names"] == list(NAMES)


def test_texts_at_one_client_and_numbers_at_another_are_refused():
    with pytest.raises(
        pf.UserError, match="the labels of client 'c0': train are texts, those of client 'c1': train numb"
    ):
        pf.federate([texts()[0], texts(numbered=True)[1]], "fedavg", **WORDS)


def test_a_site_must_number_its_labels_since_it_does_not_know_those_of_the_others():
    with pytest.raises(pf.UserError, match=r"labels of this site's client are texts.*CLASSES.index"):
        call_client_factory(lambda: texts()[0], "c0")


def test_a_look_counts_the_classes_of_all_sites():
    assert "dead" in str(pf.look(texts()))
