"""Defines the interface of a federated method: what the server computes, what a client computes, and which messages the
two exchange.

A method is one final frozen dataclass; its fields are the hyper-parameters. The server half (`server_init`, `dispatch`,
`aggregate`) and the client half (`client_init`, `local_update`, `personal_model`) share nothing but messages, so
that the same code runs in the simulator, on a cluster and at real sites. A whole method, runnable; each client draws
the shared number half-way to its own mean, and keeps to itself how often it was asked:

>>> import torch
>>> from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message
>>> from polyfed.core.state_dict import weighted_mean
>>> @dataclass(frozen=True)
... class HalfWay(Algorithm[dict, dict]):
...     rate: float = 0.5
...     def server_init(self, server): return {"model": {"number": torch.zeros(())}}
...     def dispatch(self, server_state, client_info): return Message({"model": server_state["model"]})
...     def client_init(self, client, seed): return {"asked": 0}
...     def local_update(self, message, client_state, client, seed):
...         number = message.tensors["model"]["number"]
...         number = number + self.rate * (client.train.x.mean() - number)
...         return Message({"model": {"number": number}}), {"asked": client_state["asked"] + 1}
...     def aggregate(self, server_state, replies, server):
...         return {"model": weighted_mean({i: reply.tensors["model"] for i, reply in replies.items()})}
...     def personal_model(self, message, client_state, client, seed): return torch.nn.Identity()
>>> def client(name, value):
...     data = torch.full((4, 1), value), torch.zeros(4, dtype=torch.int64)
...     return Client(name, model=None, train=data, test=data)
>>> method, clients = HalfWay(), [client("north", 2.0), client("south", 4.0)]
>>> state = method.server_init(None)
>>> for _ in range(2):
...     messages = {c.id: method.dispatch(state, ClientInfo(c.id)) for c in clients}
...     replies = {c.id: method.local_update(messages[c.id], {"asked": 0}, c, seed=0)[0] for c in clients}
...     state = method.aggregate(state, replies, None)
>>> state["model"]["number"]
tensor(2.2500)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isabstract
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, final

from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.text_labels import share_classes
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.core.methods.declared_words import check_declared_words_are_known
from polyfed.core.methods.method_definition import (
    ConstructorSignature,
    check_field_names,
    check_fields_are_named,
    check_has_all_parts,
    check_is_dataclass,
    check_overridden_parts,
    describe_changed_fields,
)
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.tasks.task import DEFAULT_TASK, Loss, Task, TaskSpec
from polyfed.core.tasks.task_lookup import get_task

ServerState = TypeVar("ServerState")  # the server's: nested dicts of tensors and plain scalars
ClientState = TypeVar("ClientState")  # a client's private state: the same, and it never leaves the client
Architecture = Callable[[], nn.Module]


@final
@dataclass(frozen=True)
class Message:
    """Holds what server and client send each other: `{group: {name: tensor}}`, and scalars by name.

    >>> import torch
    >>> Message({"model": {"w": torch.zeros(1000)}}, {"lr": 0.1}).nbytes
    4080
    """

    tensors: Mapping[str, StateDict] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        # names and a size, and no values: they may say something of a client's data
        return f"Message({', '.join((*self.tensors, *self.scalars)) or 'empty'}; {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the message's tensors as one safetensors file; scalars are not counted."""
        return safetensors_num_bytes(
            {f"{group}/{name}": t for group, tensors in self.tensors.items() for name, t in tensors.items()}
        )


