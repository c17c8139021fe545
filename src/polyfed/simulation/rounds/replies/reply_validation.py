"""Decodes and checks a client's reply before it is aggregated."""

from typing import Any, NamedTuple, final

from polyfed.core.algorithm import Message
from polyfed.core.messages.lora import adapter_averaging_mode
from polyfed.simulation.engines.base import TaskResult
from polyfed.simulation.monitoring.update_norms import MeasuredUpdate, measure_update
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies.regional_sums import summed_reply_form
from polyfed.simulation.rounds.replies.secure_aggregation import encode_reply_in_fixed_point, find_secure_reply_error
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint


@final
class ValidatedReply(NamedTuple):
    """Holds a valid reply as the method takes it, as sent, and its update's measures (None in a secure sum)."""

    reply: Any
    transmitted: Any
    measured: MeasuredUpdate


def validate_reply(federation: Federation, result: TaskResult, checkpoint: Checkpoint) -> ValidatedReply:
    """Decodes a client's reply and checks it.

    Args:
        federation: of the run.
        result: the client's, with the reply.
        checkpoint: the state from which the client has started.

    Raises:
        ValueError: the reply cannot be accepted; the message is half a sentence.
    """
    task, reply = result.task, result.reply
    if result.masked:
        if reply is not None and (
            error_text := find_secure_reply_error(reply, federation.algorithm, checkpoint.state, task.message)
        ):
            raise ValueError(error_text)
        # No reply of a site that is in no sum of this round.
        return ValidatedReply(reply, reply, MeasuredUpdate(None, None))
    if result.summed is not None:  # added up where the client ran; values are checked there
        form = summed_reply_form(reply)
        if error_text := federation.reply_error(form, checkpoint.state, task.message, task.client):
            raise ValueError(error_text)
        return ValidatedReply(reply, reply, result.summed.measured)
    decoded = federation.decode_reply_for_server(reply, task.message)
    if error_text := federation.reply_error(decoded, checkpoint.state, task.message, task.client):
        raise ValueError(error_text)
    settings, part = federation.settings, None
    if settings.secure or settings.regions is not None:  # as a site does before it masks, or a region before it adds
        part = encode_reply_in_fixed_point(decoded, federation.algorithm, federation.num_round_clients, task.message)
    if settings.secure:
        return ValidatedReply(part, part, MeasuredUpdate(None, None))
    assert isinstance(reply, Message)  # what is none has a flaw
    is_whole = adapter_averaging_mode(federation.algorithm) is None
    uncompressed = decoded if is_whole else federation.decompress_reply(reply, task.message)
    measured = measure_update(uncompressed, task.message, federation.algorithm._differences)
    return ValidatedReply(decoded if part is None else Message(part.tensors, decoded.scalars), reply, measured)
