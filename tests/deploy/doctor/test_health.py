"""`polyfed flower health`: what a SuperNode records, and what is made of it."""

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from polyfed.cli.main import main
from polyfed.deploy.contact import ContactRecorder, read_contacts
from polyfed.deploy.doctor.health import MAX_SILENT_SECONDS, check_health, judge_contact
from polyfed.deploy.flower.supernode import MessageLoop

from ..patients import NODE, UNIT, free_port, server_files, serving, write

NOW = 1_000_000.0


class Clock:
    def __init__(self):
        self.now = NOW

    def __call__(self):
        return self.now


def recorder(folder, clock, superlink="fed.example.org:443", authority=None, name="north"):
    return ContactRecorder({"client-id": name, "state-dir": str(folder)}, superlink, authority, clock)


@pytest.fixture
def clock():
    return Clock()


def test_a_record_says_when_the_server_answered_and_since_when_a_task_runs(tmp_path, clock):
    state = tmp_path / "new" / "state"
    contact = recorder(state, clock)
    (content,) = read_contacts(state)
    assert content == {"site": "north", "superlink": "fed.example.org:443", "authority": "", "process": os.getpid(),
                       "started": NOW, "reached": None, "busy_since": None}  # fmt: skip
    assert (state.stat().st_mode & 0o777, (state / "contact-north.json").stat().st_mode & 0o777) == (0o700, 0o600)
    for seconds, reached in ((11, NOW + 11), (12, NOW + 11), (25, NOW + 25)):  # at most every 10 s
        clock.now = NOW + seconds
        contact.record_answer()
        assert read_contacts(state)[0]["reached"] == reached
    clock.now = NOW + 26
    contact.record_start_or_end_of_task(begins=True)
    assert read_contacts(state)[0]["busy_since"] == NOW + 26
    contact.record_start_or_end_of_task(begins=False)
    assert read_contacts(state)[0]["busy_since"] is None
    clock.now = NOW - 5000  # the clock was set back
    contact.record_answer()
    assert read_contacts(state)[0]["reached"] == NOW - 5000


def test_sites_that_share_a_folder_have_a_record_each(tmp_path, clock):
    state = tmp_path / "state"
    for name in ("north", "south", "../x"):
        recorder(state, clock, name=name).record_answer()
    assert sorted(contact["site"] for contact in read_contacts(state)) == ["../x", "north", "south"]
    assert all(file.parent == state for file in tmp_path.rglob("*") if file.is_file())


def test_a_record_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path, clock, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        contact = recorder(tmp_path / "file" / "state", clock)
        contact.record_start_or_end_of_task(begins=True)
    assert len([line for line in caplog.messages if "flower health will know nothing" in line]) == 1
    ContactRecorder({}, "", None).record_answer()  # without a folder


def test_damaged_records_are_left_out(tmp_path, clock):
    recorder(tmp_path, clock)
    (tmp_path / "contact-x.json").write_text("{")
    (tmp_path / "contact-y.json").write_text(json.dumps({"site": 3}))
    assert [contact["site"] for contact in read_contacts(tmp_path)] == ["north"]


def found(tmp_path, clock, **changes):
    recorder(tmp_path, clock)
    contact = {**read_contacts(tmp_path)[0], **changes}
    return str(judge_contact(contact, clock()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reached": NOW - 2}, "ok     north: waits for a task; fed.example.org:443 answered 2 s ago"),
        ({"reached": NOW + 50}, "ok     north: waits for a task; fed.example.org:443 answered 0 s ago"),
        (
            {"reached": NOW + 3600},
            "wrong  north: this machine's clock was set back by 3600 s or more, and fed.example.org:443 has",
        ),
        ({"reached": NOW, "site": "\x1b[2J"}, "ok     �[2J: waits"),
        ({"reached": NOW - 61}, "wrong  north: fed.example.org:443 answered 61 s ago; see the log"),
        ({"started": NOW - 20}, "wrong  north: fed.example.org:443 has not answered in the 20 s since"),
        ({"reached": NOW - 900, "busy_since": NOW - 890}, "note   north: is at a task since 890 s; without a file"),
    ],
)
def test_what_is_made_of_a_record(tmp_path, clock, changes, sentence):
    assert MAX_SILENT_SECONDS == 60
    assert found(tmp_path, clock, **changes).startswith(sentence)


