"""What a site does in a secure sum, in four steps, each a function of the state that the last has left (Bonawitz et al.
2017, figure 4): it advertises keys, deals shares of its secrets, masks its numbers, and hands out the shares of others that
the sum over the survivors needs. It refuses whatever would tell more than that sum."""

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation import crypto
from polyfed.deploy.secure_aggregation.crypto import PublicKey, SignFunction, Words
from polyfed.deploy.secure_aggregation.shamir import (
    ELEMENT_BYTES,
    PRIME,
    element_to_bytes,
    elements_from_bytes,
    split_secrets,
)

_MASK, _SELF_MASK, _AGREEMENT, _FIRST_LIST_NUMBER = (
    0,
    1,
    2,
    3,
)  # of what a site deals: s, b, a, and then d_v in the order of sites
_MAX_ROUNDS = 10**9


@final
@dataclass(frozen=True)
class SumId:
    """Which sum: everything that is signed or derived for it is bound to its run and round.

    Raises:
        RefusalError: a round that is none; a site names a file by it.
    """

    run: str
    round: int

    def __post_init__(self) -> None:
        if type(self.round) is not int or not 0 <= self.round < _MAX_ROUNDS:
            raise RefusalError("the letter names no round")

    @property
    def context_bytes(self) -> bytes:
        """What binds it."""
        return crypto.encode_length_prefixed("sum", self.run, str(self.round))


@final
@dataclass(frozen=True)
class KeyAdvertisement:
    """A site's public keys for one sum: c, with which shares are encrypted, and s, from which masks are made; signed with
    the key under which the site is registered."""

    name: str
    cipher: bytes
    mask: bytes
    signature: bytes

    def signed_content(self, sum_id: SumId) -> bytes:
        """What is signed."""
        return crypto.encode_length_prefixed(sum_id.context_bytes, "keys", self.name, self.cipher, self.mask)


@final
@dataclass(frozen=True)
class AdvertisedState:
    """After step 1: the private keys."""

    sum_id: SumId
    name: str
    cipher: bytes
    mask: bytes


@final
@dataclass(frozen=True)
class SharedState:
    """After step 2: who has advertised (U1), the threshold t, the seed b of the self-mask, the numbers a and d_v for the
    agreement, and the shares that the site holds of its own secrets."""

    advertised: AdvertisedState
    adverts: tuple[KeyAdvertisement, ...]
    threshold: int
    seed: bytes
    agreement: tuple[int, ...]
    own_shares: tuple[int, ...]

    @property
    def context_digest(self) -> bytes:
        """What binds everything to U1, its keys and the threshold: sites that were told otherwise cannot read each other."""
        return compute_context_digest(self.advertised.sum_id, self.adverts, self.threshold)


@final
@dataclass(frozen=True)
class MaskingState:
    """In step 3 and after it: the shares that the site holds of each site's secrets, name -> shares; these sites are U2."""

    shared: SharedState
    held_shares: Mapping[str, tuple[int, ...]]


@final
@dataclass(frozen=True)
class UnmaskingShares:
    """What a site hands out in step 4: its share of F_v(L) for each survivor v, and its shares of masks, which F(L) of its
    own opens."""

    tokens: Mapping[str, int]
    bundle: bytes


def compute_context_digest(sum_id: SumId, adverts: Collection[KeyAdvertisement], threshold: int) -> bytes:
    """See `Shared.context_digest`."""
    parts = [part for advert in adverts for part in (advert.name, advert.cipher, advert.mask)]
    return hashlib.sha256(crypto.encode_length_prefixed(sum_id.context_bytes, str(threshold), *parts)).digest()


