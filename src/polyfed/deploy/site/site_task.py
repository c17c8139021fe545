"""Reads a task from the server's message, and refuses an invalid task before the site uses its data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, get_args

from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import is_built_in_metric, resolve_metrics
from polyfed.core.messages.compressors import Compressor
from polyfed.core.messages.message_compression import decompress_message
from polyfed.core.state_dict import StateDict
from polyfed.core.tasks.task import Task
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.wire import Envelope, first_non_finite_tensor, parse_compressors
from polyfed.deploy.site.private_state import read_private_state
from polyfed.deploy.site.request_log import TaskRequest
from polyfed.simulation.engines.base import ClientTask, Phase
from polyfed.simulation.rounds.replies.secure_aggregation import secure_bound

if TYPE_CHECKING:
    from polyfed.deploy.secure_aggregation.client import SumParticipation

_ROUND_KEYS, _MAX_ROUNDS = ("round", "keep", "advertise"), 10**9  # rounds are parts of file names


@final
@dataclass(frozen=True)
class SiteTask:
    """Holds a training or evaluation task that a site has read from a server's message and checked.

    Args:
        head: header of the task's envelope.
        task: the task, with the decompressed message and the private state.
        nbytes: bytes of the tensors received for the task.
        rollback_round: the round to which the server may still go back.
        compression: compressor of the reply.
        encrypted_shares: encrypted shares for a secure sum, by sender.
    """

    head: Mapping[str, Any]
    task: ClientTask
    nbytes: int
    rollback_round: int
    compression: Compressor | None
    encrypted_shares: StateDict = field(default_factory=dict)

    @property
    def is_in_sum(self) -> bool:
        """Returns True if the site's reply to this task enters the round's secure sum."""
        return self.task.phase == "local" and bool(self.head.get("secure")) and bool(self.head.get("part"))

    @property
    def next_sum_round(self) -> int | None:
        """Returns the round for whose secure sum the server requests new keys from the site; None if it requests none."""
        return self.head.get("advertise") if self.head.get("secure") else None

    def answer_head(self) -> dict[str, Any]:
        """Returns the header of the reply to this task, without the results."""
        return {
            "client": self.task.client, "run": self.head["run"], "round": self.task.round, "phase": self.task.phase,
            "failure": None, "seconds": 0.0, "metrics": {},
        }  # fmt: skip


@final
@dataclass(frozen=True)
class StartedTask:
    """Holds a task to execute, and what request log, secure sum and ledger recorded about it.

    Args:
        site_task: the checked task.
        request: its entry in the request log.
        participation: the site's place in the secure sum; None without one.
        privacy_cost: ε and δ of all messages including this one; empty without noise.
    """

    site_task: SiteTask
    request: TaskRequest
    participation: "SumParticipation | None"
    privacy_cost: Mapping[str, float | None]


def parse_site_task(
    envelope: Envelope,
    site: str,
    folder: Path,
    algorithm: Algorithm[Any, Any],
    *,
    clips_updates: bool,
    nbytes: int | None = None,
) -> SiteTask:
    """Reads a task from a message, and loads the client's private state for it.

    Args:
        envelope: an envelope addressed to this site.
        site: the site's name.
        folder: the run's folder at the site.
        algorithm: the method.
        clips_updates: whether the site clips its updates.
        nbytes: bytes received for this task; None means all of the envelope's tensors.

    Raises:
        RefusalError: the header is not one of a task, or the message has values that are not finite, or lacks the bound to
            which the site must limit its part of a secure sum.
        InvalidSiteStateError: the private state is lost, damaged or not this site's.
        UserError: the message is not compressed as the header says.
    """
    head = envelope.head
    check_phase(head)
    round_number, seed, run_seed = (_read_whole_number(head, word) for word in ("round", "seed", "run_seed"))
    rollback_round = _read_whole_number(head, "keep") if head["phase"] == "local" else 0
    if not (head["state"] is None or type(head["state"]) is int):
        raise RefusalError("the header names no private state")
    if head.get("secure") and head.get("advertise") is not None:
        _read_whole_number(head, "advertise")
    reply_compression, message_compression = parse_compressors(head)
    compressed, encrypted_shares = _split_off_shares(envelope.body) if head.get("secure") else (envelope.body, {})
    message = (
        compressed if message_compression is None else decompress_message(compressed, Message(), message_compression)
    )
    if clips_updates and (nonfinite_name := first_non_finite_tensor(message)):
        raise RefusalError(
            f"{nonfinite_name} of the server's message has NaN or infinite values, with which clipping protects nothing"
        )
    state = read_private_state(folder, site, head["state"], head["algorithm"])
    task = ClientTask(head["phase"], round_number, site, message, state, seed, run_seed)
    nbytes = compressed.nbytes if nbytes is None else nbytes
    site_task = SiteTask(head, task, nbytes, rollback_round, reply_compression, encrypted_shares)
    if site_task.is_in_sum:
        try:
            secure_bound(algorithm, message)
        except UserError as error:
            raise RefusalError(str(error)) from error
    return site_task


def check_phase(head: Mapping[str, Any]) -> None:
    """Raises a `RefusalError` if a header's phase is none of a round's, such as training."""
    if (phase := head["phase"]) not in get_args(Phase):
        raise RefusalError(f"{phase!r} is not a phase of a round; {did_you_mean(str(phase), get_args(Phase))}")


def resolve_requested_metrics(names: Any, task: Task) -> tuple[Metric, ...]:
    """Returns the metrics whose names a message's header lists.

    Args:
        names: the header's list of names.
        task: of the site's client.

    Raises:
        RefusalError: a metric is not built in, or does not suit this kind of task.
    """
    if not (isinstance(names, list) and all(isinstance(name, str) and is_built_in_metric(name) for name in names)):
        raise RefusalError("the server asks for metrics that are not built into polyfed at this site")
    try:
        return resolve_metrics(names, task)
    except UserError as error:
        raise RefusalError(str(error)) from error


def _read_whole_number(head: Mapping[str, Any], word: str) -> int:
    number = head[word]
    if type(number) is not int or (word in _ROUND_KEYS and not 0 <= number < _MAX_ROUNDS):
        raise RefusalError(f"the header's {word!r} is not a whole number within its limits")
    return number


def _split_off_shares(body: Message) -> tuple[Message, StateDict]:
    """Splits a payload into the method's message and the encrypted secret shares that were sent with it."""
    from polyfed.deploy.secure_aggregation.client import SHARES_GROUP

    tensors = {group: state_dict for group, state_dict in body.tensors.items() if group != SHARES_GROUP}
    return Message(tensors, body.scalars), body.tensors.get(SHARES_GROUP, {})
