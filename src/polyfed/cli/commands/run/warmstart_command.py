"""Implements `polyfed warmstart`: generates initial weights for the networks of unseen clients with the hypernetwork of
a trained run.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import safetensors.torch
from rich.console import Console

from polyfed.cli.commands.compare.compare_options import UNSEEN_CLIENT_KEYS, is_warmstart_key
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import create_private_folder_if_missing, read_file, write_file_atomically
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.seeds import derive_seed
from polyfed.data import IID, SOURCES, PadCropFlip, Split, make_clients
from polyfed.data.plot import resolve_picture_path, save_figure
from polyfed.models import ModelSpec
from polyfed.simulation.checks.requirements import check_networks_run
from polyfed.simulation.experiment import Participants, build_experiment, load_participants, model_spec_for_data
from polyfed.simulation.results.unseen_clients import (
    TrainedServer,
    UnseenClientCurves,
    WarmStart,
    compare_with_scratch,
    compute_warm_start,
    load_trained_server,
)
from polyfed.simulation.storage.directory import read_config, read_manifest
from polyfed.simulation.storage.paths import safe_file_name

UNSEEN_FOLDER = "unseen"  # folder of the run directory, the weights of its unseen clients
_UNSEEN_ID = "unseen"  # id of one that brings its own data
_LISTED_TENSORS = 6  # tensors that a line names


@final
@dataclass(frozen=True)
class WarmStartOptions:
    """Holds the options of `polyfed warmstart`, except those of the sections `data` and `model`.

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


def run_warmstart(folder: Path, argv: Sequence[str], warmstart_options: WarmStartOptions) -> None:
    """Generates unseen clients' weights, writes them to files, and prints scores.

    Args:
        folder: run directory of a run of flha_ghn.
        argv: options of `data` and `model`.
        warmstart_options: the other options.

    Raises:
        UserError: something does not fit; nothing has been computed or written.
    """
    server, config = load_trained_server(folder), read_config(folder)
    clients, held_out = _unseen_clients(folder, config, argv, warmstart_options, server)
    files = [_weights_file(folder, client.id, warmstart_options.out, len(clients)) for client in clients]
    if warmstart_options.plot is not None:
        _check_writable_folder(resolve_picture_path(warmstart_options.plot), "--plot")
    starts = [compute_warm_start(server, client, held_out=held_out) for client in clients]
    curves = {}
    if warmstart_options.epochs:
        curves = {
            s.client.id: compare_with_scratch(
                server, s, warmstart_options.epochs, warmstart_options.lr, warmstart_options.scratch_lr
            )
            for s in starts
        }
    # Written before anything is printed: if that fails, there is an error and nothing else.
    for file, start in zip(files, starts, strict=True):
        _save_weights(file, start)
    if warmstart_options.plot is not None:
        from polyfed.report.figures.generation import draw_warm_start_curves  # imports what draws

        save_figure(draw_warm_start_curves(curves), warmstart_options.plot)
    if curves and os.access(folder, os.W_OK):
        _add_curves_to_file(folder / UNSEEN_FOLDER / "curves.json", curves)
    _show_scores(folder, server, starts, files, Console())
    _show_curves(curves, server, warmstart_options, Console())


def _unseen_clients(
    folder: Path,
    config: Mapping[str, Any],
    argv: Sequence[str],
    warmstart_options: WarmStartOptions,
    server: TrainedServer,
) -> tuple[list[Client], int]:
    """Loads the unseen clients with their data and networks, and checks each network on two examples.

    Also returns how many of a client's own examples are held out for the score (0 where the split or the source has
    test examples).
    """
    has_own_data = any(word.partition("=")[0].partition(".")[0] == "--data" for word in argv)
    has_other_model = any(word.partition("=")[0].partition(".")[0] == "--model" for word in argv)
    resolved = configuration_parser.parse_configuration(argv, config, "polyfed warmstart", is_warmstart_key)
    model = resolved["model"]
    if has_other_model and isinstance(model, list):
        raise UserError("--model takes one network here: give the name of one, --model NAME, before its fields")
    if has_own_data:
        if warmstart_options.unseen is not None or warmstart_options.client is not None:
            raise UserError("--data gives an unseen client's own data; leave --unseen and --client out")
        if not has_other_model:
            raise UserError("--data needs --model NAME, the network of the unseen client with these data")
        client, classes, held_out = _client_with_own_data(resolved["data"], model, argv, server)
        check_networks_run([client], classes)
        return [client], held_out
    if "data" not in config:
        raise UserError(
            f"the clients of {folder} were made in Python; give the unseen client's data and network here, --data NAME "
            "--model NAME, or use Run.warmstart or polyfed.simulation.results.unseen_clients there"
        )
    experiment_data = load_participants(build_experiment(config))
    _check_same_data(folder, experiment_data)
    clients = _selected_clients(folder, experiment_data, warmstart_options, has_other_model)
    if has_other_model:
        spec = model_spec_for_data(model, experiment_data.pool)
        clients = [Client(c.id, spec, c.train, c.test, c.val, c.global_test, c.task, c.loss) for c in clients]
    check_networks_run(clients, experiment_data.pool.num_outputs)
    return clients, 0


