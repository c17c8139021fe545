"""Damaged files: each kind of file that polyfed reads, mutated with a fixed seed, and what its reader made of it."""

import copy
import json
import math
import random
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import count
from pathlib import Path

import torch
import yaml

import polyfed as pf
from polyfed.algorithms import FedPNAS, Local
from polyfed.cli.commands.compare import compare_command as comparing
from polyfed.cli.commands.compare.compare_options import CompareOptions
from polyfed.cli.commands.results.report_command import show_report
from polyfed.cli.main import main
from polyfed.comparison.storage import comparison_directory as comparisons
from polyfed.core.errors import UserError
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.nas.derived import load_network
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.data.run_records import read_checked_round_records
from polyfed.report.figures.architectures import read_search_result
from polyfed.simulation.experiment import build_experiment
from polyfed.simulation.storage.configuration import restore_settings_and_method
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_config, read_manifest, read_metrics
from polyfed.simulation.storage.predictions import prediction_store as predictions
from polyfed.simulation.storage.predictions import predictions_parquet
from polyfed.testing import small_clients

NUMBERS = (0, -1, 3, 2**62, 10**400, 1.5, -0.0, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "x", "\x00", "\x1b[31m", "[/b]", "a" * 3000, "../../x", "subprocess:getoutput")
OTHERS = (None, True, False, [], [[]], {}, {"": None}, [None], {"name": "x"}, [1, "a"])
VALUES = (*NUMBERS, *TEXTS, *OTHERS)
PIECES = (b"\x00" * 8, b"[" * 3000, b"NaN", b"Infinity", b"9" * 5000, b'"', b"}", b"\xff\xfe", b"&a *a", b"- ")


@dataclass
class Count:
    """Of one kind of file: cases, and what became of them."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    failures: Counter[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.failures = Counter()


def places(value, here=()) -> Iterator[tuple]:
    """The way to each value inside a value."""
    yield here
    if len(here) > 200:
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*here, key))


def mutated(value, rng: random.Random):
    """A copy in which one to three values are others, missing, twice, nested, or under another name."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        way = rng.choice(list(places(value)))
        if not way:
            if rng.random() < 0.1:
                return copy.deepcopy(rng.choice(VALUES))
            continue
        owner = value
        for key in way[:-1]:
            owner = owner[key]
        key = way[-1]
        kind = rng.randrange(6)
        if kind == 0:
            del owner[key]
        elif kind == 1 and isinstance(owner, dict):
            owner[rng.choice(("x", "", "name", "algorithm", "\x00", "round"))] = owner.pop(key)
        elif kind == 2:
            owner[key] = [owner[key]] if rng.random() < 0.5 else {"x": owner[key]}
        elif kind == 3 and isinstance(owner, list):
            owner.append(owner[key])
        elif kind == 4 and rng.random() < 0.2:
            for _ in range(rng.choice((3, 70, 2000))):
                owner[key] = [owner[key]]
        else:
            owner[key] = copy.deepcopy(rng.choice(VALUES))  # which later changes would change too
    return value


def mangled(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with some changed, cut, doubled or put in."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.6 else rng.randrange(min(len(data), 600) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            data[at : at + rng.randrange(1, 60)] = b""
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 60)]
        else:
            data[at:at] = rng.choice(PIECES)
    return bytes(data)


def as_json(value) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def _yaml(value) -> bytes:
    try:
        return yaml.safe_dump(value, sort_keys=False).encode()
    except RecursionError:
        return b"a: " + b"[" * 5000 + b"]" * 5000


@dataclass(frozen=True)
class Kind:
    """A kind of file: its sound content, how values are written, and who reads it."""

    file: Path
    write: Callable[[object], bytes] | None
    content: object
    read: Callable[[], object]


