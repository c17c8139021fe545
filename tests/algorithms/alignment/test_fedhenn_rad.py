"""FedHeNN's public examples, what travels, the contract of its options, and what it refuses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyfed as pf
from polyfed.algorithms import FedHeNN, FedHeNNHomo
from polyfed.alignment import AlignmentTarget, draw_public_rows
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import AlgorithmContract, SmallNet, small_clients, without_durations

OPTIONS: dict[str, Any] = {"lr": 0.05, "batch_size": 8, "local_epochs": 2, "rad_size": 20, "rad_batch": 8, "eta0": 1.0}
SEED = 3


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


PUBLIC = random(8, 40, 6), torch.zeros(40, dtype=torch.int64)

CONTRACT = {
    "weights": FedHeNN(share="weights", normalise=True, **OPTIONS),
    "rbf kernel, pool once": FedHeNN(kernel="rbf", pool_once=True, weighting="capacity", **OPTIONS),
    "noise and a rank": FedHeNN(rad="noise", rank=3, **OPTIONS),
    "homogeneous, pool once": FedHeNNHomo(pool_once=True, kernel="rbf", buffers="local", **OPTIONS),
}
PUBLISHED = {"weights": frozenset({"model"}), "homogeneous, pool once": frozenset({"trained"})}


@pytest.mark.slow  # test_contract.py has both methods with the default options
@pytest.mark.parametrize("name", CONTRACT)
class TestOptions(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name: str) -> pf.Algorithm:
        self.published = PUBLISHED.get(name, frozenset())
        return CONTRACT[name]


BOTH = pytest.mark.parametrize("kind", [FedHeNN, FedHeNNHomo])


def federate(method: pf.Algorithm, clients: Sequence[pf.Client] | None = None, **settings: Any) -> Run:
    wanted: dict[str, Any] = {"rounds": 2, "seed": SEED, "workers": 0, "public": PUBLIC}
    return pf.federate(small_clients() if clients is None else clients, method, **(wanted | settings))


def federation(method: pf.Algorithm, public: Any = PUBLIC) -> Federation:
    clients = {c.id: c for c in small_clients()}
    return Federation(clients, method, Settings(rounds=4, seed=SEED), None if public is None else as_examples(public))


def reply_of(at: Federation, state: Any, client: str, number: int = 1) -> tuple[pf.Message, pf.Message]:
    """What goes down to a client that starts, and its reply."""
    with exclusive_single_torch_thread_with_grad():
        down = at.algorithm.dispatch(state, at.client_info(client, number))
        own = at.clients[client]
        return down, at.algorithm.local_update(down, at.algorithm.client_init(own, SEED), own, 7)[0]


# -- RAD ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("fields", [{}, {"pool_once": True}, {"rad": "noise"}])
def test_all_clients_of_a_round_have_one_rad_and_the_next_round_another(kind: Any, fields: Mapping[str, Any]) -> None:
    method = kind(**OPTIONS, **fields)
    at = federation(method, None if "rad" in fields else PUBLIC)
    state = method.server_init(at.server_context())
    seen = []
    for t in (1, 2, 3):
        everyone = [at.client_info(i, t) for i in at.clients]
        downs = [*method.dispatch_all(state, everyone), *(method.dispatch(state, who) for who in everyone)]
        rads = [dict(down.tensors["rad"]) for down in downs]
        for rad in rads:
            assert rad.keys() == rads[0].keys()
            assert all(torch.equal(rad[name], rads[0][name]) for name in rad)
        expected = draw_public_rows(SEED, t, 40, 20)
        if kind is FedHeNNHomo and not fields:
            assert torch.equal(rads[0]["x"], PUBLIC[0][expected.long()])
        else:
            assert torch.equal(rads[0]["rows"], expected)
        seen.append(sorted(expected.tolist()))
    assert seen[0] != seen[1] != seen[2] != seen[0]


@pytest.mark.thorough
@BOTH
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_the_pool_goes_down_once_and_changes_nothing_but_the_bytes(kind: Any, kernel: Any) -> None:
    options = OPTIONS | {"kernel": kernel}
    settings: dict[str, Any] = {"rounds": 6, "clients_per_round": 1, "seed": 4}
    once, always = (federate(kind(pool_once=value, **options), **settings) for value in (True, False))
    for i in once.federation.clients:
        ours, theirs = once.model(i).state_dict(), always.model(i).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    pool, part = (safetensors_num_bytes({"public/x": PUBLIC[0][:n]}) for n in (40, 20))
    reached, again = set[str](), 0
    for one, other in zip(once.history, always.history, strict=True):
        ((i, row),) = ((i, row) for i, row in one["clients"].items() if "bytes_up" in row)
        theirs = other["clients"][i]
        assert (row["loss"], row["accuracy"], row["bytes_up"]) == (
            theirs["loss"],
            theirs["accuracy"],
            theirs["bytes_up"],
        )
        saved = theirs["bytes_down"] - row["bytes_down"]
        if kind is FedHeNN:
            assert saved == 0 if i not in reached else pool - 200 < saved <= pool
        else:
            assert (saved < 0) == (i not in reached)
            assert i not in reached or part - 200 < saved + 20 * 4 <= part
        again += i in reached
        reached.add(i)
    assert len(reached) > 1
    assert again > 1
    assert once.last.state["holders"] == sorted(reached)
    assert always.last.state["holders"] == []
    assert ("public" in once.last.client_states["client-0"]) == ("client-0" in reached)
    assert "public" not in next(iter(always.last.client_states.values()))


@BOTH
def test_a_client_whose_reply_was_refused_gets_the_pool_again(kind: Any) -> None:
    method = kind(pool_once=True, **OPTIONS)
    at = federation(method)
    state = method.server_init(at.server_context())
    down, reply = reply_of(at, state, "client-0")
    assert torch.equal(down.tensors["public"]["x"], PUBLIC[0])
    after = method.aggregate(state, {"client-0": reply}, at.server_context())
    assert [("public" in method.dispatch(after, at.client_info(i, 2)).tensors) for i in at.clients] == [
        False,
        True,
        True,
    ]
    own = at.clients["client-0"]
    with pytest.raises(pf.UserError, match="'client-0' was sent the public examples in an earlier round, and lost"):
        method.local_update(
            method.dispatch(after, at.client_info("client-0", 2)), method.client_init(own, SEED), own, 7
        )


@pytest.mark.thorough
@BOTH
def test_noise_needs_no_public_examples_and_nothing_of_it_travels(kind: Any) -> None:
    method = kind(rad="noise", **OPTIONS)
    run = federate(method, public=None, rounds=3)
    assert without_durations(run.history) == without_durations(federate(method, public=PUBLIC, rounds=3).history)
    at = federation(method, None)
    down, _ = reply_of(at, run.last.state, "client-0", 3)
    assert "public" not in down.tensors
    assert set(down.tensors["rad"]) == {"rows"}
    assert int(down.scalars["noise"]) == down.scalars["noise"] < 2**53
    assert (
        down.scalars["noise"]
        != kind(rad="noise", **OPTIONS).server_init(federation(method, None).server_context())["seed"]
    )
    fresh = kind(rad="noise", **OPTIONS | {"eta0": 0.0})
    assert without_durations(federate(fresh, public=None, rounds=3).history) != without_durations(run.history)


def test_representations_of_noise_are_of_the_same_noise_for_all_clients() -> None:
    """Clients whose networks are equal, at a vanishing learning rate, have equal representations."""
    method = FedHeNN(rad="noise", **OPTIONS | {"lr": 1e-30, "local_epochs": 1})
    clients = [pf.Client(c.id, lambda: nn.Linear(6, 3), c.train, c.test) for c in small_clients()]
    found = list(federate(method, clients, public=None, rounds=1).last.state["representations"].values())
    assert all(torch.equal(a, found[0]) for a in found)
    assert found[0].shape == (40, 6)
    other = federate(method, clients, public=None, rounds=1, seed=9).last.state["representations"]["client-0"]
    assert not torch.allclose(found[0], other)


class Counting(TorchDispatchMode):
    """Keeps the results that have more than so many numbers and memory of their own."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.found = numbers, dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() > self.numbers and out.untyped_storage().data_ptr() not in given:
            self.found[out.untyped_storage().data_ptr()] = out
        return out


