"""Creates and reads the project folder of a deployment, as `polyfed flower init` writes it."""

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
from polyfed.core.io.atomic_files import expand_user_path, read_text_file

_MAX_SITES = 10_000  # limit of a number of sites, whose names are then listed
_OTHER_FILES = {"ca", "server", "superlink"}  # files of a project and its trial have these names
SITE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_CERTIFICATE_DAYS = 365


@final
@dataclass(frozen=True)
class DeploymentProject:
    """Holds the path of a project folder that `create_project` wrote, and gives the paths and the configuration in it.

    Args:
        path: the project's folder.

    Raises:
        UserError: the folder is not a project.
    """

    path: Path

    def __post_init__(self) -> None:
        if not (self.app_folder / "pyproject.toml").is_file():
            raise UserError(
                f"{self.path} is not a project of a federation: it has no app/pyproject.toml; "
                f"polyfed flower init {self.path}"
            )

    @property
    def app_folder(self) -> Path:
        """Returns the folder of the Flower app, which `flwr run` sends to the server and the sites."""
        return self.path / "app"

    @property
    def site_file(self) -> Path:
        """Returns the path of the `site.py` that all sites of a trial use."""
        return self.path / "site" / "site.py"

    @property
    def certificates_folder(self) -> Path:
        """Returns the folder with the certificates and keys of a trial."""
        return self.path / "certificates"

    def read_server_configuration(self) -> Mapping[str, Any]:
        """Returns the server's configuration as a dict: the table `[tool.flwr.app.config]` of `app/pyproject.toml`.

        Raises:
            UserError: the file is not valid TOML, or lacks the table.
        """
        file = self.app_folder / "pyproject.toml"
        try:
            table: Any = tomllib.loads(read_text_file(file))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not valid TOML: {error or 'it is nested too deeply'}") from error
        for name in ("tool", "flwr", "app", "config"):
            table = table.get(name) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise UserError(f"{file} lacks the table [tool.flwr.app.config]")
        return table

    def resolve_paths(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a flat configuration with absolute paths (`file`, `algorithm.catalogue`) below the project."""
        paths = {key: config[key] for key in ("file", "algorithm.catalogue") if config.get(key)}
        return {**config, **{key: str(self.path / expand_user_path(str(path), key)) for key, path in paths.items()}}

    def read_site_names(self) -> list[str]:
        """Returns the names of the sites that the configuration lists."""
        return parse_site_names_or_count(str(self.read_server_configuration().get("sites", "")))


def parse_site_names_or_count(text: str) -> list[str]:
    """Parses names separated by commas, or a number N for "site-1" to "site-N".

    Raises:
        UserError: there is no name, one occurs twice, or one is not valid.

    >>> parse_site_names_or_count("2"), parse_site_names_or_count("north, south")
    (['site-1', 'site-2'], ['north', 'south'])
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) == 1 and names[0].isdecimal():
        if len(names[0]) > 9 or int(names[0]) > _MAX_SITES:
            raise UserError(f"sites must be at most {_MAX_SITES}, got {names[0][:60]}")
        names = [f"site-{number}" for number in range(1, int(names[0]) + 1)]
    if not names or len({name.lower() for name in names}) < len(names):  # some file systems ignore case
        raise UserError(f"sites must be a number, or different names separated by commas, got {text[:60]!r}")
    if invalid_names := [name for name in names if not SITE_NAME_PATTERN.fullmatch(name)]:
        raise UserError(f"a site's name may have letters, digits, '-', '_' and '.', got {invalid_names[0][:60]!r}")
    if reserved_names := [name for name in names if name.lower() in _OTHER_FILES]:
        raise UserError(
            f"a site cannot be called {reserved_names[0]!r}, as other files of a project are; choose another name"
        )
    return names


def create_project(path: str | Path, sites: Sequence[str]) -> DeploymentProject:
    """Writes a project folder from templates, with certificates and keys for a trial.

    Raises:
        UserError: the folder exists and is not empty.
    """
    folder = expand_user_path(path, "the project").resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder")
    shown_folder = folder.name if SITE_NAME_PATTERN.fullmatch(folder.name) else "DIR"
    substitutions = {"sites": ",".join(sites), "first": sites[0], "count": len(sites), "folder": shown_folder}
    layout = {
        "README.md": "README.md",
        "OPERATIONS.md": "OPERATIONS.md",
        "gitignore.txt": ".gitignore",
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
        _write_text(folder / target, text.safe_substitute(substitutions))
    app = folder / "app" / "federation"
    _write_text(app / "__init__.py", '"""A federation of polyfed."""\n')
    for side in ("server", "client"):
        _write_text(app / f"{side}.py", f"from polyfed.deploy.flower import {side}_app\n\napp = {side}_app()\n")
    _write_catalogue(folder / "server" / "catalogue.yaml")
    certificates = folder / "certificates"
    write_trial_certificates(certificates)
    for site in sites:
        write_site_key_pair(certificates / f"{site}.key")
    return DeploymentProject(folder)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _write_catalogue(path: Path) -> None:
    """Writes a file with the layer types of the networks in the template `site.py`, which the method flha_ghn needs."""
    import torch

    from polyfed.algorithms import FLHAGHN
    from polyfed.graphs.catalogue import LayerCatalogue
    from polyfed.graphs.extract import extract
    from polyfed.models import ModelSpec

    specs = [ModelSpec(name, {"width": 8}, (1, 8, 8), 10) for name in ("flha_arch1", "flha_arch2")]
    graphs = (extract(spec(), torch.zeros(2, 1, 8, 8)) for spec in specs)
    LayerCatalogue.from_graphs(map(FLHAGHN().contraction.apply, graphs)).write_yaml(path, FLHAGHN().graph)


def write_trial_certificates(folder: Path) -> None:
    """Writes an authority (`ca.crt`) and this machine's certificate (`server.pem`, `server.key`).

    The authority's own key is not stored.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)

    def x509_name(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def certificate_builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(x509_name(subject)).issuer_name(x509_name("polyfed trial"))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        begins = now - datetime.timedelta(days=1)  # a clock that is set back, or another machine's, may be behind
        return builder.not_valid_before(begins).not_valid_after(now + datetime.timedelta(days=_CERTIFICATE_DAYS))

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = certificate_builder("polyfed trial", authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    root = root.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    local_names = x509.SubjectAlternativeName(
        [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
        ]
    )
    leaf = certificate_builder("localhost", server).add_extension(local_names, critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    leaf = leaf.add_extension(issuer, critical=False)
    make_private_folder(folder)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(root.sign(authority, hashes.SHA384()).public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.sign(authority, hashes.SHA384()).public_bytes(pem))
    private = serialization.PrivateFormat.PKCS8
    _write_secret(folder / "server.key", server.private_bytes(pem, private, serialization.NoEncryption()))


def write_site_key_pair(private_key_file: Path) -> None:
    """Writes a key pair in OpenSSH's format, the public key with the suffix `.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _write_secret(private_key_file, key.private_bytes(*encoding))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private_key_file.with_name(f"{private_key_file.name}.pub").write_bytes(public + b"\n")


def make_private_folder(folder: Path) -> None:
    """Creates a folder, if it does not exist, and allows only its owner to enter it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
