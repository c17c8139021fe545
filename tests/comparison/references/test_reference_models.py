"""References beside the methods: closed cases, the form of their outputs, and clients that are hard to fit."""

import time
from functools import partial

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, Local
from polyfed.comparison.references.reference_models import ReferenceModel, fit_client_references, train_pooled_reference
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import torch_generator
from polyfed.data import Examples


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch_generator(seed))


def separable(n, seed, classes=2, features=5):
    """Inputs whose first features tell the class: one for each, larger by six standard deviations."""
    y = torch.arange(n) % classes
    return normal(n, features, seed=seed) + 6 * torch.eye(classes, features)[y], y


def clients(sizes=(60, 40), classes=2, model=None):
    return [
        pf.Client(f"client-{k}", model, separable(n, k, classes), separable(25, 10 + k, classes))
        for k, n in enumerate(sizes)
    ]


def by_name(found):
    return {reference.name: reference.outputs for reference in found}


def accuracy(outputs, examples):
    return float((outputs.argmax(1) == examples.labels).float().mean())


# Some of the tests below ask what a model makes of the very examples that it was fitted to.
pytestmark = pytest.mark.filterwarnings("ignore:test examples that are also training examples:UserWarning")


# -- the constant -----------------------------------------------------------------------------------------------------


def test_the_constant_of_classes_is_their_shares():
    y = torch.tensor([0] * 20 + [2] * 70 + [1] * 10)
    test = normal(7, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    references = fit_client_references([pf.Client("north", None, (normal(100, 4), y), test)])[0]
    outputs = by_name(references)["majority"]["north"]
    assert (outputs.shape, outputs.argmax(1).tolist()) == ((7, 4), [2] * 7)
    shares = outputs.double().exp()
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 7)
    assert shares[0].tolist() == pytest.approx([0.2, 0.1, 0.7, 0.0], abs=0.01)


def test_the_constant_of_labels_is_the_share_of_each():
    y = torch.zeros(100, 3)
    y[:30, 0], y[:, 1] = 1, 1
    client = pf.Client("north", None, (normal(100, 4), y), (normal(5, 4), y[:5]), task="multilabel")
    outputs = by_name(fit_client_references([client])[0])["majority"]["north"]
    assert outputs.shape == (5, 3)
    assert outputs.sigmoid()[4].tolist() == pytest.approx([0.3, 1.0, 0.0], abs=0.01)


def test_the_constant_of_numbers_is_their_mean():
    client = pf.Client("north", None, (normal(4, 2), torch.tensor([1.0, 2.0, 3.0, 6.0])), (normal(3, 2), torch.ones(3)),
                       task="regression")  # fmt: skip
    assert by_name(fit_client_references([client])[0])["mean"]["north"].tolist() == [[3.0]] * 3


# -- simple models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_simple_models_solve_a_separable_problem_and_the_constant_does_not(classes):
    found = by_name(fit_client_references(clients(classes=classes))[0])
    assert list(found) == ["majority", "logistic_regression", "gradient_boosting"]
    for client in clients(classes=classes):
        scores = {name: accuracy(outputs[client.id], client.test) for name, outputs in found.items()}
        assert scores["majority"] < 0.6
        assert scores["logistic_regression"] > 0.9
        assert scores["gradient_boosting"] > 0.8


def test_trees_solve_what_no_line_does():
    """Exclusive or of two signs."""

    def data(n, seed):
        x = normal(n, 2, seed=seed)
        return x, ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()

    client = pf.Client("north", None, data(400, 0), data(200, 1))
    found = by_name(fit_client_references([client])[0])
    assert accuracy(found["logistic_regression"]["north"], client.test) < 0.7
    assert accuracy(found["gradient_boosting"]["north"], client.test) > 0.9


def test_regression_is_solved():
    def data(n, seed):
        x = normal(n, 3, seed=seed)
        return x, torch.stack([100 + 10 * x[:, 0], x[:, 1] - x[:, 2]], 1)

    client = pf.Client("north", None, data(200, 0), data(50, 1), task="regression")
    found = by_name(fit_client_references([client])[0])
    assert list(found) == ["mean", "ridge", "gradient_boosting"]
    spread = client.test.labels.std(0)
    assert ((found["ridge"]["north"] - client.test.labels).abs() < 0.1 * spread).all()
    assert ((found["gradient_boosting"]["north"] - client.test.labels).square().mean(0).sqrt() < 0.5 * spread).all()


