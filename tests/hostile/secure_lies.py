"""What a site can send in place of each of its messages in a secure sum, and what becomes of the sum."""

import dataclasses
import json
import secrets

import pytest
import torch
from secure_loop import SITES, Loop, mean_of

from polyfed.core.algorithm import Message
from polyfed.deploy.protocol.wire import Envelope
from polyfed.deploy.secure_aggregation import crypto as primitives
from polyfed.deploy.secure_aggregation.client import BUNDLE_GROUP, SHARES_GROUP, parse_key_advertisement
from polyfed.deploy.secure_aggregation.crypto import make_signing_function
from polyfed.deploy.secure_aggregation.protocol import SumId, create_signed_keys
from polyfed.deploy.secure_aggregation.shamir import PRIME

LIAR, *OTHERS = SITES


def head(change):
    """The head as `change(head, letter)` makes it."""
    return lambda letter, answer: dataclasses.replace(answer, head=change(dict(answer.head), letter))


def told(**words):
    return head(lambda found, letter: {**found, **words})


def tensors(change):
    """The groups as `change` makes them."""
    return lambda letter, answer: dataclasses.replace(
        answer, body=Message(change({group: dict(tree) for group, tree in answer.body.tensors.items()}))
    )


def sent(**parts):
    """Parts of the masked numbers as these make them."""

    def change(groups):
        tree = groups["sum"]
        return {"sum": {**tree, **{name: make(tree[name]) for name, make in parts.items()}}}

    return tensors(change)


def layout(written):
    """Another layout of the masked numbers."""
    data = written if isinstance(written, bytes) else json.dumps(written).encode()
    return sent(layout=lambda t: torch.frombuffer(bytearray(data), dtype=torch.uint8))


def whole(written, words):
    """Another layout, and as many words as it says."""
    data = json.dumps(written).encode()
    form = {
        "layout": torch.frombuffer(bytearray(data), dtype=torch.uint8),
        "words": torch.zeros(words, dtype=torch.int64),
    }
    return tensors(lambda groups: {"sum": form})


def boxes(change):
    """The sealed shares as `change` makes each."""
    return tensors(lambda groups: {SHARES_GROUP: {name: change(box) for name, box in groups[SHARES_GROUP].items()}})


def bundle(change):
    return tensors(lambda groups: {BUNDLE_GROUP: {"bundle": change(groups[BUNDLE_GROUP]["bundle"])}})


def tokens(change):
    return head(lambda found, letter: {**found, "tokens": change(dict(found["tokens"]))})


def advert(**fields):
    """Keys with other fields, with the signature of those before."""
    return head(lambda found, letter: {**found, "advert": {**found["advert"], **fields}})


def silence(letter, answer):
    return "no reply within 3600 s (round-seconds); a later one is discarded"


def noise(tensor):
    return torch.randint(0, 256, tensor.shape, dtype=torch.uint8)


def swapped(groups):
    first, second, *rest = groups[SHARES_GROUP]
    found = groups[SHARES_GROUP]
    return {SHARES_GROUP: {first: found[second], second: found[first], **{name: found[name] for name in rest}}}


