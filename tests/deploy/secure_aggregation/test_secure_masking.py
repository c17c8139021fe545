"""Secure sums: exact for whoever drops out, nothing of one site alone, and sites that refuse a server that lies."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from polyfed.core.errors import RoundError
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation import crypto, shamir
from polyfed.deploy.secure_aggregation.crypto import make_signing_function
from polyfed.deploy.secure_aggregation.protocol import (
    SumId,
    check_and_share_secrets,
    create_signed_keys,
    decrypt_received_shares,
    derive_released_shares_key,
    minimum_accepted_threshold,
    release_unmasking_shares,
)

from ..secure_sums import WHICH, Server, names, peers, play, registered


def uniform(data):
    """Whether bytes look uniform: Pearson's chi-square with 255 degrees of freedom, at a false alarm in a million."""
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(1e-6, 255)


# -- the sum ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(5))
def test_the_sum_is_exact_whoever_drops_out(first):
    """Each of three sites is gone after so many of the four steps; two are enough."""
    for others in itertools.product(range(5), repeat=2):
        steps = (first, *others)
        last = dict(zip(names(3), steps, strict=True))
        if sum(step >= 4 for step in steps) < 2:
            with pytest.raises((RefusalError, RoundError)):
                play(3, 2, last)[0].sum()
            continue
        server, words = play(3, 2, last)
        assert np.array_equal(server.sum(), sum(words[name] for name, step in last.items() if step >= 3)), steps


@pytest.mark.parametrize("seed", range(6))
def test_the_sum_is_exact_for_more_sites_in_any_order(seed):
    generator = np.random.default_rng(seed)
    last = dict(zip(names(6), generator.permutation([4, 4, 4, 4, *generator.integers(0, 5, 2)]).tolist(), strict=True))
    server, words = play(6, 4, last)
    expected = sum(words[name] for name, step in last.items() if step >= 3)
    assert np.array_equal(server.sum(), expected)


def test_shares_put_together_give_the_value_and_any_fewer_tell_nothing():
    values = [0, 5, shamir.PRIME - 1]
    dealt = shamir.split_secrets_by_holder(values, num_holders=5, threshold=3)
    for chosen in itertools.combinations(range(5), 3):
        found = [shamir.recover_secret({k + 1: dealt[k][v] for k in chosen}) for v in range(3)]
        assert found == values
    # Two shares fit every value: through them and any value at 0 goes one polynomial.
    weights = shamir.lagrange_weights_at_zero((1, 2, 3))
    for value in (0, 1, 2**200):
        third = (value - weights[1] * dealt[0][1] - weights[2] * dealt[1][1]) * pow(weights[3], -1, shamir.PRIME)
        assert shamir.recover_secret({1: dealt[0][1], 2: dealt[1][1], 3: third % shamir.PRIME}) == value
    assert shamir.PRIME.bit_length() == 257
    assert pow(3, shamir.PRIME - 1, shamir.PRIME) == 1


@pytest.mark.parametrize(("holders", "threshold", "value"), [(2, 3, 1), (2, 0, 1), (3, 2, shamir.PRIME), (3, 2, -1)])
def test_what_cannot_be_shared_is_refused(holders, threshold, value):
    with pytest.raises(ValueError, match=r"threshold|field"):
        shamir.split_secrets_by_holder([value], holders, threshold)


# -- what the server sees -----------------------------------------------------------------------------------------------


def test_what_a_site_sends_looks_uniform():
    """Its input is all zeros. Boxes and bundles are small, so those of many sums are taken together."""
    server = Server(names(3), 2).advertise(names(3)).share(names(3))
    server.mask({name: np.zeros(20_000, dtype=np.uint64) for name in names(3)})
    for masked in server.masked.values():
        assert uniform(masked.tobytes())
    assert not uniform(np.zeros(20_000, dtype=np.uint64).tobytes())
    assert not np.array_equal(server.masked["site-0"] + server.masked["site-1"], np.zeros(20_000, dtype=np.uint64))