@suggest_keywords
@final
@dataclass(frozen=True, init=False)
class Client:
    """Holds the examples of one participant of a federation, and the function that builds its network.

    Data are never sent; what a method discloses of them is in `Algorithm.discloses`.

    Args:
        id: its name in tables, files and messages.
        model: builds its own network, without arguments (a class, a function, a `ModelSpec`); None for the methods that
            bring their own network. Give clients of one architecture the same callable: it is built once. Parameters with
            `requires_grad=False` are neither sent nor kept: it must give them the same values each time.
        train, test, val, global_test: (x, y) tensors, a torch `Dataset` or `DataLoader`, a Hugging Face dataset, or
            `Examples`; see `polyfed.data.as_examples` for types, images and labels that are texts. `test` follows the
            client's own distribution, `global_test` is the common one; `val` chooses the best round.
        task: the name of a task of `polyfed.tasks`, or an object, also of the user's own class on `Task`:
            "classification" (labels integers (n,)), "multilabel" (0 or 1, (n, labels)), "regression" (numbers
            (n, outputs); (n,) is kept as (n, 1), for a network with outputs (batch, 1)), "survival" (time and event,
            (n, 2), for a network with outputs (batch, 1)). The targets of the last three are kept as floats.
        loss: what training minimises in place of the task's loss, in every method: from outputs and targets of a minibatch
            to their mean loss, such as `nn.CrossEntropyLoss(weight=...)`. The column `loss` of tables is this one, too.

    Attributes have the names of the arguments: the sets are `Examples` (None where not given), `task` is a `Task`.

    Raises:
        UserError: an empty id, no examples, inputs or targets that are NaN or infinite, or labels that do not suit the task.
    """

    id: str
    model: Architecture | None
    train: Examples
    test: Examples
    val: Examples | None
    global_test: Examples | None
    task: Task
    loss: Loss | None

    def __init__(
        self,
        id: str,
        model: Architecture | None,
        train: Any,
        test: Any,
        val: Any = None,
        global_test: Any = None,
        task: Task | TaskSpec = DEFAULT_TASK,
        loss: Loss | None = None,
    ) -> None:
        if not isinstance(id, str) or not id:
            raise UserError(f"a client's id must be a string that is not empty, got {id!r}")
        if not id.isascii() and any("\ud800" <= character <= "\udfff" for character in id):
            raise UserError(f"a client's id must be a text of Unicode, and {id!r} has half of a character")
        _check_builds_network(id, model)
        try:
            task = get_task(task)
        except UserError as error:
            raise UserError(f"client {id!r}: {error}") from error
        if loss is not None and not callable(loss):
            raise UserError(f"client {id!r}: loss must be a function of outputs and targets, got {type(loss).__name__}")
        if isinstance(loss, type):
            raise UserError(f"client {id!r}: loss is a class, not a function; make one of it: loss={loss.__name__}()")
        id = str.__str__(id)  # numpy's strings, say, are printed otherwise and seed other random numbers
        sets = _convert_sets(id, {"train": train, "test": test, "val": val, "global_test": global_test}, task)
        for name, value in {"id": id, "model": model, "task": task, "loss": loss, **sets}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        # one line, and nothing of the data
        sets = {"train": self.train, "val": self.val, "test": self.test, "global_test": self.global_test}
        counts = [f"{len(examples)} {name}" for name, examples in sets.items() if examples is not None]
        return f"Client({self.id!r}, {', '.join(counts)}, {self.task.name or type(self.task).__name__})"


def _check_builds_network(id: str, model: Any) -> None:
    is_other_class = isinstance(model, type) and not issubclass(model, nn.Module)
    if model is None or (callable(model) and not is_other_class and not isinstance(model, nn.Module)):
        return
    name = f"the class {model.__name__}" if is_other_class else type(model).__name__
    cure = "give a function that returns a new torch.nn.Module at each call, such as lambda: MyNet()"
    if isinstance(model, nn.Module):
        cure = "write model=lambda: MyNet() instead of model=MyNet()"
    if isinstance(model, str):
        cure = (f"for a network of polyfed's write pf.models.ModelSpec({model!r}, {{}}, shape, outputs), such as "
                "ModelSpec('mlp', {}, (13,), 2) for rows of 13 numbers and two classes")  # fmt: skip
    if hasattr(model, "train_dataset"):  # of transformers or the like
        cure = "of a trainer give the network and the data: model=lambda: copy.deepcopy(trainer.model), train=..."
    raise UserError(f"client {id!r}: model must be a callable that builds a network, got {name}; {cure}")