@pytest.mark.thorough
@pytest.mark.parametrize(("kernel", "number", "width"), [("linear", 300, 5000), ("rbf", 2000, 2000)])
def test_steps_on_the_whole_rad_do_not_copy_the_mean_kernel(kernel: Any, number: int, width: int) -> None:
    """And see what steps in the order of X would."""
    net, x = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), random(1, number + 50, 6)
    matrix, rows = random(2, number, width), torch.arange(number).flip(0) + 20
    sigma = 0.5 if kernel == "rbf" else None
    target = AlignmentTarget(matrix @ matrix.T if sigma else matrix, sigma)
    method = FedHeNN(kernel=kernel, **OPTIONS | {"rad_batch": 0})
    (client,) = small_clients(1)
    term = method._alignment_term(net, client, "2", target, (Examples(x, torch.zeros(len(x))), rows), 2.0, 7)
    assert term is not None
    term(net)
    with Counting(1024**2) as seen:  # as many distances are there whose median is taken
        value = term(net)
        torch.autograd.backward(value)
    assert not seen.found
    a = net[1](net[0](x[rows]))
    torch.testing.assert_close(value, 2 * (1 - target.cka(a, torch.arange(number))), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_a_round_makes_no_more_than_one_matrix_of_all_pairs_a_side(kernel: Any) -> None:
    """The server's K̄, the homogeneous client's K_global; for 1,024 examples at most, all distances are taken."""
    number, made = 1100, {}
    public = random(8, number, 6), torch.zeros(number, dtype=torch.int64)
    for kind in (FedHeNN, FedHeNNHomo):
        options = OPTIONS | {"rad_size": number, "rad_batch": 0, "local_epochs": 1, "kernel": kernel}
        at = federation(kind(**options), public)
        state = at.algorithm.server_init(at.server_context())
        if kind is FedHeNN:
            state = {**state, "representations": {f"client-{k}": random(k, number, 8) for k in range(3)}}
        with Counting(number**2 - 1) as seen:
            reply_of(at, state, "client-0")
        made[kind] = len(seen.found)
    assert made == {FedHeNN: kernel == "rbf", FedHeNNHomo: kernel == "rbf"}


# -- refused ------------------------------------------------------------------------------------------------------


IMAGES = torch.randint(256, (40, 1, 2, 3), generator=torch_generator(1), dtype=torch.uint8)


def image_clients() -> list[pf.Client]:
    data = Examples(IMAGES[:12], torch.arange(12) % 3, transform=Normalise((0.5,), (0.5,)))
    return [pf.Client("a", lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), data, data)]


