"""FedPNAS and its relatives: identities of METHODS, the meta gradient against autograd, what is evaluated and exported."""

import json

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, CAFedDSNAS, CAFedPNAS, FedAvg, FedDSNAS, FedPNAS
from polyfed.algorithms.nas.supernet_method import SMALL_SUPERNET
from polyfed.core.algorithm import Client, ClientInfo, DataSpec, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.seeds import torch_generator
from polyfed.nas import Network, SampledNetwork, load_network
from polyfed.simulation.checks.requirements import common_data_spec
from polyfed.testing import AlgorithmContract, SmallNet, small_image_clients, without_durations

SMALL = SMALL_SUPERNET
ONE = {**SMALL, "operations": ("sep_conv_3",), "personal_operations": ("dil_conv_3",)}
NAMES = [name for name, method in REGISTRY.items() if "images" in method.requires]


def image_clients(number=3, model=None):
    return [Client(c.id, model, c.train, c.test, c.val) for c in small_image_clients(number)]


class OnImages(AlgorithmContract):
    def clients(self, number=3):
        return image_clients(number)


@pytest.mark.slow
class TestOnePerBatch(OnImages):
    """The method that has all parts, context-aware samplers and the meta step; one architecture a minibatch is faster."""

    @pytest.fixture
    def algorithm(self):
        return CAFedPNAS(lr=0.02, batch_size=16, per="batch", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"evaluation": "sampled", "samples": 2, "buffers": "local"}, {"gradient": "full"}],
    ids=["", "sampled", "full"],
)
@pytest.mark.parametrize("name", NAMES)
class TestRegistered(OnImages):
    @pytest.fixture
    def algorithm(self, name, more):
        return REGISTRY[name](lr=0.02, batch_size=16, **more, **SMALL)


# -- identity 10 ------------------------------------------------------------------------------------------------------

FAST = [(CAFedPNAS, "average")]
OTHER = [(m, b) for m in (FedPNAS, CAFedPNAS, FedDSNAS, CAFedDSNAS) for b in ("average", "local") if (m, b) not in FAST]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "buffers"), [*FAST, *(pytest.param(*p, marks=pytest.mark.slow) for p in OTHER)])
def test_one_operation_per_edge_is_fedavg_of_that_network(method, buffers):
    """With η = 0 and nothing to choose, every method is FedAvg of the fixed network, bit for bit (identity 10)."""
    training = {"lr": 0.05, "momentum": 0.5, "optimizer": "sgd", "batch_size": 8, "local_epochs": 2, "buffers": buffers}
    meta = {"eta": 0.0} if method in (FedPNAS, CAFedPNAS) else {}
    searching = method(**ONE, **training, **meta, finetune_epochs=0)
    run = pf.federate(image_clients(), searching, rounds=3, seed=1, workers=0)
    fixed = searching.supernet_plan(1, 3)
    other = pf.federate(image_clients(model=fixed), FedAvg(**training, weighted=False), rounds=3, seed=1, workers=0)
    for client in run.federation.clients:
        mine, theirs = run.model(client).state_dict(), other.model(client).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for one, two in zip(run.history, other.history, strict=True):
        assert {i: [c["accuracy"], c["loss"]] for i, c in one["clients"].items()} == {
            i: [c["accuracy"], c["loss"]] for i, c in two["clients"].items()
        }
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]


def test_eta_matters():
    runs = [pf.federate(image_clients(1), FedPNAS(**ONE, eta=eta), rounds=1, workers=0) for eta in (0.0, 0.5)]
    assert runs[0].history[0]["train_loss"] != runs[1].history[0]["train_loss"]


@pytest.mark.slow
def test_overfits_few_examples():
    """32 images by heart: the search learns weights and operations together."""
    generator = torch_generator(1)
    x, y = torch.randn(32, 1, 8, 8, generator=generator), torch.arange(32) % 4
    client = Client("a", None, (x, y), (x, y))
    method = CAFedPNAS(channels=8, base_cells=1, batch_size=16, local_epochs=40)
    run = pf.federate([client], method, rounds=2, workers=0, evaluate_every=2)
    assert run.table()[0]["accuracy"] > 0.9


# -- messages and state -----------------------------------------------------------------------------------------------


