"""FLHA-GHN: identity 9, what travels, what stays, catalogues, refinement, expressive power."""

import dataclasses

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvg
from polyfed.core.algorithm import ClientInfo
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import build_module, initial_state
from polyfed.core.seeds import torch_generator
from polyfed.core.state_dict import state_dict_spec
from polyfed.graphs import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.hypernetworks import generated_network as generated_module
from polyfed.models import ModelSpec
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from tests.few_cases import few

SHAPE, CLASSES = (1, 8, 8), 3
ARCHITECTURES = [
    ModelSpec(name, {"width": 4, "norm": "batch"}, SHAPE, CLASSES)
    for name in ("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")
]
OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.9, "clip_norm": 5.0}


def examples(seed, number=24):
    generator = torch_generator(seed)
    y = torch.arange(number) % CLASSES
    centres = torch.randn(CLASSES, *SHAPE, generator=torch_generator(99))
    return centres[y] + 0.5 * torch.randn(number, *SHAPE, generator=generator), y


def clients(*models):
    return [pf.Client(f"c{i}", model, examples(i), examples(100 + i, 9)) for i, model in enumerate(models)]


def first_round(method, everyone, seed=0):
    """The server's state, and what goes down to and comes up from each client in round 1."""
    federation = Federation({c.id: c for c in everyone}, method, Settings(rounds=3, seed=seed))
    state = method.server_init(federation.server_context())
    downs = {c.id: method.dispatch(state, ClientInfo(c.id, 1, 3)) for c in everyone}
    ups = {c.id: method.local_update(downs[c.id], method.client_init(c, seed), c, seed=5) for c in everyone}
    return state, downs, ups


class Lookup(nn.Module):
    """A table in the place of the GHN: one row a layer type."""

    def __init__(self, form):
        super().__init__()
        self.heads = nn.ModuleDict({
            kind.key: nn.ParameterDict({role: torch.zeros(shape) for role, shape in kind.parameter_shapes.items()})
            for kind in form.catalogue.types
        })  # fmt: skip

    def iterate_generated_weights(self, graph):
        for kind, (_, _, (names,)) in graph.weight_sets.items():
            yield from ((names[role], row) for role, row in self.heads[kind.key].items())


class Distinct(nn.Module):
    """No two layers are of one type, and some are norms with statistics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2, bias=False),
            nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, CLASSES),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


def test_with_a_lookup_table_it_is_unweighted_fedavg(monkeypatch):
    """Identity 9, bit for bit over three rounds, on clients of unequal size."""
    sizes = (12, 20, 31)
    everyone = [pf.Client(f"c{i}", Distinct, examples(i, n), examples(9 + i, 9)) for i, n in enumerate(sizes)]
    start = initial_state(Distinct, seed=4)
    generated = graph_of_client(everyone[0]).generated_weights
    table = {f"heads.{m.type.key}.{role}": start[name] for m in generated for role, name in m.parameters.items()}
    monkeypatch.setattr("polyfed.algorithms.hypernetworks.flha_ghn.init_ghn_params", lambda *_: table)
    monkeypatch.setattr("polyfed.hypernetworks.generated_network.cached_ghn", lambda form, _: Lookup(form))
    monkeypatch.setattr(
        "polyfed.hypernetworks.generated_network._cached", generated_module._build_generated_network
    )  # leaves no table behind
    shared = {**OPTIONS, "schedule": "cosine", "buffers": "local", "local_epochs": 2}
    runs = [
        pf.federate(everyone, method, rounds=3, seed=4, workers=0)
        for method in (FLHAGHN(**shared, graph="layers_and_norms", refine_epochs=0), FedAvg(**shared, weighted=False))
    ]
    for client in everyone:
        one, other = (run.model(client.id).state_dict() for run in runs)
        assert any(not torch.equal(one[name], start[name]) for name in one)
        for name in one:
            assert torch.equal(one[name], other[name]), name


class Unhashable:
    """A factory that cannot be a key of a cache."""

    __hash__ = None

    def __call__(self):
        return Distinct()


@pytest.mark.thorough
def test_factories_that_cannot_be_cached_give_the_same_run():
    runs = [pf.federate(clients(model, model), FLHAGHN(**OPTIONS), rounds=2) for model in (Distinct, Unhashable())]
    one, other = (run.model("c1").state_dict() for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_equal_clients_get_equal_updates():
    twins = [pf.Client(i, ARCHITECTURES[2], examples(1), examples(2)) for i in ("a", "b")]
    _, _, ups = first_round(FLHAGHN(**OPTIONS), twins)
    one, other = (ups[i][0].tensors["ghn"] for i in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.thorough
def test_replies_have_the_same_names_and_shapes_for_every_architecture():
    """Upward privacy: tensors of the public catalogue's hypernetwork and two numbers; nothing depends on the graph except
    through training. What training tells is in `test_flha_privacy.py`."""
    everyone = clients(*ARCHITECTURES)
    _, downs, ups = first_round(FLHAGHN(**OPTIONS), everyone)
    replies = [reply for reply, _ in ups.values()]
    assert all(set(reply.tensors) == {"ghn"} for reply in replies)
    assert all(set(reply.scalars) == {"num_examples", "train_loss"} for reply in replies)
    forms = [state_dict_spec(reply.tensors["ghn"]) for reply in replies]
    assert all(form == state_dict_spec(downs["c0"].tensors["ghn"]) for form in forms)
    assert all(list(form) == list(forms[0]) for form in forms)  # the order of tensors could tell something, too
    assert len({reply.nbytes for reply in replies}) == 1


def test_nothing_of_a_graph_is_in_the_state_of_the_server():
    """Order, number and names of a client's layers: two federations with one catalogue start alike."""
    shallow = ModelSpec("mlp", {"hidden": (6, 6)}, SHAPE, CLASSES)
    deep = ModelSpec("mlp", {"hidden": (6, 6, 6, 6)}, SHAPE, CLASSES)
    states = [first_round(FLHAGHN(**OPTIONS), clients(model))[0] for model in (shallow, deep)]
    assert states[0]["ghn"].keys() == states[1]["ghn"].keys()
    assert all(torch.equal(states[0]["ghn"][name], states[1]["ghn"][name]) for name in states[0]["ghn"])