@pytest.mark.filterwarnings("ignore:FedHeNN.*nothing before:RuntimeWarning")
@BOTH
def test_public_examples_that_do_not_suit_are_refused(kind: Any) -> None:
    method, none = kind(**OPTIONS), torch.zeros(40, dtype=torch.int64)
    with pytest.raises(pf.UserError, match=r"^fedhenn(_homo)? needs public examples .*public=..."):
        federate(method, public=None)
    with pytest.raises(pf.UserError, match=r"compares networks by at least 2 public examples, got 1; give more"):
        federate(method, public=(PUBLIC[0][:1], none[:1]))
    for x in (random(1, 40, 7), random(1, 40, 6, dtype=torch.float64), random(1, 40, 1, 6)):
        with pytest.raises(
            pf.UserError, match=r"public=.* are torch.float.* of shape .*client 'client-0' are torch.float32"
        ):
            federate(method, public=(x, none))
    with pytest.raises(pf.UserError, match=r"public=.* are prepared by Normalise\(.*client 'a' by Normalise\(.*alike"):
        federate(method, image_clients(), public=(IMAGES, none))
    suited = Examples(IMAGES, none, transform=Normalise((0.5,), (0.5,)))
    assert federate(method, image_clients(), public=suited).history[-1]["failures"] == []


