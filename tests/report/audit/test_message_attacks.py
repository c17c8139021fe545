"""Attacks on messages succeed where they must (one example, one step), and fail where they must (nothing sent, sums)."""

import dataclasses

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.algorithm import Message
from polyfed.report.audit.messages.attack_messages import attack_messages, choose_most_exposed
from polyfed.report.audit.messages.image_distances import best_psnr_per_image
from polyfed.report.audit.messages.image_inversion import InversionTarget, compute_inputs_of_first_layer, search_images
from polyfed.report.audit.messages.label_counts import (
    CLASSES,
    IN_MESSAGE,
    LAST_LAYER,
    class_shares_overlap,
    find_counts_in_message,
)
from polyfed.report.audit.messages.message_audit import MessageAudit
from polyfed.simulation.rounds.start.preparation import check_and_build_federation
from polyfed.simulation.settings import Settings
from polyfed.testing import example_of

ONE_STEP = {"lr": 0.1, "batch_size": 0, "local_steps": 1}
CLASSES_OF_CLIENT = 3


def convolution():
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, CLASSES_OF_CLIENT))


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, CLASSES_OF_CLIENT))


def image_clients(model, number=1, names=("north", "south", "west", "east"), seed=0):
    """Random images, so that one tells nothing of another."""
    generator, clients = torch.Generator().manual_seed(seed), []
    for name in names:
        x, y = torch.rand(number + 12, 1, 6, 6, generator=generator), torch.arange(number + 12) % CLASSES_OF_CLIENT
        clients.append(pf.Client(name, model, (x[:number], y[:number]), (x[number:], y[number:])))
    return clients


def attack(clients, method, iterations=200, restarts=1, ids=("north",), **settings):
    federation = check_and_build_federation(clients, method, Settings(rounds=2, **settings), None, None)
    return attack_messages(federation, ids, iterations, restarts)


def test_one_example_and_one_step_are_reconstructed_from_convolutions():
    (entry,) = attack(image_clients(convolution), pf.algorithms.FedAvg(**ONE_STEP))
    assert entry.best_psnr > 30
    assert entry.other_best_psnr < 15
    assert (entry.images, entry.steps, entry.senders, entry.candidates) == (1, 1, 1, 1)
    assert entry.label_source == LAST_LAYER
    assert entry.labels_right > 0.9
    assert entry.labels_right_by_guess == pytest.approx(1 / CLASSES_OF_CLIENT)


@pytest.mark.thorough
def test_several_steps_are_imitated():
    method = pf.algorithms.FedAvg(lr=0.5, batch_size=2, local_epochs=2)  # two images, two steps
    (entry,) = attack(image_clients(convolution, number=2), method, iterations=300)
    assert entry.steps == 2
    assert entry.best_psnr > 25


def test_a_first_linear_layer_gives_the_image_away_without_a_search():
    clients = image_clients(perceptron)
    method = pf.algorithms.FedAvg(**ONE_STEP)
    (entry,) = attack(clients, method, iterations=1)
    assert entry.best_psnr > 60
    change = {
        "1.weight": torch.outer(torch.tensor([2.0, -3.0]), torch.arange(4.0)),
        "1.bias": torch.tensor([2.0, -3.0]),
    }
    target = InversionTarget((1, 2, 2), torch.tensor([0]), 0.0, 9.0)
    images = compute_inputs_of_first_layer(change, target)
    assert torch.allclose(images, torch.arange(4.0).view(1, 1, 2, 2).expand(2, 1, 2, 2))
    no_bias = {"1.weight": change["1.weight"]}
    assert len(compute_inputs_of_first_layer(no_bias, target)) == 0


def test_where_nothing_is_sent_nothing_is_attacked():
    (entry,) = attack(image_clients(perceptron), pf.algorithms.Local(**ONE_STEP))
    assert entry.candidates == 0
    assert (entry.best_psnr, entry.mean_psnr, entry.labels_right, entry.label_source) == (None, None, None, "")
    assert entry.describe_images() == "no weights that the server knew before"
    assert entry.describe_labels() == "not inferred, guess 33 %"


@pytest.mark.thorough
def test_a_secure_sum_of_several_clients_does_not_give_the_image():
    """Every unit of this network is moved by every image, unlike those of ReLU networks."""
    clients, method = image_clients(perceptron, number=4), pf.algorithms.FedAvg(**ONE_STEP)
    alone = attack(image_clients(perceptron, number=1), method)[0]
    (entry,) = attack(clients, method, secure=True)
    assert entry.senders == 4
    assert alone.best_psnr > 60
    assert entry.best_psnr < 20
    (single,) = attack(image_clients(perceptron, number=1), method, iterations=1, secure=True)
    assert single.best_psnr < 20


def test_a_sum_does_not_hide_an_image_that_alone_moves_a_unit():
    """The documents say so; a unit with a large negative bias answers to one client's bright image alone."""

    def one_sided():
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2), nn.ReLU(), nn.Linear(2, CLASSES_OF_CLIENT))
        with torch.no_grad():
            net[1].weight.fill_(1.0)
            net[1].bias.copy_(torch.tensor([-30.0, 0.0]))
        return net

    clients = image_clients(one_sided)
    bright = clients[0].train.x * 0.1 + 0.9
    clients[0] = dataclasses.replace(clients[0], train=(bright, clients[0].train.y))
    (entry,) = attack(clients, pf.algorithms.FedAvg(**ONE_STEP), iterations=1, secure=True)
    assert entry.best_psnr > 40


