"""The one training loop, against PyTorch's own and against theory."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.algorithms import FedAvg, FedProx, Local
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import build_module
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.training import precision
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit
from polyfed.core.training.precision import check_precision
from polyfed.models import ModelSpec


def data(number=23, classes=3):
    generator = torch_generator(1)
    return Examples(torch.randn(number, 5, generator=generator), torch.arange(number) % classes)


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


OPTIMISERS = [
    ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    ),
    ({"optimizer": "adam", "weight_decay": 1e-2}, lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=1e-2)),
]


@pytest.mark.parametrize(("options", "optimizer"), OPTIMISERS)
def test_fit_is_the_loop_that_anyone_would_write(options, optimizer):
    examples, epochs, size = data(), 3, 8
    ours, theirs = build_module(net, 0), build_module(net, 0)
    found = fit(ours, examples, FedAvg(local_epochs=epochs, batch_size=size, **options), lr=0.1, seed=5)
    generator, losses = torch_generator(derive_seed(5, "batches")), []
    steps = optimizer(list(theirs.parameters()))
    for _ in range(epochs):
        for rows in torch.randperm(len(examples), generator=generator).split(size):
            steps.zero_grad()
            value = F.cross_entropy(theirs(examples.x[rows]), examples.y[rows])
            value.backward()
            steps.step()
            losses.append(value.item() * len(rows))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert found.loss == pytest.approx(sum(losses) / (epochs * len(examples)), rel=1e-5)
    assert found.steps == len(losses)


def test_local_steps_counts_minibatches_across_epochs():
    counted = []
    model = build_module(net, 0)
    model.register_forward_hook(lambda *_: counted.append(1))
    fit(model, data(), FedAvg(local_steps=7, local_epochs=99, batch_size=8), lr=0.1, seed=0)
    assert len(counted) == 7  # 23 examples are 3 batches an epoch
    few, many = build_module(net, 0), build_module(net, 0)
    fit(few, data(), FedAvg(local_steps=6, batch_size=8), lr=0.1, seed=0)
    fit(many, data(), FedAvg(local_epochs=2, batch_size=8), lr=0.1, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(few.parameters(), many.parameters(), strict=True))


def test_each_example_is_seen_once_an_epoch():
    seen = []

    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x):
            seen.extend(x.flatten().tolist())
            return self.layer(x)

    examples = Examples(torch.arange(11.0).view(11, 1), torch.zeros(11, dtype=torch.int64))
    fit(Watch(), examples, FedAvg(local_epochs=2, batch_size=4), lr=0.1, seed=0)
    assert sorted(seen[:11]) == sorted(seen[11:]) == list(range(11))
    assert seen[:11] != seen[11:]


def test_clipping_bounds_the_step():
    model, before = build_module(net, 0), build_module(net, 0)
    fit(model, data(), FedAvg(local_steps=1, batch_size=0, clip_norm=0.01), lr=1.0, seed=0)
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    norm = sum((a - b).square().sum() for a, b in pairs).sqrt().item()
    assert norm == pytest.approx(0.01, rel=1e-4)


def test_sparse_gradients_are_clipped_as_dense_ones():
    """torch has no norm of the sparse gradients of an embedding."""
    data = Examples(torch.tensor([[0, 1], [2, 1]]), torch.tensor([0, 1]))
    trained = []
    for sparse in (False, True):
        model = nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        fit(model, data, FedAvg(local_steps=2, batch_size=0, clip_norm=0.1), lr=0.5, seed=0)
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_label_smoothing_reaches_the_loss():
    options = [FedAvg(local_steps=1, batch_size=0, label_smoothing=s) for s in (0.0, 0.5)]
    plain, smooth = (fit(build_module(net, 0), data(), o, lr=0.1, seed=0).loss for o in options)
    model, examples = build_module(net, 0), data()
    expected = F.cross_entropy(model(examples.x), examples.y, label_smoothing=0.5).item()
    assert plain != smooth
    assert smooth == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_the_methods_own_gets_inputs_outputs_and_targets():
    """Written out, the task's own loss trains as it does by itself; and what it returns is what is reported."""
    ours, theirs, seen = build_module(net, 0), build_module(net, 0), []

    def loss(batch):
        seen.append((batch.inputs, batch.outputs, batch.targets))
        assert batch.representation is None
        return F.cross_entropy(batch.outputs, batch.targets)

    reported = fit(ours, data(), FedAvg(batch_size=8), lr=0.1, seed=5, loss=loss)
    assert reported == fit(theirs, data(), FedAvg(batch_size=8), lr=0.1, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert [len(x) for x, _, _ in seen] == [8, 8, 7]
    torch.testing.assert_close(seen[0][1], build_module(net, 0)(seen[0][0]))
    assert torch.cat([y for _, _, y in seen]).bincount().tolist() == data().y.bincount().tolist()
    assert fit(ours, data(), FedAvg(), lr=0.1, seed=0, loss=lambda batch: 0 * batch.outputs.sum() + 7).loss == 7


def test_a_last_batch_of_one_does_not_break_batch_norm():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    fit(model, data(17), FedAvg(batch_size=8), lr=0.1, seed=0)
    assert model[1].num_batches_tracked.item() == 2


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [1, 1, 1]), ("exponential", [1, 0.5, 0.25]), ("cosine", [1, 0.75, 0.25])]
)
def test_schedules(schedule, expected):
    method = FedAvg(lr=1.0, schedule=schedule, decay=0.5)
    assert [method.lr_at(t, 3) for t in (1, 2, 3)] == pytest.approx(expected)


