"""What FedFomo must meet: weights by hand, requests that are met and counted, and clients that find their like."""

from dataclasses import replace

import pytest
import torch
from closed_forms import Line
from torch import nn

import polyfed as pf
from polyfed.algorithms import Local
from polyfed.algorithms.personalised.mixtures.fedfomo import FedFomo
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.testing import AlgorithmContract, SmallNet, small_clients

OPTIONS = {"lr": 0.05, "momentum": 0.5, "batch_size": 8}


@pytest.mark.slow
class TestContract(AlgorithmContract):
    published = frozenset({"model", "before"})

    # test_contract.py has it with validation examples and other options
    @pytest.fixture(params=["validation", "holdout"])
    def algorithm(self, request):
        self.validation = request.param == "validation"
        return FedFomo(num_models=1, **OPTIONS)

    def clients(self, number=3):
        if self.validation:
            return small_clients(number)
        return [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients(number)]


@pytest.mark.slow  # test_contract.py has it with the default learning rate
class TestContractWithAllModels(AlgorithmContract):
    published = frozenset({"model", "before"})

    @pytest.fixture
    def algorithm(self):
        return FedFomo(**OPTIONS)


def quadratic_client(a, c, name="q"):
    """L(θ) = ½·a·(θ − c)² on training and on validation examples."""
    x = torch.full((4, 1), a**0.5, dtype=torch.float64)
    data = pf.Examples(x, x * c)
    return pf.Client(name, Line, data, data, data, task="regression")


def at(theta):
    return {"theta": torch.tensor(theta, dtype=torch.float64)}


def offered(models, position=0, epsilon=0.0):
    """A message that brings these models; its learning rate of 0 leaves what the client makes of them."""
    scalars = {"lr": 0.0, "epsilon": epsilon, "clients": 5, "position": position}
    return Message({f"model/{j}": at(theta) for j, theta in models.items()}, scalars)


def mixed(client, start, models, preferences=None, trained=None):
    """`own` is θ_i', with which the last local training began; it came out as `trained`, or unchanged."""
    own = {"model": at(start if trained is None else trained), "before": at(start)}
    own |= {} if preferences is None else {"preferences": preferences}
    with exclusive_single_torch_thread_with_grad():
        reply, own = FedFomo(num_models=2).local_update(offered(models), own, client, 7)
    return reply, own


def test_weights_and_mixture_by_hand():
    """L(θ) = (θ − 1)²: at θ_i = 4 it is 9. w = (9 − 4)/1 for θ = 3, (9 − 1)/4 for θ = 0, (9 − 16)/1 for θ = 5."""
    reply, own = mixed(quadratic_client(2.0, 1.0), 4.0, {1: 3.0, 2: 0.0, 4: 5.0})
    expected = (5 * 3.0 + 2 * 0.0) / 7  # eq. 3 with weights 5/7 and 2/7: 4 + 5/7·(3 − 4) + 2/7·(0 − 4)
    assert expected == pytest.approx(4 + 5 / 7 * (3 - 4) + 2 / 7 * (0 - 4))
    assert reply.tensors["model"]["theta"].item() == pytest.approx(expected, abs=1e-6)
    assert own["model"]["theta"].item() == reply.tensors["model"]["theta"].item()
    assert own["preferences"].tolist() == pytest.approx([0, 5, 2, 0, -7], abs=1e-5)
    assert reply.tensors["request"]["clients"].tolist() == [1, 2]


def test_the_clients_own_training_is_weighed_like_the_others():
    """θ_i' = 4 has loss 9; its own training led to 2, w = (9 − 1)/2; another's model is 3, w = (9 − 4)/1."""
    reply, own = mixed(quadratic_client(2.0, 1.0), 4.0, {1: 3.0}, trained=2.0)
    assert reply.tensors["model"]["theta"].item() == pytest.approx((4 * 2.0 + 5 * 3.0) / 9, abs=1e-6)
    assert own["before"]["theta"].item() == reply.tensors["model"]["theta"].item()  # the learning rate is 0
    assert own["preferences"].tolist() == pytest.approx([4, 5, 0, 0, 0], abs=1e-5)


