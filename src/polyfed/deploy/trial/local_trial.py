"""Runs a deployment on one machine to try it out: SuperLink and SuperNodes run as local processes, with TLS and keys as
between real sites.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypedDict, cast, final

from polyfed.core.errors import RoundError, UserError
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.deploy.trial.project import (
    DeploymentProject,
    make_private_folder,
    write_site_key_pair,
    write_trial_certificates,
)
from polyfed.simulation.storage.directory import write_file_atomically

_SUPERLINK_MODULE, _SUPERNODE_MODULE = "polyfed.deploy.link", "polyfed.deploy.supernode"
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_RESTART_SECONDS = 10.0  # wait before a restart of a SuperNode, which the SuperLink refuses for about a minute


@final
@dataclass
class TrialProcess:
    """Holds one process of a trial, with the command that starts it and its log file.

    Args:
        name: "superlink" or the name of a site.
        command: its command line.
        log: the file that gets its output.
        environment: its environment variables.
        popen: the running process.
        ended_at: time (`time.monotonic`) at which it was seen to have ended; None while it runs.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    popen: subprocess.Popen[bytes]
    ended_at: float | None = None


@final
@dataclass
class LocalTrial:
    """Manages the SuperLink and SuperNode processes of a trial.

    Args:
        project: the project.
        port: port of the SuperLink.
        sites: names of the sites.
        processes: the SuperLink first, then the SuperNodes in the order of their sites.
    """

    project: DeploymentProject
    port: int
    sites: tuple[str, ...]
    processes: list[TrialProcess] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Returns the folder with the trial's logs, its database and the folders of its sites."""
        return trial_folder_of(self.project)

    def restart_ended_supernodes(self) -> None:
        """Restarts each SuperNode process of the trial some seconds after it has ended.

        Raises:
            RoundError: the SuperLink has ended.
        """
        superlink, *nodes = self.processes
        if superlink.popen.poll() is not None:
            raise RoundError(f"the SuperLink has ended with status {superlink.popen.returncode}; see {superlink.log}")
        now = time.monotonic()
        for node in nodes:
            if node.popen.poll() is not None and node.ended_at is None:
                node.ended_at = now
            if node.ended_at is not None and now - node.ended_at > _RESTART_SECONDS:
                node.popen, node.ended_at = _open_process(node.command, node.log, node.environment), None
                self.write_trial_file()

    def write_trial_file(self) -> None:
        """Writes `trial.json` with the port, the sites and the process ids of the trial."""
        process_ids = {process.name: process.popen.pid for process in self.processes}
        content = {"port": self.port, "sites": list(self.sites), "processes": process_ids}
        write_file_atomically(self.folder / "trial.json", json.dumps(content, indent=1).encode())

    def stop_all_processes(self) -> None:
        """Stops the SuperNodes, then the SuperLink; kills those that do not end in time.

        Ctrl-C and SIGTERM are ignored meanwhile.
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        old_handlers = (
            {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)} if is_main_thread else {}
        )
        for group in (self.processes[1:], self.processes[:1]):
            for process in group:
                if process.popen.poll() is None:
                    process.popen.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
            for process in group:
                try:
                    process.popen.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.popen.kill()
                    process.popen.wait()
        (self.folder / "trial.json").unlink(missing_ok=True)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def trial_folder_of(project: DeploymentProject) -> Path:
    """Returns the path of the folder in which a project's trial (its deployment on one machine) stores its files."""
    return project.path / "trial"


class RunningTrial(TypedDict):
    """Describes the content of `trial.json`: the port, the names of the sites, and the process ids of a running trial."""

    port: int
    sites: list[str]
    processes: dict[str, int]


def read_running_trial(project: DeploymentProject) -> RunningTrial | None:
    """Returns port, sites and process ids of `trial.json`; None if no trial runs or it is damaged."""
    try:
        content = parse_json(read_file(trial_folder_of(project) / "trial.json"))
    except (OSError, ValueError):
        return None
    return None if validation_error(content, RunningTrial) else cast(RunningTrial, content)