BYTES = torch.zeros(9, dtype=torch.uint8)
LEFT_OUT = {
    # keys
    "silence when keys are asked for": ("advertise", silence),
    "no keys": ("advertise", head(lambda found, letter: {n: v for n, v in found.items() if n != "advert"})),
    "keys that are null": ("advertise", told(advert=None)),
    "keys that are a list": ("advertise", told(advert=[1, 2])),
    "keys that are a text": ("advertise", told(advert="0" * 64)),
    "keys without a part": ("advertise", told(advert={"name": LIAR, "cipher": "00" * 32})),
    "keys that are not numbers": ("advertise", advert(cipher="zz" * 32)),
    "a short key": ("advertise", advert(mask="00" * 31)),
    "a long key": ("advertise", advert(mask="00" * 20_000)),
    "a long signature": ("advertise", advert(signature="00" * 300)),
    "another's name": ("advertise", advert(name=SITES[1])),
    "a name that is not text": ("advertise", advert(name=["x"])),
    "a head that is too long": ("advertise", told(more="x" * 70_000)),
    "a head in a head": ("advertise", told(advert={"name": {"name": {}}})),
    # shares
    "silence when shares are asked for": ("share", silence),
    "no shares": ("share", tensors(lambda groups: {})),
    "a share is missing": ("share", tensors(lambda g: {SHARES_GROUP: dict(list(g[SHARES_GROUP].items())[1:])})),
    "a share for a stranger": ("share", tensors(lambda g: {SHARES_GROUP: {**g[SHARES_GROUP], "site-9": BYTES}})),
    "a share for itself": ("share", tensors(lambda g: {SHARES_GROUP: {**g[SHARES_GROUP], LIAR: BYTES}})),
    "shares of another type": ("share", boxes(torch.Tensor.float)),
    "shares that are NaN": ("share", boxes(lambda t: torch.full(t.shape, torch.nan))),
    "shares in rows": ("share", boxes(lambda t: t[None])),
    "shares that are too short": ("share", boxes(lambda t: t[:-1])),
    "shares that are empty": ("share", boxes(lambda t: t[:0])),
    "shares that are too long": ("share", boxes(lambda t: torch.cat([t, t]))),
    "huge shares": ("share", boxes(lambda t: torch.zeros(2**20, dtype=torch.uint8))),
    "another group": ("share", tensors(lambda g: {"x": g[SHARES_GROUP]})),
    "a thousand shares more": (
        "share",
        tensors(lambda g: {SHARES_GROUP: {**g[SHARES_GROUP], **{f"s{k}": BYTES for k in range(1000)}}}),
    ),
    # masked numbers
    "silence when numbers are asked for": ("mask", silence),
    "a refusal": ("mask", told(refused="I do not")),
    "a failure": ("mask", told(failure="OutOfMemoryError")),
    "an answer for another round": ("mask", told(round=7)),
    "an answer for another run": ("mask", told(run="other")),
    "an answer for another site": ("mask", told(client=SITES[1])),
    "no numbers": ("mask", tensors(lambda groups: {})),
    "a group more": ("mask", tensors(lambda g: {**g, "x": {"w": torch.zeros(2)}})),
    "plain numbers": (
        "mask",
        lambda le, answer: dataclasses.replace(answer, body=Message({"model": {"w": torch.ones(2)}})),
    ),
    "too few words": ("mask", sent(words=lambda t: t[:-1])),
    "too many words": ("mask", sent(words=lambda t: torch.cat([t, t]))),
    "no words": ("mask", sent(words=lambda t: t[:0])),
    "words of 32 bits": ("mask", sent(words=torch.Tensor.int)),
    "words with a point": ("mask", sent(words=torch.Tensor.double)),
    "words that are NaN": ("mask", sent(words=lambda t: torch.full(t.shape, torch.nan))),
    "words in rows": ("mask", sent(words=lambda t: t[None])),
    "a layout with another name": ("mask", layout([["model", "x", [98], "float32"]])),
    "a layout with another group": ("mask", layout([["x", "w", [98], "float32"]])),
    "a layout that is empty": ("mask", layout([])),
    "a layout that is not JSON": ("mask", layout(b"\xff{")),
    "a layout that is nested": ("mask", layout(b"[" * 100_000)),
    "a layout that is a number": ("mask", layout(3)),
    "a layout of huge sizes": ("mask", layout([["model", "w", [2**62, 2**62], "float32"]])),
    "a layout of no numbers, with sizes beyond all": ("mask", whole([["model", "w", [2**63, 0], "float32"]], 1)),
    "a layout of a thousand dimensions": ("mask", whole([["model", "w", [1] * 1000, "float32"]], 2)),
    "a layout of one number": ("mask", whole([["model", "w", [], "float32"]], 2)),
    "a layout of other groups": ("mask", whole([["x", "w", [], "float32"], ["", "", [0], "bool"]], 2)),
    "a layout of negative sizes": ("mask", layout([["model", "w", [-1, -98], "float32"]])),
    "a layout of digits": ("mask", layout(b'[["model","w",[' + b"9" * 5000 + b'],"float32"]]')),
    "a layout of another type": ("mask", layout([["model", "w", [98], "object"]])),
    "a layout with a name twice": ("mask", layout([["model", "w", [49], "float32"]] * 2)),
    "a layout of ten million bytes": ("mask", layout(b"[" + b'["a","b",[],"bool"],' * 500_000 + b"]")),
}
"""What costs a site its own part: a step, and what it answers there."""


