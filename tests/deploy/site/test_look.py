"""A look at the data of real sites: what a simulation of it shows, with the consent of each site, without small counts."""

import json

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.core.methods.declared_words import CONSENT, DISCLOSURES
from polyfed.data.look.site_columns import LookColumn
from polyfed.deploy.flower.engine import envelope_from_record
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.site.look import (
    LOOK_NAME,
    answer_look,
    build_look_if_owner_allows,
    check_and_record_rows_of_look,
)
from polyfed.simulation.rounds.columns.federated_look import (
    FederatedLook,
    build_look_method,
    columns_to_json,
    look_between_sites,
)
from polyfed.simulation.rounds.columns.federated_preprocessing import fit_common_preprocessing
from polyfed.testing import small_clients

from ..conftest import ALL, MemoryGrid


class Net(torch.nn.Linear):
    """For two numbers, a mark and two categories."""

    def __init__(self):
        super().__init__(5, 2)


def client(name, values=30, number=60, model=Net):
    draw = np.random.default_rng(ord(name[-1]))
    rows = {
        "age": draw.normal(60, 9, number),
        "lab": [float(draw.normal()) if k < values else np.nan for k in range(number)],
        "sex": draw.choice(["f", "m"], number), "ill": ["no", "yes"] * (number // 2),
    }  # fmt: skip
    return pf.data.split_table(rows, "ill", None, name=name).build_clients(model)[0]


@pytest.fixture
def play(nodes, run, tmp_path):
    def start(*clients, **words):
        (tmp_path / "server.py").write_text("from tests.deploy.site.test_look import Net as model\n")
        grid = MemoryGrid(nodes(list(clients), **{"disclose": f"{ALL},look", **words}))
        sites = ",".join(c.id for c in clients)
        return run(grid=grid, sites=sites, method=FedAvg(lr=0.05), rounds=1, look=True, **{"on-error": "raise"}), grid

    return start


def test_the_server_sees_what_a_rehearsal_shows_and_no_count_of_few_rows(tmp_path, play):
    clients = [client("a"), client("b"), client("c", values=3)]
    found, grid = play(*clients)
    assert found.last.round == 1
    shown = json.loads((tmp_path / "run-look.json").read_text())
    assert shown == json.loads(json.dumps(look_between_sites(clients, seed=3).to_json_dict()))
    assert "<!doctype html>" in (tmp_path / "run-look.html").read_text(encoding="utf-8")
    lab = next(row for row in shown["columns"] if (row["column"], row["site"]) == ("lab", "c"))
    assert lab == {"column": "lab", "target": False, "site": "c", "rows": 60, "values": "<5"}
    for _, kind, record in grid.seen:
        letter = envelope_from_record(record) if kind == "reply" else None
        for name, tensor in (letter.body.tensors.get("counts", {}) if letter else {}).items():
            if name not in ("rows", "total", "squares"):
                assert not bool(((tensor > 0) & (tensor < 5)).any()), name


def test_a_site_that_does_not_consent_shows_nothing(play):
    with pytest.raises(UserError, match=r"site 'a' shows no look at its data: .*\(disclose=look\)"):
        play(client("a"), client("b"), disclose=ALL)


def test_consent_to_weights_is_none_to_a_look_and_has_words():
    assert FederatedLook.discloses == {"summaries"}
    assert "histograms" in DISCLOSURES["summaries"]
    assert FederatedLook.discloses <= CONSENT


FIELDS = {"columns": "[]", "by_site": True}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"owner_consents": False}, r"disclose=look"),
        ({"protection": ReplyProtection(clip_norm=1.0)}, "noise and clipping"),
        ({"secure": True}, "in secure sums alone"),
        ({"fields": {**FIELDS, "by_site": False}}, "in secure sums alone"),
        ({"fields": {**FIELDS, "by_site": 0}}, "in secure sums alone"),
        ({"fields": {**FIELDS, "columns": "{"}}, "not columns of a look"),
    ],
)
def test_what_a_site_refuses(words, reason):
    given = {"fields": FIELDS, "secure": False, "owner_consents": True, "protection": ReplyProtection(), **words}
    with pytest.raises(RefusalError, match=reason):
        build_look_if_owner_allows(given.pop("fields"), **given)


