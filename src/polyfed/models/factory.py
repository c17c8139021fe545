"""Networks from a user's code: find `module:factory`, call it with the arguments it takes, check what comes back."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from polyfed.errors import UserError, nearest


def load_factory(path: str) -> Callable[..., Any]:
    """The function or class that `module:factory` names.

    Modules are looked for where Python looks, then in the current directory, which is put at the end of `sys.path` and
    stays there, so that worker processes find the same module.

    Raises:
        UserError: the text is not `module:factory`, the module is not found or cannot be imported, or it has no such
            callable.

    >>> load_factory("torch.nn:Identity")
    <class 'torch.nn.modules.linear.Identity'>
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise UserError(
            f"{path!r} does not name a model factory; write it as module:factory, for example my_nets:make_net"
        )
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.append(here)
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UserError(
                f"model {path!r}: there is no module {missing!r}, neither installed nor in {here}; "
                f"check the name, or start polyfed in the directory that holds {missing}.py"
            ) from error
        raise UserError(f"model {path!r}: importing {module_name!r} failed, it needs the module {missing!r}") from error
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"model {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error
    origin = getattr(found, "__file__", None) or module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
            raise UserError(f"model {path!r}: {origin} has no {part!r}; {nearest(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"model {path!r}: {attribute!r} in {origin} is {type(found).__name__}, not a function or class")
    return found  # type: ignore[no-any-return]


def call_factory(
    label: str,
    factory: Callable[..., Any],
    input_shape: tuple[int, ...],
    num_classes: int,
    arguments: Mapping[str, Any],
) -> nn.Module:
    """What `factory` makes of `arguments`, and of `input_shape` and `num_classes` if its signature has these names.

    Args:
        label: how errors call the factory.
        factory: a function or class whose call gives an nn.Module.
        input_shape: shape of one example, without the batch.
        num_classes: number of outputs.
        arguments: the other arguments, by keyword.

    Raises:
        UserError: the signature does not take the arguments or needs others, or the result is no nn.Module.

    >>> call_factory("square", lambda num_classes: nn.Linear(num_classes, num_classes), (1, 8, 8), 3, {})
    Linear(in_features=3, out_features=3, bias=True)
    """
    given = dict(arguments)
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C tell nothing: they get only what the user gave
        return _module(label, factory(**given))
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_keyword = [
        n for n, k in kinds.items() if k in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for name, value in (("input_shape", input_shape), ("num_classes", num_classes)):
        if takes_any or name in by_keyword:
            given.setdefault(name, value)
    if not takes_any and (unknown := sorted(set(arguments) - set(by_keyword))):
        choices = [name for name in by_keyword if name not in ("input_shape", "num_classes")]
        raise UserError(f"model {label}: unknown argument {unknown[0]!r}; {nearest(unknown[0], choices)}")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UserError(
            f"model {label}: it cannot be called with {', '.join(sorted(given)) or 'no arguments'} ({error}); "
            f"its signature is {signature}"
        ) from error
    return _module(label, factory(**given))


def _module(label: str, result: Any) -> nn.Module:
    if isinstance(result, nn.Module):
        return result
    raise UserError(
        f"model {label}: it gave {type(result).__name__} instead of a torch.nn.Module; a factory must return one"
    )
