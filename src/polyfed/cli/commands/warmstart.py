"""What the command `warmstart` does: weights at once for unseen clients, from the trained hypernetwork of a run
directory."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import safetensors.torch
from rich.console import Console

from polyfed.cli.commands import options
from polyfed.cli.commands.asked import HERE, offered
from polyfed.cli.commands.terminal import Table, say
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, nearest
from polyfed.core.evaluation import SCORE
from polyfed.core.files import make_folder, read_file, replace_file
from polyfed.core.seeds import derive
from polyfed.core.typed import conforms, from_json
from polyfed.data import IID, SOURCES, PadCropFlip, Split, make_clients
from polyfed.data.plot import picture_path, save_figure
from polyfed.models import ModelSpec
from polyfed.simulation.checks import check_models
from polyfed.simulation.experiment import Participants, from_config, network, participants
from polyfed.simulation.runs.directory import read_config, read_manifest
from polyfed.simulation.runs.paths import file_name
from polyfed.simulation.unseen import Curves, Server, WarmStart, compare_curves, load_server, warmstart

UNSEEN = "unseen"  # folder of the run directory, the weights of its unseen clients
_OWN = "unseen"  # id of one that brings its own data
_NAMED = 6  # tensors that a line names


@final
@dataclass(frozen=True)
class Wanted:
    """What the command was asked for beside the options of `data` and `model`.

    Args:
        unseen: id of one of the run's unseen clients; None for all of them.
        client: id of a client of the run that changes its network.
        epochs: of training the whole network, from the warm start and from scratch; 0 for none.
        lr: of these epochs; None for that of the run.
        scratch_lr: of those from scratch; None for `lr`.
        plot: picture of them.
        out: file of the weights; None for `unseen/ID.safetensors` in the run directory.

    Raises:
        UserError: options that exclude each other, or values out of range.
    """

    unseen: str | None = None
    client: str | None = None
    epochs: int = 0
    lr: float | None = None
    scratch_lr: float | None = None
    plot: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.unseen is not None and self.client is not None:
            raise UserError("give --unseen, one who took no part, or --client, one who did, not both")
        if self.epochs < 0:
            raise UserError(f"--epochs must be at least 0, got {self.epochs}")
        rates = {"--lr": self.lr, "--scratch-lr": self.scratch_lr}
        for option, rate in rates.items():
            if rate is not None and not (rate > 0 and math.isfinite(rate)):
                raise UserError(f"{option} must be positive, got {rate}")
        for option, value in (rates | {"--plot": self.plot}).items():
            if self.epochs == 0 and value is not None:
                raise UserError(f"{option} is for training after the warm start; give --epochs too, e.g. --epochs 20")


def run(folder: Path, words: Sequence[str], wanted: Wanted, console: Console | None = None) -> None:
    """Gives the unseen clients their networks, writes them, and prints how good they are.

    Args:
        folder: run directory of a run of flha_ghn.
        words: options of `data` and `model`.
        wanted: the other options.
        console: where to print.

    Raises:
        UserError: something does not fit; nothing has been computed or written.
    """
    server, config = load_server(folder), read_config(folder)
    clients, held_out = _clients(folder, config, words, wanted, server)
    files = [_target(folder, client.id, wanted.out, len(clients)) for client in clients]
    if wanted.plot is not None:
        _check_folder(picture_path(wanted.plot), "--plot")
    starts = [warmstart(server, client, held_out=held_out) for client in clients]
    curves = {}
    if wanted.epochs:
        curves = {s.client.id: compare_curves(server, s, wanted.epochs, wanted.lr, wanted.scratch_lr) for s in starts}
    # Written before anything is printed: if that fails, there is an error and nothing else.
    for file, start in zip(files, starts, strict=True):
        _save(file, start)
    if wanted.plot is not None:
        from polyfed.report.generation import draw_curves  # imports what draws

        save_figure(draw_curves(curves), wanted.plot)
    if curves and os.access(folder, os.W_OK):
        _keep_curves(folder / UNSEEN / "curves.json", curves)
    _show(folder, server, starts, files, console or Console())
    _show_curves(curves, server, wanted, console or Console())


def _clients(
    folder: Path, config: Mapping[str, Any], words: Sequence[str], wanted: Wanted, server: Server
) -> tuple[list[Client], int]:
    """The unseen clients with their data and networks, tried on two examples, and how many examples of their own data were
    held out for the score (0 where the run's split or the source has test examples)."""
    own = any(word.partition("=")[0].partition(".")[0] == "--data" for word in words)
    other = any(word.partition("=")[0].partition(".")[0] == "--model" for word in words)
    resolved = options.parse(words, config, "polyfed warmstart", offered)
    model = resolved["model"]
    if other and isinstance(model, list):
        raise UserError("--model takes one network here: give the name of one, --model NAME, before its fields")
    if own:
        if wanted.unseen is not None or wanted.client is not None:
            raise UserError("--data gives an unseen client's own data; leave --unseen and --client out")
        if not other:
            raise UserError("--data needs --model NAME, the network of the unseen client with these data")
        client, classes, held_out = _with_own_data(resolved["data"], model, words, server)
        check_models([client], classes)
        return [client], held_out
    if "data" not in config:
        raise UserError(
            f"the clients of {folder} were made in Python; give the unseen client's data and network here, --data NAME "
            "--model NAME, or use Run.warmstart or polyfed.simulation.unseen there"
        )
    found = participants(from_config(config))
    _check_same_data(folder, found)
    clients = _chosen(folder, found, wanted, other)
    if other:
        spec = network(model, found.pool)
        clients = [Client(c.id, spec, c.train, c.test, c.val, c.global_test, c.task, c.loss) for c in clients]
    check_models(clients, found.pool.num_classes)
    return clients, 0


def _chosen(folder: Path, found: Participants, wanted: Wanted, other: bool) -> list[Client]:
    if wanted.client is not None:
        if not other:
            raise UserError(f"--client {wanted.client} needs --model NAME, the network that this client changes to")
        return [_named(wanted.client, found.clients, "client")]
    if not found.unseen:
        raise UserError(
            f"{folder} kept no unseen clients (data.unseen is 0); give --client ID --model NAME for a client "
            "that changes its network, or --data NAME --model NAME for someone else's data"
        )
    return list(found.unseen) if wanted.unseen is None else [_named(wanted.unseen, found.unseen, "unseen client")]


def _named(name: str, clients: Sequence[Client], kind: str) -> Client:
    known = {client.id: client for client in clients}
    if name not in known:
        raise UserError(f"the run has no {kind} {name!r}; {nearest(name, known)}")
    return known[name]


def _check_same_data(folder: Path, found: Participants) -> None:
    before = read_manifest(folder).get("partition_fingerprint")
    if before not in (None, found.partition_fingerprint):
        raise UserError(
            f"the data of {folder / 'config.yaml'} are no longer divided as in the run (partition {before}, now "
            f"{found.partition_fingerprint}); put the data back as they were, or give the unseen client's own, --data NAME"
        )


def _with_own_data(
    data: Mapping[str, Any], model: Mapping[str, Any], words: Sequence[str], server: Server
) -> tuple[Client, int, int]:
    """An unseen client with all examples of a source, the number of its classes, and how many examples were held out."""
    fields = {key: value for key, value in data.items() if key != "name" and f"data.{key}" not in HERE}
    pool = SOURCES[data["name"]](**fields).load()
    asked = any(word.partition("=")[0] == "--data.test_fraction" for word in words)
    common = None if asked else pool.test
    sizes = Split(clients=1, test_fraction=data["test_fraction"] if common is None else 0.0)
    augment = PadCropFlip() if data["augment"] else None
    ((mine,), _) = make_clients(pool, sizes, IID(), derive(server.settings.seed, "newcomer"), augment=augment)
    test = mine.test if common is None else common
    if not len(test):
        raise UserError(
            f"no example of {data['name']} is left to score on; give --data.test_fraction, above 0, and at least 2 examples"
        )
    client = Client(_OWN, network(model, pool), mine.train, test, task=pool.task)
    return client, pool.num_classes, 0 if common is not None else len(test)


def _target(folder: Path, client: str, out: Path | None, number: int) -> Path:
    """The file of an unseen client's weights, which can be written as far as one can tell."""
    kept = folder / UNSEEN
    if out is None:
        if not os.access(kept if kept.exists() else folder, os.W_OK):
            raise UserError(f"cannot write to {folder}; give --out FILE.safetensors")
        return kept / f"{file_name(client)}.safetensors"
    if number > 1:
        raise UserError(f"--out names one file, but there are {number} unseen clients; choose one with --unseen ID")
    if out.suffix != ".safetensors" or out.is_dir():
        raise UserError(f"--out must be a file that ends in .safetensors, got {str(out)!r}")
    _check_folder(out, "--out")
    place = out.resolve().parent
    if place.is_relative_to(folder.resolve()) and not place.is_relative_to(kept.resolve()):
        raise UserError(f"--out {out} lies among the files of the run; choose another place, or {kept}")
    return out


def _check_folder(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: cannot write to the folder {path.parent}; choose another")


def _save(file: Path, start: WarmStart) -> None:
    # Cloned, since safetensors refuses tensors that share memory, as tied weights do.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in start.model.state_dict().items()}
    try:
        if file.parent.name == UNSEEN:
            make_folder(file.parent)
        replace_file(file, safetensors.torch.save(weights), private=file.parent.name == UNSEEN)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; give another --out") from error


def _show(folder: Path, server: Server, starts: Sequence[WarmStart], files: Sequence[Path], console: Console) -> None:
    score, epochs = SCORE[starts[0].client.task], server.algorithm.refine_epochs
    after = "+ 1 head epoch" if epochs == 1 else f"+ {epochs} head epochs"
    parts = [part for part in ("", "global_") if f"{part}{score}" in starts[0].before]
    table = Table(title=f"{score} of unseen clients on test examples, from {folder} after round {server.round}",
                  title_justify="left")  # fmt: skip
    table.add_column("unseen")
    table.add_column("network")
    columns = [f"{part.replace('_', ' ')}{name}" for part in parts for name in ("as generated", after)]
    for column in ("examples", "generated", *columns):
        table.add_column(column, justify="right")
    for s in starts:
        scores = [metrics[f"{part}{score}"] for part in parts for metrics in (s.before, s.after)]
        cells = [s.client.id, _name(s.client), str(len(s.client.train)), share(s.coverage), *map(_number, scores)]
        table.add_row(*cells)
    console.print(table)
    for s, file in zip(starts, files, strict=True):
        own = " of its own, which were held out" if s.held_out else ""
        scored = f"scored on {len(s.client.test)} examples{own}"
        for line in [*_network(s.client), *_not_generated(s), scored, f"weights after the head's training in {file}"]:
            say(console, f"{s.client.id}: {line}")


def share(coverage: float) -> str:
    """A share in per cent, which says 0 or 100 only of none and of all.

    >>> share(1.0), share(0.9999), share(0.25), share(0.0001), share(0.0)
    ('100 %', '>99.9 %', '25.0 %', '<0.1 %', '0 %')
    """
    if coverage in (0.0, 1.0):
        return f"{coverage:.0%}".replace("%", " %")
    if coverage > 0.9994:
        return ">99.9 %"
    return "<0.1 %" if coverage < 0.0005 else f"{100 * coverage:.1f} %"


def _name(client: Client) -> str:
    return client.model.name if isinstance(client.model, ModelSpec) else type(client.model).__name__


def _network(client: Client) -> list[str]:
    """The fields of a network that has some."""
    arguments = client.model.arguments if isinstance(client.model, ModelSpec) else {}
    return [f"{_name(client)} with {', '.join(f'{k}={v}' for k, v in arguments.items())}"] if arguments else []


def _not_generated(start: WarmStart) -> list[str]:
    """What stays local, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in start.local.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"not generated but drawn: {', '.join(names[:_NAMED])}{more} ({reason})")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _keep_curves(file: Path, curves: Mapping[str, Curves]) -> None:
    """Adds the curves to those that the run has of other unseen clients, for `polyfed report`."""
    make_folder(file.parent)
    kept: dict[str, Any] = {}
    if file.is_file():
        try:
            kept = from_json(read_file(file))
            if wrong := conforms(kept, dict[str, dict[str, Any]]):
                raise ValueError(wrong)
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is damaged ({error}); delete it") from error
    kept |= {i: {"score": c.score, "warm": c.warm, "scratch": c.scratch} for i, c in curves.items()}
    replace_file(file, json.dumps(kept, indent=1).encode())


def _show_curves(curves: Mapping[str, Curves], server: Server, wanted: Wanted, console: Console) -> None:
    for name, found in curves.items():
        table = Table(title=f"{name}: {found.score} after epochs of training the whole network", title_justify="left")
        for column in ("epoch", "warm start", "from scratch"):
            table.add_column(column, justify="right")
        for epoch, (warm, scratch) in enumerate(zip(found.warm, found.scratch, strict=True)):
            table.add_row(str(epoch), _number(warm), _number(scratch))
        console.print(table)
        say(console, f"{name}: {reached(found)}")
    if curves:
        rate = server.algorithm.lr if wanted.lr is None else wanted.lr
        drawn = "" if wanted.plot is None else f"; drawn in {wanted.plot}"
        other = "" if wanted.scratch_lr is None else f", from scratch {wanted.scratch_lr:g}"
        told = f"both in the same batches at rate {rate:g}{other}, momentum started afresh each epoch{drawn}"
        say(console, told)


def reached(curves: Curves) -> str:
    """When the warm start has what training from scratch has at the end.

    >>> reached(Curves("accuracy", (0.5, 0.8, 0.9), (0.1, 0.4, 0.7)))
    'the warm start has after 1 epoch what training from scratch has after 2 (0.700)'
    """
    goal, epochs = curves.scratch[-1], curves.epochs
    if goal is None:
        return f"training from scratch has no {curves.score} after {epochs} epochs: it diverged; lower --lr"
    if curves.reached is None:
        best = max((score for score in curves.warm if score is not None), default=None)
        return (f"the warm start does not reach within {epochs} epochs what training from scratch has after them "
                f"({goal:.3f}); its best is {_number(best)}")  # fmt: skip
    unit = "epoch" if curves.reached == 1 else "epochs"
    return (
        f"the warm start has after {curves.reached} {unit} what training from scratch has after {epochs} ({goal:.3f})"
    )
