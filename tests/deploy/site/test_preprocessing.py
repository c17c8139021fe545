"""Preprocessing from sums over real sites: what a simulation gives, bit for bit; nothing that a site may not tell; and no
site whose answer cannot be used."""

import json
import math

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, Local
from polyfed.core.errors import ClientError, UserError
from polyfed.core.methods.declared_words import CONSENT, DISCLOSURES
from polyfed.deploy.flower.engine import envelope_from_record, envelope_to_record
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.wire import Envelope
from polyfed.deploy.site.preprocessing import (
    MOMENTS_NAME,
    apply_common_preprocessing,
    check_and_save_common_preprocessing,
    parse_common_preprocessing,
    summarize_schema,
)
from polyfed.deploy.site.private_state import InvalidSiteStateError
from polyfed.models import ModelSpec
from polyfed.simulation.rounds.columns.federated_preprocessing import Moments, fit_common_preprocessing
from tests.few_cases import few

from ..conftest import ALL, MemoryGrid
from ..test_faults import _InterruptAfter
from ..test_parity import assert_same

CATEGORIES = {"a": ["f", "m"], "b": ["f", "x"], "c": ["m", "f"]}
SHIFT = {"a": 40.0, "b": 60.0, "c": 1e7}


class Net(torch.nn.Linear):
    """For the features of all sites: three numbers, one mark, four categories and the empty one."""

    def __init__(self, outputs=3):
        super().__init__(8, outputs)


def rows(name, number=40, target="ill", **changes):
    draw = np.random.default_rng(ord(name))
    age = draw.normal(SHIFT[name] if target == "ill" else 60, 3, number)
    kinds = ["no", "yes"] if name == "a" else ["no", "perhaps", "yes"]
    found = {
        "age": np.where(draw.random(number) < (0.2 if name == "b" else 0), np.nan, age),
        "sex": [None if name == "c" and i % 9 == 0 else draw.choice(CATEGORIES[name]) for i in range(number)],
        "lab": draw.normal(0, 1, number), "dose": draw.integers(0, 3, number),
        "ill": list(draw.choice(kinds, number)), "cost": 2.0 * age + draw.normal(0, 1, number),
    }  # fmt: skip
    kept = {"ill": "cost", "cost": "ill"}[target]
    return {key: value for key, value in found.items() if key != kept} | changes


def client(name, target="ill", model=Net, table=None, **options):
    given = {"preprocess": "federated", "val_fraction": 0.1, "name": name, **options}
    return pf.data.split_table(
        rows(name, target=target) if table is None else table, target, None, **given
    ).build_clients(model)[0]


@pytest.fixture
def play(nodes, run, tmp_path):
    def start(*clients, spoil=None, model="Net", **words):
        (tmp_path / "server.py").write_text(f"from tests.deploy.site.test_preprocessing import {model} as model\n")
        settings = {key: words.pop(key) for key in ("resume", "rounds", "method", "grid", "progress") if key in words}
        grid = settings.pop("grid", None) or MemoryGrid(nodes(list(clients), **words))
        if spoil is not None:
            spoil(grid)
        sites = ",".join(c.id for c in clients)
        return run(grid=grid, sites=sites, **{"on-error": "raise", **settings}), grid

    return start


class One(Net):
    """For regression."""

    def __init__(self):
        super().__init__(1)


@pytest.mark.parametrize(("target", "model"), few([("ill", Net), ("cost", One)], [("ill", Net)]))
def test_sites_prepare_as_a_simulation_does_bit_for_bit(tmp_path, play, target, model):
    clients = [client(name, target, model) for name in "abc"]
    method = FedAvg(lr=0.05)
    found, grid = play(*clients, method=method, model=model.__name__, disclose=f"{ALL},r2,val_r2")
    other = pf.federate(clients, method, rounds=3, seed=3, workers=0)
    assert_same(tmp_path, found, other)
    assert found.out is not None
    manifest = json.loads((found.out / "manifest.json").read_text())
    agreed = fit_common_preprocessing(clients, seed=3)
    assert manifest["preparation"] == agreed.facts
    ready = other.federation.clients["a"].train.transform
    assert ready == agreed.prepared
    assert ready.feature_names == ("age", "lab", "dose", "age is missing", "sex=f", "sex=m", "sex=x", "sex=(missing)")
    for name in "abc":  # and so does `predict` at each site
        (file,) = (tmp_path / "sites" / name / "state").glob("*/models/*.preprocessing.json")
        assert json.loads(file.read_text()) == json.loads(json.dumps(ready.to_json_dict()))
    kinds = [kind for _, kind, _ in grid.seen if kind != "reply"]
    assert kinds.count("query") == 6  # each site is introduced twice


