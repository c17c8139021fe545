"""Forged checkpoints, whose checksums are right and whose form is not the method's: refused with a sentence that names the
tensor. And what the methods themselves keep is never refused."""

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping

import pytest
import torch
from test_replies import clients_of, method_of
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, Local
from polyfed.algorithms.base.heads.body_and_head import BodyAndHeadMethod
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.simulation.rounds.start.state_validation import StateValidator
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import assert_runs_equal, small_clients

LARGE = {"flha_ghn", *(name for name, method in REGISTRY.items() if "images" in method.requires)}
FAST = {"local", "fedavg", "fedrep", "fedfomo"}
METHODS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in REGISTRY]


# Whole numbers without a form, and which classes there are prototypes of.
SKIPPED = {"requests", "present"}


def ran(name, rounds=2, clients=None, **words):
    """A run of a method, in memory."""
    fields = words.pop("fields", {})
    method = method_of(name) if not fields else type(method_of(name))(lr=0.05, **fields)
    if "public_data" in method.requires:
        words["public"] = torch.randn(60, 6, generator=torch_generator(8)), torch.zeros(60, dtype=torch.int64)
    with warnings.catch_warnings(action="ignore"):
        return pf.federate(clients or clients_of(name), method, rounds=rounds, workers=0, evaluate_every=9, **words)


def flaw(run, state=None, own=None, history=None):
    last = run.last
    own = last.client_states if own is None else own
    found = Checkpoint(last.round, last.state if state is None else state, own)
    return StateValidator(run.federation).state_error(found, run.history if history is None else history)