def minimum_threshold(sites: int, owner_threshold: int | None = None) -> int:
    """The smallest threshold at which a site takes part, for so many sites: `owner_threshold` by the wish of its owner,
    but above the half, which an active server needs (theorem 6.5 with no colluding site); by default above two thirds,
    which is safe while fewer than a third of the sites collude with the server.

    >>> [minimum_threshold(n) for n in (2, 3, 4, 10)], minimum_threshold(3, owner_threshold=1)
    ([2, 3, 3, 7], 2)
    """
    return max(2, sites // 2 + 1, 2 * sites // 3 + 1 if owner_threshold is None else owner_threshold)


def sealed_box_bytes(sites: int) -> int:
    """Bytes of a sealed box of shares in a sum of so many sites."""
    return ELEMENT_BYTES * (_FIRST_LIST_NUMBER + sites) + crypto.TAG_BYTES


def advertise_keys(sum_id: SumId, name: str, sign_function: SignFunction) -> tuple[AdvertisedState, KeyAdvertisement]:
    """Step 1 (round 0, AdvertiseKeys): two new pairs of keys, of which the public halves are signed."""
    state = AdvertisedState(sum_id, name, crypto.generate_private_key(), crypto.generate_private_key())
    unsigned = KeyAdvertisement(name, crypto.public_key_of(state.cipher), crypto.public_key_of(state.mask), b"")
    return state, KeyAdvertisement(name, unsigned.cipher, unsigned.mask, sign_function(unsigned.signed_content(sum_id)))


def share_secrets(
    state: AdvertisedState,
    adverts: Sequence[KeyAdvertisement],
    threshold: int,
    peers: Mapping[str, PublicKey],
    owner_threshold: int | None = None,
) -> tuple[SharedState, dict[str, bytes]]:
    """Step 2 (round 1, ShareKeys): deals shares of the key s, of the self-mask b and of the agreement.

    Args:
        state: of step 1.
        adverts: of all sites of the sum, U1, as the server tells.
        threshold: t.
        peers: the keys under which sites are registered, as this site's owner knows them.
        owner_threshold: the smallest threshold that its owner wants; see `minimum_threshold`.

    Returns:
        the state, and a sealed box of shares for each other site.

    Raises:
        RefusalError: the list is not that of a sum in which this site could hide.
    """
    adverts = tuple(sorted(adverts, key=lambda advert: advert.name))
    names = [advert.name for advert in adverts]
    if len(set(names)) < len(names):
        raise RefusalError("a site is listed twice in this sum")
    minimum = minimum_threshold(len(names), owner_threshold)
    if not minimum <= threshold <= len(names):
        raise RefusalError(
            f"the threshold of this sum is {threshold} of {len(names)} sites; this site takes part from {minimum} "
            "(secure-threshold)"
        )
    for advert in adverts:
        if advert.name not in peers:
            raise RefusalError(f"the key of {advert.name!r} is not known here (peers)")
        if not crypto.is_signature_valid(peers[advert.name], advert.signature, advert.signed_content(state.sum_id)):
            raise RefusalError(f"the keys of {advert.name!r} for this sum are not signed by it")
    public_keys = [key for advert in adverts for key in (advert.cipher, advert.mask)]
    if len(set(public_keys)) < len(public_keys) or any(len(key) != 32 for key in public_keys):
        raise RefusalError("the keys of this sum are not all different")
    own_advert = next((advert for advert in adverts if advert.name == state.name), None)
    if own_advert is None or (own_advert.cipher, own_advert.mask) != (
        crypto.public_key_of(state.cipher),
        crypto.public_key_of(state.mask),
    ):
        raise RefusalError("the keys of this sum are not those that this site has advertised last")
    seed = secrets.token_bytes(32)
    agreement = tuple(secrets.randbelow(PRIME) for _ in range(1 + len(names)))
    shares_by_site = split_secrets([*map(_number_from_bytes, (state.mask, seed)), *agreement], len(names), threshold)
    shared_state = SharedState(
        state, adverts, threshold, seed, agreement, tuple(shares_by_site[names.index(state.name)])
    )
    boxes = {}
    for advert, shares in zip(adverts, shares_by_site, strict=True):
        if advert.name != state.name:
            key = _derive_box_key(shared_state, advert, state.name, advert.name)
            boxes[advert.name] = crypto.encrypt(
                key, b"".join(map(element_to_bytes, shares)), shared_state.context_digest
            )
    return shared_state, boxes


def decrypt_share_boxes(state: SharedState, boxes: Mapping[str, bytes]) -> MaskingState:
    """The first half of step 3 (round 2, MaskedInputCollection): opens the sealed shares. It needs nothing of what is added
    up, so that a site can refuse a sum, or use its keys up, before it looks at its data.

    Args:
        state: of step 2.
        boxes: sealed shares from each other site that has dealt some; with this one they are U2.

    Raises:
        RefusalError: fewer than t sites, or a box that was not made for this site in this sum.
    """
    name, advert_by_site = state.advertised.name, {advert.name: advert for advert in state.adverts}
    if unlisted := sorted(set(boxes) - set(advert_by_site) | (set(boxes) & {name})):
        raise RefusalError(f"{unlisted[0]!r} has no part in this sum")
    if len(boxes) + 1 < state.threshold:
        raise RefusalError(f"{len(boxes) + 1} sites have shared their secrets, fewer than {state.threshold}")
    held_shares = {name: state.own_shares}
    for sender, box in sorted(boxes.items()):
        try:
            shares = elements_from_bytes(
                crypto.decrypt(_derive_box_key(state, advert_by_site[sender], sender, name), box, state.context_digest)
            )
            if len(shares) != _FIRST_LIST_NUMBER + len(advert_by_site):
                raise ValueError("they are too few")
        except ValueError as error:
            raise RefusalError(f"the shares from {sender!r} cannot be read: {error}") from error
        held_shares[sender] = tuple(shares)
    return MaskingState(state, held_shares)


def mask_words(state: MaskingState, words: Words) -> Words:
    """The second half: y = x + PRG(b) + Σ_v ± PRG(s_uv) mod 2^64. The caller masks once with a state.

    Args:
        state: of `decrypt_share_boxes`.
        words: x.
    """
    shared, name = state.shared, state.shared.advertised.name
    advert_by_site = {advert.name: advert for advert in shared.adverts}
    masked = words + crypto.generate_key_stream(
        derive_self_mask_key(shared.seed, shared.context_digest, name), len(words)
    )
    for peer in sorted(state.held_shares.keys() - {name}):
        pair_secret = crypto.compute_shared_secret(shared.advertised.mask, advert_by_site[peer].mask)
        pad = crypto.generate_key_stream(
            derive_pairwise_mask_key(pair_secret, shared.context_digest, name, peer), len(words)
        )
        masked = masked + pad if name < peer else masked - pad
    return masked


def release_unmasking_shares(
    state: MaskingState, survivors: Sequence[str], earlier_survivors: Sequence[str] | None = None
) -> UnmaskingShares:
    """Step 4 (rounds 3 and 4, ConsistencyCheck and Unmasking): shares of the self-masks of survivors and of the keys of the
    others, sealed with F(L), which t sites with the same list open together; see `polyfed.deploy.secure_aggregation`. This site hands
    out once: the caller keeps nothing of `state` after, and the list for good.

    Args:
        state: of step 3.
        survivors: L (U3 of the paper), whose masked numbers the server has.
        earlier_survivors: the list for which the site has handed out in this run and round, should the round be
            played again.

    Raises:
        RefusalError: a list that is not a part of U2 with this site in it, of fewer than t sites, or another than
            `advertised`.
    """
    shared, name = state.shared, state.shared.advertised.name
    survivor_names = sorted(set(survivors))
    if len(survivor_names) < len(survivors) or not set(survivor_names) <= state.held_shares.keys():
        raise RefusalError("the list of survivors names sites that have no part in this sum, or one twice")
    if len(survivor_names) < shared.threshold:
        raise RefusalError(f"{len(survivor_names)} sites have survived, fewer than {shared.threshold}")
    if name not in survivor_names:
        raise RefusalError("this site is not among the survivors, though it has sent its numbers")
    if earlier_survivors is not None and sorted(earlier_survivors) != survivor_names:
        raise RefusalError(
            "the sum of this round was opened for other sites before, from which the numbers of one could be told; let "
            "the same sites take part, or start another run"
        )
    names = [advert.name for advert in shared.adverts]
    positions = [_FIRST_LIST_NUMBER + names.index(survivor) for survivor in survivor_names]
    tokens = {
        v: (state.held_shares[v][_AGREEMENT] + sum(state.held_shares[v][k] for k in positions)) % PRIME
        for v in survivor_names
    }
    agreement = (shared.agreement[0] + sum(shared.agreement[1 + names.index(v)] for v in survivor_names)) % PRIME
    shares = [state.held_shares[v][_SELF_MASK if v in survivor_names else _MASK] for v in sorted(state.held_shares)]
    key = derive_bundle_key(agreement, shared.context_digest, name, survivor_names)
    return UnmaskingShares(tokens, crypto.encrypt(key, b"".join(map(element_to_bytes, shares)), shared.context_digest))


def derive_pairwise_mask_key(pair_secret: bytes, digest: bytes, first_site: str, second_site: str) -> bytes:
    """The key of the mask that two sites have in common, from what their keys agree on."""
    return crypto.derive_key(pair_secret, digest, "pair", *sorted((first_site, second_site)))


def derive_self_mask_key(seed: bytes, digest: bytes, name: str) -> bytes:
    """The key of a site's self-mask."""
    return crypto.derive_key(seed, digest, "self", name)


def derive_bundle_key(agreement: int, digest: bytes, name: str, survivors: Sequence[str]) -> bytes:
    """The key of what a site hands out, from F(L)."""
    return crypto.derive_key(element_to_bytes(agreement), digest, "bundle", name, *survivors)


def _derive_box_key(state: SharedState, advert: KeyAdvertisement, source: str, target: str) -> bytes:
    return crypto.derive_key(
        crypto.compute_shared_secret(state.advertised.cipher, advert.cipher),
        state.context_digest,
        "box",
        source,
        target,
    )


def _number_from_bytes(secret: bytes) -> int:
    return int.from_bytes(secret, "big")
