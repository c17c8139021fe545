"""Secure sums against a server that lies to sites: each refuses what would tell more than one sum a round."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from fuzz import mutated
from secure_lies import BYTES, LIAR, OTHERS, noise, signed, silence
from secure_loop import SITES, Loop, step_of, write_keys

from polyfed.core.algorithm import Message
from polyfed.core.errors import RoundError
from polyfed.core.messages.fixed_point import parse_sum_message
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation.client import BUNDLE_GROUP, SHARES_GROUP, parse_key_advertisement
from polyfed.deploy.secure_aggregation.protocol import SumId, UnmaskingShares
from polyfed.deploy.secure_aggregation.unmask import unmask_sum
from polyfed.simulation.rounds.replies.secure_aggregation import encode_reply_in_fixed_point


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def at(tmp_path, keys):
    """A site of four, as it is before a step of the first sum, and the letter for that step."""

    def made(step):
        loop = Loop(tmp_path, keys, rounds=1)
        honest, found = loop.answer, []

        def answer(name, letter):
            if name == LIAR and step_of(letter.head) == step and not found:
                found.append(letter)
            return silence(letter, None) if name == LIAR and found else honest(name, letter)

        loop.answer = answer
        loop.round(1)
        loop.answer, loop.sent = honest, [entry for entry in loop.sent if entry[0] != LIAR]
        loop.said.clear()
        return loop, found[0]

    return made


def asked(part, **words):
    return lambda letter, loop: {part: {**letter.head[part], **words}}


def adverts(change):
    return lambda letter, loop: {
        "share": {**letter.head["share"], "adverts": change(letter.head["share"]["adverts"], loop)}
    }


def own_key(listed, loop):
    """Keys for the site itself that the server knows, with no signature of its."""
    made = signed(loop.folder_of_keys, SumId(loop.server.run, 1), SITES[1])
    return [{**made, "name": a["name"]} if a["name"] == LIAR else a for a in listed]


def others(number, run=None):
    """The others' keys of another round or run, which they have signed."""

    def change(listed, loop):
        which = SumId(run or loop.server.run, number)
        return [a if a["name"] == LIAR else signed(loop.folder_of_keys, which, a["name"]) for a in listed]

    return change


LIES = {
    "a threshold of two": ("share", asked("share", threshold=2), "the threshold of this sum is 2 of 4 sites"),
    "a threshold of none": ("share", asked("share", threshold=-1), "the threshold of this sum is -1 of 4 sites"),
    "a threshold above all": ("share", asked("share", threshold=5), "the threshold of this sum is 5 of 4 sites"),
    "a threshold that is none": ("share", asked("share", threshold="x"), "damaged"),
    "a threshold without end": ("share", asked("share", threshold=float("inf")), "damaged"),
    "two sites": ("share", adverts(lambda listed, loop: listed[:2]), "of 2 sites"),
    "a site alone": ("share", adverts(lambda listed, loop: listed[:1]), "of 1 sites"),
    "a site twice": ("share", adverts(lambda listed, loop: [*listed, listed[1]]), "listed twice"),
    "without itself": ("share", adverts(lambda listed, loop: listed[1:]), "not those that this site has advertised"),
    "its own key is another": ("share", adverts(own_key), "are not signed by it"),
    "keys of an old round": ("share", adverts(others(0)), "are not signed by it"),
    "keys of another run": ("share", adverts(others(1, "other")), "are not signed by it"),
    "keys for no round": ("share", asked("share", round=None), "names no round"),
    "keys for an old round": ("share", asked("share", round=0), "no keys for the secure sum of round 0"),
    "keys for a round of 400 digits": ("share", asked("share", round=10**400), "names no round"),
    "keys for a path": ("share", asked("share", round="../../1"), "names no round"),
    "keys that are none": ("share", adverts(lambda listed, loop: [None]), "damaged"),
    "a list without the site": ("hand out", asked("hand_out", survivors=OTHERS), "not among the survivors"),
    "a list of two": ("hand out", asked("hand_out", survivors=SITES[:2]), "2 sites have survived, fewer than 3"),
    "a list with a stranger": ("hand out", asked("hand_out", survivors=[*SITES[:3], "x"]), "no part in this sum"),
    "a list with one twice": ("hand out", asked("hand_out", survivors=[*SITES[:3], LIAR]), "one twice"),
    "a list of an old round": ("hand out", asked("hand_out", round=0), "no keys for the secure sum of round 0"),
    "a list for no round": ("hand out", asked("hand_out", round=True), "names no round"),
    "a list that is none": ("hand out", asked("hand_out", survivors=None), "damaged"),
    "a list of lists": ("hand out", asked("hand_out", survivors=[[LIAR], [LIAR], [LIAR]]), "damaged"),
}