def wrong_shares(loop, letter):
    """Other shares of self-masks than were dealt, which are then sealed as they should be."""
    if letter.head.get("hand_out") is None:
        return
    for file in loop.members[LIAR].folder.glob("secure/round-*.json"):
        kept = json.loads(file.read_text())
        for shares in kept.get("held", {}).values():
            shares[1] = format(secrets.randbelow(PRIME), "x")
        file.write_text(json.dumps(kept))


HARMLESS = {
    "silence when the sum is opened": ("hand out", silence),
    "no tokens": ("hand out", told(tokens=None)),
    "tokens that are a list": ("hand out", told(tokens=[1, 2, 3])),
    "tokens that are numbers": ("hand out", tokens(lambda found: dict.fromkeys(found, 7))),
    "tokens that are not numbers": ("hand out", tokens(lambda found: dict.fromkeys(found, "-x"))),
    "no bundle": ("hand out", tensors(lambda groups: {})),
    "a bundle that is empty": ("hand out", bundle(lambda t: t[:0])),
    "a bundle that is too long": ("hand out", bundle(lambda t: torch.cat([t, t]))),
    "a bundle of noise": ("hand out", bundle(noise)),
    "a bundle with a point": ("hand out", bundle(lambda t: t.float() / 3)),
    "a bundle that is NaN": ("hand out", bundle(lambda t: torch.full(t.shape, torch.nan))),
    "a bundle of bfloat16": ("hand out", bundle(torch.Tensor.bfloat16)),
    "a bundle in rows": ("hand out", bundle(lambda t: t[None])),
    "seconds that are none": ("mask", told(seconds=float("nan"))),
    "seconds of 400 digits": ("mask", told(seconds=10**400)),
    "refusals that are a number": ("hand out", told(refusals=3)),
    "refusals that forge a log": ("hand out", told(refusals={"x": "a\nround 3 is fine\n" * 99})),
    "numbers beside": (
        "mask",
        lambda le, a: dataclasses.replace(a, body=Message(a.body.tensors, {"num_examples": 1e300})),
    ),
}
"""What costs nothing: the sum has all four in it."""

PREVENTED = {
    "keys signed by nobody": ("advertise", advert(signature="00" * 64)),
    "keys that were changed": ("advertise", advert(mask="11" * 32)),
    "keys with which everybody agrees": ("advertise", "zero"),
    "another's keys": ("advertise", "copied"),
    "keys of another round": ("advertise", "other round"),
    "keys of another run": ("advertise", "other run"),
    "shares of noise": ("share", boxes(noise)),
    "shares for others": ("share", tensors(swapped)),
    "tokens of noise": ("hand out", tokens(lambda found: {v: format(secrets.randbelow(PRIME), "x") for v in found})),
    "tokens that are huge": ("hand out", tokens(lambda found: dict.fromkeys(found, "f" * 10_000))),
    "tokens below zero": ("hand out", tokens(lambda found: dict.fromkeys(found, "-5"))),
    "tokens for a stranger": ("hand out", told(tokens={"site-9": "5"})),
    "no masks": ("mask", sent(words=torch.zeros_like)),
    "masks of noise": ("mask", sent(words=lambda t: torch.randint(-(2**63), 2**63 - 1, t.shape))),
    "wrong shares of self-masks": ("hand out", wrong_shares),
}
"""What ends the round with a sentence, as docs/deploy/secure_sums.md says a site can."""
AGAINST_ONE = {
    "shares of noise for one": (
        "share",
        tensors(lambda g: {SHARES_GROUP: {**g[SHARES_GROUP], "site-1": noise(g[SHARES_GROUP]["site-1"])}}),
    ),
    "shares for another": (
        "share",
        tensors(lambda g: {SHARES_GROUP: {**g[SHARES_GROUP], "site-1": g[SHARES_GROUP]["site-2"]}}),
    ),
}
"""What keeps another site out of the sum, which refuses to take part without shares of all."""
KINDS = {**LEFT_OUT, **HARMLESS, **PREVENTED, **AGAINST_ONE}


