"""Builds a site from its SuperNode's configuration (`flower-supernode --node-config`), and answers a message with it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.trusted_code import execute_file_and_get_function, trust_code
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.training.losses import import_loss
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.wire import Envelope, PackedEnvelope, parse_head
from polyfed.deploy.site.site import Site

_PROTECTION_FIELDS = {
    word: word.replace("-", "_") for word in ("clip-norm", "noise-multiplier", "delta", "max-epsilon")
}
_KEYS = {
    "client-id", "site", "state-dir", "disclose", "allow-disclosure", "methods", "device", "data-set", "secure", "key",
    "peers", "secure-threshold", "loss", *_PROTECTION_FIELDS,
}  # fmt: skip
_FLOWER_KEYS = {"partition-id", "num-partitions"}


def build_site(node_config: Mapping[str, Any]) -> Site:
    """Builds the `Site` that a node configuration (`flower-supernode --node-config`) describes.

    The keys are the fields of `Site` with hyphens; `client-id` is the name, `site` the path of `site.py`, and lists
    are separated by commas. `loss`, as `module:name`, replaces the loss of `client()`.

    Raises:
        UserError: a key is missing or unknown, a value does not fit, or `site.py` cannot be read.
    """
    if unknown := sorted(set(node_config) - _KEYS - _FLOWER_KEYS):
        raise UserError(f"node-config has no {unknown[0]!r}; {did_you_mean(unknown[0], _KEYS)}")
    if missing := [key for key in ("client-id", "site", "state-dir") if not node_config.get(key)]:
        raise UserError(f"node-config lacks {missing[0]}: --node-config 'client-id=\"north\" site=\"/path/site.py\" "
                        "state-dir=\"/path/state\"'")  # fmt: skip
    try:
        numbers = {name: _to_float(node_config[w]) for w, name in _PROTECTION_FIELDS.items() if w in node_config}
        protection = ReplyProtection(**numbers)
    except UserError as error:
        raise UserError(f"node-config: {error}") from error
    for word in ("allow-disclosure", "secure"):
        if not isinstance(node_config.get(word, False), bool):
            raise UserError(f"node-config: {word} must be true or false, got {node_config[word]!r}")
    threshold = node_config.get("secure-threshold")
    if threshold is not None and not is_whole_number(threshold, 2):
        raise UserError(f"node-config: secure-threshold must be a whole number from 2, got {threshold!r}")
    methods = _split_names(node_config.get("methods", ""))
    trust_code(str(expand_user_path(str(node_config["site"]), "node-config: site")))  # the owner has named it
    return Site(
        name=str(node_config["client-id"]),
        client=_client_factory(node_config),
        folder=expand_user_path(str(node_config["state-dir"]), "node-config: state-dir"),
        disclose=_split_names(node_config.get("disclose", "")),
        allow_disclosure=node_config.get("allow-disclosure", False),
        methods=methods or None,
        protection=protection,
        device=str(node_config.get("device", "auto")),
        data_set=str(node_config.get("data-set", "data")),
        secure=node_config.get("secure", False),
        key=_optional_path(node_config.get("key")),
        peers=_optional_path(node_config.get("peers")),
        secure_threshold=threshold,
    )


def _to_float(value: Any) -> Any:
    """Converts a number, or a text that is one, to a float; other values stay, so that their check can name them."""
    if isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _client_factory(config: Mapping[str, Any]) -> Callable[[], Client]:
    """Returns the function `client` of a `site.py`; if the configuration names a loss, that loss replaces the client's."""
    client_factory: Callable[[], Client] = execute_file_and_get_function(
        expand_user_path(str(config["site"]), "node-config: site"), "client", "node-config: site"
    )
    if not (name := str(config.get("loss") or "")):
        return client_factory
    trust_code(name)  # the owner has named it
    loss = import_loss(name)
    return lambda: replace(client_factory(), loss=loss)


def answer_or_refuse_message(
    node_config: Mapping[str, Any], load_site: Callable[[], Site], unpack_message: Callable[[], PackedEnvelope]
) -> Envelope:
    """Loads the site and returns its reply; a refusal if site or message cannot be read.

    Args:
        node_config: the node configuration of the site.
        load_site: returns the site.
        unpack_message: returns the packed envelope.
    """
    try:
        loaded_site, packed_envelope = load_site(), unpack_message()
        envelope = Envelope(parse_head(packed_envelope.head), packed_envelope.unpack_body())
    except Exception:  # site.py may raise anything, and its text may show the site's data: it stays in the log
        logging.getLogger("polyfed.site").exception("this site cannot start")
        return Envelope(
            {"client": str(node_config.get("client-id")), "refused": "it cannot start (the reason is in its log)"}
        )
    return loaded_site.answer_envelope(envelope)


def _split_names(text: Any) -> frozenset[str]:
    return frozenset(word.strip() for word in str(text).split(",") if word.strip())


def _optional_path(word: Any) -> Path | None:
    return expand_user_path(str(word), "node-config: a path") if word else None
