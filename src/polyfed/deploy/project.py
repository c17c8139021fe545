"""A project that runs a federation over Flower: the files of `polyfed flower init`, and reading them back."""

import datetime
import ipaddress
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.files import read_text_file, user_path

_MOST_SITES = 10_000  # of a number, before their names are listed
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_DAYS = 365


@final
@dataclass(frozen=True)
class Project:
    """A folder that `create` made.

    Raises:
        UserError: it is none.
    """

    path: Path

    def __post_init__(self) -> None:
        if not (self.app / "pyproject.toml").is_file():
            raise UserError(
                f"{self.path} is no project of a federation: it has no app/pyproject.toml; polyfed flower init {self.path}"
            )

    @property
    def app(self) -> Path:
        """What Flower carries to the sites."""
        return self.path / "app"

    @property
    def site(self) -> Path:
        """The `site.py` of a trial."""
        return self.path / "site" / "site.py"

    @property
    def certificates(self) -> Path:
        """Certificates and keys for a trial."""
        return self.path / "certificates"

    def configuration(self) -> Mapping[str, Any]:
        """The table `[tool.flwr.app.config]`.

        Raises:
            UserError: the file is no TOML, or lacks the table.
        """
        file = self.app / "pyproject.toml"
        try:
            found: Any = tomllib.loads(read_text_file(file))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not valid TOML: {error or 'it is nested too deeply'}") from error
        for name in ("tool", "flwr", "app", "config"):
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise UserError(f"{file} lacks the table [tool.flwr.app.config]")
        return found

    def sites(self) -> list[str]:
        """Ids of the sites in the configuration."""
        return names_of(str(self.configuration().get("sites", "")))


def names_of(text: str) -> list[str]:
    """Ids of sites: names separated by commas, or a number of them.

    Raises:
        UserError: none, one twice, or one that is no plain name.

    >>> names_of("2"), names_of("north, south")
    (['site-1', 'site-2'], ['north', 'south'])
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) == 1 and names[0].isdecimal():
        if len(names[0]) > 9 or int(names[0]) > _MOST_SITES:
            raise UserError(f"sites must be at most {_MOST_SITES}, got {names[0][:60]}")
        names = [f"site-{number}" for number in range(1, int(names[0]) + 1)]
    if not names or len(set(names)) < len(names):
        raise UserError(f"sites must be a number, or names that differ with commas between, got {text[:60]!r}")
    if bad := [name for name in names if not NAME.fullmatch(name)]:
        raise UserError(f"a site's name may have letters, digits, '-', '_' and '.', got {bad[0][:60]!r}")
    return names


def create(path: str | Path, sites: Sequence[str]) -> Project:
    """Writes a ready project: see its README.

    Raises:
        UserError: the folder exists and is not empty.
    """
    folder = user_path(path, "the project").resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder")
    words = {"sites": ",".join(sites), "first": sites[0], "catalogue": str(folder / "server" / "catalogue.yaml"),
             "here": str(folder / "server" / "server.py")}  # fmt: skip
    layout = {
        "README.md": "README.md",
        "app_pyproject.toml.txt": "app/pyproject.toml",
        "site.py.txt": "site/site.py",
        "supernode.service": "site/supernode.service",
        "superlink.service": "server/superlink.service",
        "server.py.txt": "server/server.py",
        "server.Dockerfile": "containers/server.Dockerfile",
        "site.Dockerfile": "containers/site.Dockerfile",
        "compose.yaml": "containers/compose.yaml",
        "dockerignore.txt": "containers/.dockerignore",
    }
    for name, target in layout.items():
        text = Template(files("polyfed.deploy").joinpath("templates", name).read_text(encoding="utf-8"))
        _write(folder / target, text.safe_substitute(words))
    app = folder / "app" / "federation"
    _write(app / "__init__.py", '"""A federation of polyfed."""\n')
    for side in ("server", "client"):
        _write(app / f"{side}.py", f"from polyfed.deploy.flower import {side}_app\n\napp = {side}_app()\n")
    _catalogue(folder / "server" / "catalogue.yaml")
    certificates = folder / "certificates"
    write_certificates(certificates)
    for site in sites:
        write_key(certificates / f"{site}.key")
    return Project(folder)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _catalogue(path: Path) -> None:
    """The layer types of the networks in the template `site.py`, in the graph that is flha_ghn's default."""
    import torch

    from polyfed.algorithms import FLHAGHN
    from polyfed.graphs.catalogue import LayerCatalogue
    from polyfed.graphs.extract import extract
    from polyfed.models import ModelSpec

    specs = [ModelSpec(name, {"width": 8}, (1, 8, 8), 10) for name in ("flha_arch1", "flha_arch2")]
    graphs = (extract(spec(), torch.zeros(2, 1, 8, 8)) for spec in specs)
    LayerCatalogue.of(map(FLHAGHN().contraction.of, graphs)).write(path, FLHAGHN().graph)


def write_certificates(folder: Path) -> None:
    """A certificate authority (`ca.crt`) and a certificate of it for this machine (`server.pem`, `server.key`), for a trial.
    The authority's own key is not kept."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def begun(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named("polyfed trial"))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=_DAYS))

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = begun("polyfed trial", authority).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    root = root.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    local = x509.SubjectAlternativeName(
        [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
        ]
    )
    leaf = begun("localhost", server).add_extension(local, critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    leaf = leaf.add_extension(issuer, critical=False)
    closed(folder)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(root.sign(authority, hashes.SHA384()).public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.sign(authority, hashes.SHA384()).public_bytes(pem))
    private = serialization.PrivateFormat.PKCS8
    _secret(folder / "server.key", server.private_bytes(pem, private, serialization.NoEncryption()))


def write_key(path: Path) -> None:
    """A site's key and, beside it with `.pub`, its public half, in OpenSSH's form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _secret(path, key.private_bytes(*form))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def closed(folder: Path) -> None:
    """Makes a folder that nobody else can enter, or closes one that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
