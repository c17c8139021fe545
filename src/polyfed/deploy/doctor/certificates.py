"""Certificates and keys: whether they exist, belong together, fit the name and the time, and are closed to others."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from polyfed.core.files import read_file
from polyfed.deploy.doctor import Finding, Findings, note, ok, wrong
from polyfed.deploy.doctor.machine import closed_file, readable

SOON = datetime.timedelta(days=30)
"""How long before its end a certificate is worth a note."""
_DAMAGE = ValueError, TypeError, UnsupportedAlgorithm, NotImplementedError, x509.InvalidVersion, x509.DuplicateExtension
_RAW = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo


def now() -> datetime.datetime:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def read_certificates(file: Path) -> list[x509.Certificate]:
    """The certificates in a PEM file.

    Raises:
        ValueError: there are none, or they are damaged.
    """
    try:
        found = x509.load_pem_x509_certificates(read_file(file))
        for one in found:  # what is damaged inside shows only when it is asked for
            _ = one.public_key(), one.extensions, one.subject.rfc4514_string(), one.issuer.rfc4514_string()
    except _DAMAGE as error:
        raise ValueError(" ".join(str(error).split())[:120]) from error
    return found


def check_authority(part: str, file: Path) -> Findings:
    """Whether a file holds certificates of an authority, and nothing that must stay secret."""
    if unreadable := readable(part, file):
        yield unreadable
        return
    if b"PRIVATE KEY" in read_file(file):
        yield wrong(part, f"{file} holds a private key, and is given to everybody; keep the certificate alone in it")
    try:
        found = read_certificates(file)
    except _DAMAGE as error:
        yield wrong(part, f"{file} holds no certificates in PEM form ({error}); copy the authority's file again")
        return
    for one in found:
        if not _is_authority(one):
            yield wrong(
                part, f"{file} has {_subject(one)}, which is no authority's certificate; give the one of who signed"
            )
        else:
            yield from _times(part, file, one)


def check_certificate(part: str, file: Path, key: Path, authority: Path, host: str | None) -> Findings:
    """Whether a server's certificate can be used.

    Args:
        part: for the findings.
        file: the certificate, with those between it and the authority after it.
        key: its private key.
        authority: the certificates that sites trust.
        host: the name or address by which sites reach the server; None if it is not known.
    """
    if unreadable := readable(part, file):
        yield unreadable
        return
    try:
        leaf, *between = read_certificates(file)
    except _DAMAGE as error:
        yield wrong(part, f"{file} holds no certificate in PEM form ({error}); copy it again")
        return
    found = [*_times(part, file, leaf), *_names(part, file, leaf, host)]
    yield from found
    chained = _chain(part, file, leaf, between, authority)
    yield from chained
    paired = [*_pair(part, file, leaf, key)]
    yield from paired
    if not any(one.level == "wrong" for one in (*found, *chained, *paired)) and authority.is_file():
        yield from _handshake(part, file, key, authority, host)


def _is_authority(one: x509.Certificate) -> bool:
    try:
        return one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _subject(one: x509.Certificate) -> str:
    return one.subject.rfc4514_string()[:200] or "a certificate without a name"


def _times(part: str, file: Path, one: x509.Certificate) -> Findings:
    begins, ends, at = one.not_valid_before_utc, one.not_valid_after_utc, now()
    if at < begins:
        yield wrong(
            part,
            f"{file} is valid from {begins:%Y-%m-%d %H:%M} UTC, and here it is {at:%Y-%m-%d %H:%M}; wait, or "
            "set this machine's clock",
        )
    elif at > ends:
        yield wrong(part, f"{file} has expired on {ends:%Y-%m-%d %H:%M} UTC; get a new one from its authority")
    elif at > ends - SOON:
        yield note(part, f"{file} expires on {ends:%Y-%m-%d %H:%M} UTC, in {(ends - at).days} days; get a new one")
    else:
        yield ok(part, f"{file} is valid until {ends:%Y-%m-%d}")


def _names(part: str, file: Path, leaf: x509.Certificate, host: str | None) -> Findings:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        yield wrong(
            part,
            f"{file} names no address (subjectAltName), so that no site accepts it; have it signed with "
            "subjectAltName=DNS:NAME",
        )
        return
    words = [str(name) for name in names.get_values_for_type(x509.DNSName)]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    shown = ", ".join([*words, *addresses]) or "none"
    if host is None:
        yield note(part, f"{file} is for {shown}; sites must reach the server by such a name (--address checks one)")
    elif fits(host, words, addresses):
        yield ok(part, f"{file} is for {host}")
    else:
        yield wrong(
            part,
            f"{file} is for {shown}, and sites reach the server as {host}; get one for that name, or use "
            "another address",
        )


def fits(host: str, names: list[str], addresses: list[str]) -> bool:
    """Whether a host is one of the names of a certificate, of which one may begin with "*.".

    >>> fits("a.example.org", ["*.example.org"], []), fits("127.0.0.1", ["127.0.0.1"], []), fits("::1", [], ["::1"])
    (True, False, True)
    """
    try:
        return str(ipaddress.ip_address(host)) in addresses
    except ValueError:
        pass
    host = host.rstrip(".").lower()
    rest = host.partition(".")[2]
    return any(name.lower() == host or (name.startswith("*.") and name[2:].lower() == rest != "") for name in names)


def _chain(
    part: str, file: Path, leaf: x509.Certificate, between: list[x509.Certificate], authority: Path
) -> list[Finding]:
    try:
        trusted = read_certificates(authority)
    except (OSError, *_DAMAGE):
        return []  # told by `check_authority`
    at, seen = leaf, [leaf]
    while True:
        if any(_signed(at, one) for one in trusted):
            return [ok(part, f"{file} is signed by {authority}")]
        above = next((one for one in between if one not in seen and _signed(at, one)), None)
        if above is None:
            return [
                wrong(
                    part,
                    f"{file} is not signed by the authority in {authority}, but by "
                    f"{at.issuer.rfc4514_string()[:200]!r}; give sites that one's certificate, or have it signed "
                    "again",
                )
            ]
        at, seen = above, [*seen, above]


def _signed(one: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        one.verify_directly_issued_by(authority)
    except (InvalidSignature, *_DAMAGE):
        return False
    return True


def _pair(part: str, file: Path, leaf: x509.Certificate, key: Path) -> Findings:
    if unreadable := readable(part, key):
        yield unreadable
        return
    yield from closed_file(part, key)
    try:
        private = serialization.load_pem_private_key(read_file(key), password=None)
    except TypeError:
        yield wrong(part, f"{key} has a passphrase, for which the server cannot ask; openssl pkey -in {key} -out NEW")
        return
    except _DAMAGE as error:
        yield wrong(
            part, f"{key} holds no private key in PEM form ({' '.join(str(error).split())[:120]}); copy it again"
        )
        return
    if private.public_key().public_bytes(*_RAW) == leaf.public_key().public_bytes(*_RAW):
        yield ok(part, f"{key} belongs to {file}")
    else:
        yield wrong(
            part, f"{key} does not belong to {file}; put the key there with which the certificate was requested"
        )


def _handshake(part: str, file: Path, key: Path, authority: Path, host: str | None) -> Findings:
    """A handshake in memory, by which OpenSSL says what nothing above has found."""
    try:
        here, there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(authority))
        here.load_cert_chain(file, key)
        there.check_hostname = host is not None
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        server, client = here.wrap_bio(up, down, server_side=True), there.wrap_bio(down, up, server_hostname=host)
        open_ends = [client, server]
        for _ in range(10):
            for end in list(open_ends):
                try:
                    end.do_handshake()
                    open_ends.remove(end)
                except ssl.SSLWantReadError:
                    continue
    except (ssl.SSLError, OSError, ValueError) as error:
        yield wrong(part, f"a site that trusts {authority} refuses {file}: {reason(error)}")


def reason(error: Exception) -> str:
    """What OpenSSL says, without its numbers.

    >>> reason(ValueError("no"))
    'no'
    """
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error)


def check_site_key(part: str, file: Path) -> Findings:
    """Whether the key of a site can be read, by nobody else, and its public half beside it is its own."""
    if unreadable := readable(part, file):
        yield unreadable
        return
    yield from closed_file(part, file)
    try:
        private = serialization.load_ssh_private_key(read_file(file), password=None)
    except _DAMAGE as error:
        yield wrong(
            part,
            f"{file} is no key in OpenSSH's form without passphrase ({str(error)[:120]}); ssh-keygen -q -t ecdsa "
            "-b 384 -N '' -f site.key",
        )
        return
    if not isinstance(private, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        yield wrong(part, f"{file} must be a key of ecdsa; ssh-keygen -q -t ecdsa -b 384 -N '' -f site.key")
        return
    public = file.with_name(f"{file.name}.pub")
    if not public.exists():
        yield note(part, f"{file} can be used; its public half {public} is not there (ssh-keygen -y -f {file})")
    elif public_of(public) != private.public_key().public_bytes(*_RAW):
        yield wrong(
            part, f"{public} is not the public half of {file}; ssh-keygen -y -f {file} > {public}, and register that"
        )
    else:
        yield ok(part, f"{file} can be used, and {public.name} is its public half")


def public_of(file: Path) -> bytes | None:
    """The public key in a file of OpenSSH's form; None if there is none."""
    try:
        return serialization.load_ssh_public_key(read_file(file)).public_bytes(*_RAW)
    except (OSError, *_DAMAGE):
        return None


