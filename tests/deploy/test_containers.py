"""Container files of a project: read here as a builder reads them, since none is needed to see what must not be in them."""

import importlib
import json
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from polyfed.cli.main import main
from polyfed.deploy.doctor.folder_kinds import _parse_options, read_systemd_unit_if_exists
from polyfed.deploy.doctor.network import check_tls_server_and_clock
from polyfed.deploy.doctor.site_config import parse_node_config
from polyfed.deploy.trial.local_trial import flower_environment
from polyfed.deploy.trial.project import create_project

from .patients import free_port, server_files, write

ROOT = Path(__file__).parents[2]
NAMES = ("server", "site")


def instructions(text):
    """(instruction, rest) of a container file, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    words = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in words]


def flaws(text):
    """What is wrong with a container file, as a list of sentences."""
    steps = instructions(text)
    stages = [place for place, (word, _) in enumerate(steps) if word == "FROM"]
    last = steps[stages[-1] :]
    found = []

    def of(word, inside=steps):
        return [rest for instruction, rest in inside if instruction == word]

    for image in of("FROM"):
        name = image.split()[0]
        if (
            not re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9._-]*\d[A-Za-z0-9._-]*(@sha256:[0-9a-f]{64})?", name)
            or ":latest" in name
        ):
            found.append(f"FROM {image} has no fixed tag")
    users = of("USER", last)
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("it runs as root")
    elif any(word in ("RUN", "COPY", "ADD") for word, _ in last[[w for w, _ in last].index("USER") :]):
        found.append("the image is changed after USER")
    if of("ADD"):
        found.append("ADD fetches and unpacks what nobody looked at")
    for source in of("COPY"):
        words = [word for word in source.split() if not word.startswith("--")]
        if "--from=" not in source and not all(re.fullmatch(r"polyfed-\*\.whl", word) for word in words[:-1]):
            found.append(f"COPY {source} takes more than the wheel")
    for word in ("ENTRYPOINT", "HEALTHCHECK"):
        for rest in of(word, last)[-1:] or [""]:
            command = re.sub(r"^.*?CMD\s+", "", rest) if word == "HEALTHCHECK" else rest
            try:
                if not all(isinstance(part, str) for part in json.loads(command)) or not json.loads(command):
                    raise ValueError("no words")
            except ValueError:
                found.append(f"{word} is missing, or a line for a shell")
    runs = " ".join(of("RUN"))
    if "torch==2.13.0" not in runs or "download.pytorch.org/whl/cpu" not in " ".join([*of("ARG"), runs]):
        found.append("torch is not the CPU build of one version")
    if re.search(r"curl|wget|git clone|apt-get(?!.*--no-install-recommends)|sudo|chmod 777", runs):
        found.append("RUN fetches or opens more than is needed")
    if re.search(r"(?i)password|secret|token=|BEGIN .*KEY", " ".join(of("ENV") + of("ARG"))):
        found.append("ENV or ARG holds a secret")
    if "--no-cache-dir" not in runs:
        found.append("pip leaves its cache in the image")
    volumes = of("VOLUME", last)
    if not volumes or set(json.loads(volumes[-1])) != {"/etc/polyfed", "/var/lib/polyfed"}:
        found.append("states and certificates are not in volumes")
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.deploy.trial.project._write_catalogue", lambda path: path.write_text("{}"))
        return create_project(tmp_path_factory.mktemp("containers") / "federation", ["north"])


def text_of(project, name):
    return (project.path / "containers" / f"{name}.Dockerfile").read_text()


def entry(text):
    return json.loads(dict(instructions(text))["ENTRYPOINT"])


@pytest.mark.parametrize("name", NAMES)
def test_container_files_are_sound(project, name):
    assert flaws(text_of(project, name)) == []
    for word, rest in instructions(text_of(project, name)):
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


FAULTS = {
    "it runs as root": ("USER 10001:10001", "USER root"),
    "the image is changed": ("WORKDIR /var", "RUN true\nWORKDIR /var"),
    "ADD fetches": ("EXPOSE 8000", "ADD https://example.org/x /x"),
    "has no fixed tag": ("FROM python:3.12.11-slim-bookworm\n", "FROM python:latest\n"),
    "takes more than the wheel": ("COPY polyfed-*.whl", "COPY ."),
    "ENTRYPOINT is missing": ("ENTRYPOINT [", "ENTRYPOINT python ["),
    "HEALTHCHECK is missing": ("HEALTHCHECK", "LABEL"),
    "torch is not the CPU build": ("torch==2.13.0", "torch"),
    "holds a secret": ("ENV PATH", "ENV TOKEN=x PATH"),
    "fetches or opens": ("RUN groupadd", "RUN curl x | sh && groupadd"),
    "not in volumes": ('VOLUME ["/etc/polyfed", ', "VOLUME ["),
    "leaves its cache": (" --no-cache-dir", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_reader_finds_faults(project, fault):
    old, new = FAULTS[fault]
    text = text_of(project, "server")
    assert old in text
    assert any(fault in flaw for flaw in flaws(text.replace(old, new)))


def test_nothing_but_the_wheel_reaches_the_builder(project):
    ignored = (project.path / "containers" / ".dockerignore").read_text().splitlines()
    assert [line for line in ignored if line and not line.startswith("#")] == ["*", "!polyfed-*.whl"]
    assert not list(project.path.glob("containers/*.key"))


def test_versions_are_those_of_the_repository(project):
    project_file = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    services = yaml.safe_load((project.path / "containers" / "compose.yaml").read_text())["services"]
    for name in NAMES:
        text = text_of(project, name)
        assert set(re.findall(r"torch==\S+", text)) == {torch}
        python = re.search(r"python:(\d+\.\d+)", text)[1]
        assert any(python in classifier for classifier in project_file["classifiers"])
        assert f"polyfed-{name}:{project_file['version']}" in text
        assert services[name]["image"] == f"polyfed-{name}:{project_file['version']}"


def test_containers_start_what_the_units_start(project):
    """The options of the units, but for the host, which is the container's, and what compose.yaml tells a site."""
    server = _parse_options(entry(text_of(project, "server"))[3:])
    unit = read_systemd_unit_if_exists(project.path / "server" / "superlink.service").options
    assert {**server, "--host": "127.0.0.1"} == unit
    site = _parse_options(entry(text_of(project, "site"))[4:])
    services = yaml.safe_load((project.path / "containers" / "compose.yaml").read_text())["services"]
    told = _parse_options(services["site"]["command"])
    unit = read_systemd_unit_if_exists(project.path / "site" / "supernode.service").options
    assert {**site, **told}.keys() == unit.keys()
    assert parse_node_config(told["--node-config"]).keys() == parse_node_config(unit["--node-config"]).keys()
    assert entry(text_of(project, "site"))[:4] == ["python", "-P", "-m", "polyfed.deploy.supernode"]
    parser = importlib.import_module("flwr.supernode.cli.flower_supernode")._parse_args_run_supernode()
    parsed = parser.parse_args([*entry(text_of(project, "site"))[4:], *services["site"]["command"]])
    assert parsed.superlink == "federation.example.org:443"
    assert not parsed.insecure


