"""Networks that a method cannot train are refused with one sentence before the first round."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.algorithms.base.heads.shared_heads import HeadFromServerMethod
from polyfed.core.errors import ClientError, UserError
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.seeds import torch_generator
from polyfed.simulation.monitoring.progress import Progress
from polyfed.testing import example_of
from tests.few_cases import few

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

SOME = ["fedavg", "fedavg_kd", "fedhenn", "fedproto", "fedrep", "flha_ghn"]
METHODS = few(
    [n for n, m in REGISTRY.items() if m.requires & MODEL_REQUIREMENTS and "adapters" not in m.requires], SOME
)
Y = torch.arange(24) % 3


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


def not_a_number():
    layer = nn.Linear(6, 3)
    nn.init.constant_(layer.bias, float("nan"))
    return layer


def with_mask():
    layer = nn.Linear(6, 3)
    layer.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    return layer


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: Detached(6, 3), "its network's output has no gradient, so that nothing can be trained; take detach"),
        (not_a_number, "the parameter 'bias' of its network is NaN or infinite before any training"),
        (
            with_mask,
            "the buffer 'mask' of its network is NaN or infinite, and would be sent; register a constant",
        ),
    ],
)
def test_networks_from_which_nothing_can_be_learnt_are_refused_before_round_1(factory, sentence):
    assert f"client 'c0': {sentence}" in outcome("fedavg", factory)


def test_a_network_with_which_a_run_diverged_can_be_trained_again():
    """The module that a process keeps has the weights of that run, which are NaN."""
    network = pf.models.ModelSpec("mlp", {"hidden": [4]}, (6,), 3)
    clients = [pf.Client(f"c{i}", network, (inputs(i), Y), (inputs(9 + i), Y)) for i in range(2)]
    with pytest.raises(ClientError, match="diverged"):
        pf.federate(clients, pf.algorithms.FedAvg(lr=1e30), rounds=9, workers=0)
    assert len(pf.federate(clients, pf.algorithms.FedAvg(lr=0.1), rounds=1, workers=0).history) == 1


def inputs(seed, number=24):
    return torch.randn(number, 6, generator=torch_generator(seed))


class Rounds(Progress):
    """Notes whether a run began."""

    began = False

    def start(self, *_):
        self.began = True

    def show_clients_done(self, *_):
        pass

    finish_round = say = warn = stop = show_clients_done


def outcome(name, factory, public=24, out=None, **fields):
    """What a run of two rounds was refused with before round 1; None if it ran to its end."""
    clients = [pf.Client(f"c{i}", factory, (inputs(i), Y), (inputs(9 + i), Y)) for i in range(2)]
    method = example_of(name).build(**fields)
    pool = inputs(20, public) if "public_data" in method.requires else None
    progress = Rounds()
    error = None
    try:
        pf.federate(clients, method, rounds=2, workers=0, public=pool, progress=progress, out=out).model("c0")
    except UserError as raised:
        error = str(raised)
    assert progress.began == (error is None)
    assert error is None or "\n" not in error
    return error


class Squares(nn.Module):
    """Has no nn.Linear and no layer with parameters at all."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(6, 3)])

    def forward(self, x):
        return x @ self.weights[0]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn, self.out = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64)), nn.Linear(3, 3)

    def forward(self, x):
        return self.out((x.to(torch.complex64) @ self.turn).abs())


def wide():
    return nn.Linear(7, 3)


def brain():
    return nn.Linear(6, 3).bfloat16()


def norms():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def without_bias():
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))


def traced():
    return torch.jit.trace(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), torch.zeros(2, 6))


def partly_scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 3))


@pytest.mark.parametrize("name", METHODS)
def test_a_network_that_does_not_take_its_inputs(name):
    assert outcome(name, wide).startswith("client 'c0': its network fails on a batch of shape (2, 6)")
    assert outcome(name, brain).startswith("client 'c0': its network has weights of torch.bfloat16, but its inputs are")


