"""FedProto, FedGH, FedTGP and FD once more: a round of each written out in plain torch, and whom FD learns from."""

import pytest
import torch
import torch.nn.functional as F
from halves import FULL, OPTIONS, features, mixed, network, plain, play, run
from torch import nn

import polyfed as pf
from polyfed.algorithms import FD, FedGH, FedProto, FedTGP, Local
from polyfed.algorithms.distillation.fd import class_means_of_others
from polyfed.algorithms.prototypes.fedtgp import TrainablePrototypes, largest_distance_between_classes
from polyfed.core.examples.examples import Examples


def steps(net, client, loss_of, lr=0.1, number=3):
    for _ in range(number):
        grads = torch.autograd.grad(loss_of(net, client.train.x, client.train.y), list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p -= lr * g


@pytest.mark.parametrize("method", [FedProto, FedGH, FedTGP, FD])
def test_a_round_written_out_in_plain_torch_is_the_same(method):
    """The second round of clients of which two have two classes of three, with the full batch."""
    clients = plain(mixed(classes=[(0, 1), (1, 2), (0, 1, 2)]))
    server = {"server_epochs": 4, "server_batch_size": 0} if method in (FedGH, FedTGP) else {}
    made = method(**FULL, **server)
    _, state, own, replies = play(made, clients)
    _, after, trained, _ = play(made, clients, rounds=2)
    sent = {}
    for c in clients:
        net = network(c, own[c.id])

        def loss_of(net, x, y, c=c):
            hidden = net[1](net[0](x))
            total = F.cross_entropy(net[2](hidden), y)
            if method in (FedProto, FedTGP):
                total = total + sum(
                    ((f - state["prototypes"]["means"][k]) ** 2).mean() for f, k in zip(hidden, y, strict=True)
                ) / len(y)
            elif method is FD:
                for z, k in zip(net[2](hidden), y, strict=True):
                    rest = [r.tensors["classes"] for i, r in replies.items() if i != c.id]
                    taught = [t["sums"][k] for t in rest if t["weights"][k] > 0]
                    if taught:
                        total = total - (sum(taught) / len(taught) * z.log_softmax(0)).sum() / len(y)
            return total

        if method is FedGH:
            net[2].load_state_dict(state["head"])
        steps(net, c, loss_of)
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(trained[c.id]["model"][name], tensor, rtol=1e-5, atol=1e-5)
        rows = net(c.train.x).softmax(1).detach() if method is FD else features(net, c.train.x)
        sent |= {(c.id, k): rows[c.train.y == k].mean(0) for k in set(c.train.y.tolist())}
    x, y = torch.stack(list(sent.values())), torch.tensor([k for _, k in sent])
    if method is FedProto:
        means = torch.stack([x[y == k].mean(0) for k in range(3)])
        torch.testing.assert_close(after["prototypes"]["means"], means, rtol=1e-5, atol=1e-5)
    elif method is FedGH:
        head = nn.Linear(8, 3)
        head.load_state_dict(state["head"])
        steps(head, pf.Client("server", None, (x, y), (x, y)), lambda net, x, y: F.cross_entropy(net(x), y), 0.01, 4)
        torch.testing.assert_close(after["head"], dict(head.state_dict()), rtol=1e-5, atol=1e-5)
    elif method is FedTGP:
        made_prototypes = TrainablePrototypes(3, 8, 8)
        made_prototypes.load_state_dict(state["generator"])
        centres = [x[y == k].mean(0) for k in range(3)]
        delta = min(100.0, max(float((a - b).norm()) for a in centres for b in centres))

        def contrast(net, x, y):
            """Eq. 10, term by term."""
            total = 0.0
            for p, c in zip(x, y.tolist(), strict=True):
                d = [(p - q).norm() for q in net.compute_prototypes()]
                own_term = torch.exp(-(d[c] + delta))
                total = total - torch.log(own_term / (own_term + sum(torch.exp(-d[k]) for k in range(3) if k != c)))
            return total / len(x)

        steps(made_prototypes, pf.Client("server", None, (x, y), (x, y)), contrast, 0.01, 4)
        torch.testing.assert_close(
            after["prototypes"]["means"], made_prototypes.compute_prototypes().detach(), rtol=1e-5, atol=1e-5
        )
        assert largest_distance_between_classes(Examples(x, y), 3) == pytest.approx(delta, rel=1e-5)


# -- FD ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["probabilities", "logits"])
def test_fd_learns_from_the_others_without_oneself(outputs):
    """By a loop over the other clients that have the class, for one who was in the last round and for one who was not."""
    clients, method = mixed(classes=[(0, 1), (1,), (0, 2)]), FD(**OPTIONS, outputs=outputs)
    for skip in ({}, {"client-1"}):
        federation, state, own, replies = play(method, clients, rounds=2, skip=skip)
        for c in clients:
            down = method.dispatch(state, federation.client_info(c.id, 3))
            targets, present = class_means_of_others(down, own[c.id])
            for k in range(3):
                theirs = [r.tensors["classes"] for i, r in replies.items() if i != c.id]
                taught = [t["sums"][k] for t in theirs if t["weights"][k] > 0]
                assert bool(present[k]) == bool(taught)
                expected = sum(taught) / len(taught) if taught else torch.zeros(3)
                torch.testing.assert_close(targets[k], expected, rtol=1e-4, atol=1e-5)
    assert method.dispatch(state, federation.client_info("client-0", 3, "evaluate")).tensors == {}


def test_fd_with_logits_is_half_the_mean_squared_difference():
    clients, method = plain(mixed()), FD(**FULL, outputs="logits", gamma=0.7)
    federation, state, own, _ = play(method, clients)
    _, _, trained, _ = play(method, clients, rounds=2)
    c = clients[0]
    targets, _ = class_means_of_others(method.dispatch(state, federation.client_info(c.id, 2)), own[c.id])
    net = network(c, own[c.id])
    steps(net, c, lambda net, x, y: F.cross_entropy(net(x), y) + 0.7 * 0.5 * F.mse_loss(net(x), targets[y]))
    torch.testing.assert_close(trained[c.id]["model"], dict(net.state_dict()), rtol=1e-5, atol=1e-5)


def test_alone_there_is_nobody_to_learn_from():
    one = mixed()[:1]
    found, alone = run(FD(**OPTIONS), one), run(Local(**OPTIONS), one)
    torch.testing.assert_close(
        found.last.client_states["client-0"]["model"], alone.last.client_states["client-0"]["model"]
    )