def test_several_labels_have_a_model_each():
    def data(n, seed):
        x = normal(n, 3, seed=seed)
        return x, torch.stack([x[:, 0] > 0, x[:, 1] < 0.5, torch.ones(n, dtype=torch.bool)], 1).float()

    client = pf.Client("north", None, data(200, 0), data(100, 1), task="multilabel")
    outputs = by_name(fit_client_references([client])[0])["logistic_regression"]["north"]
    assert ((outputs > 0).float() == client.test.labels).float().mean() > 0.95


@pytest.mark.slow
def test_irrelevant_features_call_for_a_strong_penalty():
    """60 examples, 200 features of which one tells half of the class: with C = 1 the model is sure of what it does not know,
    and worse than the constant."""

    def data(n, seed):
        y = torch.arange(n) % 2
        x = normal(n, 200, seed=seed)
        x[:, 0] += 1.5 * y
        return x, y

    client = pf.Client("north", None, data(60, 0), data(400, 1))
    found = by_name(fit_client_references([client])[0])
    loss = partial(nn.functional.cross_entropy, target=client.test.labels)
    assert loss(found["logistic_regression"]["north"]) < 1.02 * loss(found["majority"]["north"])


def test_validation_examples_are_fitted_too():
    """Class 1 is in the validation examples alone."""
    x, y = separable(60, 0)
    test = separable(20, 1)
    client = pf.Client("north", None, (x[y == 0], y[y == 0]), test, val=(x[y == 1], y[y == 1]))
    assert accuracy(by_name(fit_client_references([client])[0])["logistic_regression"]["north"], client.test) > 0.9


def test_outputs_follow_the_order_of_the_test_examples():
    x, y = separable(60, 0)
    rows = torch.randperm(60, generator=torch_generator(0))
    store = Examples(x, y)
    one = pf.Client("north", None, store.select(torch.arange(40)), store.select(torch.arange(40, 60)))
    other = pf.Client("north", None, store.select(torch.arange(40)), store.select(rows[rows >= 40]))
    for before, after in zip(fit_client_references([one])[0], fit_client_references([other])[0], strict=True):
        assert torch.equal(before.outputs["north"][rows[rows >= 40] - 40], after.outputs["north"])


def test_inputs_are_those_that_networks_get():
    """A transform that makes rows of numbers of images, and one that hides all."""
    y = torch.arange(80) % 2
    images = (200 * y[:, None, None, None] + torch.zeros(80, 1, 4, 4)).to(torch.uint8)
    data = [
        Examples(images, y, index=rows, transform=lambda x: x.flatten(1).float()) for rows in torch.arange(80).split(40)
    ]
    client = pf.Client("north", None, *data)
    assert accuracy(by_name(fit_client_references([client])[0])["logistic_regression"]["north"], client.test) == 1
    data = [
        Examples(images, y, index=rows, transform=lambda x: 0 * x.flatten(1).float())
        for rows in torch.arange(80).split(40)
    ]
    client = pf.Client("north", None, *data)
    assert accuracy(by_name(fit_client_references([client])[0])["logistic_regression"]["north"], client.test) == 0.5


@pytest.mark.parametrize(
    ("x", "transform"),
    [
        (torch.zeros(40, 1, 4, 4), None),
        (torch.zeros(40, 9, dtype=torch.int64), None),  # tokens
        (torch.zeros(40, 2), lambda x: x / x),  # not a number
    ],
)
def test_other_inputs_have_the_constant_alone(x, transform):
    train = Examples(x, torch.arange(40) % 2, transform=transform)
    odd = pf.Client("odd", None, train, train.select(torch.arange(4)))
    assert list(by_name(fit_client_references([odd])[0])) == ["majority"]
    assert list(by_name(fit_client_references([*clients(), odd])[0])) == ["majority"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "labels",
    [
        [1] * 30,  # one class
        [0] * 28 + [1, 2],  # two that occur once
        *(pytest.param(y, marks=pytest.mark.slow) for y in ([0] * 29 + [3], [0, 1], [2], [0] * 15 + [1] * 15)),
    ],
)
def test_clients_that_are_hard_to_fit(labels):
    """Without warnings, which are errors here: finite outputs for all classes of the federation, and the right one for a
    client that has one."""
    y = torch.tensor(labels)
    x = normal(len(y), 6)
    x[:, 0], x[:, 1] = 0.1, 1e6 * y  # constant; on a scale of its own, and separable
    hard = pf.Client("hard", None, (x, y), (x[:5], y[:5]))
    easy = pf.Client("easy", None, separable(50, 0, 5), separable(10, 1, 5))
    for reference in fit_client_references([hard, easy])[0]:
        assert reference.outputs["hard"].shape == (min(5, len(y)), 5)
        if len(set(labels)) == 1:
            assert accuracy(reference.outputs["hard"], hard.test) == 1
    outputs = by_name(fit_client_references([hard, easy])[0])["logistic_regression"]["hard"]
    assert (outputs.softmax(1)[:, [k for k in range(5) if k not in labels]] < 1e-5).all()


