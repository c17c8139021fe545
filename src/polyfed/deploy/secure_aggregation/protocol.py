"""Implements the four steps by which a site takes part in a secure sum (Bonawitz et al. 2017, figure 4).

A site advertises keys, shares its secrets, masks its numbers, and releases those shares of the others that unmask the sum
over the survivors. Each step is a function of the state that the previous one returned. A site refuses any request that
would reveal more than that sum.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation import crypto
from polyfed.deploy.secure_aggregation.crypto import PublicKey, SignFunction, Words
from polyfed.deploy.secure_aggregation.shamir import (
    ELEMENT_BYTES,
    PRIME,
    field_element_to_bytes,
    field_elements_from_bytes,
    split_secrets_by_holder,
)

# Positions among the shares that a site deals: s, b, a, and then d_v in the order of sites.
_MASK, _SELF_MASK, _AGREEMENT, _FIRST_LIST_NUMBER = 0, 1, 2, 3
_MAX_ROUNDS = 10**9


@final
@dataclass(frozen=True)
class SumId:
    """Identifies a secure sum by run and round, so that signatures and keys of one sum are not valid for another.

    Raises:
        RefusalError: the round is not a whole number within limits (it is part of a file name).
    """

    run: str
    round: int

    def __post_init__(self) -> None:
        if type(self.round) is not int or not 0 <= self.round < _MAX_ROUNDS:
            raise RefusalError("the message names no round")

    @property
    def id_bytes(self) -> bytes:
        """Returns the run and round of the secure sum as bytes, to be signed and to derive keys from."""
        return crypto.encode_length_prefixed("sum", self.run, str(self.round))


@final
@dataclass(frozen=True)
class KeyAdvertisement:
    """Holds a site's two public keys for one secure sum, signed with the site's registered private key.

    Args:
        name: the site's name.
        cipher_public: public key c, with which shares are encrypted; 32 bytes.
        mask_public: public key s, from which pairwise masks are derived; 32 bytes.
        signature: signature of `signed_content`.
    """

    name: str
    cipher_public: bytes
    mask_public: bytes
    signature: bytes

    def signed_content(self, sum_id: SumId) -> bytes:
        """Returns the bytes that the site signs: the secure sum's run and round, the site's name, and its public keys."""
        return crypto.encode_length_prefixed(sum_id.id_bytes, "keys", self.name, self.cipher_public, self.mask_public)


@final
@dataclass(frozen=True)
class KeysAdvertisedState:
    """Holds the private keys of a site that has advertised its public keys (after step 1)."""

    sum_id: SumId
    name: str
    cipher_private: bytes
    mask_private: bytes


@final
@dataclass(frozen=True)
class SecretsSharedState:
    """Holds the secrets of a site that has sent secret shares to all other sites (after step 2).

    Args:
        advertised: state after step 1.
        adverts: key advertisements of all sites in the sum, U1.
        threshold: t.
        seed: seed b of the self-mask; 32 bytes.
        agreement: the numbers a and d_v of this site.
        own_shares: the shares that the site holds of its own secrets.
    """

    advertised: KeysAdvertisedState
    adverts: tuple[KeyAdvertisement, ...]
    threshold: int
    seed: bytes
    agreement: tuple[int, ...]
    own_shares: tuple[int, ...]

    @property
    def participants_digest(self) -> bytes:
        """Hashes sum, sites with public keys, and threshold: who was sent others cannot decrypt shares."""
        return compute_participants_digest(self.advertised.sum_id, self.adverts, self.threshold)


@final
@dataclass(frozen=True)
class MaskingState:
    """Holds a site's secrets once it has the others' shares and can mask (steps 3 and 4).

    Args:
        shared: state after step 2.
        held_shares: shares that the site holds of each site's secrets, by name; these sites are U2.
    """

    shared: SecretsSharedState
    held_shares: Mapping[str, tuple[int, ...]]


@final
@dataclass(frozen=True)
class UnmaskingShares:
    """Holds the shares that a site sends so that the server can unmask the sum (step 4).

    Args:
        tokens: the site's share of F_v(L) for each survivor v.
        bundle: its shares of masks, encrypted with its own F(L).
    """

    tokens: Mapping[str, int]
    bundle: bytes


def compute_participants_digest(sum_id: SumId, sorted_adverts: Sequence[KeyAdvertisement], threshold: int) -> bytes:
    """Hashes what all sites must agree on: run, round, names, public keys and threshold."""
    parts = [part for advert in sorted_adverts for part in (advert.name, advert.cipher_public, advert.mask_public)]
    return hashlib.sha256(crypto.encode_length_prefixed(sum_id.id_bytes, str(threshold), *parts)).digest()


def minimum_accepted_threshold(num_sites: int, owner_threshold: int | None = None) -> int:
    """Returns the smallest threshold (sites needed to unmask) that a site accepts.

    It is above half of them, which security against an active server needs (theorem 6.5 with no colluding site). By default
    it is above two thirds, which is secure while fewer than a third of the sites collude with the server.

    Args:
        num_sites: number of sites in the sum.
        owner_threshold: the owner's own minimum, in place of the default.

    >>> [minimum_accepted_threshold(n) for n in (2, 3, 4, 10)], minimum_accepted_threshold(3, owner_threshold=1)
    ([2, 3, 3, 7], 2)
    """
    return max(2, num_sites // 2 + 1, 2 * num_sites // 3 + 1 if owner_threshold is None else owner_threshold)


def bytes_of_shares_from_one_site_to_another(num_sites: int) -> int:
    """Returns the bytes of encrypted shares from one site to another in a sum of `num_sites`."""
    return ELEMENT_BYTES * (_FIRST_LIST_NUMBER + num_sites) + crypto.TAG_BYTES


def create_signed_keys(
    sum_id: SumId, name: str, sign_function: SignFunction
) -> tuple[KeysAdvertisedState, KeyAdvertisement]:
    """Creates a site's two key pairs and signs the public keys (step 1, AdvertiseKeys)."""
    state = KeysAdvertisedState(sum_id, name, crypto.generate_private_key(), crypto.generate_private_key())
    unsigned = KeyAdvertisement(
        name, crypto.public_key_of(state.cipher_private), crypto.public_key_of(state.mask_private), b""
    )
    signature = sign_function(unsigned.signed_content(sum_id))
    return state, KeyAdvertisement(name, unsigned.cipher_public, unsigned.mask_public, signature)


