"""Exports a network as TorchScript or ONNX, and compares the exported file's outputs with the network's."""

import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.report.export.standalone_module import (
    CHECKED_BATCH_SIZES,
    StandaloneModule,
    draw_random_inputs,
    onnx_input_names,
)
from polyfed.report.export.trained_model import TrainedModel

_OUTPUT = "outputs"


@final
class _OutputsDifferError(Exception):
    """Reports that an exported file gives other outputs than the network."""


@final
class SerializedNetwork(NamedTuple):
    """Holds an exported file's bytes, its outputs' shape, and whether these were compared.

    Attributes:
        content: the bytes of the file; None for the format "weights".
        output_shape: shape of the outputs, without the batch.
        was_compared: whether the file was read back and its outputs compared with the network's.
    """

    content: bytes | None
    output_shape: tuple[int, ...]
    was_compared: bool


@exclusive_single_torch_thread_with_grad()
def serialize_network(trained: TrainedModel, name: str) -> SerializedNetwork:
    """Exports a network as the bytes of a file in the given format.

    Args:
        trained: with its network.
        name: "torchscript", "onnx" or "weights".

    Raises:
        UserError: the network cannot be written in this format.
    """
    module = StandaloneModule(trained).eval()
    with torch.no_grad():
        try:
            shape = tuple(module(*draw_random_inputs(trained, 2, 0)).shape[1:])
        except Exception as error:  # of the user's own network
            raise UserError(
                f"the network of {trained.signature['client']!r} fails on inputs of its signature "
                f"({type(error).__name__}: {error}); export it with polyfed.export_model(run, ...) in Python"
            ) from error
        if name == "weights":
            return SerializedNetwork(None, shape, False)
        serializer = _to_torchscript if name == "torchscript" else _to_onnx
        try:
            content, run_exported = serializer(module, trained)
            if run_exported is not None:
                _check_same_outputs(module, run_exported, trained)
        except Exception as error:  # whatever torch raises for what it cannot trace
            message = str(error).strip().split("\n")[0][:200]
            reason = message if isinstance(error, _OutputsDifferError) else f"{type(error).__name__}: {message}"
            raise UserError(
                f"the network of {trained.signature['client']!r} cannot be written as {name} ({reason}); give "
                "format='weights' (--format weights), which writes everything but that"
            ) from error
    return SerializedNetwork(content, shape, run_exported is not None)


NetworkFunction = Callable[..., Tensor]


def _check_same_outputs(module: StandaloneModule, run_exported: NetworkFunction, trained: TrainedModel) -> None:
    """Raises an error if the exported file gives other outputs than the network for some batch size."""
    for number in CHECKED_BATCH_SIZES:
        inputs = draw_random_inputs(trained, number, seed=number)
        expected, actual = module(*inputs), run_exported(*inputs)
        if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise _OutputsDifferError(
                f"read back, it gives other outputs for {number} examples: its way depends on the inputs"
            )


def _to_torchscript(module: StandaloneModule, trained: TrainedModel) -> tuple[bytes, NetworkFunction]:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Tracing warns of constants, but its result is compared below; torch calls all of TorchScript deprecated.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, draw_random_inputs(trained, 2, 0), check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, buffer)
        run_exported: NetworkFunction = torch.jit.load(io.BytesIO(buffer.getvalue()))  # type: ignore[no-untyped-call]
    return buffer.getvalue(), run_exported


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Switches off torch's fused attention inside the block, since ONNX lacks this operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _to_onnx(module: StandaloneModule, trained: TrainedModel) -> tuple[bytes, NetworkFunction | None]:
    buffer, names = io.BytesIO(), onnx_input_names(trained.signature)
    axes = {name: {0: "n"} for name in (*names, _OUTPUT)}
    with warnings.catch_warnings(), _without_fused_attention():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, draw_random_inputs(trained, 2, 0), buffer,  # type: ignore[arg-type]  # it takes a stream
            input_names=names, output_names=[_OUTPUT], dynamic_axes=axes, dynamo=False,
        )  # fmt: skip
    importlib.import_module("onnx").checker.check_model(buffer.getvalue())
    if find_spec("onnxruntime") is None:
        return buffer.getvalue(), None
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])

    def run_exported(*inputs: Tensor) -> Tensor:
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run([_OUTPUT], feeds)[0])

    return buffer.getvalue(), run_exported
