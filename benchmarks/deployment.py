"""What a deployment costs: seconds of a round beside the sites' own work, seconds from the start of a trial to its first
round, bytes on the wire against `Message.nbytes`, and what idle sites take, with two and four sites over TLS and with keys
on this machine.

    python benchmarks/deployment.py --out benchmarks/results/deployment.json
    python benchmarks/deployment.py --rows fedavg-4 --rounds 3 --plain      # with Flower's own SuperNode, for comparison

SuperNodes connect to the SuperLink through a proxy that counts bytes (what a site's uplink would carry: TLS, HTTP,
heartbeats and all). What idle sites send and compute is measured for a while after the run. Expected are the sites' own
records: the nbytes of every message that they were sent, for training, evaluation and the last model, and of their replies.

A round is the time from one written record to the next, so that checkpoints count too. It trains, and evaluates the round
before on the same message (`evaluate-every = 1`). What is taken off is what the slowest site has measured for both in its
own process; rounds without training, at the end, are left out. "To the first round" ends when a site has trained for the
first time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import torch
from speed import cpu_name

from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import create_project
from polyfed.simulation.storage.directory import read_manifest, read_metrics

METHODS = {
    "fedavg": {"algorithm.name": "fedavg", "algorithm.lr": 0.05, "file": "server/server.py"},
    "flha_ghn": {
        "algorithm.name": "flha_ghn",
        "algorithm.lr": 0.05,
        "algorithm.head": "auto",
        "algorithm.catalogue": "server/catalogue.yaml",
    },
    "fedhenn": {"file": "server/server.py"},
}
ROWS = ("fedavg-2", "fedavg-4", "flha_ghn-2", "flha_ghn-4")
MODEL = """from polyfed.models import ModelSpec

def model():
    return ModelSpec("cnn_582k", {}, (1, 28, 28), 10)()
