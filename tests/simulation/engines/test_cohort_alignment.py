"""FedHeNN's term in a cohort: each client's own network on its own draw of the RAD, as alone."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cohorts import ALIGNED, assert_near, clients, normed, plain, play
from torch import nn

from polyfed.algorithms import FedHeNN, FedHeNNHomo
from polyfed.alignment.alignment_target import AlignmentTarget
from polyfed.alignment.alignment_term import AlignmentTerm, NetworkKernelTarget
from polyfed.alignment.representations import differentiable_representations
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.training import cohort
from polyfed.core.vectorized.deferred_calls import copy_all_parameters_and_buffers
from polyfed.core.vectorized.stacked_module import CannotStackError, StackedNetworks
from tests.few_cases import few

FORMS = {
    "linear": {},
    "whole RAD": {"rad_batch": 0},
    "rbf": {"kernel": "rbf"},
    "rbf, whole RAD": {"kernel": "rbf", "rad_batch": 0},
    "procrustes": {"distance": "procrustes"},
    "noise": {"rad": "noise"},
    "pool once": {"pool_once": True},
}


@pytest.mark.parametrize("method", [FedHeNNHomo, FedHeNN], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("form", "model"),
    [
        pytest.param(form, model, marks=() if (form, model) == ("linear", plain) else pytest.mark.thorough)
        for form in FORMS
        for model in (plain, normed)
    ],
)
@pytest.mark.one_case
def test_clients_that_are_aligned_together_end_where_each_ends_alone(method, form, model, computed):
    """With clients of different sizes, so that some stop earlier and batches of BatchNorm are filled up."""
    runs = [
        play(method(**{**ALIGNED, **FORMS[form]}), clients(model, more=3), e, rounds=2) for e in ("inprocess", "cohort")
    ]
    assert computed["train"] == 10
    assert_near(*runs, 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "model"), few(list(product([FedHeNNHomo, FedHeNN], [plain, normed])), {(FedHeNN, plain)})
)
def test_a_gradient_that_is_held_for_an_epoch_is_held_for_each_client(method, model, computed):
    """Those with as many steps an epoch are computed together: four of five, or three; each on its own draw of the RAD."""
    fields = {**ALIGNED, "local_epochs": 3, "momentum": 0.5, "term": "epoch"}
    runs = [play(method(**fields), clients(model, more=1), e, rounds=2) for e in ("inprocess", "cohort")]
    with_term = 4 if model is plain else 3  # BatchNorm's last batch of one joins the one before
    assert computed["train"] == with_term + (5 if method is FedHeNN else with_term)  # whose first round has no term
    assert_near(*runs, 1e-9)
    other = play(method(**{**fields, "term": "minibatch"}), clients(model, more=1), "inprocess", rounds=2)
    assert not torch.allclose(other.model("c4")[0].weight, runs[0].model("c4")[0].weight, atol=1e-6)


@pytest.mark.thorough
def test_local_buffers_divide_no_cohort(computed):
    """The common target hangs on BatchNorm's weights, and on none of the statistics that clients keep."""
    method = FedHeNNHomo(**ALIGNED, buffers="local")
    runs = [play(method, clients(normed, more=3), engine, rounds=2) for engine in ("inprocess", "cohort")]
    assert computed["train"] == 10
    assert_near(*runs, 1e-9)


@pytest.mark.thorough
def test_any_division_gives_the_same(monkeypatch):
    method = FedHeNNHomo(**ALIGNED, momentum=0.5)
    whole = play(method, clients(number=7), "cohort", rounds=2)
    monkeypatch.setattr(cohort, "_TERM_ROWS", 3 * 6)  # three clients, of six rows each
    sizes = []
    real = cohort.cohort_training_obstacle
    monkeypatch.setattr(cohort, "cohort_training_obstacle", lambda calls: sizes.append(len(calls)) or real(calls))
    assert_near(whole, play(method, clients(number=7), "cohort", rounds=2), 1e-10)
    assert max(sizes) == 3


