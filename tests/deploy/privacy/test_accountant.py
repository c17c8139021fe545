"""What noise costs, against what is known exactly, and the book in which a site counts it."""

import json
import math

import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

import polyfed as pf
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.deploy.privacy.accountant import compute_epsilon, record_message_and_get_epsilon
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.process.node_config import build_site
from polyfed.testing import SmallNet, small_clients

NOISY = ReplyProtection(clip_norm=1.0, noise_multiplier=4.0, max_epsilon=4.6)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0, 8.0, 40.0, 1000.0])
def test_one_message_costs_what_the_gaussian_mechanism_does(multiplier, delta):
    """delta(epsilon) = Φ(mu/2 − epsilon/mu) − e^epsilon·Φ(−mu/2 − epsilon/mu), mu = 2/z (Balle and Wang 2018): never less
    than that, and not more by a part in 10^6."""
    mu, found = 2 / multiplier, compute_epsilon({multiplier: 1}, delta)

    def exact(e):
        return norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)

    assert exact(found) <= delta * (1 + 1e-9)
    assert found == 0 or exact(found * (1 - 1e-6) - 1e-9) > delta


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("messages", "exact"),
    [
        ({8.0: 100}, 13.2067),
        pytest.param({1.0: 1}, 9.9973, marks=pytest.mark.slow),
        pytest.param({2.0: 3, 8.0: 20, 5.0: 1}, None, marks=pytest.mark.slow),
    ],
)
def test_accountants_of_others_come_to_the_same_from_above(messages, exact):
    """Privacy loss distributions of dp-accounting, message by message, to 10^-4; its Rényi accountant is above both."""
    found, numeric, renyi = compute_epsilon(messages, 1e-5), PLDAccountant(), RdpAccountant()
    for accountant in (numeric, renyi):
        for multiplier, number in messages.items():
            accountant.compose(GaussianDpEvent(multiplier / 2), number)
    assert found <= numeric.get_epsilon(1e-5) + 1e-9
    assert found == pytest.approx(numeric.get_epsilon(1e-5), abs=1e-4)
    assert found < renyi.get_epsilon(1e-5)
    assert exact is None or found == pytest.approx(exact, abs=1e-4)


def test_more_messages_and_less_noise_cost_more():
    for z in (0.01, 0.5, 3.0, 60.0):
        costs = [compute_epsilon({z: number}, 1e-5) for number in (1, 2, 5, 50, 5000)]
        assert costs == sorted(set(costs))
    costs = [compute_epsilon({z: 10}, 1e-5) for z in (1e-9, 1e-3, 0.1, 1.0, 10.0, 30.0)]
    assert costs == sorted(set(costs), reverse=True)
    assert compute_epsilon({4.0: 7}, 1e-6) > compute_epsilon({4.0: 7}, 1e-5)
    assert compute_epsilon({4.0: 2, 8.0: 8}, 1e-5) == pytest.approx(compute_epsilon({4.0: 4}, 1e-5)), (
        "mu² is not additive"
    )
    assert compute_epsilon({4.0: 2, 0.0: 1}, 1e-5) == math.inf
    assert compute_epsilon({4.0: 2, 1e-300: 1}, 1e-5) == math.inf
    assert compute_epsilon({0.0: 0}, 1e-5) == 0


def answers(nodes, client, **words):
    """What the site of this client answers when the server asks for an update; it is closed once its budget is spent."""
    config = {"clip-norm": 1.0, "noise-multiplier": 4.0, "max-epsilon": 4.6, "disclose": "", **words}
    config = {name: value for name, value in config.items() if value is not None}
    site = build_site(nodes([client], **config)[101].config)
    state = {name: tensor.clone() for name, tensor in client.model().state_dict().items()}
    algorithm = {"name": "fedavg", "weighted": False}
    answers.runs = getattr(answers, "runs", 0) + 1  # a run of its own: the server names them as it likes
    head = {"kind": "task", "protocol": PROTOCOL, "run": f"a{answers.runs}", "algorithm": algorithm, "phase": "local",
            "round": 1, "client": client.id, "seed": 1, "run_seed": 1, "state": None, "keep": 0}  # fmt: skip
    return site.answer_envelope(Envelope(head, Message({"model": state}, {"lr": 0.1})))