class Mixed(nn.Module):
    """Half of it is outside the catalogue: a PReLU, a transposed convolution, a frozen layer, a parameter of no use."""

    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(1, 4, 3, stride=2), nn.PReLU()
        self.up = nn.ConvTranspose2d(4, 2, 2)
        self.frozen = nn.Conv2d(2, 2, 1)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(32, CLASSES)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        return self.head(self.frozen(self.up(self.act(self.conv(x)))).flatten(1))


def test_what_the_catalogue_lacks_stays_with_the_client_and_learns_there():
    method = FLHAGHN(**OPTIONS, kinds="paper")
    (client,) = everyone = clients(Mixed)
    state, _, ups = first_round(method, everyone)
    reply, own = ups["c0"]
    private = {"act.weight", "up.weight", "up.bias", "unused.weight", "unused.bias"}
    assert own["private"].keys() == private
    start = initial_state(Mixed, seed=0)
    changed = {name for name in private if not torch.equal(own["private"][name], start[name])}
    assert changed == {"act.weight", "up.weight", "up.bias"}
    assert {name.split(".")[1].split("-")[0] for name in reply.tensors["ghn"] if "heads" in name} == {
        "conv2d",
        "linear",
    }
    down = method.dispatch(method.aggregate(state, {"c0": reply}, None), ClientInfo("c0", 2, 3))
    weights = method.personal_model(down, own, client, seed=1).state_dict()
    assert all(torch.equal(weights[name], own["private"][name]) for name in private)
    assert torch.equal(weights["frozen.weight"], build_module(Mixed, 0).frozen.weight)


