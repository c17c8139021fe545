"""Checks TLS certificates and key files: they exist, match each other, are valid now and for the server's name, and
private keys are readable only by their owner.
"""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from polyfed.core.io.atomic_files import read_file
from polyfed.deploy.doctor import DoctorFinding, Findings, note_finding, ok_finding, problem_finding
from polyfed.deploy.doctor.machine import check_only_owner_can_access, finding_if_unreadable
from polyfed.deploy.doctor.tls import build_client_context, describe_openssl_error

EXPIRY_WARNING = datetime.timedelta(days=30)
"""Time before its expiry from which a certificate is worth a note."""
_PARSE_ERRORS = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    NotImplementedError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
)
_RAW = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo


def utc_now() -> datetime.datetime:
    """Returns the current time in UTC."""
    return datetime.datetime.now(datetime.UTC)


def read_pem_certificates(file: Path) -> list[x509.Certificate]:
    """Reads all certificates in a PEM file.

    Raises:
        ValueError: the file has no certificate, or a damaged one.
    """
    try:
        certificates = x509.load_pem_x509_certificates(read_file(file))
        for certificate in certificates:  # damaged fields show only when they are read
            _ = (
                certificate.public_key(),
                certificate.extensions,
                certificate.subject.rfc4514_string(),
                certificate.issuer.rfc4514_string(),
            )
    except _PARSE_ERRORS as error:
        raise ValueError(" ".join(str(error).split())[:120]) from error
    return certificates


def check_ca_certificate_file(component: str, file: Path) -> Findings:
    """Yields a finding for each mistake in a CA file, such as a private key or an expired certificate."""
    if unreadable := finding_if_unreadable(component, file):
        yield unreadable
        return
    if b"PRIVATE KEY" in read_file(file):
        yield problem_finding(
            component, f"{file} holds a private key, and is given to everybody; keep the certificate alone in it"
        )
    try:
        certificates = read_pem_certificates(file)
    except _PARSE_ERRORS as error:
        yield problem_finding(
            component, f"{file} holds no certificates in PEM form ({error}); copy the authority's file again"
        )
        return
    for certificate in certificates:
        if not _is_authority(certificate):
            yield problem_finding(
                component,
                f"{file} has {_subject_name(certificate)}, which is not an authority's certificate; give the one of who "
                "signed",
            )
        else:
            yield from _check_validity(component, file, certificate)


def check_server_certificate(
    component: str, certificate_file: Path, key_file: Path, authority_file: Path, host: str | None
) -> Findings:
    """Yields findings on a TLS certificate: valid now, for this name, trusted, and matching its key.

    Args:
        component: `DoctorFinding.component`.
        certificate_file: the certificate, followed by those between it and the authority.
        key_file: file of its private key.
        authority_file: file of the certificates that sites trust.
        host: the name or address by which sites reach the server; None if it is not known.
    """
    if unreadable := finding_if_unreadable(component, certificate_file):
        yield unreadable
        return
    try:
        leaf, *intermediates = read_pem_certificates(certificate_file)
    except _PARSE_ERRORS as error:
        yield problem_finding(
            component, f"{certificate_file} holds no certificate in PEM form ({error}); copy it again"
        )
        return
    validity_findings = _check_validity(component, certificate_file, leaf)
    leaf_findings = [*validity_findings, *_check_names(component, certificate_file, leaf, host)]
    yield from leaf_findings
    chain_findings = _check_chain(component, certificate_file, leaf, intermediates, authority_file)
    yield from chain_findings
    key_findings = [*_check_key(component, certificate_file, leaf, key_file)]
    yield from key_findings
    if (
        not any(finding.level == "wrong" for finding in (*leaf_findings, *chain_findings, *key_findings))
        and authority_file.is_file()
    ):
        yield from _check_handshake(component, certificate_file, key_file, authority_file, host)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _subject_name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string()[:200] or "a certificate without a name"


def _check_validity(part: str, file: Path, certificate: x509.Certificate) -> Findings:
    begins, ends, current = certificate.not_valid_before_utc, certificate.not_valid_after_utc, utc_now()
    if current < begins:
        yield problem_finding(
            part,
            f"{file} is valid from {begins:%Y-%m-%d %H:%M} UTC, and here it is {current:%Y-%m-%d %H:%M}; wait, or "
            "set this machine's clock",
        )
    elif current > ends:
        yield problem_finding(
            part, f"{file} has expired on {ends:%Y-%m-%d %H:%M} UTC; get a new one from its authority"
        )
    elif current > ends - EXPIRY_WARNING:
        yield note_finding(
            part, f"{file} expires on {ends:%Y-%m-%d %H:%M} UTC, in {(ends - current).days} days; get a new one"
        )
    else:
        yield ok_finding(part, f"{file} is valid until {ends:%Y-%m-%d}")


