"""What stands on the pages of methods in the documentation site, made from the code and the measurements.

A page writes `<!-- facts NAME -->`, `<!-- defaults NAME -->`, `<!-- details NAME -->` or `<!-- results NAME -->` where there
shall stand what the dataclass says, its defaults, its section of methods.md, its rows in benchmarks/README.md. So none of it
can be out of date.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tabulate_defaults import SHARED, own_fields, provenance

from polyfed.algorithms import REGISTRY

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BENCHMARKS = "benchmarks.md"
BESIDE = ("local", "fedavg")  # rows to compare a method with
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_MARK = re.compile(r"^<!-- (facts|defaults|details|results) (\w+) -->$", flags=re.MULTILINE)
_CODE = re.compile(r"(^```.*?^```|^(?: {4}|\t).*?$)", flags=re.MULTILINE | re.DOTALL)


def filled(markdown: str) -> str:
    """A page with its marks filled."""
    return _MARK.sub(lambda mark: block(mark[1], mark[2]), markdown)


def block(kind: str, name: str) -> str:
    """What stands in the place of a mark.

    Raises:
        KeyError: no such method.
    """
    return {"facts": facts, "defaults": defaults, "details": details, "results": results}[kind](name)


def facts(name: str) -> str:
    """What a method needs and tells, as its class says for its default hyper-parameters."""
    method = REGISTRY[name]()
    needs = ", ".join(f"`{word}`" for word in sorted(method.requires)) or "nothing"
    tells = ", ".join(sorted(method.discloses)) or "nothing"
    kind = type(method).__name__
    rows = [
        ("name", f"`{name}`"),
        ("class", f"[`polyfed.algorithms.{kind}`][polyfed.algorithms.{kind}]"),
        ("needs of clients", needs),
        ("the server learns", tells),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])


def defaults(name: str) -> str:
    """A table of the fields in which a method differs from plain local training; the others are named below."""
    own = own_fields(name)
    lines = ["| field | default | provenance | meaning |", "|---|---|---|---|"]
    lines += [f"| `{field}` | `{value}` | {provenance(text)} | {text} |" for field, value, text in own]
    rest = [f"`{field}`" for field in SHARED if field not in {field for field, _, _ in own}]
    told = f"As in every method ([local training](../methods.md#local-training)): {', '.join(rest)}."
    return "\n".join([*(lines if own else []), "", told])


def details(name: str) -> str:
    """The section of methods.md that tells of a method."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    for heading, section in re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", text, flags=re.MULTILINE):
        if f"`{name}`" in heading:
            # Written for docs/, read from docs/methods/.
            return outside_code(section.strip(), lambda t: LINK.sub(lambda link: _deeper(link), t))
    raise KeyError(f"docs/methods.md has no section for {name}")


def results(name: str) -> str:
    """The tables of benchmarks/README.md in which a method stands: its rows beside those of `BESIDE`, below what introduces
    the table, and what is said in bold of the method between the tables."""
    found = []
    for title, introduced, header, rows in benchmark_tables():
        owners = _owners(rows)
        if any(f"`{name}`" in cell for cell in _cells(header)[1:]):
            shown = rows
        elif name in owners:
            shown = [row for row, owner in zip(rows, owners, strict=True) if owner in (name, *BESIDE)]
        else:
            continue
        plain, _, script = title.partition(": `")
        script = f" (`{script.split('`')[0]}`)" if script else ""
        ruled = "|" + "---|" * len(_cells(header))
        told = [introduced, ""] if introduced else []
        found.append("\n".join([f"**{plain}**{script}", "", *told, header, ruled, *shown]))
    if not found:
        return "No script of ours has measured it against the others yet."
    told = (
        f"Rows of the tables in [Measured](../{BENCHMARKS}), which tells how each was made and what it does not show."
    )
    return "\n\n".join([told, *found])


def benchmark_tables() -> Iterator[tuple[str, str, str, list[str]]]:
    """Of each table of benchmarks/README.md the heading of its section, a line before it that ends with a colon and
    introduces it (or nothing), its header and its rows."""
    title, lines = "", (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("## "):
            title = line[3:]
        if re.fullmatch(r"\|(?:[-: ]+\|)+", line):
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(row)
            before = "\n".join(lines[: number - 1]).rstrip().split("\n\n")[-1].replace("\n", " ")
            yield title, before if before.endswith(":") and not before.startswith("#") else "", lines[number - 1], rows


def four_spaces(markdown: str) -> str:
    """What belongs to an item of a list, indented by four spaces as Python-Markdown wants it. The documents indent by the
    width of the item's mark, which is enough for CommonMark.

    >>> print(four_spaces("- a\\n\\n  b\\n  - c\\nd"))
    - a
    <BLANKLINE>
        b
    <BLANKLINE>
        - c
    d
    """
    lines: list[str] = []
    items: list[tuple[int, int]] = []  # of the lists that we are in: where the text begins, there and here
    fenced = parted = False  # parted: by an empty line since the last mark
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        listed = bool(items)
        if line.strip() and not fenced:
            while items and indent < items[-1][0]:
                items.pop()
        there, here = items[-1] if items else (0, 0)
        fenced ^= line.lstrip().startswith("```")
        mark = None if fenced or indent - there >= 4 else re.match(r" *(?:[-*+]|\d+\.) +", line)
        if mark and lines and lines[-1].strip() and (parted or not listed):
            lines.append("")  # an item may follow a paragraph at once in CommonMark, and not here
        lines.append(" " * (here - there) + line if line.strip() else line)
        parted = not mark and (parted or not line.strip())
        if mark:
            items.append((mark.end(), here + indent - there + 4))
    return "\n".join(lines)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Changes what of a document is not a block of code."""
    return "".join(part if k % 2 else change(part) for k, part in enumerate(_CODE.split(text)))


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _owners(rows: list[str]) -> list[str]:
    """The method of each row: what its first cell names in code first, without fields; a row that begins with a number is
    another setting of the method before.

    >>> _owners(["| `pfedla`, `hn_lr` 0.5 | 0.9 |", "| **2** (chosen) | 0.8 |", "| alone | 0.7 |"])
    ['pfedla', 'pfedla', '']
    """
    found: list[str] = []
    for row in rows:
        first = _cells(row)[0]
        named = re.match(r"\**`(\w+)[ `]", first)
        continued = found and re.match(r"\**[0-9]", first)
        found.append(named[1] if named else found[-1] if continued else "")
    return found


def _deeper(link: "re.Match[str]") -> str:
    image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    return link[0] if "://" in target else f"{image}[{text}](../{target}{anchor})"