@pytest.mark.slow
def test_clients_with_private_layers_federate_and_resume(tmp_path):
    everyone = clients(Mixed, ARCHITECTURES[0], Distinct)
    method = FLHAGHN(**OPTIONS)
    whole = pf.federate(everyone, method, rounds=3)
    pf.federate(everyone, method, rounds=3, out=tmp_path / "run", workers=2)
    resumed = pf.resume(tmp_path / "run", clients=everyone)
    for client in everyone:
        one, other = whole.model(client.id).state_dict(), resumed.model(client.id).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_catalogue_file_decides_what_is_generated(tmp_path):
    """In a deployment the server knows a public file, not the clients' layers."""
    (client,) = everyone = clients(Distinct)
    types = graph_of_client(client).layer_types
    kept = tuple(t for t in types if t.kind == "conv2d")
    LayerCatalogue(kept).write_yaml(tmp_path / "catalogue.yaml")
    method = FLHAGHN(**OPTIONS, graph="layers_and_norms", catalogue=str(tmp_path / "catalogue.yaml"))
    _, downs, ups = first_round(method, everyone)
    keys = {name.split(".")[1] for name in downs["c0"].tensors["ghn"] if name.startswith("heads")}
    assert keys == {t.key for t in kept}
    assert ups["c0"][1]["private"].keys() == {f"net.{i}.{role}" for i in (1, 5, 8) for role in ("weight", "bias")}
    with pytest.raises(UserError, match="cannot be read"):
        pf.federate(everyone, FLHAGHN(catalogue="nowhere.yaml"), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_norms_can_stay_local():
    _, downs, ups = first_round(FLHAGHN(**OPTIONS, norms="local"), clients(Distinct))
    assert not any("norm" in name for name in downs["c0"].tensors["ghn"])
    assert ups["c0"][1]["private"].keys() == {"net.1.weight", "net.1.bias"}


def test_nothing_to_generate_is_refused(tmp_path):
    class Alien(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64, CLASSES))

        def forward(self, x):
            return x.flatten(1) @ self.w

    with pytest.raises(UserError, match="nothing to generate"):
        pf.federate(clients(Alien), FLHAGHN(kinds="paper"), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("buffers", few(["local", "recompute"], ["local"]))
def test_refinement_trains_the_head_alone_and_generated_is_beside(buffers):
    method = FLHAGHN(**OPTIONS, buffers=buffers)
    (client,) = everyone = clients(ARCHITECTURES[0])
    state, _, ups = first_round(method, everyone)
    reply, own = ups["c0"]
    assert ("buffers" in own) == (buffers == "local")
    down = method.dispatch(method.aggregate(state, {"c0": reply}, None), ClientInfo("c0", 2, 3, purpose="personal"))
    raw = {k: v.clone() for k, v in method.personal_model(down, own, client, 1).state_dict().items()}
    ((name, network),) = method.other_models(down, own, client, 1)
    assert name == "generated"
    generated = {k: v.clone() for k, v in network.state_dict().items()}
    statistics = {k for k in raw if "running" in k or "num_batches" in k}
    assert {k for k in raw if not torch.equal(raw[k], generated[k])} - statistics == {"fc.weight", "fc.bias"}
    unrefined = dataclasses.replace(method, refine_epochs=0).personal_model(down, own, client, 1)
    assert all(torch.equal(unrefined.state_dict()[k], generated[k]) for k in generated)


def test_a_ghn_of_another_form_is_refused():
    (client,) = everyone = clients(ARCHITECTURES[0])
    _, downs, _ = first_round(FLHAGHN(head="mlp"), everyone)
    with pytest.raises(ValueError, match="does not fit"):
        FLHAGHN(latent=50, head="mlp").local_update(downs["c0"], FLHAGHN().client_init(client, 0), client, 0)


@pytest.mark.parametrize(
    "field", [{"depth": -1}, {"latent": 0}, {"hidden": 0}, {"rank": 0}, {"refine_epochs": -1}, {"refine_lr": 0.0},
              {"buffers": "average"}, {"head": "mpl"}, {"initialisation": "xavier"}, {"norms": "none"}]
)  # fmt: skip
def test_bad_settings_are_refused(field):
    with pytest.raises(UserError, match=next(iter(field))):
        FLHAGHN(**field)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["mlp", "factored"])
def test_one_ghn_overfits_four_architectures_at_once(head):
    """Expressive power: 32 examples with random labels, the four architectures of the paper, training accuracy ≥ 95 %."""
    generator = torch_generator(11)
    x, y = torch.randn(32, *SHAPE, generator=generator), torch.randint(0, CLASSES, (32,), generator=generator)
    everyone = [pf.Client(f"c{i}", model, (x, y), (x, y)) for i, model in enumerate(ARCHITECTURES)]
    method = FLHAGHN(lr=0.05, batch_size=0, local_steps=5, head=head, refine_epochs=0, buffers="recompute")
    run = pf.federate(everyone, method, rounds=20, evaluate_every=20)
    assert all(row["accuracy"] >= 0.95 for row in run.table())  # the test examples are the training examples


