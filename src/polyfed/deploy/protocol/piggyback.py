"""The evaluation of a round on the message that begins the next: one exchange instead of two.

What a site needs to evaluate is mostly what comes down for training as well, bit for bit, and travels once: the head of the
letter tells, group by group, which tensors of training are meant, and the others travel beside them. So a site has the very
letter that it would have got for the evaluation alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.state_dict import StateDict
from polyfed.deploy.protocol.wire import Envelope
from polyfed.simulation.engines.base import ClientTask

EVALUATION_KEY = "evaluation"
"""In the head of a letter that trains, the evaluation that rides on it; in the head of the answer, what came of it."""
_BESIDE = "for the evaluation: "  # begins the names of groups that training does not get
_OF_TRAINING = frozenset({EVALUATION_KEY, "part", "advertise"})  # words of a head that an evaluation does not have
_Positions = (
    list[int] | None
)  # positions among the source's tensors, -1 for the next of those beside; None is all of the source

HeadBuilder = Callable[[ClientTask], Mapping[str, Any]]
"""The head of the letter with a task."""


def build_envelopes(tasks: Sequence[ClientTask], build_head: HeadBuilder) -> dict[str, Envelope]:
    """A letter to each client. One that trains and is evaluated gets one letter for both.

    Args:
        tasks: at most one that trains, and one other, a client.
        build_head: makes heads.
    """
    training_envelopes = {
        task.client: Envelope(build_head(task), task.transmitted_message) for task in tasks if task.phase == "local"
    }
    return attach_evaluations(training_envelopes, [task for task in tasks if task.phase != "local"], build_head)


def attach_evaluations(
    training_envelopes: Mapping[str, Envelope], tasks: Sequence[ClientTask], build_head: HeadBuilder
) -> dict[str, Envelope]:
    """Letters with these tasks too: on the letter with which a client trains, or as one of its own.

    Args:
        training_envelopes: client -> letter.
        tasks: others than of training, at most one a client.
        build_head: makes heads.
    """
    envelopes, are_equal = dict(training_envelopes), _TensorEquality()
    for task in tasks:
        evaluation_envelope = Envelope(build_head(task), task.transmitted_message)
        envelopes[task.client] = (
            _attach_evaluation(training_envelopes[task.client], evaluation_envelope, are_equal)
            if task.client in training_envelopes
            else evaluation_envelope
        )
    return envelopes


@final
class SplitEnvelope(NamedTuple):
    """A letter on which an evaluation rides: `training`, without it; `evaluation`, the letter that would have come for it
    alone; `nbytes` of the tensors that came for it only."""

    training: Envelope
    evaluation: Envelope
    nbytes: int


def split_evaluation(envelope: Envelope) -> SplitEnvelope | None:
    """The two letters in one; None if nothing rides on it.

    Raises:
        UserError: it refers to what it does not have.
    """
    if (evaluation := envelope.head.get(EVALUATION_KEY)) is None:
        return None
    extra_tensors = {group: tree for group, tree in envelope.body.tensors.items() if group.startswith(_BESIDE)}
    training_tensors = {group: tree for group, tree in envelope.body.tensors.items() if group not in extra_tensors}
    try:
        tensors = {
            group: _pick_tensors(
                {} if source == "" else training_tensors[source], picks, extra_tensors.get(f"{_BESIDE}{group}", {})
            )
            for group, (source, picks) in evaluation["tensors"].items()
        }
        evaluation_fields = {"phase": "evaluate", "round": evaluation["round"], "seed": evaluation["seed"]}
        body = Message(tensors, {str(name): _validate_number(value) for name, value in evaluation["scalars"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("what the message says of an evaluation cannot be read") from error
    draw_common_head = {word: value for word, value in envelope.head.items() if word not in _OF_TRAINING}
    training_head = {word: value for word, value in envelope.head.items() if word != EVALUATION_KEY}
    return SplitEnvelope(
        Envelope(training_head, Message(training_tensors, envelope.body.scalars)),
        Envelope({**draw_common_head, **evaluation_fields}, body),
        Message(extra_tensors).nbytes if extra_tensors else 0,
    )


def _attach_evaluation(
    training_envelope: Envelope, evaluation_envelope: Envelope, are_equal: "_TensorEquality"
) -> Envelope:
    """One letter for both; the evaluation is from the same private state as the training."""
    sources: dict[str, tuple[str, _Positions]] = {}
    extra_tensors: dict[str, StateDict] = {}
    for group, tree in evaluation_envelope.body.tensors.items():
        source, shared = _best_source_group(group, tree, training_envelope.body.tensors, are_equal)
        if len(shared) == len(tree) and list(tree) == list(training_envelope.body.tensors.get(source, ())):
            sources[group] = source, None
            continue
        position_by_name = {name: k for k, name in enumerate(training_envelope.body.tensors.get(source, ()))}
        sources[group] = source, [position_by_name[name] if name in shared else -1 for name in tree] if shared else None
        extra_tensors[f"{_BESIDE}{group}"] = {name: tensor for name, tensor in tree.items() if name not in shared}
    evaluation = {
        "round": evaluation_envelope.head["round"],
        "seed": evaluation_envelope.head["seed"],
        "scalars": dict(evaluation_envelope.body.scalars),
        "tensors": sources,
    }
    body = Message({**training_envelope.body.tensors, **extra_tensors}, training_envelope.body.scalars)
    return Envelope({**training_envelope.head, EVALUATION_KEY: evaluation}, body)


def _best_source_group(
    group: str, tree: StateDict, groups: Mapping[str, StateDict], are_equal: "_TensorEquality"
) -> tuple[str, set[str]]:
    """The group of training that has most of a tree's tensors, its namesake first, and their names; "" if none has any."""
    best_source, best_names = "", set[str]()
    for source in sorted(groups, key=lambda candidate: candidate != group):
        shared = {
            name for name, tensor in tree.items() if name in groups[source] and are_equal(tensor, groups[source][name])
        }
        if len(shared) > len(best_names):
            best_source, best_names = source, shared
    return best_source, best_names


def _pick_tensors(source: StateDict, positions: _Positions, extra_tensors: StateDict) -> dict[str, Tensor]:
    """The tensors of a group, in their order."""
    if positions is None:
        return dict(source or extra_tensors)
    source_items, extra_items = list(source.items()), iter(extra_tensors.items())
    if positions.count(-1) != len(extra_tensors) or any(
        type(k) is not int or not -1 <= k < len(source_items) for k in positions
    ):
        raise ValueError("the places are not those of tensors")
    return dict(source_items[k] if k >= 0 else next(extra_items) for k in positions)


def _validate_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a scalar is no number")
    return value


@final
class _TensorEquality:
    """Whether two tensors have the same type, shape and bits; those that several clients get are compared once. Both must
    live as long as this does, since they are known by their ids."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, first: Tensor, second: Tensor) -> bool:
        key = id(first), id(second)
        if key not in self._known:
            same_form = first.dtype == second.dtype and first.shape == second.shape
            self._known[key] = first is second or (same_form and torch.equal(_raw_bytes(first), _raw_bytes(second)))
        return self._known[key]


def _raw_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
