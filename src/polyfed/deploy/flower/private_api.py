"""Loads or replaces functions of Flower that are not public, but that a deployment needs.

`tests/deploy/flower/test_supernode.py` and `test_superlink.py` check them in the installed version. If they differ at
run time, a deployment works without them, at Flower's own speed.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, final

SUPPORTED_VERSIONS = re.compile(r"1\.4[12]\.")
"""Versions of Flower that this was tested with, or compared with by reading."""
_INTERNALS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "connect": ("flwr.supernode.fleet_http_connection", "http_request_response",
                ("server_address", "insecure", "root_certificates", "authentication_keys", "max_retries", "max_wait_time")),
    "pull": ("flwr.supercore.inflatable.inflatable_utils", "pull_objects",
             ("object_ids", "pull_object_fn", "max_concurrent_pulls", "max_time", "max_tries_per_object", "initial_backoff",
              "backoff_cap")),
    "push": ("flwr.supercore.inflatable.inflatable_utils", "push_objects",
             ("objects", "push_object_fn", "object_ids_to_push", "keep_objects", "max_concurrent_pushes")),
    "inflate": ("flwr.supercore.inflatable.inflatable_utils", "inflate_object_from_contents",
                ("object_id", "object_contents", "keep_object_contents", "objects")),
    "tree": ("flwr.supercore.inflatable.inflatable_object", "get_object_tree", ("obj",)),
    "nested": ("flwr.supercore.inflatable.inflatable_object", "get_all_nested_objects", ("obj",)),
    "walk": ("flwr.supercore.inflatable.inflatable_object", "iterate_object_tree", ("tree",)),
    "fixed": ("flwr.supercore.inflatable.inflatable_object", "no_object_id_recompute", ()),
    "ended": ("flwr.supercore.run", "RunNotRunningException", ()),  # a BaseException that is not an Exception
    "words": ("flwr.common.config", "parse_config_args", ("config", "flatten")),
}  # fmt: skip
# Parts of a connection: node id, receive, send, get run, get app, pull object, push object, confirm.
CONNECTION_PARTS = 8


@final
class UnsupportedFlowerError(Exception):
    """Raised when the private functions of the installed Flower differ from those that this version of polyfed uses."""


def import_private_flower_functions() -> Mapping[str, Any]:
    """Imports the private functions of Flower that polyfed uses, and returns {polyfed's short name: function}.

    Raises:
        UnsupportedFlowerError: this version of Flower was not tested, or a part is missing or takes other arguments.
    """
    if not SUPPORTED_VERSIONS.match(installed_version := version("flwr")):
        raise UnsupportedFlowerError(f"Flower {installed_version} has not been tried with it")
    internals = {}
    for name, (module, attribute, expected_parameters) in _INTERNALS.items():
        try:
            part = getattr(importlib.import_module(module), attribute)
            is_exception = isinstance(part, type) and issubclass(part, BaseException)  # exceptions have no signature
            actual_parameters = () if is_exception else tuple(inspect.signature(part).parameters)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UnsupportedFlowerError(f"Flower {installed_version} has no {module}.{attribute}") from error
        if actual_parameters != expected_parameters:
            raise UnsupportedFlowerError(
                f"{attribute} of Flower {installed_version} takes {', '.join(actual_parameters)}"
            )
        internals[name] = part
    return internals


def import_superlink_parts() -> tuple[Any, Any]:
    """Imports Flower's modules that load the control plugin and authenticate SuperNodes.

    Raises:
        UnsupportedFlowerError: Flower no longer calls these functions there, so that replacing them would have no effect.
    """
    modules = []
    for module_name, attribute in (
        ("flwr.superlink.cli.flower_superlink", "load_control_authn_plugin"),
        ("flwr.superlink.routers.fleet.node_auth", "authenticate_node"),
    ):
        try:
            # By name, since a package may have a function of the same name as its module.
            module: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise UnsupportedFlowerError(f"Flower {version('flwr')} has no {module_name}") from error
        if not hasattr(module, attribute) or not _is_global_used(module, attribute):
            raise UnsupportedFlowerError(f"Flower {version('flwr')} does not call {attribute} in {module_name}")
        modules.append(module)
    return modules[0], modules[1]


def _is_global_used(module: Any, name: str) -> bool:
    """Returns whether a function or method of a module looks up a global name."""
    members = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    members += [method for value in members if inspect.isclass(value) for method in vars(value).values()]
    codes = [value.__code__ for value in members if inspect.isfunction(value)]
    while codes:
        code = codes.pop()
        if name in code.co_names:
            return True
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return False


def try_to_shorten_reply_polling() -> bool:
    """Makes Flower ask for a missing part every 0.05 s, not 1 s; returns whether it allows this.

    Flower's grid sees a reply when it is announced, mostly a moment before all of it has been sent, and then waits for 1 s.

    Returns:
        Whether this version of Flower allows it.
    """
    try:
        grid: Any = importlib.import_module("flwr.superlink.grid.http_grid")
        if not {"initial_backoff", "backoff_cap"} <= set(inspect.signature(grid.pull_objects).parameters):
            return False
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    if not isinstance(grid.pull_objects, functools.partial):
        grid.pull_objects = functools.partial(grid.pull_objects, initial_backoff=0.05, backoff_cap=2.0)
    return True


def try_to_keep_messages_in_memory() -> bool:
    """Makes the SuperLink keep messages in memory, not its database; returns whether it allows this.

    No message is of use after the SuperLink has ended, since its runs have failed then.

    Returns:
        Whether this version of Flower allows it.
    """
    try:
        loader: Any = importlib.import_module("flwr.superlink.config_loader")
        factory, parameters = loader.ObjectStoreFactory, inspect.signature(loader.ObjectStoreFactory).parameters
        if list(parameters) != ["database"] or parameters["database"].default != ":flwr-in-memory:":
            return False
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    loader.ObjectStoreFactory = lambda database: factory()
    return True
