"""Local distillation: phase 1 is FedAvg, α = 0 is Local, the loss is the one of the paper, and the teacher travels once.

The margin of the learning test is about half of what three seeds showed. Nine clients with 20 digits each and three
architectures: Local 0.73, 0.69, 0.71; α = 0 0.74, 0.70, 0.71; distilled 0.83, 0.80, 0.83; the teacher 0.88, 0.91, 0.91.
"""

import re

import pytest
import torch
import yaml
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg, FedAvgKD, Local
from polyfed.algorithms.distillation.base.output_matching import softened_kl_divergence
from polyfed.cli.commands.options.configuration_parser import parse_configuration
from polyfed.cli.main import main
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import build_module, fill_module, initial_state
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.data import Examples
from polyfed.models import ModelSpec
from polyfed.simulation.experiment import build_experiment
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import SmallNet, assert_runs_equal, small_clients

OPTIONS = {"lr": 0.05, "momentum": 0.5, "batch_size": 8, "local_epochs": 2}
SMALL = "polyfed.testing:SmallNet"  # a teacher with BatchNorm and dropout


def wide_net():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def mixed_clients():
    nets = [wide_net, SmallNet, wide_net]
    return [pf.Client(c.id, net, c.train, c.test) for c, net in zip(small_clients(), nets, strict=True)]


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


def phase_two(teacher, rounds=9):
    """The server's state when a teacher has been trained."""
    return {"model": teacher, "rounds_left": 0, "taught": []}


def distil(method, client, teacher, own=None, seed=5, round_number=6):
    """One round of phase 2 for a client: reply and private state."""
    with exclusive_single_torch_thread_with_grad():
        own = method.client_init(client, 3) if own is None else own
        down = method.dispatch(phase_two(teacher), ClientInfo(client.id, round_number, 9))
        return method.local_update(down, own, client, seed)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# -- phase 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "weighted"), [("average", True), ("local", False), ("recompute", True)])
def test_the_teacher_is_fedavgs_model_bit_for_bit(policy, weighted):
    """In cohorts of two of three clients, two of which have another network; and its metrics are FedAvg's."""
    options = OPTIONS | {"weighted": weighted, "buffers": policy}
    settings = {"seed": 3, "workers": 0, "clients_per_round": 2}
    method = FedAvgKD(teacher=SMALL, teacher_lr=0.1, teacher_rounds=3, **options)
    found = pf.federate(mixed_clients(), method, rounds=5, **settings)
    alike = [pf.Client(c.id, SmallNet, c.train, c.test) for c in mixed_clients()]
    fedavg = pf.federate(alike, FedAvg(**options | {"lr": 0.1, "schedule": "cosine"}), rounds=3, **settings)
    assert_equal(found.last.state["model"], fedavg.last.state["model"])
    for ours, theirs in zip(found.history, fedavg.history, strict=False):
        for client, row in theirs["clients"].items():
            own = ours["clients"][client]
            assert (own["teacher_accuracy"], own["teacher_loss"]) == (row["accuracy"], row["loss"])
    told = [[row["teacher_loss"] for row in record["clients"].values()] for record in found.history]
    assert told[1] != told[2] == told[3] == told[4]


def test_learning_rates_of_both_phases():
    method = FedAvgKD(lr=1.0, schedule="exponential", decay=0.5, teacher_lr=8.0, teacher_rounds=2)
    state = method.server_init(ServerContext(0, 5, ()))
    rates = [method.dispatch(state, ClientInfo("a", t, 5)).scalars["lr"] for t in (1, 2)]
    state = phase_two({"w": torch.zeros(1)})
    rates += [method.dispatch(state, ClientInfo("a", t, 5)).scalars["lr"] for t in (3, 4, 5)]
    assert rates == pytest.approx([8, 4, 1, 0.5, 0.25])
    assert [FedAvgKD().server_init(ServerContext(0, rounds, ()))["rounds_left"] for rounds in (1, 2, 5)] == [1, 1, 3]


# -- phase 2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [wide_net, SmallNet])
def test_without_the_teachers_share_it_is_local_training_bit_for_bit(net):
    client = pf.Client("a", net, small_clients()[1].train, small_clients()[1].test)
    options = OPTIONS | {"label_smoothing": 0.1}
    method, local = FedAvgKD(alpha=0.0, teacher=SMALL, **options), Local(**options)
    own, alone = None, local.client_init(client, 3)
    for t in (6, 7):
        reply, own = distil(method, client, initial_state(SmallNet, 8), own, seed=t, round_number=t)
        with exclusive_single_torch_thread_with_grad():
            theirs, alone = local.local_update(local.dispatch({}, ClientInfo("a", t, 9)), alone, client, t)
        assert_equal(own["student"], alone["model"])
        assert reply == theirs


