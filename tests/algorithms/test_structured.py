"""Inputs of several tensors in every method: packed into one tensor or apart, they train to the same bits."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.io.trusted_code import trust_code
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.seeds import torch_generator
from polyfed.core.training import cohort
from polyfed.testing import example_of

OF_NETWORKS = [n for n, m in REGISTRY.items() if m.requires & MODEL_REQUIREMENTS and "adapters" not in m.requires]
FAST = {"fedavg", "fedhenn", "fedavg_kd"}
COMMON = {
    name: field.name
    for name, method in REGISTRY.items()
    for field in dataclasses.fields(method)
    if field.name in ("teacher", "shared")
}
"""The network that a method brings beside the clients' own."""


class Joint(nn.Module):
    """Takes its numbers in one tensor, or in two: the same network in either case."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, a, b=None):
        return self.head(self.body(a if b is None else torch.cat([a, b], 1)))


class Named(Joint):
    """Answers as the networks of Hugging Face do."""

    def forward(self, a, b=None):
        return Answer(super().forward(a, b))


class Plain(nn.Module):
    """The same without BatchNorm, whose examples meet."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, a):
        return Answer(self.fc(a))


class Answer:
    def __init__(self, logits):
        self.logits, self.loss = logits, None


FORMS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x[:, :2].clone(), x[:, 2:].clone()),
    "dict": lambda x: {"b": x[:, 2:].clone(), "a": x[:, :2].clone()},  # keys not in the order of the arguments
}


def clients(form, network=Joint, number=2):
    """As small as they can be; `form` divides the inputs."""
    generator = torch_generator(7)
    found = []
    for k in range(number):
        y = torch.arange(24 + 4 * k) % 3
        x = torch.randn(len(y), 6, generator=generator) + y[:, None]
        sets = [(form(x[rows]), y[rows]) for rows in (slice(8, None), slice(0, 5), slice(5, 8))]
        found.append(pf.Client(f"client-{k}", network, *sets))
    return found


def played(name, form, network=Joint, **given):
    # polyfed's own common network, which takes all parts side by side, is another architecture with another draw
    method = example_of(name).build(**({COMMON[name]: "structured_nets:Joint"} if name in COMMON else {}))
    public = None
    if "public_data" in method.requires:
        x = torch.randn(24, 6, generator=torch_generator(3))
        public = (form(x), torch.zeros(24, dtype=torch.int64))
    return pf.federate(clients(form, network), method, rounds=2, seed=1, public=public, workers=0, **given)


@pytest.fixture(autouse=True)
def nets_by_name(monkeypatch):
    module = ModuleType("structured_nets")
    module.Joint = Joint
    monkeypatch.setitem(sys.modules, "structured_nets", module)
    trust_code("structured_nets:Joint")  # within the scope of conftest's fixture


def assert_same_models(one, other):
    for client in one.federation.clients:
        mine, theirs = one.model(client).state_dict(), other.model(client).state_dict()
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), f"{client!r}: {name!r} differs"
        assert torch.equal(one.predictions(client).outputs, other.predictions(client).outputs)
    losses = [[row["loss"] for row in run.table()] for run in (one, other)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in OF_NETWORKS])
@pytest.mark.one_case
def test_inputs_apart_train_as_inputs_in_one(name):
    whole = played(name, FORMS["tensor"])
    for form in ("tuple", "dict"):
        apart = played(name, FORMS[form])
        assert_same_models(whole, apart)
        assert isinstance(apart.federation.clients["client-0"].train.x, dict if form == "dict" else tuple)


@pytest.mark.parametrize("name", [n if n == "fedavg" else pytest.param(n, marks=pytest.mark.slow) for n in OF_NETWORKS])
def test_an_object_with_logits_trains_as_logits(name):
    # The architecture's name is another, and with it the draw: one that draws alike is made by hand.
    whole, named = played(name, FORMS["dict"], start(Joint)), played(name, FORMS["dict"], start(Named))
    if name in ("pfedhn", "flha_ghn"):  # weights are generated, and the generator is drawn
        assert named.table()[0]["loss"] < 3
        return
    for client in whole.federation.clients:
        mine, theirs = (run.model(client).state_dict() for run in (whole, named))
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], msg=lambda text, key=key: f"{key}: {text}")


def start(network):
    """Networks of this class that begin with the same weights whatever the seed."""

    def build():
        made = network()
        with torch.no_grad():
            for k, parameter in enumerate(made.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch_generator(k)) / 4)
        return made

    return build


def test_objects_with_logits_are_computed_many_at_once(monkeypatch):
    calls = []
    real = cohort.train_cohort
    monkeypatch.setattr(
        "polyfed.simulation.engines.cohort.train_cohort", lambda several: calls.append(len(several)) or real(several)
    )
    runs = []
    for engine in ("inprocess", "cohort"):
        method = REGISTRY["fedavg"](lr=0.05, batch_size=4)
        some = clients(FORMS["tensor"], Plain, 3)
        runs.append(pf.federate(some, method, rounds=1, seed=1, workers=0, engine=engine))
    assert calls == [3]
    for client in runs[0].federation.clients:
        torch.testing.assert_close(runs[0].predictions(client).outputs, runs[1].predictions(client).outputs)


SEARCHING = [name for name, method in REGISTRY.items() if "images" in method.requires]


def test_what_needs_images_says_so_before_the_first_round():
    for name in SEARCHING:
        with pytest.raises(
            pf.UserError, match=rf"{name} needs images.*'client-0' are a: torch.float32 of shape \(2,\), b:"
        ):
            pf.federate(clients(FORMS["dict"]), REGISTRY[name](), rounds=1, workers=0)


@pytest.mark.parametrize("name", [n if n == "fedavg_kd" else pytest.param(n, marks=pytest.mark.slow) for n in COMMON])
def test_a_teacher_of_polyfeds_takes_all_numbers_in_a_row(name):
    method = REGISTRY[name](lr=0.05, batch_size=8)
    run = pf.federate(clients(FORMS["dict"]), method, rounds=2, seed=1, workers=0)
    assert run.table()[0]["loss"] < 2


def test_a_teacher_of_polyfeds_takes_no_tokens():
    def tokens(x):
        return {"ids": (x > 0).long(), "b": x}

    class Ids(Joint):
        def forward(self, ids, b):
            return super().forward(ids.float() + b)

    with pytest.raises(
        (pf.UserError, RuntimeError),
        match=r"teacher 'mlp' fails on inputs of several parts.*'ids'.*int64.*give another",
    ):
        pf.federate(clients(tokens, Ids), REGISTRY["fedavg_kd"](), rounds=2, workers=0)


@pytest.mark.slow
def test_noise_as_public_examples_is_of_the_same_structure():
    method = REGISTRY["fedhenn"](lr=0.05, rad="noise", rad_size=12, local_epochs=1, eta0=1.0)
    run = pf.federate(clients(FORMS["dict"]), method, rounds=2, workers=0)
    assert run.table()[0]["loss"] < 2


@pytest.mark.parametrize("pool_once", [pytest.param(True, marks=pytest.mark.slow), False])
def test_public_examples_of_another_structure_are_refused(pool_once):
    method = REGISTRY["fedhenn"](rad_size=4, pool_once=pool_once)
    public = (FORMS["tuple"](torch.zeros(6, 6)), torch.zeros(6, dtype=torch.int64))
    with pytest.raises(pf.UserError, match=r"public examples.*are 0: torch.float32.*client 'client-0' are a: torch"):
        pf.federate(clients(FORMS["dict"]), method, rounds=1, public=public, workers=0)
