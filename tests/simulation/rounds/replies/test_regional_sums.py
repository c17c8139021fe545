"""Sums by region: the same bits for any regions, on any engine and as secure sums; and what has no sum is refused."""

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import APFL, FLHAGHN, FedAvg, FedHeNN, FedRep, Local, PFedLA, PFedMe
from polyfed.core.messages.fixed_point import FRACTION_BITS, to_fixed_point
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.rounds.replies.regional_sums import RegionalSum, find_region, supports_regions
from polyfed.simulation.rounds.replies.secure_aggregation import SecureSum, encode_reply_in_fixed_point
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few

NUMBER = 5
METHODS = {
    "fedavg": FedAvg(lr=0.05),
    "unweighted": FedAvg(lr=0.05, weighted=False),
    "clip": FedAvg(lr=0.05, robust="clip:0.05"),
    "fedrep": FedRep(lr=0.05),
    "apfl": APFL(lr=0.05),
    "pfedme": PFedMe(lr=0.05, personal_lr=0.05),
    "flha_ghn": FLHAGHN(lr=0.01, depth=1, latent=6, hidden=4),
}
QUICK = ("fedavg", "clip")


def run(method=METHODS["fedavg"], **words):
    return pf.federate(small_clients(NUMBER), method, **{"rounds": 2, "seed": 3, "workers": 0, **words})


def same_bits(one, other):
    states = [list(iter_tensors(r.last.state)) for r in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    for i in one.federation.clients:
        pairs = zip(one.model(i).state_dict().values(), other.model(i).state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert [r["summary"] for r in one.history] == [r["summary"] for r in other.history]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.thorough) for n in METHODS])
@pytest.mark.one_case
def test_any_regions_give_the_same_bits_and_those_of_a_secure_sum(name):
    method = METHODS[name]
    each = {f"client-{j}": f"region-{j}" for j in range(NUMBER)}
    two = {f"client-{j}": "north" if j % 2 else "south" for j in range(NUMBER)}
    runs = [run(method, regions=regions) for regions in (1, 3, each, two)]
    for other in runs[1:]:
        same_bits(runs[0], other)
    same_bits(runs[0], run(method, secure=True))
    assert runs[0].history[0]["train_loss"] is not None  # single replies reach their region


def test_the_mean_differs_from_the_plain_one_by_the_rounding_of_fixed_point_alone():
    """Σ n_i·x_i is rounded to 2^-32 for each client: half a step each, divided by Σ n_i, and float32 at the end."""
    regional, plain = run(rounds=1, regions=2), run(rounds=1)
    weight = sum(len(c.train) for c in small_clients(NUMBER))
    for name, theirs in plain.last.state["model"].items():
        ours = regional.last.state["model"][name]
        if ours.is_floating_point():
            float_step = theirs.abs().double() * torch.finfo(torch.float32).eps
            bound = NUMBER * 2.0 ** -(FRACTION_BITS + 1) / weight + float_step
            assert bool(((ours.double() - theirs.double()).abs() <= bound).all())


def test_a_round_says_what_its_regions_forwarded():
    each = {f"client-{j}": str(j) for j in range(NUMBER)}
    words = 8 * len(to_fixed_point({"model": dict(run(rounds=1).last.state["model"])}, 1, NUMBER))
    assert [r["regions"] for r in run(regions=each, clients_per_round=2).history] == [
        {"sums": 2, "bytes_up": 2 * words}
    ] * 2
    assert run(regions=1, rounds=1).history[0]["regions"] == {"sums": 1, "bytes_up": words}
    whole, plain = run(regions=1, rounds=1).history[0], run(rounds=1).history[0]
    assert "regions" not in plain
    assert whole["bytes_up"] == plain["bytes_up"]  # what clients send
    assert whole["clients"]["client-0"]["update_norm"] == plain["clients"]["client-0"]["update_norm"]


def test_memory_is_that_of_the_regions_and_not_of_the_clients():
    method = METHODS["fedavg"]
    total = RegionalSum(method, {str(j): str(j % 2) for j in range(50)})
    for j in range(50):
        reply = pf.Message({"model": {"w": torch.full((10,), float(j))}}, {"num_examples": 2})
        total.add(str(j), encode_reply_in_fixed_point(reply, method, 50))
    assert total.bytes_by_region == {"0": 88, "1": 88}
    assert total.mean()["model"]["w"].tolist() == [24.5] * 10
    assert total.client_ids == sorted(map(str, range(50)))
    assert all(isinstance(part, SecureSum) for part in total._sums.values())


