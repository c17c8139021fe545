"""What a site does in a secure sum, in four steps, each a function of the state that the last has left (Bonawitz et al.
2017, figure 4): it advertises keys, deals shares of its secrets, masks its numbers, and hands out the shares of others that
the sum over the survivors needs. It refuses whatever would tell more than that sum."""

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from polyfed.deploy.secure import RefusalError, keys
from polyfed.deploy.secure.keys import PublicKey, Sign, Words
from polyfed.deploy.secure.shamir import PRIME, SIZE, deal, element, elements

_MASK, _SELF, _AGREE, _LISTED = 0, 1, 2, 3  # of what a site deals: s, b, a, and then d_v in the order of sites
_MOST_ROUNDS = 10**9


@final
@dataclass(frozen=True)
class Sum:
    """Which sum: everything that is signed or derived for it is bound to its run and round.

    Raises:
        RefusalError: a round that is none; a site names a file by it.
    """

    run: str
    round: int

    def __post_init__(self) -> None:
        if type(self.round) is not int or not 0 <= self.round < _MOST_ROUNDS:
            raise RefusalError("the letter names no round")

    @property
    def tag(self) -> bytes:
        """What binds it."""
        return keys.framed("sum", self.run, str(self.round))


@final
@dataclass(frozen=True)
class Advert:
    """A site's public keys for one sum: c, with which shares are encrypted, and s, from which masks are made; signed with
    the key under which the site is registered."""

    name: str
    cipher: bytes
    mask: bytes
    signature: bytes

    def content(self, which: Sum) -> bytes:
        """What is signed."""
        return keys.framed(which.tag, "keys", self.name, self.cipher, self.mask)


@final
@dataclass(frozen=True)
class Advertised:
    """After step 1: the private keys."""

    which: Sum
    name: str
    cipher: bytes
    mask: bytes


@final
@dataclass(frozen=True)
class Shared:
    """After step 2: who has advertised (U1), the threshold t, the seed b of the self-mask, the numbers a and d_v for the
    agreement, and the shares that the site holds of its own secrets."""

    before: Advertised
    adverts: tuple[Advert, ...]
    threshold: int
    seed: bytes
    agreement: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """What binds everything to U1, its keys and the threshold: sites that were told otherwise cannot read each other."""
        return digest_of(self.before.which, self.adverts, self.threshold)


@final
@dataclass(frozen=True)
class Masked:
    """In step 3 and after it: the shares that the site holds of each site's secrets, name -> shares; these sites are U2."""

    before: Shared
    held: Mapping[str, tuple[int, ...]]


@final
@dataclass(frozen=True)
class Handed:
    """What a site hands out in step 4: its share of F_v(L) for each survivor v, and its shares of masks, which F(L) of its
    own opens."""

    tokens: Mapping[str, int]
    bundle: bytes


def digest_of(which: Sum, adverts: Collection[Advert], threshold: int) -> bytes:
    """See `Shared.digest`."""
    named = [part for advert in adverts for part in (advert.name, advert.cipher, advert.mask)]
    return hashlib.sha256(keys.framed(which.tag, str(threshold), *named)).digest()


