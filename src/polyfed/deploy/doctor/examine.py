"""Selects and runs the checks for a project, a trial, a server or a site, by its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError
from polyfed.deploy.doctor import Findings, note_finding, ok_finding, problem_finding
from polyfed.deploy.doctor.certificates import (
    check_ca_certificate_file,
    check_public_keys_of_all_sites,
    check_server_certificate,
    check_site_key_pair,
    first_host_in_certificate,
    read_openssh_public_key_as_der,
)
from polyfed.deploy.doctor.folder_kinds import (
    SERVER_UNIT,
    SITE_UNIT,
    SystemdUnit,
    detect_folder_kinds,
    read_systemd_unit_if_exists,
)
from polyfed.deploy.doctor.machine import (
    check_control_token_file,
    check_package_versions,
    check_state_folder,
    check_systemd_program,
    finding_if_unreadable,
    is_process_alive,
)
from polyfed.deploy.doctor.network import (
    check_port_free,
    check_tls_server_and_clock,
    is_port_listening,
    split_host_and_port,
)
from polyfed.deploy.doctor.site_config import check_node_config, check_site_file_defines_client, parse_node_config
from polyfed.deploy.trial.local_trial import read_running_trial, trial_folder_of
from polyfed.deploy.trial.project import DeploymentProject

ConfigurationCheck = Callable[[Mapping[str, Any], Path], Findings]
"""Checks a server's configuration without torch; the command passes it, since it knows the methods' fields."""


def run_folder_checks(
    folder: Path,
    protocol_version: int,
    check_server_configuration: ConfigurationCheck,
    trial_port: int = 8000,
    server_address: str | None = None,
) -> Findings:
    """Yields the findings of all checks that apply to a project's, trial's, server's or site's folder.

    Args:
        folder: folder of a project, a trial, a server or a site.
        protocol_version: version of the protocol between server and sites.
        check_server_configuration: checks the configuration of a project.
        trial_port: port of a trial that is to be started.
        server_address: HOST:PORT by which sites reach the server, if the folder does not say.

    Raises:
        UserError: the folder is none of these, or cannot be read, or the address is none or not of this folder.
    """
    folder = folder.resolve()
    kinds = detect_folder_kinds(folder)
    if server_address is not None and _address_or_none(server_address) is None:
        raise UserError(f"--address must be HOST:PORT, such as federation.example.org:443, got {server_address!r}")
    if server_address is not None and not {"server", "site"} & set(kinds):
        raise UserError(f"--address is for the folder of a server or of a site, and {folder} is a {kinds[0]}'s")
    if kinds[0] in ("project", "trial"):
        yield from _check_project(
            DeploymentProject(folder if kinds[0] == "project" else folder.parent),
            check_server_configuration,
            trial_port,
        )
    if "server" in kinds:
        yield from _check_server_folder(read_systemd_unit_if_exists(folder / SERVER_UNIT), server_address)
    if "site" in kinds:
        yield from _check_site_folder(read_systemd_unit_if_exists(folder / SITE_UNIT), server_address)
    yield from check_package_versions("versions", protocol_version)


# -- a project, and its trial ------------------------------------------------------------------------------------------


def _check_project(project: DeploymentProject, check_configuration: ConfigurationCheck, port: int) -> Findings:
    names: list[str] = []
    try:
        words = project.read_server_configuration()
        names = project.read_site_names()
        yield ok_finding("sites", ", ".join(names))
        yield from check_configuration(words, project.app_folder / "pyproject.toml")
    except UserError as error:
        yield problem_finding("configuration", str(error))
    certificates = project.certificates_folder
    if certificates.is_dir() and (mode := certificates.stat().st_mode) & 0o077:
        yield problem_finding(
            "certificates", f"others can enter {certificates} (mode {mode & 0o777:o}); chmod 700 {certificates}"
        )
    yield from check_ca_certificate_file("certificates", certificates / "ca.crt")
    pair = certificates / "server.pem", certificates / "server.key"
    yield from check_server_certificate("certificates", *pair, certificates / "ca.crt", "127.0.0.1")
    yield from _check_site_keys(certificates, names)
    yield from check_site_file_defines_client("site.py", project.site_file)
    running = read_running_trial(project)
    folder = trial_folder_of(project)
    if running is not None:
        yield from _check_running_trial(folder, certificates / "ca.crt", running, names)
    else:
        yield from check_port_free("port", "127.0.0.1", port, "end that program, or choose another --port")
        if (folder / "trial.json").exists():
            yield problem_finding(
                "trial", f"{folder / 'trial.json'} is damaged; end the trial's processes, and delete it"
            )
    yield from check_state_folder("disk", folder)


def _check_site_keys(folder: Path, names: list[str]) -> Findings:
    site_by_key: dict[bytes, str] = {}
    for name in names:
        key = folder / f"{name}.key"
        if not key.exists():
            yield note_finding(
                "keys", f"{key} is not there yet; polyfed flower up makes it, or the site brings its own"
            )
            continue
        yield from check_site_key_pair("keys", key)
        if (
            public := read_openssh_public_key_as_der(folder / f"{name}.key.pub")
        ) is not None and site_by_key.setdefault(public, name) != name:
            yield problem_finding(
                "keys", f"{name} and {site_by_key[public]} have one key; each site needs its own, which pins its name"
            )


def _check_running_trial(folder: Path, authority: Path, running: Mapping[str, Any], names: list[str]) -> Findings:
    """Checks the processes, sites and server of a trial that is running or was killed."""
    ended_names = sorted(name for name, number in running["processes"].items() if not is_process_alive(number))
    if ended_names == sorted(running["processes"]):
        yield problem_finding("trial", f"it was killed: none of its processes runs; delete {folder / 'trial.json'}")
        return
    for name in ended_names:
        yield problem_finding(
            "trial",
            f"the process of {name} has ended; see {folder / name}.log (polyfed flower up starts a site again "
            "after some seconds)",
        )
    if not ended_names:
        yield ok_finding("trial", f"it runs, with {', '.join(running['sites'])}")
    if sorted(running["sites"]) != sorted(names):
        yield note_finding(
            "trial",
            f"it has the sites {', '.join(running['sites'])}, and the configuration {', '.join(names)}; runs "
            "have those of the trial",
        )
    yield from check_tls_server_and_clock("server", "127.0.0.1", running["port"], authority)
    yield from check_control_token_file("token", folder / "control.token")


# -- a server, or a site: its unit -------------------------------------------------------------------------------------


def _check_unit(unit: SystemdUnit) -> Findings:
    """Checks the program that a unit starts, and that it does not turn TLS off."""
    if unit.program is None:
        yield note_finding(
            "unit", f"{unit.file} is not there; files are looked for beside it, under the names that it would have"
        )
    else:
        yield from check_systemd_program("unit", unit.program)
    if "--insecure" in unit.options:
        yield problem_finding(
            "TLS", f"{unit.file} has --insecure: whoever is on the way reads and changes what travels; take it out"
        )


# -- a server ------------------------------------------------------------------------------------------------------------


def _check_server_folder(unit: SystemdUnit, address: str | None) -> Findings:
    options, public_address = unit.options, None if address is None else _address_or_none(address)
    yield from _check_unit(unit)
    authority = unit.find_file_of_option("--ssl-ca-certfile", "ca.crt")
    pair = (
        unit.find_file_of_option("--ssl-certfile", "server.pem"),
        unit.find_file_of_option("--ssl-keyfile", "server.key"),
    )
    yield from check_ca_certificate_file("certificates", authority)
    yield from check_server_certificate("certificates", *pair, authority, public_address[0] if public_address else None)
    if (stray := unit.file.parent / "ca.key").exists():
        yield note_finding(
            "certificates", f"{stray} signs certificates for anybody who has it; keep it off this machine"
        )
    if unit.program is not None and "--control-token-file" not in options:
        yield problem_finding(
            "token",
            f"{unit.file} names no --control-token-file: whoever reaches the port can start runs; see "
            "docs/deploy/network.md",
        )
    else:
        yield from check_control_token_file("token", unit.find_file_of_option("--control-token-file", "control.token"))
    if unit.program is not None and "--enable-supernode-auth" not in options:
        yield problem_finding(
            "keys", f"{unit.file} lacks --enable-supernode-auth: anybody could take part under any name; add it"
        )
    yield from _check_key_files(unit.file.parent)
    yield from _check_server_addresses(unit, address, public_address)
    for folder in {
        Path(options.get("--database") or "state.db").parent,
        Path(unit.environment.get("FLWR_HOME", ".")).parent,
    }:
        if folder != Path():
            yield from check_state_folder("disk", folder)


def _check_server_addresses(unit: SystemdUnit, address: str | None, public_address: tuple[str, int] | None) -> Findings:
    """Checks where a server listens, and whether its public address answers."""
    host, port = unit.options.get("--host") or "127.0.0.1", unit.options.get("--port") or "8000"
    authority = unit.find_file_of_option("--ssl-ca-certfile", "ca.crt")
    if host in ("0.0.0.0", "::"):
        yield note_finding(
            "port",
            "the SuperLink listens on all networks; let it listen on 127.0.0.1 behind a proxy that passes the "
            "sites' path alone (docs/deploy/network.md)",
        )
    if (listen_address := _address_or_none(f"{host}:{port}" if ":" not in host else f"[{host}]:{port}")) is None:
        yield problem_finding("port", f"{unit.file}: --host {host} --port {port} is not an address")
    elif is_port_listening("127.0.0.1" if host in ("0.0.0.0", "::") else host, listen_address[1]):
        name = public_address[0] if public_address else None
        certificate = unit.find_file_of_option("--ssl-certfile", "server.pem")
        yield from _check_taken_port(listen_address, authority, name, certificate)
    else:
        yield from check_port_free("port", *listen_address, "end that program, or choose another --port")
    if public_address is not None and is_port_listening(*public_address):
        yield from check_tls_server_and_clock("address", *public_address, authority)
    elif public_address is not None:
        yield note_finding(
            "address", f"{address} takes no connection yet; look again when the server runs, best from a site"
        )


def _check_taken_port(address: tuple[str, int], authority: Path, name: str | None, certificate: Path) -> Findings:
    """Checks that the program that occupies a port is this server, and not another program."""
    host = "127.0.0.1" if address[0] in ("0.0.0.0", "::") else address[0]
    findings = list(
        check_tls_server_and_clock("port", host, address[1], authority, name or first_host_in_certificate(certificate))
    )
    if findings[0].level == "ok":
        yield from findings
    else:
        yield problem_finding(
            "port",
            f"port {address[1]} of {address[0]} is taken, but not by this server ({findings[0].text}); end that program, or "
            "choose another --port",
        )


def _check_key_files(folder: Path) -> Findings:
    """Checks that a server's folder has readable public keys of sites, and no private key of one."""
    for file in sorted(folder.glob("*.pub")):
        if read_openssh_public_key_as_der(file) is None:
            yield problem_finding("keys", f"{file} is not a public key in OpenSSH's form; ask the site for it again")
    for file in sorted(folder.glob("*.key")):
        if file.name not in ("server.key", "ca.key", "site.key"):
            yield note_finding(
                "keys",
                f"{file} is a private key; a site's never leaves the site, the server needs {file.name}.pub alone",
            )