def test_the_sums_are_those_of_one_table_of_all_rows():
    clients = [client(name) for name in "abc"]
    found = fit_common_preprocessing(clients).prepared
    values = np.concatenate([c.train.x[c.train.index].numpy()[:, [0, 2, 3]] for c in clients])
    np.testing.assert_allclose(found.mean, np.nanmean(values, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.spread, np.nanstd(values, axis=0), rtol=1e-12)
    assert found.classes == ("no", "perhaps", "yes")
    scaled = fit_common_preprocessing([client(name, "cost") for name in "abc"]).prepared
    raw = np.concatenate([c.train.labels.numpy() for c in (client(name, "cost") for name in "abc")])
    np.testing.assert_allclose(scaled.target, [(raw.mean(), raw.std())], rtol=1e-6)


@pytest.mark.thorough
def test_a_resumed_run_does_not_ask_again(tmp_path, play):
    clients = [client(name) for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        play(*clients, progress=_InterruptAfter(2), rounds=4)
    found, grid = play(*clients, resume=True)
    asked = [envelope_from_record(record).head for _, kind, record in grid.seen if kind != "reply"]
    assert {head["kind"] for head in asked} == {"introduce", "task"}
    assert {head["algorithm"]["name"] for head in asked} == {"fedavg"}
    assert_same(tmp_path, found, pf.federate(clients, FedAvg(lr=0.05), rounds=4, seed=3, workers=0))


def test_secure_sums_give_the_same_up_to_fixed_point(tmp_path, secure_grid, secure_play):
    (tmp_path / "server.py").write_text("from tests.deploy.site.test_preprocessing import Net as model\n")
    tables = {
        name: {**rows(name), "age": rows(name)["lab"], "sex": list("fm") * 20, "ill": ["no", "yes"] * 20}
        for name in "abc"
    }
    clients = [client(f"client-{k}", model=Two, table=table) for k, table in enumerate(tables.values())]
    (tmp_path / "server.py").write_text("from tests.deploy.site.test_preprocessing import Two as model\n")
    grid = secure_grid(clients)
    found = secure_play(grid, FedAvg(lr=0.05))
    other = pf.federate(clients, FedAvg(lr=0.05), rounds=3, seed=3, secure=True, workers=0)
    assert found.out is not None
    told = json.loads((found.out / "manifest.json").read_text())["prepared"]
    ready = other.federation.clients["client-0"].train.transform
    assert (tuple(told["mean"]), tuple(told["spread"])) == (ready.mean, ready.spread)  # of the same words
    assert told["columns"] is None  # their hashes are equal, and no name has gone up
    assert "sex" not in "".join(str(record.config_records) for _, kind, record in grid.seen if kind == "reply")
    sent = [envelope_from_record(record).body.tensors for _, kind, record in grid.seen if kind == "reply"]
    assert not any("moments" in tensors for tensors in sent)
    assert found.last.round == 3


class Two(torch.nn.Linear):
    """For three numbers and two categories."""

    def __init__(self):
        super().__init__(5, 2)


def test_without_names_tables_must_be_alike(play):
    """Names are not told where they are too long to be read."""
    long = {**rows("a"), "sex": [f"{k % 20}" + "y" * 7000 for k in range(40)]}
    with pytest.raises(UserError, match=r"'a' does not send its names: allow-disclosure, or disclose=columns"):
        play(client("a", table=long, categorical="sex"), client("b"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dose": None}, r"it has no column 'dose'"),
        ({"new": [1.0] * 40}, r"it has 'new' more"),
        (
            {"lab": ["low", "high"] * 20, "dose": list(range(40))},
            r"column 'lab' holds numbers at one and categories at the other",
        ),
    ],
)
def test_other_columns_are_refused_with_their_names(play, changes, sentence):
    table = {name: value for name, value in {**rows("b"), **changes}.items() if value is not None}
    with pytest.raises(UserError, match=rf"site 'b' has another table than 'a': {sentence}"):
        play(client("a"), client("b", table=table))


def test_all_sites_must_ask_for_it_and_all_must_allow_it(play):
    with pytest.raises(UserError, match=r"site 'a' asks for preprocessing from sums.*and 'b' does not"):
        play(client("a"), client("b", model=lambda: torch.nn.Linear(6, 3), preprocess="site"), method=Local(lr=0.05))
    assert Moments.discloses == {"moments"}
    assert "means and variances" in DISCLOSURES["moments"]
    assert Moments.discloses <= CONSENT
    with pytest.raises(UserError, match=r"site 'a' does not take part: Moments discloses moments"):
        play(client("a"), client("b"), spoil=without_consent, method=Local(lr=0.05))


def without_consent(grid):
    grid.nodes[101].config["allow-disclosure"] = False


@pytest.mark.parametrize("words", [{"clip-norm": 1.0}, {"clip-norm": 1.0, "noise-multiplier": 1.0, "disclose": ""}])
def test_a_site_that_protects_what_it_sends_sends_no_sums(play, words):
    with pytest.raises(UserError, match=r"sums would leave it without its noise and clipping; preprocess='site' sends"):
        play(client("a"), client("b"), method=FedAvg(lr=0.05, weighted=False), **words)


@pytest.mark.filterwarnings("ignore:age is 0 at a")
def test_a_sum_of_few_values_is_not_told(play):
    for age in (
        [50.0 + k if k < 3 else None for k in range(40)],
        [50.0 + k if k < 3 else 0.0 for k in range(40)],  # the sum is that of three patients
    ):
        few = {**rows("a"), "age": age}
        with pytest.raises(UserError, match=r"values in fewer than 5 training rows.*their sum would nearly reveal"):
            play(client("a", table=few), client("b"))


def hostile(change, step="task"):
    """The first site answers with something else: `change` of the letter it would have sent, where it is asked so."""

    def spoil(grid):
        node = grid.nodes[101]
        honest = node.app

        def app(message, context):
            asked = envelope_from_record(message.content).head
            reply = honest(message, context)
            if asked["kind"] == step and asked["algorithm"]["name"] == MOMENTS_NAME and reply.has_content():
                letter = envelope_from_record(reply.content)
                reply.content = envelope_to_record(change(letter))
            return reply

        node.app = app

    return spoil


def with_tensor(name, value):
    def change(letter):
        group = dict(letter.body.tensors["moments"])
        group[name] = value(group[name])
        return Envelope(letter.head, pf.Message({"moments": group}, letter.body.scalars))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_tensor("total", lambda t: t * torch.nan), "NaN or infinite values"),
        (with_tensor("total", lambda t: t.fill_(torch.inf)), "NaN or infinite values"),
        (with_tensor("total", lambda t: t.fill_(1e200)), r"values beyond 1e\+100"),
        (with_tensor("count", lambda t: t.fill_(-1)), "how many rows it counts is negative, or no whole number"),
        (with_tensor("count", lambda t: t.fill_(2.5)), "how many rows it counts is negative, or no whole number"),
        (with_tensor("count", lambda t: torch.ones(9, dtype=torch.float64)), r"'count' has shape \(9,\)"),
        (with_tensor("count", lambda t: t.float()), "'count' has type torch.float32|float32"),
    ],
)
def test_sums_that_no_rows_have_are_refused(play, change, sentence):
    with pytest.raises(ClientError, match=sentence):
        play(client("a"), client("b"), spoil=hostile(change))


