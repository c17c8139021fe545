"""What a site's replies reveal of it besides the numbers in their tensors, found by changing one fact of the site.

The floating-point numbers in a reply depend on the site's data, and are what `Algorithm.discloses` declares. Names, shapes
and types of the tensors, whole numbers in them, and the scalars that the method needs, can reveal more: how many examples
there are, say. Which tensors come back as they went reveals the layers that a network lacks. Here one fact of a site is
changed at a time, and its replies are compared. The sites' networks have what may reveal something: BatchNorm, which counts
batches, buffers of each kind, and weights that two layers share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Architecture, Client, Message
from polyfed.core.examples import Examples
from polyfed.core.seeds import torch_generator
from polyfed.core.threads import one_thread
from polyfed.simulation.rounds import Federation
from polyfed.simulation.settings import Settings

Receiver = Literal["nobody", "combined with others", "as it is"]

DATA_FACTS = ("number of examples", "largest label", "order of examples", "values of examples")
NETWORK_FACTS = ("width", "depth", "layer types")


@final
class Counts(nn.Module):
    """Passes its inputs on, and keeps buffers of each kind: whole numbers and truths that change in training, one of them in
    no state dict, and a floating-point number.

    >>> Counts().train()(torch.zeros(5, 2)).shape
    torch.Size([5, 2])
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.rows: Tensor
        self.many: Tensor
        self.mean: Tensor
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("many", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The inputs, of any shape."""
        if self.training:
            self.steps += 1
            self.rows += len(x)
            self.many |= self.rows > 20
            self.mean.lerp_(x.detach().mean(), 0.1)
        return x


def network(
    width: int = 8, depth: int = 1, norm: bool = True, inputs: int = 6, outputs: int = 3, tied: bool = True
) -> nn.Module:
    """A network of a site, and its neighbours: with another width of its hidden layers, one layer more, or without norms.
    `tied`: whether two further layers share their weight."""
    sizes, layers = [inputs, *[width] * depth], list[nn.Module]([Counts()])
    for k in range(depth):
        norms = [nn.BatchNorm1d(width), nn.LayerNorm(width)] if norm else []
        layers += [nn.Linear(sizes[k], sizes[k + 1]), *norms, nn.ReLU()]
    if tied:
        one, other = nn.Linear(width, width), nn.Linear(width, width)
        other.weight = one.weight
        layers += [one, nn.ReLU(), other]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def wide() -> nn.Module:
    """Twelve units instead of eight."""
    return network(width=12)


def deep() -> nn.Module:
    """Two hidden layers instead of one."""
    return network(depth=2)


def plain() -> nn.Module:
    """No norm layer."""
    return network(norm=False)


def untied() -> nn.Module:
    """No shared weights, which have no widths of their own."""
    return network(tied=False)


def untied_wide() -> nn.Module:
    """The same with twelve units."""
    return network(width=12, tied=False)


CHANGED: Mapping[str, Architecture] = {"width": wide, "depth": deep, "layer types": plain}


def sites(model: Architecture | None = network, image: bool = False) -> list[Client]:
    """Four sites with 24 examples each. The others have between them every network that the first may change to, so that
    its change brings nothing new into the federation."""
    generator, found = torch_generator(11), []
    models = [model, *CHANGED.values()] if model is network and not image else [model] * 4
    for k, factory in enumerate(models):
        y = torch.arange(30) % 3
        x = torch.randn(30, 36 if image else 6, generator=generator) + y[:, None]
        x = x.view(30, 1, 6, 6) if image else x
        found.append(Client(f"site-{k}", None if image else factory, (x[:24], y[:24]), (x[24:], y[24:])))
    return found


def with_fact_changed(client: Client, fact: str) -> Client:
    """The site when one fact of it is different."""
    x, y = client.train.tensor, client.train.y
    if fact in CHANGED:
        return replace_client(client, model=CHANGED[fact])
    changed = {
        "number of examples": lambda: (x[: len(x) // 2], y[: len(x) // 2]),
        "largest label": lambda: (x, y.clamp(max=0)),
        "order of examples": lambda: (x.flip(0), y.flip(0)),
        "values of examples": lambda: (3 * x, torch.full_like(y, int(y.max()))),
    }[fact]()
    return replace_client(client, train=Examples(*changed))


def replace_client(client: Client, **changes: Any) -> Client:
    """The client with other values of its fields."""
    changed: Client = replace(client, **changes)
    return changed


def revealed(algorithm: Algorithm[Any, Any], public: Examples | None = None) -> frozenset[str]:
    """The facts of a site that its replies in the first two rounds reveal to the server.

    >>> from polyfed.algorithms import FedAvg
    >>> sorted(revealed(FedAvg())), sorted(revealed(FedAvg(weighted=False)))
    (['number of examples'], [])
    """
    one, image = "one_architecture" in algorithm.requires, "images" in algorithm.requires
    family = "one_family" in algorithm.requires
    facts = DATA_FACTS if one or image else (*DATA_FACTS, *(("width",) if family else NETWORK_FACTS))
    clients = [_suited(c, algorithm) for c in sites(image=image)]
    alike = clients
    if "one_representation" in algorithm.requires:
        alike = [replace_client(c, model=network) if c.model is wide else c for c in clients]
    first: dict[str, Message] = {}  # what the others send in round 1, whatever the data of the first
    as_it_is = _signatures(algorithm, alike, public, first)
    back = _signatures(algorithm, clients, public, None) if facts != DATA_FACTS else []
    found = set()
    for fact in facts:
        client = _suited(with_fact_changed(clients[0], fact), algorithm)
        if fact in NETWORK_FACTS:
            shows = _signatures(algorithm, [client, *clients[1:]], public, None) != back
        else:
            shows = _signatures(algorithm, [client, *alike[1:]], public, first) != as_it_is
        found |= {fact} if shows else set()
    return frozenset(found)


def allowed(algorithm: Algorithm[Any, Any]) -> frozenset[str]:
    """The facts that a method declares: by the scalars that it needs, by what it requires and by what it discloses."""
    found = {"number of examples"} if "num_examples" in algorithm.scalars_needed else set()
    if "architecture" in algorithm.discloses or "architectures" in algorithm.requires:
        found |= set(NETWORK_FACTS)
    if "one_representation" in algorithm.requires:  # it is that of everyone's last layer
        found.add("width")
    if "ranks" in algorithm.discloses:  # the shape of an update depends on everything that the update depends on
        found |= {*DATA_FACTS, *NETWORK_FACTS}
    if "representations" in algorithm.discloses:
        found |= {"width", *({"depth", "layer types"} if "capacity" in algorithm.scalars_needed else ())}
    if algorithm.discloses & {"choice", "form"}:  # it follows from the data, and shows in what is sent
        found |= set(DATA_FACTS)
    if "form" in algorithm.discloses:
        found |= set(NETWORK_FACTS)
    return frozenset(found)


def receivers(algorithm: Algorithm[Any, Any], public: Examples | None = None) -> Receiver:
    """Whether what one site sends reaches other sites in the next round."""
    clients = [_suited(c, algorithm) for c in sites(image="images" in algorithm.requires)]
    if "one_representation" in algorithm.requires:
        clients = [replace_client(c, model=network) if c.model is wide else c for c in clients]
    federation = _federation(algorithm, clients, public)
    with one_thread():
        state, states = federation.begin().state, dict[str, Any]()
        for number in (1, 2):
            downs = {i: algorithm.dispatch(state, federation.info(i, number)) for i in federation.clients}
            replies = {}
            for i, client in federation.clients.items():
                own = states.get(i) or algorithm.client_init(client, 0)
                replies[i], states[i] = algorithm.local_update(downs[i], own, client, number)
            before, state = state, algorithm.aggregate(state, replies, federation.context())
        first, *others = federation.clients
        known = {content for i in others for content in _tensors(replies[i]).values()} | set(
            _tensors(downs[first]).values()
        )
        sent = [content for content in _tensors(replies[first]).values() if len(content) > 8 and content not in known]
        other_state = algorithm.aggregate(before, {**replies, first: _moved(replies[first])}, federation.context())
        reached: Receiver = "nobody"
        for i in others:
            one, two = (algorithm.dispatch(s, federation.info(i, 3)) for s in (state, other_state))
            if _tensors(one) != _tensors(two):
                reached = "combined with others"
            if set(sent) & set(_tensors(one).values()):
                return "as it is"
    return reached


def _suited(client: Client, algorithm: Algorithm[Any, Any]) -> Client:
    """The client with the common network, where its own is not what the method requires."""
    if "one_architecture" in algorithm.requires:
        return replace_client(client, model=network)
    if "one_family" in algorithm.requires and client.model is not None:
        return replace_client(client, model=untied_wide if client.model in (wide, untied_wide) else untied)
    return client


def _moved(reply: Message) -> Message:
    tensors = {
        g: {n: t * 1.01 + 0.01 if t.is_floating_point() else t for n, t in tree.items()}
        for g, tree in reply.tensors.items()
    }
    return Message(tensors, reply.scalars)


def _tensors(message: Message) -> dict[str, bytes]:
    return {
        f"{g}/{n}": t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for g, tree in message.tensors.items()
        for n, t in tree.items()
        if t.numel()
    }


def _federation(algorithm: Algorithm[Any, Any], clients: Sequence[Client], public: Examples | None) -> Federation:
    pool = public if "public_data" in algorithm.requires else None
    return Federation({c.id: c for c in clients}, algorithm, Settings(rounds=4), pool)


def _signatures(
    algorithm: Algorithm[Any, Any], clients: Sequence[Client], public: Examples | None, first: dict[str, Message] | None
) -> list[Any]:
    """What the server sees of the first site's replies in two rounds: forms, whole numbers, the scalars needed and, without
    `first`, what comes back as it went. `first`: the others' replies of round 1, filled where it is empty; without, the
    first site is alone."""
    federation, found = _federation(algorithm, clients, public), []
    client, *others = clients
    with one_thread():
        state, own = federation.begin().state, algorithm.client_init(client, 0)
        if first is not None and not first:
            for other in others:
                down = algorithm.dispatch(state, federation.info(other.id, 1))
                first[other.id], _ = algorithm.local_update(down, algorithm.client_init(other, 0), other, 1)
        for number in (1, 2):
            down = algorithm.dispatch(state, federation.info(client.id, number))
            reply, own = algorithm.local_update(down, own, client, number)
            found.append(_seen(algorithm, down, reply, first is None))
            if number == 1:
                state = algorithm.aggregate(state, {client.id: reply, **(first or {})}, federation.context())
    return found


def _seen(algorithm: Algorithm[Any, Any], message: Message, reply: Message, unchanged: bool) -> Any:
    went = {(g, n): t for g, tree in message.tensors.items() for n, t in tree.items()} if unchanged else {}

    def back(group: str, name: str, tensor: Tensor) -> bool:
        before = went.get((group, name))
        return before is not None and before.shape == tensor.shape and torch.equal(before, tensor)

    forms = {
        (g, n): (tuple(t.shape), str(t.dtype), back(g, n, t), () if t.is_floating_point() else t.tolist())
        for g, tree in reply.tensors.items()
        for n, t in tree.items()
    }
    return forms, {n: reply.scalars.get(n) for n in sorted(algorithm.scalars_needed)}


def holds_examples(sent: Tensor, client: Client) -> bool:
    """Whether a tensor has an input of the client among its rows, or is the labels of one of its sets."""
    for data in (client.train, client.test, client.val, client.global_test):
        if data is None:
            continue
        inputs = data.tensor if data.index is None else data.tensor[data.index]
        form = inputs.shape[1:]
        if sent.numel() and sent.shape[sent.dim() - len(form) :] == form:
            rows = sent.reshape(-1, 1, form.numel()).to(torch.float64)
            if bool((rows == inputs.reshape(1, len(inputs), -1).to(torch.float64)).all(2).any()):
                return True
        labels = data.labels.flatten()
        if sent.numel() == len(labels) > 1 and torch.equal(sent.flatten().to(torch.float64), labels.to(torch.float64)):
            return True
    return False
