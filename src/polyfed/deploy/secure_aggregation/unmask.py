"""What the server does in a secure sum: it passes on what sites say, adds masked numbers, and takes the masks off the sum
with the shares that t sites have handed out (Bonawitz et al. 2017, figure 4, the server's part)."""

from collections.abc import Collection, Mapping, Sequence

from polyfed.core.errors import RoundError
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation import crypto
from polyfed.deploy.secure_aggregation.crypto import Words
from polyfed.deploy.secure_aggregation.protocol import (
    KeyAdvertisement,
    SumId,
    UnmaskingShares,
    compute_context_digest,
    derive_bundle_key,
    derive_pairwise_mask_key,
    derive_self_mask_key,
)
from polyfed.deploy.secure_aggregation.shamir import ELEMENT_BYTES, PRIME, elements_from_bytes, recover_secret


def unmask_sum(
    sum_id: SumId,
    adverts: Sequence[KeyAdvertisement],
    threshold: int,
    sharing_sites: Collection[str],
    survivors: Collection[str],
    total: Words,
    unmasking_shares: Mapping[str, UnmaskingShares],
) -> Words:
    """The sum over the survivors of what they masked.

    Args:
        sum_id, adverts, threshold: the sum, U1 and t.
        sharing_sites: U2, the sites whose boxes were passed on.
        survivors: L, the sites whose masked numbers are in `total`.
        total: their sum mod 2^64.
        unmasking_shares: what sites have handed out for L.

    Raises:
        RoundError: fewer than t have, or what they handed out does not fit together.
    """
    adverts = sorted(adverts, key=lambda advert: advert.name)
    points = {advert.name: k for k, advert in enumerate(adverts, start=1)}
    digest, survivor_names, sharing_names = (
        compute_context_digest(sum_id, adverts, threshold),
        sorted(survivors),
        sorted(sharing_sites),
    )
    if len(unmasking_shares) < threshold:
        raise RoundError(
            f"{len(unmasking_shares)} sites have handed out shares for the secure sum, which needs {threshold}"
        )
    shares: dict[str, dict[int, int]] = {v: {} for v in sharing_names}
    for w in sorted(unmasking_shares):
        tokens = {
            points[v]: unmasking_shares[v].tokens[w]
            for v in sorted(unmasking_shares)[:threshold]
            if w in unmasking_shares[v].tokens
        }
        key = derive_bundle_key(recover_secret(tokens) % PRIME, digest, w, survivor_names)
        if len(unmasking_shares[w].bundle) != ELEMENT_BYTES * len(sharing_names) + crypto.TAG_BYTES:
            continue
        try:
            bundle = elements_from_bytes(crypto.decrypt(key, unmasking_shares[w].bundle, digest))
        except ValueError:
            continue  # of a site that lies, or was told something else
        for v, value in zip(sharing_names, bundle, strict=True):
            shares[v][points[w]] = value
    if lacking := sorted(v for v in sharing_names if len(shares[v]) < threshold):
        raise RoundError(
            f"the masks of {lacking[0]!r} cannot be taken off the secure sum: the sites' shares do not fit together"
        )
    secrets = {v: recover_secret(dict(list(site_shares.items())[:threshold])) for v, site_shares in shares.items()}
    if any(secret >= 2**256 for secret in secrets.values()):
        raise RoundError("the masks cannot be taken off the secure sum: a site has handed out wrong shares")
    by_name = {advert.name: advert for advert in adverts}
    total = total.copy()
    for v in survivor_names:
        total -= crypto.generate_key_stream(derive_self_mask_key(secrets[v].to_bytes(32, "big"), digest, v), len(total))
    for dropout in sorted(set(sharing_names) - set(survivor_names)):
        private = secrets[dropout].to_bytes(32, "big")
        if crypto.public_key_of(private) != by_name[dropout].mask:
            raise RoundError(f"the key of {dropout!r} that sites have handed out is not the one it has advertised")
        for v in survivor_names:
            try:
                pad = crypto.generate_key_stream(
                    derive_pairwise_mask_key(
                        crypto.compute_shared_secret(private, by_name[v].mask), digest, dropout, v
                    ),
                    len(total),
                )
            except RefusalError as error:
                raise RoundError(str(error)) from error
            total = total - pad if v < dropout else total + pad
    return total
