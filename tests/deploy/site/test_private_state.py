"""What a site keeps on its own disk: killed at any write it can go on, and what is not its own is refused and named."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from polyfed.algorithms import FedFomo, Local
from polyfed.core.algorithm import Message
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.private_state import (
    InvalidSiteStateError,
    read_private_state,
    write_private_state_and_delete_older,
)
from polyfed.deploy.site.site import Site
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import small_clients

METHOD = describe_method_and_settings(Local(lr=0.05), Settings(rounds=1))["algorithm"]
ROUNDS = 3


def site(folder, number=0):
    client = small_clients()[number]
    return Site(client.id, lambda: client, folder, disclose=frozenset({"errors", "train_loss", "accuracy"}))


def letter(phase, number, state, run="a", keep=0, client="client-0", method=METHOD):
    head = {"kind": "task", "protocol": PROTOCOL, "run": run, "algorithm": method, "phase": phase, "round": number}
    head |= {"client": client, "seed": 7 * number, "run_seed": 3, "state": state, "keep": keep, "metrics": []}
    return Envelope(head, Message({}, {"lr": 0.05}))


def order(keep=0):
    """The letters of a run."""
    found = []
    for n in range(1, ROUNDS + 1):
        found += [letter("local", n, n - 1 or None, keep=max(0, n - keep)), letter("evaluate", n, n)]
    return [*found, letter("export", ROUNDS, ROUNDS)]


def answered(where, letters):
    found = [where.answer_envelope(one) for one in letters]
    assert not [one.head for one in found if one.head.get("refused") or one.head["failure"]]
    return [one.head["metrics"] | dict(one.body.scalars) for one in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return answered(site(folder), order()), (folder / "a" / "models" / "client-0.safetensors").read_bytes()


class Killed(BaseException):
    """No `except Exception` sees it."""


def kill_after(patch, number):
    """Lets so many operations on the disk pass, and none after."""
    left = [number]

    def watched(operation):
        def act(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return operation(*arguments, **options)

        return act

    for owner, name in ((os, "fsync"), (os, "open"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink")):
        patch.setattr(owner, name, watched(getattr(owner, name)))


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_site_that_is_killed_at_any_write_goes_on_to_the_same_end(tmp_path, whole, step):
    kills = 0
    for number in range(0, 400, step):
        where, told = site(tmp_path / str(number)), []
        killed = False
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, number)
            try:
                for one in order(keep=2):
                    told += answered(where, [one])
            except Killed:
                killed = True
        if not killed:
            break
        kills += 1
        # The server asks for the round again, or, resumed from an older checkpoint, for the one before too.
        begin = max(0, 2 * (len(told) // 2) - 2 * (number % 2))
        told[begin:] = answered(where, order()[begin:])
        assert told == whole[0]
        assert (where.folder / "a" / "models" / "client-0.safetensors").read_bytes() == whole[1]
    assert kills >= 60 // step
    assert told == whole[0]


def rides(training, evaluation):
    """The letter with which a round is evaluated and the next begins, of a method that sends no tensors."""
    asked = {"round": evaluation.head["round"], "seed": evaluation.head["seed"], "tensors": {}}
    head = {**training.head, EVALUATION_KEY: {**asked, "scalars": dict(evaluation.body.scalars)}}
    return Envelope(head, training.body)


def riding(keep=0):
    """The letters of a run, as they travel."""
    first, *middle, last, export = order(keep)
    return [first, *(rides(two, one) for one, two in zip(middle[::2], middle[1::2], strict=True)), last, export]


def both(where, one):
    """What the site answers to a letter, evaluation first."""
    found = where.answer_envelope(one)
    parts = [*([Envelope(found.head[EVALUATION_KEY])] if EVALUATION_KEY in found.head else []), found]
    assert not [part.head for part in parts if part.head.get("refused") or part.head["failure"]]
    return [part.head["metrics"] | dict(part.body.scalars) for part in parts]


@pytest.mark.thorough
@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_so_it_does_where_evaluations_ride(tmp_path, whole, step):
    for number in range(0, 400, step):
        where, told, killed = site(tmp_path / str(number)), [], False
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, number)
            try:
                for one in riding(keep=2):
                    told.append(both(where, one))
            except Killed:
                killed = True
        # The server sends the letter again, or, resumed from an older checkpoint, the one before too.
        begin = max(0, len(told) - number % 2)
        told[begin:] = [both(where, one) for one in riding()[begin:]]
        assert [part for answer in told for part in answer] == whole[0]
        assert (where.folder / "a" / "models" / "client-0.safetensors").read_bytes() == whole[1]
        if not killed:
            break
    assert number > step


def change(file, edit):
    file.write_bytes(edit(file.read_bytes()))


def other(**words):
    """The file of a run that differs so much, in place of the right one."""

    def put(folder, file):
        where = site(folder.parent / "other", words.get("number", 0))
        told = {"run": "b" if words.get("run") else "a", "method": words.get("method", METHOD), "client": where.name}
        answered(where, [letter("local", n, n - 1 or None, **told) for n in (1, 2)])
        shutil.copy(where.folder / told["run"] / "private" / "round-000002.state", file)

    return put


WRONG = {
    "the sum": (lambda d, f: change(f, lambda b: b"0" * 64 + b[64:]), "damaged: .* was changed since it was written"),
    "cut": (lambda d, f: change(f, lambda b: b[:-5]), "was changed"),
    "cut in two": (lambda d, f: change(f, lambda b: b[: len(b) // 2]), "was changed"),
    "empty": (lambda d, f: f.write_bytes(b""), "was changed"),
    "more": (lambda d, f: change(f, lambda b: b + b"\n"), "was changed"),
    "no state": (lambda d, f: f.write_bytes(b"x" * 10_000), "was changed"),
    "missing": (lambda d, f: f.unlink(), "lost: .* cannot be read"),
    "a folder": (lambda d, f: (f.unlink(), f.mkdir()), "lost"),
    "an older round": (lambda d, f: shutil.copy(f.with_name("round-000001.state"), f), "not its own: .* of round 1;"),
    "another run": (other(run=True), "not its own: .* is of another run;"),
    "another site": (other(number=1), "not its own: .* is of another site;"),
    "another rate": (other(method={**METHOD, "lr": 0.5}), "not its own: .* is of a method with lr = 0.5;"),
    "a momentum": (other(method={**METHOD, "momentum": 0.5}), "of a method with momentum = 0.5;"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a site after two rounds."""
    folder = tmp_path_factory.mktemp("site") / "begun"
    answered(site(folder), [letter("local", n, n - 1 or None) for n in (1, 2)])
    return folder


