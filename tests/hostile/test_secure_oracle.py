"""A server that asks one site of a secure sum again and again in one round, each time otherwise, to read a number of the
site from the pattern of its refusals: it gets one bit, and the site's log says so."""

import json

import pytest
import torch
from secure_loop import SITES, write_keys

import polyfed as pf
from polyfed.core.algorithm import Message
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.secure_aggregation.client import SHARES_GROUP
from polyfed.deploy.site.site import Site
from polyfed.testing import SmallNet, small_clients
from tests.few_cases import few

VICTIM, QUESTIONS, FEWER = SITES[0], 36, 9
LIMIT = 64.0  # of a number, with the room that the tests leave
UNABLE = "it cannot do this task (the reason is in its log)"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_keys(tmp_path_factory.mktemp("keys"))


def client_of(name, labels):
    base = small_clients(1)[0]
    y = torch.full_like(base.train.y, labels) if labels is not None else base.train.y
    return pf.Client(name, SmallNet, (base.train.x, y), (base.test.x, base.test.y))


class Server:
    """An active server with four honest sites. Labels are those of all of the victim's examples."""

    def __init__(self, folder, keys, labels=None):
        clients = {name: client_of(name, labels) for name in SITES}
        self.calls, self.ready = 0, {}

        def load(name):
            self.calls += name == VICTIM
            return clients[name]

        self.sites = {
            name: Site(name, lambda name=name: load(name), folder / name, secure=True, key=keys / f"{name}.key",
                       peers=keys, device="cpu")
            for name in SITES
        }  # fmt: skip
        torch.manual_seed(1)
        self.model = {n: t.clone() for n, t in SmallNet().state_dict().items()}

    def head(self, kind, name, **words):
        algorithm = {"name": "fedavg", "weighted": False, "lr": 0.05, **words.pop("fields", {})}
        return {
            "kind": kind,
            "protocol": PROTOCOL,
            "run": "a",
            "algorithm": algorithm,
            "client": name,
            "secure": True,
            **words,
        }

    def encrypted_shares(self, listed=SITES):
        """New keys of the round, and sealed shares of a sum of these sites, for the victim."""
        adverts = [
            self.sites[n].answer_envelope(Envelope(self.head("sum", n, advertise=1))).head["advert"] for n in listed
        ]
        asked = {"round": 1, "threshold": 3 if len(listed) > 2 else 2, "adverts": adverts}
        dealt = {
            n: self.sites[n].answer_envelope(Envelope(self.head("sum", n, share=asked))).body.tensors[SHARES_GROUP]
            for n in listed
        }
        return {n: box[VICTIM] for n, box in dealt.items() if n != VICTIM}

    def ask(self, value=0.0, *, phase="local", listed=SITES, lr=0.05, seed=1, **words):
        """What the victim answers to a model with this value in the place of one number. It has a place in a sum of these
        sites, a new one wherever the last was used up."""
        model = {**self.model, "head.bias": self.model["head.bias"].clone()}
        model["head.bias"][0] = value
        if phase == "local" and listed not in self.ready:
            self.ready = {listed: self.encrypted_shares(listed)}
        tensors = {"model": model, **({SHARES_GROUP: self.ready[listed]} if phase == "local" else {})}
        asked = {
            "phase": phase,
            "round": 1,
            "seed": seed,
            "run_seed": 1,
            "state": None,
            "keep": 0,
            "metrics": [],
            **words,
        }
        asked |= {"part": True} if phase == "local" else {}
        answer = self.sites[VICTIM].answer_envelope(
            Envelope(self.head("task", VICTIM, **asked), Message(tensors, {"lr": lr}))
        )
        if "came with other inputs" not in answer.head.get("refused", ""):
            self.ready = {}
        return answer


def kind(answer):
    """Of an answer all that a server can tell apart: masked numbers are noise."""
    form = {g: sorted((n, t.shape, str(t.dtype)) for n, t in tree.items()) for g, tree in answer.body.tensors.items()}
    return json.dumps(dict(answer.head)), str(form), str(dict(answer.body.scalars))


def bisection(server):
    """The review's: where the victim's own number reaches the limit, by the value that the server sends."""
    low, high, seen = LIMIT - 1.0, LIMIT + 1.0, []
    for _ in range(QUESTIONS):
        middle = (low + high) / 2
        seen.append(kind(server.ask(middle)))
        low, high = (low, middle) if "refused" in seen[-1][0] else (middle, high)
    return seen


def by_rate(server):
    return [kind(server.ask(LIMIT, lr=0.05 * 2**k)) for k in range(-4, 5)]


def by_seed(server):
    return [kind(server.ask(LIMIT, seed=k)) for k in range(FEWER)]


def by_batch(server):
    """BatchNorm cannot train on one example: which sizes of a batch leave one tells the number of examples."""
    return [kind(server.ask(fields={"batch_size": k})) for k in range(1, FEWER + 1)]


def by_parties(server):
    """The number of sites was once taken from the letter."""
    return [kind(server.ask(LIMIT - 1.0, parties=2 ** (4 * k))) for k in range(FEWER)]


def by_list(server):
    """Sums of two, three and four sites would have other room each."""
    return [kind(server.ask(1.2 * LIMIT, listed=SITES[: 2 + k % 3])) for k in range(FEWER)]