LOGITS = {
    "classification": lambda z, t: Categorical(logits=z / t),
    "multilabel": lambda z, t: Bernoulli(logits=z / t),
    "regression": lambda z, t: Normal(z, t),
}


@pytest.mark.parametrize("task", LOGITS)
@pytest.mark.parametrize("temperature", [0.7, 20.0])
def test_the_divergence_is_kl_of_the_teacher_from_the_student(task, temperature):
    teacher, student = (3 * random(seed, 7, 4, dtype=torch.float64) for seed in (1, 2))
    expected = kl_divergence(*(LOGITS[task](z, temperature) for z in (teacher, student))).mean()
    torch.testing.assert_close(softened_kl_divergence(teacher, student, temperature, task), expected)
    student.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda z: softened_kl_divergence(teacher, z, temperature, task), student)
    same = softened_kl_divergence(teacher, teacher.clone().requires_grad_(True), temperature, task)
    assert same.item() == 0
    coarse = softened_kl_divergence(teacher.to(torch.bfloat16), student.detach().to(torch.bfloat16), temperature, task)
    assert coarse.dtype == torch.float32


def test_at_high_temperatures_the_students_centred_logits_are_drawn_to_the_teachers():
    """2T²·KL tends to their mean squared distance (Hinton et al. 2015, section 2.1), so the factor keeps the teacher's
    share of the gradient for any T."""
    teacher, student = (random(seed, 7, 4, dtype=torch.float64) for seed in (1, 2))
    gap = (teacher - teacher.mean(1, keepdim=True)) - (student - student.mean(1, keepdim=True))
    for temperature in (1e3, 1e4):
        value = 2 * temperature**2 * softened_kl_divergence(teacher, student, temperature)
        torch.testing.assert_close(value, gap.square().mean(), rtol=10 / temperature, atol=0)


