"""Runs Flower's SuperLink, the network hub of a deployment, so that only commands with a token can control it.

    python -m polyfed.deploy.link --control-token-file FILE ...          as flower-superlink, with its options
        --messages-on-disk                                               in its database, where memory is short
    python -m polyfed.deploy.link --control-token-file FILE --login HOST:PORT    lets this user's `flwr` in
        --register NAME=KEY.pub ...                                              and registers keys of sites

Everybody who reaches the control interface can start runs, and a run is code that the SuperLink and all SuperNodes execute
with their owners' rights. Flower's open build has no authentication there (`NoOpControlAuthnPlugin`), and its signatures
(`--trusted-entities`) are for apps of its hub: an app that `flwr run` sends has none, so that SuperNodes with trusted
entities refuse every such run. But the interface accepts a plugin that checks a token, and the command `flwr` sends the
token in its credential store.

This uses parts of Flower that are not public. `tests/deploy/flower/test_superlink.py` checks them, and pyproject.toml
names the tested versions.
"""

import contextlib
import datetime
import hmac
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import (
    ACCESS_TOKEN_KEY,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    AuthnType,
)
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.credential_store import get_credential_store
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_text_file
from polyfed.deploy.flower.private_api import (
    SUPPORTED_VERSIONS,
    UnsupportedFlowerError,
    import_superlink_parts,
    try_to_keep_messages_in_memory,
)

_LOG = logging.getLogger("polyfed.link")
_MIN_TOKEN_LENGTH = 32
# Limits of the difference between a SuperNode's clock and this one.
_MAX_AHEAD_SECONDS, _MAX_BEHIND_SECONDS = SYSTEM_TIME_TOLERANCE, SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE


@final
class TokenPlugin(NoOpControlAuthnPlugin):
    """Lets a command use Flower's control interface only if the command sends the right token.

    Args:
        token: the only accepted token.
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Returns (True, Flower's only account) for the right token, else (False, None)."""
        sent_tokens = [
            value if isinstance(value, bytes) else value.encode() for key, value in metadata if key == ACCESS_TOKEN_KEY
        ]
        if len(sent_tokens) == 1 and hmac.compare_digest(sent_tokens[0], self._token):
            return super().validate_tokens_in_metadata(metadata)
        return False, None

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        """Raises an error, since only the owner can replace the control interface's token."""
        raise FlowerError(ApiErrorCode.NO_ACCOUNT_AUTH, "The token of the control interface is wrong.")


def read_control_token(file: Path) -> str:
    """Reads the token of Flower's control interface from a file.

    Raises:
        UserError: the file is missing, others can read it, or the token is too short.
    """
    try:
        token, mode = read_text_file(file).strip(), file.stat().st_mode
    except OSError as error:
        raise UserError(f"--control-token-file: {file} cannot be read ({error.strerror})") from error
    if mode & 0o077:
        raise UserError(f"--control-token-file: others can read or write {file}; chmod 600 {file}")
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"--control-token-file: {file} must hold at least {_MIN_TOKEN_LENGTH} letters and digits; openssl rand -hex 32"
        )
    return token


def explain_refused_supernode_request(signing_time: str, now: datetime.datetime) -> str:
    """Returns why a SuperNode's request was probably refused: its clock, or else its key, is wrong.

    Args:
        signing_time: time at which the request was signed, in ISO format.
        now: time of this machine.

    >>> now = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    >>> explain_refused_supernode_request("2026-01-01T13:00:00+00:00", now)
    'its clock is 3600 s ahead of this one (at most 5 s ahead and 305 s behind are accepted); set both right'
    >>> explain_refused_supernode_request("2026-01-01T12:00:00+00:00", now)
    'its key is not the registered one, or its request was changed'
    """
    try:
        ahead = (datetime.datetime.fromisoformat(signing_time) - now).total_seconds()
    except (ValueError, TypeError):  # no time, or one without a zone
        ahead = 0.0
    if -_MAX_BEHIND_SECONDS < ahead < _MAX_AHEAD_SECONDS:
        return "its key is not the registered one, or its request was changed"
    direction = "ahead of" if ahead > 0 else "behind"
    return (
        f"its clock is {abs(ahead):.0f} s {direction} this one (at most {_MAX_AHEAD_SECONDS} s ahead and "
        f"{_MAX_BEHIND_SECONDS} s behind are accepted); set both right"
    )