def test_a_negative_sum_of_squares_is_refused(play):
    def change(letter):
        return with_tensor("total", lambda t: -t - 1)(letter) if letter.head["round"] == 2 else letter

    with pytest.raises(ClientError, match="a sum of squares is negative"):
        play(client("a"), client("b"), spoil=hostile(change))


def told_as(**changes):
    def change(letter):
        return Envelope({**letter.head, "table": {**letter.head["table"], **changes}})

    return change


def schema_as(**changes):
    def change(letter):
        table = letter.head["table"]
        return Envelope({**letter.head, "table": {**table, "whole": "x", "schema": {**table["schema"], **changes}}})

    return change


MANY = [{"name": f"c{k}", "categories": [], "missing": False} for k in range(1200)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda letter: Envelope({**letter.head, "table": 3}), "its summary of its table cannot be read"),
        (lambda letter: Envelope({**letter.head, "table": {}}), "it sends no summary of its table"),
        (lambda letter: Envelope({**letter.head, "refused": "no\nline"}), "does not take part: no line"),
        (told_as(numbers=-1), "its table has -1 columns of numbers; at most 5000"),
        (told_as(numbers=10**9), "its table has 1000000000 columns of numbers; at most 5000"),
        (told_as(numbers=True), "its summary of its table cannot be read"),
        (told_as(numbers=2), "its table has another number of numeric columns than it reports"),
        (schema_as(columns="many"), "what it tells|this is not the preprocessing of a table"),
        (
            schema_as(columns=[{"name": "age", "categories": [3], "missing": False}]),
            "this is not the preprocessing of a table",
        ),
        (
            schema_as(columns=MANY, mean=[], spread=[]),
            "its table has another number of numeric columns than it reports",
        ),
        (schema_as(classes=["no", "no"]), "have a name twice"),
        (schema_as(classes=["no", "y\x1b[2Jes"]), "characters that cannot be printed"),
        (schema_as(classes=["no", "y" * 201]), "characters that cannot be printed, or more than 200"),
        (schema_as(classes=["no", "y" * 70_000]), "the header of a message has .* characters; at most 65536 are read"),
    ],
)
def test_a_table_that_no_honest_site_tells_is_refused(play, change, sentence):
    with pytest.raises(UserError, match=sentence):
        play(client("a"), client("b"), spoil=hostile(change, "prepare"))