def signed(keys, which, name=LIAR, **fields):
    """Keys of a site for a sum, signed with its registered key."""
    _, made = create_signed_keys(which, name, lambda content: b"")
    made = dataclasses.replace(made, **fields)
    signature = make_signing_function(primitives.read_registered_private_key(keys / f"{name}.key"))(
        made.signed_content(which)
    )
    return {
        "name": made.name,
        "cipher": made.cipher_public.hex(),
        "mask": made.mask_public.hex(),
        "signature": signature.hex(),
    }


def of_keys(kind, loop, keys, letter):
    """Keys that are signed, and lie otherwise."""
    number = letter.head["advertise"]
    which = SumId(loop.server.run, number)
    if kind == "zero":
        return signed(keys, which, cipher_public=bytes(32))
    if kind == "copied":
        theirs = next(a for name, _, a in reversed(loop.sent) if name == LIAR)  # its own, of which it takes one twice
        return signed(
            keys,
            which,
            cipher_public=parse_key_advertisement(theirs.head["advert"]).mask_public,
            mask_public=parse_key_advertisement(theirs.head["advert"]).mask_public,
        )
    if kind == "other round":
        return signed(keys, SumId(loop.server.run, number + 1))
    return signed(keys, SumId("other", number))


def outcome(folder, keys, kind, rounds=2):
    """What came of each round: "all" or "others" are in its sum, which is exact, or it is "without" some of these; or the
    sentences with which it ended."""
    step, change = KINDS[kind]

    def lie(loop, at, letter, answer):
        asked = letter.head.get("advertise") if step == "advertise" else at == step
        if not asked or (isinstance(answer, Envelope) and answer.head.get("refused")):
            return answer
        if isinstance(change, str):
            return told(advert=of_keys(change, loop, keys, letter))(letter, answer)
        return change(letter, answer)

    loop = Loop(folder, keys, before=change) if change is wrong_shares else Loop(folder, keys, lie)
    return [result_of(loop, number) for number in range(1, rounds + 1)]


def result_of(loop, number):
    inside, mean, failed = loop.round(number)
    if not inside:
        assert set(failed) == set(SITES)
        return " / ".join(sorted(set(failed.values())))
    weight, value = mean_of(inside)
    assert mean == pytest.approx((weight, value, value), abs=1e-6), "another sum"
    if kept_out := sorted(set(OTHERS) - set(inside)):
        return f"without {', '.join(kept_out)}"
    return "all" if LIAR in inside else "others"


def as_documented(kind, found):
    if kind in LEFT_OUT:
        return set(found) == {"others"}
    if kind in HARMLESS:  # what came with it, shares for the next round, may cost the liar that one
        return found[0] == "all" and set(found) <= {"all", "others"}
    if kind in AGAINST_ONE:
        return set(found) == {"without site-1"}
    return not any(result in ("all", "others") or result.startswith("without") for result in found)


def harms(folder, keys, kinds):
    wrong = {}
    for number, kind in enumerate(kinds):
        (place := folder / str(number)).mkdir()
        try:
            found = outcome(place, keys, kind)
        except Exception as error:  # all that is not a sentence of a round
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
            wrong[kind] = found
        if not as_documented(kind, found):
            wrong[kind] = found
    return wrong
