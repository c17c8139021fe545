"""Sends the evaluation of round t together with the training of round t + 1 in one message, which saves one exchange
per round.

Most tensors that a site needs for the evaluation are those that it gets for training, bit for bit. They are sent once: the
header says, group by group, which training tensors the evaluation uses, and the others travel beside them. So the site
rebuilds exactly the envelope that it would have got for the evaluation alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.state_dict import StateDict, view_as_bytes
from polyfed.deploy.protocol.wire import Envelope
from polyfed.simulation.engines.base import ClientTask

EVALUATION_KEY = "evaluation"
"""Key of the piggybacked evaluation in the header of a training task, and of its result in the header of the answer."""
_BESIDE = "for the evaluation: "  # prefix of groups that only the evaluation uses
_OF_TRAINING = frozenset({EVALUATION_KEY, "part", "advertise"})  # header keys that an evaluation does not have
# Positions among the source group's tensors; -1 is the next extra tensor; None takes the whole source group.
_Positions = list[int] | None

HeadBuilder = Callable[[ClientTask], Mapping[str, Any]]
"""Builds the header of the envelope with a task."""


def build_envelope_per_client(tasks: Sequence[ClientTask], build_head: HeadBuilder) -> dict[str, Envelope]:
    """Returns {client: message}; a client's training and evaluation share one message.

    Args:
        tasks: for each client at most one training task and one other.
        build_head: builds the header of a task.
    """
    training_envelopes = {
        task.client: Envelope(build_head(task), task.transmitted_message) for task in tasks if task.phase == "local"
    }
    return add_evaluations_to_envelopes(
        training_envelopes, [task for task in tasks if task.phase != "local"], build_head
    )


def add_evaluations_to_envelopes(
    training_envelope_by_client: Mapping[str, Envelope], evaluation_tasks: Sequence[ClientTask], build_head: HeadBuilder
) -> dict[str, Envelope]:
    """Adds evaluations to training messages, or sends them alone to clients without training.

    Args:
        training_envelope_by_client: client -> envelope.
        evaluation_tasks: tasks other than training, at most one for each client.
        build_head: builds the header of a task.
    """
    envelopes, are_equal = dict(training_envelope_by_client), _TensorEquality()
    for task in evaluation_tasks:
        evaluation_envelope = Envelope(build_head(task), task.transmitted_message)
        envelopes[task.client] = (
            _attach_evaluation(training_envelope_by_client[task.client], evaluation_envelope, are_equal)
            if task.client in training_envelope_by_client
            else evaluation_envelope
        )
    return envelopes


@final
class SplitEnvelope(NamedTuple):
    """Holds the training task and the evaluation task that arrived in one message, as two separate messages.

    Args:
        training: the envelope without the evaluation.
        evaluation: the envelope as it would be for the evaluation alone.
        nbytes: bytes of the tensors sent only for the evaluation.
    """

    training: Envelope
    evaluation: Envelope
    nbytes: int


def split_training_and_evaluation(envelope: Envelope) -> SplitEnvelope | None:
    """Splits a message into its training and its evaluation task; None without an evaluation.

    Raises:
        UserError: the evaluation refers to tensors that the envelope does not have.
    """
    if (evaluation := envelope.head.get(EVALUATION_KEY)) is None:
        return None
    extra_tensors = {
        group: state_dict for group, state_dict in envelope.body.tensors.items() if group.startswith(_BESIDE)
    }
    training_tensors = {
        group: state_dict for group, state_dict in envelope.body.tensors.items() if group not in extra_tensors
    }
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
        raise UserError("the evaluation in the message's header cannot be read") from error
    common_head = {word: value for word, value in envelope.head.items() if word not in _OF_TRAINING}
    training_head = {word: value for word, value in envelope.head.items() if word != EVALUATION_KEY}
    return SplitEnvelope(
        Envelope(training_head, Message(training_tensors, envelope.body.scalars)),
        Envelope({**common_head, **evaluation_fields}, body),
        Message(extra_tensors).nbytes if extra_tensors else 0,
    )


def _attach_evaluation(
    training_envelope: Envelope, evaluation_envelope: Envelope, are_equal: "_TensorEquality"
) -> Envelope:
    """Joins a training and an evaluation message into one that has common tensors only once."""
    sources: dict[str, tuple[str, _Positions]] = {}
    extra_tensors: dict[str, StateDict] = {}
    for group, tensors in evaluation_envelope.body.tensors.items():
        source, shared = _best_source_group(group, tensors, training_envelope.body.tensors, are_equal)
        if len(shared) == len(tensors) and list(tensors) == list(training_envelope.body.tensors.get(source, ())):
            sources[group] = source, None
            continue
        position_by_name = {name: k for k, name in enumerate(training_envelope.body.tensors.get(source, ()))}
        sources[group] = (
            source,
            [position_by_name[name] if name in shared else -1 for name in tensors] if shared else None,
        )
        extra_tensors[f"{_BESIDE}{group}"] = {name: tensor for name, tensor in tensors.items() if name not in shared}
    evaluation = {
        "round": evaluation_envelope.head["round"],
        "seed": evaluation_envelope.head["seed"],
        "scalars": dict(evaluation_envelope.body.scalars),
        "tensors": sources,
    }
    body = Message({**training_envelope.body.tensors, **extra_tensors}, training_envelope.body.scalars)
    return Envelope({**training_envelope.head, EVALUATION_KEY: evaluation}, body)


def _best_source_group(
    group: str, tensors: StateDict, groups: Mapping[str, StateDict], are_equal: "_TensorEquality"
) -> tuple[str, set[str]]:
    """Returns the training group that has most of an evaluation group's tensors, and their names.

    It is ("", empty set) if no tensor is shared.

    If several groups share equally many, the group of the same name wins.
    """
    best_source, best_names = "", set[str]()
    for source in sorted(groups, key=lambda candidate: candidate != group):
        shared = {
            name
            for name, tensor in tensors.items()
            if name in groups[source] and are_equal(tensor, groups[source][name])
        }
        if len(shared) > len(best_names):
            best_source, best_names = source, shared
    return best_source, best_names


def _pick_tensors(source: StateDict, positions: _Positions, extra_tensors: StateDict) -> dict[str, Tensor]:
    """Rebuilds a group of evaluation tensors, in its order, from training tensors and the tensors sent in addition."""
    if positions is None:
        return dict(source or extra_tensors)
    source_items, extra_items = list(source.items()), iter(extra_tensors.items())
    if positions.count(-1) != len(extra_tensors) or any(
        type(k) is not int or not -1 <= k < len(source_items) for k in positions
    ):
        raise ValueError("the positions are not those of tensors")
    return dict(source_items[k] if k >= 0 else next(extra_items) for k in positions)


def _validate_number(value: Any) -> float:
    if not is_number(value):
        raise ValueError("a scalar is not a number")
    return value


@final
class _TensorEquality:
    """Compares pairs of tensors bit by bit and remembers the results, since several clients get the same tensors.

    The tensors must live as long as this object, since it knows them by their ids.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, first: Tensor, second: Tensor) -> bool:
        key = id(first), id(second)
        if key not in self._known:
            same_form = first.dtype == second.dtype and first.shape == second.shape
            self._known[key] = first is second or (same_form and torch.equal(_raw_bytes(first), _raw_bytes(second)))
        return self._known[key]


def _raw_bytes(tensor: Tensor) -> Tensor:
    return view_as_bytes(tensor)
