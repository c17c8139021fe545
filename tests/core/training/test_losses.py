"""What local training minimises and which examples it draws: weights of classes, a client's own loss, samplers and early
stopping, against closed forms."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedFomo, Local
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code
from polyfed.core.nn.module_cache import build_module
from polyfed.core.seeds import torch_generator
from polyfed.core.training.loop import fit
from polyfed.core.training.losses import build_loss, sampling_weights
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.checks.networks.trial_evaluation import check_losses_and_metrics_work
from polyfed.simulation.checks.settings.training_options import check_training_options
from polyfed.simulation.engines.factory import unpicklable_client_error
from polyfed.simulation.engines.ray.object_store import store_clients, unflatten_tensor
from polyfed.testing import SmallNet, assert_runs_equal, small_clients

DOUBLE = torch.float64


def data(number=24, classes=3):
    generator = torch_generator(1)
    return Examples(torch.randn(number, 6, generator=generator), torch.arange(number) % classes)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weights_of_classes_are_in_the_loss(smoothing):
    """Σ w(y_i) l_i / Σ w(y_i), written out."""
    logits, y = torch.randn(6, 3, dtype=DOUBLE, generator=torch_generator(1)), torch.tensor([0, 0, 0, 1, 1, 2])
    w = torch.tensor([0.5, 1.0, 3.0], dtype=DOUBLE)
    found = build_loss(data(), "classification", None, smoothing, (0.5, 1.0, 3.0))(logits, y)
    log_p = logits.log_softmax(1)
    hard = -(w[y] * log_p[torch.arange(6), y]).sum()
    smooth = -(w * log_p).sum() / 3
    torch.testing.assert_close(found, ((1 - smoothing) * hard + smoothing * smooth) / w[y].sum())


def test_balanced_weights():
    """n/(K n_c): each class counts as much as the others in the whole; a class that does not occur has weight 1."""
    y = torch.tensor([0] * 6 + [1] * 3 + [3])
    examples = Examples(torch.zeros(10, 1), y)
    logits = torch.randn(10, 4, dtype=DOUBLE, generator=torch_generator(2))
    loss = build_loss(examples, "classification", class_weights="balanced")
    each = -logits.log_softmax(1)[torch.arange(10), y]
    expected = (each[:6].mean() + each[6:9].mean() + each[9]) / 3
    torch.testing.assert_close(loss(logits, y), expected)
    several = Examples(torch.zeros(4, 1), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    z = torch.randn(4, 2, dtype=DOUBLE, generator=torch_generator(3))
    found = build_loss(several, "multilabel", class_weights="balanced")(z, several.y.double())
    p = torch.sigmoid(z)
    expected = -(3 * several.y * p.log() + (1 - several.y) * (1 - p).log()).mean()  # three of four are negative
    torch.testing.assert_close(found, expected)


def own(clients, loss, **more):
    return [pf.Client(c.id, c.model, c.train, c.test, c.val, loss=loss, **more) for c in clients]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "fedavg_kd",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedrep", "pfedme", "pfedla", "fedhenn_homo", "fedfomo")),
    ],
)
def test_a_clients_own_loss_is_trained_on_by_every_method(name):
    """One that is the task's gives the same run, bit for bit; one of zeros moves nothing but by what the method adds."""
    more = {"rad_size": 20, "rad_batch": 8, "local_epochs": 1} if "fedhenn" in name else {}
    if name == "fedavg_kd":
        more = {"alpha": 0.0, "teacher": "polyfed.testing:SmallNet", "teacher_rounds": 1}
    method = REGISTRY[name](lr=0.1, batch_size=8, momentum=0.0, **more)
    public = torch.randn(24, 6, generator=torch_generator(1)) if "public_data" in method.requires else None
    with restore_trusted_names_afterwards():
        trust_code("polyfed.testing:SmallNet")
        runs = [
            pf.federate(clients, method, rounds=2, workers=0, public=public)
            for clients in (small_clients(), own(small_clients(), nn.CrossEntropyLoss()))
        ]
        assert_runs_equal(*runs)
        other = pf.federate(own(small_clients(), lambda z, y: 5 * F.cross_entropy(z, y)), method, rounds=2, workers=0,
                            public=public)  # fmt: skip
    name = "head.weight"
    models = [run.model("client-0").state_dict()[name] for run in (runs[0], other)]
    assert not torch.equal(*models)