def test_columns_are_told_for_a_look_alone_and_of_enough_rows():
    head = {"run": "r"}
    with pytest.raises(RefusalError, match="under the name of another method"):
        answer_look(head, FedAvg(), client("a"))
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    with pytest.raises(RefusalError, match="fewer than 5 examples"):
        answer_look(head, FederatedLook(), pf.Client("a", None, (x, y), (x, y)))
    assert LOOK_NAME == "FederatedLook"


def test_a_look_after_a_few_rows_have_changed_is_refused(tmp_path):
    folder = tmp_path / "looks"
    check_and_record_rows_of_look(folder, client("a", number=60))
    check_and_record_rows_of_look(folder, client("a", number=60))
    assert len(list(folder.iterdir())) == 1, "the same rows"

    def with_more(number):
        draw = np.random.default_rng(ord("a"))
        rows = {"age": draw.normal(60, 9, 60), "ill": ["no", "yes"] * 30}
        more = {"age": draw.normal(60, 9, number), "ill": ["perhaps"] * number}  # a new class shifts no row's hash
        table = {name: [*rows[name], *more[name]] for name in rows}
        return pf.data.split_table(table, "ill", None, name="a").build_clients(lambda: torch.nn.Linear(1, 3))[0]

    check_and_record_rows_of_look(folder, with_more(0))
    with pytest.raises(RefusalError, match="fewer than 5 rows from those of an earlier look"):
        check_and_record_rows_of_look(folder, with_more(4))
    check_and_record_rows_of_look(folder, with_more(5))
    with pytest.raises(RefusalError, match="fewer than 5 rows"):
        check_and_record_rows_of_look(folder, with_more(6))


def test_secure_sums_show_the_server_all_sites_together(tmp_path, secure_grid, secure_play):
    clients = [client(f"client-{k}", values=60, model=Four) for k in range(3)]
    (tmp_path / "server.py").write_text("from tests.deploy.site.test_look import Four as model\n")
    grid = secure_grid(clients, disclose=f"{ALL},look")
    secure_play(grid, FedAvg(lr=0.05), look=True, rounds=1)
    shown = json.loads((tmp_path / "run-look.json").read_text())
    assert list(shown["sites"]) == ["all sites"]
    assert shown == json.loads(json.dumps(look_between_sites(clients, seed=3, secure=True).to_json_dict()))


class Four(torch.nn.Linear):
    """For two numbers and two categories."""

    def __init__(self):
        super().__init__(4, 2)


def test_replies_that_no_rows_can_have_are_refused():
    clients = small_clients(2)
    method = build_look_method([LookColumn("x0"), LookColumn("class", ("0", "1", "2"), True)], secure=False)
    state = method.server_init(None)
    message = method.dispatch(state, pf.ClientInfo("client-0"))
    reply, _ = method.local_update(message, {}, clients[0], 0)
    assert method.reply_spec(state, message, reply)["counts"].keys() == reply.tensors["counts"].keys()
    for name, value in (("count", -2.0), ("codes", 0.5), ("categories", -3.0)):
        counts = dict(reply.tensors["counts"])
        counts[name] = torch.full_like(counts[name], value)
        with pytest.raises(ValueError, match="a count of rows is negative, or no whole number"):
            method.reply_spec(state, message, pf.Message({"counts": counts}))
    assert columns_to_json([LookColumn("x0")]) == '[["x0", null, false]]'


def test_the_rehearsal_refuses_what_a_deployment_refuses():
    tables = {"a": 30, "b": 3}
    clients = [
        pf.data.split_table(
            {"age": list(range(40)), "lab": [1.0 * k if k < values else None for k in range(40)],
             "ill": ["no", "yes"] * 20},
            "ill", None, name=name, preprocess="federated", test_fraction=0.1,
        ).build_clients(lambda: torch.nn.Linear(3, 2))[0]
        for name, values in tables.items()
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"client 'b': column 'lab' has values in fewer than 5 training rows"):
        fit_common_preprocessing(clients)
    with pytest.raises(UserError, match="between real sites it is refused"):
        pf.federate(clients, FedAvg(), rounds=1)
    with pytest.raises(UserError, match="between real sites it is refused"):
        pf.compare(clients, ["local"], rounds=1, seeds=[0], quiet=True)
    assert fit_common_preprocessing(clients, secure=True).prepared.scope == "federated"