def test_the_masked_numbers_of_one_site_fit_every_input():
    """To every input belongs a mask that makes it so, and the mask is a stream under keys that the transcript does not hold
    without shares: no part of it takes the mask off."""
    server, words = play(4, 3)
    y, x = server.masked["site-0"], words["site-0"]
    seen = [advert.mask_public for advert in server.adverts] + [advert.cipher_public for advert in server.adverts]
    seen += [box[:32] for boxes in server.encrypted_shares.values() for box in boxes.values()]
    digest = server.states["site-0"].shared.participants_digest
    for key in seen:
        pads = [
            crypto.generate_key_stream(crypto.derive_key(key, digest, *context), 5)
            for context in (("self", "site-0"), ("pair", "a"))
        ]
        assert all(not np.array_equal(y - pad, x) for pad in pads)
    assert np.array_equal(server.sum(), sum(words.values()))


def test_fewer_than_the_threshold_open_nothing():
    server, _ = play(4, 3, {"site-0": 3, "site-1": 3})  # two hand out shares
    with pytest.raises(RoundError, match="2 sites have released shares for the secure sum, which needs 3"):
        server.sum()
    # A server that says that two were enough meets sealed bundles.
    server.threshold = 2
    with pytest.raises(RoundError, match="are inconsistent"):
        server.sum()


def _rows(n, threshold, told, colluding):
    """What the server knows of one dealer's polynomials a, d_1, ..., d_n, as rows over their coefficients."""
    powers = {x: [float(x) ** k for k in range(threshold)] for x in range(n + 1)}
    rows = []
    for x in range(1, n + 1):
        if x in colluding:
            for which in range(n + 1):
                row = np.zeros((n + 1, threshold))
                row[which] = powers[x]
                rows.append(row.ravel())
        elif told[x] is not None:
            rows.append(np.outer([1.0, *(float(v in told[x]) for v in range(1, n + 1))], powers[x]).ravel())
    return rows, powers[0]


@pytest.mark.parametrize(("n", "threshold", "colluding"), [(3, 2, ()), (4, 3, ()), (4, 3, (4,))])
def test_a_list_is_opened_only_by_as_many_sites_as_the_threshold(n, threshold, colluding):
    """The claim of `polyfed.deploy.secure_aggregation`, by the ranks of all that a server can learn, whatever it sends."""
    lists = [c for size in range(threshold, n + 1) for c in itertools.combinations(range(1, n + 1), size)]
    honest = [x for x in range(1, n + 1) if x not in colluding]
    for told in itertools.product(*([None, *(c for c in lists if x in c)] for x in honest)):
        told = dict(zip(honest, told, strict=True))
        rows, at_zero = _rows(n, threshold, told, colluding)
        if not rows:
            continue
        known = np.array(rows)
        rank = np.linalg.matrix_rank(known)
        for wanted in lists:
            key = np.outer([1.0, *(float(v in wanted) for v in range(1, n + 1))], at_zero).ravel()
            opened = np.linalg.matrix_rank(np.vstack([known, key])) == rank
            agree = sum(lie == wanted for lie in told.values()) + len(colluding)
            assert opened == (agree >= threshold), (told, wanted)


def test_a_server_that_tells_sites_different_lists_opens_none():
    """Of four sites, three are told that all live, and one is told that the first is gone, for a share of its key: the sum
    of the four opens, but nothing that the fourth has handed out."""
    server, words = play(4, 3, {"site-3": 3})
    server.handed["site-3"] = release_unmasking_shares(server.states["site-3"], ["site-1", "site-2", "site-3"])
    assert np.array_equal(server.sum(), sum(words.values()))
    server.handed = {}
    server.hand_out(["site-0", "site-1"], sorted(names(4)))
    server.hand_out(["site-2", "site-3"], ["site-1", "site-2", "site-3"])
    for survivors in (names(4), names(4)[1:]):
        with pytest.raises(RoundError, match="are inconsistent"):
            server.sum(survivors)


