"""Low-rank adapters: what travels, and federations whose clients have adapters of different ranks."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedBN, FedRep
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages import lora
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.core.state_dict import weighted_mean
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import assert_runs_equal, small_clients

DOUBLE = torch.float64


class Adapted(nn.Module):
    """A linear layer as `peft` adapts it: the same names, `scaling` and form of the factors."""

    def __init__(self, base, r, alpha):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = {"default": alpha / r}

    def forward(self, x):
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


class Net(nn.Module):
    """A pretrained layer with an adapter, and a head that is trained; in float64."""

    def __init__(self, r=2, alpha=4.0, seed=3):
        super().__init__()
        base, generator = nn.Linear(6, 8), torch_generator(seed)
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.mid, self.head = Adapted(base, r, alpha), nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        return self.head(torch.tanh(self.mid(x)))


def rank_1():
    return Net(1)


def rank_2():
    return Net(2)


def rank_4():
    return Net(4, alpha=2.0)


A, B, PRODUCT = (f"mid.lora_{part}.default.weight" for part in ("A", "B", "AB"))
BASE = "mid.base_layer.weight"
OPTIONS = {"lr": 0.1, "batch_size": 8}


def clients(*factories):
    given = small_clients(len(factories))
    sets = [[(part.x.double(), part.y) for part in (c.train, c.test, c.val)] for c in given]
    return [pf.Client(c.id, f, *parts) for c, f, parts in zip(given, factories, sets, strict=True)]


def run(method, *factories, rounds=2, **more):
    return pf.federate(clients(*factories), method, rounds=rounds, workers=0, **more)


def federation(method, *factories):
    everyone = {c.id: c for c in clients(*factories)}
    found = Federation(everyone, method, Settings(rounds=3, seed=1))
    return found, found.initial_checkpoint().state


def replies(found, state, random=True):
    """What the clients send, with adapters of any values, as they travel; and as the server half takes them."""
    generator, ups, taken = torch_generator(5), {}, {}
    down = found.algorithm.dispatch(state, found.client_info("client-0", 1))
    for i, client in found.clients.items():
        net = cached_module(client.model)
        tree = {}
        for name, tensor in net.module.state_dict().items():
            if name not in net.frozen:
                tree[name] = torch.randn(tensor.shape, generator=generator, dtype=DOUBLE)
        reply = Message({"model": tree}, {"num_examples": len(client.train), "train_loss": 1.0})
        ups[i] = lora.fold_adapter_scales_into_reply(found.algorithm, client, reply)
        taken[i] = found.decode_reply_for_server(ups[i], down)
        assert found.reply_error(taken[i], state, down, i) is None
    return ups, taken


def test_fedavg_sends_the_adapters_and_the_head_alone():
    found = run(FedAvg(**OPTIONS), rank_2, rank_2, rounds=1)
    trained = {n: t for n, t in Net().state_dict().items() if "base_layer" not in n}
    assert trained.keys() == {A, B, "head.weight", "head.bias"}
    size = safetensors_num_bytes({f"model/{name}": tensor for name, tensor in trained.items()})
    assert {(row["bytes_down"], row["bytes_up"]) for row in found.history[-1]["clients"].values()} == {(size, size)}


@pytest.mark.parametrize("mode", ["svd", *(pytest.param(m, marks=pytest.mark.thorough) for m in ("zero_pad", "stack"))])
def test_one_client_ends_where_it_went(mode):
    """With one client the mean is its reply: the model of the next round computes what the client's did."""
    found, state = federation(FedAvg(**OPTIONS, adapters=mode), rank_2)
    ((i, client),) = found.clients.items()
    ups, taken = replies(found, state)
    after = found.algorithm.aggregate(state, taken, found.server_context())
    down = found.algorithm.dispatch(after, found.client_info(i, 2))
    a, b = ups[i].tensors["model"][A], ups[i].tensors["model"][B]
    base = Net().state_dict()[BASE]
    with lora.cut_message_to_client_rank_within_block(found.algorithm, client, down) as arrived:
        module = found.algorithm.personal_model(arrived, {}, client, 0)
        state_now = module.state_dict()
        whole = state_now[BASE] + 2.0 * state_now[B] @ state_now[A]
        torch.testing.assert_close(whole, base + b @ a, rtol=1e-12, atol=1e-12)
    assert torch.equal(cached_module(client.model).module.state_dict()[BASE], base)  # as it was