def test_personal_parameters_are_a_group_of_their_own():
    method = FedPNAS(**SMALL)
    clients = image_clients()
    state = method.server_init(ServerContext(0, 5, (), data_spec=common_data_spec(clients)))
    assert set(state) == {"base", "personal"}
    assert all(name.startswith(group) for group in state for name in state[group])
    assert any("samplers" in name for name in state["base"])
    assert any("samplers" in name for name in state["personal"])
    first, last = (method.dispatch(state, ClientInfo("a", r, 5)).scalars for r in (1, 5))
    assert (first["temperature"], round(last["temperature"], 6)) == (1.0, 0.1)
    network = method.load_supernet(method.dispatch(state, ClientInfo("a", 3, 5)), {}, clients[0]).module
    assert network.temperature == pytest.approx(0.1**0.5)


def test_aggregate_is_the_mean_over_clients():
    """Algorithm 1, line 6: 1/M, whatever the clients' sizes; `weighted` counts examples."""
    replies = {
        i: Message({g: {f"{g}.w": torch.full((2,), v)} for g in ("base", "personal")}, {"num_examples": n})
        for i, v, n in (("a", 1.0, 1), ("b", 4.0, 3))
    }
    for weighted, mean in ((False, 2.5), (True, 3.25)):
        state = FedPNAS(**SMALL, weighted=weighted).aggregate({}, replies, None)
        assert torch.equal(state["personal"]["personal.w"], torch.full((2,), mean))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_clients_own_networks_are_not_used(name):
    method = REGISTRY[name](**SMALL)
    own = lambda: nn.Linear(7, 3)  # noqa: E731  # that does not suit the data
    runs = [pf.federate(image_clients(1, model=m), method, rounds=1, workers=0) for m in (None, own)]
    assert without_durations(runs[0].history) == without_durations(runs[1].history)
    assert isinstance(runs[1].model("client-0"), Network)
    assert method.requires == {"images", "one_data_spec"}


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
@pytest.mark.one_case
def test_fine_tuning_changes_the_personal_stack_only(buffers):
    """θ, as evaluated beside, is the server's; the personal network has its base weights and other personal ones."""
    method = FedPNAS(**SMALL, finetune_epochs=3, buffers=buffers)
    client = image_clients(1)[0]
    state = method.server_init(ServerContext(0, 1, (), data_spec=DataSpec((1, 6, 6), 3)))
    down = method.dispatch(state, ClientInfo(client.id))
    tuned = {n: t.clone() for n, t in method.personal_model(down, {}, client, 3).state_dict().items()}
    ((name, network),) = method.other_models(down, {}, client, 3)
    untuned = network.state_dict()
    assert name == "server"
    assert all(
        torch.equal(t, tuned[n]) for n, t in untuned.items() if n.startswith("base.")
    )  # BatchNorm's statistics too
    assert torch.equal(tuned["base.stem.weight"], state["base"]["base.stem.weight"])
    assert torch.equal(untuned["personal.classifier.weight"], state["personal"]["personal.classifier.weight"])
    assert not torch.equal(tuned["personal.classifier.weight"], untuned["personal.classifier.weight"])
    assert list(FedDSNAS(**SMALL).other_models(down, {}, client, 3)) == []


def test_the_rounds_temperature_is_that_of_adaptation():
    """Also for grey images and one output, the form that a check of the fields might build."""
    x = torch.randn(6, 1, 6, 6)
    client = Client("a", None, (x, x.mean((2, 3))), (x, x.mean((2, 3))), task="regression")
    method = FedPNAS(**SMALL, evaluation="sampled", samples=2)
    state = method.server_init(ServerContext(0, 9, (), data_spec=common_data_spec([client])))
    model = method.personal_model(method.dispatch(state, ClientInfo("a", 9, 9)), {}, client, 1)
    assert model.network.temperature == pytest.approx(0.1)


@pytest.mark.parametrize("fixed", ["operations", "personal_operations"])
def test_one_stack_may_have_nothing_to_choose(fixed):
    method = FedPNAS(**{**SMALL, fixed: ("sep_conv_3",)}, evaluation="sampled", samples=2)
    run = pf.federate(image_clients(1), method, rounds=1, workers=0)
    assert run.table()[0]["accuracy"] is not None