def check_peers(part: str, folder: Path, name: str, key: Path) -> Findings:
    """Whether the folder of all sites' public keys, for secure sums, has different keys, and this site's own among them."""
    files = sorted(folder.glob("*.pub")) if folder.is_dir() else []
    if not files:
        yield wrong(
            part, f"{folder} holds no public keys; put NAME.pub of every site there, which sites exchange themselves"
        )
        return
    found = {file.name.removesuffix(".pub").removesuffix(".key"): public_of(file) for file in files}
    for file, public in zip(files, found.values(), strict=False):
        if public is None:
            yield wrong(part, f"{file} is no public key in OpenSSH's form; ask the site for it again")
    if len(set(found.values()) - {None}) < len(found) - list(found.values()).count(None) or len(found) < len(files):
        yield wrong(part, f"two files in {folder} have one key or one name; each site has one key of its own")
    try:
        own = serialization.load_ssh_private_key(read_file(key), password=None).public_key().public_bytes(*_RAW)
    except (OSError, *_DAMAGE):
        return  # told by `check_site_key`
    if name not in found:
        yield wrong(part, f"{folder} has no {name}.pub, the key of this site itself; copy it there")
    elif found[name] != own:
        yield wrong(part, f"the key of {name!r} in {folder} is not that of {key}; copy {key}.pub there")
    else:
        yield ok(part, f"{folder} has the keys of {', '.join(sorted(found))}")


def first_name(file: Path) -> str | None:
    """A name for which a certificate is, that a connection to this machine can be checked by."""
    try:
        leaf = read_certificates(file)[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, x509.ExtensionNotFound, *_DAMAGE):
        return None
    found = [str(name) for name in names.get_values_for_type(x509.DNSName)]
    found += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return next((name.replace("*.", "any.", 1) for name in found), None)