def test_a_number_deals_clients_by_their_ids_alone():
    divided = [int(find_region(f"client-{j}", 4)) for j in range(400)]
    assert sorted(set(divided)) == [0, 1, 2, 3]
    assert min(divided.count(k) for k in range(4)) > 60
    assert find_region("north", {"north": "europe"}) == "europe"


@pytest.mark.parametrize("engine", ["cohort", pytest.param("pool", marks=pytest.mark.thorough)])
def test_on_other_engines(engine):
    words = {"engine": engine, "workers": 2} if engine == "pool" else {"engine": engine}
    ours, theirs = run(regions=2, **words), run(regions=2, engine="inprocess")
    for a, b in zip(iter_tensors(ours.last.state), iter_tensors(theirs.last.state), strict=True):
        torch.testing.assert_close(a, b, rtol=0 if engine == "pool" else 1e-4, atol=0 if engine == "pool" else 1e-5)


@pytest.mark.parametrize("regions", few([2, {f"client-{j}": "ab"[j % 2] for j in range(NUMBER)}], [2]))
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, regions):
    whole, out = run(rounds=3, regions=regions), tmp_path / "run"
    run(rounds=3, regions=regions, out=out)
    for stale in (out / "checkpoint" / "round-000003").iterdir():
        stale.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged"):
        again = pf.resume(out, clients=small_clients(NUMBER), workers=0)
    assert_runs_equal(whole, again)
    assert again.federation.settings.regions == regions


def test_a_reply_too_large_for_fixed_point_is_left_out_and_named():
    class Large(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 3)

    clients = small_clients(2)
    huge = pf.Client("huge", Large, (clients[0].train.x * 1e7, clients[0].train.labels), clients[0].test)
    others = [pf.Client(c.id, Large, c.train, c.test) for c in clients]
    ran = pf.federate([*others, huge], FedAvg(lr=100.0), rounds=1, regions=2, workers=0, on_error="skip")
    (failure,) = [f for f in ran.history[0]["failures"] if f["phase"] == "reply"]
    assert failure["client"] == "huge"


def test_with_compressed_replies_a_region_decompresses_them():
    ours, theirs = run(regions=2, compress="int8", rounds=1), run(compress="int8", rounds=1)
    assert ours.history[0]["bytes_up"] == theirs.history[0]["bytes_up"]
    for name, tensor in theirs.last.state["model"].items():
        torch.testing.assert_close(ours.last.state["model"][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Local(), "local needs each reply by itself, or none; leave regions out"),
        (PFedLA(), "pfedla needs each reply by itself"),
        (FedAvg(averaged_over="all"), "fedavg needs each reply by itself"),
        (FedHeNN(), "fedhenn needs each reply by itself"),
        (FedAvg(robust="median"), "robust='median' compares the replies of all clients"),
        (FedAvg(robust="clip:3x"), "robust='clip:3.0x' compares the replies of all clients; give a number"),
    ],
)
def test_methods_without_a_sum_are_refused(method, message):
    assert not supports_regions(method)
    public = {"public": torch.randn(30, 6)} if isinstance(method, FedHeNN) else {}
    with pytest.raises(pf.UserError, match=message):
        run(method, regions=2, **public)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"regions": {"client-0": "north"}}, "regions has no region for the client 'client-1'"),
        ({"regions": 0}, r"regions must be a number from 1, or the region of each client, \{client: region\}, got 0"),
        ({"regions": True}, "regions must be a number from 1"),
        ({"regions": {}}, "regions must be a number from 1"),
        ({"regions": {"client-0": 3}}, "regions: the region of client 'client-0' must be a text, got 3"),
        ({"regions": 2, "secure": True}, "secure=True masks replies"),
    ],
)
def test_bad_regions(words, message):
    with pytest.raises(pf.UserError, match=message):
        run(**words)


@pytest.mark.thorough
def test_a_comparison_takes_regions_where_the_server_half_is_a_mean():
    words = {"rounds": 1, "seeds": [0], "tune": "none", "references": False, "quiet": True}
    found = pf.compare(small_clients(3), ["pfedla"], regions=2, **words)
    assert {row["method"] for row in found.table()} >= {"local", "fedavg", "pfedla"}
    assert not found.skipped
