"""The words of a site (`flower-supernode --node-config`) and its `site.py`, without executing that."""

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import nearest
from polyfed.core.files import read_file
from polyfed.deploy.doctor import Findings, note, ok, wrong
from polyfed.deploy.doctor.machine import readable
from polyfed.deploy.project import NAME

WORDS: Mapping[str, type | tuple[type, ...]] = {
    "client-id": str, "site": str, "state-dir": str, "disclose": str, "allow-disclosure": bool, "methods": str,
    "device": str, "data-set": str, "loss": str, "secure": bool, "key": str, "peers": str,
    "secure-threshold": int, "clip-norm": (int, float),
    "noise-multiplier": (int, float), "delta": (int, float), "max-epsilon": (int, float), "partition-id": int,
    "num-partitions": int,
}  # fmt: skip
"""The words that `polyfed.deploy.node` knows, and Flower's own."""
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # as Flower reads them


def words_of(text: str) -> dict[str, Any]:
    """The words of `--node-config`, as Flower reads them.

    Raises:
        ValueError: they are none.

    >>> words_of('client-id="north" secure=true')
    {'client-id': 'north', 'secure': True}
    """
    return tomllib.loads("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text)))


def check_words(part: str, words: Mapping[str, Any]) -> Findings:
    """Whether a site's words are known, of their types, and fit one another."""
    found = False
    for word in (word for word in ("client-id", "site", "state-dir") if not words.get(word)):
        found = True
        yield wrong(
            part, f'node-config lacks {word}; \'client-id="north" site="/path/site.py" state-dir="/path/state"\''
        )
    for word, value in words.items():
        if word not in WORDS:
            found = True
            yield wrong(part, f"node-config has no {word!r}; {nearest(word, WORDS)}")
        elif not isinstance(value, WORDS[word]) or (isinstance(value, bool) and WORDS[word] is not bool):
            found = True
            yield wrong(
                part,
                f"node-config: {word} = {value!r} is of another type; write true, false, a number, or text in quotes",
            )
    if (name := words.get("client-id")) and not NAME.fullmatch(str(name)):
        found = True
        yield wrong(part, f"node-config: client-id = {name!r} is no name; letters, digits, '-', '_' and '.'")
    if words.get("secure") and not (words.get("key") and words.get("peers")):
        found = True
        yield wrong(
            part,
            'node-config: secure=true needs key="/path/site.key" and peers="/path/keys", a folder with NAME.pub of '
            "every site",
        )
    if words.get("noise-multiplier") and not words.get("clip-norm"):
        found = True
        yield wrong(part, "node-config: noise-multiplier needs clip-norm, the norm to which a change is limited")
    if words.get("noise-multiplier") and words.get("disclose"):
        found = True
        yield wrong(part, "node-config: with noise-multiplier no numbers may leave the site; take disclose out")
    if not found:
        yield ok(part, f"node-config of {words['client-id']!r} can be read")


def check_site_file(part: str, file: Path) -> Findings:
    """Whether `site.py` can be parsed and defines `client()`; it is not executed."""
    yield from check_functions(part, file, {"client": "a site's network and data"})


def check_functions(part: str, file: Path, wanted: Mapping[str, str]) -> Findings:
    """Whether a Python file defines functions, without executing it; `wanted` says what each is for."""
    if unreadable := readable(part, file):
        yield unreadable
        return
    try:
        body = ast.parse(read_file(file), str(file)).body
    except (SyntaxError, ValueError) as error:
        yield wrong(part, f"{file} is no Python: {error}")
        return
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    names |= {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    lacking = [name for name in wanted if name not in names]
    for name in lacking:
        yield wrong(part, f"{file} does not define {name}(), {wanted[name]}")
    if wanted and not lacking:
        yield ok(part, f"{file} defines {', '.join(f'{name}()' for name in wanted)}")
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in body):
        yield note(part, f"{file} calls functions when it is read, for each message again; keep that short")