@pytest.mark.filterwarnings("ignore:FedHeNN.*nothing before:RuntimeWarning")
@BOTH
def test_all_public_examples_are_used_if_there_are_fewer_than_rad_size(kind: Any) -> None:
    twelve = PUBLIC[0][:12], torch.zeros(12, dtype=torch.int64)
    runs = [federate(kind(**OPTIONS | {"rad_size": size}), public=twelve) for size in (5000, 12)]
    few, exact = (run.model("client-0").state_dict() for run in runs)
    assert all(torch.equal(few[key], value) for key, value in exact.items())


@pytest.mark.parametrize("rad", ["public", "noise"])
def test_clients_of_different_input_shapes_are_refused(rad: Any) -> None:
    data = random(1, 12, 7), torch.arange(12) % 3
    clients = [*small_clients(2), pf.Client("wide", lambda: nn.Linear(7, 3), data, data)]
    message = {
        "public": r"shape \(6,\), but the inputs of client 'wide' are torch.float32 of shape \(7,\)",
        "noise": r"inputs of one form, but those of 'wide' are .*\(7,\), those of 'client-0' torch.float32 of .*\(6,\)",
    }
    with pytest.raises(pf.UserError, match=message[rad]):
        federate(FedHeNN(rad=rad, **OPTIONS), clients)


def test_there_is_no_noise_of_texts() -> None:
    data = torch.ones(12, 6, dtype=torch.int64), torch.arange(12) % 3
    embed = [pf.Client("a", lambda: nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 3)), data, data)]
    with pytest.raises(pf.ClientError, match="use rad='public'"):
        federate(FedHeNN(rad="noise", **OPTIONS), embed, public=None)
    assert federate(FedHeNN(**OPTIONS), embed, public=(torch.ones(40, 6, dtype=torch.int64), PUBLIC[1])).table()


@pytest.mark.thorough
@BOTH
@pytest.mark.parametrize("array", [lambda x: x, lambda x: x.numpy()])
def test_public_examples_need_no_labels(kind: Any, array: Any) -> None:
    method = kind(**OPTIONS)
    assert without_durations(federate(method, public=array(PUBLIC[0])).history) == without_durations(
        federate(method).history
    )
    with pytest.raises(pf.UserError, match="public: cannot read examples from int; give a tensor of inputs, "):
        federate(method, public=3)
    assert federate(method, image_clients_of_bytes(), public=array(IMAGES)).history[-1]["failures"] == []


def image_clients_of_bytes() -> list[pf.Client]:
    data = IMAGES[:12], torch.arange(12) % 3
    return [pf.Client("a", lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 3)), data, data)]


