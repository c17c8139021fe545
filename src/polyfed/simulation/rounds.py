"""The parts of a round that are the same for every method: cohort, tasks, validation of replies, the record."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from polyfed.algorithms import name_of
from polyfed.core import adapters
from polyfed.core.algorithm import Algorithm, Architecture, Client, ClientInfo, Message, ServerContext
from polyfed.core.compressed import Broadcast, decompress
from polyfed.core.compression import Compression, compression
from polyfed.core.dense import dense, dense_message, message_error
from polyfed.core.evaluation import SCORE
from polyfed.core.examples import Examples
from polyfed.core.metrics import Metric, metrics_of
from polyfed.core.seeds import derive, numpy_generator
from polyfed.core.tree import beyond, check_keepable, check_scalars, mismatch, not_finite, tensors_of
from polyfed.simulation.engines.work import Engine, Phase, Task
from polyfed.simulation.losses import lowest_round
from polyfed.simulation.roster import Roster
from polyfed.simulation.runs.checkpoint import Checkpoint
from polyfed.simulation.settings import Settings

_MOST_EXAMPLES = 10**12


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

    def best_round(self, history: Sequence[Mapping[str, Any]]) -> int | None:
        """The round that `keep` calls the best, the first of equals: by the mean validation score, or with "loss" by the
        loss on all validation examples; None without any."""
        if self.settings.keep == "loss":
            return lowest_round(history, {i: len(c.val) for i, c in self.clients.items() if c.val is not None})
        return best_round(history, self.metrics[0])

    @property
    def parties(self) -> int:
        """Clients of a round."""
        return self.settings.cohort_size(len(self.roster.ids))

    def begin(self) -> Checkpoint:
        """The state before round 1.

        Raises:
            TypeError: the server's state holds what a checkpoint does not bring back as it was.
            UserError: the method refuses this federation.
        """
        context = self.context()
        state = adapters.begun(self.algorithm, self.algorithm.server_init(context), context.model)
        check_keepable(state, f"{name_of(self.algorithm)}: the server's state")
        return Checkpoint(0, dense(state), {})

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
            model=self._common_model() if "one_architecture" in needs else None,
            architectures=roster.models if "architectures" in needs else None,
            layer_catalogue=roster.layer_catalogue,
            public=self.public if "public_data" in needs else None,
            data_spec=roster.data_spec if "one_data_spec" in needs else None,
        )

    def _common_model(self) -> Architecture:
        """The federation's network; where ranks of adapters differ, the one with the largest."""
        models, mode = self.roster.models, adapters.mode_of(self.algorithm)
        return next(iter(models.values())) if mode is None else adapters.check_ranks(models, mode)

    def cohort(self, round_number: int) -> list[str]:
        """The clients of a round, in the order of their ids; drawn from a stream of its own, so that the cohorts are the
        same for every method."""
        ids = list(self.roster.ids)
        size = self.settings.cohort_size(len(ids))
        if size == len(ids):
            return ids
        generator = numpy_generator(derive(self.settings.seed, round_number, "cohort"))
        return sorted(ids[i] for i in generator.choice(len(ids), size, replace=False))

    @cached_property
    def compression(self) -> Compression | None:
        """Of replies."""
        return compression(self.settings.compress)

    def broadcast(self, at: Checkpoint) -> Broadcast:
        """What compresses the messages from the state `at`: for evaluation they are those of the next round, bit for bit."""
        return broadcast(self.settings, at.round)

    def task(
        self,
        phase: Phase,
        client: str,
        round_number: int,
        message: Message,
        before: Checkpoint,
        sending: Broadcast | None = None,
    ) -> Task:
        """One client's task, with the seed of its (run seed, round, client, purpose).

        Args:
            phase, client, round_number, before: of the task.
            down: what the method sends.
            sending: compresses it; where several tasks share one, they share what it makes.

        Raises:
            TypeError: the message holds what cannot travel.
        """
        check_scalars(message.scalars, f"{name_of(self.algorithm)}: the message to {client!r}")
        purpose = "local" if phase == "local" else "personal"
        seed = derive(self.settings.seed, round_number, client, purpose)
        message = dense_message(message)
        sent, arrived = (sending or self.broadcast(before))(message)
        own = before.client_states.get(client)
        return Task(
            phase, round_number, client, arrived, own, seed, self.settings.seed, None if sent is message else sent
        )

    def tasks(
        self, phase: Phase, clients: Sequence[str], round_number: int, at: Checkpoint, limit: int = Engine.block_bytes
    ) -> Iterator[list[Task]]:
        """The tasks of these clients from the state `at`, in blocks whose messages take at most `limit` bytes. (Messages
        that share their tensors, as those of one global model do, are one block whatever their number.)"""
        order = sorted(clients)  # what is computed for many at once may differ in its last bits from order to order
        everyone = [self.info(client, round_number, phase) for client in order]
        sending = self.broadcast(at)
        block: list[Task] = []
        held: set[int] = set()
        size = 0
        for who, down in zip(everyone, self.algorithm.dispatch_all(at.state, everyone), strict=True):
            parts = {id(tensor): tensor.nbytes for tensor in tensors_of(down.tensors)}
            more = sum(nbytes for key, nbytes in parts.items() if key not in held)
            if block and size + more > limit:
                yield block
                block, held, size, more = [], set(), 0, sum(parts.values())
                sending.forget()
            block.append(self.task(phase, who.id, round_number, down, at, sending))
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

    def opened(self, reply: Any, message: Message) -> Any:
        """The reply to `message` as the server half takes it, of one as it travelled; what is no message is left for `flaw`.

        Raises:
            ValueError: it is not compressed as agreed; half a sentence.
        """
        return (
            reply
            if message_error(reply)
            else adapters.opened(self.algorithm, self.decompressed(reply, message), message)
        )

    def decompressed(self, reply: Message, message: Message) -> Message:
        """The reply to `message` as the client half made it.

        Raises:
            ValueError: it is not compressed as agreed; half a sentence.
        """
        return reply if self.compression is None else decompress(reply, message, self.compression)

    def flaw(self, reply: Message | None, state: Any, message: Message, client: str | None = None) -> str | None:
        """Why a reply to `message`, sent from the server's `state`, cannot be accepted; None if it can.

        Args:
            reply, state, down: as above.
            client: who replied, where that is to be checked too.
        """
        if strange := message_error(reply):
            return strange
        assert reply is not None  # None is strange
        for name, value in reply.scalars.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
                return f"scalar {name!r} is {value!r}; the local training diverged: lower lr or set clip_norm"
        if not reply.scalars.get("num_examples", 1) >= 1:
            return f"num_examples is {reply.scalars['num_examples']!r}; a client has at least one"
        known = self.roster.num_examples.get(client or "", _MOST_EXAMPLES)
        if reply.scalars.get("num_examples", 1) > known:
            return f"num_examples is {reply.scalars['num_examples']!r}, more than the {known} that the client has"
        if lacking := sorted(self.algorithm.scalars_needed - reply.scalars.keys()):
            return f"{lacking[0]} is missing, a number that the method needs; a site must not hold it back"
        try:
            wanted = adapters.expected(self.algorithm, self.algorithm.reply_spec(state, message, reply))
        except ValueError as flaw:
            return str(flaw)
        except Exception as error:  # whatever a method stumbles over in a reply that is nothing like its own
            return f"the reply cannot be read: {type(error).__name__}: {error}"
        if reply.tensors.keys() != wanted.keys():
            return f"the reply holds the groups {sorted(reply.tensors)}, expected {sorted(wanted)}"
        for group, expected in wanted.items():
            if difference := mismatch(reply.tensors[group], expected):
                return f"group {group!r}: {difference}"
        for group, tree in reply.tensors.items():
            if wrong := beyond(tree, most := self.algorithm._largest):
                what = "NaN or infinite values" if not_finite({wrong: tree[wrong]}) else f"values beyond {most:g}"
                return (f"group {group!r}: tensor {wrong!r} has {what}; the local training diverged: lower lr or set "
                        "clip_norm")  # fmt: skip
        return None