def _convert_sets(id: str, sources: Mapping[str, Any], task: Task) -> dict[str, Examples | None]:
    """Returns a client's sets of examples by name; None for one without a source."""
    parts = {}
    for name, source in sources.items():
        if source is not None:
            owner = f"client {id!r}: {name}"
            parts[owner] = as_examples(source, owner, labelled=not task.makes_targets)
            if parts[owner].classes is not None and not task.one_class_per_example:
                raise UserError(f"{owner} labels are texts, and the task is {task}; give numbers, or task="
                                "'classification'")  # fmt: skip
    parts, sets = share_classes(parts), dict[str, Examples | None]()
    for name in sources:
        owner = f"client {id!r}: {name}"
        examples = parts.get(owner)
        if examples is None and name in ("train", "test"):
            raise UserError(f"{owner} examples are missing")
        if examples is not None:
            if not len(examples):
                raise UserError(f"{owner} has no examples; give at least one, or leave this client out")
            try:
                y = task.prepare_targets(task.complete_targets(examples.x, examples.y))
            except UserError as error:
                raise UserError(f"{owner} {error}") from error
            examples = examples if y is examples.y else replace(examples, y=y)
            task.check_targets(examples.labels, owner)
        sets[name] = examples
    return sets


@final
@dataclass(frozen=True)
class ClientInfo:
    """Holds what the server knows of a client when it builds a message for it.

    Attributes: `id`; `round` (from 1) of `rounds`; `architecture`, the client's architecture as a key of
    `ServerContext.architectures`, None unless the method's `requires` asks for it; `purpose`, what the message is for:
    one that is only for "personal" may leave out what training alone needs.
    """

    id: str
    round: int = 1
    rounds: int = 1
    architecture: str | None = None
    purpose: Literal["local", "personal"] = "local"


@final
@dataclass(frozen=True)
class DataSpec:
    """Describes a client's data by the shape of an input and the number of outputs that a network needs.

    `inputs` is the shape of one example without the batch, as networks get it; `outputs` is the number of logits that
    the labels need.
    """

    inputs: tuple[int, ...]
    outputs: int


@final
@dataclass(frozen=True)
class ServerContext:
    """Holds what the server knows before round 1; a field is None unless `requires` asks for it.

    Attributes: `seed` of the run; `rounds` in all; `clients`, everyone who may take part; `model` builds the common
    network ("one_architecture"); `architectures` by key ("architectures"); `layer_catalogue` ("layer_catalogue");
    `public`, the pool of unlabelled examples ("public_data"); `data_spec`, the form of inputs and
    outputs, the same for all ("one_data_spec").
    """

    seed: int
    rounds: int
    clients: Sequence[ClientInfo]
    model: Architecture | None = None
    architectures: Mapping[str, Architecture] | None = None
    layer_catalogue: Any = None
    public: Examples | None = None
    data_spec: DataSpec | None = None


