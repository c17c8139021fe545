"""Calls a user's function that builds a network with the arguments that its signature accepts, and checks that it
returns an `nn.Module`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from polyfed.core.errors import UserError, did_you_mean


def call_factory(
    label: str,
    factory: Callable[..., Any],
    input_shape: tuple[int, ...],
    num_classes: int,
    arguments: Mapping[str, Any],
) -> nn.Module:
    """Calls `factory` with `arguments`, and `input_shape` and `num_classes` if it takes them.

    Args:
        label: name of the factory in error messages.
        factory: a function or class that returns an nn.Module when called.
        input_shape: shape of one example, without the batch dimension.
        num_classes: number of outputs.
        arguments: the other arguments, by keyword.

    Raises:
        UserError: the signature does not accept the arguments or requires more, or the result is not an nn.Module.

    >>> call_factory("square", lambda num_classes: nn.Linear(num_classes, num_classes), (1, 8, 8), 3, {})
    Linear(in_features=3, out_features=3, bias=True)
    """
    keywords = dict(arguments)
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C have no signature: they get only the user's arguments
        return _check_module(label, factory(**keywords))
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_keyword = [
        n for n, k in kinds.items() if k in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for name, value in (("input_shape", input_shape), ("num_classes", num_classes)):
        if takes_any or name in by_keyword:
            keywords.setdefault(name, value)
    if not takes_any and (unknown := sorted(set(arguments) - set(by_keyword))):
        choices = [name for name in by_keyword if name not in ("input_shape", "num_classes")]
        raise UserError(f"model {label}: unknown argument {unknown[0]!r}; {did_you_mean(unknown[0], choices)}")
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise UserError(
            f"model {label}: it cannot be called with {', '.join(sorted(keywords)) or 'no arguments'} ({error}); "
            f"its signature is {signature}"
        ) from error
    return _check_module(label, factory(**keywords))


def _check_module(label: str, result: Any) -> nn.Module:
    if isinstance(result, nn.Module):
        return result
    raise UserError(
        f"model {label}: it gave {type(result).__name__} instead of a torch.nn.Module; a factory must return one"
    )