INSIDE = {
    "fedala", "fedbn", "fedgh", "fedhenn", "fedhenn_homo", "fedkd", "fedpac", "fedproto", "fedrep", "fedtgp", "flha_ghn",
    "knn_per", "lg_fedavg", "moon", "pfedhn",
}  # fmt: skip
"""Methods that look into networks. Another one may if its class says so."""
AS_A_WHOLE = {"fedavg_kd", "fml"}
"""Methods that look into another network than the client's."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_a_network_that_torch_jit_compiled(name):
    assert_compiled_is_refused(name, scripted)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("factory", [traced, partly_scripted])
def test_a_network_that_torch_jit_traced_or_compiled_in_part(name, factory):
    assert_compiled_is_refused(name, factory)


def assert_compiled_is_refused(name, factory):
    """Where the method looks into networks."""
    said = outcome(name, factory)
    says_so = name not in AS_A_WHOLE and issubclass(REGISTRY[name], ValidatesNetworks | HeadFromServerMethod)
    assert (said is not None) >= (name in INSIDE)
    assert says_so or name in INSIDE or said is None, f"{name} looks into networks: derive it from ValidatesNetworks"
    if said is not None:
        assert "client 'c0'" in said
        assert "compiled by torch.jit" in said
        assert "give the module" in said


def test_norm_layers_that_torch_jit_hides():
    def factory():
        return torch.jit.script(norms())

    assert "norm layers and their running statistics cannot be told" in outcome("fedavg", factory, buffers="recompute")
    assert outcome("fedavg", factory, buffers="average") is None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_what_a_method_looks_for_in_a_network_is_missed_before_the_first_round(name):
    outcome(name, Squares)


@pytest.mark.parametrize("name", ["fedgh", "fedpac", "fedproto", "fedtgp"])
def test_a_head_that_another_cannot_replace(name):
    def frozen():
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3).requires_grad_(False))

    def computed():
        return nn.Sequential(nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))

    for factory, flaw in (
        (without_bias, "has no bias"),
        (frozen, "is not trained"),
        (computed, "computes its weights"),
    ):
        assert flaw in outcome(name, factory)


@pytest.mark.parametrize("name", METHODS)
def test_complex_parameters_are_refused_where_they_would_travel(name):
    said = outcome(name, Complex)
    if {"weights", "hypernetwork"} & REGISTRY[name]().discloses:
        assert said.startswith("client 'c0': 'turn' in its network is complex, and only real numbers can be sent")
    else:
        assert said is None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_batch_norm_and_a_batch_of_one(name):
    for factory in (norms, lambda: nn.SyncBatchNorm.convert_sync_batchnorm(norms())):
        assert "client 'c0' has a minibatch of one example (batch_size=1, 24 examples)" in outcome(
            name, factory, batch_size=1
        )


def test_other_batch_sizes_and_networks_of_the_method():
    cases = {
        "fedmd": {"digest_batch_size": 1}, "feddf": {"server_batch_size": 1},
        "fml": {"batch_size": 1, "shared": {"name": "mlp"}},
    }  # fmt: skip
    assert "digest_batch_size=1" in outcome("fedmd", norms, **cases["fedmd"])
    assert "server_batch_size=1" in outcome("feddf", norms, **cases["feddf"])
    assert "digest_batch_size=256, 1 examples" in outcome("fedmd", norms, public=1)
    assert outcome("fedmd", wide_enough, digest_batch_size=1) is None
    assert outcome("fedgh", norms, server_batch_size=1) is None  # of a head alone


def wide_enough():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))


def test_a_network_that_squeezes_a_batch_of_one():
    class Squeezing(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)

        def forward(self, x):
            return super().forward(x).squeeze()

    assert "has a minibatch of one example (batch_size=23, 24 examples)" in outcome("fedavg", Squeezing, batch_size=23)
    assert outcome("fedavg", Squeezing, batch_size=12) is None


def test_one_layer_with_a_bridge_to_its_inputs():
    assert outcome("fedkd", lambda: nn.Linear(6, 3)) is None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_old_norms_of_weights_and_kept_activations(name):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            with pytest.warns(FutureWarning, match="weight_norm"):
                self.body = nn.utils.weight_norm(nn.Linear(6, 6))
            self.out, self.seen = nn.Linear(6, 3), []
            self.body.register_forward_hook(lambda module, inputs, output: self.seen.append(output))

        def forward(self, x):
            self.hidden = self.body(x).relu()
            return self.out(self.hidden)

    assert outcome(name, Keeping) is None