def _check_names(part: str, file: Path, leaf: x509.Certificate, host: str | None) -> Findings:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        yield problem_finding(
            part,
            f"{file} names no address (subjectAltName), so that no site accepts it; have it signed with "
            "subjectAltName=DNS:NAME",
        )
        return
    dns_names = [str(name) for name in names.get_values_for_type(x509.DNSName)]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    certified_names = ", ".join([*dns_names, *addresses]) or "none"
    if host is None:
        yield note_finding(
            part, f"{file} is for {certified_names}; sites must reach the server by such a name (--address checks one)"
        )
    elif is_host_covered_by_certificate(host, dns_names, addresses):
        yield ok_finding(part, f"{file} is for {host}")
    else:
        yield problem_finding(
            part,
            f"{file} is for {certified_names}, and sites reach the server as {host}; get one for that name, or use "
            "another address",
        )


def is_host_covered_by_certificate(host: str, dns_names: list[str], ip_addresses: list[str]) -> bool:
    """Returns whether a DNS name (perhaps with "*.") or IP address of a certificate matches the host.

    >>> is_host_covered_by_certificate("a.example.org", ["*.example.org"], [])
    True
    >>> (is_host_covered_by_certificate("127.0.0.1", ["127.0.0.1"], []),
    ...  is_host_covered_by_certificate("::1", [], ["::1"]))
    (False, True)
    """
    try:
        return str(ipaddress.ip_address(host)) in ip_addresses
    except ValueError:
        pass
    host = host.rstrip(".").lower()
    parent_domain = host.partition(".")[2]
    return any(
        name.lower() == host or (name.startswith("*.") and name[2:].lower() == parent_domain != "")
        for name in dns_names
    )


def _check_chain(
    part: str, file: Path, leaf: x509.Certificate, intermediates: list[x509.Certificate], authority: Path
) -> list[DoctorFinding]:
    try:
        authorities = read_pem_certificates(authority)
    except (OSError, *_PARSE_ERRORS):
        return []  # `check_ca_certificate_file` reports it
    current, visited = leaf, [leaf]
    while True:
        if any(_is_issued_by(current, candidate) for candidate in authorities):
            return [ok_finding(part, f"{file} is signed by {authority}")]
        issuer = next(
            (
                candidate
                for candidate in intermediates
                if candidate not in visited and _is_issued_by(current, candidate)
            ),
            None,
        )
        if issuer is None:
            return [
                problem_finding(
                    part,
                    f"{file} is not signed by the authority in {authority}, but by "
                    f"{current.issuer.rfc4514_string()[:200]!r}; give sites that one's certificate, or have it signed "
                    "again",
                )
            ]
        current, visited = issuer, [*visited, issuer]


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *_PARSE_ERRORS):
        return False
    return True


def _check_key(part: str, file: Path, leaf: x509.Certificate, key: Path) -> Findings:
    if unreadable := finding_if_unreadable(part, key):
        yield unreadable
        return
    yield from check_only_owner_can_access(part, key)
    try:
        private = serialization.load_pem_private_key(read_file(key), password=None)
    except TypeError:
        yield problem_finding(
            part, f"{key} has a passphrase, for which the server cannot ask; openssl pkey -in {key} -out NEW"
        )
        return
    except _PARSE_ERRORS as error:
        yield problem_finding(
            part, f"{key} holds no private key in PEM form ({' '.join(str(error).split())[:120]}); copy it again"
        )
        return
    if private.public_key().public_bytes(*_RAW) == leaf.public_key().public_bytes(*_RAW):
        yield ok_finding(part, f"{key} belongs to {file}")
    else:
        yield problem_finding(
            part, f"{key} does not belong to {file}; put the key there with which the certificate was requested"
        )


def _check_handshake(part: str, file: Path, key: Path, authority: Path, host: str | None) -> Findings:
    """Tries a TLS handshake in memory, since OpenSSL detects mistakes that the other checks do not."""
    try:
        server_context, client_context = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), build_client_context(authority))
        server_context.load_cert_chain(file, key)
        client_context.check_hostname = host is not None
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = server_context.wrap_bio(to_server, to_client, server_side=True)
        client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
        open_ends = [client, server]
        for _ in range(10):
            for end in list(open_ends):
                try:
                    end.do_handshake()
                    open_ends.remove(end)
                except ssl.SSLWantReadError:
                    continue
    except (ssl.SSLError, OSError, ValueError) as error:
        yield problem_finding(part, f"a site that trusts {authority} refuses {file}: {describe_openssl_error(error)}")


