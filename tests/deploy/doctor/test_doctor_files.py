"""What `polyfed flower doctor` says of certificates, keys, disk, versions and words: each fault is caused here."""

import base64
import os
import random
import re
import ssl
from importlib import metadata
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from polyfed.cli.commands.deploy.doctor_command import SETTINGS_KEYS, check_server_configuration
from polyfed.core.errors import UserError
from polyfed.deploy.doctor.certificates import (
    check_ca_certificate_file,
    check_public_keys_of_all_sites,
    check_server_certificate,
    check_site_key_pair,
)
from polyfed.deploy.doctor.machine import (
    check_control_token_file,
    check_package_versions,
    check_state_folder,
    check_systemd_program,
)
from polyfed.deploy.doctor.site_config import (
    NODE_CONFIG_TYPES,
    check_file_defines_functions,
    check_node_config,
    parse_node_config,
)
from polyfed.deploy.trial.project import write_site_key_pair, write_trial_certificates

from ..patients import PEM, Authority, server_files, write


def said(findings, level="wrong"):
    return [f"{one.component}: {one.text}" for one in findings if one.level == level]


def of_server(folder, host="127.0.0.1"):
    return [
        *check_ca_certificate_file("certificates", folder / "ca.crt"),
        *check_server_certificate(
            "certificates", folder / "server.pem", folder / "server.key", folder / "ca.crt", host
        ),
    ]


# -- certificates ---------------------------------------------------------------------------------------------------------


def test_certificates_that_are_well(tmp_path):
    for folder, host in ((server_files(tmp_path / "a"), "127.0.0.1"), (server_files(tmp_path / "b"), "localhost")):
        assert not said(of_server(folder, host))
    write_trial_certificates(tmp_path / "trial")
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not said(of_server(tmp_path / "trial", host))
    below = Authority("below", above := Authority())
    certificate, key = below.issue()
    write(tmp_path / "chain", ca_crt=above.pem, server_pem=certificate + below.pem, server_key=key)
    assert not said(of_server(tmp_path / "chain"))


def test_certificates_are_refused_where_grpc_refuses_them_alone(tmp_path, monkeypatch):
    """Python 3.13 asks for identifiers of keys that `openssl x509` leaves out."""
    create = ssl.create_default_context

    def create_strict(**options):
        context = create(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)
    assert not said(of_server(server_files(tmp_path / "a"), "127.0.0.1"))


def faults(folder):
    good = Authority()
    yield "has expired on", server_files(folder / "1", ends=-0.5), "127.0.0.1"
    yield "is valid from", server_files(folder / "2", begins=2), "127.0.0.1"
    yield (
        "is for localhost, 127.0.0.1, and sites reach the server as example.org",
        server_files(folder / "3"),
        "example.org",
    )
    yield "names no address (subjectAltName)", server_files(folder / "4", names=(), addresses=()), "127.0.0.1"
    foreign = server_files(folder / "5", good)
    yield "is not signed by the authority in", write(foreign, ca_crt=Authority().pem), "127.0.0.1"
    other = server_files(folder / "6", good)
    yield "does not belong to", write(other, server_key=good.issue()[1]), "127.0.0.1"
    readable = server_files(folder / "7", good)
    (readable / "server.key").chmod(0o644)
    yield "others can read or write", readable, "127.0.0.1"
    lost = server_files(folder / "8", good)
    (lost / "server.pem").unlink()
    yield "server.pem does not exist", lost, "127.0.0.1"
    keyless = server_files(folder / "9", good)
    (keyless / "server.key").unlink()
    yield "server.key does not exist", keyless, "127.0.0.1"
    yield "holds no certificate in PEM form", write(server_files(folder / "10", good), server_pem="x"), "127.0.0.1"
    yield "holds no private key in PEM form", write(server_files(folder / "11", good), server_key="x"), "127.0.0.1"
    yield "holds no certificates in PEM form", write(server_files(folder / "12", good), ca_crt="x"), "127.0.0.1"
    yield (
        "holds a private key, and is given to everybody",
        write(server_files(folder / "13", good), ca_crt=good.pem + good.issue()[1]),
        "127.0.0.1",
    )
    yield "has expired on", server_files(folder / "14", Authority(begins=-9, ends=-1)), "127.0.0.1"
    leaf = Authority("leaf", good, ca=False)
    yield (
        "which is not an authority's certificate",
        write(server_files(folder / "15", good), ca_crt=leaf.pem),
        "127.0.0.1",
    )
    key = serialization.load_pem_private_key((folder / "1" / "server.key").read_bytes(), None)
    locked = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x"))
    yield "has a passphrase", write(server_files(folder / "16", good), server_key=locked), "127.0.0.1"