def wrap_to_log_refusals(authenticate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps Flower's authentication of SuperNodes so that refusals are logged with a reason.

    Flower answers 401 for every reason, and its SuperNode then ends without a message.
    """

    def authenticate_and_log(request: Any) -> None:
        try:
            authenticate(request)
        except Exception as error:
            if getattr(error, "status_code", None) == 401:
                stamp, now = request.headers.get(TIMESTAMP_HEADER, ""), datetime.datetime.now(datetime.UTC)
                address = getattr(request.client, "host", "an unknown address")
                _LOG.warning(
                    "polyfed: the SuperNode at %s is refused: %s",
                    address,
                    explain_refused_supernode_request(stamp, now),
                )
            raise

    return authenticate_and_log


def save_control_token_for_flwr(superlink_address: str, token: str) -> None:
    """Saves the token of a SuperLink's control interface below the folder FLWR_HOME, where the command `flwr` reads it."""
    store = get_credential_store()
    pairs = {AUTHN_TYPE_STORE_KEY: AuthnType.OIDC, ACCESS_TOKEN_STORE_KEY: token, REFRESH_TOKEN_STORE_KEY: "none"}
    for key, value in pairs.items():
        store.set(key % superlink_address, value.encode())


def register_site_keys(key_file_by_site: Mapping[str, str]) -> None:
    """Registers the sites' public keys in one process, faster than `flwr supernode register` for each.

    Args:
        key_file_by_site: site -> file of its public key; keys that are registered already are left.

    Raises:
        UserError: a key could not be registered.
    """
    app: Any = importlib.import_module("flwr.cli.app").app
    for name, key in key_file_by_site.items():
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                app(["supernode", "register", key, "fed", "--name", name], standalone_mode=False)
        except (Exception, SystemExit) as error:  # click's, or Flower's own way out
            error_text = f"{output.getvalue()} {getattr(error, 'message', error)}"
            if isinstance(error, SystemExit) and not error.code:
                continue
            if "already" not in error_text:
                raise UserError(
                    f"the key of {name} could not be registered: {' '.join(error_text.split())[-300:]}"
                ) from error


def start_superlink_or_log_in(arguments: list[str]) -> None:
    """Starts the SuperLink, or with `--login` saves the token for `flwr` and registers keys.

    Raises:
        UserError: the token is missing, or others can read it, or a key cannot be registered.
    """
    os.umask(0o077)  # also for the ServerApp, since only its user may read its runs
    options = {}
    for name in ("--control-token-file", "--login"):
        if name in arguments:
            index = arguments.index(name)
            options[name] = "".join(arguments[index + 1 : index + 2])
            del arguments[index : index + 2]
    if not options.get("--control-token-file"):
        raise UserError("--control-token-file is missing: a file of mode 600 with a token; openssl rand -hex 32 > FILE")
    token = read_control_token(Path(options["--control-token-file"]))
    if "--login" in options:
        save_control_token_for_flwr(options["--login"], token)
        register_site_keys(dict(word.split("=", 1) for word in arguments if word != "--register"))
        return
    try:
        superlink_parts = import_superlink_parts()
    except UnsupportedFlowerError as error:
        raise UserError(
            f"the control interface cannot be closed by a token ({error}), and whoever reaches an open one can run code "
            "here and at the sites; pip install 'flwr>=1.41,<1.43', which were tried"
        ) from error
    if not SUPPORTED_VERSIONS.match(installed := version("flwr")):
        print(f"polyfed: warning: Flower {installed} has not been tried with this polyfed", file=sys.stderr)
    if "--messages-on-disk" in arguments:
        arguments.remove("--messages-on-disk")
    elif not try_to_keep_messages_in_memory():
        print(
            "polyfed: warning: this version of Flower holds messages in its database, which costs seconds",
            file=sys.stderr,
        )
    superlink, node_auth = superlink_parts
    superlink.load_control_authn_plugin = lambda: TokenPlugin(token)
    node_auth.authenticate_node = wrap_to_log_refusals(node_auth.authenticate_node)
    sys.argv[1:] = arguments
    superlink.flower_superlink()


def run_from_command_line() -> None:
    """Runs `main` with the command line's arguments, and exits with an error message if it raises a `UserError`."""
    try:
        start_superlink_or_log_in(sys.argv[1:])
    except UserError as error:
        sys.exit(f"polyfed: {error}")