def test_samplers_have_a_rate_of_their_own():
    """After one step of Adam, which moves each parameter by its rate."""
    client = image_clients(1)[0]
    method = FedDSNAS(**SMALL, lr=0.001, sampler_lr=0.2, local_steps=1)
    state = method.server_init(ServerContext(0, 1, (), data_spec=common_data_spec([client])))
    reply, _ = method.local_update(method.dispatch(state, ClientInfo("a")), {}, client, 1)
    moved = {n: (t - state[g][n]).abs().max().item() for g in ("base", "personal") for n, t in reply.tensors[g].items()}
    assert max(d for n, d in moved.items() if ".samplers." in n) == pytest.approx(0.2, rel=1e-3)
    assert 0 < max(d for n, d in moved.items() if ".samplers." not in n) <= 0.001 * 1.001


@pytest.mark.thorough
@pytest.mark.parametrize("evaluation", [pytest.param("argmax", marks=pytest.mark.slow), "sampled"])
@pytest.mark.parametrize("name", [n if n == "ca_fedpnas" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_exported_with_a_description(name, evaluation, tmp_path):
    """models/ID.safetensors and ID.json together are the network that was evaluated."""
    method = REGISTRY[name](**SMALL, evaluation=evaluation, samples=3)
    run = pf.federate(image_clients(2), method, rounds=1, out=tmp_path / "run", workers=2)
    for client, owner in run.federation.clients.items():
        read = load_network(tmp_path / "run" / "models" / f"{client}.json")
        mine = run.model(client)
        assert isinstance(read, SampledNetwork if evaluation == "sampled" else Network)
        assert torch.allclose(read(owner.test.x), mine(owner.test.x), atol=1e-6)
        accuracy = (read(owner.test.x).argmax(1) == owner.test.labels).double().mean()
        assert float(accuracy) == run.history[-1]["clients"][client]["accuracy"]
        manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
        assert manifest["evaluated"].startswith({"sampled": "the mean of 3", "argmax": "the most probable"}[evaluation])
        edges = [
            e
            for cell in json.loads((tmp_path / "run" / "models" / f"{client}.json").read_text())["cells"]
            for e in cell["edges"]
        ]
        assert all(sum(e["probabilities"]) == pytest.approx(1, abs=1e-4) for e in edges)
        if evaluation == "argmax" and not name.startswith("ca_"):
            for edge in edges:
                ((chosen,), shares) = edge["operations"], edge["probabilities"]
                assert shares[edge["candidates"].index(chosen)] == pytest.approx(max(shares), abs=1e-6)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_unsuitable_federations(tmp_path):
    flat = [
        Client(
            "a",
            SmallNet,
            (torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)),
            (torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)),
        )
    ]
    with pytest.raises(UserError, match=r"feddsnas needs images.*'a' are of shape \(6,\)"):
        pf.federate(flat, FedDSNAS(), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    clients = image_clients(2)
    wide = [Client("wide", None, *((d.x.double(), d.labels) for d in (clients[0].train, clients[0].test)))]
    with pytest.raises(UserError, match=r"convert the inputs, x.float\(\)"):
        pf.federate(wide, FedDSNAS(**SMALL), rounds=1)
    x = torch.zeros(4, 1, 7, 7)
    other = Client("odd", None, (x, torch.zeros(4, dtype=torch.int64)), (x, torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(UserError, match=r"inputs of one shape.*'odd' are \(1, 7, 7\)"):
        pf.federate([*clients, other], FedDSNAS(**SMALL), rounds=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eta": -1.0}, "eta must be at least 0, got -1.0"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"inner": "adm"}, "unknown inner 'adm'; did you mean adam"),
        ({"stem_stride": 3}, "stem_stride must be 1 or 2, got 3"),
        ({"operations": ("conv",)}, "unknown operation 'conv'"),
        ({"base_nodes": 0}, "at least 1 base cell"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"sampler_lr": 0.0}, "sampler_lr must be positive"),
        ({"finetune_epochs": -1}, "finetune_epochs must be at least 0"),
        ({"operations": "sep_conv_3"}, "operations must be a list of names of operations, got 'sep_conv_3'"),
        ({"operations": ("skip", "skip")}, "different names"),
        ({"finetune_lr": float("inf")}, "finetune_lr must be positive"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"join": "max"}, "unknown join 'max'"),
        ({"gradient": "all"}, "unknown gradient 'all'"),
    ],
)
def test_hyper_parameters_are_checked(fields, message):
    with pytest.raises(UserError, match=message):
        FedPNAS(**fields)