def least_threshold(sites: int, demanded: int | None = None) -> int:
    """The smallest threshold at which a site takes part, for so many sites: as `demanded` by its owner, but above the half,
    which an active server needs (theorem 6.5 with no colluding site); by default above two thirds, which is safe
    while fewer than a third of the sites collude with the server.

    >>> [least_threshold(n) for n in (2, 3, 4, 10)], least_threshold(3, demanded=1)
    ([2, 3, 3, 7], 2)
    """
    return max(2, sites // 2 + 1, 2 * sites // 3 + 1 if demanded is None else demanded)


def box_size(sites: int) -> int:
    """Bytes of a sealed box of shares in a sum of so many sites."""
    return SIZE * (_LISTED + sites) + keys.TAG


def advertise(which: Sum, name: str, sign: Sign) -> tuple[Advertised, Advert]:
    """Step 1 (round 0, AdvertiseKeys): two new pairs of keys, of which the public halves are signed."""
    state = Advertised(which, name, keys.fresh_key(), keys.fresh_key())
    bare = Advert(name, keys.public_of(state.cipher), keys.public_of(state.mask), b"")
    return state, Advert(name, bare.cipher, bare.mask, sign(bare.content(which)))


def share(
    state: Advertised,
    adverts: Sequence[Advert],
    threshold: int,
    peers: Mapping[str, PublicKey],
    demanded: int | None = None,
) -> tuple[Shared, dict[str, bytes]]:
    """Step 2 (round 1, ShareKeys): deals shares of the key s, of the self-mask b and of the agreement.

    Args:
        state: of step 1.
        adverts: of all sites of the sum, U1, as the server tells.
        threshold: t.
        peers: the keys under which sites are registered, as this site's owner knows them.
        demanded: the smallest threshold that its owner wants; see `least_threshold`.

    Returns:
        the state, and a sealed box of shares for each other site.

    Raises:
        RefusalError: the list is not that of a sum in which this site could hide.
    """
    adverts = tuple(sorted(adverts, key=lambda advert: advert.name))
    names = [advert.name for advert in adverts]
    if len(set(names)) < len(names):
        raise RefusalError("a site is listed twice in this sum")
    least = least_threshold(len(names), demanded)
    if not least <= threshold <= len(names):
        raise RefusalError(
            f"the threshold of this sum is {threshold} of {len(names)} sites; this site takes part from {least} "
            "(secure-threshold)"
        )
    for advert in adverts:
        if advert.name not in peers:
            raise RefusalError(f"the key of {advert.name!r} is not known here (peers)")
        if not keys.signed(peers[advert.name], advert.signature, advert.content(state.which)):
            raise RefusalError(f"the keys of {advert.name!r} for this sum are not signed by it")
    publics = [key for advert in adverts for key in (advert.cipher, advert.mask)]
    if len(set(publics)) < len(publics) or any(len(key) != 32 for key in publics):
        raise RefusalError("the keys of this sum are not all different")
    mine = next((advert for advert in adverts if advert.name == state.name), None)
    if mine is None or (mine.cipher, mine.mask) != (keys.public_of(state.cipher), keys.public_of(state.mask)):
        raise RefusalError("the keys of this sum are not those that this site has advertised last")
    seed = secrets.token_bytes(32)
    agreement = tuple(secrets.randbelow(PRIME) for _ in range(1 + len(names)))
    dealt = deal([*map(_number, (state.mask, seed)), *agreement], len(names), threshold)
    after = Shared(state, adverts, threshold, seed, agreement, tuple(dealt[names.index(state.name)]))
    boxes = {}
    for advert, shares in zip(adverts, dealt, strict=True):
        if advert.name != state.name:
            key = _box_key(after, advert, state.name, advert.name)
            boxes[advert.name] = keys.seal(key, b"".join(map(element, shares)), after.digest)
    return after, boxes


def unseal_boxes(state: Shared, boxes: Mapping[str, bytes]) -> Masked:
    """The first half of step 3 (round 2, MaskedInputCollection): opens the sealed shares. It needs nothing of what is added
    up, so that a site can refuse a sum, or use its keys up, before it looks at its data.

    Args:
        state: of step 2.
        boxes: sealed shares from each other site that has dealt some; with this one they are U2.

    Raises:
        RefusalError: fewer than t sites, or a box that was not made for this site in this sum.
    """
    name, listed = state.before.name, {advert.name: advert for advert in state.adverts}
    if strange := sorted(set(boxes) - set(listed) | (set(boxes) & {name})):
        raise RefusalError(f"{strange[0]!r} has no part in this sum")
    if len(boxes) + 1 < state.threshold:
        raise RefusalError(f"{len(boxes) + 1} sites have shared their secrets, fewer than {state.threshold}")
    held = {name: state.own}
    for other, box in sorted(boxes.items()):
        try:
            shares = elements(keys.unseal(_box_key(state, listed[other], other, name), box, state.digest))
            if len(shares) != _LISTED + len(listed):
                raise ValueError("they are too few")
        except ValueError as error:
            raise RefusalError(f"the shares from {other!r} cannot be read: {error}") from error
        held[other] = tuple(shares)
    return Masked(state, held)


def mask(state: Masked, words: Words) -> Words:
    """The second half: y = x + PRG(b) + Σ_v ± PRG(s_uv) mod 2^64. The caller masks once with a state.

    Args:
        state: of `unseal_boxes`.
        words: x.
    """
    shared, name = state.before, state.before.before.name
    listed = {advert.name: advert for advert in shared.adverts}
    masked = words + keys.stream(self_key(shared.seed, shared.digest, name), len(words))
    for other in sorted(state.held.keys() - {name}):
        pair = keys.agree(shared.before.mask, listed[other].mask)
        pad = keys.stream(pair_key(pair, shared.digest, name, other), len(words))
        masked = masked + pad if name < other else masked - pad
    return masked


def hand_out(state: Masked, survivors: Sequence[str], before: Sequence[str] | None = None) -> Handed:
    """Step 4 (rounds 3 and 4, ConsistencyCheck and Unmasking): shares of the self-masks of survivors and of the keys of the
    others, sealed with F(L), which t sites with the same list open together; see `polyfed.deploy.secure`. This site hands
    out once: the caller keeps nothing of `state` after, and the list for good.

    Args:
        state: of step 3.
        survivors: L (U3 of the paper), whose masked numbers the server has.
        before: the list for which the site has handed out in this run and round, should the round be played again.

    Raises:
        RefusalError: a list that is not a part of U2 with this site in it, of fewer than t sites, or another than `before`.
    """
    shared, name = state.before, state.before.before.name
    listed = sorted(set(survivors))
    if len(listed) < len(survivors) or not set(listed) <= state.held.keys():
        raise RefusalError("the list of survivors names sites that have no part in this sum, or one twice")
    if len(listed) < shared.threshold:
        raise RefusalError(f"{len(listed)} sites have survived, fewer than {shared.threshold}")
    if name not in listed:
        raise RefusalError("this site is not among the survivors, though it has sent its numbers")
    if before is not None and sorted(before) != listed:
        raise RefusalError(
            "the sum of this round was opened for other sites before, from which the numbers of one could be told; let "
            "the same sites take part, or start another run"
        )
    names = [advert.name for advert in shared.adverts]
    places = [_LISTED + names.index(other) for other in listed]
    tokens = {v: (state.held[v][_AGREE] + sum(state.held[v][k] for k in places)) % PRIME for v in listed}
    agreement = (shared.agreement[0] + sum(shared.agreement[1 + names.index(v)] for v in listed)) % PRIME
    shares = [state.held[v][_SELF if v in listed else _MASK] for v in sorted(state.held)]
    key = bundle_key(agreement, shared.digest, name, listed)
    return Handed(tokens, keys.seal(key, b"".join(map(element, shares)), shared.digest))


def pair_key(pair: bytes, digest: bytes, one: str, other: str) -> bytes:
    """The key of the mask that two sites have in common, from what their keys agree on."""
    return keys.derive(pair, digest, "pair", *sorted((one, other)))


def self_key(seed: bytes, digest: bytes, name: str) -> bytes:
    """The key of a site's self-mask."""
    return keys.derive(seed, digest, "self", name)


def bundle_key(agreement: int, digest: bytes, name: str, survivors: Sequence[str]) -> bytes:
    """The key of what a site hands out, from F(L)."""
    return keys.derive(element(agreement), digest, "bundle", name, *survivors)


def _box_key(state: Shared, other: Advert, source: str, target: str) -> bytes:
    return keys.derive(keys.agree(state.before.cipher, other.cipher), state.digest, "box", source, target)


def _number(secret: bytes) -> int:
    return int.from_bytes(secret, "big")