@pytest.mark.thorough
def test_a_fit_that_is_stopped_early_does_not_warn():
    """Features that are almost the same, for which scikit-learn's solver takes more steps than it gets."""
    x = normal(120, 120).cumsum(1)
    client = pf.Client("north", None, (x, x[:, :4].argmax(1)), (x[:5], x[:5, :4].argmax(1)))
    assert accuracy(by_name(fit_client_references([client])[0])["logistic_regression"]["north"], client.test) == 1


def test_a_feature_that_varies_in_the_test_examples_alone_does_not_matter():
    """Its standard deviation where models are fitted is nothing but rounding."""
    x, y = separable(61, 0)
    x, test = x.double(), separable(20, 1)
    x[:, 4], test[0][:, 4] = 0.1, 0.5
    assert x[:, 4].numpy().std() > 0
    client = pf.Client("north", None, (x, y), (test[0].double(), test[1]))
    assert accuracy(by_name(fit_client_references([client])[0])["logistic_regression"]["north"], client.test) > 0.9


def test_few_numbers_are_no_reason_to_fail():
    for n in (1, 2, 3, 5):
        client = pf.Client(
            "north", None, (normal(n, 4), torch.ones(n)), (normal(3, 4), torch.ones(3)), task="regression"
        )
        for reference in fit_client_references([client])[0]:
            assert reference.outputs["north"].tolist() == [[pytest.approx(1.0)]] * 3


def test_the_same_call_gives_the_same_whoever_else_takes_part():
    one, again, few = (fit_client_references(clients(sizes), seed=3)[0] for sizes in ((60, 40), (60, 40), (60,)))
    for a, b, c in zip(one, again, few, strict=True):
        assert a.name == b.name == c.name
        assert all(torch.equal(a.outputs[i], b.outputs[i]) for i in a.outputs)
        assert torch.equal(a.outputs["client-0"], c.outputs["client-0"])


@pytest.mark.slow
def test_it_is_quick():
    data = [pf.Client(f"{k}", None, (normal(100, 30, seed=k), torch.arange(100) % 2), separable(50, 9, features=30))
            for k in range(4)]  # fmt: skip
    fit_client_references(data)[0]  # imports
    begin = time.process_time()
    fit_client_references(data)[0]
    assert time.process_time() - begin < 2


def test_trees_that_would_take_minutes_are_left_out():
    x, y = torch.zeros(30, 11_000), torch.arange(30) % 2
    x[:, 0] = y
    client = pf.Client("north", None, (x, y), (x[:4], y[:4]))
    found = by_name(fit_client_references([client])[0])
    assert list(found) == ["majority", "logistic_regression"]
    assert accuracy(found["logistic_regression"]["north"], client.test) == 1


def test_outputs_must_be_finite():
    with pytest.raises(UserError, match="ridge: outputs for client 'north' must be finite"):
        ReferenceModel("ridge", "", {"north": torch.tensor([[torch.nan]])})


def test_tasks_must_be_one():
    other = pf.Client("other", None, (normal(9, 5), torch.ones(9)), (normal(9, 5), torch.ones(9)), task="regression")
    with pytest.raises(UserError, match="one task"):
        fit_client_references([*clients(), other])[0]


# -- pooled -----------------------------------------------------------------------------------------------------------


def line():
    return nn.Linear(5, 4)


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))


def halves(models=(line, mlp, line)):
    """Each client trains on two of four classes and is tested on all."""
    found = []
    for k, model in enumerate(models):
        x, y = separable(80, k, classes=4)
        own = (y + k) % 4 < 2
        found.append(pf.Client(f"client-{k}", model, (x[own], y[own]), separable(40, 10 + k, classes=4)))
    return found


TRAINING = Local(lr=0.1, local_epochs=3, batch_size=10)


def test_pooled_knows_the_classes_that_a_client_lacks():
    data = halves()
    alone = pf.federate(data, TRAINING, rounds=5, workers=0)
    pooled = train_pooled_reference(data, TRAINING, rounds=5, seed=0)
    assert pooled.name == "pooled"
    for client in data:
        assert accuracy(predict(alone.model(client.id), client.test), client.test) < 0.6
        assert accuracy(pooled.outputs[client.id], client.test) > 0.9