@pytest.mark.parametrize("step", ["share", "hand out"])
def test_a_site_refuses_what_a_server_may_not_ask(at, step):
    """It tells why, and does the step when it is asked for as it should be: nothing was used up."""
    loop, letter = at(step)
    for lie, (where, change, sentence) in LIES.items():
        if where != step:
            continue
        answer = loop.answer(LIAR, dataclasses.replace(letter, head={**letter.head, **change(letter, loop)}))
        (refusal,) = answer.head["refusals"].values()
        assert sentence in refusal, lie
        assert not answer.body.tensors, lie
        assert "tokens" not in answer.head, lie
    assert loop.answer(LIAR, letter).body.tensors


def test_a_site_refuses_keys_of_its_own_that_it_has_replaced(at):
    loop, letter = at("share")
    loop.members[LIAR].replace_keys_and_build_advertisement(SumId(loop.server.run, 1))
    answer = loop.answer(LIAR, letter)
    assert "not those that this site has advertised last" in answer.head["refusals"]["share"]


def test_a_site_is_not_asked_twice(at):
    """For both kinds of shares of one site, one after the other; nor for a second box of shares of its secrets."""
    loop, letter = at("hand out")
    assert loop.answer(LIAR, letter).head["tokens"]
    three = {"hand_out": {"round": 1, "survivors": SITES[:3]}}
    again = loop.answer(LIAR, dataclasses.replace(letter, head={**letter.head, **three}))
    assert again.head["refusals"]["hand_out"] == (
        "this site has no keys for the secure sum of round 1, or has used them"
    )


BOXES_OF_LIES = {
    "of two sites": (lambda found: dict(list(found.items())[:1]), "2 sites have shared their secrets, fewer than 3"),
    "of none": (lambda found: {}, "1 sites have shared their secrets"),
    "of a stranger": (lambda found: {**found, "x": BYTES}, "'x' has no part in this sum"),
    "of itself": (lambda found: {**found, LIAR: BYTES}, "'site-0' has no part in this sum"),
    "for others": (lambda found: dict(zip(found, [*list(found.values())[1:], BYTES], strict=True)), "cannot be read"),
    "of noise": (lambda found: {name: noise(box) for name, box in found.items()}, "cannot be read"),
    "of no bytes": (lambda found: {name: box[:0] for name, box in found.items()}, "cannot be read"),
}


def test_a_site_masks_nothing_for_shares_that_lie(at):
    loop, letter = at("mask")
    for lie, (change, sentence) in BOXES_OF_LIES.items():
        body = Message({**letter.body.tensors, SHARES_GROUP: change(dict(letter.body.tensors[SHARES_GROUP]))})
        answer = loop.answer(LIAR, dataclasses.replace(letter, body=body))
        assert sentence in answer.head["refused"], lie
        assert not answer.body.tensors, lie
    assert loop.answer(LIAR, letter).body.tensors["sum"]
    assert "has sent numbers for it before" in loop.answer(LIAR, letter).head["refused"]


def test_numbers_that_are_not_finite_stay_at_home_and_use_the_place_up(at, monkeypatch):
    loop, letter = at("mask")
    sound = Loop.reply

    def reply(loop, name, down):
        found = sound(loop, name, down)
        tensors = {n: t * torch.nan if t.is_floating_point() else t for n, t in found.tensors["model"].items()}
        return Message({"model": tensors}, found.scalars)

    monkeypatch.setattr(Loop, "reply", reply)
    answer = loop.answer(LIAR, letter)
    assert "has the value nan" in answer.head["refused"]
    assert not answer.body.tensors
    monkeypatch.undo()
    again = loop.answer(LIAR, letter)
    assert "has sent numbers for it before" in again.head["refused"], "a server may ask until they are sent"
    assert not again.body.tensors


def test_damaged_letters_are_refused_by_a_sentence(at):
    """Of each step; whatever the site does for them, it does once."""
    rng = random.Random(0)
    loop, letter = at("share")
    for _ in range(300):
        part = dataclasses.replace(letter, head={**letter.head, **mutated({"share": letter.head["share"]}, rng)})
        answer = loop.answer(LIAR, part)
        if answer.body.tensors:  # what was changed said nothing
            break
        assert answer.head.get("refusals") or part.head.get("share") in (None, {}, "", 0, False, [])