def _selected_clients(
    folder: Path, experiment_data: Participants, warmstart_options: WarmStartOptions, has_other_model: bool
) -> list[Client]:
    if warmstart_options.client is not None:
        if not has_other_model:
            raise UserError(
                f"--client {warmstart_options.client} needs --model NAME, the network that this client changes to"
            )
        return [_find_client(warmstart_options.client, experiment_data.clients, "client")]
    if not experiment_data.unseen:
        raise UserError(
            f"{folder} kept no unseen clients (data.unseen is 0); give --client ID --model NAME for a client "
            "that changes its network, or --data NAME --model NAME for someone else's data"
        )
    return (
        list(experiment_data.unseen)
        if warmstart_options.unseen is None
        else [_find_client(warmstart_options.unseen, experiment_data.unseen, "unseen client")]
    )


def _find_client(name: str, clients: Sequence[Client], kind: str) -> Client:
    client_by_id = {client.id: client for client in clients}
    if name not in client_by_id:
        raise UserError(f"the run has no {kind} {name!r}; {did_you_mean(name, client_by_id)}")
    return client_by_id[name]


def _check_same_data(folder: Path, experiment_data: Participants) -> None:
    before = read_manifest(folder).get("partition_fingerprint")
    if before not in (None, experiment_data.partition_fingerprint):
        raise UserError(
            f"the data of {folder / 'config.yaml'} are no longer divided as in the run (partition {before}, now "
            f"{experiment_data.partition_fingerprint}); put the data back as they were, or give the unseen client's "
            "own, --data NAME"
        )


def _client_with_own_data(
    data: Mapping[str, Any], model: Mapping[str, Any], argv: Sequence[str], server: TrainedServer
) -> tuple[Client, int, int]:
    """Builds an unseen client of a whole source; also returns the numbers of classes and held-out examples."""
    fields = {key: value for key, value in data.items() if key != "name" and f"data.{key}" not in UNSEEN_CLIENT_KEYS}
    pool = SOURCES[data["name"]](**fields).load()
    has_test_fraction = any(word.partition("=")[0] == "--data.test_fraction" for word in argv)
    common_test = None if has_test_fraction else pool.test
    sizes = Split(clients=1, test_fraction=data["test_fraction"] if common_test is None else 0.0)
    augment = PadCropFlip() if data["augment"] else None
    ((client_data,), _) = make_clients(
        pool, sizes, IID(), derive_seed(server.settings.seed, "newcomer"), augment=augment
    )
    test = client_data.test if common_test is None else common_test
    if not len(test):
        raise UserError(
            f"no example of {data['name']} is left to score on; give --data.test_fraction, above 0, and at least 2 examples"
        )
    client = Client(_UNSEEN_ID, model_spec_for_data(model, pool), client_data.train, test, task=pool.task)
    return client, pool.num_outputs, 0 if common_test is not None else len(test)


def _weights_file(folder: Path, client: str, out: Path | None, number: int) -> Path:
    """Returns the file of an unseen client's weights, after a check that it can be written."""
    weights_folder = folder / UNSEEN_FOLDER
    if out is None:
        if not os.access(weights_folder if weights_folder.exists() else folder, os.W_OK):
            raise UserError(f"cannot write to {folder}; give --out FILE.safetensors")
        return weights_folder / f"{safe_file_name(client)}.safetensors"
    if number > 1:
        raise UserError(f"--out names one file, but there are {number} unseen clients; choose one with --unseen ID")
    if out.suffix != ".safetensors" or out.is_dir():
        raise UserError(f"--out must be a file that ends in .safetensors, got {str(out)!r}")
    _check_writable_folder(out, "--out")
    parent_folder = out.resolve().parent
    if parent_folder.is_relative_to(folder.resolve()) and not parent_folder.is_relative_to(weights_folder.resolve()):
        raise UserError(f"--out {out} lies among the files of the run; choose another place, or {weights_folder}")
    return out