def test_faults_of_certificates_are_named(tmp_path):
    for sentence, folder, host in faults(tmp_path):
        found = said(of_server(folder, host))
        assert any(sentence in one for one in found), (sentence, found)


def test_what_no_check_of_ours_finds_a_handshake_does(tmp_path):
    """A chain through a certificate that may sign nothing: OpenSSL's own word."""
    between = Authority("between", above := Authority(), ca=False)
    certificate, key = between.issue()
    folder = write(tmp_path / "x", ca_crt=above.pem, server_pem=certificate + between.pem, server_key=key)
    assert any("refuses" in one for one in said(of_server(folder)))


def test_a_certificate_that_soon_expires_is_a_note(tmp_path):
    folder = server_files(tmp_path / "soon", ends=9)
    assert not said(of_server(folder))
    assert any("expires on" in one and "in 8 days" in one for one in said(of_server(folder), "note"))


def damaged(pem, rng):
    """A PEM file whose content has some bytes changed, cut or put in."""
    head, body, tail = re.fullmatch(rb"(-----BEGIN[^\n]+\n)(.*?)(-----END.*)", pem, re.DOTALL).groups()
    data = bytearray(base64.b64decode(body))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return head + base64.encodebytes(data) + tail


@pytest.mark.parametrize("number", [10, pytest.param(800, marks=pytest.mark.slow)])
def test_damaged_certificates_and_keys_are_findings(tmp_path, number):
    rng, folder = random.Random(number), server_files(tmp_path / "x")
    write_site_key_pair(folder / "site.key")
    sound = {folder / n: (folder / n).read_bytes() for n in ("ca.crt", "server.pem", "server.key", "site.key")}
    for _ in range(number):
        file = rng.choice(list(sound))
        file.write_bytes(damaged(sound[file], rng))
        assert [*of_server(folder), *check_site_key_pair("keys", folder / "site.key")]
        file.write_bytes(sound[file])


# -- keys -------------------------------------------------------------------------------------------------------------------


def test_keys_of_sites(tmp_path):
    key = tmp_path / "north.key"
    write_site_key_pair(key)
    assert not said(check_site_key_pair("keys", key))
    write_site_key_pair(tmp_path / "south.key")
    assert not said(check_public_keys_of_all_sites("keys", tmp_path, "north", key))
    (tmp_path / "east.pub").write_text("x")
    assert any(
        "east.pub is not a public key" in one
        for one in said(check_public_keys_of_all_sites("keys", tmp_path, "north", key))
    )
    (tmp_path / "east.pub").write_bytes((tmp_path / "south.key.pub").read_bytes())
    assert any(
        "one key or one name" in one for one in said(check_public_keys_of_all_sites("keys", tmp_path, "north", key))
    )
    assert any("has no west.pub" in one for one in said(check_public_keys_of_all_sites("keys", tmp_path, "west", key)))
    assert any("is not that of" in one for one in said(check_public_keys_of_all_sites("keys", tmp_path, "south", key)))
    assert any(
        "holds no public keys" in one
        for one in said(check_public_keys_of_all_sites("keys", tmp_path / "none", "north", key))
    )
    key.with_name("north.key.pub").write_bytes((tmp_path / "south.key.pub").read_bytes())
    assert any("is not the public half of" in one for one in said(check_site_key_pair("keys", key)))
    key.chmod(0o640)
    assert any("mode 640" in one for one in said(check_site_key_pair("keys", key)))
    form = PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write(tmp_path, rsa_key=rsa.generate_private_key(65537, 1024).private_bytes(*form), bad_key="x")
    assert any("must be a key of ecdsa" in one for one in said(check_site_key_pair("keys", tmp_path / "rsa.key")))
    assert any(
        "is not a key in OpenSSH's form" in one for one in said(check_site_key_pair("keys", tmp_path / "bad.key"))
    )
    assert any("does not exist" in one for one in said(check_site_key_pair("keys", tmp_path / "no.key")))


def test_tokens(tmp_path):
    file = write(tmp_path, control_token="0" * 64) / "control.token"
    assert not said(check_control_token_file("token", file))
    file.chmod(0o644)
    assert any("chmod 600" in one for one in said(check_control_token_file("token", file)))
    file.write_text("short")
    assert any("at least 32 letters" in one for one in said(check_control_token_file("token", file)))


# -- the machine --------------------------------------------------------------------------------------------------------