def test_while_a_site_trains_its_server_is_asked(tmp_path, clock):
    folder = server_files(tmp_path / "etc")
    busy = {"reached": NOW - 900, "busy_since": NOW - 890, "authority": str(folder / "ca.crt")}
    with serving(folder) as port:
        busy["superlink"] = f"127.0.0.1:{port}"
        assert found(tmp_path, clock, **busy) == f"ok     north: is at a task since 890 s; 127.0.0.1:{port} answers"
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        assert "but its SuperNode has ended" in found(tmp_path, clock, **busy, process=ended.pid)
    assert found(tmp_path, clock, **busy).startswith("wrong  north: is at a task since 890 s; 127.0.0.1")
    assert "is not an address" in found(tmp_path, clock, **{**busy, "superlink": "nowhere"})
    assert "but its SuperNode has ended" in found(tmp_path, clock, **busy, process=-1)
    (folder / "ca.crt").unlink()
    told = found(tmp_path, clock, **busy)
    assert "wrong  north" in told
    assert "is not asked, since" in told


def test_the_folder_of_a_site_leads_to_its_states(tmp_path, clock, capsys):
    site, state = tmp_path / "site", tmp_path / "site" / "state"
    write(site, supernode_service=NODE.format(program=sys.executable, address="127.0.0.1:1", folder=site, words=""))
    assert main(["flower", "health", str(site)]) == 1
    assert "polyfed's SuperNode has not run with this state-dir" in capsys.readouterr().out
    recorder(state, clock).record_start_or_end_of_task(begins=True)
    for folder in (site, state):
        assert main(["flower", "health", str(folder)]) == 1, "it never reached its server"
        assert "has not answered in the" in capsys.readouterr().out
    contact = recorder(state, clock)
    clock.now += 20
    contact.record_answer()
    assert [str(line)[:15] for line in check_health(site, clock)] == ["ok     north: w"]


def test_the_folder_of_a_server_leads_to_its_port(tmp_path, capsys):
    folder = server_files(tmp_path / "etc")
    for port_is_open in (True, False):
        with serving(folder) as open_port:
            port = open_port if port_is_open else free_port()
            write(folder, superlink_service=UNIT.format(program=sys.executable, port=port, folder=folder))
            assert main(["flower", "health", str(folder)]) == int(not port_is_open)
    assert "takes no connection" in capsys.readouterr().out


def test_without_the_authoritys_file_a_server_is_not_called_well(tmp_path, capsys):
    folder = server_files(tmp_path / "etc")
    with serving(folder) as port:
        write(folder, superlink_service=UNIT.format(program=sys.executable, port=port, folder=folder))
        (folder / "ca.crt").write_text("no certificate")
        assert main(["flower", "health", str(folder)]) == 1
    assert "is not asked, since" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("superlink", "--port ten", "superlink.service: '[127.0.0.1]:ten' is not an address"),
        ("superlink", "--port 99999999", "'[127.0.0.1]:99999999' is not an address"),
        ("supernode", "--node-config 'client-id=north'", "--node-config cannot be read (Invalid value"),
        (
            "supernode",
            """--node-config 'client-id="a" client-id="b"'""",
            "--node-config cannot be read (Cannot overwrite",
        ),
    ],
)
def test_a_unit_that_cannot_be_read_is_a_sentence(tmp_path, capsys, name, words, sentence):
    (tmp_path / f"{name}.service").write_text(f"[Service]\nExecStart=/opt/python {words}\n")
    assert main(["flower", "health", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_none_of_them(tmp_path, capsys):
    assert main(["flower", "health", str(tmp_path)]) == 2
    assert "is none of a project" in capsys.readouterr().err


class _EndedError(BaseException):
    pass


def test_a_supernode_records_each_poll_and_each_task(tmp_path, clock):
    seen = []

    class Recorder:
        def record_answer(self):
            seen.append("answer")

        def record_start_or_end_of_task(self, begins):
            seen.append(begins)

    received = iter([None, ("message", "tree"), _EndedError])

    def receive():
        message = next(received)
        if message is _EndedError:
            raise _EndedError
        return message

    loop = MessageLoop({}, (0, receive, *[None] * 6), None, Recorder())
    loop.answer_message_or_log_error = lambda message, tree: seen.append(message)
    pace = SimpleNamespace(seconds_until_poll=lambda: 0, record_empty_poll=lambda: None,
                           record_arrival_time=lambda: None, start_new_wait=lambda: None)  # fmt: skip
    with pytest.raises(_EndedError):
        loop.answer_messages_forever(pace)
    assert seen == ["answer", "answer", True, "message", False]


def test_it_answers_without_torch_and_flower(tmp_path, clock):
    recorder(tmp_path, clock)
    code = (
        f"import sys\nfrom polyfed.cli.main import main\nmain(['flower', 'health', {str(tmp_path)!r}])\n"
        "assert not {'torch', 'flwr', 'scipy', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