"""
LARGER = "x = torch.nn.functional.interpolate(x, (28, 28), mode='bilinear')"


class Counter:
    """A proxy on `port` for a server on `target`, in a thread; `down` and `up` are bytes to and from clients."""

    def __init__(self, port, target):
        self.port, self.target, self.down, self.up = port, target, 0, 0
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self):
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        async with server:
            await server.serve_forever()

    async def _connect(self, reader, writer):
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pipe(reader, far_writer, "up"), self._pipe(far_reader, writer, "down"))

    async def _pipe(self, reader, writer, way):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                writer.write(data)
                await writer.drain()
        writer.close()


class Watch(threading.Thread):
    """Notes when the records of rounds are written, what processor time each kind of process has taken by then, and when a
    site has trained for the first time."""

    def __init__(self, file, trial):
        super().__init__(daemon=True)
        self.file, self.trial, self.at, self.cpu, self.first = file, trial, [], [], None

    def run(self):
        while True:
            if self.first is None and any((self.trial.folder / "sites").glob("*/*/metrics.jsonl")):
                self.first = time.monotonic()
            lines = self.file.read_bytes().count(b"\n") if self.file.exists() else 0
            if lines > len(self.at):
                self.at.append(time.monotonic())
                self.cpu.append(self.by_kind())
            time.sleep(0.02)

    def by_kind(self):
        link, *nodes = [process.popen.pid for process in self.trial.processes]
        below = cpu_seconds(link)
        of_link = cpu_seconds(link, alone=True)
        of_nodes = sum(cpu_seconds(node, alone=True) for node in nodes)
        return {
            "superlink": of_link, "serverapp": below - of_link, "supernodes": of_nodes,
            "site processes": sum(map(cpu_seconds, nodes)) - of_nodes, "proxy": sum(os.times()[:2]),
        }  # fmt: skip

    def a_round(self):
        """Of the rounds between two records with training between them."""
        first, last = self.cpu[0], self.cpu[-2]
        return {kind: (last[kind] - first[kind]) / (len(self.cpu) - 2) for kind in first}


def descendants(root):
    """The process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def cpu_seconds(root, alone=False):
    """Of a process and all below it, so far."""
    total = 0
    for process in {root} if alone else descendants(root):
        with contextlib.suppress(OSError):
            words = (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def memory(root):
    """Proportional set size in MB of a process and all below it."""
    total = 0
    for process in descendants(root):
        with contextlib.suppress(OSError):
            for line in (Path("/proc") / str(process) / "smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) if line.startswith("Pss:") else 0
    return total / 1024


def prepared(method, sites, folder):
    """The project of a row."""
    project = create_project(folder, [f"site-{k}" for k in range(1, sites + 1)])
    if method == "fedavg":
        (project.path / "server" / "server.py").write_text(MODEL)
        text = project.site_file.read_text()
        text = text.replace("    y = torch.tensor", f"    {LARGER}\n    y = torch.tensor")
        project.site_file.write_text(f"{text}\n\n{MODEL.replace('model()', 'network()')}")
    return project


def measure(method, sites, rounds, port, idle):
    """One run; seconds and bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        project = prepared(method, sites, Path(temporary) / "federation")
        counter = Counter(port + 40, port)
        config = 'disclose="seconds,accuracy" allow-disclosure=true'
        words = {**METHODS[method], "rounds": rounds, "evaluate-every": 1}
        for word in {"file", "algorithm.catalogue"} & set(words):
            words[word] = str(project.path / words[word])
        changes = [f"--set={key}={json.dumps(value)}" for key, value in words.items()]
        program = [str(Path(sys.executable).parent / "polyfed"), "flower", "run", str(project.path), *changes]
        began = time.monotonic()
        with trials.start_trial(project, project.read_site_names(), port, config, proxy_port=port + 40) as trial:
            started = time.monotonic() - began
            watch = Watch(project.path / "runs" / "run-1" / "metrics.jsonl", trial)
            watch.start()
            before = (counter.down, counter.up)
            at = time.monotonic()
            subprocess.run([*program, "--allow-disclosure"], check=True, stdout=sys.stderr)
            seconds = time.monotonic() - at
            wire = [now - then for now, then in zip((counter.down, counter.up), before, strict=True)]
            records = read_metrics(project.path / "runs" / "run-1" / "metrics.jsonl")
            run = read_manifest(project.path / "runs" / "run-1")["deployment"]
            own = [
                {**json.loads(line), "site": site}
                for site in trial.sites
                for line in (trial.folder / "sites" / site / run / "metrics.jsonl").read_text().splitlines()
            ]
            time.sleep(10)  # until sites ask every few seconds only
            nodes = [process.popen.pid for process in trial.processes[1:]]
            before, cpu, at = (counter.down, counter.up), [cpu_seconds(pid) for pid in nodes], time.monotonic()
            time.sleep(idle)
            passed = time.monotonic() - at
            rate = [(now - then) / passed for now, then in zip((counter.down, counter.up), before, strict=True)]
            busy = [(cpu_seconds(pid) - then) / passed for pid, then in zip(nodes, cpu, strict=True)]
            held = [memory(pid) for pid in nodes]
            for process in trial.processes:
                print(process.log.read_text()[-600:] if "-v" in sys.argv else "", end="", file=sys.stderr)
    expected = [sum(record.get(key, 0) for record in own) for key in ("bytes_down", "bytes_up")]
    spent = {(r["phase"], r["round"], r["site"]): r["seconds"] for r in own}
    rounds_seen, work = [], []
    for k in range(1, len(records) - 1):  # between the records of rounds k and k + 1 lies the training of round k + 2
        rounds_seen.append(watch.at[k] - watch.at[k - 1])
        work.append(
            max(
                spent.get(("local", k + 2, site), 0.0) + spent.get(("evaluate", k + 1, site), 0.0)
                for site in trial.sites
            )
        )
    beyond = [seen - inside for seen, inside in zip(rounds_seen, work, strict=True)]
    return {
        "method": method, "sites": sites, "rounds": rounds, "message_bytes": records[0]["bytes_down"] // sites,
        "seconds_a_round": statistics.median(rounds_seen),
        "seconds_of_training": statistics.median(work),
        "seconds_beyond": {
            "median": statistics.median(beyond), "least": min(beyond), "most": max(beyond),
            "all": [round(value, 3) for value in beyond],
        },
        "seconds_to_the_first_round": watch.first - began,
        "of_which_trial": started,
        "seconds_of_the_run": seconds,
        "cpu_seconds_a_round": watch.a_round(),
        "expected_bytes": expected, "wire_bytes": wire,
        "over": [w / e - 1 for w, e in zip(wire, expected, strict=True)],
        "idle_bytes_a_second": rate, "idle_share_of_a_core": statistics.mean(busy),
        "megabytes_a_site": statistics.mean(held),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=22, help="two less are measured")
    parser.add_argument("--port", type=int, default=17000)
    parser.add_argument("--idle", type=float, default=30.0)
    parser.add_argument("--rows", default=",".join(ROWS), help="METHOD-SITES, separated by commas")
    parser.add_argument("--plain", action="store_true", help="with Flower's own SuperNode")
    parser.add_argument("--out", type=Path, help="rows are added to what is there")
    options = parser.parse_args()
    if options.plain:
        os.environ["POLYFED_SITE_PROCESS"] = "off"
    for number, row in enumerate(options.rows.split(",")):
        method, sites = row.rsplit("-", 1)
        found = measure(method, int(sites), options.rounds, options.port + 100 * number, options.idle)
        name = row + ("-plain" if options.plain else "")
        print(name, json.dumps(found, indent=1), flush=True)
        if options.out:
            host = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__, "flwr": version("flwr")}
            told = {"date": time.strftime("%Y-%m-%d"), "host": host, "rows": {}}
            if options.out.exists():
                told["rows"] = json.loads(options.out.read_text()).get("rows", {})
            told["rows"][name] = found
            options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