def learnt(folder, keys, seed):
    """A server that asks four honest sites for this and that: of each step variants, in any order, for some sites twice; the
    lists of survivors of each round whose sum it can take the masks off, whatever it puts together."""
    rng = random.Random(seed)
    loop = Loop(folder, keys)
    run, down = loop.server.run, {"model": loop.at.state["model"]}
    masked, opened = {}, {1: set(), 2: set()}

    def ask(name, **parts):
        return loop.members[name].answer_sum_steps(run, parts)

    for number in (1, 2, 1):
        tries = 2 if rng.random() < 0.5 else 1
        for _ in range(tries):
            keys_of = {name: ask(name, advertise=number)[0]["advert"] for name in SITES}
            listings = [SITES, rng.sample(SITES, 3), rng.sample(SITES, rng.choice((2, 3, 4)))]
            boxes_of, told_of = {}, {}
            for name in SITES:
                listing = rng.choice(listings[: rng.choice((1, 1, 3))])
                threshold = rng.choice((3, 3, 3, 2, 4))
                told = {"round": number, "threshold": threshold, "adverts": [keys_of[n] for n in listing]}
                _, body = ask(name, share=told)
                if found := body.tensors.get(SHARES_GROUP):
                    boxes_of[name], told_of[name] = found, (tuple(sorted(listing)), threshold)
            second = {}
            for name in boxes_of:
                got = {o: b[name] for o, b in boxes_of.items() if o != name and name in b}
                if rng.random() < 0.3 and got:
                    got.pop(rng.choice(sorted(got)))
                try:
                    place = loop.members[name].decrypt_shares_and_join_sum(SumId(run, number), got)
                except RefusalError:
                    continue
                place.mark_used()
                sent = place.mask_encoded_reply(
                    encode_reply_in_fixed_point(loop.reply(name, down), loop.server.algorithm, 4)
                )
                words = parse_sum_message(sent)[0]
                assert (name, told_of[name], keys_of[name]["mask"]) not in masked, "one mask, twice"
                masked[name, told_of[name], keys_of[name]["mask"]] = words
                second[name] = (words, told_of[name], tuple(sorted({name, *got})))
            lists = [sorted(second), sorted(rng.sample(sorted(second), max(0, len(second) - 1)))]
            handed = {}
            for name in second:
                for survivors in rng.sample(lists, 2):
                    answer, body = ask(name, hand_out={"round": number, "survivors": survivors})
                    if "tokens" in answer:
                        assert name not in handed, "shares for two lists"
                        numbers = {v: int(token, 16) for v, token in answer["tokens"].items()}
                        handed[name] = UnmaskingShares(numbers, body.tensors[BUNDLE_GROUP]["bundle"].numpy().tobytes())
            opened[number] |= openings(run, number, keys_of, second, handed, loop, down)
    return opened


def openings(run, number, keys_of, second, handed, loop, down):
    """The lists for which some choice of what sites were told opens a sum; each sum is what it should be."""
    found = set()
    told = {entry[1] for entry in second.values()}
    shared = {entry[2] for entry in second.values()}
    for (listing, threshold), everyone, size in itertools.product(told, shared, range(1, 5)):
        for survivors in itertools.combinations(sorted(second), size):
            total = sum((second[n][0] for n in survivors), np.zeros_like(second[survivors[0]][0]))
            adverts = [parse_key_advertisement(keys_of[n]) for n in listing]
            for fewest in {threshold, 2}:
                try:
                    words = unmask_sum(SumId(run, number), adverts, fewest, everyone, survivors, total, handed)
                except (RoundError, KeyError):
                    continue
                parts = (encode_reply_in_fixed_point(loop.reply(n, down), loop.server.algorithm, 4) for n in survivors)
                if np.array_equal(words, sum(parse_sum_message(part)[0] for part in parts)):
                    found.add(survivors)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_asks_anything_learns_one_sum_a_round(tmp_path, keys, seed):
    for lists in learnt(tmp_path, keys, seed).values():
        assert len(lists) <= 1
        assert all(len(survivors) >= 3 for survivors in lists)


@pytest.mark.slow
def test_so_does_one_that_asks_much(tmp_path, keys):
    opened = 0
    for seed in range(3, 60):
        (tmp_path / str(seed)).mkdir()
        for lists in learnt(tmp_path / str(seed), keys, seed).values():
            assert len(lists) <= 1
            assert all(len(survivors) >= 3 for survivors in lists)
            opened += len(lists)
    assert opened > 5, "it was too clumsy to learn what it may"