# -- a site ----------------------------------------------------------------------------------------------------------------


def _check_site_folder(unit: SystemdUnit, address: str | None) -> Findings:
    options, unit_folder = unit.options, unit.file.parent
    yield from _check_unit(unit)
    authority = unit.find_file_of_option("--root-certificates", "ca.crt")
    key = unit.find_file_of_option("--auth-supernode-private-key", "site.key")
    yield from check_ca_certificate_file("certificates", authority)
    yield from check_site_key_pair("keys", key)
    words: dict[str, Any] = {}
    if unit.program is not None:
        try:
            words = parse_node_config(options.get("--node-config", ""))
            yield from check_node_config("configuration", words)
        except ValueError as error:
            yield problem_finding(
                "configuration", f"{unit.file}: --node-config cannot be read ({error}); texts need double quotes"
            )
    site_file = Path(str(words.get("site") or unit_folder / "site.py")).expanduser()
    yield from check_site_file_defines_client(
        "site.py", unit_folder / site_file.name if not site_file.exists() else site_file
    )
    if words.get("secure") and words.get("key") and words.get("peers"):
        key, peers = (Path(str(words[name])).expanduser() for name in ("key", "peers"))
        yield from check_public_keys_of_all_sites("keys", peers, str(words.get("client-id")), key)
        if (unreadable := finding_if_unreadable("keys", key)) is not None:
            yield unreadable
    if words.get("state-dir"):
        yield from check_state_folder("disk", Path(str(words["state-dir"])).expanduser())
    else:
        yield note_finding("disk", "the folder for states (state-dir) is not known")
    target = address or options.get("--superlink")
    if target is None:
        yield note_finding("server", "its address is not known; --address HOST:PORT looks for it")
    elif (server_address := _address_or_none(target)) is None:
        yield problem_finding("server", f"{target!r} is not an address; HOST:PORT, such as federation.example.org:443")
    else:
        yield from check_tls_server_and_clock("server", *server_address, authority)


def _address_or_none(text: str) -> tuple[str, int] | None:
    try:
        return split_host_and_port(text)
    except ValueError:
        return None