def check_site_key_pair(component: str, private_key_file: Path) -> Findings:
    """Yields findings on a site's key pair: readable, closed to others, and matching its public key file."""
    if unreadable := finding_if_unreadable(component, private_key_file):
        yield unreadable
        return
    yield from check_only_owner_can_access(component, private_key_file)
    try:
        private = serialization.load_ssh_private_key(read_file(private_key_file), password=None)
    except _PARSE_ERRORS as error:
        yield problem_finding(
            component,
            f"{private_key_file} is not a key in OpenSSH's form without passphrase ({str(error)[:120]}); ssh-keygen -q -t "
            "ecdsa -b 384 -N '' -f site.key",
        )
        return
    if not isinstance(private, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        yield problem_finding(
            component, f"{private_key_file} must be a key of ecdsa; ssh-keygen -q -t ecdsa -b 384 -N '' -f site.key"
        )
        return
    public = private_key_file.with_name(f"{private_key_file.name}.pub")
    if not public.exists():
        yield note_finding(
            component,
            f"{private_key_file} can be used; its public half {public} is not there (ssh-keygen -y -f {private_key_file})",
        )
    elif read_openssh_public_key_as_der(public) != private.public_key().public_bytes(*_RAW):
        yield problem_finding(
            component,
            f"{public} is not the public half of {private_key_file}; ssh-keygen -y -f {private_key_file} > "
            f"{public}, and register that",
        )
    else:
        yield ok_finding(component, f"{private_key_file} can be used, and {public.name} is its public half")


def read_openssh_public_key_as_der(file: Path) -> bytes | None:
    """Reads a public key file in OpenSSH's format as DER bytes; None if it holds no such key."""
    try:
        return serialization.load_ssh_public_key(read_file(file)).public_bytes(*_RAW)
    except (OSError, *_PARSE_ERRORS):
        return None


def check_public_keys_of_all_sites(component: str, folder: Path, site_name: str, private_key_file: Path) -> Findings:
    """Yields findings on the sites' public keys for secure aggregation: all differ, this site's among them."""
    files = sorted(folder.glob("*.pub")) if folder.is_dir() else []
    if not files:
        yield problem_finding(
            component,
            f"{folder} holds no public keys; put NAME.pub of every site there, which sites exchange themselves",
        )
        return
    key_by_site = {
        file.name.removesuffix(".pub").removesuffix(".key"): read_openssh_public_key_as_der(file) for file in files
    }
    for file, public in zip(files, key_by_site.values(), strict=False):
        if public is None:
            yield problem_finding(component, f"{file} is not a public key in OpenSSH's form; ask the site for it again")
    if len(set(key_by_site.values()) - {None}) < len(key_by_site) - list(key_by_site.values()).count(None) or len(
        key_by_site
    ) < len(files):
        yield problem_finding(
            component, f"two files in {folder} have one key or one name; each site has one key of its own"
        )
    try:
        own_key = (
            serialization.load_ssh_private_key(read_file(private_key_file), password=None)
            .public_key()
            .public_bytes(*_RAW)
        )
    except (OSError, *_PARSE_ERRORS):
        return  # `check_site_key_pair` reports it
    if site_name not in key_by_site:
        yield problem_finding(component, f"{folder} has no {site_name}.pub, the key of this site itself; copy it there")
    elif key_by_site[site_name] != own_key:
        yield problem_finding(
            component,
            f"the key of {site_name!r} in {folder} is not that of {private_key_file}; copy {private_key_file}.pub there",
        )
    else:
        yield ok_finding(component, f"{folder} has the keys of {', '.join(sorted(key_by_site))}")


def first_host_in_certificate(file: Path) -> str | None:
    """Returns a certificate's first DNS name or IP address; None if there is none or it is unreadable."""
    try:
        leaf = read_pem_certificates(file)[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, x509.ExtensionNotFound, *_PARSE_ERRORS):
        return None
    subject_names = [str(name) for name in names.get_values_for_type(x509.DNSName)]
    subject_names += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return next((name.replace("*.", "any.", 1) for name in subject_names), None)