def test_zero_padding_is_the_mean_of_what_is_filled_up():
    """HetLoRA: A and B of the smaller rank count with zeros in the components that they lack."""
    found, state = federation(FedAvg(**OPTIONS, adapters="zero_pad"), rank_1, rank_4, rank_2)
    ups, taken = replies(found, state)
    after = found.algorithm.aggregate(state, taken, found.server_context())["model"]
    n = {i: len(c.train) for i, c in found.clients.items()}
    a, b = torch.zeros(4, 6, dtype=DOUBLE), torch.zeros(8, 4, dtype=DOUBLE)
    for i, up in ups.items():
        share, r = n[i] / sum(n.values()), up.tensors["model"][A].shape[0]
        a[:r] += share * up.tensors["model"][A]
        b[:, :r] += share * up.tensors["model"][B]
    torch.testing.assert_close(after[A], a)
    torch.testing.assert_close(after[B], b)
    plain = weighted_mean({i: {"w": up.tensors["model"]["head.weight"]} for i, up in ups.items()}, n)["w"]
    torch.testing.assert_close(after["head.weight"], plain)


@pytest.mark.parametrize("factories", [(rank_2, rank_2, rank_2), (rank_1, rank_4, rank_2)], ids=["equal", "different"])
def test_svd_is_the_best_approximation_of_the_mean_product(factories):
    """FlexLoRA: the first r components, which a client of rank r takes, are the mean's best approximation of rank r (Eckart
    and Young): the error is the norm of the singular values that are left out."""
    found, state = federation(FedAvg(**OPTIONS, adapters="svd"), *factories)
    ups, taken = replies(found, state)
    after = found.algorithm.aggregate(state, taken, found.server_context())["model"]
    n = {i: len(c.train) for i, c in found.clients.items()}
    mean = sum(n[i] / sum(n.values()) * up.tensors["model"][B] @ up.tensors["model"][A] for i, up in ups.items())
    singular = torch.linalg.svdvals(mean)
    for r in range(1, len(after[A]) + 1):
        error = torch.linalg.norm(after[B][:, :r] @ after[A][:r] - mean)
        torch.testing.assert_close(error, torch.linalg.norm(singular[r:]), rtol=1e-9, atol=1e-9)
    assert after.keys() == state["model"].keys()


def test_stacking_is_exact():
    """FLoRA: the product of the stacked factors is the mean of the products, and W₀ with it is what clients begin with."""
    found, state = federation(FedAvg(**OPTIONS, adapters="stack"), rank_1, rank_4, rank_2)
    n = {i: len(c.train) for i, c in found.clients.items()}
    total = torch.zeros(8, 6, dtype=DOUBLE)
    for _ in range(2):
        ups, taken = replies(found, state)
        stacked_a = torch.cat([up.tensors["model"][A] for up in ups.values()])
        shares = {i: n[i] / sum(n.values()) for i in ups}
        stacked_b = torch.cat([shares[i] * up.tensors["model"][B] for i, up in ups.items()], dim=1)
        total += stacked_b @ stacked_a
        first = state["model"]
        state = found.algorithm.aggregate(state, taken, found.server_context())
        torch.testing.assert_close(state["model"][PRODUCT], total, rtol=1e-12, atol=1e-12)
        assert torch.equal(state["model"][A], first[A])
        assert not state["model"][B].any()
    for i, client in found.clients.items():
        down = found.algorithm.dispatch(state, found.client_info(i, 3, "evaluate"))
        with lora.cut_message_to_client_rank_within_block(found.algorithm, client, down) as arrived:
            model = found.algorithm.personal_model(arrived, {}, client, 0)
            x = client.test.x
            mid = x @ (Net().state_dict()[BASE] + total).t() + Net().state_dict()["mid.base_layer.bias"]
            torch.testing.assert_close(model(x), model.head(torch.tanh(mid)))


@pytest.mark.parametrize("mode", ["zero_pad", "svd"])
def test_one_rank_needs_no_option(mode):
    """Padding of nothing is FedAvg of the factors, bit for bit where the scale is a power of two; products are not."""
    plain, other = (run(FedAvg(**OPTIONS, adapters=m), rank_2, rank_2) for m in (None, mode))
    models = [r.model("client-0").state_dict() for r in (plain, other)]
    same = all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert same == (mode == "zero_pad")


