"""Secure sums against a site that lies to the server.

A lie of one site of four costs at most what docs/deploy/secure_sums.md says: it is left out, or it shifts the sum by its
own numbers, or it prevents the sum of a round, which ends with a sentence. What comes out of a round is otherwise exactly
the sum of honest sites.
"""

import json
import random

import pytest
import torch
from fuzz import mangled, mutated
from secure_lies import (
    HARMLESS,
    KINDS,
    LEFT_OUT,
    LIAR,
    OTHERS,
    PREVENTED,
    harms,
    head,
    result_of,
    silence,
    tensors,
    told,
    whole,
)
from secure_loop import SITES, STEPS, Loop, packed, step_of, write_keys

from polyfed.core.errors import UserError
from polyfed.deploy.protocol.wire import PackedEnvelope
from polyfed.deploy.secure_aggregation.client import SHARES_GROUP
from polyfed.deploy.secure_aggregation.protocol import SumId


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_keys(tmp_path_factory.mktemp("keys"))


def test_honest_sites_have_their_sum(tmp_path, keys):
    loop = Loop(tmp_path, keys)
    assert [result_of(loop, number) for number in (1, 2, 3)] == ["all"] * 3
    assert not loop.said


def test_there_are_ninety_lies():
    assert len(KINDS) >= 90


@pytest.mark.thorough
def test_a_few_of_the_lies_costs_no_more_than_the_documentation_says(tmp_path, keys):
    assert not harms(tmp_path, keys, [*list(LEFT_OUT)[::16], *list(HARMLESS)[::16], *list(PREVENTED)[::8]])


@pytest.mark.slow
@pytest.mark.parametrize("rest", range(8))
def test_no_lie_costs_more_than_the_documentation_says(tmp_path, keys, rest):
    assert not harms(tmp_path, keys, list(KINDS)[rest::8])


def test_shares_without_keys_do_not_end_the_run(tmp_path, keys):
    """A site that sends no keys for a round, and shares for it, has no part in it. (It ended the run by a KeyError.)"""

    def lie(loop, step, letter, answer):
        if step == "mask":
            return head(lambda found, letter: {n: v for n, v in found.items() if n != "advert"})(letter, answer)
        if step == "hand out":
            shares = {SHARES_GROUP: dict.fromkeys(OTHERS, torch.zeros(247, dtype=torch.uint8))}
            return tensors(lambda groups: {**groups, **shares})(letter, answer)
        return answer

    loop = Loop(tmp_path, keys, lie)
    assert [result_of(loop, number) for number in (1, 2)] == ["all", "others"]


def test_keys_that_nobody_asked_for_give_no_part_in_a_sum(tmp_path, keys):
    """Else sites outside a round could make it so large that its threshold protects nobody, and all refuse."""

    def lie(loop, step, letter, answer):
        if step == "mask" and not letter.head.get("advertise"):
            return told(advert=loop.members[LIAR].replace_keys_and_build_advertisement(SumId(loop.server.run, 2)))(
                letter, answer
            )
        return answer

    loop = Loop(tmp_path, keys, lie, **{"clients-per-round": 3, "seed": 0})
    assert LIAR in loop.federation.sample_round_clients(1)
    assert LIAR not in loop.federation.sample_round_clients(2)
    loop.round(1)
    letters = [letter for name, letter, _ in loop.sent if letter.head.get("share")]
    assert {a["name"] for a in letters[-1].head["share"]["adverts"]} == set(OTHERS)
    assert loop.round(2)[0] == OTHERS


def test_the_first_to_answer_does_not_decide_on_the_form(tmp_path, keys, monkeypatch):
    """In the first round of a method whose clients settle the form, that of most counts, as without secure sums."""
    monkeypatch.setattr("polyfed.deploy.server.secure_rounds.find_secure_reply_error", lambda *_: None)
    lie = whole([["model", "w", [3], "float32"]], 4)
    loop = Loop(tmp_path, keys, lambda loop, step, le, answer: lie(le, answer) if step == "mask" else answer)
    assert result_of(loop, 1) == "others"


def test_two_of_four_that_are_silent_end_the_round_with_a_sentence(tmp_path, keys):
    for step in STEPS:
        (folder := tmp_path / step.replace(" ", "-")).mkdir()
        loop = Loop(folder, keys)
        honest = loop.answer

        def answer(name, letter, step=step, honest=honest):
            asked = letter.head.get("advertise") if step == "advertise" else step_of(letter.head) == step
            return silence(letter, None) if asked and name in SITES[:2] else honest(name, letter)

        loop.answer = answer
        inside, _, failed = loop.round(1)
        assert not inside
        assert set(failed) == set(SITES)
        sentences = ("no part in the secure sum", "2 sites have ", "no reply")
        assert all(any(sentence in told for sentence in sentences) for told in failed.values()), failed


def damaged(answer, rng):
    """An answer with another head, or other bytes."""
    sound = packed(answer)
    if isinstance(sound, str):
        return sound
    try:
        if rng.random() < 0.5 or not sound.groups:
            return PackedEnvelope(json.dumps(mutated(json.loads(sound.head), rng)), sound.scalars, sound.groups)
        name = rng.choice(sorted(sound.groups))
        return PackedEnvelope(sound.head, sound.scalars, {**sound.groups, name: mangled(sound.groups[name], rng)})
    except (UserError, RecursionError):  # of a head that is too long, or too deep to be written
        return "not a message of polyfed"


def fuzzed(folder, keys, seed):
    """Three rounds in which site-0 answers damaged letters at random; "all" and "others" are checked to be exact."""
    rng = random.Random(seed)
    loop = Loop(folder, keys, lambda loop, step, le, answer: damaged(answer, rng) if rng.random() < 0.5 else answer)
    found = []
    for number in (1, 2, 3):
        try:
            found.append(result_of(loop, number))
        except AssertionError as error:
            if "another sum" not in str(error):  # a site may shift the sum by what it sends
                raise
            found.append("shifted")
    return found


def test_damaged_answers_end_no_run(tmp_path, keys):
    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
        fuzzed(tmp_path / str(seed), keys, seed)


@pytest.mark.slow
def test_many_damaged_answers_end_no_run(tmp_path, keys):
    for seed in range(4, 150):
        (tmp_path / str(seed)).mkdir()
        fuzzed(tmp_path / str(seed), keys, seed)