def test_training_that_made_things_worse_is_undone():
    """Equation 3 without a positive weight."""
    reply, _ = mixed(quadratic_client(2.0, 1.0), 4.0, {1: 5.0}, trained=6.0)
    assert reply.tensors["model"]["theta"].item() == 4.0


def test_nothing_is_weighed_before_the_client_has_trained():
    own = {"model": at(4.0)}
    with exclusive_single_torch_thread_with_grad():
        reply, after = FedFomo(num_models=2).local_update(offered({1: 1.0}), own, quadratic_client(2.0, 1.0), 7)
    assert reply.tensors["model"]["theta"].item() == 4.0
    assert after["preferences"].tolist() == [0.0] * 5


def test_preferences_add_up():
    before = torch.tensor([0.0, 1.0, 0.0, 2.5, 0.0], dtype=torch.float64)
    _, own = mixed(quadratic_client(2.0, 1.0), 4.0, {1: 3.0}, before)
    assert own["preferences"].tolist() == pytest.approx([0, 6, 0, 2.5, 0], abs=1e-5)
    assert before.tolist() == [0.0, 1.0, 0.0, 2.5, 0.0]


@pytest.mark.parametrize("models", [{}, {1: 4.0}, {1: 5.0, 2: -2.5}])
def test_nothing_changes_without_a_positive_weight(models):
    """No model, the client's own, and worse ones."""
    reply, own = mixed(quadratic_client(2.0, 1.0), 4.0, models)
    assert reply.tensors["model"]["theta"].item() == 4.0
    assert torch.isfinite(own["preferences"]).all()


def test_a_model_with_an_infinite_loss_has_no_say():
    reply, own = mixed(quadratic_client(2.0, 1.0), 4.0, {1: 1e300, 2: 3.0})
    assert reply.tensors["model"]["theta"].item() == pytest.approx(3.0)
    assert own["preferences"][1] == 0


def test_distance_is_the_euclidean_norm_over_all_parameters():
    def plane():
        return nn.Linear(2, 1).double()

    x = torch.eye(2, dtype=torch.float64)
    data = pf.Examples(x, torch.zeros(2, 1, dtype=torch.float64))
    client = pf.Client("one", plane, data, data, data, task="regression")
    start = {"weight": torch.tensor([[3.0, 0.0]], dtype=torch.float64), "bias": torch.zeros(1, dtype=torch.float64)}
    other = {name: tensor.clone() for name, tensor in start.items()}
    other["weight"][0, 0], other["weight"][0, 1], other["bias"][0] = 1.0, 2.0, -1.0  # differs by (−2, 2, −1): norm 3
    down = Message({"model/1": other}, offered({}).scalars)
    with exclusive_single_torch_thread_with_grad():
        _, own = FedFomo(num_models=1).local_update(down, {"model": start, "before": start}, client, 0)
    # outputs (3, 0) and (0, 1): half the mean squares are 9/4 and 1/4
    assert own["preferences"][1].item() == pytest.approx((9 / 4 - 1 / 4) / 3, abs=1e-6)


def test_epsilon_0_takes_the_most_preferred_and_breaks_ties_at_random():
    method, preferences = FedFomo(num_models=3), torch.tensor([9.0, 1.0, -4.0, 3.0, 2.0])
    assert method._choose(preferences, 0, 0.0, torch_generator(0)).tolist() == [3, 4, 1]
    assert method._choose(preferences, 3, 0.0, torch_generator(0)).tolist() == [0, 4, 1]
    firsts = {method._choose(torch.zeros(5), 0, 0.0, torch_generator(s)).tolist()[0] for s in range(60)}
    assert firsts == {1, 2, 3, 4}


