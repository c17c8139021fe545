"""What is made from the code and the measurements on the pages of methods.

A page holds `<!-- facts NAME -->`, `<!-- defaults NAME -->` or `<!-- results NAME -->`, then what is made, then
`<!-- end -->`: what the class says, its defaults, its rows in benchmarks/notes. `fill_methods.py` writes it into the
pages, so that they can be read in the repository, and a test finds a page that is out of date.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from tabulate_defaults import SHARED, fields_in_common, own_fields, source

from polyfed.algorithms import REGISTRY
from polyfed.core.methods.declared_words import REQUIREMENTS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.append(str(ROOT / "benchmarks"))  # titles of federations
BENCHMARKS = (
    "benchmarks.md"  # the page of benchmarks/README.md; those of benchmarks/notes are in the folder of that name
)
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
COMPARED = ("local", "fedavg")  # rows to compare a method with
LONG = 120  # characters of a meaning that several methods have, from which on their pages link to it
LATER_RUNS = (
    "A gain need not be the difference of the two means: some rows joined the leaderboard later, and their gain is over a "
    "run of training alone on the same machine as theirs ([which](../leaderboard/federations.md))."
)
MACHINE = ("What grows with", "A million", "A deployment over", "README's")  # not about what a method reaches
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_MARK = re.compile(r"^<!-- (facts|defaults|results) (\w+) -->\n(?:(?!<!-- ).*\n)*<!-- end -->$", flags=re.MULTILINE)
_MATH = re.compile(r"^```math\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_ANY_MARK = re.compile(r"^<!-- .* -->\n?", flags=re.MULTILINE)
_CODE = re.compile(r"(^ *```.*?^ *```)", flags=re.MULTILINE | re.DOTALL)


def filled(markdown: str) -> str:
    """A page with everything between its marks made anew."""

    def made(mark: "re.Match[str]") -> str:
        return f"<!-- {mark[1]} {mark[2]} -->\n\n{block(mark[1], mark[2])}\n\n<!-- end -->"

    return _MARK.sub(made, markdown)


def without_marks(markdown: str) -> str:
    """A page as the site shows it.

    >>> without_marks("a\\n<!-- facts local -->\\nb\\n<!-- end -->\\n")
    'a\\nb\\n'
    """
    return _ANY_MARK.sub("", markdown)


def block(kind: str, name: str) -> str:
    """What stands between a pair of marks.

    Raises:
        KeyError: no such method.
    """
    return {"facts": facts, "defaults": defaults, "results": results}[kind](name)


def facts(name: str) -> str:
    """How a method is called, what it needs and discloses by default, and what it was measured to send."""
    method = REGISTRY[name]()
    needs = "; ".join(REQUIREMENTS[word] for word in sorted(method.requires)) or "nothing"
    discloses = ", ".join(sorted(method.discloses)) or "nothing"
    kind = type(method).__name__
    call = f"pf.federate(clients, pf.algorithms.{kind}(), rounds=10"
    rows = [
        ("name", f"`{name}`"),
        ("Python", f"[`{call}{', public=public' * ('public_data' in method.requires)})`]"
                   f"(../api/algorithms.md#polyfed.algorithms.{kind})"),
        ("needs", needs),
        ("discloses to the server", discloses),
        *([("traffic", traffic)] if (traffic := measured_traffic(name)) else []),
    ]  # fmt: skip
    return "\n".join(["| property | value |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])


def measured_traffic(name: str) -> str:
    """Returns the megabytes of a client in a round beside FedAvg's, in the first of these federations of the leaderboard in
    which the method was measured; "" if there is none."""
    for federation, data in (("fashion-1", "Fashion-MNIST"), ("digits-1", "digits"), ("cifar10", "CIFAR-10")):
        measured = _read_json(ROOT / "benchmarks" / "results" / "leaderboard" / f"{federation}.json")
        methods = measured.get("joined", {}).get("methods", {}) | measured["methods"]
        if name in methods:
            own, average = (
                methods[label]["bytes"] / 1e6 / measured["clients"] / measured["rounds"] for label in (name, "fedavg")
            )
            shown = f"{own:#.2g} MB a client and round, both ways, where FedAvg has {average:#.2g}"
            return f"{shown} ([measured](../leaderboard/federations.md), {data})"
    return ""


def defaults(name: str) -> str:
    """A table of the fields in which a method differs from plain local training; the others are named below."""
    shared = [field for field in own_fields(name) if len(field[2]) > LONG and field in fields_in_common()]
    own = [field for field in own_fields(name) if field not in shared]
    lines = ["| field | default | source | meaning |", "|---|---|---|---|"]
    lines += [f"| `{field}` | `{value}` | {source(value, text)} | {text} |" for field, value, text in own]
    listed = ", ".join(f"`{field}: {value}`" for field, value, _ in shared)
    several = f"As in [other methods](../defaults.md#fields-that-several-methods-share): {listed}."
    rest = [f"`{field}`" for field in SHARED if field not in {field for field, _, _ in own_fields(name)}]
    others = f"As in every method ([local training](../methods.md#local-training)): {', '.join(rest)}."
    return "\n".join([*([*lines, ""] if own else []), *([several, ""] if shared else []), others])


def picture(name: str) -> str:
    """Accuracy over examples a client, of the method whose curve that is, if two points of it have been measured."""
    for file in sorted((ROOT / "benchmarks" / "results" / "papers").glob("*-examples.json")):
        curve = json.loads(file.read_text(encoding="utf-8"))
        sizes = sorted(map(int, curve["points"]))
        if curve["own"] == name and len(sizes) > 1:
            image = f"../images/examples_{file.stem.removesuffix('-examples')}.svg"
            listed = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
            return (
                f"![Accuracy of `{name}` and others over the number of training examples a client]({image})\n\n"
                f"Accuracy with {listed} training examples a client; [figures and intervals](../results.md)."
            )
    return ""


def tabulate_gains(name: str) -> str:
    """Returns a table with a method's score and gain over training alone in each federation of the leaderboard and of the
    real sites; "" if there is none, and for training alone itself."""
    from leaderboard_titles import FEDERATIONS, REGIMES
    from multicentre_page import SECTIONS

    pages = [
        ("leaderboard", "leaderboard/federations.md", {**FEDERATIONS, **REGIMES}),
        ("multicentre", "multicentre.md", {key: title for key, (title, _) in SECTIONS.items()}),
    ]
    rows, gains, from_later_runs = [], [], False
    for folder, page, titles in pages:
        for federation, title in titles.items():
            file = ROOT / "benchmarks" / "results" / folder / f"{federation}.json"
            if not file.exists():
                continue
            measured = _read_json(file)
            joined = measured.get("joined", {}).get("methods", {})
            methods = measured["methods"] if name in measured["methods"] else joined  # each with its own `local`
            if name not in methods:
                continue
            from_later_runs |= name in measured.get("joined", {})
            scale, digits = (100, 1) if measured.get("score_unit", measured.get("unit")) == "%" else (1, 3)
            alone, score = (f"{scale * methods[label]['mean']:.{digits}f}" for label in ("local", name))
            gain = _gain_over_local(methods[name])
            gains += [gain] if gain else []
            texts = [f"{scale * value:+.{digits}f}".replace("-", "−") for value in gain]
            shown = f"{texts[0]} ({texts[1]} to {texts[2]})" if gain else ""
            label = measured.get("score_label", measured["score"])
            rows.append(f"| [{title}](../{page}) | {label} | {alone} | {score} | {shown} |")
    if not rows or name == "local":
        return ""
    better, worse = sum(low > 0 for _, low, _ in gains), sum(high < 0 for _, _, high in gains)
    answer = (
        f"**Against training alone** it is better in {better} of {len(gains)} federations, worse in {worse}, and not "
        f"decided in {len(gains) - better - worse}."
    )
    head = ["| federation | score | alone | this method | gain (95 %) |", "|---|---|---|---|---|"]
    return "\n".join([answer, *([LATER_RUNS] if from_later_runs else []), "", *head, *rows])


@cache
def _read_json(file: Path) -> Any:
    """Returns what a file holds, which is read once for all methods."""
    return json.loads(file.read_text(encoding="utf-8"))


def _gain_over_local(row: Mapping[str, Any]) -> list[float]:
    """Returns a method's gain over training alone and its interval, empty if unknown."""
    if "against" in row:
        gain = row["against"].get("local") or {}
        return [gain[key] for key in ("gain", "low", "high")] if gain else []
    return [row["gain"], *row["gain_interval"]] if row.get("gain_interval") else []