@pytest.mark.thorough
def test_noise_of_private_training_hides_the_image():
    clients = image_clients(perceptron, number=4)
    method = pf.algorithms.FedAvg(lr=0.1, batch_size=4, local_steps=1, privacy=pf.Privacy(target_epsilon=1.0))
    (entry,) = attack(clients, method)
    assert entry.best_psnr < 20


@pytest.mark.parametrize("method", ["fedrep", "fedbabu", "scaffold", "fedfomo", "qfedavg", "ifca", "fml"])
@pytest.mark.one_case
def test_weights_that_other_methods_send_are_attacked_too(method):
    """A body with the head at home, differences, weights that are first sent up, and a network that clients share."""
    fields = {"lr": 0.1, "batch_size": 0, "local_epochs": 1, "local_steps": 1}

    def one_sided():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, CLASSES_OF_CLIENT))

    clients = image_clients(one_sided, number=4)
    (entry,) = attack(clients, example_of(method).build(**fields), iterations=2)
    assert entry.candidates > 8  # those of the search, and of the first layer
    assert entry.best_psnr > 25
    assert entry.other_best_psnr < 15


def test_attacks_change_neither_clients_nor_repeat_differently():
    clients = image_clients(convolution, number=3)
    before = [client.train.x.clone() for client in clients]
    method = pf.algorithms.FedAvg(**ONE_STEP)
    first = attack(clients, method, iterations=5, restarts=2, ids=("north", "east"))
    torch.manual_seed(1)
    assert attack(clients, method, iterations=5, restarts=2, ids=("north", "east")) == first
    assert [entry.client for entry in first] == ["north", "east"]
    assert first[0].candidates == 6
    assert all(torch.equal(client.train.x, x) for client, x in zip(clients, before, strict=True))


def test_a_network_with_norms_and_dropout_is_attacked_and_left_as_it_was():
    def network():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)
        )

    net, shape = network().train(), InversionTarget((1, 6, 6), torch.tensor([0, 1]), -1.0, 1.0, steps=2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    change = {name: torch.ones_like(parameter) for name, parameter in net.named_parameters()}
    images = search_images(net, change, shape, iterations=3, restarts=2)
    assert images.shape == (4, 1, 6, 6)
    assert float(images.min()) >= -1
    assert float(images.max()) <= 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_inputs_that_are_no_images_have_label_counts_only():
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    y = torch.cat([torch.zeros(16), torch.ones(4)]).long()

    def model():
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))

    clients = [pf.Client(name, model, (x, y), (x[:4] + 9, y[:4])) for name in ("north", "south")]
    (entry,) = attack(clients, pf.algorithms.FedAvg(lr=0.05, batch_size=5))
    assert (entry.images, entry.candidates) == (0, 0)
    assert entry.describe_images() == "inputs are not images"
    assert entry.labels_right > 0.85
    assert entry.labels_right_by_guess == pytest.approx(0.7)


def test_counts_that_are_in_a_message_are_found():
    counts = torch.tensor([6, 1, 3])
    table = torch.stack([torch.rand(3), 2.5 * counts], 1)
    assert find_counts_in_message(Message({"labels": {"w": table}}), counts).source == IN_MESSAGE
    assert find_counts_in_message(Message({"labels": {"w": torch.rand(3, 4)}}), counts) is None
    some = torch.tensor([5, 0, 5])
    means = torch.rand(3, 4) * (some > 0)[:, None]
    inferred = find_counts_in_message(Message({"classes": {"means": means}}), some)
    assert inferred.source == CLASSES
    assert class_shares_overlap(inferred.shares, some) == 1.0
    (entry,) = attack(image_clients(perceptron, number=5), example_of("fedgen").build(lr=0.1))
    assert (entry.label_source, entry.labels_right) == (IN_MESSAGE, 1.0)


def test_psnr_is_that_of_the_definition():
    image, value_range = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)), 2.0
    candidates = torch.cat([image + 0.1, image - 0.02, torch.zeros(1, 1, 4, 4)])
    expected = 10 * torch.log10(torch.tensor(value_range**2 / 0.02**2))
    assert float(best_psnr_per_image(candidates, image, value_range)) == pytest.approx(float(expected), abs=1e-3)
    assert float(best_psnr_per_image(image, image, value_range)) == 100


def test_the_clients_with_the_fewest_examples_are_attacked():
    sizes = {"a": 9, "b": 3, "c": 5, "d": 3, "e": 7}
    clients = [image_clients(perceptron, number, names=(name,))[0] for name, number in sizes.items()]
    assert choose_most_exposed(clients) == ["b", "d", "c", "e"]


def test_wrong_descriptions_are_refused():
    with pytest.raises(pf.UserError, match=r"low must be below high, got low=1\.0"):
        InversionTarget((1, 2, 2), torch.tensor([0]), 1.0, 1.0)
    with pytest.raises(pf.UserError, match="steps must be at least 1, got 0"):
        InversionTarget((1, 2, 2), torch.tensor([0]), 0.0, 1.0, steps=0)
    with pytest.raises(pf.UserError, match="has a PSNR if there were candidates"):
        MessageAudit("a", 1, 1, 4, 1, 0, 20.0, 20.0, None, None, "", None, 0.5)