@contextmanager
def start_trial(
    project: DeploymentProject,
    sites: Sequence[str],
    port: int = 8000,
    node_config: str = "",
    proxy_port: int | None = None,
) -> Iterator[LocalTrial]:
    """Starts the SuperLink and SuperNodes of a trial for the duration of a `with` block, and stops them at its end.

    Args:
        project: the project, with certificates, keys and `site/site.py`.
        sites: names of the sites; each site's process gets its name as POLYFED_SITE, and all names as POLYFED_SITES.
        port: port of the SuperLink; the SuperNodes take the next free ones.
        node_config: appended to the node configuration of all sites, such as 'disclose="accuracy"'.
        proxy_port: port of a proxy to which SuperNodes connect; None connects them to the SuperLink.

    Raises:
        UserError: the port is taken, a trial is running already, or files are missing.
        RoundError: a process does not start; the message names its log.
    """
    if read_running_trial(project) is not None:
        raise UserError(
            f"a trial of {project.path} is running, or was killed; end it, or delete {trial_folder_of(project)}/trial.json"
        )
    if not project.site_file.is_file():
        raise UserError(f"{project.site_file} is missing; it must define client()")
    if _is_port_open(port):
        raise UserError(f"port {port} is taken; choose another --port")
    folder, certificates = trial_folder_of(project), project.certificates_folder
    for private_folder in (folder, folder / "sites", folder / "homes", certificates):
        make_private_folder(private_folder)
    if not (certificates / "ca.crt").exists():  # deleted to renew them
        write_trial_certificates(certificates)
    local_trial = LocalTrial(project, port, tuple(sites))
    with ExitStack() as stack:
        stack.callback(local_trial.stop_all_processes)
        authority = str(certificates / "ca.crt")
        token = _control_token_file(folder)
        files = ["--ssl-certfile", str(certificates / "server.pem"), "--ssl-keyfile", str(certificates / "server.key")]
        superlink_command = [
            sys.executable, "-m", _SUPERLINK_MODULE, "--control-token-file", str(token), "--host", "127.0.0.1",
            "--port", str(port), "--ssl-ca-certfile", authority, *files, "--enable-supernode-auth",
            "--database", str(folder / "state.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        local_trial.processes.append(_start_process("superlink", superlink_command, folder, {}))
        keys = {site: certificates / f"{site}.key" for site in sites}
        ready_file, free_port = folder / "ready", port
        ready_file.unlink(missing_ok=True)
        for site, key in keys.items():
            if not key.exists():
                write_site_key_pair(key)
            free_port = next(n for n in (*range(free_port + 1, 2**16), *range(2**10, port)) if not _is_port_open(n))
            state_folder = folder / "sites" / site
            make_private_folder(state_folder)
            key_config = f'key="{key}" peers="{certificates}"'  # for secure sums
            site_config = (
                f'client-id="{site}" site="{project.site_file}" state-dir="{state_folder}" {key_config} {node_config}'
            )
            connection_options = ["--superlink", f"127.0.0.1:{proxy_port or port}", "--root-certificates", authority]
            supernode_command = [
                sys.executable, "-P", "-m", _SUPERNODE_MODULE, *connection_options, "--port", str(free_port),
                "--auth-supernode-private-key", str(key), "--node-config", site_config.strip(),
            ]  # fmt: skip
            # SuperNodes import their modules while the SuperLink starts, and connect when their keys are registered.
            site_variables = {"POLYFED_SITE": site, "POLYFED_SITES": ",".join(sites), "POLYFED_AFTER": str(ready_file)}
            local_trial.processes.append(_start_process(site, supernode_command, folder, site_variables))
        _wait_until(lambda: _is_port_open(port), local_trial.processes[0])
        write_flwr_config(folder / "home", f"127.0.0.1:{port}", authority)
        _log_in(folder / "home", f"127.0.0.1:{port}", token, keys)
        ready_file.touch(mode=0o600)
        local_trial.write_trial_file()
        yield local_trial


def _control_token_file(folder: Path) -> Path:
    """Returns the path of the control token's file, which is created if missing."""
    file = folder / "control.token"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32) + "\n", encoding="utf-8")
    return file


def _log_in(home: Path, address: str, token: Path, keys: Mapping[str, Path] = MappingProxyType({})) -> None:
    """Gives Flower's command `flwr` access to the trial's SuperLink, and registers the sites' public keys there."""
    command = [sys.executable, "-m", _SUPERLINK_MODULE, "--control-token-file", str(token), "--login", address]
    command += [word for site, key in keys.items() for word in ("--register", f"{site}={key}.pub")]
    process = subprocess.run(command, env=flower_environment(home), capture_output=True, text=True, check=False)
    if process.returncode:
        raise RoundError(f"the SuperLink does not let the trial in: {' '.join(process.stderr.split())[-300:]}")


def find_flwr_command() -> str:
    """Returns the path of the command `flwr`, which Flower installs.

    Raises:
        UserError: Flower is not installed.
    """
    path = Path(sys.executable).parent / "flwr"
    if not path.exists():
        raise UserError("flwr is missing; pip install 'polyfed[flower]'")
    return str(path)


def write_flwr_config(flower_home: Path, superlink_address: str, authority_file: str | None) -> None:
    """Writes a configuration for Flower's command `flwr` into a folder, with a connection to a SuperLink named "fed"."""
    make_private_folder(flower_home)
    lines = ["[superlink]", 'default = "fed"', "[superlink.fed]", f"address = {json.dumps(superlink_address)}"]
    lines += [f"root-certificates = {json.dumps(authority_file)}"] if authority_file else []
    (flower_home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_flwr(flower_home: Path | None, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Flower's command `flwr` with the given arguments, and returns the finished process with its output."""
    command = [find_flwr_command(), *arguments]
    return subprocess.run(
        command, env=flower_environment(flower_home), capture_output=True, text=True, check=False, **options
    )


def flower_environment(flower_home: Path | None, extra_variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this process's environment without telemetry and with Flower's programs on PATH.

    Args:
        flower_home: FLWR_HOME; None uses the user's own configuration of Flower.
        extra_variables: further variables.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    home_variable = {} if flower_home is None else {"FLWR_HOME": str(flower_home)}
    return {**os.environ, **quiet, **home_variable, "PATH": path, **(extra_variables or {})}


def _start_process(name: str, command: Sequence[str], folder: Path, more: Mapping[str, str]) -> TrialProcess:
    log, variables = folder / f"{name}.log", flower_environment(folder / "homes" / name, more)
    make_private_folder(folder / "homes" / name)
    return TrialProcess(name, command, log, variables, _open_process(command, log, variables))


def _open_process(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    output: IO[bytes]
    log.touch(mode=0o600)
    with log.open("ab") as output:
        # In a session of its own, so that Ctrl-C reaches only this process, which ends the others in order.
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(variables),
            start_new_session=True,
            umask=0o077,
        )


def _is_port_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(is_ready: Any, process: TrialProcess) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_ready():
        if process.popen.poll() is not None or time.monotonic() > deadline:
            raise RoundError(f"{process.name} did not start; see {process.log}")
        time.sleep(0.2)


def raise_keyboard_interrupt_on_signals() -> None:
    """Makes SIGTERM and Ctrl-C raise KeyboardInterrupt, also for a trial in a shell's background."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupt)
