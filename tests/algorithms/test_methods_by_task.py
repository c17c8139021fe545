"""Every method either trains the clients of a task, or refuses them by a sentence before round 1."""

import dataclasses

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.errors import UserError

pytestmark = pytest.mark.thorough

N, TEST = 10, 4
QUICK = {"lr": 0.01, "batch_size": 4, "rad_size": 8, "rad_batch": 4, "public_size": 8}
SHARED = {name: field for name, method in REGISTRY.items() for field in ("shared", "teacher")
          if field in method.__dataclass_fields__}  # fmt: skip


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_classes(seed, number, *shape):
    values = torch.randint(number, shape, generator=torch.Generator().manual_seed(seed))
    values.flatten()[:number] = torch.arange(number)
    return values


def vector(outputs):
    return lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, outputs))


UNET = pf.models.ModelSpec("unet", {"width": 2, "depth": 1}, (1, 16, 16), 2)
TAGGER = pf.models.ModelSpec("lstm_tagger", {"vocabulary": 9, "embedding": 4, "hidden": 4}, (5,), 3)
CLIENTS = {
    "classification": (vector(2), lambda k, n: draw(k, n, 6), lambda k, n: draw_classes(k, 2, n)),
    "multilabel": (vector(2), lambda k, n: draw(k, n, 6), lambda k, n: draw_classes(k, 2, n, 2)),
    "regression": (vector(2), lambda k, n: draw(k, n, 6), lambda k, n: draw(k + 9, n, 2)),
    "survival": (
        vector(1),
        lambda k, n: draw(k, n, 6),
        lambda k, n: torch.stack([draw(k + 9, n).abs() + 1, draw_classes(k, 2, n).float()], 1),
    ),
    "forecasting": (vector(1), lambda k, n: draw(k, n, 6), lambda k, n: draw(k + 9, n, 1)),
    "tokens": (TAGGER, lambda k, n: draw_classes(k, 8, n, 5) + 1, lambda k, n: draw_classes(k, 3, n, 5)),
    "segmentation": (UNET, lambda k, n: draw(k, n, 1, 16, 16), lambda k, n: draw_classes(k, 2, n, 16, 16)),
}
"""Task -> a network, and functions of a seed and a number of examples that make inputs and targets."""
OTHER_SHARED = {
    "tokens": {"name": "lstm_tagger", "vocabulary": 9, "embedding": 4, "hidden": 4},
    "segmentation": {"name": "unet", "width": 2, "depth": 1},
}


SHOWS_IMAGES = ("classification", "multilabel", "regression", "survival")
"""Tasks with one output vector an example, whose inputs may be images, for methods that bring networks for images."""


def build_clients(task, images=False):
    model, inputs, targets = CLIENTS[task]
    if images and task in SHOWS_IMAGES:
        model, inputs = None, lambda k, n: draw(k, n, 1, 8, 8)

    def examples(seed, number):
        return inputs(seed, number), targets(seed, number)

    return [
        pf.Client(f"site-{k}", model, examples(k, N), examples(k + 3, TEST), examples(k + 6, TEST), task=task)
        for k in range(2)
    ]


def build_method(name, **more):
    fields = {field.name for field in dataclasses.fields(REGISTRY[name]) if field.init}
    card = REGISTRY[name].card
    return REGISTRY[name](**{k: v for k, v in {**QUICK, **card.small, **more}.items() if k in fields})


def try_method(name, task, **more):
    """Trains two rounds; returns the sentence of a refusal before round 1, or "" if there was none."""
    method = build_method(name, **more)
    clients = build_clients(task, images="images" in method.requires)
    public = CLIENTS[task][1](12, 20) if "public_data" in method.requires else None
    try:
        run = pf.federate(clients, method, rounds=2, public=public, workers=0, quiet=True, seed=0)
    except (pf.ClientError, pf.RoundError):  # which are user errors, too
        raise
    except UserError as error:
        return str(error)
    assert len(run.history) == 2
    return ""


def test_the_table_has_every_task():
    assert CLIENTS.keys() == pf.tasks.REGISTRY.keys()


@pytest.mark.filterwarnings("ignore:FedBN. the network has no norm layer:RuntimeWarning")
@pytest.mark.parametrize("task", CLIENTS)
@pytest.mark.parametrize("name", REGISTRY)
def test_a_method_trains_the_clients_of_a_task_or_refuses_them_before_round_1(name, task):
    refusal = try_method(name, task)
    words = (
        "one class per example",
        "needs images",
        "brings networks",
        "give another",
        "without an event",
        "low-rank adapters",
    )
    assert not refusal or any(part in refusal for part in words), refusal


@pytest.mark.parametrize("task", OTHER_SHARED)
@pytest.mark.parametrize(("name", "field"), SHARED.items())
def test_a_shared_network_with_outputs_of_the_task_is_trained(name, field, task):
    refusal = try_method(name, task, **{field: OTHER_SHARED[task]})
    assert "nn.Linear" in refusal if (name, task) == ("fedmrl", "segmentation") else refusal == ""
