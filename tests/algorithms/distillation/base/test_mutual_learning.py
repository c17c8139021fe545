"""FML and FedKD, in which a client's own network and a common one teach each other: identities, a round in plain torch."""

import pytest
import torch
from halves import OPTIONS, begin, mixed, play, run
from torch import nn

import polyfed as pf
from polyfed.algorithms import FML, FedAvg, FedKD, Local
from polyfed.algorithms.distillation.base.low_rank import apply_update, compress_update
from polyfed.core.algorithm import Message
from polyfed.core.io.trusted_code import trust_code
from polyfed.models import ModelSpec
from polyfed.testing import small_clients

SHARED = {"name": "mlp", "hidden": (5,)}
AS_SPEC = ModelSpec("mlp", {"hidden": (5,)}, (6,), 3)


def with_shared_network(clients):
    return [pf.Client(c.id, AS_SPEC, c.train, c.test, c.val) for c in clients]


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "method",
    [FML(**OPTIONS, shared=SHARED, alpha=1.0, beta=0.3), FedKD(**OPTIONS, shared=SHARED, distil=0.0)],
    ids=["fml", "fedkd"],
)
@pytest.mark.one_case
def test_without_the_common_networks_share_it_is_local_bit_for_bit(method):
    found, local = run(method, mixed()), run(Local(**OPTIONS), mixed())
    for i in local.federation.clients:
        assert_same_tensors(found.model(i).state_dict(), local.model(i).state_dict())
    assert found.history[-1]["train_loss"] == local.history[-1]["train_loss"]


@pytest.mark.parametrize("method", [FML(**OPTIONS, shared=SHARED, alpha=0.3, beta=1.0)], ids=["fml"])
def test_without_the_own_networks_share_the_common_one_is_fedavgs_bit_for_bit(method):
    found, fedavg = run(method, mixed()), run(FedAvg(**OPTIONS), with_shared_network(mixed()))
    assert_same_tensors(found.last.state["model"], fedavg.last.state["model"])
    for i, row in fedavg.history[-1]["clients"].items():
        assert found.history[-1]["clients"][i]["shared_loss"] == row["loss"]


def two(client, own, state):
    """The client's own network and the common one."""
    mine, common = client.model(), AS_SPEC()
    mine.load_state_dict(own["own"])
    common.load_state_dict(state["model"])
    return mine, common


def softened(teacher, student):
    """KL(teacher ‖ student): summed over classes, the mean over examples; the teacher is a constant."""
    p = teacher.detach().softmax(1)
    return (p * (p.log() - student.log_softmax(1))).sum() / len(p)


def plain(clients):
    def short():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return [pf.Client(c.id, short, c.train, c.test) for c in clients]


def test_fedkd_without_distillation_and_with_whole_updates_averages_as_fedavg():
    method = FedKD(**OPTIONS, shared=SHARED, distil=0.0, t_start=1.0, t_end=1.0, weighted=True)
    found, fedavg = run(method, mixed(), rounds=3), run(FedAvg(**OPTIONS), with_shared_network(mixed()), rounds=3)
    torch.testing.assert_close(found.last.state["model"], fedavg.last.state["model"], rtol=1e-5, atol=1e-6)
    assert found.last.state["update"].keys() == found.last.state["model"].keys()


def test_a_common_network_of_fedkd_may_count_and_note_truths():
    """Its updates of whole numbers are differences, those of booleans which have changed."""
    trust_code("polyfed.testing.disclosure_audit:audit_network")
    method = FedKD(
        shared={"name": "polyfed.testing.disclosure_audit:audit_network"}, lr=0.05, batch_size=4, weighted=True
    )
    state = pf.federate(small_clients(), method, rounds=3, workers=0).last.state["model"]
    assert state["0.many"].tolist() == [True]
    assert 3 * 5 <= int(state["0.steps"]) <= 3 * 8  # 20 to 32 examples a round


def test_who_was_in_the_last_round_gets_the_update_and_others_the_network():
    """Both have the server's s after it; the update is fewer numbers."""
    clients = plain(mixed())
    method = FedKD(**OPTIONS, shared={"name": "mlp", "hidden": (40, 40)}, t_start=0.5, t_end=0.5)
    federation, state, own, _ = play(method, clients, rounds=3, skip={"client-2"})
    downs = {c.id: method.dispatch(state, federation.client_info(c.id, 4)) for c in clients}
    assert [sorted(downs[c.id].tensors) for c in clients] == [["update"], ["update"], ["model"]]
    assert downs["client-0"].nbytes < 0.6 * downs["client-2"].nbytes
    for c in clients:
        assert_same_tensors(dict(method._shared_weights(downs[c.id], own[c.id], c)), state["model"])
    lost = {name: value for name, value in own["client-0"].items() if name != "common"}
    with pytest.raises(pf.UserError, match="had the shared network, and lost it"):
        method.local_update(downs["client-0"], lost, clients[0], 1)


