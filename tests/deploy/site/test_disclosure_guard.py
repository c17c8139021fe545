"""The book comes before all else: a message is entered before the site looks at its data, and once the budget is spent
nothing is done with them, whatever a letter asks for."""

import json

import pytest
import torch

import polyfed as pf
from polyfed.core.algorithm import Message
from polyfed.deploy.privacy.gaussian_mechanism import GaussianNoise, ReplyProtection
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.secure_aggregation.client import SHARES_GROUP, SumParticipation
from polyfed.deploy.site import disclosure_guard, private_state
from polyfed.deploy.site import site as site_module
from polyfed.deploy.site.site import Site
from polyfed.testing import SmallNet, small_clients

NOISY = ReplyProtection(clip_norm=1.0, noise_multiplier=4.0, max_epsilon=3.0)  # two messages
ALGORITHM = {"name": "fedavg", "weighted": False, "lr": 0.05}
NAMES = ("client-0", "client-1", "client-2")


@pytest.fixture
def sites(tmp_path, keys):
    """Three sites with what they have loaded: `of(secure)`."""

    def make(secure, protection=NOISY, client_of=lambda client: client):
        loaded = []

        def site(client):
            def load():
                loaded.append(client.id)
                return client_of(client)

            words = {"secure": True, "key": keys / f"{client.id}.key", "peers": keys} if secure else {}
            return Site(client.id, load, tmp_path / client.id, allow_disclosure=True, protection=protection,
                        device="cpu", **words)  # fmt: skip

        return {client.id: site(client) for client in small_clients(3)}, loaded

    return make


def head(kind, **words):
    words = (
        {"client": NAMES[0], "secure": True, **words} if words.pop("secure", False) else {"client": NAMES[0], **words}
    )
    return {"kind": kind, "protocol": PROTOCOL, "run": "a", "algorithm": ALGORITHM, **words}


def boxes_of(sites, number):
    """Sealed shares of the secure sum of a round for the first site."""
    adverts = [
        sites[n].answer_envelope(Envelope(head("sum", secure=True, client=n, advertise=number))).head["advert"]
        for n in sites
    ]
    asked = {"round": number, "threshold": 3, "adverts": adverts}
    divided = {
        n: sites[n]
        .answer_envelope(Envelope(head("sum", secure=True, client=n, share=asked)))
        .body.tensors[SHARES_GROUP]
        for n in sites
    }
    return {n: box[NAMES[0]] for n, box in divided.items() if n != NAMES[0]}


def letter(phase, number=1, *, secure=False, boxes=None, algorithm=ALGORITHM, lr=0.05, state=None, **words):
    torch.manual_seed(1)
    asked = {"phase": phase, "round": number, "seed": 1, "run_seed": 1, "state": state, "keep": 0, "metrics": []}
    tensors = {"model": SmallNet().state_dict()} | ({} if boxes is None else {SHARES_GROUP: boxes})
    more = {"part": True} if secure and phase == "local" else {}
    asked = {**head("task", secure=secure), **asked, **more, **words, "algorithm": algorithm}
    return Envelope(asked, Message(tensors, {"lr": lr}))


def riding(number, secure, boxes):
    training = letter("local", number, secure=secure, boxes=boxes)
    asked = {"round": number - 1, "seed": 2, "tensors": {"model": ["model", None]}, "scalars": {"lr": 0.05}}
    return Envelope({**training.head, EVALUATION_KEY: asked}, training.body)


