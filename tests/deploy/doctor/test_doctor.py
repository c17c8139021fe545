"""`polyfed flower doctor` on folders of a project, a trial, a server and a site, before they are started and while they
run."""

import json
import os
import socket
import subprocess
import sys

import pytest

from polyfed.cli.main import main
from polyfed.deploy.doctor.folder_kinds import detect_folder_kinds, read_systemd_unit_if_exists
from polyfed.deploy.doctor.network import check_port_free, check_tls_server_and_clock, split_host_and_port
from polyfed.deploy.trial.project import (
    DeploymentProject,
    create_project,
    write_site_key_pair,
    write_trial_certificates,
)

from ..patients import NODE, UNIT, Authority, free_port, server_files, serving, write
from .test_doctor_files import said

SITE = "def client(): ...\n"


@pytest.fixture
def doctor(capsys):
    """The exit status, and the lines."""

    def examined(folder, *words):
        status = main(["flower", "doctor", str(folder), *words])
        *lines, summary = capsys.readouterr().out.splitlines()
        assert summary == f"{sum(line.startswith('ok') for line in lines)} checks passed, {len(wrongs(lines))} failed"
        assert all(line.split()[0] in ("ok", "note", "wrong") for line in lines)
        assert status == any(line.startswith("wrong") for line in lines)
        return status, lines

    return examined


def wrongs(lines):
    return [line for line in lines if line.startswith("wrong")]


# -- ports, TLS, clocks -----------------------------------------------------------------------------------------------------


def test_a_server_that_answers(tmp_path):
    folder = server_files(tmp_path / "x")
    with serving(folder) as port:
        found = list(check_tls_server_and_clock("server", "127.0.0.1", port, folder / "ca.crt"))
    assert [one.level for one in found] == ["ok", "ok"]
    assert "agree to a few seconds" in found[1].text


@pytest.mark.parametrize(
    ("ahead", "sentence"),
    [
        (30, ""),
        (400, " s behind the server's"),
        (-30, " s ahead of the server's"),
        (-3, ""),
        (9e4, "behind the server's"),
    ],
)
def test_clocks_that_differ(tmp_path, ahead, sentence):
    """Flower refuses a site 5 s ahead of the server, or 305 s behind."""
    folder = server_files(tmp_path / "x")
    with serving(folder, ahead=ahead) as port:
        found = said(check_tls_server_and_clock("server", "127.0.0.1", port, folder / "ca.crt"))
    assert bool(found) == bool(sentence), found
    assert all(sentence in one for one in found)


def test_a_server_that_does_not_tell_the_time(tmp_path):
    folder = server_files(tmp_path / "x")
    with serving(folder, date=False) as port:
        found = list(check_tls_server_and_clock("server", "127.0.0.1", port, folder / "ca.crt"))
    assert "does not tell its time" in found[1].text


def test_servers_that_a_site_cannot_use(tmp_path, monkeypatch):
    good = Authority()
    folder, foreign = server_files(tmp_path / "x", good), server_files(tmp_path / "foreign")
    old, other = server_files(tmp_path / "old", good, ends=-0.5), server_files(tmp_path / "o", good, addresses=())
    for served, sentence in (
        (foreign, "is refused: "),
        (old, "certificate has expired"),
        (other, "IP address mismatch"),
        (None, "speaks no TLS"),
    ):
        with serving(served) as port:
            found = said(check_tls_server_and_clock("server", "127.0.0.1", port, folder / "ca.crt"))
        assert any(sentence in one for one in found), found
    (told,) = said(check_tls_server_and_clock("server", "127.0.0.1", free_port(), folder / "ca.crt"))
    assert "takes no connection (Connection refused)" in told

    def fails(error):
        def connect(*_, **__):
            raise error

        monkeypatch.setattr(socket, "create_connection", connect)
        (told,) = said(check_tls_server_and_clock("server", "federation.example.org", 443, folder / "ca.crt"))
        return told

    assert "is not known here" in fails(socket.gaierror(-2, "Name or service not known"))
    assert "does not answer within 5 s; a firewall" in fails(TimeoutError("timed out"))


