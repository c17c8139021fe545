"""Tests a network before the first round, by running it on a few examples, and says what is taken of a network of
Lightning or of transformers.
"""

import logging
import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError, describe_exception, warn_of_data
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import call_network, input_spec_of, logits_or_output, named_leaves, tree_map
from polyfed.core.io.text.number_format import format_batch_shape
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.seeds import temporary_rng_seed
from polyfed.core.state_dict import name_of_first_nonfinite

_LOG = logging.getLogger("polyfed.simulation")


@grad_enabled()
def output_shape(module: nn.Module, data: Examples, client_name: str) -> tuple[int, ...]:
    """Runs a network on one example, and returns the shape of its output without the batch dimension.

    Args:
        module: the network; a copy of it is run, so that nothing in it changes.
        data: its first example is used, twice in a batch.
        client_name: the client, for error messages.

    Raises:
        UserError: the network fails, in evaluation or in training; its output is not a tensor
            with a row for each example, or has no gradient; or it creates layers or tensors as it runs.
    """
    report_unused_training_code(module, client_name)
    x = data.batch(torch.zeros(2, dtype=torch.int64))[0]
    shapes = []
    for training in (False, True):
        module_copy = deep_copy(module)
        tensors_before = _describe_tensors(module_copy)
        try:
            output = logits_or_output(_run_forward(module_copy, x, training))
        except Exception as error:  # whatever the user's network raises
            raise UserError(f"{client_name}: {_failure_message(module, x, error, training)}") from error
        if not isinstance(output, Tensor):
            raise UserError(
                f"{client_name}: its network must return a tensor of logits, got "
                f"{type(output).__name__}{_mode_suffix(training)}; a dict with 'logits' or an object with .logits does "
                "too"
            )
        if output.dim() == 0 or len(output) != 2:
            raise UserError(
                f"{client_name}: its network turns 2 examples into an output of shape {tuple(output.shape)}"
            )
        tensors_after = _describe_tensors(module_copy)
        if changed_names := tensors_before.keys() ^ tensors_after.keys():
            raise UserError(
                f"{client_name}: its network adds or removes the tensor {min(changed_names)!r} as it runs; build all layers "
                "and buffers in __init__, and let forward choose among them"
            )
        if changed := next((name for name in tensors_before if tensors_before[name] != tensors_after[name]), None):
            (shape, is_trained), (shape_after, _) = tensors_before[changed], tensors_after[changed]
            change = f"the shape of {changed!r} from {shape} to {shape_after}" if shape != shape_after else (
                f"requires_grad of {changed!r} from {is_trained} to {not is_trained}")  # fmt: skip
            raise UserError(
                f"{client_name}: its network changes {change} as it runs; give every tensor its shape and its requires_grad "
                "in __init__"
            )
        if training and not output.requires_grad:
            raise UserError(
                f"{client_name}: its network's output has no gradient, so that nothing can be trained; take detach(), "
                "torch.no_grad() and conversions to numpy out of forward, and let the output depend on trained parameters"
            )
        if not training:
            _warn_of_probabilities(output, client_name)
        shapes.append(tuple(output.shape[1:]))
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{client_name}: its network's output is {format_batch_shape(shapes[0])} in evaluation and "
            f"{format_batch_shape(shapes[1])} in training; return one form in both"
        )
    return shapes[0]


