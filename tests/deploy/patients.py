"""Folders for tests of `polyfed flower doctor`: certificates of any kind, keys, units, and servers that
answer as they are told."""

import datetime
import ipaddress
import socket
import ssl
import threading
from contextlib import contextmanager
from email.utils import format_datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM
NOW = datetime.datetime.now(datetime.UTC)
UNIT = """[Service]
Environment=FLWR_HOME={folder}/state/superlink
ExecStart={program} -m polyfed.deploy.link --control-token-file {folder}/control.token --host 127.0.0.1 --port {port} \\
  --ssl-ca-certfile {folder}/ca.crt --ssl-certfile {folder}/server.pem --ssl-keyfile {folder}/server.key \\
  --enable-supernode-auth --database {folder}/state/state.db
"""
NODE = """[Service]
ExecStart={program} --superlink {address} --root-certificates {folder}/ca.crt \\
  --auth-supernode-private-key {folder}/site.key \\
  --node-config 'client-id="north" site="{folder}/site.py" state-dir="{folder}/state" {words}'
"""


def days(number):
    return datetime.timedelta(days=number)


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class Authority:
    """An authority, and the certificates it signs."""

    def __init__(self, name="authority", above=None, begins=-1, ends=365, ca=True):
        self.key, self.name, above = ec.generate_private_key(ec.SECP256R1()), name, above or self
        builder = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named(above.name))
        builder = builder.public_key(self.key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(NOW + days(begins)).not_valid_after(NOW + days(ends))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        self.certificate = builder.sign(above.key, hashes.SHA256())

    @property
    def pem(self):
        return self.certificate.public_bytes(PEM)

    def issue(self, names=("localhost",), addresses=("127.0.0.1",), begins=-1, ends=365):
        """A certificate and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateBuilder().subject_name(named("server")).issuer_name(named(self.name))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(NOW + days(begins)).not_valid_after(NOW + days(ends))
        if names or addresses:
            found = [x509.DNSName(name) for name in names]
            found += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return certificate.public_bytes(PEM), private


def write(folder, **files):
    """Files by name, closed to others; "_" stands for a point."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        file = folder / name.replace("_", ".")
        file.touch(mode=0o600)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def server_files(folder, authority=None, **words):
    """ca.crt, server.pem and server.key of an authority."""
    authority = authority or Authority()
    certificate, key = authority.issue(**words)
    return write(folder, ca_crt=authority.pem, server_pem=certificate, server_key=key)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(folder=None, ahead=0.0, date=True):
    """A server on loopback: TLS with the files of a folder, and an answer by a clock that is so many seconds ahead; without
    a folder, one that speaks no TLS. Its port."""
    context = None
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(plain):
        with plain:
            plain.settimeout(5)
            if context is None:
                plain.sendall(b"220 this is not TLS\r\n" * 10)
                return
            with context.wrap_socket(plain, server_side=True) as secure:
                if not secure.recv(4096):
                    return
                at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
                told = f"Date: {format_datetime(at, usegmt=True)}\r\n" if date else ""
                secure.sendall(f"HTTP/1.1 404 Not Found\r\n{told}Content-Length: 0\r\n\r\n".encode())

    def serve():
        while True:
            try:
                plain = listener.accept()[0]
            except OSError:
                return
            try:
                answer(plain)
            except OSError:
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