def test_what_all_clients_align_with_is_found_once_a_round(monkeypatch):
    found = []
    real = NetworkKernelTarget.compute_target
    monkeypatch.setattr(NetworkKernelTarget, "compute_target", lambda *given: found.append(1) or real(*given))
    play(FedHeNNHomo(**ALIGNED), clients(), "cohort", rounds=2)
    assert len(found) == 2
    play(FedHeNNHomo(**ALIGNED), clients(), "inprocess", rounds=2)
    assert len(found) == 2 + 10


def pool(seed=0):
    return Examples(torch.randn(12, 6, generator=torch.Generator().manual_seed(seed)).double(), torch.zeros(12))


def term(**changes):
    torch.manual_seed(0)
    given = {
        "pool": pool(), "rows": torch.arange(2, 12), "module": "3", "target": NetworkKernelTarget(plain()),
        "distance": "cka", "eta": 0.5, "num_rows": 6, "method_name": "FedHeNN",
    }  # fmt: skip
    return AlignmentTerm(**{**given, **changes})


@pytest.mark.parametrize("number", [6, 10])
@pytest.mark.parametrize("sigma", [None, 0.5])
@pytest.mark.one_case
def test_each_client_meets_its_own_rows_at_every_step(number, sigma):
    """Against each network by itself, on rows drawn here; the gradients, too. A wrong pairing changes all of them."""
    networks, rows, examples = [plain() for _ in range(3)], torch.arange(2, 12), pool()
    ours = term(num_rows=number, target=NetworkKernelTarget(plain(), sigma))
    states = torch.stack([ours.build_penalty_for_client(seed).tensors[0] for seed in (5, 6, 7)])
    generators = [torch_generator(derive_seed(seed, "rad")) for seed in (5, 6, 7)]
    target = ours.target.compute_target(examples, rows, "3")
    target = AlignmentTarget(target.matrix.double(), sigma)
    with StackedNetworks(
        networks[0], [copy_all_parameters_and_buffers(net) for net in networks], frozenset({"0.weight"})
    ) as stack:
        (weights,) = (p for _, p in stack.named_parameters())
        together_found = [ours(stack, [states]) for _ in range(3)]
        slopes = [torch.autograd.grad(found.sum(), weights)[0] for found in together_found]
    for k, (net, generator) in enumerate(zip(networks, generators, strict=True)):
        for found, slope in zip(together_found, slopes, strict=True):
            drawn = torch.randperm(10, generator=generator)[:number]
            alone = 0.5 * target.distance(differentiable_representations(net, examples, rows[drawn], "3"), drawn)
            torch.testing.assert_close(found[k], alone, rtol=1e-10, atol=1e-12)
            mine = torch.autograd.grad(alone, net[0].weight)[0]
            torch.testing.assert_close(slope[k], mine, rtol=1e-8, atol=1e-12)


def test_terms_are_equal_where_they_are_the_same_function():
    assert term() == term()
    other = [
        term(eta=0.6), term(num_rows=5), term(module="0"), term(distance="procrustes"), term(rows=torch.arange(10)),
        term(pool=pool(1)), term(pool=replace(pool(), transform=nn.Identity())),
        term(target=NetworkKernelTarget(plain(), 0.5)),
        term(target=NetworkKernelTarget(plain())), term(target=AlignmentTarget(torch.ones(10, 5))),
    ]  # fmt: skip
    assert not any(term() == one or one == term() for one in other)
    assert term(target=AlignmentTarget(torch.ones(10, 5))) == term(target=AlignmentTarget(torch.ones(10, 5)))
    assert term(target=AlignmentTarget(torch.ones(10, 5))) != term(target=AlignmentTarget(torch.eye(10, 5)))


class Turned(nn.Module):
    """Its last layer takes time first, so that its input has no row for each example."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(self.body(x.view(len(x), 3, 2)).transpose(0, 1)).mean(0)


def test_an_input_without_a_row_for_each_example_is_left_to_each_client():
    with (
        StackedNetworks(Turned(), [copy_all_parameters_and_buffers(Turned()) for _ in range(3)]) as stack,
        pytest.raises(CannotStackError, match="row"),
    ):
        differentiable_representations(stack, pool(), torch.arange(6).view(3, 2), "head")