@pytest.mark.parametrize("task", LOGITS)
def test_a_step_descends_the_papers_loss(task):
    """One full-batch step against autograd on the loss as written, with the distributions of torch."""
    x, labels = random(1, 9, 6), random(2, 9, 3)
    y = {"classification": torch.arange(9) % 3, "multilabel": (labels > 0).float(), "regression": labels}[task]
    client = pf.Client("a", wide_net, (x, y), (x, y), task=task)
    smoothing = 0.1 if task == "classification" else 0.0
    method = FedAvgKD(teacher=SMALL, alpha=0.6, temperature=4.0, lr=0.2, batch_size=0, label_smoothing=smoothing)
    weights = initial_state(SmallNet, 8)
    reply, own = distil(method, client, weights)

    teacher, student = build_module(SmallNet, 0).eval(), build_module(wide_net, 0)
    fill_module(teacher, weights)
    fill_module(student, initial_state(wide_net, 3))
    outputs, target = student(x), teacher(x).detach()
    hard = {
        "classification": lambda: F.cross_entropy(outputs, y, label_smoothing=0.1),
        "multilabel": lambda: F.binary_cross_entropy_with_logits(outputs, y),
        "regression": lambda: 0.5 * F.mse_loss(outputs, y),
    }[task]()
    kl = kl_divergence(LOGITS[task](target, 4.0), LOGITS[task](outputs, 4.0)).mean()
    loss = 0.4 * hard + 0.6 * 2 * 4.0**2 * kl
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    for (name, parameter), gradient in zip(student.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(own["student"][name], parameter.detach() - 0.2 * gradient, rtol=1e-4, atol=1e-6)
    assert reply.scalars == {"train_loss": pytest.approx(loss.item(), rel=1e-5), "num_examples": 9}
    assert reply.nbytes == 0
    assert_equal(own["teacher"], weights)


def flip(x, generator):
    return torch.where(torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5, x.flip(-1), x)


def test_a_student_that_is_the_teacher_stays_as_it_is():
    """Both see the same augmented images, and the teacher is not the student's own module, though its network is equal."""
    network = ModelSpec("cnn_small", {}, (1, 8, 8), 3)
    examples = Examples(random(1, 12, 1, 8, 8), torch.arange(12) % 3, augment=flip)
    client = pf.Client("a", network, examples, examples)
    method, weights = FedAvgKD(teacher="cnn_small", alpha=1.0, **OPTIONS), initial_state(network, 8)
    _, same = distil(method, client, weights, method.client_init(client, 3) | {"student": weights})
    _, other = distil(method, client, weights)
    for name, tensor in initial_state(network, 3).items():
        torch.testing.assert_close(same["student"][name], weights[name], rtol=0, atol=1e-6)
        assert (other["student"][name] - tensor).abs().max() > 1e-4
    assert_equal(other["teacher"], weights)
    with exclusive_single_torch_thread_with_grad():
        ((name, teacher),) = method.other_models(Message(), other, client, 0)
    assert name == "teacher"
    assert_equal(teacher.state_dict(), weights)


STRICT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, num_classes)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))
"""


def test_a_teacher_that_takes_no_channels_last_images(tmp_path, monkeypatch):
    """The students do, and their batch is the teacher's too."""
    (tmp_path / "strict_nets.py").write_text(STRICT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("polyfed.core.io.trusted_code._trusted", frozenset({"strict_nets:Net", "strict_nets:Nut"}))
    data = random(1, 12, 2, 8, 8), torch.arange(12) % 3
    clients = [pf.Client("a", ModelSpec("cnn_small", {}, (2, 8, 8), 3), data, data)]
    run = pf.federate(clients, FedAvgKD(teacher="strict_nets:Net", **OPTIONS), rounds=2, workers=0)
    assert run.last.state["model"].keys() == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    with pytest.raises(pf.UserError, match=r"'strict_nets:Nut': .* has no 'Nut'"):
        pf.federate(clients, FedAvgKD(teacher="strict_nets:Nut"), rounds=2, workers=0, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- what travels, and when ---------------------------------------------------------------------------------------


def test_the_teacher_goes_down_once_and_nothing_comes_up_after_its_training():
    method = FedAvgKD(teacher={"name": "mlp", "hidden": [5]}, teacher_rounds=3, **OPTIONS)
    run = pf.federate(mixed_clients(), method, rounds=9, clients_per_round=1, seed=4, workers=0)
    size, taught = (
        safetensors_num_bytes({f"model/{name}": tensor for name, tensor in run.last.state["model"].items()}),
        set(),
    )
    for record in run.history:
        ((client, row),) = ((i, row) for i, row in record["clients"].items() if "bytes_up" in row)
        if record["round"] <= 3:
            assert (row["bytes_down"], row["bytes_up"]) == (0 if record["round"] == 1 else size, size)
        else:
            assert (row["bytes_down"], row["bytes_up"]) == (0 if client in taught else size, 0)
            taught.add(client)
    assert run.last.state["taught"] == sorted(taught)
    assert len(taught) > 1


def test_who_never_distilled_has_the_initial_network_and_is_told_of_the_teacher():
    run = pf.federate(mixed_clients(), FedAvgKD(teacher=SMALL, **OPTIONS), rounds=2, clients_per_round=1, workers=0)
    (taught,) = run.last.state["taught"]
    for client in mixed_clients():
        start, now = initial_state(client.model, 0), run.model(client.id).state_dict()
        assert all(torch.equal(start[n], now[n]) for n in start) == (client.id != taught)
    assert all("teacher_accuracy" in row for row in run.history[-1]["clients"].values())


class StopAfter(SilentProgress):
    def __init__(self, number):
        self.number = number

    def finish_round(self, record):
        if record["round"] == self.number:
            raise KeyboardInterrupt


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["average", "local"])
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_in_either_phase(tmp_path, stop, policy):
    method = FedAvgKD(teacher=SMALL, teacher_rounds=2, buffers=policy, **OPTIONS)
    settings = {"rounds": 5, "clients_per_round": 2, "seed": 3, "workers": 0}
    whole = pf.federate(mixed_clients(), method, **settings)
    with pytest.raises(KeyboardInterrupt):
        pf.federate(mixed_clients(), method, out=tmp_path / "run", progress=StopAfter(stop), **settings)
    assert_runs_equal(whole, pf.resume(tmp_path / "run", clients=mixed_clients()))


def test_replies_that_cannot_be_averaged_are_refused():
    clients, method = {client.id: client for client in mixed_clients()}, FedAvgKD(**OPTIONS)
    federation = Federation(clients, method, Settings(rounds=4, seed=3))
    state, down, model = method.server_init(federation.server_context()), Message({}, {"lr": 0.1}), {"w": torch.ones(2)}
    for arrays in ({}, {"model": {}}, {"student": model}, {"model": model, "more": model}):
        assert re.search("expected.*'model'", federation.reply_error(Message(arrays, {"num_examples": 1}), state, down))
    good, alien = (Message({"model": {"w": torch.ones(n)}}, {"num_examples": 1}) for n in (2, 3))
    assert federation.reply_error(good, state, down) is None
    with pytest.raises(pf.UserError, match=r"'a' and 'b' differ \('b': tensor 'model/w' has shape \(3,\), expected"):
        method.aggregate(state, {"b": alien, "a": good}, None)
    known = method.aggregate(state, {"a": good}, None)
    assert "has shape (3,)" in federation.reply_error(
        alien, known, method.dispatch(known, federation.client_info("client-0", 2))
    )
    later = phase_two(model)
    assert "holds the groups ['model'], expected []" in federation.reply_error(good, later, down)
    client = clients["client-0"]
    with pytest.raises(pf.UserError, match="client 'client-0' was sent the teacher in an earlier round, and lost it"):
        method.local_update(Message({}, {"lr": 0.1, "distil": 1.0}), method.client_init(client, 3), client, 5)


def test_clients_whose_data_differ_in_form_are_named():
    one, other = ((random(1, 8, width), torch.arange(8) % 2) for width in (4, 5))
    clients = [pf.Client("a", lambda: nn.Linear(4, 2), one, one), pf.Client("b", lambda: nn.Linear(5, 2), other, other)]
    with pytest.raises(pf.UserError, match=r"clients 'a' and 'b' differ .*inputs of one shape"):
        pf.federate(clients, FedAvgKD(**OPTIONS), rounds=2, workers=0)


@pytest.mark.parametrize(
    ("teacher", "inputs", "message"),
    [
        (
            "mlp",
            torch.arange(48).view(8, 6),
            r"'mlp' fails on inputs of shape \(1, 6\) \(torch.int64\): RuntimeError.*name: lstm",
        ),
        ("resnet18", random(1, 8, 6), r"resnet18 takes images: .* got \(6,\)"),
        (SMALL, random(1, 8, 6), "SmallNet' has 3 outputs, the network of 'a' 2"),
    ],
)
def test_a_teacher_that_does_not_suit_the_clients(teacher, inputs, message):
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    data = inputs, torch.arange(8) % 2
    clients = [pf.Client("a", lambda: Net(6, 2), data, data)]
    with pytest.raises(pf.UserError, match=message):
        pf.federate(clients, FedAvgKD(teacher=teacher), rounds=2, workers=0)


# -- fields and files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher": "resnet19"}, "there is no model 'resnet19'; .*resnet18"),
        ({"teacher": {"name": "mpl", "hidden": [3]}}, "there is no model 'mpl'"),
        ({"teacher": {"hidden": [3]}}, "teacher must be a network's name, or a mapping with it"),
        ({"teacher": None}, "teacher must be a network's name, or a mapping with it"),
        ({"teacher_lr": 0.0}, "teacher_lr must be positive, got 0.0"),
        ({"teacher_rounds": 0}, "teacher_rounds must be at least 1, or none, got 0"),
        ({"alpha": 1.1}, "alpha must be between 0 and 1, got 1.1"),
        ({"temperature": float("inf")}, "temperature must be positive, got inf"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(pf.UserError, match=message):
        FedAvgKD(**fields)


def test_no_round_to_distil_in(tmp_path):
    with pytest.raises(pf.UserError, match="teacher_rounds must be below the number of rounds, 3, got 3"):
        pf.federate(small_clients(), FedAvgKD(teacher_rounds=3), rounds=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "config", "teacher"),
    [
        (["--algorithm.teacher", "cnn_small"], {}, {"name": "cnn_small"}),
        (["--algorithm.teacher", '{"name": "mlp", "hidden": [3, 4]}'], {}, {"name": "mlp", "hidden": (3, 4)}),
        ([], {"teacher": {"name": "mlp", "hidden": [3]}}, {"name": "mlp", "hidden": (3,)}),
        ([], {"teacher": "resnet18"}, {"name": "resnet18"}),
        (["--algorithm.teacher.width", "16"], {"teacher": {"name": "resnet18"}}, {"name": "resnet18", "width": 16}),
        (["--algorithm.teacher.name", "cnn_small"], {}, {"name": "cnn_small"}),
    ],
)
@pytest.mark.one_case
def test_the_teacher_on_the_command_line_and_in_files(words, config, teacher):
    resolved = parse_configuration(words, {"algorithm": {"name": "fedavg_kd", **config}}, "polyfed run")
    method = build_experiment(resolved).algorithm
    assert method == FedAvgKD(teacher=teacher)
    assert hash(method) == hash(FedAvgKD(teacher=teacher))
    again = parse_configuration([], yaml.safe_load(yaml.safe_dump(resolved)), "polyfed run")
    assert build_experiment(again).algorithm == method


@pytest.mark.thorough
def test_a_run_is_described_by_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["run", "fedavg_digits", "--algorithm", "fedavg_kd", "--baselines", "[]", "--quiet"]
    assert main([*common, "--algorithm.teacher", "resnet19", "--out", "bad"]) == 2
    assert "there is no model 'resnet19'" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
    small = ["--rounds", "2", "--data.clients", "2", "--workers", "0"]
    assert main([*common, *small, "--algorithm.teacher", "{name: mlp, hidden: [8]}", "--out", "one"]) == 0
    assert main(["run", "one/config.yaml", "--quiet", "--out", "two"]) == 0
    written = yaml.safe_load((tmp_path / "two/config.yaml").read_text())
    assert written["algorithm"]["teacher"] == {"name": "mlp", "hidden": [8]}
    assert_runs_equal(pf.resume("one"), pf.resume("two"))