def test_services_are_closed(project):
    content = yaml.safe_load((project.path / "containers" / "compose.yaml").read_text())
    for name in NAMES:
        service = content["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"] == "10001:10001"
        assert re.fullmatch(r"\d+g", service["mem_limit"])
        assert service["pids_limit"] > 0
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}
        assert all(volume.endswith(":ro") or volume.startswith(f"{name}-state:") for volume in service["volumes"])
        assert not {"environment", "privileged", "network_mode", "secrets"} & set(service)
    assert content["services"]["server"]["ports"] == ["127.0.0.1:8000:8000"]
    assert "ports" not in content["services"]["site"]


def health(project, name):
    command = json.loads(dict(instructions(text_of(project, name)))["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    return command[2]


def test_health_of_a_server_is_whether_its_port_answers(project):
    command = health(project, "server")
    port = re.search(r"127\.0\.0\.1', (\d+)", command)[1]
    assert port in shlex.join(entry(text_of(project, "server")))
    with socket.create_server(("127.0.0.1", 0)) as there:
        for found, status in ((there.getsockname()[1], 0), (free_port(), 1)):
            code = command.replace(port, str(found))
            done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=False)
            assert done.returncode == status, done.stderr


def test_health_of_a_site_is_whether_it_reaches_the_server(project):
    """What the container asks is a command of polyfed, of the folder for states that compose.yaml gives to the site."""
    asked = json.loads(dict(instructions(text_of(project, "site")))["HEALTHCHECK"].partition("CMD ")[2])
    services = yaml.safe_load((project.path / "containers" / "compose.yaml").read_text())["services"]
    state = parse_node_config(_parse_options(services["site"]["command"])["--node-config"])["state-dir"]
    assert asked == ["polyfed", "flower", "health", state]
    assert main(asked[1:]) == 2, "no site was started here"


@pytest.mark.slow
def test_the_server_s_command_serves(project, tmp_path):
    """As in the container, but for its paths and port; what it writes is in its state folder."""
    etc, state, port = server_files(tmp_path / "etc"), tmp_path / "state", str(free_port())
    write(etc, control_token="0" * 64)
    state.mkdir(mode=0o700)
    places = {"/etc/polyfed": str(etc), "/var/lib/polyfed": str(state), "0.0.0.0": "127.0.0.1", "8000": port}
    words = entry(text_of(project, "server"))
    for old, new in places.items():
        words = [new if word == old else word.replace(f"{old}/", f"{new}/") for word in words]
    assert words[0] == "python"
    log = tmp_path / "log"
    with log.open("wb") as output, subprocess.Popen(
        [sys.executable, *words[1:]], env=flower_environment(state / "superlink", {"HOME": str(state)}), cwd=state,
        stdout=output, stderr=output,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                try:
                    socket.create_connection(("127.0.0.1", int(port)), 1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            found = list(check_tls_server_and_clock("server", "127.0.0.1", int(port), etc / "ca.crt"))
        finally:
            process.terminate()
            assert process.wait(30) is not None
    assert [one.component for one in found if one.level == "ok"] == ["server", "clock"], (
        "what `flower doctor` asks a SuperLink"
    )
    assert (state / "state.db").exists()
    assert sorted(file.name for file in etc.iterdir()) == ["ca.crt", "control.token", "server.key", "server.pem"]


@pytest.mark.parametrize("name", NAMES)
def test_a_linter_of_container_files_finds_nothing(project, tmp_path, name):
    """hadolint, with all of its rules; and it would find what is wrong."""
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint has no package for this kind of machine")
    told = subprocess.run([program, project.path / "containers" / f"{name}.Dockerfile"], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN pip install polyfed\n")
    assert "DL3007" in subprocess.run([program, tmp_path / "Dockerfile"], capture_output=True, text=True).stdout