AVERAGING = {
    "fedavg": {}, "fedprox": {"mu": 0.1}, "fedavg_ft": {}, "fedrep": {"local_epochs": 1}, "fedbn": {}, "per_fedavg": {},
    "pfedme": {"k": 2}, "fedhenn_homo": {"averaged_over": "cohort", "local_epochs": 1, "rad_size": 20, "rad_batch": 8},
}  # fmt: skip
SLOW = {"pfedme", "fedavg_ft", "fedbn", "fedhenn_homo", "per_fedavg", "fedprox"}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:FedBN. the network has no norm")
@pytest.mark.parametrize("mode", [None, "zero_pad", "svd", "stack"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in AVERAGING])
def test_every_method_that_averages_learns_with_adapters(name, mode, tmp_path):
    """Of different ranks, or without the option of one; the frozen part stays, and a resumed run is the same."""
    kind = REGISTRY[name]
    if mode == "stack" and kind.clients_keep_trained_weights:
        with pytest.raises(UserError, match="adapters must be 'zero_pad' or 'svd'"):
            kind(adapters=mode, **AVERAGING[name])
        return
    method = kind(**OPTIONS, adapters=mode, **AVERAGING[name])
    factories = (rank_2, rank_2, rank_2) if mode is None else (rank_1, rank_4, rank_2)
    public = torch.randn(24, 6, generator=torch_generator(1), dtype=DOUBLE) if name == "fedhenn_homo" else None
    found = run(method, *factories, rounds=3, public=public, out=tmp_path / "run", clients_per_round=2)
    assert found.history[-1]["train_loss"] < found.history[0]["train_loss"]
    more = {} if public is None else {"public": public}
    again = pf.resume(tmp_path / "run", clients=clients(*factories), **more)
    assert_runs_equal(found, again)
    for client, factory in zip(found.federation.clients, factories, strict=True):
        model = found.model(client)
        assert model.mid.lora_A["default"].weight.shape[0] == factory().mid.lora_A["default"].weight.shape[0]
        assert torch.equal(model.mid.base_layer.weight, Net().state_dict()[BASE]) == (mode != "stack")
        assert torch.equal(cached_module(factory).module.state_dict()[BASE], Net().state_dict()[BASE])
        outputs = found.predictions(client)
        assert torch.equal(model(found.federation.clients[client].test.x).float(), outputs.outputs)


def test_smaller_ranks_send_fewer_bytes():
    for mode in ("zero_pad", "svd", "stack"):
        found = run(FedAvg(**OPTIONS, adapters=mode), rank_1, rank_4, rounds=1)
        up = [found.history[-1]["clients"][i]["bytes_up"] for i in ("client-0", "client-1")]
        assert up[1] - up[0] == pytest.approx(3 * (6 + 8) * 8, abs=16)  # and digits in the header


def test_compressed_replies_are_opened_before():
    found = run(FedAvg(**OPTIONS, adapters="svd"), rank_1, rank_4, compress="int8")
    assert found.history[-1]["train_loss"] < 2


@pytest.mark.parametrize("mode", ["svd", "stack"])
def test_components_that_nobody_has_trained_can_still_learn(mode):
    a = torch.randn(4, 6, generator=torch_generator(1))
    for product in (torch.zeros(8, 6), torch.outer(torch.arange(8.0), torch.arange(6.0))):
        new_a, new_b = lora.factorise_into_a_and_b(product, a)
        torch.testing.assert_close(new_b @ new_a, product, rtol=1e-5, atol=1e-4)
        assert new_a.abs().amax(1).min() > 0.1
    small, _ = lora.factorise_into_a_and_b(torch.randn(2, 3, generator=torch_generator(2)), torch.ones(4, 3))
    assert torch.equal(small[2:], torch.ones(2, 3))


def test_what_does_not_fit_is_refused():
    plain = lambda: nn.Sequential(nn.Linear(6, 3)).double()  # noqa: E731
    with pytest.raises(UserError, match=r"'client-0' has no parameters called lora_A"):
        run(FedAvg(adapters="svd"), plain, plain)
    with pytest.raises(UserError, match="needs one architecture"):
        run(FedAvg(), rank_1, rank_2)
    with pytest.raises(UserError, match="differ in frozen parameters"):
        run(FedAvg(adapters="svd"), rank_1, lambda: Net(2, seed=4))
    with pytest.raises(UserError, match="ranks differ; leave one of them out"):
        run(FedAvg(adapters="svd"), rank_1, rank_2, secure=True)
    for build in (
        lambda: FedAvg(adapters="svd", averaged_over="all"),
        lambda: REGISTRY["flha_ghn"](adapters="svd"),
        lambda: REGISTRY["fedavg_kd"](adapters="svd"),
        lambda: REGISTRY["feddsnas"](adapters="svd"),
        lambda: REGISTRY["pfedme"](adapters="svd", beta=0.5),
        lambda: FedAvg(adapters="padding"),
    ):
        with pytest.raises(UserError, match="adapters"):
            build()

    class Two(nn.Module):
        def __init__(self, r, s):
            super().__init__()
            self.one, self.two = Adapted(nn.Linear(6, 6), r, 4.0), Adapted(nn.Linear(6, 3), s, 4.0)

        def forward(self, x):
            return self.two(self.one(x))

    def crossed(r, s):
        def build():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return Two(r, s)

        return build

    net = {"a": crossed(1, 2), "b": crossed(2, 1)}
    with pytest.raises(UserError, match="no client has the largest rank in all layers"):
        lora.network_with_largest_ranks(net, "svd")
    assert lora.network_with_largest_ranks({**net, "c": crossed(2, 2)}, "svd") is not net["a"]

    class Trained(Net):
        def __init__(self):
            super().__init__()
            self.mid.base_layer.requires_grad_(True)

    with pytest.raises(UserError, match="no frozen matrix of shape"):
        run(FedAvg(adapters="stack"), Trained, Trained)


