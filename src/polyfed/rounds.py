"""The parts of a round that are the same for every method: cohort, tasks, validation of replies, the record."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from torch import Tensor

from polyfed.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.data.examples import Examples
from polyfed.engines.work import Engine, Phase, Task
from polyfed.evaluation import SCORE
from polyfed.metrics import Metric, metrics_of
from polyfed.roster import Roster
from polyfed.runs.checkpoint import Checkpoint
from polyfed.seeds import derive, numpy_generator
from polyfed.settings import Settings
from polyfed.tree import mismatch, not_finite, spec, tensors_of


@final
@dataclass(frozen=True)
class Federation:
    """Who takes part, by which method and settings: what stays the same from round to round.

    Attributes: `clients`, whom a simulation plays; in a deployment they are elsewhere, and the server has only the `told`
    roster of them; `metrics`, what is computed at evaluation, of which the first decides: if none are given, those that the
    settings name, or the task's own.
    """

    clients: Mapping[str, Client]
    algorithm: Algorithm[Any, Any]
    settings: Settings
    public: Examples | None = None
    told: Roster | None = None
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        if not self.metrics and (self.told or self.clients):
            task = self.told.task if self.told else next(iter(self.clients.values())).task
            object.__setattr__(self, "metrics", metrics_of(self.settings.metrics, task))

    @cached_property
    def roster(self) -> Roster:
        """What the server knows of the clients."""
        return self.told or Roster.of(list(self.clients.values()), self.algorithm.requires)

    def info(self, client: str, round_number: int, phase: Phase = "local") -> ClientInfo:
        """What the server knows of a client: its architecture only where the method requires it. The network of a round is
        made from the message that the client would receive in the next. (That download is not counted: a client that takes
        part gets it anyway.)"""
        seen = "architectures" in self.algorithm.requires
        architecture = self.roster.architectures.get(client) if seen else None
        if phase == "local":
            return ClientInfo(client, round_number, self.settings.rounds, architecture)
        return ClientInfo(client, round_number + 1, self.settings.rounds, architecture, "personal")

    def context(self) -> ServerContext:
        """What the server knows before the first round: no more than the method requires."""
        return self._context

    @cached_property
    def _context(self) -> ServerContext:
        needs, roster = self.algorithm.requires, self.roster
        return ServerContext(
            seed=self.settings.seed,
            rounds=self.settings.rounds,
            clients=tuple(self.info(client, 1) for client in roster.ids),
            model=next(iter(roster.models.values())) if "one_architecture" in needs else None,
            architectures=roster.models if "architectures" in needs else None,
            layer_catalogue=roster.layer_catalogue,
            public=self.public if "public_data" in needs else None,
            form=roster.form if "one_form" in needs else None,
        )

    def cohort(self, round_number: int) -> list[str]:
        """The clients of a round, in the order of their ids; drawn from a stream of its own, so that the cohorts are the
        same for every method."""
        ids = list(self.roster.ids)
        size = self.settings.cohort_size(len(ids))
        if size == len(ids):
            return ids
        generator = numpy_generator(derive(self.settings.seed, round_number, "cohort"))
        return sorted(ids[i] for i in generator.choice(len(ids), size, replace=False))

    def task(self, phase: Phase, client: str, round_number: int, down: Message, before: Checkpoint) -> Task:
        """One client's task, with the seed of its (run seed, round, client, purpose)."""
        purpose = "local" if phase == "local" else "personal"
        seed = derive(self.settings.seed, round_number, client, purpose)
        return Task(phase, round_number, client, down, before.minds.get(client), seed, self.settings.seed)

    def tasks(
        self, phase: Phase, clients: Sequence[str], round_number: int, at: Checkpoint, limit: int = Engine.block_bytes
    ) -> Iterator[list[Task]]:
        """The tasks of these clients from the state `at`, in blocks whose messages take at most `limit` bytes. (Messages
        that share their tensors, as those of one global model do, are one block whatever their number.)"""
        order = sorted(clients)  # what is computed for many at once may differ in its last bits from order to order
        everyone = [self.info(client, round_number, phase) for client in order]
        block: list[Task] = []
        held: set[int] = set()
        size = 0
        for who, down in zip(everyone, self.algorithm.dispatch_all(at.state, everyone), strict=True):
            parts = {id(tensor): tensor.nbytes for tensor in tensors_of(down.arrays)}
            more = sum(nbytes for key, nbytes in parts.items() if key not in held)
            if block and size + more > limit:
                yield block
                block, held, size, more = [], set(), 0, sum(parts.values())
            block.append(self.task(phase, who.id, round_number, down, at))
            held.update(parts)
            size += more
        if block:
            yield block

    def one_task(self, phase: Phase, client: str, at: Checkpoint) -> Task:
        """The same for a single client, bit for bit: a method that makes all clients' messages at once does so here too."""
        if type(self.algorithm).dispatch_all is Algorithm.dispatch_all:
            down = self.algorithm.dispatch(at.state, self.info(client, at.round, phase))
        else:
            everyone = [self.info(other, at.round, phase) for other in self.roster.ids]
            messages = zip(everyone, self.algorithm.dispatch_all(at.state, everyone), strict=False)
            down = next(message for who, message in messages if who.id == client)
        return self.task(phase, client, at.round, down, at)

    def flaw(self, reply: Message | None, state: Any, down: Message) -> str | None:
        """Why a reply to `down`, sent from the server's `state`, cannot be accepted; None if it can."""
        if not isinstance(reply, Message):
            return f"the reply is a {type(reply).__name__}, not a Message"
        for name, value in reply.scalars.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
                return f"scalar {name!r} is {value!r}; the local training diverged: lower lr or set clip_norm"
        if not reply.scalars.get("num_examples", 1) >= 1:
            return f"num_examples is {reply.scalars['num_examples']!r}; a client has at least one"
        for group, tree in reply.arrays.items():
            if alien := [name for name, value in tree.items() if not isinstance(value, Tensor)]:
                return f"group {group!r}: {alien[0]!r} is a {type(tree[alien[0]]).__name__}, not a tensor"
        wanted = self.algorithm.reply_spec(state, down)
        if wanted is None:
            wanted = {group: spec(tree) for group, tree in down.arrays.items() if group in reply.arrays}
        elif reply.arrays.keys() != wanted.keys():
            return f"the reply holds the groups {sorted(reply.arrays)}, expected {sorted(wanted)}"
        for group, expected in wanted.items():
            if difference := mismatch(reply.arrays[group], expected):
                return f"group {group!r}: {difference}"
        for group, tree in reply.arrays.items():
            if broken := not_finite(tree):
                return (f"group {group!r}: tensor {broken!r} has NaN or infinite values; the local training diverged: "
                        "lower lr or set clip_norm")  # fmt: skip
        return self.algorithm.reply_flaw(state, reply)