def disk(monkeypatch, free=2**40, files=10):
    blocks = {"f_blocks": 2**30, "f_bfree": free // 4096, "f_bavail": free // 4096, "f_frsize": 4096}
    found = SimpleNamespace(**blocks, f_files=100, f_favail=files)
    monkeypatch.setattr("polyfed.deploy.doctor.machine.os.statvfs", lambda path: found)


def test_disks_that_are_full(tmp_path, monkeypatch):
    state = tmp_path / "state"
    assert not said(check_state_folder("disk", state))
    disk(monkeypatch, free=2**29)
    assert "has 0.5 GiB left on its disk, and should have 1.0 GiB" in said(check_state_folder("disk", state))[0]
    disk(monkeypatch, files=0)
    assert "no more files (inodes)" in said(check_state_folder("disk", state))[0]
    disk(monkeypatch, free=2**31)
    file = state / "run" / "private" / "round-000001.state"
    file.parent.mkdir(parents=True)
    state.chmod(0o700)
    assert not said(check_state_folder("disk", state))
    with file.open("wb") as opened:
        opened.truncate(2**30)  # of which the disk keeps nothing
    assert "should have 3.0 GiB" in said(check_state_folder("disk", state))[0]


def test_folders_that_others_can_enter_or_nobody_write_to(tmp_path, monkeypatch):
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    assert "others can enter" in said(check_state_folder("disk", state))[0]
    state.chmod(0o700)
    monkeypatch.setattr("polyfed.deploy.doctor.machine.os.access", lambda path, how: False)
    assert "cannot write to" in said(check_state_folder("disk", state))[0]
    (tmp_path / "file").touch()
    assert "is not a folder" in said(check_state_folder("disk", tmp_path / "file"))[0]


def test_files_of_another_user_are_told(tmp_path, monkeypatch):
    folder = server_files(tmp_path / "x")
    monkeypatch.setattr("polyfed.deploy.doctor.machine.os.access", lambda path, how: False)
    assert all("cannot be read by the user" in one for one in said(of_server(folder)))


def test_programs_of_units(tmp_path):
    assert "does not exist" in said(check_systemd_program("unit", tmp_path / "python"))[0]
    (tmp_path / "python").touch(mode=0o600)
    if os.getuid():
        assert "cannot execute" in said(check_systemd_program("unit", tmp_path / "python"))[0]
    (tmp_path / "python").chmod(0o755)
    assert "are those of" in said(check_systemd_program("unit", tmp_path / "python"), "note")[0]


@pytest.mark.parametrize(
    ("package", "found"), [("flwr", "1.40.2"), ("flwr", "1.43.0"), ("torch", "2.5.1+cpu"), ("numpy", "1.9")]
)
def test_versions_that_do_not_fit(monkeypatch, package, found):
    assert not said(check_package_versions("versions", 5))
    true = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: found if name == package else true(name))
    (told,) = said(check_package_versions("versions", 5))
    assert f"{package} is {found}, and polyfed needs" in told


def test_what_is_not_installed_and_another_python(monkeypatch):
    true = metadata.version

    def version(name):
        if name == "flwr":
            raise metadata.PackageNotFoundError(name)
        return true(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "flwr is not installed; pip install 'polyfed[flower]'" in said(check_package_versions("versions", 5))[0]
    monkeypatch.undo()
    monkeypatch.setattr("polyfed.deploy.doctor.machine.sys.version_info", (3, 9, 1))
    assert "Python is 3.9.1, and polyfed needs" in said(check_package_versions("versions", 5))[0]
    assert "protocol 5" in said(check_package_versions("versions", 5), "note")[0]


# -- words ----------------------------------------------------------------------------------------------------------------

SOUND = {"client-id": "north", "site": "/x/site.py", "state-dir": "/x/state"}


def test_the_words_of_a_site_are_those_that_a_site_knows():
    from polyfed.deploy.site.process import node_config

    assert set(NODE_CONFIG_TYPES) == node_config._KEYS | node_config._FLOWER_KEYS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"client-id": ""}, "lacks client-id"),
        ({"state-dirs": "x"}, "has no 'state-dirs'; did you mean state-dir?"),
        ({"allow-disclosure": "true"}, "allow-disclosure = 'true' is of another type"),
        ({"secure-threshold": True}, "secure-threshold = True is of another type"),
        ({"client-id": "../x"}, "'../x' is not a name"),
        ({"secure": True}, "secure=true needs key"),
        ({"noise-multiplier": 1.0}, "needs clip-norm"),
        ({"noise-multiplier": 1.0, "clip-norm": 1, "disclose": "loss"}, "take disclose out"),
        ({"max-epsilon": 8.0, "disclose": "accuracy, look"}, "with max-epsilon no look may leave"),
    ],
)  # fmt: skip
def test_words_of_a_site_that_do_not_fit(words, sentence):
    assert not said(check_node_config("configuration", SOUND))
    assert any(sentence in one for one in said(check_node_config("configuration", SOUND | words)))


