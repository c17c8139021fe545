"""Removes the masks from a secure sum at the server, with the secret shares that enough sites have released.

This is the server's part of Bonawitz et al. 2017, figure 4.
"""

from collections.abc import Collection, Mapping, Sequence

from polyfed.core.errors import RoundError
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation import crypto
from polyfed.deploy.secure_aggregation.crypto import Words
from polyfed.deploy.secure_aggregation.protocol import (
    KeyAdvertisement,
    SumId,
    UnmaskingShares,
    compute_participants_digest,
    derive_pairwise_mask_key,
    derive_released_shares_key,
    derive_self_mask_key,
)
from polyfed.deploy.secure_aggregation.shamir import ELEMENT_BYTES, PRIME, field_elements_from_bytes, recover_secret


def unmask_sum(
    sum_id: SumId,
    adverts: Sequence[KeyAdvertisement],
    threshold: int,
    sharing_sites: Collection[str],
    survivors: Collection[str],
    masked_total: Words,
    unmasking_shares: Mapping[str, UnmaskingShares],
) -> Words:
    """Removes the masks from the sum of the sites' masked numbers, and returns the sum.

    Args:
        sum_id: the sum.
        adverts: the key advertisements of all sites in the sum, U1.
        threshold: t.
        sharing_sites: U2, the sites whose encrypted shares were passed on.
        survivors: L, the sites whose masked numbers are in `masked_total`.
        masked_total: sum of the masked numbers mod 2^64, shape (numbers,).
        unmasking_shares: shares that sites have released for L.

    Raises:
        RoundError: fewer than t sites have released shares, or the shares are inconsistent.
    """
    adverts = sorted(adverts, key=lambda advert: advert.name)
    digest = compute_participants_digest(sum_id, adverts, threshold)
    by_name = {advert.name: advert for advert in adverts}
    survivor_names, sharing_names = sorted(survivors), sorted(sharing_sites)
    names = [advert.name for advert in adverts]
    secrets = _recover_secrets(names, digest, threshold, survivor_names, sharing_names, unmasking_shares)
    masked_total = masked_total.copy()
    for v in survivor_names:
        masked_total -= crypto.generate_key_stream(
            derive_self_mask_key(secrets[v].to_bytes(32, "big"), digest, v), len(masked_total)
        )
    for dropout in sorted(set(sharing_names) - set(survivor_names)):
        private = secrets[dropout].to_bytes(32, "big")
        if crypto.public_key_of(private) != by_name[dropout].mask_public:
            raise RoundError(
                f"the key of {dropout!r} that the sites' shares give is not the one that it has advertised"
            )
        for v in survivor_names:
            try:
                pad = crypto.generate_key_stream(
                    derive_pairwise_mask_key(
                        crypto.compute_shared_secret(private, by_name[v].mask_public), digest, dropout, v
                    ),
                    len(masked_total),
                )
            except RefusalError as error:
                raise RoundError(str(error)) from error
            masked_total = masked_total - pad if v < dropout else masked_total + pad
    return masked_total


def _recover_secrets(
    names: Sequence[str],
    digest: bytes,
    threshold: int,
    survivors: Sequence[str],
    sharing_sites: Sequence[str],
    unmasking_shares: Mapping[str, UnmaskingShares],
) -> dict[str, int]:
    """Returns the secret of each site in U2 that its shares give; `names` are those of all sites, all sorted."""
    points = {name: k for k, name in enumerate(names, start=1)}
    if len(unmasking_shares) < threshold:
        raise RoundError(
            f"{len(unmasking_shares)} sites have released shares for the secure sum, which needs {threshold}"
        )
    shares: dict[str, dict[int, int]] = {v: {} for v in sharing_sites}
    for w in sorted(unmasking_shares):
        tokens = {
            points[v]: unmasking_shares[v].tokens[w]
            for v in sorted(unmasking_shares)[:threshold]
            if w in unmasking_shares[v].tokens
        }
        key = derive_released_shares_key(recover_secret(tokens) % PRIME, digest, w, survivors)
        if len(unmasking_shares[w].bundle) != ELEMENT_BYTES * len(sharing_sites) + crypto.TAG_BYTES:
            continue
        try:
            bundle = field_elements_from_bytes(crypto.decrypt(key, unmasking_shares[w].bundle, digest))
        except ValueError:
            continue  # from a site that lies, or that got another list
        for v, value in zip(sharing_sites, bundle, strict=True):
            shares[v][points[w]] = value
    if lacking := sorted(v for v in sharing_sites if len(shares[v]) < threshold):
        raise RoundError(
            f"the masks of {lacking[0]!r} cannot be removed from the secure sum: the sites' shares are inconsistent"
        )
    secrets = {v: recover_secret(dict(list(site_shares.items())[:threshold])) for v, site_shares in shares.items()}
    if any(secret >= 2**256 for secret in secrets.values()):
        raise RoundError("the masks cannot be removed from the secure sum: a site has released wrong shares")
    return secrets