@pytest.mark.parametrize("attack", few([bisection, by_rate, by_seed, by_batch, by_parties, by_list], {by_batch}))
def test_a_round_tells_one_bit_of_a_site_however_often_it_is_asked(tmp_path, keys, monkeypatch, caplog, attack):
    """Of sites with other data, all answers of a round are one of two: the first is yes or no, the others follow from it."""
    monkeypatch.setattr("polyfed.core.messages.fixed_point._WORD_LIMIT", 2.0**32 * LIMIT * len(SITES))
    transcripts = set()
    for labels in (0, 1, 2):
        (folder := tmp_path / str(labels)).mkdir()
        server = Server(folder, keys, labels)
        seen = attack(server)
        transcripts.add(tuple(seen))
        assert len(seen) == (QUESTIONS if attack is bisection else FEWER)
        assert len(set(seen)) <= 2, "an answer, and that of all other questions"
        file = folder / VICTIM / "a" / "requests.json"
        entry = json.loads(file.read_text())["local 1"]
        assert entry["refusals"] <= 1
        if attack in (by_parties, by_list):
            assert len(set(seen)) == 1, "it follows what the server says of the sites of the sum"
        else:
            others = sum("came with other inputs" in answer[0] for answer in seen)
            assert entry["others"] == others >= min(20, FEWER - 1)  # a bisection comes back to where it began
            assert f"with other inputs than before, {others} times so far" in caplog.text
            assert server.calls == len(seen) - others, "it has looked at its data for other inputs"
    assert len(transcripts) <= 2


def test_a_part_that_does_not_fit_is_used_up_and_its_round_is_closed(tmp_path, keys, monkeypatch, caplog):
    monkeypatch.setattr("polyfed.core.messages.fixed_point._WORD_LIMIT", 2.0**32 * LIMIT * len(SITES))
    server = Server(tmp_path, keys)
    first = server.ask(2 * LIMIT)
    assert first.head == {"client": VICTIM, "refused": UNABLE}
    assert "is refused for a reason that may depend on data, 1 times of at most 1; each reveals one bit" in caplog.text
    assert "a fixed-point sum of 4 sites with 1 examples here holds up to" in caplog.text
    state = json.loads((tmp_path / VICTIM / "a" / "secure" / "round-000001.json").read_text())
    assert "held" in state, "its place is still there"
    calls = server.calls
    again = server.ask(2 * LIMIT)
    assert again.head == first.head
    assert "was refused 1 times, of at most 1, and is not started again" in caplog.text
    assert server.calls == calls, "it was computed once more"
    file = tmp_path / VICTIM / "a" / "requests.json"
    file.write_text("{}")  # its owner has mended the reason
    assert server.ask(0.0).body.tensors


def test_a_resumed_run_asks_for_the_same_and_gets_it(tmp_path, keys):
    """Also of other sites than before: some may be gone, or back."""
    server = Server(tmp_path, keys)
    for listed in (SITES[:3], SITES, SITES[:3]):
        assert server.ask(1.0, listed=listed).body.tensors


@pytest.mark.parametrize("phase", ["evaluate", "export"])
def test_evaluations_tell_no_more(tmp_path, keys, phase, caplog):
    """Whether a network can be evaluated may depend on the examples."""
    server = Server(tmp_path, keys)
    seen = [kind(server.ask(float(k), phase=phase)) for k in range(5)]
    assert len(set(seen[1:])) == 1
    assert "with other inputs than before, 4 times so far" in caplog.text
    assert server.calls == 1
    assert kind(server.ask(0.0, phase=phase)) == seen[0], "a run that goes on asks for the same"


def test_an_evaluation_that_fails_is_told_in_one_sentence_and_not_made_again(tmp_path, keys, monkeypatch):
    server = Server(tmp_path, keys)
    monkeypatch.setattr(
        "polyfed.simulation.engines.inprocess.evaluate_client_with_outputs", lambda *_: {}["patient 4711"]
    )
    assert server.ask(0.0, phase="evaluate").head["failure"] == UNABLE
    monkeypatch.undo()
    assert server.ask(0.0, phase="evaluate").head["refused"] == UNABLE


def test_an_introduction_is_bound_to_its_method(tmp_path, keys):
    """Whether a network of so many outputs suits the labels would tell the largest."""
    server = Server(tmp_path, keys)

    def introduced(**fields):
        asked = server.head("introduce", VICTIM, fields=fields, architecture="x")
        return server.sites[VICTIM].answer_envelope(Envelope(asked)).head["refused"]

    assert "its network is not that of the federation" in introduced()
    assert "came with other inputs before" in introduced(lr=0.1)
    for _ in range(9):
        assert "its network is not that of the federation" in introduced()
    assert introduced() == UNABLE


def test_a_list_of_requests_that_was_changed_is_refused_and_named(tmp_path, keys):
    server = Server(tmp_path, keys)
    assert server.ask().body.tensors
    for text in ("{", "[]", '{"local 1": {"inputs": 3}}'):
        (tmp_path / VICTIM / "a" / "requests.json").write_text(text)
        assert "a/requests.json is damaged" in server.ask().head["refused"]