def _describe_tensors(module: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Returns {name: (shape, whether it is trained)} for the tensors of a network's state dict."""
    state = module.state_dict(keep_vars=True)
    return {name: (tuple(t.shape), t.requires_grad) for name, t in state.items() if isinstance(t, Tensor)}


def _warn_of_probabilities(outputs: Tensor, client_name: str) -> None:
    """Warns of a network that ends in a softmax: the loss takes one itself, so that such a network hardly learns."""
    if (
        outputs.dim() > 1
        and outputs.min() >= 0
        and any(outputs.shape[axis] > 1 and ((outputs.sum(axis) - 1).abs() < 1e-5).all() for axis in (1, -1))
    ):
        warn_of_data(
            f"{client_name}: its network returns probabilities (each row is positive and sums to 1), and losses and metrics "
            "take logits; leave the softmax at its end out"
        )


def check_finite_weights(module: nn.Module, client_name: str) -> None:
    """Raises a `UserError` if a network that was just built has a parameter or a saved buffer that is NaN or infinite.

    The cached module of a network will not do: it has the weights of its last use, such as those of a run that diverged.
    """
    if name := next((name for name, p in module.named_parameters() if not torch.isfinite(p).all()), None):
        raise UserError(f"{client_name}: the parameter {name!r} of its network is NaN or infinite before any training; "
                        "initialise it with finite numbers")  # fmt: skip
    saved = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if name := name_of_first_nonfinite(saved):
        raise UserError(f"{client_name}: the buffer {name!r} of its network is NaN or infinite, and would be sent; "
                        "register a constant such as a mask with register_buffer(..., persistent=False)")  # fmt: skip


def check_trains_on_one_example(
    module: nn.Module, data: Examples, client_name: str, batch_reason: str, cure: str
) -> None:
    """Raises a `UserError` if a network (with BatchNorm, say) cannot train on one example.

    Args:
        module: the network.
        data: its first example is used.
        client_name: the client, for the error message.
        batch_reason: how such a batch comes about, for the error message.
        cure: what to do, other than choosing another normalisation.
    """
    x = data.batch(torch.zeros(1, dtype=torch.int64))[0]
    try:
        output = logits_or_output(_run_forward(deep_copy(module), x, training=True))
        if isinstance(output, Tensor) and (output.dim() == 0 or len(output) != 1):
            raise ValueError(f"its output has the shape {tuple(output.shape)}")
    except Exception as error:  # BatchNorm's, or whatever the user's network raises on a batch of one
        raise UserError(
            f"{client_name} {batch_reason}, and its network cannot be trained on a batch of one "
            f"({describe_exception(error)}); BatchNorm needs two: "
            f"{cure}, or use another normalisation (nn.GroupNorm, nn.LayerNorm)"
        ) from error


def name_of_buffer_from_examples(module: nn.Module, data: Examples) -> str | None:
    """Returns a buffer computed from inputs in training, such as a running mean; None without one.

    Args:
        module: the network, which runs on these examples; copies of it are run.
        data: its first example is used, and its last with other numbers.
    """
    first, last = (data.batch(torch.full((2,), row))[0] for row in (0, len(data) - 1))
    buffers = []
    for x in (first, tree_map(lambda part: part + 1 if part.is_floating_point() else part, last)):
        module_copy = deep_copy(module)
        _run_forward(module_copy, x, training=True)
        buffers.append(dict(module_copy.named_buffers()))
    pairs = ((name, buffers[0][name], buffers[1][name]) for name in buffers[0])
    return next((name for name, a, b in pairs if not torch.equal(a.nan_to_num(), b.nan_to_num())), None)


def _run_forward(module: nn.Module, x: Any, training: bool) -> Any:
    """Runs the network, with gradients in training alone, and without changing the caller's random state."""
    with torch.set_grad_enabled(training), temporary_rng_seed(0):
        return call_network(module.train(training), x)


def _mode_suffix(training: bool) -> str:
    return " in training" if training else ""


def _failure_message(module: nn.Module, x: Any, error: Exception, training: bool) -> str:
    """Returns the error for a network that failed on its inputs, with the likely cause, wrong types first."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    parts = [part for _, part in named_leaves(x)]
    # Integers are suspects only if the error names types: they are correct inputs for tokens.
    odd_dtypes = [part.dtype for part in parts if part.is_floating_point() and part.dtype not in types]
    if not odd_dtypes and isinstance(error, RuntimeError) and re.search(r"\b(dtype|type|scalar)\b", str(error)):
        odd_dtypes = [part.dtype for part in parts if not part.is_floating_point()]
    if types and odd_dtypes:
        return (
            f"its network has weights of {' and '.join(sorted(map(str, types)))}, but its inputs are {odd_dtypes[0]}; "
            "convert the inputs, x.float() of a tensor or x.astype('float32') of an array or a frame"
            + (", or the network, model.double()" if torch.float64 in odd_dtypes else "")
        )
    return (
        f"its network fails on {_describe_batch(x)}{_mode_suffix(training)}: {describe_exception(error)}; change its "
        "layers or the inputs"
    )


def _describe_batch(x: Any) -> str:
    """Describes the shapes and types of the minibatch on which a network was run."""
    if isinstance(x, Tensor):
        return f"a batch of shape {tuple(x.shape)} ({x.dtype})"
    keys = "positional arguments"
    if isinstance(x, dict):
        keys = (
            "keyword arguments (for a forward that takes the dict itself, nest it: {NAME: x}, with the argument's name)"
        )
    return f"a batch of 2 examples ({input_spec_of(x)}), given to forward as {keys}"


def report_unused_training_code(module: nn.Module, client_name: str) -> None:
    """Warns that a `LightningModule`'s training code is unused, and logs what is taken of transformers.

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