def test_representations_that_cannot_be_used_are_refused() -> None:
    method = FedHeNN(rank=5, weighting="capacity", **OPTIONS)
    at = federation(method)
    state = method.server_init(at.server_context())
    down, good = reply_of(at, state, "client-1")
    assert at.reply_error(good, state, down) is None
    a = good.tensors["representations"]["a"]

    def flaw(new: Tensor) -> str | None:
        return at.reply_error(dataclasses.replace(good, tensors={"representations": {"a": new}}), state, down)

    assert flaw(a[:, :2]) is None
    for wrong, message in (
        (a[:39], "shape (39, 5), expected"),
        (a.double(), "float64"),
        (a.flatten(), "shape (200,), expected"),
        (torch.ones(40, 6), "its representation has 6 columns; it must have from 1 to 5"),
        (torch.ones(40, 0), "its representation has 0 columns"),
        (torch.full_like(a, float("nan")), "NaN"),
    ):
        assert message in str(flaw(wrong))
    for scalars in ({}, {"capacity": 0}, {"capacity": 1e30}, {"capacity": 2.5}, {"capacity": float("nan")}):
        assert "capacity" in str(at.reply_error(dataclasses.replace(good, scalars=scalars), state, down))
    for arrays in ({}, {"model": {"a": a}}, {"representations": {"a": a}, "model": {}}):
        assert "expected ['representations']" in str(
            at.reply_error(dataclasses.replace(good, tensors=arrays), state, down)
        )
    for tree in ({}, {"b": a}, {"a": a, "b": a}):
        wrong_names = dataclasses.replace(good, tensors={"representations": tree})
        assert "group 'representations'" in str(at.reply_error(wrong_names, state, down))
    free = FedHeNN(**OPTIONS)
    assert (
        federation(free).reply_error(pf.Message({"representations": {"a": torch.ones(40, 600)}}), state, down) is None
    )


def test_weights_that_cannot_be_used_are_refused() -> None:
    """A client's weights are held against the form of its own architecture."""
    method = FedHeNN(share="weights", **OPTIONS)
    clients = small_clients()
    clients[1] = pf.Client("client-1", lambda: nn.Linear(6, 3), clients[1].train, clients[1].test)
    at = Federation({c.id: c for c in clients}, method, Settings(rounds=4, seed=SEED), as_examples(PUBLIC))
    state = method.server_init(at.server_context())
    sent = {i: reply_of(at, state, i) for i in at.clients}
    for i, (down, _) in sent.items():
        for j, (_, reply) in sent.items():
            flaw = at.reply_error(reply, state, down)
            assert (flaw is None) == ((i == "client-1") == (j == "client-1"))
            assert flaw is None or "group 'model'" in flaw
    down, reply = sent["client-0"]
    model = dict(reply.tensors["model"])
    assert model.keys() == SmallNet().state_dict().keys()
    model["head.bias"] = model["head.bias"] / 0
    assert "'head.bias' has NaN or infinite values" in str(at.reply_error(pf.Message({"model": model}), state, down))
    model["head.bias"] = torch.zeros(3, dtype=torch.float64)
    assert "float64" in str(at.reply_error(pf.Message({"model": model}), state, down))


def test_a_network_whose_representation_is_its_input_is_warned_of() -> None:
    x, y = torch.randn(20, 4, generator=torch_generator(1)), torch.arange(20) % 2
    clients = [pf.Client(name, lambda: torch.nn.Linear(4, 2), (x, y), (x, y)) for name in ("a", "b")]
    method = FedHeNNHomo(lr=0.1, local_epochs=1, rad_size=20)
    with pytest.warns(RuntimeWarning, match="nothing before '' is trained"):
        pf.federate(clients, method, rounds=1, public=(x + 1, y), workers=0)


def test_a_module_for_a_client_that_is_not_there_is_refused() -> None:
    x, y = torch.randn(20, 4, generator=torch_generator(1)), torch.arange(20) % 2
    clients = [pf.Client("north", lambda: torch.nn.Linear(4, 2), (x, y), (x, y))]
    with pytest.raises(pf.UserError, match=r"module names 'noth', but no client has this id.*north"):
        pf.federate(clients, FedHeNN(rad_size=20, module={"noth": "0"}), rounds=1, public=(x, y))


def test_transforms_of_one_name_that_differ_are_told_apart() -> None:
    def times(k: float) -> Any:
        return lambda x: x * k

    x, y = torch.randn(20, 4, generator=torch_generator(1)), torch.arange(20) % 2
    own = Examples(x, y, transform=times(1.0))
    clients = [pf.Client("a", lambda: torch.nn.Linear(4, 2), own, own)]
    with pytest.raises(pf.UserError, match="prepare both alike"):
        pf.federate(clients, FedHeNN(rad_size=20), rounds=1, public=Examples(x, y, transform=times(2.0)))
