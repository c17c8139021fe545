"""polyfed: personalised federated learning across different architectures.

>>> import polyfed as pf
>>> pf.algorithms.get("fedavg") is pf.algorithms.FedAvg
True
"""

import ast
import logging
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed import algorithms, tasks
    from polyfed.comparison.compare import compare
    from polyfed.comparison.storage.comparison import Comparison
    from polyfed.comparison.storage.load import load
    from polyfed.comparison.verdicts.answer import Answer
    from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
    from polyfed.core.errors import ClientError, RoundError, UserError
    from polyfed.core.evaluation.metric import Metric
    from polyfed.core.examples.examples import Examples
    from polyfed.core.io.trusted_code import trust_code
    from polyfed.core.training.privacy.options import Privacy
    from polyfed.data.look.look import Look
    from polyfed.report.audit.audit import audit
    from polyfed.report.audit.audit_report import AuditReport
    from polyfed.report.export.folder import export_model
    from polyfed.report.look import look
    from polyfed.report.page_file import write_report
    from polyfed.simulation.callbacks.callback import Callback
    from polyfed.simulation.federate import federate, resume
    from polyfed.simulation.results.run import Run
    from polyfed.simulation.results.saved_run import SavedRun
    from polyfed.simulation.scheduling.asynchronous.rules import FedAsync, FedBuff
    from polyfed.simulation.scheduling.sampling.sampler import Sampler

__all__ = [
    "Algorithm",
    "Answer",
    "AuditReport",
    "Callback",
    "Client",
    "ClientError",
    "ClientInfo",
    "Comparison",
    "Examples",
    "FedAsync",
    "FedBuff",
    "Look",
    "Message",
    "Metric",
    "Privacy",
    "RoundError",
    "Run",
    "Sampler",
    "SavedRun",
    "ServerContext",
    "UserError",
    "algorithms",
    "audit",
    "compare",
    "export_model",
    "federate",
    "load",
    "look",
    "resume",
    "tasks",
    "trust_code",
    "write_report",
]

# Importing torch takes a second or more, which a help text should not cost. So a name is imported when it is first used.
_HOMES = {
    "Algorithm": "core.algorithm",
    "Answer": "comparison.verdicts.answer",
    "AuditReport": "report.audit.audit_report",
    "Callback": "simulation.callbacks.callback",
    "Client": "core.algorithm",
    "ClientError": "core.errors",
    "ClientInfo": "core.algorithm",
    "Comparison": "comparison.storage.comparison",
    "Examples": "core.examples.examples",
    "FedAsync": "simulation.scheduling.asynchronous.rules",
    "FedBuff": "simulation.scheduling.asynchronous.rules",
    "Look": "data.look.look",
    "Message": "core.algorithm",
    "Metric": "core.evaluation.metrics",
    "Privacy": "core.training.privacy.options",
    "RoundError": "core.errors",
    "Run": "simulation.results.run",
    "Sampler": "simulation.scheduling.sampling.sampler",
    "SavedRun": "simulation.results.saved_run",
    "ServerContext": "core.algorithm",
    "UserError": "core.errors",
    "audit": "report.audit.audit",
    "compare": "comparison.compare",
    "export_model": "report.export.folder",
    "federate": "simulation.federate",
    "load": "comparison.storage.load",
    "look": "report.look",
    "resume": "simulation.federate",
    "trust_code": "core.io.trusted_code",
    "write_report": "report.page_file",
}

logging.getLogger("polyfed").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("polyfed")
    if name in _HOMES:
        value = getattr(import_module(f"polyfed.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _list_subpackages():
        return import_module(f"polyfed.{name}")
    raise AttributeError(
        f"module 'polyfed' has no attribute {name!r}{'' if name.startswith('_') else _suggest_name(name)}"
    )


def _suggest_name(name: str) -> str:
    """Returns the end of an error, with the place or the nearest name of what was looked for; empty if there is none."""
    near = [
        f"polyfed.{home}.{public_name}"
        for home in ("algorithms", "algorithms.base", "data", "models", "tasks")
        for public_name in _public_names(home)
        if public_name.lower() == name.lower().replace("_", "") or public_name == name
    ] or get_close_matches(name.lower(), __dir__(), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@cache
def _public_names(package: str) -> list[str]:
    """Returns `__all__` of a subpackage as it is written, without importing it, which takes seconds."""
    text = Path(__file__).parent.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8")
    names: list[str] = ast.literal_eval(text.partition("__all__ = ")[2].partition("]")[0] + "]")
    return names


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_list_subpackages()})


@cache
def _list_subpackages() -> list[str]:
    """Returns the packages below this one, and `testing`."""
    return [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