# -- what sites refuse --------------------------------------------------------------------------------------------------


def test_a_site_refuses_a_threshold_that_does_not_protect_it():
    server = Server(names(4), 3).advertise(names(4))
    state = server.states["site-0"]
    for threshold, demanded in ((2, None), (2, 2), (3, 4), (5, None)):
        with pytest.raises(RefusalError, match=f"the threshold of this sum is {threshold} of 4 sites"):
            check_and_share_secrets(state, server.adverts, threshold, peers(names(4)), demanded)
    with pytest.raises(RefusalError, match="the threshold of this sum is 1 of 1"):
        check_and_share_secrets(state, server.adverts[:1], 1, peers(names(4)))
    assert [minimum_accepted_threshold(n, 2) for n in (2, 3, 4, 5)] == [2, 2, 3, 3]


def lies_of_keys():
    foreign = create_signed_keys(WHICH, "site-1", make_signing_function(registered("site-9")))[1]
    other_run = create_signed_keys(SumId("run-b", 1), "site-1", make_signing_function(registered("site-1")))[1]
    former = create_signed_keys(SumId("run-a", 0), "site-1", make_signing_function(registered("site-1")))[1]
    stranger = create_signed_keys(WHICH, "site-7", make_signing_function(registered("site-7")))[1]
    again = create_signed_keys(WHICH, "site-0", make_signing_function(registered("site-0")))[1]

    def put(advert, place=1):
        return lambda adverts: [*adverts[:place], advert, *adverts[place + 1 :]]

    return {
        "signed by another": (put(foreign), "not signed by it"),
        "of another run": (put(other_run), "not signed by it"),
        "of a former round": (put(former), "not signed by it"),
        "changed": (lambda a: put(replace(a[1], mask_public=a[2].mask_public))(a), "not signed by it"),
        "unsigned": (lambda a: put(replace(a[1], signature=b""))(a), "not signed by it"),
        "a stranger": (put(stranger), "the key of 'site-7' is not known here"),
        "twice": (lambda a: [*a, a[1]], "a site is listed twice"),
        "mine of another time": (put(again, 0), "not those that this site has advertised last"),
        "without me": (lambda a: a[1:], "not those that this site has advertised last"),
    }


@pytest.mark.parametrize("lie", lies_of_keys())
def test_a_site_refuses_keys_that_are_not_of_the_sites_of_this_round(lie):
    change, sentence = lies_of_keys()[lie]
    server = Server(names(4), 3).advertise(names(4))
    with pytest.raises(RefusalError, match=sentence):
        check_and_share_secrets(server.states["site-0"], change(server.adverts), 3, peers(names(4)))


def test_a_site_refuses_one_key_for_two_sites_and_keys_that_agree_with_everybody():
    server = Server(names(3), 2).advertise(names(3))
    first = server.adverts[1]
    twin = replace(
        server.adverts[2],
        cipher_public=first.cipher_public,
        mask_public=first.mask_public,
    )
    twin = replace(twin, signature=make_signing_function(registered("site-2"))(twin.signed_content(WHICH)))
    with pytest.raises(RefusalError, match="not all different"):
        check_and_share_secrets(server.states["site-0"], [*server.adverts[:2], twin], 2, peers(names(3)), 2)
    zero = replace(server.adverts[2], cipher_public=bytes(32))
    zero = replace(zero, signature=make_signing_function(registered("site-2"))(zero.signed_content(WHICH)))
    with pytest.raises(RefusalError, match="is not valid"):
        check_and_share_secrets(server.states["site-0"], [*server.adverts[:2], zero], 2, peers(names(3)), 2)


