"""Another Flower than those that were tried: its names are taken away, and a site goes on with Flower's own SuperNode, a
server with less speed, and a SuperLink without a closed control interface does not start."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyfed.core.errors import UserError
from polyfed.deploy.flower import private_api, superlink, supernode
from polyfed.deploy.flower.private_api import (
    UnsupportedFlowerError,
    import_superlink_parts,
    try_to_keep_messages_in_memory,
    try_to_shorten_reply_polling,
)

NODE = ["--superlink", "127.0.0.1:1", "--node-config", 'client-id="a"']


class _ExecutedError(Exception):
    pass


@pytest.fixture
def executed(monkeypatch):
    """What a SuperNode's process becomes: (program, words)."""
    programs = []

    def execv(program, words):
        programs.append((Path(program).name, words[1:]))
        raise _ExecutedError

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    site = SimpleNamespace(start_if_stopped=lambda: None, stop_and_get_exit_status=lambda: None)
    monkeypatch.setattr(supernode, "SiteProcess", lambda: site)
    return programs


@pytest.mark.parametrize("name", sorted(private_api._INTERNALS))
def test_a_site_goes_on_with_flowers_own_supernode(executed, capsys, monkeypatch, name):
    module, attribute, _ = private_api._INTERNALS[name]
    monkeypatch.delattr(importlib.import_module(module), attribute)
    with pytest.raises(_ExecutedError):
        supernode.run_supernode(NODE)
    assert executed == [("flower-supernode", NODE)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polyfed: warning: no long-lived site process: Flower ")
    assert f"has no {module}.{attribute}; flower-supernode serves this site instead" in line


@pytest.mark.parametrize("module", sorted({module for module, _, _ in private_api._INTERNALS.values()}))
def test_a_site_goes_on_without_a_whole_module(executed, capsys, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(_ExecutedError):
        supernode.run_supernode(NODE)
    assert executed == [("flower-supernode", NODE)]
    assert f"has no {module}." in capsys.readouterr().err


@pytest.mark.thorough
def test_a_server_works_without_the_parts_that_save_time(monkeypatch):
    grid = importlib.import_module("flwr.superlink.grid.http_grid")
    loader = importlib.import_module("flwr.superlink.config_loader")
    monkeypatch.delattr(grid, "pull_objects")
    monkeypatch.delattr(loader, "ObjectStoreFactory")
    assert not try_to_shorten_reply_polling()
    assert not try_to_keep_messages_in_memory()
    for module in (grid, loader):
        monkeypatch.setitem(sys.modules, module.__name__, None)
    assert not try_to_shorten_reply_polling()
    assert not try_to_keep_messages_in_memory()


PARTS = {
    "load_control_authn_plugin": "flwr.superlink.cli.flower_superlink",
    "authenticate_node": "flwr.superlink.routers.fleet.node_auth",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_superlink_is_never_open_to_everybody(monkeypatch, tmp_path, name):
    """Whether the name is gone, nobody calls it any more, or its module is gone."""
    assert [module.__name__ for module in import_superlink_parts()] == list(PARTS.values())
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef" * 4)
    module = importlib.import_module(PARTS[name])
    monkeypatch.setattr(importlib.import_module(PARTS["load_control_authn_plugin"]), "flower_superlink", pytest.fail)
    before = os.umask(0o077)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(module, name)
            with pytest.raises(
                UserError, match=rf"control interface cannot be closed .*does not call {name} in {module.__name__}"
            ):
                superlink.start_superlink_or_log_in(["--control-token-file", str(token)])
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module.__name__, None)
            with pytest.raises(UserError, match=rf"has no {module.__name__}.*pip install 'flwr>=1.41,<1.43'"):
                superlink.start_superlink_or_log_in(["--control-token-file", str(token)])
    finally:
        os.umask(before)


def test_a_name_that_nobody_calls_is_no_part(monkeypatch):
    unused = SimpleNamespace(__name__="flwr.x", load_control_authn_plugin=1, authenticate_node=1)
    monkeypatch.setattr(private_api.importlib, "import_module", lambda name: unused)
    with pytest.raises(UnsupportedFlowerError, match="does not call load_control_authn_plugin"):
        import_superlink_parts()


def test_a_flower_that_lacks_what_the_token_needs_is_a_sentence():
    code = (
        "import sys, runpy; sys.modules['flwr.superlink.auth_plugin'] = None; sys.argv = ['link'];"
        "runpy.run_module('polyfed.deploy.link', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the control interface cannot be closed by a token" in done.stderr