def check_and_share_secrets(
    state: KeysAdvertisedState,
    adverts: Sequence[KeyAdvertisement],
    threshold: int,
    registered_keys: Mapping[str, PublicKey],
    owner_threshold: int | None = None,
) -> tuple[SecretsSharedState, dict[str, bytes]]:
    """Verifies the others' keys, and splits this site's secrets into encrypted shares for them.

    It is step 2: ShareKeys, round 1 of the paper.

    The secrets are the key s of the pairwise masks, the seed b of the self-mask, and the numbers of the agreement on
    survivors.

    Args:
        state: state after step 1.
        adverts: key advertisements of all sites in the sum, U1, as the server sends them.
        threshold: t.
        registered_keys: the sites' registered public keys, as this site's owner has them.
        owner_threshold: the smallest threshold that the owner accepts; see `minimum_accepted_threshold`.

    Returns:
        The next state, and encrypted shares for each other site.

    Raises:
        RefusalError: the sum would not protect this site: keys are not signed, or the threshold is too low.
    """
    adverts = tuple(sorted(adverts, key=lambda advert: advert.name))
    names = [advert.name for advert in adverts]
    if len(set(names)) < len(names):
        raise RefusalError("a site is listed twice in this sum")
    minimum = minimum_accepted_threshold(len(names), owner_threshold)
    if not minimum <= threshold <= len(names):
        raise RefusalError(
            f"the threshold of this sum is {threshold} of {len(names)} sites; this site takes part from {minimum} "
            "(secure-threshold)"
        )
    for advert in adverts:
        if advert.name not in registered_keys:
            raise RefusalError(f"the key of {advert.name!r} is not known here (peers)")
        if not crypto.is_signature_valid(
            registered_keys[advert.name], advert.signature, advert.signed_content(state.sum_id)
        ):
            raise RefusalError(f"the keys of {advert.name!r} for this sum are not signed by it")
    public_keys = [key for advert in adverts for key in (advert.cipher_public, advert.mask_public)]
    if len(set(public_keys)) < len(public_keys) or any(len(key) != 32 for key in public_keys):
        raise RefusalError("the keys of this sum are not all different")
    own_advert = next((advert for advert in adverts if advert.name == state.name), None)
    if own_advert is None or (own_advert.cipher_public, own_advert.mask_public) != (
        crypto.public_key_of(state.cipher_private),
        crypto.public_key_of(state.mask_private),
    ):
        raise RefusalError("the keys of this sum are not those that this site has advertised last")
    seed = secrets.token_bytes(32)
    agreement = tuple(secrets.randbelow(PRIME) for _ in range(1 + len(names)))
    shares_by_site = split_secrets_by_holder(
        [*map(_number_from_bytes, (state.mask_private, seed)), *agreement], len(names), threshold
    )
    shared_state = SecretsSharedState(
        state, adverts, threshold, seed, agreement, tuple(shares_by_site[names.index(state.name)])
    )
    encrypted_shares = {}
    for advert, shares in zip(adverts, shares_by_site, strict=True):
        if advert.name != state.name:
            key = _derive_share_key(shared_state, advert, state.name, advert.name)
            encrypted_shares[advert.name] = crypto.encrypt(
                key, b"".join(map(field_element_to_bytes, shares)), shared_state.participants_digest
            )
    return shared_state, encrypted_shares