def test_an_own_loss_is_kept_where_clients_are_placed_and_told_apart():
    clients = own(small_clients(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    (flat, *_) = store_clients(clients, put=lambda large: large)
    assert flat.restore(unflatten_tensor).loss is clients[0].loss
    others = own(small_clients(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0])))
    prints = {data_fingerprint(c) for c in (clients, others, small_clients(), own(small_clients(), F.cross_entropy))}
    assert len(prints) == 4
    assert unpicklable_client_error(clients) is None
    assert "the loss" in unpicklable_client_error(own(small_clients(), lambda z, y: z.sum()))
    weighted = pf.federate(clients, FedAvg(lr=0.1), rounds=1, workers=0)
    same = pf.federate(small_clients(), FedAvg(lr=0.1, class_weights=(1.0, 2.0, 3.0)), rounds=1, workers=0)
    assert_runs_equal(weighted, same)


def test_losses_of_one_kind_are_tried_once_before_training():
    """Each client may have class weights of its own, and a pass of each client's network would delay the start."""
    built = []

    class Net(nn.Linear):
        def forward(self, x):
            built.append(len(x))
            return super().forward(x)

    one = small_clients(1)[0]
    clients = [
        pf.Client(f"client-{k}", lambda: Net(6, 3), one.train, one.test, loss=nn.CrossEntropyLoss(torch.rand(3) + k))
        for k in range(4)
    ]
    counts = []
    for several in (clients[:1], clients):
        built.clear()
        check_losses_and_metrics_work(several, ())
        counts.append(len(built))
    assert counts == [1, 1]


def test_losses_and_weights_that_do_not_fit_are_refused():
    one = small_clients(2)
    with pytest.raises(UserError, match="loss must be a function"):
        own(one, "hinge")
    with pytest.raises(UserError, match=r"a class, not a function; make one of it: loss=CrossEntropyLoss\(\)$"):
        own(one, nn.CrossEntropyLoss)
    for loss, message in (
        (
            nn.CrossEntropyLoss(reduction="none"),
            r"'client-0': its loss must return a tensor with one number, .*, got shape \(20,\)",
        ),
        (
            lambda outputs, targets: float(outputs.detach().mean()),
            "must return a tensor with one number, .*, got a float",
        ),
        (
            lambda targets, outputs: F.cross_entropy(outputs, targets),
            r"'client-0': its loss fails on outputs of shape \(20, 3\)",
        ),
        (
            nn.BCEWithLogitsLoss(),
            r"targets of shape \(20,\) \(torch.int64\): ValueError: .* called as loss\(outputs, targets\)",
        ),
        (lambda outputs, targets: F.cross_entropy(outputs.detach(), targets), "'client-0': its loss has no gradient"),
    ):
        for train in (
            lambda clients: pf.federate(clients, FedAvg(), rounds=1),
            lambda clients: pf.compare(clients, FedAvg(), rounds=1),
        ):
            with pytest.raises(UserError, match=message):
                train(own(one, loss))
    with pytest.raises(UserError, match="'client-0': class_weights and label_smoothing are of the task's loss"):
        pf.federate(own(one, F.cross_entropy), FedAvg(class_weights="balanced"), rounds=1, workers=0)
    with pytest.raises(UserError, match="has 2 numbers, but the network of client 'client-0' has 3 outputs"):
        pf.federate(one, FedAvg(class_weights=(1, 2)), rounds=1, workers=0)
    line = pf.Client(
        "a", lambda: nn.Linear(6, 1), (one[0].train.x, one[0].train.x[:, 0]), one[0].test, task="regression"
    )
    with pytest.raises(UserError, match="regression, which has no classes"):
        check_training_options([line], FedAvg(class_weights="balanced"))
    with pytest.raises(UserError, match=r"label_smoothing=0.1 is for classes, and the task is regression"):
        check_training_options([line], FedAvg(label_smoothing=0.1))
    several = (one[0].train.x, torch.ones(20, 2))
    labels = pf.Client("a", lambda: nn.Linear(6, 2), several, several, task="multilabel")
    with pytest.raises(UserError, match=r"label_smoothing=0.1 .* the task is multilabel"):
        check_training_options([labels], FedAvg(label_smoothing=0.1, class_weights=(1.0, 2.0)))
    with pytest.raises(UserError, match="draws classes alike"):
        check_training_options([line], FedAvg(sampler="balanced"))
    with pytest.raises(UserError, match="no column 'w'"):
        check_training_options(one, FedAvg(sampler="w"))
    with pytest.raises(UserError, match="weight_decay must be at least 0, got inf"):
        FedAvg(weight_decay=math.inf)
    for bad in ((-1.0,), "even", (math.nan,), (0.0, 0.0), (1e-300, 1e-300), ()):
        with pytest.raises(UserError, match="class_weights must be"):
            FedAvg(class_weights=bad)


