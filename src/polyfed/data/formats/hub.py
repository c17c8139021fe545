"""Loads published data sets from the Hugging Face hub, and keeps them in the hub's cache."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from polyfed.core.errors import UserError, check_extra_installed
from polyfed.data.formats.files import SPLIT_NAMES, Table


def load_hub_tables(repo: str, advice: str, revision: str | None = None) -> dict[str, Table]:
    """Loads a data set from the Hugging Face hub as `{split: table}` with images still encoded.

    Args:
        repo: owner/name on the hub.
        advice: what to do if it cannot be loaded, the end of the error.
        revision: branch or pull request; None for the main branch.

    Raises:
        UserError: the data set is neither in the cache nor within reach, or the extra `hub` is not installed.
    """
    check_extra_installed("datasets", "hub", f"{repo!r} from the Hugging Face hub", advice)
    import datasets

    try:
        with _offline_without_network():
            splits = datasets.load_dataset(repo, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot load {repo!r} from the Hugging Face hub ({reason}); {advice}") from error
    return {SPLIT_NAMES.get(str(name), str(name)): data.with_format("arrow")[:] for name, data in splits.items()}


@contextmanager
def _offline_without_network() -> Iterator[None]:
    """Switches the hub's client to offline mode inside the block if there is no network.

    Without a network it would retry for half a minute before it looks into its cache. The mode is a module constant, which
    is restored afterwards.
    """
    import datasets
    import huggingface_hub

    if _hub_name_resolves():
        yield
        return
    switches: tuple[Any, Any] = (datasets.config, huggingface_hub.constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _hub_name_resolves() -> bool:
    """Returns whether DNS knows the hub's host; always True behind a proxy, which resolves names itself."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname, 443)
    except OSError:
        return False
    return True
