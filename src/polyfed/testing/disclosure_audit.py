"""Audits which facts about a client a method's messages reveal, by changing one fact at a time and comparing the
client's replies.

The floating-point numbers in a reply depend on the client's data, and are what `Algorithm.discloses` declares. Names, shapes
and types of the tensors, integers in them, and the scalars that the method needs, can reveal more, such as the number of
examples. Tensors that come back unchanged reveal the layers that a network lacks. The networks of this audit have everything
that may reveal something: BatchNorm, which counts batches, buffers of each kind, and weights that two layers share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Architecture, Client, Message
from polyfed.core.examples.examples import Examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import torch_generator
from polyfed.core.state_dict import view_as_bytes
from polyfed.models.lora import add_lora
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings

ReplyReach = Literal["nobody", "combined with others", "as it is"]

CLASS_COUNTS = "class counts"
"""The fact that numbers in a reply are in proportion to how many examples of each class a site has."""
DATA_FACTS = ("number of examples", "largest label", "order of examples", "values of examples")
NETWORK_FACTS = ("width", "depth", "layer types")


@final
class IdentityWithCounters(nn.Module):
    """Passes inputs on, and counts minibatches and examples in buffers, to show which methods send them.

    The buffers are of each kind: integer, boolean and floating-point, one outside the state dict.

    >>> IdentityWithCounters().train()(torch.zeros(5, 2)).shape
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
        """Returns the inputs unchanged, of any shape; in training it updates the buffers."""
        if self.training:
            self.steps += 1
            self.rows += len(x)
            self.many |= self.rows > 20
            self.mean.lerp_(x.detach().mean(), 0.1)
        return x


def audit_network(width: int = 8, depth: int = 1, norm: bool = True, tied: bool = True) -> nn.Module:
    """Builds a small network with hidden layers of one width, with or without normalisation layers.

    `tied` adds two layers that share their weight.
    """
    sizes, layers = [6, *[width] * depth], list[nn.Module]([IdentityWithCounters()])
    for k in range(depth):
        norms = [nn.BatchNorm1d(width), nn.LayerNorm(width)] if norm else []
        layers += [nn.Linear(sizes[k], sizes[k + 1]), *norms, nn.ReLU()]
    if tied:
        source_layer, tied_layer = nn.Linear(width, width), nn.Linear(width, width)
        tied_layer.weight = source_layer.weight
        layers += [source_layer, nn.ReLU(), tied_layer]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def wide_network() -> nn.Module:
    """Builds the same network as `audit_network`, with hidden layers of twelve units instead of eight."""
    return audit_network(width=12)


def deep_network() -> nn.Module:
    """Builds the same network as `audit_network`, with two hidden layers instead of one."""
    return audit_network(depth=2)


def network_without_norms() -> nn.Module:
    """Builds the same network as `audit_network`, without normalisation layers."""
    return audit_network(norm=False)


def untied_network() -> nn.Module:
    """Builds an `audit_network` without shared weights, for methods that slice layers."""
    return audit_network(tied=False)


def wide_untied_network() -> nn.Module:
    """Builds a network like `untied_network`, with hidden layers of twelve units."""
    return audit_network(width=12, tied=False)


NETWORK_VARIANTS: Mapping[str, Architecture] = {
    "width": wide_network,
    "depth": deep_network,
    "layer types": network_without_norms,
}


def build_audit_clients(image: bool = False) -> list[Client]:
    """Builds the four clients of the audit, with 24 random training examples each.

    The others have between them every network that the first may change to, so that the change brings no new network into
    the federation.
    """
    generator, clients = torch_generator(11), []
    models = [None] * 4 if image else [audit_network, *NETWORK_VARIANTS.values()]
    for k, factory in enumerate(models):
        y = torch.arange(30) % 3
        x = torch.randn(30, 36 if image else 6, generator=generator) + y[:, None]
        x = x.view(30, 1, 6, 6) if image else x
        clients.append(Client(f"site-{k}", factory, (x[:24], y[:24]), (x[24:], y[24:])))
    return clients


