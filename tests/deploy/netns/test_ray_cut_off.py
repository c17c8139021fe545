"""A Ray cluster of two machines with a core each, of which one is cut off in the middle of a round."""

import secrets
import shutil
import sys
import time
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import without_durations

from .federation import Host, shared_code, wait
from .network import Quality

pytest.importorskip("ray")
_HERE = Path(__file__).parent
_PORT = 6379


@pytest.fixture
def cluster(net, tmp_path, clock):
    """The head, and a second node."""
    hosts = [Host(net.add(name, Quality(delay=0.005)), tmp_path / name, clock) for name in ("head", "second")]
    head, second = hosts
    address = f"{head.machine.address}:{_PORT}"
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    folder = Path("/tmp") / f"pfnet-{time.time_ns()}"  # Unix sockets have short names
    ways = {
        head: [*ray, "--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={folder}"],
        second: [*ray, f"--address={address}"],
    }
    for host, words in ways.items():
        host.more |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)} if host is head else head.more
        host.machine.start([*words, f"--node-ip-address={host.machine.address}"], host.log, host.environment)
        wait(lambda host=host: "Ray runtime started" in host.words(), 120, "a node of Ray starts")
    yield head, second, address
    for host in hosts:
        print(host.words()[-2000:])
    net.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("seconds", [10.0, None])
def test_a_node_is_cut_off_in_the_middle_of_a_round(cluster, tmp_path, seconds):
    """For some seconds: nothing is lost. For good: it is reported, and the other node does its work."""
    head, second, address = cluster
    out, log = tmp_path / "run", tmp_path / "log"
    head.hold()  # else it might have done everything before the other is ready
    second.hold()
    run = head.machine.start([sys.executable, str(_HERE / "ray_run.py"), address, str(out)], log, head.environment)
    wait(lambda: second.held, 180, "the second node trains")
    second.machine.cut()
    head.release()
    if seconds is not None:
        time.sleep(seconds)
        second.machine.fix()
        second.release()
    assert run.wait(300) == 0, log.read_text()
    print(log.read_text())
    records = read_metrics(out / "metrics.jsonl")
    failures = [failure for record in records for failure in record["failures"]]
    print(failures, [record["seconds"] for record in records])
    if seconds is None:
        assert failures
        assert all(failure["retried"] for failure in failures)
        lost = "died (the loss of its node or connection), phase 'local', attempt 1 of 2"
        assert all(lost in failure["reason"] for failure in failures)
    else:
        assert failures == []
    code, whole = shared_code(), tmp_path / "whole"
    clients = [code.client(name) for name in code.NAMES]
    method = pf.algorithms.FedRep(lr=0.05, local_epochs=1, body_epochs=1, batch_size=20)
    alone = pf.federate(clients, method, rounds=3, seed=3, out=whole, workers=0)
    history = [{**record, "failures": []} for record in records]
    assert without_durations(history) == without_durations(alone.history)
    for name in code.NAMES:
        files = [folder / "models" / f"{name}.safetensors" for folder in (out, whole)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