def test_the_schedule_reaches_the_clients():
    state = {"model": {}}
    method = FedProx(lr=1.0, schedule="exponential", decay=0.1)
    from polyfed.core.algorithm import ClientInfo

    assert [method.dispatch(state, ClientInfo("a", t, 3)).scalars["lr"] for t in (1, 2, 3)] == pytest.approx(
        [1, 0.1, 0.01]
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("local_epochs", 0), ("local_steps", 0), ("batch_size", -1), ("lr", 0.0), ("lr", float("nan")), ("decay", 0.0),
        ("momentum", 1.0), ("nesterov", True), ("weight_decay", -1.0), ("clip_norm", 0.0), ("label_smoothing", 1.0),
        ("schedule", "cosin"), ("optimizer", "adamv"), ("buffers", "drop"), ("precision", "fp16"),
    ],
)  # fmt: skip
def test_hyper_parameters_out_of_range_are_refused_with_the_value(field, value):
    with pytest.raises(UserError, match=field) as caught:
        FedAvg(**{field: value})
    assert str(value) in str(caught.value)


def test_methods_refuse_their_own_bad_values():
    for build in (lambda: FedProx(mu=-0.1), lambda: Local(buffers="average")):
        with pytest.raises(UserError):
            build()
    assert issubclass(FedAvg, LocalTraining)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mlp", "cnn_small", "cnn_pfedla"])
def test_networks_overfit_32_examples(name):
    shape = (1, 16, 16)
    x = torch.randn(32, *shape, generator=torch_generator(3))
    examples = Examples(x, torch.arange(32) % 4)
    model = build_module(ModelSpec(name, {}, shape, 4), 0)
    fit(model, examples, FedAvg(local_epochs=60, batch_size=8, momentum=0.9), lr=0.02, seed=0)
    assert (model(x).argmax(1) == examples.y).float().mean().item() >= 0.95


def test_multilabel_and_regression_losses():
    x = torch.randn(40, 3, generator=torch_generator(3))
    several = Examples(x, (x > 0).float())
    model = build_module(lambda: nn.Linear(3, 3), 0)
    first = fit(model, several, Local(local_epochs=1), lr=0.5, seed=0, task="multilabel").loss
    assert fit(model, several, Local(local_epochs=30), lr=0.5, seed=0, task="multilabel").loss < first
    line = Examples(x, x @ torch.tensor([[1.0], [2.0], [-1.0]]))
    model = build_module(lambda: nn.Linear(3, 1), 0)
    fit(model, line, Local(local_epochs=100), lr=0.2, seed=0, task="regression")
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.0, 2.0, -1.0]]), atol=1e-3, rtol=0)