def test_a_site_refuses_boxes_that_are_not_for_it_in_this_sum():
    server = Server(names(4), 3).advertise(names(4)).share(names(4))
    state, boxes = server.states["site-0"], server.boxes_for("site-0")
    other = Server(names(4), 3, SumId("run-a", 2)).advertise(names(4)).share(names(4))
    lies = {
        "cannot be read": [
            {**boxes, "site-1": server.encrypted_shares["site-1"]["site-2"]},  # for another
            {**boxes, "site-1": boxes["site-2"]},  # of another
            {**boxes, "site-1": other.encrypted_shares["site-1"]["site-0"]},  # of another round
            {**boxes, "site-1": boxes["site-1"][:-1] + bytes([boxes["site-1"][-1] ^ 1])},
            {**boxes, "site-1": b""},
        ],
        "2 sites have shared their secrets, fewer than 3": [{"site-1": boxes["site-1"]}],
        "has no part in this sum": [{**boxes, "site-9": b""}, {**boxes, "site-0": b""}],
    }
    for sentence, given in lies.items():
        for lie in given:
            with pytest.raises(RefusalError, match=sentence):
                decrypt_received_shares(state, lie)


def test_sites_that_were_told_different_sites_cannot_read_each_other():
    server = Server(names(4), 3).advertise(names(4))
    states = {}
    states["site-0"], _ = check_and_share_secrets(server.states["site-0"], server.adverts, 3, peers(names(4)))
    _, boxes = check_and_share_secrets(server.states["site-1"], server.adverts[:3], 3, peers(names(4)), 2)
    _, more = check_and_share_secrets(server.states["site-2"], server.adverts, 4, peers(names(4)))
    for box in (boxes["site-0"], more["site-0"]):
        with pytest.raises(RefusalError, match="cannot be read"):
            decrypt_received_shares(states["site-0"], {"site-1": box, "site-2": box, "site-3": box})


def test_a_site_refuses_lists_that_would_tell_more_than_the_sum():
    server, _ = play(5, 3, {"site-4": 1})  # the last has advertised only
    state = server.states["site-0"]
    for survivors, sentence in (
        (["site-0", "site-1"], "2 sites have survived, fewer than 3"),
        (["site-1", "site-2", "site-3"], "this site is not among the survivors"),
        (["site-0", "site-1", "site-4"], "no part in this sum"),
        (["site-0", "site-1", "site-9"], "no part in this sum"),
        (["site-0", "site-1", "site-2", "site-2"], "one twice"),
    ):
        with pytest.raises(RefusalError, match=sentence):
            release_unmasking_shares(state, survivors)


def test_a_site_never_hands_out_both_kinds_of_shares_of_another():
    """Neither in one message, nor in a round that is played again with other survivors."""
    server, _ = play(4, 3)
    state, everyone = server.states["site-0"], names(4)
    agreement = state.shared.agreement[0] + sum(state.shared.agreement[1:])
    key = derive_released_shares_key(agreement % shamir.PRIME, state.shared.participants_digest, "site-0", everyone)
    bundle = shamir.field_elements_from_bytes(
        crypto.decrypt(key, server.handed["site-0"].bundle, state.shared.participants_digest)
    )
    assert bundle == [state.held_shares[name][1] for name in everyone]  # self-masks alone
    with pytest.raises(RefusalError, match="was opened for other sites before"):
        release_unmasking_shares(state, everyone[:3], earlier_survivors=everyone)
    release_unmasking_shares(state, everyone, earlier_survivors=list(reversed(everyone)))


def test_a_site_that_lies_is_noticed_where_it_can_be():
    server, _ = play(4, 3, {"site-3": 2})  # the last has shared, and is gone
    handed = server.handed["site-1"]
    for wrong in (replace(handed, bundle=b""), replace(handed, tokens={}), replace(handed, bundle=handed.bundle[::-1])):
        server.handed["site-1"] = wrong
        with pytest.raises(RoundError, match="are inconsistent"):
            server.sum()