@pytest.mark.thorough
def test_weighted_replies_count_by_examples():
    sizes = {"a": 12, "b": 36}
    everyone = [pf.Client(i, ARCHITECTURES[1], examples(k, n), examples(9)) for k, (i, n) in enumerate(sizes.items())]
    for weighted, share in ((False, 0.5), (True, 0.75)):
        method = FLHAGHN(**OPTIONS, weighted=weighted)
        state, _, ups = first_round(method, everyone)
        replies = {i: reply for i, (reply, _) in ups.items()}
        mean = method.aggregate(state, replies, None)["ghn"]["gnn.0.lin_rel.weight"]
        one, other = (replies[i].tensors["ghn"]["gnn.0.lin_rel.weight"] for i in "ab")
        torch.testing.assert_close(mean, (1 - share) * one + share * other)
        assert method.scalars_needed == ({"num_examples"} if weighted else set())


@pytest.mark.thorough
def test_the_fields_of_the_refinement_are_used():
    (client,) = everyone = clients(ARCHITECTURES[3])
    base = FLHAGHN(**OPTIONS)
    _, downs, ups = first_round(base, everyone)

    def head(**fields):
        method = dataclasses.replace(base, **fields)
        return method.personal_model(downs["c0"], ups["c0"][1], client, 1).state_dict()["fc.weight"].clone()

    assert not torch.equal(head(), head(refine_lr=0.5))
    assert not torch.equal(head(), head(refine_epochs=2))
    assert torch.equal(head(lr=0.2), head())  # which the refinement does not follow


class RawHead(nn.Module):
    """Its last layer is a parameter of the network itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 6)
        self.last = nn.Parameter(torch.full((6, CLASSES), 0.1))

    def forward(self, x):
        return torch.relu(self.body(x.flatten(1))) @ self.last


def test_the_head_is_the_last_layer_of_the_graph_even_if_it_is_a_raw_parameter():
    (client,) = everyone = clients(RawHead)
    assert graph_of_client(client).head_parameter_names == {"last"}
    method = FLHAGHN(**OPTIONS)
    _, downs, ups = first_round(method, everyone)
    raw = {k: v.clone() for k, v in method.personal_model(downs["c0"], ups["c0"][1], client, 1).state_dict().items()}
    ((_, network),) = method.other_models(downs["c0"], ups["c0"][1], client, 1)
    assert {k for k, v in network.state_dict().items() if not torch.equal(v, raw[k])} == {"last"}


def test_a_client_of_which_nothing_is_generated_is_warned(tmp_path):
    """The likely mistake of a deployment: a network of another width than the catalogue's."""
    LayerCatalogue(graph_of_client(clients(Distinct)[0]).layer_types).write_yaml(tmp_path / "catalogue.yaml")
    method = FLHAGHN(**OPTIONS, graph="layers_and_norms", catalogue=str(tmp_path / "catalogue.yaml"))
    with pytest.warns(RuntimeWarning, match="no layer of the network of client 'c0' is generated"):
        first_round(method, clients(RawHead))


def test_networks_in_float64_are_generated_in_float64():
    class Double(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, CLASSES))
            self.double()

    (x, y), (x_test, y_test) = examples(0), examples(1)
    client = pf.Client("c", Double, (x.double(), y), (x_test.double(), y_test))
    run = pf.federate([client], FLHAGHN(**OPTIONS), rounds=2)
    assert all(tensor.dtype == torch.float64 for tensor in run.model("c").state_dict().values())


@pytest.mark.thorough
def test_one_factory_may_be_used_under_two_catalogues():
    """Caches are kept apart: a run with norms generated, one without, and the first again."""
    everyone = clients(Distinct)
    first, _, again = (
        pf.federate(everyone, FLHAGHN(**OPTIONS, norms=norms), rounds=1, workers=0).model("c0").state_dict()
        for norms in ("generate", "local", "generate")
    )
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [{"gnn": "gated"}, {"gnn": "sage", "passing": "asynchronous"}])
def test_other_graph_networks_train_and_do_not_take_each_others_weights(fields):
    everyone, method = clients(Distinct), FLHAGHN(**OPTIONS, **fields)
    _, downs, ups = first_round(method, everyone)
    assert all(torch.isfinite(tensor).all() for tensor in ups["c0"][0].tensors["ghn"].values())
    before, after = downs["c0"].tensors["ghn"], ups["c0"][0].tensors["ghn"]
    assert {name for name in before if not torch.equal(before[name], after[name])} >= {"embed.weight"}
    with pytest.raises(ValueError, match="does not fit this client"):
        FLHAGHN(**OPTIONS).local_update(downs["c0"], {}, everyone[0], 1)
