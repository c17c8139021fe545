"""Generates weights for the networks of clients that took no part in training, with a trained graph hypernetwork (FLHA-GHN,
section 5.4).

This needs nothing but the server's state of a `flha_ghn` run, from a `Run` or a run directory. `compute_warm_start`
generates the weights and scores them, before and after the method's epoch on the head; `training_curve` trains on from
any weights.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.algorithms import FLHAGHN, registry_name
from polyfed.core.algorithm import Algorithm, Architecture, Client, ClientInfo
from polyfed.core.errors import ClientError, UserError, describe_exception
from polyfed.core.evaluation.evaluate import MetricValues, evaluate_client, predict
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.contiguous import contiguous_message
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.module_cache import build_module, cached_module, fill_module, initial_state
from polyfed.core.seeds import derive_seed, temporary_rng_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.tasks.task import DEFAULT_TASK, Task, TaskSpec
from polyfed.core.tasks.task_lookup import get_task
from polyfed.core.training.client_loss import training_loss_without_penalties
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit
from polyfed.core.training.precision import check_precision
from polyfed.data.partitioning.validation_split import split_off_examples
from polyfed.simulation.checks.requirements import check_networks_run
from polyfed.simulation.engines.base import move_clients_to_device
from polyfed.simulation.engines.devices import choose_device
from polyfed.simulation.rounds.federation import build_message_compressor
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.simulation.storage.configuration import restore_settings_and_method
from polyfed.simulation.storage.directory import read_config, read_manifest
from polyfed.simulation.storage.paths import describe_missing_hypernetwork


@final
@dataclass(frozen=True, eq=False)
class TrainedServer:
    """Holds the trained hypernetwork of a `flha_ghn` run: method, server state and settings.

    Attributes:
        algorithm: the method.
        state: the server's state after `round`.
        settings: of the run (seed, device).
        round: the last saved round.

    Raises:
        UserError: a method that cannot generate weights.
    """

    algorithm: FLHAGHN
    state: Any
    settings: Settings
    round: int

    def __post_init__(self) -> None:
        _require_flha_ghn(self.algorithm, "the run")


@final
@dataclass(frozen=True, eq=False)
class WarmStart:
    """Holds a new client's network with generated weights, and its test scores.

    Attributes:
        model: after the method's epoch on the linear head; independent of the run, in evaluation mode on the CPU.
        generated: the state dict before that epoch, on the CPU: generated weights; parameters that are not generated,
            from the run's common initial draw for this architecture; BatchNorm's statistics, estimated on the unseen
            client's training examples.
        coverage: share of the parameters that is generated, from 0 to 1.
        local: name -> reason, of each parameter that is not generated.
        before: the task's score (`accuracy`, `auc` or `r2`) and `loss` of `generated` on the test examples.
        after: the same of `model`.
        client: the unseen client, with its training and test examples.
        held_out: how many of the given data were held out as test examples; 0 if a test set was given.
    """

    model: nn.Module
    generated: StateDict
    coverage: float
    local: Mapping[str, str]
    before: MetricValues
    after: MetricValues
    client: Client
    held_out: int


@final
@dataclass(frozen=True)
class UnseenClientCurves:
    """Holds a new client's test scores by epoch, from generated weights ("warm") and from scratch.

    A score that is not defined, of a training that diverged, is None.

    >>> curves = UnseenClientCurves("accuracy", (0.5, 0.8, 0.9), (0.1, 0.4, 0.7))
    >>> curves.epochs, curves.epochs_to_match_scratch
    (2, 1)
    """

    score: str
    warm: tuple[float | None, ...]
    scratch: tuple[float | None, ...]

    @property
    def epochs(self) -> int:
        """Returns E, the number of epochs that both curves of test scores cover."""
        return len(self.warm) - 1

    @property
    def epochs_to_match_scratch(self) -> int | None:
        """Returns after how many epochs generated weights match the last score from scratch; None if never."""
        goal = self.scratch[-1]
        if goal is None:
            return None
        return next((epoch for epoch, score in enumerate(self.warm) if score is not None and score >= goal), None)


@grad_enabled()  # the state is trained further
def load_trained_server(out: str | Path) -> TrainedServer:
    """Loads the trained hypernetwork from the last saved round of a `flha_ghn` run.

    It reads the run directory alone, not the clients or their data, and changes nothing there.

    Raises:
        UserError: not a run directory, the run of another method, or no complete checkpoint.
    """
    folder = expand_user_path(out, "the run directory")
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run directory: it has no config.yaml")
    config, manifest = read_config(folder), read_manifest(folder)
    settings, algorithm = restore_settings_and_method(config, None)
    algorithm = _require_flha_ghn(algorithm, str(folder))
    integrity.check_config_unchanged(folder, config, manifest)
    binding = integrity.compute_run_hashes(config, manifest)
    checkpoint, notes = checkpoints.load_newest_checkpoint(
        folder / "checkpoint", expected_run_hashes_of_round=lambda number: binding, server_only=True
    )
    if checkpoint is None:
        if notes:
            raise UserError(
                f"no checkpoint of the run in {folder} is whole: {'; '.join(notes)}; put a copy of what was lost back, or "
                "run again"
            )
        raise UserError(f"the run in {folder} has no checkpoint yet; go on with it, `polyfed resume {folder}`")
    for note in notes:
        warnings.warn(f"{note}; the one before it is used", RuntimeWarning, stacklevel=2)
    return TrainedServer(algorithm, checkpoint.state, settings, checkpoint.round)


def _require_flha_ghn(algorithm: Algorithm[Any, Any], where: str) -> FLHAGHN:
    """Checks that the method is FLHA-GHN, and returns it; raises a `UserError` if not."""
    if not isinstance(algorithm, FLHAGHN):
        raise UserError(describe_missing_hypernetwork(where, registry_name(algorithm)))
    return algorithm


def build_unseen_client(
    model: Architecture,
    data: Any,
    *,
    test: Any = None,
    id: str = "unseen",
    task: Task | TaskSpec = DEFAULT_TASK,
    seed: int = 0,
) -> tuple[Client, int]:
    """Builds a client that took no part; also returns how many of `data` were held out for testing.

    Args:
        model: builds its network, as `Client.model`.
        data: examples to train on, as `Client.train`.
        test: examples to score on; None holds out a fifth of `data`: whole groups if they have groups, the last if they have
            times, else drawn at random, stratified by class.
        id, task: as for `Client`.
        seed: of that draw.

    Raises:
        UserError: as for `Client`, or too few examples to hold one out.

    >>> x, y = torch.zeros(10, 2), torch.tensor([0, 1]).repeat(5)
    >>> client, held_out = build_unseen_client(lambda: nn.Linear(2, 2), (x, y))
    >>> len(client.train), len(client.test), client.test.labels.tolist(), held_out
    (8, 2, [0, 1], 2)
    """
    if test is not None:
        return Client(id, model, data, test, task=task), 0
    examples = as_examples(data, f"client {id!r}: data")
    if len(examples) < 2:
        raise UserError(
            f"client {id!r} has {len(examples)} example, too few to hold one out for the score; give test=..."
        )
    strata = get_task(task).strata(examples.labels)
    train, held_out = split_off_examples(examples, strata, derive_seed(seed, "newcomer", "test"), {})
    if not len(held_out):
        raise UserError(
            f"client {id!r}: all examples are of one group or time, and none can be held out for the score; give test=..."
        )
    return Client(id, model, train, dataclasses.replace(held_out, augment=None), task=task), len(held_out)


def compute_warm_start(server: TrainedServer, client: Client, *, held_out: int = 0) -> WarmStart:
    """Generates a new client's weights from its network's graph, and scores the network.

    Nothing is trained but the unseen client's linear head, for one epoch ("Inference and local refinement"). The
    method itself generates and refines, as for its own clients: an unseen client with the id, network and data of a
    client gets that client's generated weights.

    Args:
        server: of a run of `flha_ghn`, by `load_trained_server` or `Run.warmstart`.
        client: the unseen client, e.g. of `build_unseen_client`.
        held_out: the number of examples that `build_unseen_client` held out, for the report.

    Raises:
        UserError: another method, a network that does not suit its data or returns NaN, or layers that cannot be traced;
            nothing has been trained.
        ClientError: the network failed later, with the exception as its cause.
    """
    algorithm, settings, device = server.algorithm, server.settings, choose_device(server.settings.device)
    check_precision(algorithm.precision, device)
    _check_unseen_client(client)
    # As for a client that asks for its personal network after the last round.
    client_info = ClientInfo(client.id, server.round + 1, settings.rounds, None, "personal")
    seed = derive_seed(settings.seed, server.round, client.id, "personal")
    (placed_client,) = move_clients_to_device([client], device)
    with exclusive_single_torch_thread_with_grad():
        try:
            with temporary_rng_seed(seed, device):
                _, message = build_message_compressor(settings, server.round)(
                    contiguous_message(algorithm.dispatch(server.state, client_info))
                )
                graph = algorithm.client_graph(message, placed_client)
                client_state = algorithm.client_init(placed_client, settings.seed)
                ((_, network),) = algorithm.other_models(message, client_state, placed_client, seed)
                loss = training_loss_without_penalties(placed_client, algorithm)
                before, generated = evaluate_client(network, placed_client, loss=loss), _copy_state_dict(network)
                network = algorithm.personal_model(message, client_state, placed_client, seed)
                after, refined = evaluate_client(network, placed_client, loss=loss), _copy_state_dict(network)
        except UserError:
            raise
        except Exception as error:  # whatever the unseen client's network raises
            raise ClientError(server.round, client.id, "warm start", describe_exception(error)) from error
        assert client.model is not None
        model = fill_module(build_module(client.model, seed=0), refined).eval()
    return WarmStart(model, generated, graph.coverage, dict(graph.local_reasons), before, after, client, held_out)


def _check_unseen_client(client: Client) -> None:
    """Checks an unseen client for mistakes that can be found before any work starts; raises a `UserError` for them."""
    if client.model is None:
        raise UserError(f"client {client.id!r} has no network (model=None); a warm start gives weights to one")
    check_networks_run([client])
    row = torch.zeros(1, dtype=torch.int64, device=client.train.device)
    with temporary_rng_seed(0):
        outputs = predict(build_module(client.model, seed=0), client.train.select(row))
    if not bool(torch.isfinite(outputs).all()):
        raise UserError(
            f"client {client.id!r}: its network gives NaN or infinite outputs for its first training example, with freshly "
            "drawn weights; look for NaN in the inputs, or a division by zero in the network"
        )


def _copy_state_dict(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in network.state_dict().items()}


def initial_weights(server: TrainedServer, client: Client) -> StateDict:
    """Returns the weights with which this client's network would start to train if no hypernetwork generated them.

    They are the run's common initial draw for its architecture, with which every method starts, `local` among them.
    """
    assert client.model is not None
    return initial_state(client.model, server.settings.seed)


def training_curve(
    client: Client,
    start: StateDict,
    options: LocalTraining,
    epochs: int,
    *,
    lr: float | None = None,
    seed: int = 0,
    device: str = "auto",
) -> list[MetricValues]:
    """Trains a client's whole network; returns its test scores after 0, 1, ..., `epochs` epochs.

    Each epoch is a call of `fit` at a constant learning rate, so that momentum starts at zero in each, as in each
    round of a run; BatchNorm's statistics are updated, as in training.

    Args:
        client: its network is trained on its training examples.
        start: a state dict of its network, with or without frozen parameters: `WarmStart.generated`, `initial_weights`.
        options: batch size, optimiser and so on, e.g. the run's method; its epochs, steps and schedule are ignored.
        epochs: E.
        lr: learning rate; None takes `options.lr`.
        seed: of the order of examples, augmentation and dropout; curves with one seed use the same minibatches.
        device: where to train.

    Returns:
        E + 1 entries, each with the task's score and `loss`.

    Raises:
        UserError: a negative number of epochs, or a learning rate that is not positive.
    """
    if epochs < 0:
        raise UserError(f"epochs must be at least 0, got {epochs}")
    lr = options.lr if lr is None else lr
    options = dataclasses.replace(options, local_epochs=1, local_steps=None, patience=None, lr=lr)
    assert client.model is not None
    torch_device = choose_device(device)
    (placed_client,) = move_clients_to_device([client], torch_device)
    scores = []
    with exclusive_single_torch_thread_with_grad():
        net = cached_module(client.model, torch_device)
        network = fill_module(net.module, {name: tensor for name, tensor in start.items() if name not in net.frozen})
        for epoch in range(epochs + 1):
            if epoch:
                epoch_seed = derive_seed(seed, client.id, "curve", epoch)
                fit(network, placed_client, options, lr=lr, seed=epoch_seed)
            scores.append(
                evaluate_client(network, placed_client, loss=training_loss_without_penalties(placed_client, options))
            )
    return scores


def compare_with_scratch(
    server: TrainedServer, start: WarmStart, epochs: int, lr: float | None = None, scratch_lr: float | None = None
) -> UnseenClientCurves:
    """Trains a new client's network from generated weights and from scratch; returns both curves.

    Both use the same minibatches and the options of the run.

    Args:
        server: of the run.
        start: the unseen client with its generated weights.
        epochs: of both.
        lr: learning rate; None takes the run's.
        scratch_lr: learning rate of training from scratch, if it differs; None takes `lr`.

    Raises:
        UserError: as for `training_curve`.
    """
    settings, client = server.settings, start.client
    score = client.task.default_metric.name
    warm, cold = (
        training_curve(client, weights, server.algorithm, epochs, lr=rate, seed=settings.seed, device=settings.device)
        for weights, rate in (
            (start.generated, lr),
            (initial_weights(server, client), lr if scratch_lr is None else scratch_lr),
        )
    )
    return UnseenClientCurves(score, *(tuple(metrics[score] for metrics in curve) for curve in (warm, cold)))
