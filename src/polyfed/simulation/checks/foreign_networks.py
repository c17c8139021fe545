"""Says what is taken of a network that brings more than weights and `forward`: of Lightning or of transformers."""

import logging
import warnings

from torch import nn

_LOG = logging.getLogger("polyfed.simulation")


def report_unused_training_code(module: nn.Module, client_name: str) -> None:
    """Warns that the training code of a `LightningModule` is not used, and logs what is taken of a model of
    transformers; does nothing for other networks.

    Args:
        module: a client's network.
        client_name: the client, for the sentence.
    """
    bases = {(base.__name__, base.__module__.partition(".")[0]) for base in type(module).__mro__}
    if {("LightningModule", "lightning"), ("LightningModule", "pytorch_lightning")} & bases:
        warnings.warn(
            f"{client_name}: of its LightningModule, forward and the weights are taken; training_step, configure_optimizers "
            "and the hooks are not: the method has lr=... and optimizer=..., and Client(loss=...) a loss",
            UserWarning,
            stacklevel=2,
        )
    if ("PreTrainedModel", "transformers") in bases:
        _LOG.info(
            "%s: of its model of transformers, logits and weights are taken; the loss that it computes from labels is not: "
            "the task has one, and Client(loss=...)",
            client_name,
        )
