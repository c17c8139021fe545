"""Sizes in a configuration that no machine can hold are refused with a sentence, before memory or time is taken."""

import resource
import time

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedPNAS, HeurPFedLA, PFedHN, PFedLA
from polyfed.cli.main import main
from polyfed.core.machine import memory_limit
from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.deploy.trial.project import parse_site_names_or_count
from polyfed.graphs.architecture import LayerType
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.models import MODELS, ModelSpec, build
from polyfed.nas.cells import CellPlan
from polyfed.nas.derived import rebuild_network
from polyfed.nas.supernet import SupernetPlan, plan_cell_stacks
from polyfed.testing import small_clients

LARGE = 10**9
IMAGE = (1, 28, 28)
NETWORKS = {
    "wide mlp": ("mlp", (64,), {"hidden": (LARGE, LARGE)}),
    "one wide layer": ("mlp", (64,), {"hidden": (10**11,)}),
    "beyond 2^63": ("mlp", (64,), {"hidden": (10**30,)}),
    "just beyond": ("mlp", (64,), {"hidden": (2**62,)}),
    "many layers": ("mlp", (64,), {"hidden": (3,) * 20_000}),
    "many classes": ("cnn_small", IMAGE, {}),
    "wide vit": ("vit", IMAGE, {"dim": LARGE}),
    "deep vit": ("vit", IMAGE, {"depth": LARGE}),
    "wide lstm": ("lstm", (25,), {"hidden": LARGE}),
    "deep lstm": ("lstm", (25,), {"num_layers": LARGE, "hidden": 1, "embedding": 1}),
    "many words": ("lstm", (25,), {"vocabulary": 10**12}),
}


@pytest.fixture(autouse=True)
def no_more_than_this(monkeypatch):
    """What is refused takes neither memory nor time."""
    monkeypatch.setattr(memory_limit, "total_memory_bytes", lambda: 4 * 2**30)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c.startswith(("deep", "many layers")) else c for c in NETWORKS]
)
def test_a_network_that_no_machine_can_hold_is_refused(case):
    name, shape, arguments = NETWORKS[case]
    known = {word: value for word, value in arguments.items() if word in MODELS[name].__kwdefaults__}
    assert known or case == "many classes"
    with pytest.raises(pf.UserError, match=rf"model {name}\(.* (would take more than|would have)") as told:
        build(name, shape, 10**12 if case == "many classes" else 10, **known)
    assert "make it smaller" in str(told.value)
    assert len(str(told.value)) < 600


METHODS = {
    "pfedhn's trunk": (PFedHN(hidden=LARGE), "hidden=1000000000"),
    "pfedhn's depth": (PFedHN(hn_depth=LARGE, hidden=1), "more than 20000 tensors"),
    "pfedhn's embeddings": (PFedHN(embedding_dim=LARGE), "embedding_dim=1000000000"),
    "pfedla": (PFedLA(hidden=LARGE), "hypernetworks of 3 clients with embedding_dim=100 and hidden=1000000000"),
    "heur_pfedla": (HeurPFedLA(embedding_dim=LARGE), "embedding_dim=1000000000"),
    "flha_ghn's heads": (
        FLHAGHN(hidden=LARGE, head="mlp"),
        "a graph hypernetwork of . layer types with depth=6, latent=51 and hidden",
    ),
    "flha_ghn's latent": (FLHAGHN(latent=LARGE, head="mlp"), "latent=1000000000"),
}


