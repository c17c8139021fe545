"""Speaks TLS as a site does, and says what was wrong with it."""

import ssl
from pathlib import Path


def build_client_context(authority: Path) -> ssl.SSLContext:
    """Builds a site's TLS context, as strict as gRPC's, that trusts the certificates in a file.

    Python's own refuses, from 3.13 on, certificates as `openssl x509` makes them.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context(cafile=str(authority))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def describe_openssl_error(error: Exception) -> str:
    """Returns the readable part of an OpenSSL error's message, without its error numbers.

    >>> describe_openssl_error(ValueError("no"))
    'no'
    """
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error)
