"""Parses the options of polyfed's SuperNode, which are those of Flower's own, and reads the files that they name."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file


def build_supernode_parser() -> argparse.ArgumentParser:
    """Builds the parser of the options that this SuperNode shares with Flower's own; it ignores --host and --port."""
    parser = argparse.ArgumentParser(prog="python -m polyfed.deploy.supernode", allow_abbrev=False)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--root-certificates", type=Path, metavar="FILE")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--auth-supernode-private-key", type=Path, metavar="FILE")
    parser.add_argument("--node-config", default="")
    parser.add_argument("--max-retries", type=int)
    parser.add_argument("--max-wait-time", type=float)
    for unused in ("--host", "--port"):
        parser.add_argument(unused, help="only for Flower's own SuperNode: this one listens on no port")
    return parser


def node_config_as_json(text: str, parse_words: Callable[[list[str] | None], Mapping[str, Any]]) -> str:
    """Parses the node configuration as Flower does, and returns it as a JSON text.

    Args:
        text: key=value pairs, or the name of a TOML file, as Flower takes them.
        parse_words: Flower's parser.

    Raises:
        UserError: the configuration cannot be read.
    """
    try:
        return json.dumps(dict(parse_words([text] if text else None)))
    except Exception as error:  # errors of click, of TOML and of files
        raise UserError(f"--node-config cannot be read: {getattr(error, 'message', error)}") from error


def read_key_pair(file: Path | None) -> Any:
    """Reads the site's private key and returns it with its public key; None if no file is given.

    Raises:
        UserError: the key cannot be read.
    """
    if file is None:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(read_file(file.expanduser()), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"--auth-supernode-private-key: {file} cannot be read ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"--auth-supernode-private-key: {file} is not a key of an elliptic curve; ssh-keygen -t ecdsa -b 384"
        )
    return key, key.public_key()


def read_root_certificates(file: Path | None, insecure: bool) -> bytes | None:
    """Reads the certificates of trusted authorities; None, without a file, means the operating system's.

    Raises:
        UserError: the certificates cannot be read.
    """
    if file is not None and insecure:
        raise UserError("--root-certificates and --insecure exclude each other")
    try:
        return None if file is None else read_file(file.expanduser())
    except OSError as error:
        raise UserError(f"--root-certificates: {file} cannot be read ({error.strerror})") from error
