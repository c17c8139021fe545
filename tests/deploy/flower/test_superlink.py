"""Who may start runs: the token of the control interface, the words of Flower's programs, who can read what they write."""

import asyncio
import configparser
import datetime
import importlib
import json
import os
import shlex
import stat
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import HTTPException
from flwr.cli.auth_plugin import OidcCliPlugin, get_cli_plugin_class
from flwr.cli.constant import AUTHN_TYPE_STORE_KEY
from flwr.common.constant import ACCESS_TOKEN_KEY, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.supercore.error import FlowerError
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.superlink.main import create_app
from flwr.superlink.routers.fleet import node_auth

from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.deploy.flower import superlink, supernode
from polyfed.deploy.flower.private_api import import_private_flower_functions
from polyfed.deploy.flower.superlink import TokenPlugin, read_control_token
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import create_project
from polyfed.testing import small_clients

from ..conftest import ONE
from ..test_parity import deployed

pytestmark = pytest.mark.slow  # .ci/run has it

TOKEN = "0123456789abcdef" * 4
OPEN = {"/v1/control/get-auth-tokens", "/v1/control/get-login-details", "/v1/control/refresh-auth-tokens"}
"""What Flower asks for before an account is known; here they give nothing."""


def modes(folder):
    """Path -> rights of group and others, where there are any."""
    found = {p: stat.S_IMODE(p.lstat().st_mode) & 0o077 for p in [folder, *folder.rglob("*")] if not p.is_symlink()}
    return {str(path.relative_to(folder)): oct(mode) for path, mode in found.items() if mode}


@pytest.mark.parametrize(
    ("sent", "allowed"),
    [
        ([(ACCESS_TOKEN_KEY, TOKEN)], True),
        ([(ACCESS_TOKEN_KEY, TOKEN.encode())], True),
        ([], False),
        ([(ACCESS_TOKEN_KEY, "")], False),
        ([(ACCESS_TOKEN_KEY, TOKEN[:-1])], False),
        ([(ACCESS_TOKEN_KEY, TOKEN + "0")], False),
        ([(ACCESS_TOKEN_KEY, "ä" * 64)], False),
        ([("another", TOKEN)], False),
        ([(ACCESS_TOKEN_KEY, "x"), (ACCESS_TOKEN_KEY, TOKEN)], False),
    ],
)
def test_only_the_token_lets_in(sent, allowed):
    verdict, account = TokenPlugin(TOKEN).validate_tokens_in_metadata(sent)
    assert verdict is allowed
    assert (account is not None) is allowed
    with pytest.raises(FlowerError):
        TokenPlugin(TOKEN).refresh_tokens(sent)


@pytest.mark.parametrize(
    ("ahead", "signed", "told"),
    [
        (0, True, None),
        (4, True, None),
        (-300, True, None),
        (3600, True, "its clock is 3600 s ahead of this one"),
        (-3600, True, "its clock is 3600 s behind this one"),
        (0, False, "its key is not the registered one"),
    ],
)
def test_why_a_supernode_is_refused_is_in_the_log(caplog, ahead, signed, told):
    """By Flower's own check, which says 401 whatever it was."""
    (key, public), (other, _) = generate_key_pairs(), generate_key_pairs()
    whose = public_key_to_bytes(public)
    stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)).isoformat()
    signature = sign_message(key if signed else other, stamp.encode())
    names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
    headers = {name: b64encode(value).decode() for name, value in zip(names, (whose, signature), strict=True)}
    state = SimpleNamespace(protobuf_request=ActivateNodeRequest(public_key=whose))
    request = SimpleNamespace(
        headers={**headers, TIMESTAMP_HEADER: stamp}, state=state, client=SimpleNamespace(host="10.0.0.9")
    )
    check = superlink.wrap_to_log_refusals(node_auth.authenticate_node)
    if told is None:
        check(request)
        assert caplog.messages == []
    else:
        with pytest.raises(HTTPException):
            check(request)
        (message,) = caplog.messages
        assert message.startswith(f"polyfed: the SuperNode at 10.0.0.9 is refused: {told}")


