"""What the reply of a site is worth: each part is checked before the next, larger one is read.

Limits of size come first (`polyfed.deploy.wire`), then the head, the numbers, names and shapes and types of tensors, and at
last the tensors. Whether these are finite is checked for every engine (`Federation.flaw`).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.core.adapters import expected, opened
from polyfed.core.algorithm import Message
from polyfed.core.compressed import as_they_are, forms_after
from polyfed.core.compression import compression
from polyfed.core.errors import ClientError, UserError
from polyfed.core.evaluation import split_name
from polyfed.core.metrics import METRICS, named
from polyfed.core.tree import mismatch
from polyfed.deploy.riding import RIDES
from polyfed.deploy.server import Server
from polyfed.deploy.wire import Form, Packed, plain_head, small_tensors
from polyfed.simulation.engines.work import Result, Task

_LONGEST = 300  # characters of a site's sentence
_LARGEST = 1e12  # of its numbers
_SMALL = 2**13  # bytes of a tensor that is read to tell whether the form of all is right
_PREFIX = re.compile(r"([a-z]{1,20}_){0,2}")


def one_line(text: object) -> str:
    """What a site has written, short enough for a log, and without line breaks that would forge one.

    >>> one_line("a\\nb"), len(one_line("x" * 10_000))
    ('a b', 300)
    """
    shown = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * _LONGEST])
    return " ".join(shown.split())[:_LONGEST]


def result_of(
    task: Task, packed: Packed, server: Server, told: Mapping[str, Any], state: Any, *, ridden: bool = False
) -> Result:
    """The result of a task.

    Args:
        task: what was asked.
        packed: what came.
        server: whose settings say what may come.
        told: what the site said of itself when the run began.
        state: the server's, from which the task was sent.
        ridden: whether an evaluation rode on it.

    Raises:
        UserError: why the reply is not taken.
    """
    head = checked_head(task, plain_head(packed.head), server, ridden=ridden)
    metrics, seconds = _metrics(head, server), head.get("seconds", 0.0)
    if task.phase != "local":
        return Result(task, metrics=metrics, weights=None)
    scalars = _scalars(packed, server, told)
    if flaw := form_flaw(packed, task.down, server, state, scalars):
        raise UserError(flaw)
    after = {"round": task.round}  # in place of the private state, which stays there
    reply = Message(packed.body().tensors, scalars)
    return Result(task, reply, after, seconds=float(seconds) if _finite(seconds) else 0.0)


def evaluation_of(task: Task, answer: Packed | str, server: Server, *, rode: bool) -> Result:
    """The result of an evaluation, which costs the site no more than itself.

    Args:
        task: what was asked.
        answer: what came, or why nothing did.
        server: whose settings say what may come.
        rode: whether the evaluation rode on the training of the next round, so that it is in the head of that answer.
    """
    try:
        if isinstance(answer, str):
            raise UserError(answer)
        head = plain_head(answer.head)
        if rode and not isinstance(head.get(RIDES), dict):
            _check_willing(head)
            raise UserError(f"tells nothing of the evaluation of round {task.round}, which was asked for too")
        told = checked_head(task, head[RIDES] if rode else head, server)
        return Result(task, metrics=_metrics(told, server), weights=None)
    except UserError as error:
        return Result(task, failure=ClientError(task.round, task.client, task.phase, one_line(error)))


def checked_head(task: Task, head: Mapping[str, Any], server: Server, *, ridden: bool = False) -> Mapping[str, Any]:
    """The head of the answer to a task.

    Raises:
        UserError: it is the answer to something else, a refusal, or tells of a failure, or of an evaluation although none
            was `ridden`.
    """
    _check_willing(head)
    asked = {"client": task.client, "run": server.run, "round": task.round, "phase": task.phase}
    if wrong := [name for name, value in asked.items() if head.get(name) != value]:
        raise UserError(f"answers for {wrong[0]} {one_line(repr(head.get(wrong[0])))}, asked was {asked[wrong[0]]!r}")
    if RIDES in head and not ridden:
        raise UserError("tells of an evaluation that it was not asked for")
    if head.get("failure") is not None:
        raise UserError(one_line(head["failure"]))
    return head


def _check_willing(head: Mapping[str, Any]) -> None:
    if head.get("refused"):
        raise UserError(f"refuses: {one_line(head['refused'])}")


def _metrics(head: Mapping[str, Any], server: Server) -> dict[str, Any]:
    metrics = head.get("metrics", {})
    if not isinstance(metrics, dict) or not all(
        _is_score(n, server) and (v is None or _finite(v)) for n, v in metrics.items()
    ):
        raise UserError(f"its metrics are no scores or losses: {one_line(repr(metrics))}")
    return metrics


def _scalars(packed: Packed, server: Server, told: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that are used. How many examples a site has is what it said at the beginning, or not known."""
    allowed = server.algorithm.scalars_needed | {"train_loss", "num_examples"}
    scalars = {n: v for n, v in packed.scalars.items() if n in allowed}
    if wrong := [
        n for n, v in scalars.items() if isinstance(v, bool) or not isinstance(v, int | float) or abs(v) > _LARGEST
    ]:
        found = scalars[wrong[0]]
        shown = f"a list of {len(found)}" if isinstance(found, list) else one_line(repr(found))
        raise UserError(f"scalar {wrong[0]!r} is {shown}, which is no number in reach")
    known = told.get("num_examples")
    if known is None:
        scalars.pop("num_examples", None)
    elif scalars.get("num_examples", known) != known:
        raise UserError(f"tells num_examples {scalars['num_examples']}, and told {known} when the run began")
    return scalars


