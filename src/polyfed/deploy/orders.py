"""The task in a letter, checked before the site looks at its data: what can be refused without them is refused here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, get_args

from polyfed.core.algorithm import Message
from polyfed.core.compressed import decompress
from polyfed.core.compression import Compression
from polyfed.core.errors import UserError, nearest
from polyfed.core.metrics import Metric, is_built_in, metrics_of
from polyfed.core.tree import Tree
from polyfed.deploy.private import read_state
from polyfed.deploy.requests import Requested
from polyfed.deploy.secure import RefusalError
from polyfed.deploy.wire import Letter, broken, compressed_by
from polyfed.simulation.engines.work import Phase, Task

if TYPE_CHECKING:
    from polyfed.deploy.secure.member import Place

_ROUNDS, _MOST_ROUNDS = ("round", "keep", "advertise"), 10**9  # words that are rounds, by which files are named


@final
@dataclass(frozen=True)
class Order:
    """A task that a site may begin.

    Args:
        head: of its letter.
        task: with the message as it is after compression, and the private state.
        nbytes: of the tensors that came for it.
        keep: the round to which the server may still go back.
        compression: of the reply.
        boxes: sealed shares for a secure sum.
    """

    head: Mapping[str, Any]
    task: Task
    nbytes: int
    keep: int
    compression: Compression | None
    boxes: Tree = field(default_factory=dict)

    @property
    def in_sum(self) -> bool:
        """Whether the site's numbers enter the sum of a round."""
        return self.task.phase == "local" and bool(self.head.get("secure")) and bool(self.head.get("part"))

    @property
    def following(self) -> int | None:
        """The round for whose secure sum the letter asks for keys, too."""
        return self.head.get("advertise") if self.head.get("secure") else None


@final
@dataclass(frozen=True)
class Begun:
    """A task that is about to be carried out: what was requested, the site's place in a secure sum, if any, and what all
    messages have cost with this one."""

    order: Order
    requested: Requested
    place: "Place | None"
    spent: Mapping[str, float | None]


def order_of(letter: Letter, site: str, folder: Path, *, clips: bool, nbytes: int | None = None) -> Order:
    """The task in a letter.

    Args:
        letter: whose `client` is this site.
        site: its name.
        folder: of the run, at the site.
        clips: whether the site clips its change of what came down.
        nbytes: that came for this task, if not all of the letter's.

    Raises:
        RefusalError: the letter asks for what no site does.
        NotItsOwnError: the private state is lost or another's.
        UserError: the message is not compressed as the letter says.
    """
    head = letter.head
    check_phase(head)
    number, seed, run_seed = (_whole(head, word) for word in ("round", "seed", "run_seed"))
    keep = _whole(head, "keep") if head["phase"] == "local" else 0
    if not (head["state"] is None or type(head["state"]) is int):
        raise RefusalError("the letter names no private state")
    if head.get("secure") and head.get("advertise") is not None:
        _whole(head, "advertise")
    up, down = compressed_by(head)
    arrived, boxes = _without_boxes(letter.body) if head.get("secure") else (letter.body, {})
    received = arrived if down is None else decompress(arrived, Message(), down)
    if clips and (wrong := broken(received)):
        raise RefusalError(
            f"{wrong} of what came down has NaN or infinite values, with which clipping protects nothing"
        )
    state = read_state(folder, site, head["state"], head["algorithm"])
    task = Task(head["phase"], number, site, received, state, seed, run_seed)
    return Order(head, task, arrived.nbytes if nbytes is None else nbytes, keep, up, boxes)


def check_phase(head: Mapping[str, Any]) -> None:
    """Raises a `RefusalError` if a letter names no phase of a round."""
    if (phase := head["phase"]) not in get_args(Phase):
        raise RefusalError(f"{phase!r} is no phase of a round; {nearest(str(phase), get_args(Phase))}")


def requested_metrics(names: Any, task: str) -> tuple[Metric, ...]:
    """The metrics that a letter names, which must be built in: a site computes nothing else of its examples.

    Raises:
        RefusalError: they are not, or not for this kind of task.
    """
    if not (isinstance(names, list) and all(isinstance(name, str) and is_built_in(name) for name in names)):
        raise RefusalError("the server asks for metrics that are not built into polyfed at this site")
    try:
        return metrics_of(names, task)
    except UserError as error:
        raise RefusalError(str(error)) from error


def _whole(head: Mapping[str, Any], word: str) -> int:
    number = head[word]
    if type(number) is not int or (word in _ROUNDS and not 0 <= number < _MOST_ROUNDS):
        raise RefusalError(f"the letter's {word!r} is no whole number in reach")
    return number


def _without_boxes(body: Message) -> tuple[Message, Tree]:
    """What a method sent, and the sealed shares beside it."""
    from polyfed.deploy.secure.member import BOXES

    tensors = {group: tree for group, tree in body.tensors.items() if group != BOXES}
    return Message(tensors, body.scalars), body.tensors.get(BOXES, {})
