"""What may change on a comparison that goes on: what changes nothing of finished runs."""

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.comparison.storage.continuation import find_invalidating_change
from polyfed.testing import small_clients

CLIENTS = small_clients(2)
QUICK = {"rounds": 1, "tune": "none", "parallel": 1, "quiet": True}


def runs(folder):
    return {path: path.read_bytes() for path in folder.glob("*/seed-*/metrics.jsonl")}


@pytest.mark.thorough
def test_references_title_methods_and_seeds_may_be_added_to_finished_runs(tmp_path):
    out = tmp_path / "compared"
    first = pf.compare(CLIENTS, ["fedprox"], seeds=[0], references=False, out=out, **QUICK)
    assert not first.results["references"]
    before = runs(out)
    more = pf.compare(
        CLIENTS, ["fedprox", "fedbn"], seeds=[0, 1], references=True, title="again", out=out, **QUICK
    )  # fmt: skip
    assert more.results["references"]
    assert (more.results["title"], more.results["seeds"]) == ("again", [0, 1])
    assert {"fedprox", "fedbn"} <= set(more.results["methods"])
    assert {path: content for path, content in runs(out).items() if path in before} == before
    assert len(runs(out)) == 2 * len(more.results["methods"])
    fewer = pf.compare(CLIENTS, ["fedprox", "fedbn"], seeds=[0, 1], references=False, title="again", out=out, **QUICK)
    assert not fewer.results["references"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The arguments of a comparison that has ended."""
    words = {"clients": CLIENTS, "algorithms": ["fedprox"], "seeds": [0], "references": False}
    words |= {"out": tmp_path_factory.mktemp("compared") / "c", **QUICK}
    pf.compare(**words)
    return words


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seeds": [1, 0]}, r"seeds was \[0\] and is now \[1\]"),
        ({"rounds": 2}, "settings.rounds was 1 and is now 2"),
        ({"algorithms": ["fedavg_ft"]}, "methods.fedprox is gone"),
        ({"algorithms": [pf.algorithms.FedProx(mu=0.5)]}, "methods.fedprox.mu was .* and is now 0.5"),
        ({"clients": small_clients(3)}, "fingerprints.0 was"),
    ],
)
@pytest.mark.one_case
def test_what_finished_runs_depend_on_may_not_change(finished, change, sentence):
    with pytest.raises(pf.UserError, match=sentence):
        pf.compare(**finished | change)


def test_descriptions_of_the_command_line_are_compared_alike():
    before = {"seeds": [0], "experiment": {"methods": {"local": {"lr": 0.1}}, "references": True, "same_data": True}}
    now = {"seeds": [0, 1], "experiment": {"methods": {"local": {"lr": 0.1}, "fedavg": {}}, "references": False,
                                           "same_data": True}}  # fmt: skip
    assert find_invalidating_change(before, now) is None
    assert find_invalidating_change(before, {**now, "experiment": {**now["experiment"], "same_data": False}})
    assert find_invalidating_change({**before, "resplit": 1}, {**now, "resplit": 2})
    unsuited = {**before, "skipped": {"fedmd": "fedmd needs public examples"}}
    assert find_invalidating_change(unsuited, {**now, "skipped": {}}) is None, "no run was one of it"


def hospitals(rows=90):
    rng = np.random.default_rng(0)
    age = rng.normal(50, 20, rows)
    place = np.array(["north", "south", "west"])[np.arange(rows) % 3]
    return pd.DataFrame({"age": age, "crp": rng.normal(5, 2, rows), "hospital": place, "ill": (age > 50).astype(int)})


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:column 'age' nearly is the target")
def test_fedhenn_is_compared_on_dealings_of_a_table_with_public_rows():
    sites = pf.data.split_table(hospitals(), "ill", "hospital", preprocess="federated", public_fraction=0.2)
    clients = sites.build_clients(
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    )
    words = {"public": sites.public, "references": False, "metrics": "auc"}
    fedhenn = pf.algorithms.FedHeNN(rad_size=10, rad_batch=10)
    compared = pf.compare(clients, [fedhenn, "fedmd"], resplit=2, **words, **QUICK)
    assert {"fedhenn", "fedmd"} <= set(compared.results["methods"])
    assert not {"fedhenn", "fedmd"} & {*compared.skipped, *compared.failed}
    searched = pf.compare(clients, [fedhenn], seeds=[0], **words, **QUICK | {"tune": {"lr": [0.1]}})
    assert "fedhenn" in searched.results["methods"]
