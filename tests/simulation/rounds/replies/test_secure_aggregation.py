"""Secure sums in a simulation: the same mean up to fixed point, the same bits whatever the order, and what refuses them."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import (
    FLHAGHN,
    REGISTRY,
    FedAvg,
    FedAvgKD,
    FedBN,
    FedHeNN,
    FedRep,
    Local,
    PerFedAvg,
    PFedLA,
    PFedMe,
)
from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, UserError
from polyfed.core.messages.fixed_point import parse_sum_message
from polyfed.simulation.rounds.replies.secure_aggregation import (
    encode_reply_in_fixed_point,
    find_secure_reply_error,
    supports_secure_sum,
)
from polyfed.testing import assert_runs_equal, small_clients
from polyfed.testing.algorithm_contract import _InterruptAfter


def run(method, clients=None, **words):
    settings = {"rounds": 2, "seed": 3, "workers": 0, "secure": True, **words}
    return pf.federate(small_clients() if clients is None else clients, method, **settings)


METHODS = {
    "fedavg": FedAvg(lr=0.05),
    "unweighted": FedAvg(lr=0.05, weighted=False),
    "fedbn": FedBN(lr=0.05),
    "fedrep": FedRep(lr=0.05),
    "fedavg_kd": FedAvgKD(lr=0.05, teacher_rounds=1),
    "per_fedavg": PerFedAvg(lr=0.05),
    "pfedme": PFedMe(lr=0.05, personal_lr=0.05),
    "flha_ghn": FLHAGHN(lr=0.01, depth=1, latent=6, hidden=4),
}


def differences(one, other):
    """The largest difference of weights, over all clients."""
    return max(
        float((a.double() - b.double()).abs().max())
        for i in one.federation.clients
        for a, b in zip(one.model(i).state_dict().values(), other.model(i).state_dict().values(), strict=True)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_the_mean_is_that_of_the_plain_run_up_to_rounding(name):
    method = METHODS[name]
    secure, plain = run(method), run(method, secure=False)
    assert differences(secure, plain) < 1e-4
    assert [row["accuracy"] for row in secure.table()] == [row["accuracy"] for row in plain.table()]


class Counting(nn.Module):
    """Whole numbers of each kind that change in training, and BatchNorm whose statistics depend on a counter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.seen |= self.steps.sum() > 8
        return self.layers(x)


def whole_numbers(nested, path=""):
    """Every tensor of whole numbers inside nested state, by its path."""
    if isinstance(nested, torch.Tensor):
        return {} if nested.is_floating_point() else {path: nested.tolist()}
    inside = nested.items() if isinstance(nested, dict) else ()
    return {k: v for name, part in inside for k, v in whole_numbers(part, f"{path}/{name}").items()}


def averaging_buffers(weighted):
    """The methods that can run on secure sums and average buffers, by name."""
    words = {"lr": 0.05, "batch_size": 8, "weighted": weighted, "buffers": "average", "teacher_rounds": 1}
    found = {}
    for name, method in REGISTRY.items():
        fields = {f.name for f in dataclasses.fields(method)}
        if supports_secure_sum(method()) and not {"images", "adapters"} & method.requires:
            shared = {"shared": {"name": "mlp", "hidden": [8]}} if name == "fedmrl" else {}  # no wider than `Counting`
            with contextlib.suppress(UserError):  # it weighs, or treats buffers, in one way only
                found[name] = method(**{key: value for key, value in words.items() if key in fields}, **shared)
    return found


QUICK = ("fedavg", "scaffold")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=f"{name}-{weighted}", marks=[] if name in QUICK else pytest.mark.thorough)
        for weighted in (True, False)
        for name, m in averaging_buffers(weighted).items()
    ],
)
@pytest.mark.one_case
def test_whole_numbers_are_those_of_the_plain_run(method):
    """To the bit, for clients of which one has ten times the examples of another; and what depends on them follows."""
    small, large, other = small_clients()
    x, y = (torch.cat([part] * 10) for part in (large.train.x, large.train.labels))
    clients = [dataclasses.replace(c, model=Counting) for c in (small, dataclasses.replace(large, train=(x, y)), other)]
    secure, plain = (run(method, clients, secure=secure) for secure in (True, False))
    counted = [
        whole_numbers({"server": r.last.state, **{i: dict(r.model(i).state_dict()) for i in r.federation.clients}})
        for r in (secure, plain)
    ]
    assert counted[0] == counted[1]
    assert any(name.endswith("steps") for name in counted[0])
    assert differences(secure, plain) < 1e-4


def test_the_result_does_not_depend_on_order_or_workers():
    method = FedAvg(lr=0.05)
    one = run(method)
    assert_runs_equal(one, run(method, small_clients()[::-1]))
    assert_runs_equal(one, run(method, engine="pool", workers=2))


