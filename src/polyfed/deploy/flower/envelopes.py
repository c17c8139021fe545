"""Converts messages of polyfed to Flower's records and back, and fetches the replies that have arrived."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.serverapp import Grid

from polyfed.core.errors import UserError
from polyfed.deploy.flower.records import build_flower_record, parse_flower_record
from polyfed.deploy.protocol.wire import (
    SERVER_HEAD_BYTES,
    SITE_HEAD_BYTES,
    Envelope,
    PackedEnvelope,
    pack_envelope,
    parse_head,
)
from polyfed.deploy.server.reply_validation import sanitize_line

_LOG = logging.getLogger("polyfed.server")


def envelope_to_record(envelope: Envelope) -> RecordDict:
    """Converts a message, with its header and tensors, to a Flower RecordDict.

    >>> import torch
    >>> from polyfed.core.algorithm import Message
    >>> envelope = Envelope({"kind": "task"}, Message({"model": {"w": torch.ones(2)}}, {"lr": 0.1}))
    >>> back = envelope_from_record(envelope_to_record(envelope))
    >>> back.head, dict(back.body.scalars), back.body.tensors["model"]["w"]
    ({'kind': 'task'}, {'lr': 0.1}, tensor([1., 1.]))
    """
    return build_flower_record(*pack_envelope(envelope))


def envelope_from_record(record: RecordDict, max_head_length: int = SERVER_HEAD_BYTES) -> Envelope:
    """Converts a Flower RecordDict to a message.

    Args:
        record: the records.
        max_head_length: largest length of the header, in characters.

    Raises:
        UserError: the records hold no envelope, or a damaged one.
    """
    packed = packed_envelope_from_record(record, max_head_length)
    return Envelope(parse_head(packed.head), packed.unpack_body())


def packed_envelope_from_record(record: RecordDict, max_head_length: int = SITE_HEAD_BYTES) -> PackedEnvelope:
    """Reads a message from a Flower RecordDict, and returns it with its header and tensors still serialised.

    Args:
        record: the records.
        max_head_length: largest length of the header, in characters.

    Raises:
        UserError: the records hold no envelope, or exceed the limits.
    """
    try:
        return PackedEnvelope(*parse_flower_record(record), max_head_length)
    except Exception as error:  # on hostile bytes numpy and Flower may raise anything
        raise UserError(f"not a message of polyfed: {type(error).__name__}: {sanitize_line(error)}") from error


def pull_arrived_replies(grid: Grid, awaited_ids: Mapping[str, Any], unreadable: set[str]) -> Iterator[FlowerMessage]:
    """Fetches the replies that have arrived, one by one, so that an unreadable reply does not affect the others.

    Of a reply that comes several times the first counts, and one to another message does not.

    Args:
        grid: Flower's connection to the nodes.
        awaited_ids: ids of the messages whose replies are expected.
        unreadable: gets the ids of replies that cannot be read, which are not fetched again.
    """
    for message_id in [message_id for message_id in awaited_ids if message_id not in unreadable]:
        try:
            replies = [
                reply for reply in grid.pull_messages([message_id]) if reply.metadata.reply_to_message_id == message_id
            ]
            yield from replies[:1]
        except (
            Exception
        ) as error:  # on hostile bytes protobuf and Flower may raise anything; Flower retries the network
            unreadable.add(message_id)
            reason = f"{type(error).__name__}: {sanitize_line(error)}"
            _LOG.warning("the reply to message %s cannot be read: %s", message_id, reason)
