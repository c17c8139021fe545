"""The long-lived process of a site: whatever a server sends, an answer comes, and nothing of it stays in memory."""

import json
import random
import shutil

import pytest
from fuzz import as_json, mangled, mutated

from polyfed.algorithms import FedAvg, PFedLA
from polyfed.deploy.flower.apps import run_deployment
from polyfed.deploy.flower.records import parse_flower_record
from polyfed.deploy.protocol.framing import Frame
from polyfed.deploy.site.process.worker import SiteRunner
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.testing import small_clients

from ..deploy.conftest import NAMES, ONE, MemoryGrid, configuration, nodes  # noqa: F401


@pytest.fixture
def sent(tmp_path, nodes, monkeypatch, request):  # noqa: F811
    """What an honest server sends one site in a run: its frames, and the site's configuration with an empty state."""
    monkeypatch.setattr("polyfed.deploy.flower.engine._POLL_SECONDS", 0.01)
    (tmp_path / "server.py").write_text(ONE)
    grid = MemoryGrid(nodes(small_clients()))
    words = configuration(request.param, sites=NAMES, file=str(tmp_path / "server.py"), rounds=2)
    run_deployment(grid, {**words, "out": str(tmp_path / "run")}, SilentProgress())
    number, node = next(iter(grid.nodes.items()))
    frames = [
        Frame("letter", *parse_flower_record(content))
        for to, kind, content in grid.seen
        if to == number and kind != "reply"
    ]
    shutil.rmtree(node.config["state-dir"])
    return frames, node.config


def hostile(frame, rng):
    """The same letter with another head, other numbers, other bytes, or groups that are missing or under other names."""
    kind = rng.randrange(5)
    head, scalars, groups = frame.head, dict(frame.scalars), dict(frame.groups)
    if kind == 0 or not groups:
        head = as_json(mutated(json.loads(head), rng)).decode()
    elif kind == 1:
        head = mangled(head.encode(), rng).decode(errors="replace")
    elif kind == 2:
        name = rng.choice(sorted(groups))
        groups[name] = mangled(groups[name], rng)
    elif kind == 3:
        groups[rng.choice(("x", "model", "own", "evaluate", "\x00"))] = groups.pop(rng.choice(sorted(groups)))
    else:
        scalars = mutated(scalars, rng) if scalars else {"lr": float("nan")}
        scalars = scalars if isinstance(scalars, dict) else {"x": 1}
    return Frame("letter", head, scalars, groups)


def loaded(config):
    keeper = SiteRunner(config)
    keeper.try_to_load_site()
    return keeper


def plain(answer):
    """An answer without the time that it took."""
    head = json.loads(answer.head)
    return {k: v for k, v in head.items() if "seconds" not in k}, dict(answer.scalars), dict(answer.groups)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [FedAvg(lr=0.05), PFedLA(lr=0.05)], ids=["fedavg", "pfedla"], indirect=True)
def test_hostile_letters_are_answered_and_leave_nothing_in_memory(sent, tmp_path):
    """After each honest letter's variants, the process says what a new one says with the same folder."""
    frames, config = sent
    rng, refused, cases = random.Random(4), 0, 0
    keeper = loaded(config)
    for frame in frames:
        for _ in range(60):
            answer = keeper.answer_frame_or_request_restart(hostile(frame, rng))
            cases += 1
            if answer.kind == "again":  # it is asked to begin a run
                keeper = loaded(config)
                continue
            head = json.loads(answer.head)
            assert config["state-dir"] not in answer.head, "where files lie is the site's own"
            assert "Traceback" not in answer.head
            if "refused" in head:
                refused += 1
                assert not answer.groups, "a refusal has no tensors"
                assert len(head["refused"]) < 4000, "at most what it quotes"
        copied = {**config, "state-dir": str(tmp_path / "copied")}
        shutil.copytree(config["state-dir"], copied["state-dir"])
        wanted, found = (
            loaded(copied).answer_frame_or_request_restart(frame),
            keeper.answer_frame_or_request_restart(frame),
        )
        if found.kind == "again":
            keeper = loaded(config)
            found = keeper.answer_frame_or_request_restart(frame)
        assert plain(found) == plain(wanted)
        shutil.rmtree(copied["state-dir"])
    assert cases == 60 * len(frames)
    assert refused > cases / 2
