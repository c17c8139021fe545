"""Imports and executes code that files name, only if the user has declared that name trusted in this process.

Whoever writes a name such as `my_nets:make`, the path of a Python file, or the address of a cluster that may run code here,
decides what this process executes. So a name is refused, unless the caller of this process trusted it: with a name typed on
the command line, with `--trust-code`, or in Python with `trust_code`. The content of a file never makes a name trusted. An
object that a Python caller passes (a class, a function) needs no trust.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from polyfed.core.errors import UserError, describe_exception, did_you_mean

T = TypeVar("T")
ANY_NAME = "*"
_IMPORT_PATHS: dict[Any, str] = {}  # object returned by `import_trusted_callable` -> its name
_trusted: frozenset[str] = frozenset()  # of this process, which passes it to the workers that it starts


def trust_code(*names: str) -> None:
    """Allows this process to execute the code with these names; without names, allows all code that files name.

    Args:
        names: `module:factory`, paths of Python files, or addresses of Ray clusters.

    >>> with restore_trusted_names_afterwards():
    ...     trust_code("torch.nn:Identity")
    ...     is_code_trusted("torch.nn:Identity"), is_code_trusted("torch.nn:Linear")
    (True, False)
    """
    global _trusted
    _trusted |= frozenset(names) or {ANY_NAME}


def is_code_trusted(name: str) -> bool:
    """Returns whether this process may execute the code with this name, as declared by `trust_code`."""
    return name in _trusted or ANY_NAME in _trusted


def trusted_names() -> tuple[str, ...]:
    """Returns the names of all code that this process trusts, for handing them to worker processes."""
    return tuple(sorted(_trusted))


def add_trusted_names(names: Iterable[str]) -> None:
    """Adds names to the code that this process trusts, as a worker does with its parent's `trusted_names()`."""
    global _trusted
    _trusted |= frozenset(names)


@contextmanager
def restore_trusted_names_afterwards() -> Iterator[None]:
    """Restores the set of trusted names at the end of the `with` block."""
    global _trusted
    before = _trusted
    try:
        yield
    finally:
        _trusted = before


def check_code_trusted(name: str, action: str) -> None:
    """Raises a `UserError` unless this process trusts the code with this name; the message says how to trust it.

    Args:
        name: the name as the user or file writes it.
        action: the action that needs the trust; follows "asks to" in the error.

    >>> check_code_trusted("my_nets:make", "import 'my_nets:make' as a network")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a configuration asks to import 'my_nets:make' as a network, which executes code on this
    machine; if you trust who wrote it, give --trust-code (in Python: polyfed.trust_code('my_nets:make'))
    """
    if not is_code_trusted(name):
        raise UserError(
            f"a configuration asks to {action}, which executes code on this machine; if you trust who wrote it, give "
            f"--trust-code (in Python: polyfed.trust_code({name!r}))"
        )


def import_trusted_callable(import_path: str, role: str = "network") -> Callable[..., Any]:
    """Imports a function or class by its path `module:name`.

    Modules are searched where Python searches, then in the current directory, which is appended to `sys.path` and stays
    there, so that worker processes find the same module.

    Args:
        import_path: the path.
        role: what it stands for, in errors: "network", "method", "metric", "loss", "source" or "partition".

    Raises:
        UserError: the text is not `module:factory`, it is not trusted, the module is not found or cannot be imported, or it
            has no such callable.

    >>> with restore_trusted_names_afterwards():
    ...     trust_code("torch.nn:Identity")
    ...     import_trusted_callable("torch.nn:Identity")
    <class 'torch.nn.modules.linear.Identity'>
    """
    module_name, _, attribute = import_path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        if role != "network":
            raise UserError(
                f"{import_path!r} does not name a {role}; write it as module:name, for example my_code:Mine"
            )
        raise UserError(
            f"{import_path!r} does not name a model factory; write it as module:factory, for example my_nets:make_net"
        )
    check_code_trusted(import_path, f"import {import_path!r} as a {role}")
    directory, label = os.getcwd(), "model" if role == "network" else role
    if not {directory, ""} & set(sys.path):
        sys.path.append(directory)
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        obj: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UserError(
                f"{label} {import_path!r}: there is no module {missing!r}, neither installed nor in {directory}; "
                f"check the name, or start polyfed in the directory that holds {missing}.py"
            ) from error
        raise UserError(
            f"{label} {import_path!r}: importing {module_name!r} failed, it needs the module {missing!r}"
        ) from error
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"{label} {import_path!r}: importing {module_name!r} failed with {describe_exception(error)}"
        ) from error
    origin = getattr(obj, "__file__", None) or module_name
    for part in attribute.split("."):
        if not hasattr(obj, part):
            public = [name for name in dir(obj) if not name.startswith("_") and callable(getattr(obj, name))]
            raise UserError(f"{label} {import_path!r}: {origin} has no {part!r}; {did_you_mean(part, public)}")
        obj = getattr(obj, part)
    if not callable(obj):
        raise UserError(
            f"{label} {import_path!r}: {attribute!r} in {origin} is {type(obj).__name__}, not a function or class"
        )
    with suppress(TypeError):  # an object that cannot be hashed has no stored name
        _IMPORT_PATHS[obj] = import_path
    return obj  # type: ignore[no-any-return]


def find_trusted_import_path(obj: Any) -> str | None:
    """Returns the path `module:name` by which `import_trusted_callable` imported an object; None for any other object.

    >>> with restore_trusted_names_afterwards():
    ...     trust_code("torch.nn:Identity")
    ...     find_trusted_import_path(import_trusted_callable("torch.nn:Identity")), find_trusted_import_path(len)
    ('torch.nn:Identity', None)
    """
    try:
        return _IMPORT_PATHS.get(obj)
    except TypeError:
        return None


def import_trusted_dataclass(import_path: str, base_class: type[T], label: str) -> type[T]:
    """Imports a user's dataclass by its path `module:Name`.

    Args:
        import_path: the path.
        base_class: the class that it must derive from.
        label: what it stands for, in errors.

    Raises:
        UserError: as `import_trusted_callable`, or it is not a dataclass that derives from `base_class`.

    >>> with restore_trusted_names_afterwards():
    ...     trust_code("torch.nn:Identity")
    ...     import_trusted_dataclass("torch.nn:Identity", dict, "source")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: source 'torch.nn:Identity': it must be a dataclass on dict, got class Identity
    """
    obj = import_trusted_callable(import_path, label)
    if not (isinstance(obj, type) and issubclass(obj, base_class) and is_dataclass(obj)):
        description = f"class {obj.__name__}" if isinstance(obj, type) else type(obj).__name__
        raise UserError(f"{label} {import_path!r}: it must be a dataclass on {base_class.__name__}, got {description}")
    return cast(type[T], obj)


def execute_file_and_get_function(file: Path, function_name: str, purpose: str) -> Callable[[], Any]:
    """Executes a Python file, and returns its function `function_name`.

    The file may import the modules beside it.

    Args:
        file: the Python file.
        function_name: the function's name.
        purpose: what needs the function; the start of errors.

    Raises:
        UserError: there is no such file, it is not trusted, or it has no such function.

    >>> execute_file_and_get_function(Path("/nowhere.py"), "client", "a site")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a site: '/nowhere.py' is not a Python file
    """
    title = f"polyfed_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(title, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{purpose}: {str(file)!r} is not a Python file")
    check_code_trusted(str(file), f"execute the Python file {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, function_name, None)):
        raise UserError(f"{purpose}: {file} defines no function {function_name}()")
    return function  # type: ignore[no-any-return]