@pytest.mark.parametrize("phase", ["local", pytest.param("evaluate", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", WRONG)
def test_a_private_state_that_is_not_its_own_is_refused_and_named(tmp_path, begun, case, phase):
    folder = Path(shutil.copytree(begun, tmp_path / "site"))
    wrong, sentence = WRONG[case]
    wrong(folder, folder / "a" / "private" / "round-000002.state")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    told = site(folder).answer_envelope(letter(phase, 3 if phase == "local" else 2, 2)).head
    with pytest.raises(AssertionError, match=rf"after round 2 is .*{sentence}"):
        assert not told["refused"], told["refused"]
    assert "a/private/round-000002.state" in told["refused"]
    assert told["refused"].endswith("put back a copy of it, or start another run")
    assert str(tmp_path) not in told["refused"], "the server learns where the site keeps its files"
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    # The copy that is put back is taken.
    shutil.rmtree(folder / "a" / "private")
    shutil.copytree(begun / "a" / "private", folder / "a" / "private")
    answered(site(folder), [letter("local", 3, 2)])


def test_every_changed_byte_is_noticed(tmp_path):
    """The review's: damage went unnoticed in 36 of 150 cases."""
    own = {"model": {"w": torch.randn(6, 3)}, "seen": 3, "order": [1, 2]}
    write_private_state_and_delete_older(tmp_path / "a", "north", 4, METHOD, own, 0)
    file, rng = tmp_path / "a" / "private" / "round-000004.state", random.Random(0)
    sound = file.read_bytes()
    assert read_private_state(tmp_path / "a", "north", 4, METHOD)["seen"] == 3
    for at in rng.sample(range(len(sound)), 150):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(InvalidSiteStateError, match="was changed since it was written"):
            read_private_state(tmp_path / "a", "north", 4, METHOD)


def test_what_is_kept_of_a_method_may_grow_with_a_new_version(tmp_path):
    """A field that the method did not have when the state was written says nothing; and numbers may be infinite."""
    write_private_state_and_delete_older(tmp_path / "a", "north", 1, {**METHOD, "clip_norm": float("inf")}, {"x": 1}, 0)
    assert read_private_state(tmp_path / "a", "north", 1, {**METHOD, "clip_norm": float("inf"), "more": 3}) == {"x": 1}
    with pytest.raises(InvalidSiteStateError, match="of a method with clip_norm = Infinity"):
        read_private_state(tmp_path / "a", "north", 1, METHOD)


def test_old_states_are_removed_but_not_those_to_which_the_server_may_go_back(tmp_path):
    (tmp_path / "a" / "private").mkdir(parents=True)
    (tmp_path / "a" / "private" / ".partial-0123").write_bytes(b"half")  # of a site that was killed
    for number in range(1, 8):
        write_private_state_and_delete_older(
            tmp_path / "a", "north", number, METHOD, {"x": number}, rollback_round=number - 3
        )
    (tmp_path / "a" / "private" / "round-x.state").write_bytes(b"")  # not the site's
    kept = sorted(path.name for path in (tmp_path / "a" / "private").iterdir())
    assert kept == [*(f"round-00000{n}.state" for n in (4, 5, 6, 7)), "round-x.state"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"client": 3}', '{"client": "client-0", "data_fingerprint": NaN}'])
def test_damaged_marks_of_a_run_are_refused_and_named(tmp_path, begun, text):
    folder = Path(shutil.copytree(begun, tmp_path / "site"))
    (folder / "a" / "run.json").write_text(text)
    assert "a/run.json is damaged" in site(folder).answer_envelope(letter("local", 3, 2)).head["refused"]
    (folder / "a" / "run.json").unlink()
    (folder / "a" / "run.json").mkdir()  # no path goes to the server
    told = site(folder).answer_envelope(letter("local", 3, 2)).head["refused"]
    assert told == "a/run.json is damaged (it cannot be read); put back a copy of it, or start another run"
    (folder / "a" / "run.json").rmdir()
    assert "a/run.json is missing" in site(folder).answer_envelope(letter("local", 3, 2)).head["refused"]


def test_a_link_is_not_followed(tmp_path, begun):
    folder = Path(shutil.copytree(begun, tmp_path / "site"))
    (tmp_path / "victim").write_text("precious")
    for name in ("private/.partial-round-000003.state", "models", "metrics.jsonl"):
        (folder / "a" / name).unlink(missing_ok=True)
        (folder / "a" / name).symlink_to(tmp_path / "victim")
    assert "is a link" in site(folder).answer_envelope(letter("local", 3, 2)).head["refused"]
    (folder / "a" / "metrics.jsonl").unlink()
    answered(site(folder), [letter("local", 3, 2)])
    assert "symbolic link" in site(folder).answer_envelope(letter("export", 3, 3)).head["refused"]
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("left", ['{"round": 2, "phase": "lo', "{", '{"round": 2, "phase": "local"}'])
def test_half_a_line_of_metrics_costs_that_line_only(tmp_path, begun, left):
    """As a full disk or a kill leaves it: the rounds after it can be read."""
    folder = Path(shutil.copytree(begun, tmp_path / "site"))
    file = folder / "a" / "metrics.jsonl"
    first = file.read_text().splitlines()[0]
    file.write_text(f"{first}\n{left}")
    answered(site(folder), [letter("local", 3, 2), letter("evaluate", 3, 3)])
    assert [(line["round"], line["phase"]) for line in read_metrics(file)] == [
        (1, "local"),
        (3, "local"),
        (3, "evaluate"),
    ]


def test_a_state_dir_may_be_a_link_of_its_owner(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "disk")
    answered(site(tmp_path / "state"), [letter("local", 1, None)])
    assert (tmp_path / "disk" / "a" / "private" / "round-000001.state").is_file()


def test_the_state_of_a_method_with_much_of_it_comes_back(tmp_path):
    """FedFomo keeps two models, preferences and rows."""
    client, method = small_clients()[0], FedFomo(lr=0.05)
    own = method.client_init(client, 3)
    down = Message({}, {"lr": 0.05, "epsilon": 0.3, "clients": 3, "position": 0})
    _, own = method.local_update(down, own, client, 5)
    write_private_state_and_delete_older(tmp_path / "a", "client-0", 1, METHOD, own, 0)
    found = read_private_state(tmp_path / "a", "client-0", 1, METHOD)
    assert found.keys() == own.keys()
    assert torch.equal(found["preferences"], own["preferences"])
    assert all(torch.equal(found["before"][name], tensor) for name, tensor in own["before"].items())