def copy_client_with_one_fact_changed(client: Client, fact: str) -> Client:
    """Copies a client with one named fact changed, such as its number of examples or width."""
    x, y = client.train.input_tensor, client.train.y
    if fact in NETWORK_VARIANTS:
        return with_client_fields(client, model=NETWORK_VARIANTS[fact])
    changed = {
        "number of examples": lambda: (x[: len(x) // 2], y[: len(x) // 2]),
        "largest label": lambda: (x, y.clamp(max=0)),
        "order of examples": lambda: (x.flip(0), y.flip(0)),
        "values of examples": lambda: (3 * x, torch.full_like(y, int(y.max()))),
    }[fact]()
    return with_client_fields(client, train=Examples(*changed))


def with_client_fields(client: Client, **changes: Any) -> Client:
    """Returns a copy of the client in which the given fields have new values."""
    changed: Client = replace(client, **changes)
    return changed


def find_revealed_facts(algorithm: Algorithm[Any, Any], public: Examples | None = None) -> frozenset[str]:
    """Runs two rounds, and names the facts on a client that replies reveal ("number of examples").

    >>> from polyfed.algorithms import FedAvg
    >>> sorted(find_revealed_facts(FedAvg())), sorted(find_revealed_facts(FedAvg(weighted=False)))
    (['number of examples'], [])
    """
    shares_architecture, uses_images = "one_architecture" in algorithm.requires, "images" in algorithm.requires
    shares_family = "one_family" in algorithm.requires
    facts = (
        DATA_FACTS
        if shares_architecture or uses_images
        else (*DATA_FACTS, *(("width",) if shares_family else NETWORK_FACTS))
    )
    clients = [_with_suitable_network(c, algorithm) for c in build_audit_clients(image=uses_images)]
    same_width_clients = clients
    if "one_representation" in algorithm.requires:
        same_width_clients = [
            with_client_fields(c, model=audit_network) if c.model is wide_network else c for c in clients
        ]
    others_replies: dict[str, Message] = {}  # in round 1, where they do not depend on the first client
    unchanged_signatures = _reply_signatures(algorithm, same_width_clients, public, others_replies)
    lone_signatures = _reply_signatures(algorithm, clients, public, None) if facts != DATA_FACTS else []
    revealed_facts = set()
    for fact in facts:
        client = _with_suitable_network(copy_client_with_one_fact_changed(clients[0], fact), algorithm)
        alone = fact in NETWORK_FACTS
        group = [client, *(clients if alone else same_width_clients)[1:]]
        signatures = _reply_signatures(algorithm, group, public, None if alone else others_replies)
        revealed_facts |= {fact} if signatures != (lone_signatures if alone else unchanged_signatures) else set()
    if _sends_class_counts(algorithm, same_width_clients, public, others_replies):
        revealed_facts.add(CLASS_COUNTS)
    return frozenset(revealed_facts)


def _sends_class_counts(
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    public: Examples | None,
    others_replies: dict[str, Message],
) -> bool:
    """Returns whether a row of replies is always proportional to the client's class counts."""
    client, *other_clients = clients
    x, places_by_case = client.train.input_tensor, []
    for counts in ((12, 8, 4), (5, 7, 12)):  # as many examples in both, and of each class some
        labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        skewed = with_client_fields(client, train=Examples(x, labels))
        exchanges = _first_rounds(algorithm, [skewed, *other_clients], public, dict(others_replies))
        places_by_case.append(set().union(*(_proportional_rows(reply, torch.tensor(counts)) for _, reply in exchanges)))
    return bool(set.intersection(*places_by_case))


def _proportional_rows(reply: Message, counts: Tensor) -> set[tuple[str, str, int, int]]:
    """Returns the rows and columns proportional to `counts`, as (group, tensor, dimension, number)."""
    places = set()
    for group, tensors in reply.tensors.items():
        for name, tensor in tensors.items():
            for dim in range(tensor.dim()):
                rows = tensor.to(torch.float64).movedim(dim, -1).reshape(-1, tensor.shape[dim])
                if rows.shape[1] == len(counts):
                    scale = rows.sum(1, keepdim=True) / counts.sum()
                    fits = (rows - scale * counts).abs().amax(1) <= 1e-5 * scale.abs().squeeze(1)
                    places |= {(group, name, dim, int(k)) for k in (fits & (scale.squeeze(1) != 0)).nonzero()}
    return places


def collect_facts_declared_as_revealed(algorithm: Algorithm[Any, Any]) -> frozenset[str]:
    """Names the facts that a method declares: by `scalars_needed`, `requires` and `discloses`."""
    facts = {"number of examples"} if "num_examples" in algorithm.scalars_needed else set()
    if "architecture" in algorithm.discloses or "architectures" in algorithm.requires:
        facts |= set(NETWORK_FACTS)
    if "one_representation" in algorithm.requires:  # every client's last layer has this width
        facts.add("width")
    if "ranks" in algorithm.discloses:  # the shape of an update depends on everything that the update depends on
        facts |= {*DATA_FACTS, *NETWORK_FACTS}
    if "representations" in algorithm.discloses:
        facts |= {"width", *({"depth", "layer types"} if "capacity" in algorithm.scalars_needed else ())}
    if "class_counts" in algorithm.discloses:
        facts.add(CLASS_COUNTS)
    if algorithm.discloses & {"choice", "form"}:  # it follows from the data, and shows in what is sent
        facts |= set(DATA_FACTS)
    if "form" in algorithm.discloses:
        facts |= set(NETWORK_FACTS)
    return frozenset(facts)


def find_how_reply_reaches_other_clients(algorithm: Algorithm[Any, Any], public: Examples | None = None) -> ReplyReach:
    """Returns "nobody", "combined with others" or "as it is": how others get a reply next round.

    Returns:
        "as it is" if another client gets a tensor of the reply unchanged, "combined with others" if another client's
        message depends on the reply, and "nobody" if none does.
    """
    clients = [_with_suitable_network(c, algorithm) for c in build_audit_clients(image="images" in algorithm.requires)]
    if "one_representation" in algorithm.requires:
        clients = [with_client_fields(c, model=audit_network) if c.model is wide_network else c for c in clients]
    federation = _build_federation(algorithm, clients, public)
    with exclusive_single_torch_thread_with_grad():
        state, client_states = federation.initial_checkpoint().state, dict[str, Any]()
        for number in (1, 2):
            messages = {i: algorithm.dispatch(state, federation.client_info(i, number)) for i in federation.clients}
            replies = {}
            for i, client in federation.clients.items():
                client_state = client_states.get(i) or algorithm.client_init(client, 0)
                replies[i], client_states[i] = algorithm.local_update(messages[i], client_state, client, number)
            before, state = state, algorithm.aggregate(state, replies, federation.server_context())
        sender, *other_ids = federation.clients
        known_contents = {content for i in other_ids for content in _tensor_bytes(replies[i]).values()} | set(
            _tensor_bytes(messages[sender]).values()
        )
        sent_contents = [
            content
            for content in _tensor_bytes(replies[sender]).values()
            if len(content) > 8 and content not in known_contents
        ]
        other_state = algorithm.aggregate(
            before, {**replies, sender: _perturb_reply(replies[sender])}, federation.server_context()
        )
        reach: ReplyReach = "nobody"
        for i in other_ids:
            message, altered_message = (
                algorithm.dispatch(s, federation.client_info(i, 3)) for s in (state, other_state)
            )
            if _tensor_bytes(message) != _tensor_bytes(altered_message):
                reach = "combined with others"
            if set(sent_contents) & set(_tensor_bytes(message).values()):
                return "as it is"
    return reach


def _with_suitable_network(client: Client, algorithm: Algorithm[Any, Any]) -> Client:
    """Returns the client with a network that suits the method: the common network, if its own does not."""
    if "adapters" in algorithm.requires:
        return with_client_fields(client, model=lambda: add_lora(audit_network(), rank=2, layers=["1"], train=["2.*"]))
    if "one_architecture" in algorithm.requires:
        return with_client_fields(client, model=audit_network)
    if "one_family" in algorithm.requires and client.model is not None:
        return with_client_fields(
            client, model=wide_untied_network if client.model in (wide_network, wide_untied_network) else untied_network
        )
    return client


def _perturb_reply(reply: Message) -> Message:
    tensors = {
        g: {n: t * 1.01 + 0.01 if t.is_floating_point() else t for n, t in state_dict.items()}
        for g, state_dict in reply.tensors.items()
    }
    return Message(tensors, reply.scalars)


def _tensor_bytes(message: Message) -> dict[str, bytes]:
    return {
        f"{g}/{n}": view_as_bytes(t).numpy().tobytes()
        for g, tensors in message.tensors.items()
        for n, t in tensors.items()
        if t.numel()
    }


def _build_federation(algorithm: Algorithm[Any, Any], clients: Sequence[Client], public: Examples | None) -> Federation:
    pool = public if "public_data" in algorithm.requires else None
    return Federation({c.id: c for c in clients}, algorithm, Settings(rounds=4), pool)


def _reply_signatures(
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    public: Examples | None,
    others_replies: dict[str, Message] | None,
) -> list[Any]:
    """Returns what the server sees of replies in two rounds: shapes, types, integers, needed scalars.

    Without `others_replies`, the first client is alone, and the result also shows which tensors come back unchanged.
    Otherwise `others_replies` holds the other clients' replies of round 1, and is filled if it is empty."""
    rounds = _first_rounds(algorithm, clients, public, others_replies)
    return [_reply_signature(algorithm, message, reply, others_replies is None) for message, reply in rounds]


def _first_rounds(
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    public: Examples | None,
    others_replies: dict[str, Message] | None,
) -> list[tuple[Message, Message]]:
    """Returns the first client's messages and replies of two rounds (see `_reply_signatures`)."""
    federation, exchanges = _build_federation(algorithm, clients, public), list[tuple[Message, Message]]()
    client, *other_clients = clients
    with exclusive_single_torch_thread_with_grad():
        state, client_state = federation.initial_checkpoint().state, algorithm.client_init(client, 0)
        if others_replies is not None and not others_replies:
            for other_client in other_clients:
                message = algorithm.dispatch(state, federation.client_info(other_client.id, 1))
                others_replies[other_client.id], _ = algorithm.local_update(
                    message, algorithm.client_init(other_client, 0), other_client, 1
                )
        for number in (1, 2):
            message = algorithm.dispatch(state, federation.client_info(client.id, number))
            reply, client_state = algorithm.local_update(message, client_state, client, number)
            exchanges.append((message, reply))
            if number == 1:
                state = algorithm.aggregate(
                    state, {client.id: reply, **(others_replies or {})}, federation.server_context()
                )
    return exchanges


def _reply_signature(algorithm: Algorithm[Any, Any], message: Message, reply: Message, marks_unchanged: bool) -> Any:
    sent_tensors = (
        {(g, n): t for g, tensors in message.tensors.items() for n, t in tensors.items()} if marks_unchanged else {}
    )

    def is_returned(group: str, name: str, tensor: Tensor) -> bool:
        sent_tensor = sent_tensors.get((group, name))
        return sent_tensor is not None and sent_tensor.shape == tensor.shape and torch.equal(sent_tensor, tensor)

    forms = {
        (g, n): (tuple(t.shape), str(t.dtype), is_returned(g, n, t), () if t.is_floating_point() else t.tolist())
        for g, tensors in reply.tensors.items()
        for n, t in tensors.items()
    }
    return forms, {n: reply.scalars.get(n) for n in sorted(algorithm.scalars_needed)}


def contains_client_examples(tensor: Tensor, client: Client) -> bool:
    """Returns True if the tensor contains one of the client's inputs as a row, or all labels of one of its data sets."""
    for data in (client.train, client.test, client.val, client.global_test):
        if data is None:
            continue
        inputs = data.input_tensor if data.index is None else data.input_tensor[data.index]
        shape = inputs.shape[1:]
        if tensor.numel() and tensor.shape[tensor.dim() - len(shape) :] == shape:
            rows = tensor.reshape(-1, 1, shape.numel()).to(torch.float64)
            if bool((rows == inputs.reshape(1, len(inputs), -1).to(torch.float64)).all(2).any()):
                return True
        labels = data.labels.flatten()
        if tensor.numel() == len(labels) > 1 and torch.equal(
            tensor.flatten().to(torch.float64), labels.to(torch.float64)
        ):
            return True
    return False
