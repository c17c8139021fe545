"""What a site's replies reveal is what the method declares, and what the documentation says."""

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Message
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.training.loop import fit
from polyfed.testing import example_of
from polyfed.testing.disclosure_audit import (
    collect_facts_declared_as_revealed,
    find_how_reply_reaches_other_clients,
    find_revealed_facts,
)

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tabulate():
    sys.path.insert(0, str(DOCS))
    try:
        import tabulate_traffic
    finally:
        sys.path.pop(0)
    return tabulate_traffic


@pytest.mark.slow  # .ci/run has it; the contract suite asks the first of the methods with other options
@pytest.mark.parametrize("name", REGISTRY)
def test_replies_reveal_what_the_method_declares_and_the_page_says(name, tabulate):
    row = tabulate.recorded_row(name)
    shown = {*row.split(" | ")[2].split(", ")} - {"none"}
    assert shown <= collect_facts_declared_as_revealed(example_of(name).build(local_epochs=1))
    text = tabulate.PAGE.read_text(encoding="utf-8")
    assert tabulate.rows_of(text)[name] == row, (
        f"docs/deploy/who_learns_what.md is out of date: run python docs/tabulate_traffic.py {name}"
    )


def test_the_page_has_a_row_for_each_method(tabulate):
    text = tabulate.PAGE.read_text(encoding="utf-8")
    assert tabulate.rows_of(text).keys() == REGISTRY.keys()
    assert tabulate.updated(text) == text


def leaking(change):
    @dataclass(frozen=True, kw_only=True)
    class Leaks(Averaging):
        weighted: bool = False

        def reply_spec(self, server_state, message, reply):
            return {
                group: {n: (tuple(t.shape), t.dtype) for n, t in tree.items()} for group, tree in reply.tensors.items()
            }

        def local_update(self, message, client_state, client, seed):
            reply, after = super().local_update(message, client_state, client, seed)
            return Message(
                {**reply.tensors, "model": {**reply.tensors["model"], **change(client)}}, reply.scalars
            ), after

        def aggregate(self, server_state, replies, server):
            return server_state

    return Leaks(lr=0.05)


LEAKS = {
    "number of examples": lambda client: {"rows": torch.zeros(len(client.train))},
    "largest label": lambda client: {"head": torch.zeros(int(client.train.y.max()) + 1)},
    "order of examples": lambda client: {f"first-{int(client.train.y[0])}": torch.zeros(1)},
    "values of examples": lambda client: {"0.steps": (client.train.x > 3).sum().reshape(1).int()},
}


COUNTS = {
    "as they are": lambda counts: counts.float(),
    "as whole numbers": lambda counts: counts,
    "as shares": lambda counts: counts / counts.sum(),
    "in a row of a matrix": lambda counts: torch.stack([torch.ones(3), 7 * counts]),
    "in a column of a matrix": lambda counts: torch.stack([torch.ones(3), -counts.float()], 1),
}


@pytest.mark.parametrize("how", COUNTS)
def test_class_counts_that_go_up_are_found(how):
    def sent(client):
        return {"x": COUNTS[how](torch.bincount(client.train.y, minlength=3))}

    method = leaking(sent)
    assert "class counts" in find_revealed_facts(method) - collect_facts_declared_as_revealed(method)
    object.__setattr__(method, "discloses", frozenset({"weights", "class_counts"}))
    assert "class counts" in collect_facts_declared_as_revealed(method)


def test_which_classes_there_are_is_no_count():
    method = leaking(lambda client: {"x": (torch.bincount(client.train.y, minlength=3) > 0).float()})
    assert "class counts" not in find_revealed_facts(method)


@pytest.mark.parametrize("fact", LEAKS)
def test_a_method_that_reveals_more_is_found(fact):
    method = leaking(LEAKS[fact])
    assert fact in find_revealed_facts(method) - collect_facts_declared_as_revealed(method)


def test_counters_that_go_up_as_training_left_them_are_found():
    @dataclass(frozen=True, kw_only=True)
    class Counts(Averaging):
        weighted: bool = False

        def local_update(self, message, client_state, client, seed):
            net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
            fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
            return Message({"model": copy_trained_weights_and_buffers(net.module)}), {}

    assert find_revealed_facts(Counts(lr=0.05, batch_size=8)) == {"number of examples"}


QUICK = ("fedavg", "ifca", "fedkd", "fedavg_kd")
NETWORK = {"name": "polyfed.testing.disclosure_audit:audit_network"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REGISTRY])
def test_without_weights_the_number_of_examples_does_not_show(name):
    """In nothing but the floating-point numbers, with BatchNorm and buffers of each kind, also in a common network."""
    fields, method = {f.name for f in dataclasses.fields(REGISTRY[name])}, example_of(name).build(local_epochs=1)
    words = {
        "weighted": False,
        "buffers": "average",
        "shared": NETWORK,
        "teacher": NETWORK,
        "t_start": 1.0,
        "t_end": 1.0,
    }
    for field in words.keys() & fields:
        with contextlib.suppress(pf.UserError):  # it weighs, or treats buffers, in one way only
            method = dataclasses.replace(method, **{field: words[field]})
    assert not method.scalars_needed & {"num_examples"}
    with restore_trusted_names_afterwards():
        pf.trust_code(NETWORK["name"])
        shown = find_revealed_facts(method, example_of(name).public(40))
    # What FedFomo asks for and the group that IFCA trains follow from losses on all of a client's data: "choice" says it.
    assert "number of examples" not in shown or (name in ("fedfomo", "ifca") and "choice" in method.discloses)


def test_who_gets_what_a_site_sends():
    assert find_how_reply_reaches_other_clients(REGISTRY["local"]()) == "nobody"
    assert find_how_reply_reaches_other_clients(FedAvg()) == "combined with others"
    assert find_how_reply_reaches_other_clients(REGISTRY["fedfomo"](num_models=3)) == "as it is"