def test_a_token_that_others_can_read_is_none(tmp_path):
    file = tmp_path / "token"
    with pytest.raises(UserError, match="cannot be read"):
        read_control_token(file)
    file.write_text(f"{TOKEN}\n")
    for mode in (0o644, 0o640, 0o604, 0o602):
        file.chmod(mode)
        with pytest.raises(UserError, match="others can read or write"):
            read_control_token(file)
    file.chmod(0o600)
    assert read_control_token(file) == TOKEN
    for short in ("", "abc", "a b" * 20, "ä" * 40):
        file.write_text(short)
        with pytest.raises(UserError, match="must hold at least 32 letters"):
            read_control_token(file)


def test_a_link_without_a_token_does_not_start(tmp_path):
    for words in ([], ["--control-token-file"], ["--login", "127.0.0.1:8000"]):
        done = subprocess.run(
            [sys.executable, "-m", "polyfed.deploy.link", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 1
        assert "polyfed: --control-token-file is missing" in done.stderr


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What a trial of two sites would start: name -> (command, environment); no process is started, but the token stored."""
    project, found = create_project(tmp_path / "federation", ["north", "south"]), {}

    def popen(command, log, own):
        found[log.stem] = (list(command), dict(own))
        return SimpleNamespace(pid=1, poll=lambda: 0, wait=lambda timeout: 0, returncode=0)

    monkeypatch.setattr(trials, "_open_process", popen)
    monkeypatch.setattr(trials, "_is_port_open", lambda port: port == 18000 and "superlink" in found)
    login = trials._log_in
    monkeypatch.setattr(trials, "_log_in", lambda home, address, token, keys: login(home, address, token))
    with trials.start_trial(project, ["north", "south"], port=18000, node_config='disclose="accuracy"'):
        pass
    return project, found


def config_of(words, monkeypatch):
    """What Flower's SuperLink makes of these words after ours."""
    seen = []
    module = importlib.import_module("flwr.superlink.cli.flower_superlink")
    monkeypatch.setattr(module, "load_control_authn_plugin", module.load_control_authn_plugin)
    monkeypatch.setattr(module, "flower_superlink", lambda: seen.append(module._parse_superlink_lifespan_config()))
    monkeypatch.setattr(sys, "argv", ["link"])
    before = os.umask(0o022)
    try:
        superlink.start_superlink_or_log_in(list(words))
        assert os.umask(0o022) == 0o077, "what the SuperLink and its runs write is open to others"
    finally:
        os.umask(before)
    return seen[0], module


@pytest.mark.filterwarnings("ignore::DeprecationWarning:alembic")
def test_a_trial_starts_a_superlink_that_asks_for_the_token(started, monkeypatch):
    """From the words of the trial to what Flower's application answers: no route of the control interface is open."""
    project, found = started
    command, own = found["superlink"]
    assert command[:3] == [sys.executable, "-m", "polyfed.deploy.link"]
    config, module = config_of(command[3:], monkeypatch)
    assert isinstance(config.authn_plugin, TokenPlugin)
    assert (config.host, config.enable_supernode_auth, config.insecure) == ("127.0.0.1", True, False)
    assert config.database == str(project.path / "trial" / "state.db")
    app = create_app(config, module.SuperLinkLifespan)
    token = read_control_token(project.path / "trial" / "control.token")
    assert token not in " ".join(command) + str(own), "every user can read the words of a process"
    paths = [path for path in app.openapi()["paths"] if path.startswith("/v1/control/")]
    assert {"/v1/control/start-run", "/v1/control/register-node"} < set(paths)

    async def ask(path, sent):
        headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://link") as client:
            return (await client.post(path, headers=headers)).status_code

    refused = {path for path in paths if {asyncio.run(ask(path, sent)) for sent in (None, "x" * 64)} == {401}}
    assert set(paths) - refused == OPEN
    assert asyncio.run(ask("/v1/control/start-run", token)) == 415, "who has the token is refused"


def test_a_trial_starts_supernodes_that_both_kinds_understand(started):
    """With polyfed's, and Flower's own where Flower has changed."""
    project, found = started
    theirs = importlib.import_module("flwr.supernode.cli.flower_supernode")._parse_args_run_supernode()
    for site in ("north", "south"):
        command, own = found[site]
        assert command[:4] == [sys.executable, "-P", "-m", "polyfed.deploy.supernode"]
        ours, strange = supernode.build_supernode_parser().parse_known_args(command[4:])
        assert not strange
        assert theirs.parse_args(command[4:]).node_config == ours.node_config
        config = json.loads(supernode.node_config_as_json(ours.node_config, import_private_flower_functions()["words"]))
        assert (config["client-id"], config["disclose"], own["POLYFED_SITE"]) == (site, "accuracy", site)
        assert config["state-dir"] == str(project.path / "trial" / "sites" / site)
        assert Path(own["POLYFED_AFTER"]).exists(), "it may connect now"


def test_flowers_own_commands_send_the_token(started):
    """As its credential store gives it to them."""
    project, _ = started
    folder = project.path / "trial"
    store = FileCredentialStore(folder / "home" / "credentials.yaml")
    kind = store.get(AUTHN_TYPE_STORE_KEY % "127.0.0.1:18000").decode()
    assert get_cli_plugin_class(kind) is OidcCliPlugin
    plugin = OidcCliPlugin("127.0.0.1:18000")
    plugin.store = store
    plugin.load_tokens()
    sent = plugin.write_tokens_to_metadata([])
    assert TokenPlugin(read_control_token(folder / "control.token")).validate_tokens_in_metadata(sent)[0]


def test_folders_of_a_trial_are_closed(started):
    project, found = started
    trial = project.path / "trial"
    for folder in (
        project.certificates_folder,
        trial,
        *(trial / name for name in ("home", "sites/north", "homes/superlink")),
    ):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for file in (
        *project.certificates_folder.glob("*.key"),
        trial / "control.token",
        trial / "home" / "credentials.yaml",
    ):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert set(found) == {"superlink", "north", "south"}


def test_processes_of_a_trial_write_for_their_owner_alone(tmp_path):
    log = tmp_path / "log"
    words = [sys.executable, "-c", "import os, sys; print(oct(os.umask(0)))"]
    assert trials._open_process(words, log, dict(os.environ)).wait() == 0
    assert log.read_text().strip() == "0o77"


def test_what_a_site_writes_nobody_else_can_read(tmp_path, nodes):
    """Under a umask that gives all to everybody; the site's own afterwards is as it was."""
    before = os.umask(0)
    try:
        deployed(tmp_path, nodes, small_clients(), FedAvg(lr=0.05), ONE)
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    for client in small_clients():
        folder = tmp_path / "sites" / client.id / "state"
        assert len(list(folder.rglob("*"))) > 5
        assert modes(folder) == {}


UNITS = {"superlink": "server/superlink.service", "supernode": "site/supernode.service"}


@pytest.fixture
def units(tmp_path):
    """The units of a project: name -> (path, settings of [Service], words of ExecStart)."""
    project, found = create_project(tmp_path / "federation", ["north"]), {}
    for name, place in UNITS.items():
        reader = configparser.RawConfigParser(strict=True)
        reader.optionxform = str
        text = (project.path / place).read_text().replace("\\\n", " ")
        reader.read_string(text)
        service = dict(reader["Service"])
        found[name] = (project.path / place, service, shlex.split(service["ExecStart"]))
    return found


@pytest.mark.parametrize("name", UNITS)
def test_units_are_closed(units, name):
    service = units[name][1]
    wanted = {"UMask": "0077", "StateDirectoryMode": "0700", "StateDirectory": "polyfed", "NoNewPrivileges": "yes",
              "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "CapabilityBoundingSet": "",
              "RestrictSUIDSGID": "yes", "User": "polyfed"}  # fmt: skip
    assert {key: service.get(key) for key in wanted} == wanted
    assert "MemoryDenyWriteExecute" not in service, "torch compiles at run time"


def test_units_start_what_flower_understands(units, tmp_path, monkeypatch):
    """The words are those of the installed versions; the server's asks for the token."""
    words = units["superlink"][2]
    assert words[:3] == ["/opt/polyfed/bin/python", "-m", "polyfed.deploy.link"]
    certificates = tmp_path / "federation" / "certificates"
    token = tmp_path / "control.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    places = {"/etc/polyfed/control.token": str(token)}
    places |= {f"/etc/polyfed/{n}": str(certificates / n) for n in ("ca.crt", "server.pem", "server.key")}
    config = config_of([places.get(word, word) for word in words[3:]], monkeypatch)[0]
    assert isinstance(config.authn_plugin, TokenPlugin)
    assert config.enable_supernode_auth
    assert config.host == "127.0.0.1"
    words = units["supernode"][2]
    assert words[:4] == ["/opt/polyfed/bin/python", "-P", "-m", "polyfed.deploy.supernode"]
    theirs = importlib.import_module("flwr.supernode.cli.flower_supernode")._parse_args_run_supernode()
    ours, strange = supernode.build_supernode_parser().parse_known_args(words[4:])
    assert not strange
    for parsed in (ours, theirs.parse_args(words[4:])):  # which takes over where Flower has changed
        assert str(parsed.auth_supernode_private_key) == "/etc/polyfed/site.key"
        assert not parsed.insecure
    config = json.loads(supernode.node_config_as_json(ours.node_config, import_private_flower_functions()["words"]))
    assert config == {
        "client-id": "north", "site": "/etc/polyfed/site.py", "state-dir": "/var/lib/polyfed/state", "secure": True,
        "key": "/etc/polyfed/site.key", "peers": "/etc/polyfed/keys",
    }  # fmt: skip


@pytest.mark.skipif(not Path("/usr/bin/systemd-analyze").exists(), reason="no systemd")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_understands_the_units(units, tmp_path, name):
    """All settings are known, and the exposure that systemd computes is below 4 of 10."""
    unit = tmp_path / f"polyfed-{name}.service"
    unit.write_text(units[name][0].read_text())
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if unit.name in line and "is not executable" not in line]
    assert not said
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=40", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.slow
def test_a_stranger_on_this_machine_starts_no_run(tmp_path):
    """A real SuperLink: another user has the certificate and the address, but not the token."""
    project = create_project(tmp_path / "federation", ["north"])
    port = next(n for n in range(19000, 60000, 50) if not any(trials._is_port_open(n + k) for k in range(4)))
    with trials.start_trial(project, ["north"], port=port):
        stranger = tmp_path / "stranger"
        trials.write_flwr_config(stranger, f"127.0.0.1:{port}", str(project.certificates_folder / "ca.crt"))
        owner = project.path / "trial" / "home"
        for words in (["run", str(project.app_folder), "fed"], ["list", "fed"], ["supernode", "list", "fed"]):
            assert trials.run_flwr(stranger, words).returncode != 0, words
        other = tmp_path / "token"
        other.write_text("f" * 64)
        other.chmod(0o600)
        trials._log_in(stranger, f"127.0.0.1:{port}", other)
        assert trials.run_flwr(stranger, ["run", str(project.app_folder), "fed"]).returncode != 0
        runs = trials.run_flwr(owner, ["list", "fed", "--format", "json"])
        assert runs.returncode == 0, runs.stderr
        assert '"run-id"' not in runs.stdout, "a run was started"
        assert trials.run_flwr(owner, ["supernode", "list", "fed"]).returncode == 0
    assert not {k: v for k, v in modes(project.path / "trial").items() if "home" not in k.split("/")[0]}