def _check_writable_folder(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: cannot write to the folder {path.parent}; choose another")


def _save_weights(file: Path, start: WarmStart) -> None:
    # Cloned, since safetensors refuses tensors that share memory, as tied weights do.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in start.model.state_dict().items()}
    try:
        if file.parent.name == UNSEEN_FOLDER:
            create_private_folder_if_missing(file.parent)
        write_file_atomically(file, safetensors.torch.save(weights), private=file.parent.name == UNSEEN_FOLDER)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; give another --out") from error


def _show_scores(
    folder: Path, server: TrainedServer, starts: Sequence[WarmStart], files: Sequence[Path], console: Console
) -> None:
    score, epochs = starts[0].client.task.default_metric.name, server.algorithm.refine_epochs
    after = "+ 1 head epoch" if epochs == 1 else f"+ {epochs} head epochs"
    parts = [part for part in ("", "global_") if f"{part}{score}" in starts[0].before]
    table = PlainTable(title=f"{score} of unseen clients on test examples, from {folder} after round {server.round}",
                  title_justify="left")  # fmt: skip
    table.add_column("unseen")
    table.add_column("network")
    columns = [f"{part.replace('_', ' ')}{name}" for part in parts for name in ("as generated", after)]
    for column in ("examples", "generated", *columns):
        table.add_column(column, justify="right")
    for s in starts:
        scores = [metrics[f"{part}{score}"] for part in parts for metrics in (s.before, s.after)]
        cells = [
            s.client.id,
            _network_name(s.client),
            str(len(s.client.train)),
            format_share_as_percent(s.coverage),
            *map(_format_number, scores),
        ]
        table.add_row(*cells)
    console.print(table)
    for s, file in zip(starts, files, strict=True):
        held_out_text = " of its own, which were held out" if s.held_out else ""
        scored = f"scored on {len(s.client.test)} examples{held_out_text}"
        for line in [
            *_network_lines(s.client),
            *_lines_of_local_tensors(s),
            scored,
            f"weights after the head's training in {file}",
        ]:
            print_line(console, f"{s.client.id}: {line}")


def format_share_as_percent(share: float) -> str:
    """Formats a share between 0 and 1 as a percentage; prints 0 % and 100 % only if the share is exactly 0 or 1.

    >>> [format_share_as_percent(share) for share in (1.0, 0.9999, 0.25, 0.0001, 0.0)]
    ['100 %', '>99.9 %', '25.0 %', '<0.1 %', '0 %']
    """
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if share > 0.9994:
        return ">99.9 %"
    return "<0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"


def _network_name(client: Client) -> str:
    return client.model.name if isinstance(client.model, ModelSpec) else type(client.model).__name__


def _network_lines(client: Client) -> list[str]:
    """Formats the fields of a network, where it has some."""
    arguments = client.model.arguments if isinstance(client.model, ModelSpec) else {}
    return [f"{_network_name(client)} with {', '.join(f'{k}={v}' for k, v in arguments.items())}"] if arguments else []


def _lines_of_local_tensors(start: WarmStart) -> list[str]:
    """Formats which tensors stay local, with one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in start.local.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"not generated but drawn: {join_first_and_count_rest(names, _LISTED_TENSORS)} ({reason})"
        for reason, names in by_reason.items()
    ]


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _add_curves_to_file(file: Path, curves: Mapping[str, UnseenClientCurves]) -> None:
    """Adds the training curves to the file with those of the run's other unseen clients, for `polyfed report`."""
    create_private_folder_if_missing(file.parent)
    stored_curves: dict[str, Any] = {}
    if file.is_file():
        try:
            stored_curves = parse_json(read_file(file))
            if error_text := validation_error(stored_curves, dict[str, dict[str, Any]]):
                raise ValueError(error_text)
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is damaged ({error}); delete it") from error
    stored_curves |= {i: {"score": c.score, "warm": c.warm, "scratch": c.scratch} for i, c in curves.items()}
    write_file_atomically(file, json.dumps(stored_curves, indent=1).encode())


def _show_curves(
    curves: Mapping[str, UnseenClientCurves], server: TrainedServer, options: WarmStartOptions, console: Console
) -> None:
    for name, client_curves in curves.items():
        table = PlainTable(
            title=f"{name}: {client_curves.score} after epochs of training the whole network", title_justify="left"
        )
        for column in ("epoch", "warm start", "from scratch"):
            table.add_column(column, justify="right")
        for epoch, (warm, scratch) in enumerate(zip(client_curves.warm, client_curves.scratch, strict=True)):
            table.add_row(str(epoch), _format_number(warm), _format_number(scratch))
        console.print(table)
        print_line(console, f"{name}: {describe_epochs_to_scratch_score(client_curves)}")
    if curves:
        rate = server.algorithm.lr if options.lr is None else options.lr
        plot_text = "" if options.plot is None else f"; drawn in {options.plot}"
        scratch_rate_text = "" if options.scratch_lr is None else f", from scratch {options.scratch_lr:g}"
        rates_text = (
            f"both in the same batches at rate {rate:g}{scratch_rate_text}, momentum started afresh each "
            f"epoch{plot_text}"
        )
        print_line(console, rates_text)


def describe_epochs_to_scratch_score(curves: UnseenClientCurves) -> str:
    """Says after how many epochs generated weights reach the final score of training from scratch.

    >>> describe_epochs_to_scratch_score(UnseenClientCurves("accuracy", (0.5, 0.8, 0.9), (0.1, 0.4, 0.7)))
    'the warm start has after 1 epoch what training from scratch has after 2 (0.700)'
    """
    goal, epochs = curves.scratch[-1], curves.epochs
    if goal is None:
        return f"training from scratch has no {curves.score} after {epochs} epochs: it diverged; lower --lr"
    if curves.epochs_to_match_scratch is None:
        best = max((score for score in curves.warm if score is not None), default=None)
        return (f"the warm start does not reach within {epochs} epochs what training from scratch has after them "
                f"({goal:.3f}); its best is {_format_number(best)}")  # fmt: skip
    unit = "epoch" if curves.epochs_to_match_scratch == 1 else "epochs"
    return (
        f"the warm start has after {curves.epochs_to_match_scratch} {unit} what training from scratch has after "
        f"{epochs} ({goal:.3f})"
    )