@pytest.mark.parametrize("case", METHODS)
def test_a_hypernetwork_that_no_machine_can_hold_is_refused(case, tmp_path):
    method, sentence = METHODS[case]
    with pytest.raises(pf.UserError, match=sentence):
        pf.federate(small_clients(), method, rounds=1, workers=0, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_number_beyond_what_any_method_means_is_refused_at_once():
    with pytest.raises(pf.UserError, match="PFedHN: hidden must be at most 1000000000, got 1000000000000"):
        PFedHN(hidden=10**30)


def test_a_supernet_that_no_machine_can_hold_is_refused():
    data = (torch.randn(8, 1, 8, 8), torch.arange(8) % 2), (torch.randn(4, 1, 8, 8), torch.arange(4) % 2)
    clients = [pf.Client(name, None, *data) for name in ("c0", "c1")]
    for fields, sentence in (
        ({"channels": LARGE}, "channels=1000000000"),
        ({"base_nodes": 10**6}, "edges; at most 10000 are built"),
        ({"base_cells": LARGE}, "at most 10000 are built"),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            pf.federate(clients, FedPNAS(**fields), rounds=1, workers=0)
    with pytest.raises(pf.UserError, match="got candidates for 0"):
        CellPlan(2, LARGE, ())
    base, personal = plan_cell_stacks(1, 1, 1, 1)
    with pytest.raises(pf.UserError, match="channels=1000000000"):
        SupernetPlan(1, 10, LARGE, base, personal)()


def test_a_description_of_a_network_that_no_machine_can_hold_is_refused():
    cell = {"inputs": 1, "nodes": 1, "candidates": [["skip"]]}
    plan = {
        "in_channels": 1,
        "outputs": 10,
        "channels": LARGE,
        "base": [{**cell, "inputs": 2, "candidates": [["skip"]] * 2}],
    }
    plan |= {"personal": [cell]}
    edges = [{"from": 0, "to": 1, "operations": ["skip"]}]
    cells = [
        {"stack": "base", "inputs": 2, "edges": [*edges, {**edges[0], "from": 1, "to": 2}]},
        {"stack": "personal", "inputs": 1, "edges": edges},
    ]
    told = {"format": "polyfed.search 1", "plan": plan, "cells": cells}
    with pytest.raises(pf.UserError, match="channels=1000000000"):
        rebuild_network(told)
    with pytest.raises(pf.UserError, match="noise of the shape"):
        rebuild_network({**told, "plan": {**plan, "channels": 4}, "sampled": {"0": [10**6, 10**6]}})


def test_a_catalogue_of_large_layers_is_refused(tmp_path):
    LayerCatalogue((LayerType("linear", LARGE, LARGE),)).write_yaml(tmp_path / "catalogue.yaml")
    with pytest.raises(pf.UserError, match="a graph hypernetwork of 1 layer types"):
        pf.federate(small_clients(), FLHAGHN(catalogue=str(tmp_path / "catalogue.yaml")), rounds=1, workers=0)


@pytest.mark.parametrize("number", [10_001, 2**62, 10**400])
def test_so_many_sites_are_not_listed(number):
    """The fuzz found it: a `pyproject.toml` with 2^62 sites took all time and memory."""
    with pytest.raises(pf.UserError, match="sites must be at most 10000, got"):
        parse_site_names_or_count(str(number))
    assert len(parse_site_names_or_count("10000")) == 10_000


def test_the_command_line_says_so_in_one_sentence(tmp_path, capsys):
    words = ["run", "--data.clients", "2", "--rounds", "1", "--workers", "0", "--algorithm", "local", "--model", "mlp"]
    assert main([*words, "--model.hidden", str([LARGE, LARGE]), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "would take more than 256 GB of memory, and this machine has" in told
    assert "Traceback" not in told


def test_what_fits_is_made_as_without_a_limit():
    for name, shape in (("mlp", (64,)), ("cnn_small", IMAGE), ("vit", IMAGE), ("lstm", (25,))):
        torch.manual_seed(0)
        counted = ModelSpec(name, {}, shape, 10)().state_dict()
        torch.manual_seed(0)
        plain = MODELS[name](shape, 10).state_dict()
        assert counted.keys() == plain.keys()
        assert all(torch.equal(counted[key], tensor) for key, tensor in plain.items())


def test_the_limit_is_that_of_the_machine_or_its_container(tmp_path, monkeypatch):
    monkeypatch.undo()
    memory_limit.total_memory_bytes.cache_clear()
    assert 2**28 < memory_limit.total_memory_bytes() < 2**50
    monkeypatch.setattr(memory_limit, "_CGROUP_LIMIT", tmp_path / "memory.max")
    for text, found in (("123456", 123456), ("max", None), ("", None)):
        (tmp_path / "memory.max").write_text(text)
        memory_limit.total_memory_bytes.cache_clear()
        assert memory_limit.total_memory_bytes() == found or found is None
    monkeypatch.setattr(memory_limit.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    memory_limit.total_memory_bytes.cache_clear()
    assert memory_limit.total_memory_bytes() == 2**50
    memory_limit.total_memory_bytes.cache_clear()


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        build_after_memory_check("it", lambda: nn.Linear(2, 3)(torch.ones(4)))
    made = build_after_memory_check("it", lambda: nn.Linear(10**6, 10**6, device="meta"))
    assert made.weight.is_meta, "what takes no memory is not counted"


def test_what_needs_values_is_made_too_and_no_random_number_is_lost():
    def make():
        layer = nn.Linear(3, 3)
        nn.init.orthogonal_(layer.weight)
        return layer.weight.detach() * float(layer.bias.sum().item()), torch.randperm(5)

    torch.manual_seed(3)
    first = make()
    torch.manual_seed(3)
    second = build_after_memory_check("it", make)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