def results(name: str) -> str:
    """The curve of a method, its gains over training alone, and the tables of benchmarks/notes in which it stands: its
    rows and those of `COMPARED`, below what introduces the table."""
    found: list[str] = []
    last = ""
    for (note, title, script, introduced, header, rows), owners in _tables_with_owners():
        if title.startswith(MACHINE):
            continue
        if any(f"`{name}`" in cell for cell in _cells(header)[1:]):
            kept = rows
        elif name in owners:
            kept = [row for row, owner in zip(rows, owners, strict=True) if owner in (name, *COMPARED)]
        else:
            continue
        anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))
        linked = f"**[{title}](../../benchmarks/notes/{note}#{anchor})**{f' (`{script}`)' if script else ''}"
        ruled = "|" + "---|" * len(_cells(header))
        before = [*([linked, ""] if linked != last else []), *([introduced, ""] if introduced else [])]
        last = linked
        found.append("\n".join([*before, header, ruled, *kept]))
    drawn = [drawing] if (drawing := picture(name)) else []
    gains = [text for text in (leaderboard_sentence(name), tabulate_gains(name)) if text]
    if not found and not drawn and not gains:
        return "No script in `benchmarks/` has measured it yet."
    if not found:
        return "\n\n".join([*drawn, *gains])
    about = "Rows of tables of the [benchmarks](../../benchmarks/README.md): each title leads to how it was measured."
    return "\n\n".join([*drawn, *gains, about, *found])


