"""Checks a site's node configuration (`flower-supernode --node-config`) and its `site.py`, without executing `site.py`."""

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import did_you_mean
from polyfed.core.io.atomic_files import read_file
from polyfed.deploy.doctor import Findings, note_finding, ok_finding, problem_finding
from polyfed.deploy.doctor.machine import finding_if_unreadable
from polyfed.deploy.trial.project import SITE_NAME_PATTERN

NODE_CONFIG_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "client-id": str, "site": str, "state-dir": str, "disclose": str, "allow-disclosure": bool, "methods": str,
    "device": str, "data-set": str, "loss": str, "secure": bool, "key": str, "peers": str,
    "secure-threshold": int, "clip-norm": (int, float),
    "noise-multiplier": (int, float), "delta": (int, float), "max-epsilon": (int, float), "partition-id": int,
    "num-partitions": int,
}  # fmt: skip
"""The keys that `polyfed.deploy.site.process.node_config` knows, and Flower's own, with their types."""
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # the pattern that Flower uses


def parse_node_config(text: str) -> dict[str, Any]:
    """Parses the text of Flower's option `--node-config` (key=value pairs), as Flower does, into a dict.

    Raises:
        ValueError: a value is not valid.

    >>> parse_node_config('client-id="north" secure=true')
    {'client-id': 'north', 'secure': True}
    """
    return tomllib.loads("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text)))


def check_node_config(component: str, node_config: Mapping[str, Any]) -> Findings:
    """Yields a problem for each key that is missing, unknown, of a wrong type, or contradicts another."""
    problems = [*_node_config_problems(component, node_config)]
    yield from problems
    if node_config.get("max-epsilon") and not node_config.get("noise-multiplier"):
        yield note_finding(
            component,
            "node-config: max-epsilon without noise-multiplier is the budget of each example or patient; this site takes "
            "part in runs with algorithm.privacy only",
        )
    if not problems:
        yield ok_finding(component, f"node-config of {node_config['client-id']!r} can be read")


def _node_config_problems(component: str, node_config: Mapping[str, Any]) -> Findings:
    for word in (word for word in ("client-id", "site", "state-dir") if not node_config.get(word)):
        yield problem_finding(
            component, f'node-config lacks {word}; \'client-id="north" site="/path/site.py" state-dir="/path/state"\''
        )
    for word, value in node_config.items():
        if word not in NODE_CONFIG_TYPES:
            yield problem_finding(component, f"node-config has no {word!r}; {did_you_mean(word, NODE_CONFIG_TYPES)}")
        elif not isinstance(value, NODE_CONFIG_TYPES[word]) or (
            isinstance(value, bool) and NODE_CONFIG_TYPES[word] is not bool
        ):
            yield problem_finding(
                component,
                f"node-config: {word} = {value!r} is of another type; write true, false, a number, or text in quotes",
            )
    if (name := node_config.get("client-id")) and not SITE_NAME_PATTERN.fullmatch(str(name)):
        yield problem_finding(
            component, f"node-config: client-id = {name!r} is not a name; letters, digits, '-', '_' and '.'"
        )
    if node_config.get("secure") and not (node_config.get("key") and node_config.get("peers")):
        yield problem_finding(
            component,
            'node-config: secure=true needs key="/path/site.key" and peers="/path/keys", a folder with NAME.pub of '
            "every site",
        )
    if node_config.get("noise-multiplier") and not node_config.get("clip-norm"):
        yield problem_finding(
            component, "node-config: noise-multiplier needs clip-norm, the norm to which a change is limited"
        )
    if node_config.get("noise-multiplier") and node_config.get("disclose"):
        yield problem_finding(
            component, "node-config: with noise-multiplier no numbers may leave the site; take disclose out"
        )
    protects_units = node_config.get("max-epsilon") and not node_config.get("noise-multiplier")
    disclosed = {word.strip() for word in str(node_config.get("disclose", "")).split(",")}
    if protects_units and (uncovered := sorted(disclosed & {"look", "errors", "seconds"})):
        words = " or ".join(uncovered)
        yield problem_finding(
            component, f"node-config: with max-epsilon no {words} may leave the site; take it out of disclose"
        )


def check_site_file_defines_client(component: str, file: Path) -> Findings:
    """Yields findings on whether `site.py` is valid and defines `client`, without executing it."""
    yield from check_file_defines_functions(component, file, {"client": "a site's network and data"})


def check_file_defines_functions(component: str, file: Path, purpose_by_function: Mapping[str, str]) -> Findings:
    """Yields whether a file is valid Python and defines these functions, without executing it.

    Args:
        component: `DoctorFinding.component`.
        file: the Python file.
        purpose_by_function: the purpose of each required function, for the finding.
    """
    if unreadable := finding_if_unreadable(component, file):
        yield unreadable
        return
    try:
        body = ast.parse(read_file(file), str(file)).body
    except (SyntaxError, ValueError) as error:
        yield problem_finding(component, f"{file} is not Python: {error}")
        return
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    names |= {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    lacking = [name for name in purpose_by_function if name not in names]
    for name in lacking:
        yield problem_finding(component, f"{file} does not define {name}(), {purpose_by_function[name]}")
    if purpose_by_function and not lacking:
        yield ok_finding(component, f"{file} defines {', '.join(f'{name}()' for name in purpose_by_function)}")
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in body):
        yield note_finding(
            component, f"{file} calls functions when it is read, for each message again; keep that short"
        )