def test_bf16_is_refused_where_it_kills_the_process(monkeypatch):
    precision._is_bf16_supported.cache_clear()
    dead = subprocess.CompletedProcess([], returncode=-4)
    monkeypatch.setattr(precision.subprocess, "run", lambda *a, **k: dead)
    with pytest.raises(UserError, match="precision='bf16' kills the process"):
        check_precision("bf16", torch.device("cpu"))
    check_precision("fp32", torch.device("cpu"))
    precision._is_bf16_supported.cache_clear()


@pytest.mark.slow
def test_bf16_trains_in_a_process_without_amx():
    """In a process of its own, because oneDNN reads the variable once; without AMX, which not every virtual machine that
    reports it can run."""
    code = (
        "import torch, polyfed as pf\n"
        "from polyfed.testing import small_clients\n"
        "run = pf.federate(small_clients(), pf.algorithms.FedAvg(lr=0.1, precision='bf16'), rounds=15, workers=0)\n"
        "full = pf.federate(small_clients(), pf.algorithms.FedAvg(lr=0.1), rounds=15, workers=0)\n"
        "a, b = (r.model('client-0').state_dict() for r in (run, full))\n"
        "assert a['head.weight'].dtype == torch.float32\n"
        "assert not torch.equal(a['head.weight'], b['head.weight'])\n"
        "print(abs(run.history[-1]['train_loss'] - full.history[-1]['train_loss']))\n"
    )
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.05


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_learning_rates_by_parameter(optimizer):
    """`rate` multiplies the learning rate by name: a parameter of factor 0.5 moves half as far, one of 0 stays."""
    data = Examples(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    moved = {}
    for key, rate in {"none": None, "some": {"weight": 0.5, "bias": 0.0}.__getitem__}.items():
        line = nn.Linear(1, 1)
        with torch.no_grad():
            line.weight.fill_(0.0), line.bias.fill_(0.0)
        options = Local(batch_size=0, optimizer=optimizer)
        fit(line, data, options, lr=0.1, seed=0, task="regression", lr_factor=rate)
        moved[key] = (line.weight.item(), line.bias.item())
    assert moved["some"][0] == pytest.approx(0.5 * moved["none"][0])
    assert moved["some"][0] != 0.0
    assert moved["some"][1] == 0.0
    assert moved["none"][1] != 0.0


def test_a_loss_gets_the_representation_that_it_asks_for():
    """What the head is given; and its gradient reaches the body."""
    model, seen = build_module(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 0), []

    def loss(batch):
        seen.append((batch.inputs, batch.representation.detach().clone()))
        return batch.representation.square().mean()

    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(8, 3, generator=torch_generator(1))
    fit(
        model,
        Examples(x, torch.zeros(8, dtype=torch.int64)),
        FedAvg(batch_size=0),
        lr=0.5,
        seed=0,
        loss=loss,
        representation="2",
    )
    torch.testing.assert_close(seen[0][1], (seen[0][0] @ before[0].T + before[1]).relu())
    assert not torch.equal(model[0].weight, before[0])
    assert torch.equal(model[2].weight, before[2])
    assert not model[2]._forward_pre_hooks, "the hook stays"


def test_which_loss_is_reported():
    """The task's own, the one that is trained on, or that with the penalty; the training is the same."""
    models, found = [], []
    for reported in ("task", "loss", "total"):
        model = build_module(net, 0)
        ways = {"loss": lambda batch: 0 * batch.outputs.sum() + 7, "penalty": lambda: torch.tensor(2.0)}
        found.append(fit(model, data(), FedAvg(batch_size=0), lr=0.1, seed=0, reported_loss=reported, **ways).loss)
        models.append(model)
    plain = fit(build_module(net, 0), data(), FedAvg(batch_size=0), lr=0.1, seed=0)
    assert found == [pytest.approx(plain.loss), 7, 9]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters(), strict=True))