def mean_train_loss(replies: Mapping[str, Message]) -> float | None:
    """Mean of the clients' training losses, weighted by examples; None if no reply tells its loss."""
    told = [r.scalars for _, r in sorted(replies.items()) if "train_loss" in r.scalars]
    if not told:
        return None
    weights = [scalars.get("num_examples", 1.0) for scalars in told]
    return sum(w * s["train_loss"] for w, s in zip(weights, told, strict=True)) / sum(weights)


def best_round(history: Sequence[Mapping[str, Any]], metric: Metric | None = None) -> int | None:
    """The round with the best mean score on the clients' validation examples (the first of equals); None without any.

    Args:
        history: records of rounds.
        metric: the score that decides; None is the task's own.

    >>> from polyfed.metrics import METRICS
    >>> records = [{"round": n, "summary": {"val_brier": {"mean": value}}} for n, value in enumerate((0.3, 0.2, 0.2), 1)]
    >>> best_round(records, METRICS["brier"])
    2
    """
    names = {f"val_{name}" for name in ([metric.name] if metric else SCORE.values())}
    sign = 1 if metric is None or metric.higher_is_better else -1
    scores = {
        record["round"]: sign * statistics["mean"]
        for record in history
        for name, statistics in record.get("summary", {}).items()
        if name in names
    }
    return max(scores, key=lambda r: (scores[r], -r)) if scores else None