def test_epsilon_1_asks_everyone_in_time_and_nobody_twice_at_once():
    method, preferences = FedFomo(num_models=2), torch.tensor([0.0, 9.0, 8.0, -5.0, -6.0])
    requests = [method._choose(preferences, 0, 1.0, torch_generator(s)).tolist() for s in range(200)]
    assert all(len(set(request)) == 2 and 0 not in request for request in requests)
    counts = [sum(k in request for request in requests) for k in range(1, 5)]
    assert all(70 < count < 130 for count in counts)  # each of the four in half of the requests
    some = [method._choose(preferences, 0, 0.3, torch_generator(s)).tolist()[0] for s in range(400)]
    assert 0.7 < sum(k == 1 for k in some) / 400 < 0.85  # 0.7 + 0.3/4


def test_epsilon_falls_with_the_rounds():
    method = FedFomo(epsilon=0.4, epsilon_decay=0.25)
    state = method.server_init(ServerContext(0, 3, (ClientInfo("a"), ClientInfo("b")), model=SmallNet))
    told = [method.dispatch(state, ClientInfo("a", t, 3)).scalars["epsilon"] for t in (1, 2, 3)]
    assert told == pytest.approx([0.4, 0.15, 0.0])


def test_downloads_are_those_asked_for_and_are_counted():
    clients = small_clients(5)
    run = pf.federate(clients, FedFomo(num_models=2, **OPTIONS), rounds=3, workers=0)
    one = safetensors_num_bytes(run.last.state["models"]["client-0"])
    assert [row["bytes_down"] for row in run.history[0]["clients"].values()] == [0] * 5
    for record in run.history[1:]:
        assert all(2 * one - 400 < row["bytes_down"] < 2 * one + 400 for row in record["clients"].values())
    payload = sum(tensor.nbytes for tensor in run.last.state["models"]["client-0"].values())
    assert all(row["bytes_up"] > payload + 2 * 8 for row in run.history[0]["clients"].values())  # model and request
    state, method = run.last.state, run.federation.algorithm
    down = method.dispatch(state, ClientInfo("client-2", 4, 4))
    asked = state["requests"]["client-2"].tolist()
    assert list(down.tensors) == [f"model/{k}" for k in asked]
    assert all(down.tensors[f"model/{k}"] is state["models"][f"client-{k}"] for k in asked)
    assert down.scalars["position"] == 2
    assert method.dispatch(state, ClientInfo("client-2", 4, 4, purpose="personal")).tensors == {}


def test_more_models_than_there_are_others_are_all_others():
    run = pf.federate(small_clients(), FedFomo(num_models=50, **OPTIONS), rounds=2, workers=0)
    assert sorted(run.last.state["requests"]["client-1"].tolist()) == [0, 2]


def test_a_model_that_nobody_trained_is_not_sent():
    run = pf.federate(
        small_clients(5), FedFomo(num_models=4, **OPTIONS), rounds=2, clients_per_round=2, seed=1, workers=0
    )
    assert any(not model for model in run.last.state["models"].values())
    trained = {f"model/{k}" for k in range(5) if run.last.state["models"][f"client-{k}"]}
    for k in range(5):
        down = run.federation.algorithm.dispatch(run.last.state, ClientInfo(f"client-{k}", 3, 3))
        expected = trained - {f"model/{k}"} if f"client-{k}" in run.last.state["requests"] else set()
        assert set(down.tensors) == expected


@pytest.mark.parametrize("request_", [[1, 1], [3, 1], [-1, 1]])
def test_impossible_requests_are_refused(request_):
    method = FedFomo(num_models=2)
    state = method.server_init(ServerContext(0, 3, tuple(ClientInfo(i) for i in "abc"), model=SmallNet))
    reply = Message({"model": state["model"], "request": {"clients": torch.tensor(request_)}})
    with pytest.raises(ValueError, match=r"it asks for the models of clients \["):
        method.reply_spec(state, Message(), reply)
    good = Message({**reply.tensors, "request": {"clients": torch.tensor([2, 1])}})
    assert method.reply_spec(state, Message(), good)["request"] == {"clients": ((2,), torch.int64)}