def test_ports(monkeypatch):
    assert [one.level for one in check_port_free("port", "127.0.0.1", free_port(), "x")] == ["ok"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (told,) = said(check_port_free("port", "127.0.0.1", taken.getsockname()[1], "choose another --port"))
    assert "is taken by another program; choose another --port" in told
    (told,) = said(check_port_free("port", "192.0.2.1", free_port(), "x"))
    assert "nothing can listen on" in told

    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    (told,) = said(check_port_free("port", "127.0.0.1", 443, "x"))
    assert "443 is a port for root alone" in told


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:99999999999", "a..b:1"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="is not an address"):
        split_host_and_port(text)


# -- projects and trials --------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project as `polyfed flower init` writes it, but for the catalogue, which takes torch."""
    monkeypatch.setattr("polyfed.deploy.trial.project._write_catalogue", lambda path: path.write_text("{}"))
    return create_project(tmp_path / "federation", ["north", "south"])


def test_a_new_project_is_well(project, doctor):
    status, lines = doctor(project.path, "--port", str(free_port()))
    assert status == 0, lines
    parts = {line.split()[1] for line in lines}
    assert parts >= {"certificates:", "keys:", "port:", "disk:", "versions:", "configuration:", "site.py:", "sites:"}


def test_faults_of_a_project(project, doctor):
    write_trial_certificates(project.certificates_folder)
    (project.certificates_folder / "south.key").write_bytes((project.certificates_folder / "north.key").read_bytes())
    (project.certificates_folder / "south.key.pub").write_bytes(
        (project.certificates_folder / "north.key.pub").read_bytes()
    )
    project.certificates_folder.chmod(0o755)
    project.site_file.unlink()
    file = project.app_folder / "pyproject.toml"
    file.write_text(file.read_text().replace("rounds = 10", "rounds = 0"))
    (project.path / "trial").mkdir(mode=0o755)
    (project.path / "trial" / "trial.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, lines = doctor(project.path, "--port", str(taken.getsockname()[1]))
    found = "\n".join(wrongs(lines))
    for sentence in (
        "rounds must be a whole number", "others can enter", "south and north have one key", "site.py does not exist",
        "is taken by another program", "trial.json is damaged", "trial (mode 755)",
    ):  # fmt: skip
        assert sentence in found, (sentence, found)


def running(project, port, **processes):
    folder = project.path / "trial"
    folder.mkdir(mode=0o700)
    write(folder, control_token="0" * 64)
    (folder / "trial.json").write_text(json.dumps({"port": port, "sites": ["north", "south"], "processes": processes}))
    return folder


def test_a_trial_that_runs(project, doctor):
    with serving(project.certificates_folder) as port:
        folder = running(project, port, superlink=os.getpid(), north=os.getpid())
        for place in (project.path, folder):
            status, lines = doctor(place)
            assert status == 0, lines
            assert any("it runs, with north, south" in line for line in lines)
            assert any(f"127.0.0.1:{port} answers with a certificate of" in line for line in lines)


def ended():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_a_trial_that_was_killed_or_has_lost_a_site(project, doctor):
    folder = running(project, free_port(), superlink=ended(), north=ended())
    assert "it was killed: none of its processes runs" in "\n".join(wrongs(doctor(project.path)[1]))
    with serving(project.certificates_folder) as port:
        told = {"port": port, "sites": ["north"], "processes": {"superlink": os.getpid(), "north": ended()}}
        (folder / "trial.json").write_text(json.dumps(told))
        _, lines = doctor(project.path)
    assert "the process of north has ended; see" in "\n".join(wrongs(lines))
    assert any("runs have those of the trial" in line for line in lines)


# -- servers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    folder = server_files(tmp_path / "server")
    write(folder, control_token="0" * 64)
    (folder / "state").mkdir(mode=0o700)
    return folder


def with_unit(folder, **words):
    given = {"folder": folder, "program": sys.executable, "port": free_port(), **words}
    return write(folder, superlink_service=UNIT.format(**given))


def test_a_server_before_it_is_started_and_while_it_runs(server, doctor):
    status, lines = doctor(with_unit(server))
    assert status == 0, lines
    assert any("is free" in line for line in lines)
    with serving(server) as port:
        with_unit(server, port=port)
        status, lines = doctor(server, "--address", f"localhost:{port}")
    assert status == 0, lines
    assert sum("answers with a certificate of" in line for line in lines) == 2


def test_faults_of_a_server(server, doctor, tmp_path):
    unit = with_unit(server) / "superlink.service"
    text = unit.read_text()
    write_site_key_pair(server / "north.key")
    write(server, ca_key="x", east_pub="x")
    unit.write_text(text.replace(" --enable-supernode-auth", " --insecure").replace("127.0.0.1", "0.0.0.0"))
    _, lines = doctor(server, "--address", "other.invalid:9092")
    found = "\n".join(lines)
    for sentence in (
        "has --insecure", "lacks --enable-supernode-auth", "other.invalid:9092 takes no connection yet",
        "east.pub is not a public key", "note   port: the SuperLink listens on all networks", "ca.key signs certificates",
        "north.key is a private key",
    ):  # fmt: skip
        assert sentence in found, (sentence, found)
    unit.write_text(text.replace(f"--control-token-file {server}/control.token", ""))
    assert "names no --control-token-file" in "\n".join(wrongs(doctor(server)[1]))
    unit.write_text(text.replace(sys.executable, str(tmp_path / "python")))
    assert "which does not exist" in "\n".join(wrongs(doctor(server)[1]))
    with serving() as port:
        with_unit(server, port=port)
        assert "is taken, but not by this server" in "\n".join(wrongs(doctor(server)[1]))
    unit.write_text("[Service]\n")
    assert main(["flower", "doctor", str(server)]) == 2


def test_a_server_without_a_unit_has_files_under_their_usual_names(server, doctor, monkeypatch):
    """As in a container, whose environment says where states are."""
    monkeypatch.setenv("FLWR_HOME", str(server / "state" / "superlink"))
    status, lines = doctor(server)
    assert any("disk: state has" in line for line in lines)
    assert any("superlink.service is not there" in line for line in lines)
    assert any("server.key belongs to" in line for line in lines)
    assert status in (0, 1)  # port 8000 may be taken


# -- sites ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    other = server_files(tmp_path / "server")
    folder = write(tmp_path / "site", site_py=SITE, ca_crt=(other / "ca.crt").read_bytes())
    write_site_key_pair(folder / "site.key")
    (folder / "state").mkdir(mode=0o700)
    (folder / "keys").mkdir()
    (folder / "keys" / "north.pub").write_bytes((folder / "site.key.pub").read_bytes())
    return folder


def with_node(folder, address, words=""):
    given = {"folder": folder, "program": sys.executable, "address": address, "words": words}
    return write(folder, supernode_service=NODE.format(**given))


def test_a_site_that_reaches_its_server(site, doctor):
    words = f'secure=true key="{site}/site.key" peers="{site}/keys"'
    with serving(site.parent / "server") as port:
        status, lines = doctor(with_node(site, f"localhost:{port}", words))
        assert status == 0, lines
        found = "\n".join(lines)
        for sentence in ("has the keys of north", "answers with", "agree to a few seconds", "node-config of 'north'"):
            assert sentence in found
        (site / "supernode.service").unlink()
        status, lines = doctor(site, "--address", f"localhost:{port}")
        assert status == 0, lines


def test_faults_of_a_site(site, doctor):
    words = f'secure=true peers="{site}/keys" disclos="loss"'
    (site / "site.key").chmod(0o644)
    (site / "site.py").write_text("x = 1\n")
    (site / "state").chmod(0o755)
    found = "\n".join(wrongs(doctor(with_node(site, f"127.0.0.1:{free_port()}", words))[1]))
    for sentence in (
        "secure=true needs key", "has no 'disclos'; did you mean disclose", "mode 644", "does not define client()",
        "others can enter", "takes no connection",
    ):  # fmt: skip
        assert sentence in found, (sentence, found)
    with_node(site, "nowhere", "x")
    unit = site / "supernode.service"
    unit.write_text(
        unit.read_text().replace('client-id="north"', "client-id=north").replace("--root", "--insecure --root")
    )
    found = "\n".join(wrongs(doctor(site)[1]))
    for sentence in ("--node-config cannot be read", "'nowhere' is not an address", "has --insecure"):
        assert sentence in found, (sentence, found)


def test_a_machine_that_is_both_is_examined_as_both(site, server, doctor):
    for name in ("site.key", "site.key.pub", "site.py"):
        (server / name).write_bytes((site / name).read_bytes())
    (server / "site.key").chmod(0o600)
    _, lines = doctor(server)
    assert any("site.key can be used" in line for line in lines)
    assert any("server.key belongs to" in line for line in lines)


# -- all of them ------------------------------------------------------------------------------------------------------


def test_the_units_of_a_project_can_be_read(project):
    assert [*map(detect_folder_kinds, (project.path, project.path / "server", project.path / "site"))] == [
        ("project",), ("server",), ("site",)
    ]  # fmt: skip
    unit = read_systemd_unit_if_exists(project.path / "server" / "superlink.service")
    assert unit.options["--host"] == "127.0.0.1"
    assert unit.options["--enable-supernode-auth"] == ""
    assert unit.environment["FLWR_HOME"] == "/var/lib/polyfed/superlink"
    assert (
        'client-id="north"'
        in read_systemd_unit_if_exists(project.path / "site" / "supernode.service").options["--node-config"]
    )
    assert DeploymentProject(project.path).read_site_names() == ["north", "south"]


def test_it_answers_without_torch_and_flower(project):
    code = (
        "import sys\nfrom polyfed.cli.main import main\n"
        f"status = main(['flower', 'doctor', {str(project.path)!r}, '--port', '{free_port()}'])\n"
        "assert status == 0 and not {'torch', 'flwr', 'scipy', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_folder_that_is_none_is_refused(tmp_path, capsys):
    assert main(["flower", "doctor", str(tmp_path)]) == 2
    assert "is none of a project (app/pyproject.toml), a server" in capsys.readouterr().err
    assert main(["flower", "doctor", str(tmp_path / "x")]) == 2
    assert main(["flower", "doctor", str(tmp_path), "--out", "x"]) == 2