def test_samplers():
    """Balanced: each class has one K-th of the draws, to three standard deviations. A column: rows of weight 0 never."""
    y = torch.tensor([0] * 90 + [1] * 10)
    weights = torch.tensor([1.0] * 50 + [0.0] * 50)
    examples = Examples(
        torch.arange(100.0).view(100, 1), y, columns={"w": weights.numpy(), "sex": ["f"] * 100, "sum": [1e308] * 100}
    )
    seen = []

    class Watch(nn.Linear):
        def forward(self, x):
            seen.append(x[:, 0].clone())
            return super().forward(x / 100)

    def draws(sampler):
        seen.clear()
        found = fit(Watch(1, 2), examples, Local(local_epochs=20, batch_size=10, sampler=sampler), lr=0.1, seed=3)
        assert found.steps == 200
        return torch.cat(seen)

    share = float((draws("balanced") >= 90).double().mean())
    assert abs(share - 0.5) < 3 * math.sqrt(0.25 / 2000)
    assert float(draws("w").max()) < 50
    assert torch.equal(draws("shuffle").view(20, 100).sort(1).values, torch.arange(100.0).expand(20, 100))
    for column in ("sex", "v", "sum"):
        with pytest.raises(UserError, match="column"):
            sampling_weights(examples, "classification", column)
    assert sampling_weights(examples, "classification", "shuffle") is None


def stopping():
    (client,) = small_clients(1)
    train, val = (Examples(part.x.double(), part.y) for part in (client.train, client.val))
    val = Examples(val.x, (val.y + 1) % 3)  # so that more training makes it worse
    return pf.Client("a", lambda: nn.Linear(6, 3).double(), train, train, val)


def test_early_stopping_is_the_rule_and_never_exceeds_the_budget():
    """At every budget it stops where the validation losses of the plain run say, or at the end."""
    client = stopping()

    def validation(epochs):
        model = build_module(client.model, 0)
        fit(model, client, Local(local_epochs=epochs, batch_size=5), lr=3.0, seed=1)
        return F.cross_entropy(model(client.val.x), client.val.y).item()

    losses, least, since, end = [validation(e) for e in range(1, 13)], math.inf, 0, 12
    for epoch, loss in enumerate(losses, 1):
        least, since = (loss, 0) if loss < least else (least, since + 1)
        if since == 2:
            end = epoch
            break
    assert end < 12
    for budget in (1, end - 1, end, 12):
        model, plain = (build_module(client.model, 0) for _ in range(2))
        found = fit(model, client, Local(local_epochs=budget, batch_size=5, patience=2), lr=3.0, seed=1)
        assert found.steps == 4 * min(budget, end)
        fit(plain, client, Local(local_epochs=min(budget, end), batch_size=5), lr=3.0, seed=1)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    counted = fit(build_module(client.model, 0), client, Local(local_steps=7, batch_size=5, patience=1), lr=3.0, seed=1)
    assert counted.steps <= 7


def test_early_stopping_needs_validation_examples():
    clients = [pf.Client(c.id, SmallNet, c.train, c.test) for c in small_clients()]
    with pytest.raises(UserError, match="patience=1 needs validation examples, and client 'client-0' has none"):
        pf.federate(clients, FedAvg(patience=1), rounds=1, workers=0)
    with pytest.raises(UserError, match="examples without a client"):
        fit(build_module(SmallNet, 0), data(), Local(patience=1), lr=0.1, seed=0)
    with pytest.raises(UserError, match="has no validation examples to stop by"):
        fit(build_module(SmallNet, 0), clients[0], Local(patience=1), lr=0.1, seed=0)
    run = pf.federate(small_clients(), FedFomo(patience=1, local_epochs=3), rounds=2, workers=0)
    assert run.history[-1]["train_loss"] is not None