def kinds(folder: Path) -> dict[str, Kind]:
    """The kinds, each with a file in `folder`, which is made."""
    folder.mkdir(exist_ok=True)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(action="ignore"):
        run = folder / "run"
        small = ["--data.clients", "2", "--rounds", "2", "--workers", "0", "--quiet"]
        assert (
            main(
                [
                    "run",
                    "--algorithm",
                    "local",
                    "--model",
                    "mlp",
                    "--data.val_fraction",
                    "0.2",
                    *small,
                    "--out",
                    str(run),
                ]
            )
            == 0
        )
        both = ["--seeds", "0,1", "--algorithms", "local,fedavg", "--same-data", "--tune", "none", "--no-references"]
        assert main(["compare", *small, *both, "--out", str(folder / "c")]) == 0
        made = folder / "made"
        pf.federate(small_clients(), Local(lr=0.1), rounds=2, workers=0, out=made)
        data = (torch.randn(8, 1, 8, 8), torch.arange(8) % 2), (torch.randn(4, 1, 8, 8), torch.arange(4) % 2)
        images = [pf.Client(name, None, *data) for name in ("c0", "c1")]
        method = FedPNAS(width=2, layers=1) if {"width", "layers"} <= FedPNAS.__dataclass_fields__.keys() else FedPNAS()
        pf.federate(images, method, rounds=1, workers=0, out=folder / "search")
    config, config_file = read_config(run), run / "config.yaml"
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    results = folder / "c/comparison.json"
    complete = made / "checkpoint/round-000002/complete.json"
    search = next((folder / "search/models").glob("*.json"))
    server = made / "checkpoint/round-000002/server.safetensors"
    state = serialize_state({"a": torch.ones(2), "b": [1, 2.5, {"c": torch.zeros(1), "d": None}], "round": 3})

    def configured():
        content = read_config(run)
        restore_settings_and_method(content, None)
        return build_experiment(content)

    def history():
        read_metrics(metrics)
        describe_changed_files_of_run(run)
        return read_checked_round_records(metrics), shown(run)

    turn = count()

    def shown(place):
        read_run_groups([place])
        if next(turn) % 8:
            return  # pages take their time
        with redirect_stdout(StringIO()), warnings.catch_warnings(action="ignore"):
            show_report([place], out=folder / "page.html")

    def compared():
        comparisons.load_comparison(folder / "c")
        shown(folder / "c")

    def described():
        content = comparisons.read_description(folder / "c")
        comparisons.parse_result_criteria(content)
        kept = content.get("experiment")
        if kept is not None:
            build_experiment(kept["config"])
        comparing.read_comparison_plan(folder / "c", CompareOptions())

    def resumed():
        shutil.rmtree(folder / "again", ignore_errors=True)
        shutil.copytree(made, folder / "again")
        with warnings.catch_warnings(action="ignore"):
            pf.resume(folder / "again", clients=small_clients())

    def predicted():
        file = predictions._predictions_file(run, "client-000")
        assert file.exists()
        for split in ("test", "val"):
            for number in predictions_parquet.list_rounds_in_file(file, split):
                predictions.read_predictions(run, "client-000", split=split, round=number)
        shown(run)

    def manifest():
        read_manifest(run)
        describe_changed_files_of_run(run)
        shown(run)

    def found():
        load_network(search)
        read_search_result(folder / "search")

    def lines(value):
        return b"".join(as_json(record) + b"\n" for record in value) if isinstance(value, list) else as_json(value)

    states = folder / "state"
    states.write_bytes(state)
    structure = json.loads(json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])["__metadata__"]["structure"])

    def packed(value):
        import safetensors.torch

        tensors = {"a": torch.ones(2), "b/2/c": torch.zeros(1)}
        return bytes(safetensors.torch.save(tensors, metadata={"structure": as_json(value).decode()}))

    from small_files import small_kinds

    return {
        "config.yaml": Kind(config_file, _yaml, config, configured),
        "manifest.json": Kind(run / "manifest.json", as_json, json.loads((run / "manifest.json").read_text()), manifest),
        "metrics.jsonl": Kind(metrics, lines, records, history),
        "comparison.json": Kind(results, as_json, json.loads(results.read_text()), compared),
        "comparison.yaml": Kind(folder / "c/comparison.yaml", _yaml, read_config(folder / "c/comparison.yaml"), described),
        "complete.json": Kind(complete, as_json, json.loads(complete.read_text()), resumed),
        "checkpoint": Kind(server, None, None, resumed),
        "models/*.json": Kind(search, as_json, json.loads(search.read_text()), found),
        "predictions": Kind(run / "predictions/client-000.parquet", None, None, predicted),
        "decode": Kind(states, packed, structure, lambda: deserialize_state(states.read_bytes())),
        **small_kinds(folder, Kind, as_json, _yaml, made),
    }  # fmt: skip


def fuzz(kind: Kind, seed: int, seconds: float, most: int = 10**9) -> Count:
    """Mutates a file until the time is up, and puts the sound one back."""
    rng, found, sound = random.Random(seed), Count(), kind.file.read_bytes()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and found.cases < most:
            values = kind.write is not None and rng.random() < 0.7
            data = kind.write(mutated(kind.content, rng)) if values else mangled(sound, rng)
            kind.file.write_bytes(data)
            found.cases += 1
            try:
                kind.read()
            except (UserError, pf.ClientError, pf.RoundError):
                found.refused += 1
            except Exception as error:
                import traceback

                last = traceback.extract_tb(error.__traceback__)
                own = [frame for frame in last if "polyfed" in frame.filename and "hostile" not in frame.filename][-1:]
                where = "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in own)
                found.failures[f"{type(error).__name__} at {where}: {str(error)[:80]}"] += 1
            else:
                found.accepted += 1
    finally:
        kind.file.write_bytes(sound)
    return found


def table(
    folder: Path, seconds: float, seed: int = 0, most: int = 10**9, only: tuple[str, ...] = ()
) -> dict[str, Count]:
    """The counts of all kinds, or of some, printed."""
    rows = {}
    sys.stdout.write(f"{'file':24} {'cases':>7} {'refused':>8} {'accepted':>9} {'failures':>9}\n")
    for position, (name, kind) in enumerate(kinds(folder).items()):
        if only and name not in only:
            continue
        rows[name] = found = fuzz(kind, seed + position, seconds, most)
        failures = sum(found.failures.values())
        sys.stdout.write(f"{name:24} {found.cases:7} {found.refused:8} {found.accepted:9} {failures:9}\n")
        for what, times in found.failures.most_common(12):
            sys.stdout.write(f"    {times} x {what}\n")
        sys.stdout.flush()
    return rows