def test_a_client_with_an_impossible_request_is_left_out(monkeypatch):
    good = FedFomo._choose

    def choose(self, preferences, position, epsilon, generator):
        chosen = good(self, preferences, position, epsilon, generator)
        return chosen.fill_(7) if position == 1 else chosen

    monkeypatch.setattr(FedFomo, "_choose", choose)
    run = pf.federate(small_clients(), FedFomo(**OPTIONS), rounds=2, workers=0, on_error="skip")
    assert [(f["client"], "fix the client" in f["reason"]) for f in run.history[0]["failures"]] == [("client-1", True)]
    with pytest.raises(pf.ClientError, match="asks for the models of clients"):
        pf.federate(small_clients(), FedFomo(**OPTIONS), rounds=2, workers=0)


def test_a_lone_client_is_local_bit_for_bit():
    """On the examples that it does not hold out, as long as nothing has been weighed."""
    (client,) = small_clients(1)
    held = FedFomo(**OPTIONS).client_init(client, 0)["holdout"].tolist()
    rows = torch.tensor([k for k in range(len(client.train)) if k not in held])
    part = replace(client, train=client.train.select(rows))
    ours = pf.federate([client], FedFomo(**OPTIONS), rounds=1, workers=0)
    local = pf.federate([part], Local(**OPTIONS), rounds=1, workers=0)
    theirs = local.model("client-0").state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.model("client-0").state_dict().items())
    assert ours.history[-1]["bytes_down_total"] == 0


def test_the_holdout_is_drawn_by_the_seed_and_not_trained_on():
    (client,) = small_clients(1)
    bare, method = pf.Client("one", SmallNet, client.train, client.test), FedFomo(holdout=0.3, **OPTIONS)
    rows = [method.client_init(bare, seed)["holdout"] for seed in (1, 1, 2)]
    assert rows[0].dtype == torch.int64
    assert rows[0].tolist() == sorted(set(rows[0].tolist()))
    assert len(rows[0]) == round(0.3 * len(client.train))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert torch.equal(method.client_init(replace(client, id="one"), 1)["holdout"], rows[0])  # validation has no say
    run = pf.federate([bare], method, rounds=2, seed=1, workers=0)
    kept = [k for k in range(len(client.train)) if k not in rows[0].tolist()]
    part = pf.Client("one", SmallNet, client.train.select(torch.tensor(kept)), client.test)
    alone = pf.federate([part], Local(**OPTIONS), rounds=2, seed=1, workers=0)
    assert torch.equal(run.model("one").head.weight, alone.model("one").head.weight)


@pytest.mark.parametrize(("number", "held"), [(1, 0), (2, 0), (3, 1), (4, 1), (10, 2)])
def test_few_examples_are_not_all_held_out(number, held):
    x, y = torch.randn(number, 6, generator=torch_generator(0)), torch.zeros(number, dtype=torch.int64)
    own = FedFomo().client_init(pf.Client("few", SmallNet, (x, y), (x, y)), 0)
    assert len(own.get("holdout", ())) == held


def test_holdout_weighs_the_models():
    """Training labels prefer one model and the held-out ones the other; the held-out ones decide."""
    x = torch.ones(10, 1, dtype=torch.float64)
    probe = pf.Client("q", Line, pf.Examples(x, x), pf.Examples(x, x), task="regression")
    held = FedFomo().client_init(probe, 0)["holdout"]
    y = -x.clone()
    y[held] = 1.0
    client = pf.Client("q", Line, pf.Examples(x, y), pf.Examples(x, x), task="regression")
    own = {"model": at(0.0), "before": at(0.0), "holdout": held}
    with exclusive_single_torch_thread_with_grad():
        _, after = FedFomo(num_models=2).local_update(offered({1: 1.0, 2: -1.0}), own, client, 0)
    assert after["preferences"].tolist() == pytest.approx([0, 0.5, -1.5, 0, 0], abs=1e-6)
    assert torch.equal(after["holdout"], held)