def decrypt_received_shares(state: SecretsSharedState, encrypted_shares: Mapping[str, bytes]) -> MaskingState:
    """Decrypts the other sites' shares (first half of step 3: MaskedInputCollection, round 2).

    It does not need the numbers to be summed, so that a site can refuse a sum, or use up its keys, before it looks at its
    data.

    Args:
        state: state after step 2.
        encrypted_shares: encrypted shares from each other site that has sent some; with this site they are U2.

    Raises:
        RefusalError: there are fewer than t sites, or shares were not encrypted for this site in this sum.
    """
    name, advert_by_site = state.advertised.name, {advert.name: advert for advert in state.adverts}
    if unlisted := sorted(set(encrypted_shares) - set(advert_by_site) | (set(encrypted_shares) & {name})):
        raise RefusalError(f"{unlisted[0]!r} has no part in this sum")
    if len(encrypted_shares) + 1 < state.threshold:
        raise RefusalError(f"{len(encrypted_shares) + 1} sites have shared their secrets, fewer than {state.threshold}")
    held_shares = {name: state.own_shares}
    for sender, share in sorted(encrypted_shares.items()):
        try:
            shares = field_elements_from_bytes(
                crypto.decrypt(
                    _derive_share_key(state, advert_by_site[sender], sender, name), share, state.participants_digest
                )
            )
            if len(shares) != _FIRST_LIST_NUMBER + len(advert_by_site):
                raise ValueError("they are too few")
        except ValueError as error:
            raise RefusalError(f"the shares from {sender!r} cannot be read: {error}") from error
        held_shares[sender] = tuple(shares)
    return MaskingState(state, held_shares)