def test_replies_of_strange_ranks_are_left_out():
    method = FedAvg(**OPTIONS, adapters="svd")
    found, state = federation(method, rank_2, rank_4)
    ups, _ = replies(found, state)
    down, tree = method.dispatch(state, found.client_info("client-0", 1)), ups["client-0"].tensors["model"]
    for change in (
        {A: torch.zeros(5, 6, dtype=DOUBLE), B: torch.zeros(8, 5, dtype=DOUBLE)},  # above the server's
        {A: torch.zeros(0, 6, dtype=DOUBLE), B: torch.zeros(8, 0, dtype=DOUBLE)},
        {A: torch.zeros(3, 6, dtype=DOUBLE)},
        {A: torch.zeros(2, 7, dtype=DOUBLE)},
        {A: tree[A].float(), B: tree[B].float()},
        {A: torch.zeros((), dtype=DOUBLE)},
    ):
        with pytest.raises(ValueError, match=r"the adapter 'mid\.lora_A"):
            found.decode_reply_for_server(Message({"model": {**tree, **change}}, {"num_examples": 1}), down)
    lost = found.decode_reply_for_server(
        Message({"model": {n: t for n, t in tree.items() if n != B}}, {"num_examples": 1}), down
    )
    assert "missing" in found.reply_error(lost, state, down)
    more = {**tree, "x.lora_A.w": tree[A], "x.lora_B.w": tree[B]}
    assert "unexpected" in found.reply_error(
        found.decode_reply_for_server(Message({"model": more}, {"num_examples": 1}), down), state, down
    )


def test_a_client_above_the_servers_rank_says_so():
    found, state = federation(FedAvg(adapters="zero_pad"), rank_2)
    (client,) = clients(rank_4)
    down = found.algorithm.dispatch(state, found.client_info("client-0", 1))
    with (
        pytest.raises(UserError, match="has rank 4, more than the server's 2"),
        lora.cut_message_to_client_rank_within_block(found.algorithm, client, down),
    ):
        pass


def test_heads_that_stay_keep_their_own_adapters():
    """FedRep with the adapted layer as its head sends no adapter at all."""
    found = run(FedRep(**OPTIONS, local_epochs=1, head=("mid",), adapters="svd"), rank_1, rank_4, rounds=2)
    assert found.last.state["model"].keys() == {"head.weight", "head.bias"}
    assert found.last.client_states["client-0"]["head"][A].shape == (1, 6)
    assert FedBN(adapters="svd").adapters == "svd"


@pytest.mark.slow  # peft imports transformers
def test_adapters_of_peft():
    """FedAvg sends what `get_peft_model_state_dict` holds, to the byte; names are those of the state dict."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def build(r):
        def make():
            net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            generator = torch_generator(3)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            config = peft.LoraConfig(r=r, lora_alpha=4, target_modules=["0"], modules_to_save=["2"])
            return peft.get_peft_model(net, config)

        return make

    two, four = build(2), build(4)
    plain = [pf.Client(c.id, two, c.train, c.test, c.val) for c in small_clients()]
    found = pf.federate(plain, FedAvg(**OPTIONS), rounds=1, workers=0)
    wanted = peft.get_peft_model_state_dict(two())
    sent = {n: t for n, t in two().state_dict().items() if n not in cached_module(two).frozen}
    assert sorted((tuple(t.shape), t.dtype) for t in sent.values()) == sorted(
        (tuple(t.shape), t.dtype) for t in wanted.values()
    )
    size = safetensors_num_bytes({f"model/{name}": tensor for name, tensor in sent.items()})
    assert {row["bytes_up"] for row in found.history[-1]["clients"].values()} == {size}
    assert sum(t.nbytes for t in sent.values()) == sum(t.nbytes for t in wanted.values())
    for mode in ("zero_pad", "svd", "stack"):
        mixed = [pf.Client(c.id, f, c.train, c.test, c.val) for c, f in zip(small_clients(2), (two, four), strict=True)]
        run = pf.federate(mixed, FedAvg(**OPTIONS, adapters=mode), rounds=3, workers=0)
        assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]


@pytest.mark.parametrize("mode", ["zero_pad", "svd", "stack"])
def test_the_norm_of_an_update_counts_the_components_that_the_client_had(mode):
    """A client of rank 1 that changes little has a small norm, though its reply lacks what the server's rank 4 holds."""
    found = run(FedAvg(lr=1e-4, local_steps=1, adapters=mode), rank_1, rank_4)
    assert all(0 < row["update_norm"] < 0.05 for record in found.history for row in record["clients"].values())
