"""Tests a user's own metrics before the first round, by computing each once."""

from collections.abc import Sequence

from polyfed.core.algorithm import Client
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import is_built_in_metric
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.seeds import temporary_rng_seed
from polyfed.simulation.checks.networks.network_layers import cached_module_of


def check_metrics_work(client: Client, metrics: Sequence[Metric]) -> None:
    """Computes the user's metrics on an untrained network's outputs, so that none fails after a round.

    Raises:
        UserError: a metric fails, or returns no number.
    """
    own_metrics = [m for m in metrics if not client.task.find_metric(m.name) and not is_built_in_metric(m.name)]
    if not own_metrics or client.model is None:
        return
    with temporary_rng_seed(0):
        outputs = predict(client.task.prediction_network(deep_copy(cached_module_of(client).module)), client.test)
    for metric in own_metrics:
        metric(outputs, client.test.labels.cpu())