def leaderboard_sentence(name: str) -> str:
    """A link to the leaderboard, if a row there is the method's; else nothing."""
    rows = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8").splitlines()
    if not any(row.startswith(f"| `{name}` |") for row in rows):
        return ""
    return (
        f"The [leaderboard](../leaderboard.md) has `{name}` beside the others, on the same federations, with intervals."
    )


@cache
def _tables_with_owners() -> list[tuple[tuple[str, str, str, str, str, list[str]], list[str]]]:
    """Returns each table of `benchmark_tables` with the methods of its rows; notes are read once for all methods."""
    return [(table, _owners(table[-1])) for table in benchmark_tables()]


def benchmark_tables() -> Iterator[tuple[str, str, str, str, str, list[str]]]:
    """Of each table of benchmarks/notes the note, the heading of its section and its first script (or nothing), a line
    before it that ends with a colon and introduces it (or nothing), its header and its rows."""
    for note in NOTES:
        title, script, lines = "", "", note.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.startswith("## "):
                named = re.match(r"Script: \[?(?:recipe )?`([^`]+)`", lines[number + 2])
                title, script = line[3:], named[1] if named else ""
            if re.fullmatch(r"\|(?:[-: ]+\|)+", line):
                rows = list(itertools.takewhile(lambda row: row.startswith("|"), lines[number + 1 :]))
                before = "\n".join(lines[: number - 1]).rstrip().split("\n\n")[-1].replace("\n", " ")
                introduced = before if before.endswith(":") and not before.startswith("#") else ""
                yield note.name, title, script, introduced, lines[number - 1], rows


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


def set_equations(markdown: str, katex: str) -> str:
    """Returns a page whose blocks of LaTeX are set in the browser by KaTeX, which lies in the folder `katex`; a page without
    such a block is returned unchanged.

    >>> set_equations("a\\n```math\\nx < y\\n```\\n", "katex").splitlines()[1]
    '<div class="equation">x &lt; y</div>'
    >>> set_equations("no equation", "katex")
    'no equation'
    """
    text, number = _MATH.subn(
        lambda found: f'<div class="equation">{escape(found[1].strip(), quote=False)}</div>', markdown
    )
    if not number:
        return markdown
    return (
        f'{text}\n\n<link rel="stylesheet" href="{katex}/katex.min.css">\n<script src="{katex}/katex.min.js"></script>\n'
        "<script>for (const place of document.querySelectorAll('.equation'))"
        " katex.render(place.textContent, place, {displayMode: true, throwOnError: false})</script>\n"
    )


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