def test_pooled_is_one_network_for_each_architecture():
    """Clients of one architecture with the same test examples have the same outputs, those of another have others."""
    data = [pf.Client(c.id, c.model, c.train, separable(40, 10, 4)) for c in halves()]
    outputs = train_pooled_reference(data, TRAINING, rounds=1, seed=0).outputs
    assert torch.equal(outputs["client-0"], outputs["client-2"])
    assert not torch.equal(outputs["client-0"], outputs["client-1"])
    again = train_pooled_reference(data, TRAINING, rounds=1, seed=0).outputs
    assert all(torch.equal(outputs[i], again[i]) for i in outputs)
    assert not torch.equal(
        outputs["client-0"], train_pooled_reference(data, TRAINING, rounds=1, seed=1).outputs["client-0"]
    )


def test_pooled_starts_where_the_clients_do_and_takes_full_batches_of_all():
    """One full batch: a step of gradient descent on the examples of all, from the client's own first weights."""
    data = halves((line, line))
    training = FedAvg(lr=0.5, batch_size=0, local_epochs=1)
    found = train_pooled_reference(data, training, rounds=1, seed=7).outputs["client-0"]
    network = line()
    network.load_state_dict(initial_state(line, 7))
    x, y = (torch.cat([getattr(c.train, name) for c in data]) for name in ("x", "y"))
    grads = torch.autograd.grad(nn.functional.cross_entropy(network(x), y), list(network.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(network.parameters(), grads, strict=True):
            parameter -= 0.5 * grad
        assert torch.allclose(found, network(data[0].test.x), atol=1e-5)


def test_pooled_takes_as_many_times_more_steps_as_there_are_clients():
    """Full batches of all: two clients that take 3 steps are 6 steps of the pool."""
    data = halves((line, line))
    steps = train_pooled_reference(data, Local(lr=0.1, batch_size=0, local_steps=3), rounds=1, seed=0)
    epochs = train_pooled_reference(data, Local(lr=0.1, batch_size=0, local_epochs=6), rounds=1, seed=0)
    assert torch.allclose(steps.outputs["client-0"], epochs.outputs["client-0"], atol=1e-6)


def test_pooled_of_clients_with_transforms_of_their_own():
    """Each client's inputs reach the pool as its network gets them."""
    scaled = [
        pf.Client(c.id, c.model, Examples(c.train.x / k, c.train.y, transform=partial(torch.mul, other=k)), c.test)
        for k, c in zip((2.0, 4.0), halves((line, line)), strict=True)
    ]
    one = train_pooled_reference(scaled, TRAINING, rounds=1, seed=0).outputs["client-0"]
    other = train_pooled_reference(halves((line, line)), TRAINING, rounds=1, seed=0).outputs["client-0"]
    assert torch.allclose(one, other, atol=1e-5)


def test_pooled_of_views_of_one_store():
    x, y = (torch.cat([getattr(c.train, name) for c in halves((line, line))]) for name in ("x", "y"))
    store = Examples(x, y)
    parts = torch.arange(len(x)).split([len(c.train) for c in halves((line, line))])
    views = [pf.Client(c.id, line, store.select(p), c.test) for p, c in zip(parts, halves((line, line)), strict=True)]
    one, other = (train_pooled_reference(data, TRAINING, rounds=1, seed=0) for data in (views, halves((line, line))))
    assert torch.equal(one.outputs["client-1"], other.outputs["client-1"])


def test_pooled_of_regression():
    data = [
        pf.Client(n, lambda: nn.Linear(2, 1), (x := normal(30, 2, seed=k), x[:, 0]), (x, x[:, 0]), task="regression")
        for k, n in enumerate(("north", "south"))
    ]
    found = train_pooled_reference(data, Local(lr=0.3), rounds=20, seed=0)
    assert (found.outputs["north"][:, 0] - data[0].test.x[:, 0]).abs().max() < 0.05


def test_what_cannot_be_pooled_has_no_such_reference():
    def of(model, features=5, classes=4):
        data = separable(20, 0, classes, features)
        return pf.Client(f"other-{features}-{classes}", model, data, data)

    assert train_pooled_reference([*halves(), of(None)], TRAINING, rounds=1, seed=0) is None
    assert (
        train_pooled_reference([*halves(), of(lambda: nn.Linear(6, 4), features=6)], TRAINING, rounds=1, seed=0) is None
    )
    assert (
        train_pooled_reference([*halves(), of(lambda: nn.Linear(5, 5), classes=5)], TRAINING, rounds=1, seed=0) is None
    )
    one, other = (
        pf.Client(name, lambda: nn.Linear(5, 4), Examples(*separable(20, 0, 4), augment=augment), separable(20, 0, 4))
        for name, augment in (("north", None), ("south", lambda x, generator: x))
    )
    assert train_pooled_reference([one, other], TRAINING, rounds=1, seed=0) is None