def test_words_are_read_as_flower_reads_them():
    from flwr.common.config import parse_config_args

    text = 'client-id="north" secure=true delta=1e-5 secure-threshold=3 site="/a b/site.py"'
    assert parse_node_config(text) == parse_config_args([text])
    with pytest.raises(ValueError, match=r"TOML|value"):
        parse_node_config("client-id=north")


def test_python_files_are_read_and_not_executed(tmp_path):
    file = write(tmp_path, site_py="import sys\nsys.exit('executed')\ndef client(): ...\n") / "site.py"
    assert not said(check_file_defines_functions("site.py", file, {"client": "data"}))
    assert "calls functions when it is read" in said(check_file_defines_functions("site.py", file, {}), "note")[0]
    assert (
        "does not define model(), the network"
        in said(check_file_defines_functions("x", file, {"model": "the network"}))[0]
    )
    file.write_text("def client(:")
    assert "is not Python" in said(check_file_defines_functions("site.py", file, {"client": "data"}))[0]


def config(**words):
    method = {"name": "fedavg", "lr": 0.1}
    return {
        "sites": "a,b,c",
        "rounds": 2,
        "file": "",
        "algorithm": method,
        **{k.replace("_", "-"): v for k, v in words.items()},
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"round": 3}, "has 'round', which is not a word of it; did you mean rounds"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"rounds": "3"}, "rounds must be a whole number"),
        ({"clients-per-round": 4}, "asks for"),
        ({"join-seconds": -1}, "join-seconds must be positive, got -1"),
        ({"allow-disclosure": "yes"}, "allow-disclosure must be true or false"),
        ({"on-error": "stop"}, "unknown on_error 'stop'"),
        ({"secure": True, "secure-threshold": 1}, "secure-threshold must be above half of the 3 sites"),
        ({"secure": True, "clients-per-round": 1}, "a round has 1; raise clients-per-round"),
        ({"secure": True, "compress": "int8"}, "exclude one another"),
        ({"algorithm": {"name": "fedavgg"}}, "did you mean fedavg"),
        ({"algorithm": {"name": "fedavg", "lrr": 1}}, "fedavg has no field 'lrr'"),
        ({"algorithm": {"name": "flha_ghn"}}, "needs a catalogue of layer types"),
        ({}, "fedavg needs model() of the server"),
        ({"file": "/no/server.py"}, "/no/server.py does not exist"),
    ],
)
def test_words_of_a_server_that_do_not_fit(tmp_path, words, sentence):
    found = said(check_server_configuration({**config(), **words}, tmp_path / "pyproject.toml"))
    assert any(sentence in one for one in found), found


def test_the_words_of_a_server_are_those_that_it_knows(tmp_path):
    from polyfed.deploy.server.server_config import build_or_restore_server

    with pytest.raises(UserError) as told:
        build_or_restore_server({"sites": "a", "out": "x", "xyzzy": 1})
    known = set(str(told.value).partition("hoices: ")[2].split(", "))
    assert set(SETTINGS_KEYS) < known
    file = write(tmp_path, server_py="def model(): ...") / "server.py"
    given = {key: "x" for key in known if key not in {*SETTINGS_KEYS, "algorithm.name", "sites"}}
    found = said(check_server_configuration({**config(), **given, "file": str(file)}, tmp_path / "p"))
    assert not any("not a word of it" in one for one in found)
    rule = {"asynchronous": {"rule": "fedbuff", "buffer": 2}, "evaluate-every": 9}
    for words in ({}, rule, {"asynchronous.rule": "fedasync"}):
        assert not said(check_server_configuration({**config(), **words, "file": str(file)}, tmp_path / "p"))


def test_consent_is_a_note(tmp_path):
    file = write(tmp_path, server_py="def model(): ...") / "server.py"
    notes = said(check_server_configuration({**config(), "file": str(file)}, tmp_path / "p"), "note")
    assert any("fedavg discloses weights" in one for one in notes)
    assert not said(check_server_configuration({**config(), "file": str(file), "secure": True}, tmp_path / "p"), "note")
