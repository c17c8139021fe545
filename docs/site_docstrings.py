"""Docstrings as the documentation site reads them (an extension of Griffe, see mkdocs.yml).

polyfed's docstrings tell of several parameters in one entry (`rounds, seed: see ...`) and of attributes in a sentence
(`Attributes: `id`; ...`), and end in an example without a heading. Griffe reads one name an entry, drops what it cannot
read, and takes the example for text; here entries are divided and examples marked as code, so that nothing is lost and
everything else that it complains of is a real mistake.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"^(\s*)(Args|Raises|Returns|Yields):\s*$")
_SENTENCE = re.compile(r"^(\s*)Attributes: (?=\S)")


def readable(text: str) -> str:
    """The docstring with one parameter an entry, and without a section where a sentence was meant.

    >>> print(readable("Does.\\n\\nArgs:\\n    a, b: both.\\n    c: one."))
    Does.
    <BLANKLINE>
    Args:
        a: both.
        b: both.
        c: one.
    """
    lines: list[str] = []
    entry: list[str] = []  # the lines of the parameter that is being read
    indent = None  # of the entries, inside Args
    for line in text.split("\n"):
        heading = _SECTION.match(line)
        if indent is not None and (heading or (line.strip() and not line.startswith(indent))):
            lines += _divided(entry, indent)
            entry, indent = [], None
        if heading and heading[2] == "Args":
            indent = heading[1] + "    "
            lines.append(line)
        elif indent is None:
            lines.append(_SENTENCE.sub(r"\1**Attributes:** ", line))
        elif line.startswith(indent + " ") or not line.strip() or _unfinished(entry):
            entry.append(line)
        else:
            lines += _divided(entry, indent)
            entry = [line]
    lines += _divided(entry, indent or "")
    return "\n".join(_fenced(lines))


def _unfinished(entry: list[str]) -> bool:
    """Whether the names of an entry go on in its next line."""
    return bool(entry) and not any(":" in line for line in entry)


def _divided(entry: list[str], indent: str) -> Iterator[str]:
    """One entry for each name of a parameter's entry, all with the whole description."""
    names, colon, told = "\n".join(entry).partition(":")
    if not colon:
        yield from entry
        return
    end = len(told.rstrip())
    for name in names.split(","):
        yield f"{indent}{name.strip()}:{told[:end]}"
    if told[end:]:
        yield told[end:].removeprefix("\n")


def _fenced(lines: Iterable[str]) -> Iterator[str]:
    """Examples, from `>>>` to the next empty line, as blocks of code."""
    within = ""
    for line in lines:
        if not within and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            within = f"{indent}```"
            yield f"{within}pycon"
        elif within and not line.strip():
            yield within
            within = ""
        yield line
    if within:
        yield within


class OneNameAnEntry(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """For every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