def broadcast(settings: Settings, round_number: int) -> Broadcast:
    """What compresses messages from the server's state after a round."""
    return Broadcast(compression(settings.compress_down), derive(settings.seed, round_number, "compress down"))


def mean_train_loss(scalars_of: Mapping[str, Mapping[str, float]]) -> float | None:
    """Mean of the clients' training losses, weighted by examples; None if no reply tells its loss."""
    told = [scalars for _, scalars in sorted(scalars_of.items()) if "train_loss" in scalars]
    if not told:
        return None
    weights = [scalars.get("num_examples", 1.0) for scalars in told]
    return sum(w * s["train_loss"] for w, s in zip(weights, told, strict=True)) / sum(weights)


def best_round(history: Sequence[Mapping[str, Any]], metric: Metric | None = None) -> int | None:
    """The round with the best mean score on the clients' validation examples (the first of equals); None without any.

    Args:
        history: records of rounds.
        metric: the score that decides; None is the task's own.

    >>> from polyfed.core.metrics import METRICS
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


def score_of(federation: Federation) -> dict[str, Any]:
    """What `manifest.json` tells of the metric that decides."""
    score = federation.metrics[0]
    return {
        "name": score.name, "label": score.label, "unit": score.unit, "higher_is_better": score.higher_is_better,
    }  # fmt: skip