def mask_words(state: MaskingState, words: Words) -> Words:
    """Masks a site's numbers; masks of two sites cancel out in the sum (second half of step 3).

    The masked numbers are y = x + PRG(b) + Σ_v ± PRG(s_uv) mod 2^64.

    The caller may mask only once with a state.

    Args:
        state: state from `decrypt_received_shares`.
        words: x, shape (numbers,).
    """
    shared, name = state.shared, state.shared.advertised.name
    advert_by_site = {advert.name: advert for advert in shared.adverts}
    masked = words + crypto.generate_key_stream(
        derive_self_mask_key(shared.seed, shared.participants_digest, name), len(words)
    )
    for peer in sorted(state.held_shares.keys() - {name}):
        pair_secret = crypto.compute_shared_secret(shared.advertised.mask_private, advert_by_site[peer].mask_public)
        pad = crypto.generate_key_stream(
            derive_pairwise_mask_key(pair_secret, shared.participants_digest, name, peer), len(words)
        )
        masked = masked + pad if name < peer else masked - pad
    return masked


def release_unmasking_shares(
    state: MaskingState, survivors: Sequence[str], earlier_survivors: Sequence[str] | None = None
) -> UnmaskingShares:
    """Returns the shares that unmask the sum over the sites that replied.

    It is step 4: ConsistencyCheck and Unmasking, rounds 3 and 4 of the paper.

    These are shares of the survivors' self-masks and of the other sites' keys, encrypted with F(L), which t sites with the
    same list recover together (see `polyfed.deploy.secure_aggregation`). A site releases them once: the caller then deletes
    `state` and keeps the list for good.

    Args:
        state: state after step 3.
        survivors: L (U3 of the paper), the sites whose masked numbers the server has.
        earlier_survivors: the list for which the site has released shares in this run and round before, if it is a repeated
            round.

    Raises:
        RefusalError: the list is not a subset of U2 with this site and at least t sites, or differs from
            `earlier_survivors`.
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
            "the sum of this round was opened for other sites before, and both sums could reveal the numbers of one site; "
            "let the same sites take part, or start another run"
        )
    names = [advert.name for advert in shared.adverts]
    positions = [_FIRST_LIST_NUMBER + names.index(survivor) for survivor in survivor_names]
    tokens = {
        v: (state.held_shares[v][_AGREEMENT] + sum(state.held_shares[v][k] for k in positions)) % PRIME
        for v in survivor_names
    }
    agreement = (shared.agreement[0] + sum(shared.agreement[1 + names.index(v)] for v in survivor_names)) % PRIME
    shares = [state.held_shares[v][_SELF_MASK if v in survivor_names else _MASK] for v in sorted(state.held_shares)]
    key = derive_released_shares_key(agreement, shared.participants_digest, name, survivor_names)
    return UnmaskingShares(
        tokens, crypto.encrypt(key, b"".join(map(field_element_to_bytes, shares)), shared.participants_digest)
    )


def derive_pairwise_mask_key(pair_secret: bytes, digest: bytes, first_site: str, second_site: str) -> bytes:
    """Derives, from the secret that two sites share, the key that generates the mask between them."""
    return crypto.derive_key(pair_secret, digest, "pair", *sorted((first_site, second_site)))


def derive_self_mask_key(seed: bytes, digest: bytes, name: str) -> bytes:
    """Derives from a site's seed the key of its individual mask, which no other site shares."""
    return crypto.derive_key(seed, digest, "self", name)


def derive_released_shares_key(agreement_secret: int, digest: bytes, name: str, survivors: Sequence[str]) -> bytes:
    """Derives the key of shares released for unmasking.

    Only the server can compute it, once enough sites have confirmed the same list of sites that replied.

    It is derived from F(L) (see `polyfed.deploy.secure_aggregation`).
    """
    return crypto.derive_key(field_element_to_bytes(agreement_secret), digest, "bundle", name, *survivors)


def _derive_share_key(state: SecretsSharedState, advert: KeyAdvertisement, source: str, target: str) -> bytes:
    return crypto.derive_key(
        crypto.compute_shared_secret(state.advertised.cipher_private, advert.cipher_public),
        state.participants_digest,
        "box",
        source,
        target,
    )


def _number_from_bytes(secret: bytes) -> int:
    return int.from_bytes(secret, "big")