class Algorithm(ABC, Generic[ServerState, ClientState]):
    """Defines the server's and the clients' half of a federated method; the module shows a complete one.

    `local_update` may train a scratch module in place, but changes neither `message` nor `client_state`; it returns the new
    state.
    Every random choice comes from `seed`, which the caller derives from (run seed, round, client id, purpose).

    Raises:
        TypeError: when a class is made whose `requires`, `discloses` or `traits` has an unknown word, or with a part that
            takes other arguments than here; and for hyper-parameters that are no fields of a dataclass.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    """Words of `REQUIREMENTS`: what the clients must have; checked before the first round. A method that names none of
    `MODEL_REQUIREMENTS` brings its own network (`BringsNetwork`), and `Client.model` may be None. Where a method's
    fields decide, `__post_init__` sets it for the instance."""

    discloses: ClassVar[frozenset[str]] = frozenset({"weights"})
    """Words of `DISCLOSURES`, or new ones (`NewDisclosure`): what the server learns of a client beyond its id. Where a
    method's fields decide, `__post_init__` sets it for the instance."""

    traits: ClassVar[frozenset[str]] = frozenset()
    """Words of `TRAITS`: how the method is run and scored. Where a method's fields decide, `__post_init__` sets it for the
    instance."""

    _largest: ClassVar[float] = 1e9
    """Limits the absolute value of the numbers in a reply: a single client beyond it would ruin the mean of all."""
    _differences: ClassVar[frozenset[str]] = frozenset()  # groups of a reply that hold differences already

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        check_declared_words_are_known(cls, cls.__name__)
        check_overridden_parts(cls)
        if "__repr__" not in vars(cls):  # else that of a dataclass, which shows every field
            cls.__repr__ = Algorithm.__repr__  # type: ignore[method-assign]
        if cls.dispatch is Algorithm.dispatch and cls.dispatch_all is Algorithm.dispatch_all and not isabstract(cls):
            raise TypeError(f"{cls.__name__} must define dispatch or dispatch_all")
        last = next(kind for kind in cls.__mro__ if {"dispatch", "dispatch_all"} & vars(kind).keys())
        if "dispatch_all" not in vars(last) and cls.dispatch_all is not Algorithm.dispatch_all:
            raise TypeError(
                f"{last.__name__} overrides dispatch, which is never called, since a base has dispatch_all for all clients "
                "at once; override dispatch_all as well, or in its place"
            )

    __signature__ = ConstructorSignature()  # else `inspect` shows that of `__new__`

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Checks the names of the fields, and that no part is missing."""
        check_has_all_parts(cls)
        check_is_dataclass(cls)
        check_fields_are_named(cls, args)
        check_field_names(cls, fields)  # Python's own error names no field that would do
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(describe_changed_fields(self))})"

    # -- server ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def server_init(self, server: ServerContext) -> ServerState:
        """Builds the server's state before round 1, as nested dicts of tensors and plain scalars."""

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Builds the message that the server sends to one client; clients may get different messages."""
        return next(self.dispatch_all(server_state, [client_info]))

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """Yields the messages to several clients, in their order, each built when the caller asks for it.

        A method that builds many messages at once faster overrides this instead of `dispatch`; both give the same
        messages, up to rounding.
        """
        return (self.dispatch(server_state, client_info) for client_info in client_infos)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns `{group: {name: shape and dtype}}` that the reply to `message` must have to be accepted.

        By default these are the groups of `message`, unchanged in form. Every method's replies are also checked for
        finite tensors and for the scalars in `scalars_needed`.

        Raises:
            ValueError: the reply cannot be accepted for another reason than its form; the message is half a sentence.
        """
        return {group: state_dict_spec(tensors) for group, tensors in message.tensors.items()}

    @abstractmethod
    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Computes the server's next state from `{client id: reply}` of one round, whatever the clients' order."""

    @property
    def scalars_needed(self) -> frozenset[str]:
        """Returns the names of the scalars that the server reads from each client's reply.

        A client sends no others unless its owner allows it.
        """
        return frozenset({"num_examples"}) if getattr(self, "weighted", False) else frozenset()

    def analysis(
        self, server_state: ServerState, client_ids: Sequence[str]
    ) -> Mapping[str, Tensor | Sequence[str] | float]:
        """Returns `{name: value}` of the server's state to store after a round for plots; empty by default.

        `client_ids` are the clients of the round. Numbers go into `metrics.jsonl`, tensors and lists of names into
        `analysis/round-N.npz` of the run directory.
        """
        return {}

    # -- client ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def client_init(self, client: Client, seed: int) -> ClientState:
        """Builds the client's private state before its first round; `seed` is the run's, equal for all clients."""

    @abstractmethod
    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains one client for one round; returns its reply to the server, and its new private state."""

    @abstractmethod
    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Builds the client's personal network, which polyfed evaluates, exports and predicts with."""

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields further networks to evaluate, as (name such as "server", network); by default none.

        Each is evaluated before the next is asked for, so that all may use one scratch module.
        """
        return iter(())
