"""Many networks at once give what each gives alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyfed.algorithms import FedAvg
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.tasks.task_lookup import get_task
from polyfed.core.training.cohort import (
    _try_training_together,
    group_calls_to_predict_together,
    group_fit_calls,
    predict_cohort,
    train_cohort,
)
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.cohort_batches import CohortBatches, plan_batch_sizes
from polyfed.core.vectorized.deferred_calls import (
    CallDeferred,
    FitCall,
    PerClientTerm,
    ReplayedCallResults,
    copy_all_parameters_and_buffers,
    copy_tensors_into_module,
    current_deferred_run,
    deferring_calls,
)
from polyfed.core.vectorized.stacked_layers import max_pool_channels_last
from polyfed.core.vectorized.stacked_lstm import run_stacked_lstm
from polyfed.core.vectorized.stacked_module import CannotStackError, StackedNetworks, stacking_obstacle


class Tokens(nn.Module):
    """An LSTM of two layers over embedded tokens, of which 0 is padding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(7, 3, padding_idx=0), nn.LSTM(3, 4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        found, (h, c) = self.lstm(self.embedding(x))
        return self.out(found[:, -1] + h[0] + c[1])


class Own(nn.Module):
    """One of a user's: `how` says what keeps many of it from being computed at once."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls, self.fc = how, 0, nn.Linear(4, 3)

    def forward(self, x):
        if self.how == "reads numbers" and float(x.sum()) > 0:
            x = x + 1
        if self.how == "draws random":
            x = F.dropout(x, 0.5, self.training)
        if self.how == "changes attributes":
            self.calls += 1
        if self.how == "something else":
            x = x - x.mean(0)
        return self.fc(x)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2, padding="same", bias=False),
        nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(3), nn.Dropout(0.3), nn.Linear(3, 3),
    )  # fmt: skip


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))


def normed_images():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.Conv2d(4, 3, 2),
        nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 3),
    )  # fmt: skip


NETWORKS = {
    "convolutions": (convolutions, (2, 4, 4)),
    "batch norm": (normed, (2, 4, 4)),
    "batch norm of images": (normed_images, (2, 4, 4)),
    "lstm": (Tokens, None),
}


def examples(form, number, seed, **more):
    generator = torch.Generator().manual_seed(seed)
    if form is None:
        x = torch.randint(0, 7, (number, 5), generator=generator)
    else:
        x = torch.randn(number, *form, generator=generator, dtype=torch.float64)
    return Examples(x, torch.randint(0, 3, (number,), generator=generator), **more)


def calls_of(make, data, options, **more):
    """A call of `fit` of each client, with weights of its own, and the networks that train alone."""
    module, calls, alone = make().double(), [], []
    trained = frozenset(name for name, _ in module.named_parameters())
    for seed, mine in enumerate(data):
        torch.manual_seed(seed)
        other = make().double()
        task = {
            "task": "classification",
            "penalty": None,
            "gradient": None,
            "batches_per_step": 1,
            "reported_loss": "loss",
        }
        given = {key: value(seed) if callable(value) else value for key, value in more.items()}
        arguments = {**task, **given}
        arguments["task"] = get_task(arguments["task"])
        calls.append(
            FitCall(module, copy_all_parameters_and_buffers(other), trained, mine, options, 0.1, seed, **arguments)
        )
        alone.append(other)
    return calls, alone


def assert_as_alone(calls, alone):
    for call, found, other in zip(calls, train_cohort(calls), alone, strict=True):
        kept = {
            "penalty": call.penalty,
            "gradient": call.gradient,
            "task": call.task,
            "reported_loss": call.reported_loss,
        }
        fitted = fit(other, call.examples, call.options, lr=call.lr, seed=call.seed, **kept)
        assert found.steps == fitted.steps
        assert found.loss == pytest.approx(fitted.loss, rel=1e-5)
        state = dict((*other.named_parameters(), *other.named_buffers()))
        for name, tensor in found.state.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-11, check_dtype=False)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_together_as_alone(name):
    make, form = NETWORKS[name]
    data = [examples(form, number, seed) for seed, number in enumerate((3, 17, 9))]
    options = FedAvg(batch_size=4, local_epochs=2, momentum=0.5, weight_decay=0.01, clip_norm=0.3)
    assert_as_alone(*calls_of(make, data, options))


@pytest.mark.parametrize(
    "options",
    [
        FedAvg(batch_size=4, local_steps=7, optimizer="adam", label_smoothing=0.1),
        FedAvg(batch_size=0, momentum=0.9, nesterov=True),
    ],
)
def test_options_are_those_of_training_alone(options):
    data = [examples((4,), number, seed) for seed, number in enumerate((5, 12, 8))]
    assert_as_alone(*calls_of(lambda: nn.Linear(4, 3), data, options))


@pytest.mark.parametrize("part", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 3), ceil_mode=True)])
def test_pooling_is_that_of_torch(part):
    """Also of numbers that are equal, of which the same one gets the slope."""
    x = torch.randint(0, 3, (4, 2, 7, 8)).double().requires_grad_()
    found, own = max_pool_channels_last(part, x), part(x)
    assert torch.equal(found, own)
    weights = torch.randn_like(own)
    slopes = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (found, own)]
    torch.testing.assert_close(*slopes)
    assert slopes[0].any()


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_each_task_has_its_loss(task):
    data = [examples((4,), number, seed) for seed, number in enumerate((5, 6, 3))]
    data = [Examples(d.x, F.one_hot(d.y, 3).double()) for d in data]
    assert_as_alone(*calls_of(lambda: nn.Linear(4, 3), data, FedAvg(batch_size=4), task=task))


def squares(weights, anchors):
    return sum((w - a).square().sum() for w, a in zip(weights, anchors, strict=True))


def test_a_penalty_is_each_clients_own():
    data = [examples((4,), number, seed) for seed, number in enumerate((5, 6, 3))]
    more = {
        "penalty": lambda seed: PerClientTerm(squares, [torch.full((3, 4), seed).double(), torch.zeros(3).double()]),
        "reported_loss": "total",
    }
    assert_as_alone(*calls_of(lambda: nn.Linear(4, 3), data, FedAvg(batch_size=4, local_epochs=2), **more))


def flip(x, generator):
    return x if float(torch.rand((), generator=generator)) < 0.5 else x.flip(1)


@pytest.mark.parametrize(
    "more", [{"augment": flip}, {"transform": torch.neg}, {"transform": Normalise((0.1,), (0.3,))}]
)
def test_minibatches_come_as_alone(more):
    """Also where they are augmented, or transformed by a function that may look at more than one example."""
    form = (1, 2, 2) if isinstance(more.get("transform"), Normalise) else (4,)
    data = [examples(form, number, seed) for seed, number in enumerate((5, 8, 3))]
    data = [Examples(d.x, d.y, torch.arange(len(d)).flip(0), **more) for d in data]
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))  # noqa: E731
    if isinstance(more.get("transform"), Normalise):
        data = [Examples((200 * d.x.abs()).to(torch.uint8), d.y, d.index, d.transform) for d in data]
        batches = next(
            iter(CohortBatches(data, [1, 2, 3], [plan_batch_sizes(len(d), 4, 1, None, 1, False) for d in data]))
        )[0]
        assert batches[0].x.dtype == torch.float32
        return
    assert_as_alone(*calls_of(make, data, FedAvg(batch_size=4, local_epochs=2)))


def test_a_client_with_nan_spoils_no_other():
    data = [examples((4,), 6, seed) for seed in range(3)]
    data[1].x[2] = float("nan")
    calls, alone = calls_of(lambda: nn.Linear(4, 3), data, FedAvg(batch_size=4))
    found = train_cohort(calls)
    assert torch.isnan(found[1].state["weight"]).all()
    for place in (0, 2):
        fit(alone[place], data[place], calls[place].options, lr=0.1, seed=place)
        torch.testing.assert_close(found[place].state["weight"], alone[place].weight.data)


@pytest.mark.parametrize("how", ["reads numbers out", "draws random numbers", "changes attributes", "something else"])
def test_what_cannot_be_computed_together_is_noticed(how):
    data = [examples((4,), 6, seed) for seed in range(3)]
    known = next(one for one in ("reads numbers", "draws random", "changes attributes", "something else") if one in how)
    calls, _ = calls_of(lambda: Own(known), data, FedAvg())
    assert stacking_obstacle(calls[0].module) is None
    assert how in str(_try_training_together(calls[:2]))
    with pytest.raises(CannotStackError, match=how):
        train_cohort(calls)


def test_layers_with_weights_that_are_not_known_are_named():
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert stacking_obstacle(nn.GRU(2, 2)) == "GRU has weights of its own"
    assert stacking_obstacle(hooked) == "Linear has hooks"
    assert stacking_obstacle(nn.LSTM(2, 2, bidirectional=True)) == "LSTM has options that are computed alone"


def test_the_derivative_of_an_lstm_is_that_of_finite_differences():
    part, generator = nn.LSTM(3, 2, batch_first=True).double(), torch.Generator().manual_seed(0)
    names = [name for name, _ in part.named_parameters()]

    def outputs(x, *own):
        out, (h, c) = run_stacked_lstm(part, dict(zip(names, own, strict=True)), x)
        return out, h, c

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    own = [drawn(2, *tensor.shape) for tensor in part.parameters()]
    assert torch.autograd.gradcheck(outputs, (drawn(2 * 2, 4, 3), *own))
    assert torch.autograd.gradcheck(outputs, (drawn(2 * 2, 4, 3).detach(), *own))


def test_groups_have_one_network_and_the_same_options():
    data = [examples((4,), number, 1) for number in (5, 6, 7, 8)]
    make = lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))  # noqa: E731
    calls, _ = calls_of(lambda: nn.Linear(4, 3), data, FedAvg(batch_size=4))
    others, _ = calls_of(lambda: nn.Linear(4, 3), data[:2], FedAvg(batch_size=2))
    meeting, _ = calls_of(make, data, FedAvg(batch_size=4))
    assert group_fit_calls([*calls, *others]) == [[0, 1, 2, 3], [4, 5]]
    assert group_fit_calls(meeting) == [[0, 1, 2, 3]]
    lonely, _ = calls_of(make, [examples((4,), number, 1) for number in (5, 1, 7)], FedAvg(batch_size=4))
    assert group_fit_calls(lonely) == [[0, 2], [1]]  # which BatchNorm refuses


def test_outputs_together_are_those_alone():
    """Of one network for all, and of each client's own; sets of different sizes."""
    make, form = NETWORKS["convolutions"]
    sets = [[examples(form, number, seed), examples(form, 2, 9)] for seed, number in enumerate((600, 3, 70))]
    calls, alone = calls_of(make, [one[0] for one in sets], FedAvg())
    for same in (False, True):
        asked = [type("Call", (), {"module": c.module, "state": calls[0 if same else i].state, "sets": sets[i]})()
                 for i, c in enumerate(calls)]  # fmt: skip
        assert group_calls_to_predict_together(asked) == [[0, 1, 2]]
        for i, found in enumerate(predict_cohort(asked)):
            network = alone[0 if same else i].eval()
            for mine, data in zip(found, sets[i], strict=True):
                torch.testing.assert_close(mine, network(data.x).float().detach())


def test_buffers_that_no_layer_knows_must_be_equal():
    class Shifted(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.register_buffer("shift", torch.zeros(1))
    states = [{**copy_all_parameters_and_buffers(module), "shift": torch.full((1,), float(k))} for k in range(2)]
    with pytest.raises(CannotStackError, match="'shift' differs"):
        StackedNetworks(module, states)
    assert stacking_obstacle(Shifted(2, 2)) == "Shifted has weights of its own"


def test_a_half_is_parked_and_gets_what_was_found():
    module, data, one = nn.Linear(4, 3).double(), examples((4,), 6, 1), ReplayedCallResults()
    for number in (1, 2):
        one.restart_calls()
        try:
            with deferring_calls(one):
                assert current_deferred_run() is one
                fitted = fit(module, data, FedAvg(), lr=0.1, seed=0)
        except CallDeferred:
            assert number == 1
            one.results += train_cohort([one.pending_call])
    assert current_deferred_run() is None
    assert fitted.steps == 1
    torch.testing.assert_close(module.weight.data, one.results[0].state["weight"])


def test_training_alone_is_left_in_place():
    """With a function of the method's own, or an option that is not known to be the same for many."""
    data = examples((4,), 6, 1)
    for options, more in ((FedAvg(), {"penalty": lambda: torch.zeros(())}), (FedAvg(precision="bf16"), {})):
        module, one = nn.Linear(4, 3), ReplayedCallResults(stop_at_first_call=True)
        with pytest.raises(CallDeferred), deferring_calls(one):
            fit(module, data, options, lr=0.1, seed=0, **more)
        assert one.pending_call is None


def test_only_what_differs_is_copied_into_a_module():
    module = nn.Linear(4, 3)
    before = module.weight._version
    copy_tensors_into_module(module, copy_all_parameters_and_buffers(module))
    assert module.weight._version == before