class Tied(nn.Module):
    """Frozen and tied parameters, and buffers of several types."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()))


def tied():
    return [pf.Client(c.id, Tied, c.train, c.test) for c in small_clients()]


OPTIONS = {
    "fedavg": [{"buffers": policy} for policy in ("average", "local", "recompute")],
    "fedrep": [{"head": ["head"]}, {"head": ["head"], "buffers": "local"}, {"buffers": "average"}],
    "pfedme": [{"buffers": "local"}, {"buffers": "average"}],
    "fedhenn": [{"share": "weights", "rad_size": 20}, {"pool_once": True, "rad_size": 20},
                {"weighting": "capacity", "rad_size": 20, "kernel": "rbf"}],
    "fedhenn_homo": [{"pool_once": True, "rad_size": 20}, {"buffers": "local", "rad_size": 20}],
    "heur_pfedla": [{"k": 1}, {"buffers": "recompute"}],
    "pfedla": [{"buffers": "recompute"}],
    "pfedhn": [{"hn_momentum": 0.0}],
    "fedavg_kd": [{"teacher_rounds": 2}],
    "fedfomo": [{"num_models": 1}],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_keeps_is_not_refused(name):
    for words in ({}, {"clients_per_round": 1}, {"clients_per_round": 2, "rounds": 5 if name not in LARGE else 2}):
        assert not flaw(ran(name, **words))
    if name not in LARGE and "adapters" not in REGISTRY[name].requires:  # this network has none
        with warnings.catch_warnings(action="ignore"):
            assert not flaw(ran(name, clients=tied(), clients_per_round=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_nor_what_its_options_make_of_that(name):
    known = set(REGISTRY[name].__dataclass_fields__)
    for fields in OPTIONS[name]:
        assert fields.keys() <= known, fields.keys() - known
        assert not flaw(ran(name, rounds=3, clients_per_round=2, fields=fields)), fields


def tensors(value, way=()):
    """The way to each tensor."""
    if isinstance(value, torch.Tensor):
        yield way
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors(item, (*way, key))


def forged(value, way, change):
    """A copy in which the tensor at this place is changed."""
    value = copy.deepcopy(value)
    owner = value
    for key in way[:-1]:
        owner = owner[key]
    change(owner, way[-1])
    return value


def replaced(change):
    return lambda owner, key: owner.__setitem__(key, change(owner[key]))


def renamed(owner, key):
    owner[f"{key}x"] = owner.pop(key)


FORGED = {
    "another shape": replaced(lambda t: torch.cat([t.reshape(-1), t.reshape(-1)])),
    "another type": replaced(lambda t: t.double() if t.dtype != torch.float64 else t.int()),
    "NaN": replaced(lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t[None]),
    "infinite": replaced(lambda t: torch.full_like(t, torch.inf) if t.is_floating_point() else t.float()),
    "a text": replaced(str),
    "nothing": replaced(lambda t: None),
    "another name": renamed,
    "missing": lambda owner, key: owner.pop(key),
}

# What comes with the rounds is of no form that is known before: of these, only numbers that are none are found.
FREE = {"fedfomo": {"preferences"}, "fedhenn": {"representations"}, "fedavg_kd": {"teacher", "model"}}
FREE |= {"fedproto": {"prototypes"}, "fedtgp": {"generator", "prototypes"}}
FREE |= {"fd": {"classes"}, "fml": {"model"}, "fedkd": {"model", "update", "common"}}
FREE |= {"fedmd": {"outputs", "public"}, "fedpac": {"prototypes"}, "gpfl": {"conditional"}, "feddbe": {"consensus"}}


def free(run, name, way):
    """A server that knows no network knows the form of nothing that its state begins without."""
    method, blind = run.federation.algorithm, not MODEL_REQUIREMENTS - {"model"} & REGISTRY[name].requires
    first = method.server_init(run.federation.server_context()) if blind else {}
    later = {key for key, value in first.items() if value == {}}
    return bool((FREE.get(name, set()) | later) & {str(part) for part in way})


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_forged_tensors_are_refused_and_named(name):
    run = ran(name)
    own, missed = run.last.client_states, []
    assert not flaw(run)
    places = [("server", way) for way in tensors(run.last.state)]
    places += [("client-1", way) for way in tensors(own.get("client-1"))]
    forms, last, history = StateValidator(run.federation), run.last, run.history
    places = [(where, way) for where, way in places if not SKIPPED & {str(part) for part in way}]
    for where, way in places[:: len(places) // 24 + 1]:
        for kind, change in FORGED.items():
            if free(run, name, way) and kind not in ("NaN", "infinite"):
                continue
            if issubclass(REGISTRY[name], BodyAndHeadMethod) and where == "server" and kind == "missing":
                continue  # what of the network is the body, only the clients know
            if where == "server":
                found = Checkpoint(last.round, forged(last.state, way, change), own)
            else:
                found = Checkpoint(last.round, last.state, {**own, where: forged(own[where], way, change)})
            told = forms.state_error(found, history)
            if not told:
                missed.append((where, way, kind))
            elif kind != "missing" and str(way[-1]) not in told:
                missed.append((where, way, kind, told))
    assert not missed, (
        f"{len(missed)} forged tensors are not refused, such as {missed[:6]}; if tensors of {name} have no form before the "
        "first round, add their groups to FREE in tests/hostile/test_forms.py"
    )


def test_clients_that_are_missing_or_strangers_are_named():
    run = ran("local", clients_per_round=2)
    own = dict(run.last.client_states)
    gone = sorted(own)[0]
    assert "is missing, who has trained" in flaw(run, own={i: s for i, s in own.items() if i != gone})
    assert "'x', who is not in the federation" in flaw(run, own={**own, "x": {}})
    assert "the private state of 'client-1': 'it' is a list, not a mapping" in flaw(run, own={**own, "client-1": [1]})


def test_a_state_of_another_kind_is_refused():
    run = ran("fedavg")
    for state in (None, [], "x", 3, {}, {"model": {}}, {"model": [1]}, {"model": None}):
        assert flaw(run, state=state) if state is not None else True
    assert "'model' is missing" in flaw(run, state={"x": 1})
    assert not flaw(run)


def save(out, state, own, number):
    """Writes a checkpoint in place of another, with checksums that fit."""
    bound = json.loads((out / "checkpoint" / f"round-{number:06d}" / "complete.json").read_text())["bound"]
    keep = [int(p.name.removeprefix("round-")) for p in (out / "checkpoint").glob("round-*")]
    before = max((kept for kept in keep if kept < number), default=0)
    checkpoints.save_checkpoint_and_remove_older(
        out / "checkpoint", Checkpoint(number, state, own), before, keep, bound
    )


def test_a_forged_checkpoint_on_the_disk_is_not_taken(tmp_path):
    out = tmp_path / "run"
    whole = pf.federate(small_clients(), Local(lr=0.1), rounds=3, workers=0, out=out)
    good, _ = checkpoints.load_newest_checkpoint(out / "checkpoint")
    own = dict(good.client_states)
    bad = {**own, "client-1": {"model": {**own["client-1"]["model"]}}}
    bad["client-1"]["model"]["head.bias"] = torch.zeros(9)
    save(out, good.state, bad, 3)
    sentence = (
        r"round 3 in .*checkpoint is not what local wrote .*'client-1': tensor 'model/head.bias' has shape \(9,\)"
    )
    with pytest.warns(RuntimeWarning, match=f"{sentence}.*the one before it is used"):
        assert_runs_equal(pf.resume(out, clients=small_clients()), whole)
    for number in (2, 3):
        save(out, good.state, {i: s for i, s in own.items() if i != "client-2"}, number)
    with pytest.raises(pf.UserError, match=r"no checkpoint of the run .*'client-2' is missing, who has trained"):
        pf.resume(out, clients=small_clients())


def test_the_state_of_the_best_round_is_compared_too(tmp_path):
    out = tmp_path / "run"
    pf.federate(small_clients(), FedAvg(lr=0.1), rounds=4, workers=0, out=out, keep=1)
    file, sums = (out / "checkpoint" / "round-000001" / name for name in ("server.safetensors", "complete.json"))
    server = deserialize_state(file.read_bytes())
    server["state"]["model"] = {n: t / 0 if t.is_floating_point() else t for n, t in server["state"]["model"].items()}
    file.write_bytes(serialize_state(server))
    content = json.loads(sums.read_text())
    content["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    sums.write_text(json.dumps(content))
    with pytest.raises(pf.UserError, match=r"round 1 in .*: the server's state: tensor 'model/body.0.weight' has NaN"):
        pf.resume(out, clients=small_clients())


class Grows(FedAvg.__base__):  # Averaging
    """A method of one's own, whose state changes its form as it likes."""

    def server_init(self, server):
        return {**super().server_init(server), "seen": torch.zeros(1), "first": 1}

    def server_step(self, server_state, mean, client_ids):
        return {**mean, "seen": torch.zeros(len(server_state["seen"]) + 1), "most": float("inf")}


def test_a_method_of_ones_own_may_change_its_form(tmp_path):
    run = pf.federate(small_clients(), Grows(lr=0.1), rounds=3, workers=0, out=tmp_path / "run")
    again = pf.resume(tmp_path / "run", clients=small_clients(), algorithm=Grows(lr=0.1))
    assert_runs_equal(again, run)
    for number in (2, 3):
        save(tmp_path / "run", run.last.state, {}, number)
    with pytest.raises(pf.UserError, match="is missing, who has trained"):
        pf.resume(tmp_path / "run", clients=small_clients(), algorithm=Grows(lr=0.1))