def content(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def book(site):
    file = site.folder / "privacy.json"
    return sum(json.loads(file.read_text())["data_sets"]["data"].values()) if file.exists() else 0


@pytest.mark.parametrize("secure", [True, False])
def test_once_the_budget_is_spent_every_answer_is_the_same_and_nothing_is_computed(sites, secure, monkeypatch, caplog):
    """Whatever is asked: the same, other models and rates, evaluations, models, introductions."""
    three, loaded = sites(secure)
    first = three[NAMES[0]]

    def ask(number, **words):
        boxes = boxes_of(three, number) if secure else None
        return first.answer_envelope(letter("local", number, secure=secure, boxes=boxes, **words))

    assert all(ask(number).body.tensors for number in (1, 2))
    assert "the budget of the data set 'data' is spent with this message" in caplog.text
    boxes = boxes_of(three, 3) if secure else None
    before, loaded[:] = content(first.folder), []
    monkeypatch.setattr(GaussianNoise, "__init__", lambda *_: pytest.fail("noise was drawn"))
    flags = {"secure": secure}
    letters = [
        *(letter("local", 3, boxes=boxes, lr=lr, **flags) for lr in (0.05, -1.0, 1e38)),
        letter("local", 3, boxes=None, **flags),
        letter("local", 3, boxes=boxes, **flags, metrics=["nonsense"]),
        letter("local", 3, boxes=boxes, **flags, state=2),
        letter("local", 1, boxes=boxes, **flags), letter("local", 3, boxes=boxes, **flags, seed=7),
        *(letter(phase, 2, **flags, state=2) for phase in ("evaluate", "export")),
        letter("evaluate", 9, **flags, state=7),
        riding(3, secure, boxes),
        Envelope(head("introduce", architecture=None, **flags)), Envelope(head("prepare", **flags)),
    ]  # fmt: skip
    answers = [first.answer_envelope(one) for one in letters]
    assert {json.dumps(dict(one.head)) for one in answers} == {json.dumps(dict(answers[0].head))}
    assert "UserError" in answers[0].head["refused"]
    assert not any(one.body.tensors or one.body.scalars for one in answers)
    assert loaded == [], "the site has looked at its data"
    assert content(first.folder) == before


@pytest.mark.parametrize("secure", [True, False])
def test_a_task_that_the_book_refuses_changes_nothing_and_loads_nothing(sites, secure):
    """Its place in the sum is still there when the book is."""
    three, loaded = sites(secure)
    first = three[NAMES[0]]
    boxes = boxes_of(three, 1) if secure else None
    first.folder.mkdir(exist_ok=True)
    (first.folder / "privacy.json").write_text("{")
    before = content(first.folder)
    for protection in (NOISY, ReplyProtection(clip_norm=1.0, noise_multiplier=4.0), ReplyProtection()):
        object.__setattr__(first, "protection", protection)
        assert "UserError" in first.answer_envelope(letter("local", secure=secure, boxes=boxes)).head["refused"]
    assert loaded == []
    assert content(first.folder) == before
    (first.folder / "privacy.json").unlink()
    assert first.answer_envelope(letter("local", secure=secure, boxes=boxes)).body.tensors


@pytest.mark.parametrize("secure", [True, False])
def test_a_message_is_entered_before_data_noise_and_state(sites, secure, monkeypatch):
    order = []
    three, _ = sites(secure, client_of=lambda client: (order.append("client"), client)[1])
    boxes = boxes_of(three, 1) if secure else None

    def noted(owner, name):
        sound = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (order.append(name), sound(*a, **k))[1])

    noted(disclosure_guard, "record_message_and_get_epsilon")
    for owner, name in (
        (site_module, "write_private_state_and_delete_older"),
        (site_module, "check_or_record_client_identity"),
        (site_module, "InProcessEngine"),
    ):
        noted(owner, name)
    noted(GaussianNoise, "draw_standard_normal")
    noted(SumParticipation, "mask_encoded_reply")
    noted(private_state, "append_line_and_flush")
    assert three[NAMES[0]].answer_envelope(letter("local", secure=secure, boxes=boxes)).body.tensors
    assert order[:2] == ["record_message_and_get_epsilon", "client"]
    assert (
        order.index("write_private_state_and_delete_older")
        < order.index("draw_standard_normal")
        < order.index("append_line_and_flush")
    )
    assert ("mask_encoded_reply" in order) == secure


def failing(client, training=True, error=RuntimeError):
    class Fails(SmallNet):
        def forward(self, x):
            if self.training == training and len(x) > 2:
                raise error("patient 4711")
            return super().forward(x)

    return pf.Client(client.id, Fails, client.train, client.test, client.val)


@pytest.mark.parametrize("secure", [True, False])
def test_refusals_are_entered_too(sites, secure):
    """Training that fails, round after round, spends the budget; the server learns that it fails, and not how."""
    three, _ = sites(secure, client_of=failing)
    first = three[NAMES[0]]
    for number in (1, 2, 3):
        boxes = boxes_of(three, number) if secure else None
        answer = first.answer_envelope(letter("local", number, secure=secure, boxes=boxes))
        told = "it cannot do this task (the reason is in its log)"
        assert answer.head["refused"] == (told if number < 3 else "UserError (its text is in the log of the site)")
        assert book(first) == min(number, 2)


class Killed(BaseException):
    """No `except Exception` sees it."""


@pytest.mark.parametrize("secure", [True, False])
def test_a_message_is_not_paid_twice_if_its_site_is_killed_before_noise_is_drawn(sites, secure):
    """After that it is: noise that was drawn may have left."""
    sick = [True]
    three, _ = sites(secure, client_of=lambda c: failing(c, error=Killed) if sick else c)
    first = three[NAMES[0]]

    def ask(**words):
        boxes = boxes_of(three, 1) if secure else None
        return first.answer_envelope(letter("local", 1, secure=secure, boxes=boxes, **words))

    for _ in range(3):
        with pytest.raises(Killed):
            ask()
    assert book(first) == 1
    (first.folder / "a" / "run.json").unlink()  # whose network is another in this test
    sick.clear()
    assert ask().body.tensors
    assert book(first) == 1
    assert ask().body.tensors
    assert book(first) == 2, "fresh noise left and was not entered"


def test_other_inputs_are_another_message(sites):
    """Without secure sums noise hides each answer, and each is entered."""
    three, _ = sites(False, client_of=lambda c: failing(c, error=Killed))
    for number, lr in enumerate((0.05, 0.06), start=1):
        with pytest.raises(Killed):
            three[NAMES[0]].answer_envelope(letter("local", lr=lr))
        assert book(three[NAMES[0]]) == number
