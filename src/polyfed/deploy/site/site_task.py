"""The task in a letter, checked before the site looks at its data: what can be refused without them is refused here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, get_args

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.metrics import Metric, is_built_in_metric, resolve_metrics
from polyfed.core.messages.compressors import Compressor
from polyfed.core.messages.message_compression import decompress_message
from polyfed.core.state_dict import StateDict
from polyfed.deploy.protocol.wire import Envelope, first_non_finite_tensor, parse_compression
from polyfed.deploy.secure_aggregation import RefusalError
from polyfed.deploy.site.private_state import read_private_state
from polyfed.deploy.site.request_log import TaskRequest
from polyfed.simulation.engines.base import ClientTask, Phase

if TYPE_CHECKING:
    from polyfed.deploy.secure_aggregation.client import SumParticipation

_ROUND_KEYS, _MAX_ROUNDS = ("round", "keep", "advertise"), 10**9  # words that are rounds, by which files are named


@final
@dataclass(frozen=True)
class SiteTask:
    """A task that a site may begin.

    Args:
        head: of its letter.
        task: with the message as it is after compression, and the private state.
        nbytes: of the tensors that came for it.
        rollback_round: the round to which the server may still go back.
        compression: of the reply.
        boxes: sealed shares for a secure sum.
    """

    head: Mapping[str, Any]
    task: ClientTask
    nbytes: int
    rollback_round: int
    compression: Compressor | None
    boxes: StateDict = field(default_factory=dict)

    @property
    def is_in_sum(self) -> bool:
        """Whether the site's numbers enter the sum of a round."""
        return self.task.phase == "local" and bool(self.head.get("secure")) and bool(self.head.get("part"))

    @property
    def next_sum_round(self) -> int | None:
        """The round for whose secure sum the letter asks for keys, too."""
        return self.head.get("advertise") if self.head.get("secure") else None


@final
@dataclass(frozen=True)
class StartedTask:
    """A task that is about to be carried out: what was requested, the site's place in a secure sum, if any, and what all
    messages have cost with this one."""

    site_task: SiteTask
    request: TaskRequest
    participation: "SumParticipation | None"
    privacy_cost: Mapping[str, float | None]


def parse_site_task(
    envelope: Envelope, site: str, folder: Path, *, clips_updates: bool, nbytes: int | None = None
) -> SiteTask:
    """The task in a letter.

    Args:
        envelope: whose `client` is this site.
        site: its name.
        folder: of the run, at the site.
        clips_updates: whether the site clips its change of what came down.
        nbytes: that came for this task, if not all of the letter's.

    Raises:
        RefusalError: the letter asks for what no site does.
        InvalidSiteStateError: the private state is lost or another's.
        UserError: the message is not compressed as the letter says.
    """
    head = envelope.head
    check_phase(head)
    round_number, seed, run_seed = (_read_whole_number(head, word) for word in ("round", "seed", "run_seed"))
    rollback_round = _read_whole_number(head, "keep") if head["phase"] == "local" else 0
    if not (head["state"] is None or type(head["state"]) is int):
        raise RefusalError("the letter names no private state")
    if head.get("secure") and head.get("advertise") is not None:
        _read_whole_number(head, "advertise")
    reply_compression, message_compression = parse_compression(head)
    compressed, boxes = _split_off_boxes(envelope.body) if head.get("secure") else (envelope.body, {})
    message = (
        compressed if message_compression is None else decompress_message(compressed, Message(), message_compression)
    )
    if clips_updates and (wrong := first_non_finite_tensor(message)):
        raise RefusalError(
            f"{wrong} of what came down has NaN or infinite values, with which clipping protects nothing"
        )
    state = read_private_state(folder, site, head["state"], head["algorithm"])
    task = ClientTask(head["phase"], round_number, site, message, state, seed, run_seed)
    return SiteTask(
        head, task, compressed.nbytes if nbytes is None else nbytes, rollback_round, reply_compression, boxes
    )


def check_phase(head: Mapping[str, Any]) -> None:
    """Raises a `RefusalError` if a letter names no phase of a round."""
    if (phase := head["phase"]) not in get_args(Phase):
        raise RefusalError(f"{phase!r} is no phase of a round; {did_you_mean(str(phase), get_args(Phase))}")


def resolve_requested_metrics(names: Any, task: str) -> tuple[Metric, ...]:
    """The metrics that a letter names, which must be built in: a site computes nothing else of its examples.

    Raises:
        RefusalError: they are not, or not for this kind of task.
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
        raise RefusalError(f"the letter's {word!r} is no whole number in reach")
    return number


def _split_off_boxes(body: Message) -> tuple[Message, StateDict]:
    """What a method sent, and the sealed shares beside it."""
    from polyfed.deploy.secure_aggregation.client import BOXES_GROUP

    tensors = {group: tree for group, tree in body.tensors.items() if group != BOXES_GROUP}
    return Message(tensors, body.scalars), body.tensors.get(BOXES_GROUP, {})
