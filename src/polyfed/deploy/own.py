"""Functions of people's own files: a site's `site.py`, and what the server brings."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyfed.errors import UserError


def function_of(file: Path, name: str, why: str) -> Callable[[], Any]:
    """A function of a Python file, which may import its neighbours. The file's code runs.

    Args:
        file: where it is.
        name: of the function.
        why: what needs it, for errors.

    Raises:
        UserError: there is no such file, or no such function in it.

    >>> function_of(Path("/nowhere.py"), "client", "a site")
    Traceback (most recent call last):
    polyfed.errors.UserError: a site: '/nowhere.py' is not a Python file
    """
    title = f"polyfed_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(title, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{why}: {str(file)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, name, None)):
        raise UserError(f"{why}: {file} defines no function {name}()")
    return found  # type: ignore[no-any-return]