@pytest.mark.parametrize("field", ["mean", "spread", "target"])
@pytest.mark.parametrize("value", [[math.nan], [], ["1"], [[1.0]], None, [0.0, -1.0, 0.0]])
def test_a_site_takes_no_preprocessing_that_is_none(tmp_path, field, value):
    own = client("a")
    told = {"columns": None, "classes": None, "mean": [1.0] * 3, "spread": [1.0] * 3, "target": []}
    assert parse_common_preprocessing(own.train.transform, told).mean == (1.0,) * 3
    if (field, value) in (("target", []), ("mean", [0.0, -1.0, 0.0])):
        return
    with pytest.raises(RefusalError, match="does not suit its table"):
        check_and_save_common_preprocessing(tmp_path, {**told, field: value}, own)


def test_a_site_keeps_to_the_preprocessing_that_it_began_with(tmp_path):
    own = client("a")
    told = {"columns": None, "classes": None, "mean": [1.0] * 3, "spread": [2.0] * 3, "target": []}
    check_and_save_common_preprocessing(tmp_path / "run", told, own)
    check_and_save_common_preprocessing(tmp_path / "run", told, own)
    assert apply_common_preprocessing(own, tmp_path / "run").train.transform.spread == (2.0,) * 3
    with pytest.raises(RefusalError, match="is not that with which it began"):
        check_and_save_common_preprocessing(tmp_path / "run", {**told, "mean": [0.0] * 3}, own)
    (tmp_path / "run/preprocessing.json").write_text("{}")
    with pytest.raises(InvalidSiteStateError, match=r"run/preprocessing.json, is lost or damaged"):
        apply_common_preprocessing(own, tmp_path / "run")


def test_a_site_whose_owner_does_not_ask_for_it_sends_no_sums(play, nodes):
    (node,) = nodes([client("a", preprocess="site")]).values()
    grid = MemoryGrid({101: node})
    from polyfed.deploy.site.process.node_config import build_site

    site = build_site(node.config)
    head = {"protocol": 6, "run": "r", "algorithm": {"name": MOMENTS_NAME}, "client": "a"}
    for kind in ("prepare", "task"):
        asked = {**head, "kind": kind, "phase": "local", "round": 1, "seed": 0, "run_seed": 0, "state": None, "keep": 0}
        assert "do not ask for preprocessing from sums" in site.answer_envelope(Envelope(asked)).head["refused"]
    assert grid.nodes


def test_names_go_up_only_where_they_may():
    own = client("a")
    assert "schema" not in summarize_schema(own, "run", with_names=False)
    assert "sex" not in json.dumps(summarize_schema(own, "run", with_names=False))
    assert summarize_schema(own, "run", with_names=True)["schema"]["columns"][1]["categories"] == ["f", "m"]
    assert (
        summarize_schema(own, "run", with_names=False)["whole"]
        != summarize_schema(own, "other", with_names=False)["whole"]
    )


def test_a_built_in_network_is_made_for_the_table_of_all():
    def spec(name):
        sites = pf.data.split_table(rows(name), "ill", None, name=name, preprocess="federated")
        return sites.build_clients(ModelSpec("mlp", {}, (sites.num_features,), sites.num_outputs))[0]

    run = pf.federate([spec(name) for name in "abc"], FedAvg(lr=0.05), rounds=1, workers=0)
    assert run.federation.clients["a"].model == ModelSpec("mlp", {}, (8,), 3)


def test_disclosed_is_all_of_what_sites_tell(play):
    """Of a row nothing goes up: no reply before round 1 holds a value of the table."""
    clients = [client(name) for name in "abc"]
    _, grid = play(*clients, disclose=ALL)
    texts = [json.dumps(envelope_from_record(record).head) for _, kind, record in grid.seen if kind == "reply"]
    told = [text for text in texts if '"table"' in text or '"prepares"' in text]
    values = {f"{value:.6g}"[:6] for c in clients for value in c.train.x[:, 2].tolist()}
    assert told
    assert not any(value in text for text in told for value in values)
