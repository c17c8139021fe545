"""Secure sums between sites: what a site refuses of a server that lies, and what server and site refuse before a run."""

import contextlib
import dataclasses
import json

import pytest

from polyfed.algorithms import PFedLA
from polyfed.core.errors import RoundError, UserError
from polyfed.deploy.flower.apps import client_app
from polyfed.deploy.flower.engine import envelope_from_record, envelope_to_record
from polyfed.deploy.secure_aggregation.client import SecureSumClient
from polyfed.deploy.site.process.node_config import build_site
from polyfed.deploy.trial.project import write_site_key_pair
from polyfed.testing import small_clients
from tests.few_cases import few


def told(found, change, kinds=("sum", "local")):
    """The server's letters to the first site are changed on the way: a server that lies."""
    good, said = client_app(), []

    def app(message, context):
        letter = envelope_from_record(message.content)
        kind = letter.head["kind"] if letter.head["kind"] != "task" else letter.head["phase"]
        if kind in kinds and (new := change(letter)) is not None:
            message.content = envelope_to_record(new)
        reply = good(message, context)
        head = json.loads(reply.content["head"]["json"])
        said.extend([str(head["refused"])] if head.get("refused") else [])
        said.extend(map(str, (head.get("refusals") or {}).values()))
        return reply

    found.nodes[101].app = app
    return said


def head(letter, **words):
    return dataclasses.replace(letter, head={**letter.head, **words})


def plain(letter):
    return head(letter, secure=False) if letter.head["kind"] == "task" else None


def twice(letter):
    """Another key for a sum for which the site has dealt shares."""
    asked = letter.head.get("share")
    return asked and head(letter, share={**asked, "adverts": asked["adverts"][:2], "threshold": 2})


def without_one(letter):
    asked = letter.head.get("hand_out")
    return asked and head(letter, hand_out={**asked, "survivors": asked["survivors"][:2]})


def unsigned(letter):
    asked = letter.head.get("share")
    if asked:
        adverts = [{**advert, "signature": "00"} if k else advert for k, advert in enumerate(asked["adverts"])]
        return head(letter, share={**asked, "adverts": adverts})
    return None


LIES = {
    "a plain reply": (plain, "secure sums only"),
    "two of four": (twice, "the threshold of this sum is 2 of 2 sites; this site takes part from 3"),
    "a shorter list": (without_one, "2 sites have survived, fewer than 3"),
    "unsigned keys": (unsigned, "are not signed by it"),
    "another round": (
        lambda le: head(le, hand_out={**le.head["hand_out"], "round": 7}) if le.head.get("hand_out") else None,
        "no keys for the secure sum of round 7",
    ),
    "damaged": (lambda le: head(le, share={"round": 1}) if le.head.get("share") else None, "this part of the message"),
}


@pytest.mark.parametrize("lie", few(LIES, ["a plain reply", "two of four", "unsigned keys"]))
def test_a_site_refuses_a_server_that_lies(secure_grid, secure_play, lie):
    change, sentence = LIES[lie]
    found = secure_grid(small_clients(4), **{"secure-threshold": 3})
    said = told(found, change)
    with contextlib.suppress(RoundError):
        secure_play(found, rounds=1, **{"on-error": "skip"})
    assert any(sentence in one for one in said), said


def test_numbers_are_masked_once(secure_grid, secure_play):
    """A server that sends the same task twice, to see two numbers under one mask, is refused the second time."""
    found = secure_grid(small_clients(3))
    good, said = client_app(), []

    def app(message, context):
        reply = good(message, context)
        if json.loads(message.content["head"]["json"]).get("phase") == "local":
            again = json.loads(good(message, context).content["head"]["json"])
            said.append(again.get("refused"))
        return reply

    found.nodes[101].app = app
    secure_play(found, rounds=1)
    assert said == ["this site has not dealt shares for this sum, or has sent numbers for it before"]


def test_a_site_without_keys_or_with_a_stranger_says_what_to_do(tmp_path, secure_grid, secure_play, keys):
    found = secure_grid(small_clients(3), key="", peers="")
    said = told(found, lambda letter: None)
    with pytest.raises(RoundError):
        secure_play(found, rounds=1, **{"on-error": "skip"})
    assert any('key="/path/site.key"' in one for one in said)
    some = tmp_path / "some"
    some.mkdir()
    for number in (0, 1):
        (some / f"client-{number}.pub").write_bytes((keys / f"client-{number}.key.pub").read_bytes())
    found = secure_grid(small_clients(3), peers=str(some))
    said = told(found, lambda letter: None)
    with pytest.raises(RoundError):
        secure_play(found, rounds=1, out="other", **{"on-error": "skip"})
    assert any("the key of 'client-2' is not known here (peers)" in one for one in said)


def test_a_value_that_does_not_fit_stays_at_the_site(secure_grid, secure_play, monkeypatch, caplog):
    monkeypatch.setattr("polyfed.core.messages.fixed_point._WORD_LIMIT", 2.0**33)
    with pytest.raises(RoundError):
        secure_play(secure_grid(small_clients(3)), rounds=1, **{"on-error": "skip"})
    assert "a fixed-point sum of 4 sites with 20 examples here holds up to" in caplog.text


def test_methods_and_words_that_do_not_suit_are_refused(secure_grid, secure_play):
    found = secure_grid(small_clients(3))
    for words, sentence in (
        ({"method": PFedLA(lr=0.05)}, "needs each reply by itself"),
        ({"clients-per-round": 1}, "a round has 1"),
        (
            {"secure-threshold": 4},
            "secure-threshold must be above half of the 3 sites of a round, and at most 3, got 4",
        ),
        ({"secure-threshold": 1}, "secure-threshold must be a whole number from 2"),
        ({"secure": False}, "discloses weights"),
    ):
        with pytest.raises(UserError, match=sentence):
            secure_play(found, **words)


@pytest.mark.parametrize(
    ("word", "value"),
    [("secure", "yes"), ("secure-threshold", 1), ("secure-threshold", True), ("secure-threshold", "3")],
)
def test_words_of_a_node_are_checked(nodes, word, value):
    with pytest.raises(UserError, match=f"node-config: {word} must be"):
        build_site(nodes(small_clients(1), **{word: value})[101].config)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cipher": "00", "mask": 3}'])
def test_a_damaged_file_of_its_own_is_named_by_a_site_and_not_blamed_on_the_server(tmp_path, content):
    write_site_key_pair(tmp_path / "north.key")
    site = SecureSumClient("north", tmp_path / "a", tmp_path / "north.key", tmp_path, 2)
    assert site.answer_sum_steps("a", {"advertise": 1}).head_fields["advert"]
    (tmp_path / "a" / "secure" / "round-000001.json").write_text(content)
    (tmp_path / "a" / "secure" / "round-000001 (copy).json").write_text(content)
    steps = {"share": {"round": 1, "adverts": [], "threshold": 2}, "hand_out": {"round": 1, "survivors": ["north"]}}
    sentence = "its own file a/secure/round-000001.json is damaged; put back a copy, or start another run"
    assert site.answer_sum_steps("a", steps).head_fields["refusals"] == {"share": sentence, "hand_out": sentence}
    assert site.answer_sum_steps("a", {"advertise": 2}).head_fields["advert"]