class Wider(SmallNet):
    """Another architecture."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)


def changed(how):
    """The first client with something changed that once opened another budget."""
    c = small_clients()[0]
    x, y, order = c.train.x, c.train.y, torch.arange(len(c.train)).flip(0)
    test = c.test.x.clone()
    test[0] += 1
    return {
        "nothing": lambda: c,
        "network": lambda: pf.Client(c.id, Wider, c.train, c.test, c.val),
        "a test example": lambda: pf.Client(c.id, c.model, c.train, (test, c.test.y), c.val),
        "order": lambda: pf.Client(c.id, c.model, (x[order], y[order]), c.test, c.val),
        "fewer rows": lambda: pf.Client(c.id, c.model, (x[:-4], y[:-4]), c.test, c.val),
        "no val": lambda: pf.Client(c.id, c.model, c.train, c.test),
    }[how]()


@pytest.mark.parametrize("how", ["nothing", "network", "a test example", "order", "fewer rows", "no val"])
@pytest.mark.one_case
def test_a_budget_that_is_spent_stays_spent(tmp_path, nodes, how):
    """Four messages of z = 4 cost less than 4.6, five more, whatever changes between them."""
    assert compute_epsilon({4.0: 4}, 1e-5) < 4.6 < compute_epsilon({4.0: 5}, 1e-5)
    for _ in range(4):
        assert answers(nodes, small_clients()[0]).body.tensors
    refused = answers(nodes, changed(how))
    assert "UserError" in refused.head["refused"], "another budget was opened"
    assert not refused.body.tensors
    other = answers(nodes, changed(how), **{"data-set": "patients of 2031"})
    assert other.body.tensors, "the owner cannot open another page"
    assert "refused" in answers(nodes, changed(how), **{"data-set": "data"}).head
    book = json.loads((tmp_path / "sites" / "client-0" / "state" / "privacy.json").read_text())
    assert book["data_sets"] == {"data": {"4.0": 4}, "patients of 2031": {"4.0": 1}}


def test_what_left_without_noise_is_counted(tmp_path, nodes):
    """A site that sent its update as it was has no finite epsilon left to keep."""
    client = small_clients()[0]
    assert answers(nodes, client, **{"noise-multiplier": 0.0, "max-epsilon": None}).body.tensors
    assert "refused" in answers(nodes, client).head
    with pytest.raises(UserError, match=r"would be inf .1 messages have left without noise."):
        record_message_and_get_epsilon(tmp_path / "sites" / "client-0" / "state" / "privacy.json", "data", NOISY)


def test_the_book_is_closed_when_the_budget_is_spent(tmp_path):
    book = tmp_path / "privacy.json"
    spent = [record_message_and_get_epsilon(book, "data", NOISY) for _ in range(4)]
    assert spent == [compute_epsilon({4.0: number}, 1e-5) for number in (1, 2, 3, 4)]
    before = book.read_text()
    with pytest.raises(UserError, match=r"above max-epsilon = 4.6 of the data set 'data'; nothing more is sent"):
        record_message_and_get_epsilon(book, "data", NOISY)
    assert book.read_text() == before
    assert record_message_and_get_epsilon(book, "other", NOISY) == spent[0]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"version": 2, "data_sets": {}}', '{"version": 1, "data_sets": {"data": {"-1": 3}}}', "[" * 10**5,
     '{"version": 1, "data_sets": {"data": {"4.0": 0}}}', '{"version": 1, "data_sets": {"data": {"4.0": true}}}',
     '{"version": 1, "data_sets": {"data": {"nan": 1}}}', '{"version": 1, "data_sets": {"data": [4.0]}}',
     '{"0ab1": {"4.0": 3}}'],
)  # fmt: skip
def test_a_damaged_book_is_no_new_budget(tmp_path, content):
    book = tmp_path / "privacy.json"
    book.write_text(content)
    with pytest.raises(UserError, match=r"is damaged .*put back a copy of it"):
        record_message_and_get_epsilon(book, "data", NOISY)
    assert book.read_text() == content


def test_a_lost_book_is_no_new_budget(tmp_path, nodes):
    client = small_clients()[0]
    assert answers(nodes, client).body.tensors
    book = tmp_path / "sites" / "client-0" / "state" / "privacy.json"
    book.unlink()
    assert "UserError" in answers(nodes, client).head["refused"]
    with pytest.raises(UserError, match="is missing, and runs beside it have sent messages"):
        record_message_and_get_epsilon(book, "data", NOISY)


def test_an_older_copy_of_the_book_is_no_new_budget(tmp_path):
    book = tmp_path / "privacy.json"
    record_message_and_get_epsilon(book, "data", NOISY)
    older = book.read_bytes()
    record_message_and_get_epsilon(book, "data", NOISY)
    newest = book.read_bytes()
    for spoilt in (older, newest.replace(b": 2}", b": 1}"), newest.replace(b'"data"', b'"other"')):
        book.write_bytes(spoilt)
        with pytest.raises(
            UserError, match=r"and 2 were sent: it is an older copy or was changed. Put back the newest"
        ):
            record_message_and_get_epsilon(book, "data", NOISY)
        assert book.read_bytes() == spoilt
    book.write_bytes(newest)
    assert record_message_and_get_epsilon(book, "data", NOISY) == compute_epsilon({4.0: 3}, 1e-5)
    book.unlink()
    with pytest.raises(UserError, match="is missing, and runs beside it have sent messages"):
        record_message_and_get_epsilon(book, "data", NOISY)


@pytest.mark.parametrize("name", ["Patients", "patients ", "pati\uff45nts"])
def test_a_data_set_whose_name_is_spelt_otherwise_is_no_new_budget(tmp_path, name):
    book = tmp_path / "privacy.json"
    record_message_and_get_epsilon(book, "patients", NOISY)
    with pytest.raises(UserError, match="would have another budget; write data-set as before"):
        record_message_and_get_epsilon(book, name, NOISY)
    record_message_and_get_epsilon(book, "patients-2027", NOISY)


def test_messages_that_an_owner_adds_under_another_spelling_of_the_noise_count_too(tmp_path):
    book = tmp_path / "privacy.json"
    book.write_text('{"version": 1, "data_sets": {"data": {"4.0": 1, "4": 1}}}')
    assert record_message_and_get_epsilon(book, "data", NOISY) == compute_epsilon({4.0: 3}, 1e-5)


@pytest.mark.parametrize("content", ["{", "[]", '{"data": "two"}'])
def test_a_damaged_count_beside_the_book_opens_nothing(tmp_path, content):
    book, count = tmp_path / "privacy.json", tmp_path / "privacy-count.json"
    record_message_and_get_epsilon(book, "data", NOISY)
    count.write_text(content)
    with pytest.raises(UserError, match=r"privacy-count.json is damaged .* Remove it if that ledger is the newest"):
        record_message_and_get_epsilon(book, "data", NOISY)
    count.unlink()
    record_message_and_get_epsilon(book, "data", NOISY)


def test_a_site_that_dies_between_book_and_count_goes_on(tmp_path, monkeypatch):
    """The book is written first: what is counted has been entered."""
    from polyfed.deploy.privacy import ledger

    book, write, written = tmp_path / "privacy.json", ledger.write_file_atomically, []

    def dies(path, content):
        if written and path.name == "privacy-count.json":
            raise OSError("killed")
        written.append(path.name)
        write(path, content)

    record_message_and_get_epsilon(book, "data", NOISY)
    written.append("a message")
    monkeypatch.setattr(ledger, "write_file_atomically", dies)
    with pytest.raises(OSError, match="killed"):
        record_message_and_get_epsilon(book, "data", NOISY)
    monkeypatch.undo()
    assert record_message_and_get_epsilon(book, "data", NOISY) == compute_epsilon({4.0: 3}, 1e-5)