def form_flaw(packed: Packed, message: Message, server: Server, state: Any, scalars: Mapping[str, Any]) -> str | None:
    """How names, shapes and types of a reply differ from what the method takes; None if they do not, or if the method must
    see the tensors to tell."""
    forms: Mapping[str, Mapping[str, Form]] = packed.forms()
    if (how := compression(server.settings.compress)) is not None:
        try:
            forms = forms_after(forms, message, how)
        except ValueError as flaw:
            return one_line(flaw)
    meta: dict[str, Mapping[str, torch.Tensor]] = {
        group: {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in form.items()}
        for group, form in forms.items()
    }
    try:
        meta = dict(opened(server.algorithm, Message(meta, scalars), message).tensors)
        try:
            wanted = server.algorithm.reply_spec(state, message, Message(meta, scalars))
        except RuntimeError:  # it asks for values: small tensors are read, such as which clients FedFomo asks for
            small = {group: small_tensors(packed.groups[group], _SMALL) for group in meta}
            small = small if how is None else {group: as_they_are(tree) for group, tree in small.items()}
            meta = {group: {**tree, **small[group]} for group, tree in meta.items()}
            wanted = server.algorithm.reply_spec(state, message, Message(meta, scalars))
    except UserError:
        raise
    except ValueError as flaw:
        return one_line(flaw)
    except RuntimeError:  # a tensor without values was asked for one; `Federation.flaw` checks it again with them
        return None
    except Exception as error:  # nothing that a site sends may end the run of the others
        return f"the method cannot check its form ({type(error).__name__})"
    wanted = expected(server.algorithm, wanted)
    if forms.keys() != wanted.keys():
        return one_line(f"the reply holds the groups {sorted(forms)[:9]}, expected {sorted(wanted)}")
    differences = ((group, mismatch(meta[group], form)) for group, form in wanted.items())
    return next((one_line(f"group {group!r}: {difference}") for group, difference in differences if difference), None)


def _is_score(name: str, server: Server) -> bool:
    """Whether a site may send a number of this name."""
    found = split_name(name, [*METRICS.values(), *map(named, server.settings.metrics)])
    return found is not None and _PREFIX.fullmatch(found[0]) is not None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # nor NaN