def test_a_resumed_run_is_the_same(tmp_path):
    method = FedAvg(lr=0.05)
    whole = run(method, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run(method, rounds=3, out=tmp_path / "run", progress=_InterruptAfter(1))
    assert_runs_equal(whole, pf.resume(tmp_path / "run", clients=small_clients(), workers=0))


def test_no_number_of_one_client_goes_up():
    record = run(FedAvg(lr=0.05)).history[-1]
    assert record["train_loss"] is None
    assert all("train_loss" not in row for row in record["clients"].values())
    assert len({row["bytes_up"] for row in record["clients"].values()}) == 1


def test_the_server_half_sees_one_mean_and_no_reply(monkeypatch):
    seen = []
    step = FedAvg.server_step

    def watched(self, state, mean, who):
        seen.append((sorted(mean), list(who)))
        return step(self, state, mean, who)

    monkeypatch.setattr(FedAvg, "server_step", watched)
    monkeypatch.setattr("polyfed.core.state_dict.RunningMean.add", None)
    run(FedAvg(lr=0.05), rounds=1)
    assert seen == [(["model"], ["client-0", "client-1", "client-2"])]


@pytest.mark.parametrize(
    "method", [PFedLA(lr=0.05), FedHeNN(lr=0.05), Local(lr=0.05), "pfedhn", "fedfomo", "heur_pfedla"]
)
def test_methods_that_need_each_reply_refuse(method):
    public = torch.randn(40, 6)
    with pytest.raises(
        UserError, match=r"needs each reply by itself, or none; methods whose server half is a mean: .*fedavg"
    ):
        run(method, public=public if isinstance(method, FedHeNN) else None)


def test_methods_with_a_mean_have_secure_sums():
    """New methods may come; docs/deploy/secure_sums.md has the whole list."""
    assert {name for name, m in REGISTRY.items() if supports_secure_sum(m())} >= {
        "fedavg", "fedavg_ft", "fedprox", "fedrep", "fedbn", "per_fedavg", "pfedme", "fedavg_kd", "flha_ghn", "fedpnas",
        "ca_fedpnas", "feddsnas", "ca_feddsnas", "lg_fedavg", "fedproto", "fd", "fml",
        "fedopt", "ditto", "scaffold", "feddyn", "moon",
        "apfl", "fedala", "knn_per", "fedmd",
        "fedsa_lora", "ffa_lora", "rolora", "qfedavg",
    }  # fmt: skip


def test_the_mean_of_all_clients_latest_models_needs_each_of_them():
    assert not supports_secure_sum(FedAvg(averaged_over="all"))
    with pytest.raises(UserError, match=r"fedavg with averaged_over='all' keeps each .*; give averaged_over='cohort'"):
        run(FedAvg(averaged_over="all"))
    assert supports_secure_sum(REGISTRY["fedhenn_homo"](averaged_over="cohort"))


def test_one_client_a_round_refuses():
    with pytest.raises(UserError, match="a round has 1; raise clients_per_round"):
        run(FedAvg(lr=0.05), clients_per_round=1)
    with pytest.raises(UserError, match="secure must be true or false, got 'yes'"):
        run(FedAvg(lr=0.05), secure="yes")
    with pytest.raises(UserError, match="compress='int8' and secure=True exclude one another"):
        run(FedAvg(lr=0.05), compress="int8")


class Far(torch.nn.Linear):
    """A network with a weight beyond what fits."""

    def __init__(self):
        super().__init__(6, 3)
        torch.nn.init.constant_(self.bias, 3e7)


def test_a_value_that_does_not_fit_is_the_failure_of_its_client():
    clients = [pf.Client(c.id, Far, (c.train.x, c.train.y), (c.test.x, c.test.y)) for c in small_clients()]
    with pytest.raises(
        ClientError, match=r"tensor 'bias' has the value 3e\+07, and a fixed-point sum of 3 sites with 26 "
    ):
        run(FedAvg(lr=0.05), clients)
    found = run(FedAvg(lr=0.05), clients, on_error="skip", rounds=1)  # 20 examples of this one still fit
    assert [failure["client"] for failure in found.history[0]["failures"]] == ["client-1", "client-2"]


def test_parts_of_another_form_are_refused():
    method, down = FedAvg(lr=0.05), Message({"model": {"w": torch.zeros(2)}})
    good = encode_reply_in_fixed_point(Message({"model": {"w": torch.ones(2)}}, {"num_examples": 3}), method, 2)
    assert find_secure_reply_error(good, method, {}, down) is None
    assert parse_sum_message(good)[0][0] == 3
    for tree, sentence in (
        ({"w": torch.ones(3)}, "has shape"),
        ({"w": torch.ones(2).double()}, "has dtype torch.float64"),
        ({"v": torch.ones(2)}, "is missing"),
    ):
        bad = encode_reply_in_fixed_point(Message({"model": tree}, {"num_examples": 3}), method, 2)
        assert sentence in find_secure_reply_error(bad, method, {}, down)
    assert "not a Message" in find_secure_reply_error(None, method, {}, down)
    assert "a part of a secure sum is expected" in find_secure_reply_error(down, method, {}, down)