def conflicting_clients():
    """Two groups of three: the same inputs, labels turned round."""
    generator = torch_generator(3)
    centres, clients = 2 * torch.randn(3, 6, generator=generator), []
    for k in range(6):
        y = torch.arange(36) % 3
        x = centres[y] + torch.randn(36, 6, generator=generator)
        y = y if k < 3 else (y + 1) % 3
        train, test, val = ((x[rows], y[rows]) for rows in (slice(0, 12), slice(12, 24), slice(24, 36)))
        clients.append(pf.Client(f"client-{k}", SmallNet, train, test, val))
    return clients


@pytest.mark.thorough
def test_clients_find_their_like():
    method = FedFomo(num_models=3, lr=0.05, batch_size=4, epsilon=1.0, epsilon_decay=0.3)
    run = pf.federate(conflicting_clients(), method, rounds=8, workers=0, evaluate_every=8)
    group = {k: range(3) if k < 3 else range(3, 6) for k in range(6)}
    for k in range(6):
        preferences = run.last.client_states[f"client-{k}"]["preferences"]
        inside = [preferences[j].item() for j in group[k] if j != k]
        outside = [preferences[j].item() for j in range(6) if j not in group[k]]
        assert min(inside) > max(outside)
        assert max(outside) < 0
    local = pf.federate(conflicting_clients(), Local(lr=0.05, batch_size=4), rounds=8, workers=0, evaluate_every=8)
    assert run.table()[-1]["accuracy"] >= local.table()[-1]["accuracy"]


def test_a_client_that_never_trained_has_the_common_draw():
    run = pf.federate(small_clients(), FedFomo(**OPTIONS), rounds=1, clients_per_round=1, workers=0)
    never = next(c.id for c in small_clients() if c.id not in run.last.client_states)
    assert torch.equal(run.model(never).head.weight, initial_state(SmallNet, 0)["head.weight"])
    assert run.model(never).body[1].running_mean.abs().sum() > 0  # estimated on its training data


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_models", 0), ("epsilon", 1.5), ("epsilon_decay", 1.5), ("holdout", 0.0), ("buffers", "average")],
)
def test_fedfomo_refuses_impossible_values(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value!r}"):
        FedFomo(**{field: value})


def test_held_out_examples_weigh_the_models():
    """Training prefers 1, but for the row that is held out, which prefers −1; test 5, validation 7; L(θ) = ½(θ − y)²."""
    x = torch.ones(4, 1, dtype=torch.float64)
    train, test, val = (pf.Examples(x, y * x) for y in (torch.tensor([[-1.0], [1.0], [1.0], [1.0]]), 5.0, 7.0))
    client = pf.Client("q", Line, train, test, val, task="regression")
    own = {"model": at(0.0), "before": at(0.0), "holdout": torch.tensor([0])}
    with exclusive_single_torch_thread_with_grad():
        _, own = FedFomo(num_models=2).local_update(offered({1: 1.0, 2: -1.0, 3: 5.0}), own, client, 7)
    assert own["preferences"].tolist() == pytest.approx([0, -1.5, 0.5, -17.5 / 5, 0], abs=1e-5)


def test_a_round_explores_as_the_server_tells_it():
    """Client 1 is preferred by far: without exploring every request names it first, with it only some do."""
    preferences = torch.tensor([0.0, 50.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    own = {"model": at(4.0), "before": at(4.0), "preferences": preferences}
    asked = {}
    for epsilon in (0.0, 1.0):
        with exclusive_single_torch_thread_with_grad():
            replies = [
                FedFomo(num_models=1).local_update(offered({}, epsilon=epsilon), own, quadratic_client(2.0, 1.0), seed)[
                    0
                ]
                for seed in range(40)
            ]
        asked[epsilon] = [reply.tensors["request"]["clients"].item() for reply in replies]
    assert set(asked[0.0]) == {1}
    assert set(asked[1.0]) == {1, 2, 3, 4}