def test_factors_that_do_not_fit_are_refused():
    clients = plain(mixed())
    method = FedKD(**OPTIONS, shared={"name": "mlp", "hidden": (40, 40)}, t_start=0.5, t_end=0.5)
    federation, state, _, replies = play(method, clients, rounds=2)
    good = dict(replies["client-0"].tensors["update"])
    name = next(n for n in good if n.endswith(":left"))
    for bad in (good[name][:, :0], torch.cat([good[name]] * 2, 1), good[name][0]):
        assert federation.reply_error(Message({"update": {**good, name: bad}}), state, Message())
    update = {"w": torch.zeros(30, 30), "b": torch.ones(2), "n": torch.tensor(3)}
    assert_same_tensors(
        apply_update({n: torch.zeros_like(t) for n, t in update.items()}, compress_update(update, 0.9)), update
    )


def test_the_defaults_of_fml_distil():
    """Public code has α = β = 1, with which nobody learns from anybody."""
    assert FML().alpha < 1
    assert FML().beta < 1
    found, local = (run(m, mixed()).last.client_states["client-0"] for m in (FML(**OPTIONS), Local(**OPTIONS)))
    assert not torch.equal(found["own"]["0.weight"], local["model"]["0.weight"])


def test_the_own_network_does_not_travel():
    _, _, own, replies = play(FML(**OPTIONS, shared=SHARED), mixed(), rounds=2)
    for i, reply in replies.items():
        assert reply.tensors.keys() == {"model"}
        assert reply.tensors["model"].keys() == AS_SPEC().state_dict().keys()
        assert own[i]["own"].keys().isdisjoint(reply.tensors["model"].keys())


def test_a_common_network_that_does_not_suit_is_named():
    for given, message in (
        ("nothing", "nothing"),
        ({"hidden": [3]}, "shared must be"),
    ):
        with pytest.raises(pf.UserError, match=message):
            begin(FML(shared=given), mixed())
    numbers = [
        pf.Client(
            "a",
            lambda: nn.Linear(6, 2),
            (torch.randn(9, 6), torch.randn(9, 2)),
            (torch.randn(9, 6), torch.randn(9, 2)),
            task="regression",
        )
    ]
    assert run(FML(lr=0.05), numbers).table()
    for field in ("t_start", "t_end"):
        with pytest.raises(pf.UserError, match=f"{field} must be above 0 and at most 1, got 1.5"):
            FedKD(**{field: 1.5})
    for field in ("alpha", "beta"):
        with pytest.raises(pf.UserError, match=f"{field} must be between 0 and 1, got 1.5"):
            FML(**{field: 1.5})


@pytest.mark.parametrize("method", [FML(), FedKD()], ids=["fml", "fedkd"])
def test_a_common_network_without_outputs_at_each_pixel_is_refused_before_round_1(method):
    x, y = torch.zeros(4, 1, 8, 8), torch.zeros(4, 8, 8, dtype=torch.int64)
    y[:, :4] = 1
    unet = ModelSpec("unet", {"width": 2, "depth": 1}, (1, 8, 8), 2)
    clients = [pf.Client("east", unet, (x, y), (x, y), task="segmentation")]
    with pytest.raises(
        pf.UserError, match=r"outputs of shape \(2,\) for an example, the network of 'east' \(2, 8, 8\)"
    ):
        pf.federate(clients, method, rounds=1)


def test_fedkd_refuses_a_loss_that_may_be_0_before_round_1():
    patients = torch.eye(4), torch.tensor([[1.0, 1], [2, 0], [3, 0], [4, 0]])
    clients = [pf.Client("east", lambda: nn.Linear(4, 1), patients, patients, task="survival")]
    with pytest.raises(pf.UserError, match="set batch_size to 0, so that a minibatch is all of a client"):
        pf.federate(clients, FedKD(batch_size=2), rounds=1, progress=False)
    run = pf.federate(clients, FedKD(batch_size=0, lr=0.01), rounds=1, progress=False)
    assert run.history[0]["clients"]["east"]["c_index"] is not None
