"""Checks that ports are free, that TLS connections succeed, and that the clocks of two machines agree."""

import contextlib
import datetime
import http.client
import socket
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path

from polyfed.deploy.doctor import Findings, note_finding, ok_finding, problem_finding
from polyfed.deploy.doctor.certificates import utc_now
from polyfed.deploy.doctor.tls import build_client_context, describe_openssl_error

TIMEOUT_SECONDS = 5.0
"""Time limit of the other side's answer."""
MAX_AHEAD_SECONDS, MAX_BEHIND_SECONDS = 4.0, 300.0
"""Limits of a site's clock against the server's: Flower refuses requests signed more than 5 s ahead or 305 s behind."""


def split_host_and_port(text: str) -> tuple[str, int]:
    """Splits a text "HOST:PORT" into the host and the port number.

    Raises:
        ValueError: the text is not an address.

    >>> split_host_and_port("federation.example.org:443"), split_host_and_port("[::1]:8000")
    (('federation.example.org', 443), ('::1', 8000))
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        is_name = bool(host.encode("idna"))  # as a resolver does, which raises for a part that is empty or too long
    except UnicodeError:
        is_name = False
    if not separator or not is_name or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ValueError(f"{text[:200]!r} is not an address; HOST:PORT, such as federation.example.org:443")
    return host, int(port)


def is_port_listening(host: str, port: int) -> bool:
    """Returns True if a program accepts TCP connections on this port of the host."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def check_port_free(component: str, host: str, port: int, advice_if_taken: str) -> Findings:
    """Yields a finding on whether a server can listen on a port, with `advice_if_taken` if it cannot."""
    if is_port_listening("127.0.0.1" if host in ("0.0.0.0", "") else host, port):
        yield problem_finding(component, f"port {port} of {host} is taken by another program; {advice_if_taken}")
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, which may restart at once
        try:
            probe.bind((host, port))
        except PermissionError:
            yield problem_finding(component, f"{port} is a port for root alone; {advice_if_taken}")
        except OSError as error:
            yield problem_finding(
                component, f"nothing can listen on port {port} of {host} ({error.strerror}); {advice_if_taken}"
            )
        else:
            yield ok_finding(component, f"port {port} of {host} is free")


def check_tls_server_and_clock(
    component: str, host: str, port: int, authority_file: Path, certificate_name: str | None = None
) -> Findings:
    """Yields whether a server answers over TLS that this machine trusts, and whether the clocks agree.

    Args:
        component: `DoctorFinding.component`.
        host: name or address of the server.
        port: its port.
        authority_file: file of the trusted certificates.
        certificate_name: the name that the certificate must cover, if it is not `host`.
    """
    try:
        context = build_client_context(authority_file)
    except (OSError, ValueError) as error:
        yield problem_finding(
            component,
            f"{host}:{port} is not asked, since {authority_file} gives no certificates here "
            f"({describe_openssl_error(error)}); put the authority's file there, and run this as the user of the service",
        )
        return
    try:
        tcp_socket = socket.create_connection((host, port), TIMEOUT_SECONDS)
    except socket.gaierror as error:
        yield problem_finding(
            component, f"the name {host} is not known here ({error.strerror}); fix the address, or this machine's DNS"
        )
        return
    except TimeoutError:
        yield problem_finding(
            component,
            f"{host}:{port} does not answer within {TIMEOUT_SECONDS:g} s; a firewall may drop the connection, on the way "
            "or at the server",
        )
        return
    except OSError as error:
        yield problem_finding(
            component,
            f"{host}:{port} takes no connection ({error.strerror}); start the server, or fix address and firewall",
        )
        return
    with tcp_socket:
        try:
            with context.wrap_socket(tcp_socket, server_hostname=certificate_name or host) as tls_socket:
                yield ok_finding(
                    component, f"{host}:{port} answers with a certificate of {authority_file} ({tls_socket.version()})"
                )
                yield from _check_clock(tls_socket, host)
        except ssl.SSLCertVerificationError as error:
            yield problem_finding(
                component,
                f"the certificate of {host}:{port} is refused: {describe_openssl_error(error)}; give this machine the "
                "certificate of the server's authority, set its clock, or fix the server's certificate",
            )
        except (ssl.SSLError, OSError, ValueError) as error:
            yield problem_finding(
                component,
                f"{host}:{port} speaks no TLS that could be understood ({describe_openssl_error(error)}); it may be another "
                "program, or a proxy",
            )


def _check_clock(tls_socket: ssl.SSLSocket, host: str) -> Findings:
    """Checks that a server's clock agrees with this machine's, by the `Date` header of an HTTP response."""
    asked_at = utc_now()
    try:
        tls_socket.settimeout(TIMEOUT_SECONDS)
        tls_socket.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = http.client.HTTPResponse(tls_socket, method="HEAD")
        answer.begin()
        date_header = answer.getheader("Date")
        date = parsedate_to_datetime(date_header) if date_header else None
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        date = None
    if date is None:
        yield note_finding("clock", f"{host} does not tell its time; compare the clocks yourself (chronyc tracking)")
        return
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    # The server reads its clock between our request and its answer, and sends whole seconds.
    answered_at = utc_now()
    early, late = (asked_at - date).total_seconds() - 1.0, (answered_at - date).total_seconds()
    if early > MAX_AHEAD_SECONDS or late < -MAX_BEHIND_SECONDS:
        off = f"{early:.0f} s ahead of" if early > 0 else f"{-late:.0f} s behind"
        yield problem_finding(
            "clock",
            f"this clock is {off} the server's; Flower refuses a site more than 5 s ahead or 305 s behind: set "
            "it (timedatectl set-ntp true)",
        )
    else:
        yield ok_finding("clock", f"this clock and that of {host} agree to a few seconds")
