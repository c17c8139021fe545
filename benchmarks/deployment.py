"""What a deployment costs: bytes on the wire against `Message.nbytes`, and seconds a round beside the sites' own work, with
four sites over TLS on this machine.

    python benchmarks/deployment.py --out benchmarks/results/deployment.json

SuperNodes connect to the SuperLink through a proxy that counts bytes (what a site's uplink would carry: TLS, HTTP,
heartbeats and all). What idle sites send is measured for a while before the run. Expected are the sites' own records: the
nbytes of every message that they were sent, for training, evaluation and the last model, and of their replies.
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

from polyfed.deploy import trial as trials
from polyfed.deploy.project import create
from polyfed.simulation.runs.directory import read_manifest, read_metrics

METHODS = {
    "fedhenn": {"file": "server/server.py"},
    "flha_ghn": {"algorithm.name": "flha_ghn", "algorithm.lr": 0.05, "algorithm.catalogue": "server/catalogue.yaml"},
    "fedavg": {"algorithm.name": "fedavg", "algorithm.lr": 0.05, "file": "server/server.py"},
}
MODEL = """from polyfed.models import ModelSpec

def model():
    return ModelSpec("resnet18", {"width": 16}, (1, 8, 8), 10)()
"""


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


def measure(method, rounds, port, idle):
    """One run of four sites; bytes and seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        project = create(Path(temporary) / "federation", [f"site-{k}" for k in range(1, 5)])
        if method == "fedavg":
            (project.path / "server" / "server.py").write_text(MODEL)
            project.site.write_text(f"{project.site.read_text()}\n\n{MODEL.replace('model()', 'network()')}")
        counter = Counter(port + 40, port)
        config = 'disclose="seconds,accuracy" allow-disclosure=true'
        with trials.trial(project, project.sites(), port, config, through=port + 40) as trial:
            time.sleep(20)  # all SuperNodes are connected
            began, before = time.monotonic(), (counter.down, counter.up)
            time.sleep(idle)
            rate = [
                (now - then) / (time.monotonic() - began)
                for now, then in zip((counter.down, counter.up), before, strict=True)
            ]
            before, began = (counter.down, counter.up), time.monotonic()
            words = {**METHODS[method], "rounds": rounds, "evaluate-every": rounds}
            for word in {"file", "algorithm.catalogue"} & set(words):
                words[word] = str(project.path / words[word])
            changes = [f"--set={key}={json.dumps(value)}" for key, value in words.items()]
            program = [str(Path(sys.executable).parent / "polyfed"), "flower", "run", str(project.path), *changes]
            subprocess.run([*program, "--allow-disclosure"], check=True)
            seconds = time.monotonic() - began
            wire = [now - then for now, then in zip((counter.down, counter.up), before, strict=True)]
            records = read_metrics(project.path / "runs" / "run-1" / "metrics.jsonl")
            run = read_manifest(project.path / "runs" / "run-1")["deployment"]
            own = [
                json.loads(line)
                for site in trial.sites
                for line in (trial.folder / "sites" / site / run / "metrics.jsonl").read_text().splitlines()
            ]
        expected = [sum(record.get(key, 0) for record in own) for key in ("bytes_down", "bytes_up")]
        local = {
            record["round"]: [r["seconds"] for r in own if r["phase"] == "local" and r["round"] == record["round"]]
            for record in records
        }
        inner = records[:-1]  # the last round is evaluated too
        return {
            "rounds": rounds, "message_bytes": records[0]["bytes_down"] // 4,
            "expected_bytes": expected, "wire_bytes": wire,
            "idle_bytes_a_second": rate, "seconds": seconds,
            "over": [w / e - 1 for w, e in zip(wire, expected, strict=True)],
            "over_without_idle": [(w - r * seconds) / e - 1 for w, r, e in zip(wire, rate, expected, strict=True)],
            "seconds_a_round": statistics.median(r["seconds"] for r in inner),
            "seconds_of_training": statistics.median(max(local[r["round"]]) for r in inner),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=17000)
    parser.add_argument("--idle", type=float, default=30.0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for number, method in enumerate(options.methods.split(",")):
        found[method] = measure(method, options.rounds, options.port + 100 * number, options.idle)
        print(method, json.dumps(found[method], indent=1), flush=True)
    for method, row in found.items():
        for k, way in enumerate(("down", "up")):
            wire, due = row["wire_bytes"][k] / 2**20, row["expected_bytes"][k] / 2**20
            more, own = 100 * row["over"][k], 100 * row["over_without_idle"][k]
            print(
                f"{method}, {way}: {wire:.2f} MB for {due:.2f} MB: {more:+.1f} %, without what idle sites send {own:+.1f} %"
            )
        print(f"{method}: {row['seconds_a_round']:.1f} s a round, of which {row['seconds_of_training']:.1f} s training")
    if options.out:
        host = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__, "flwr": version("flwr")}
        options.out.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "host": host, "methods": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
