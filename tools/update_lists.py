"""Writes every list of methods from what the methods' own files declare (`polyfed.core.methods.method_card.MethodCard`).

    python tools/update_lists.py                 all lists; facts of new methods' traffic are recorded
    python tools/update_lists.py fedgen ...      the same, and the traffic of these methods is recorded anew
    python tools/update_lists.py --check         names the files that are out of date, and writes none

Run it after a method is added, renamed or removed, or its card, fields, requirements or disclosures change.
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "polyfed" / "algorithms"
COMMAND = "python tools/update_lists.py"
START, END = f"<!-- methods: written by {COMMAND} -->", "<!-- end of methods -->"
YAML_MARK = f"# written by {COMMAND}"


@dataclass(frozen=True)
class Declared:
    """One method as its file declares it.

    Args:
        name: its name in the registry.
        family: the folder of `algorithms` in which its file lies.
        import_path: the path of its module below `polyfed.algorithms`, such as "personalised.mixtures.apfl".
        class_name: the name of its class.
    """

    name: str
    family: str
    import_path: str
    class_name: str

    @property
    def module(self) -> str:
        """Returns the name of its file, without the ending."""
        return self.import_path.rpartition(".")[2]


def find_methods(source: Path = SOURCE) -> list[Declared]:
    """Finds the methods: classes with a card in the files below `algorithms/FAMILY`. They are ordered by family and name.
    Nothing is imported, since a new method is not in the registry yet.

    Raises:
        SystemExit: two methods have one name, or a card has no name.
    """
    methods: list[Declared] = []
    for file in sorted(source.glob("*/**/*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(part, ast.AnnAssign) and getattr(part.target, "id", "") == "card":
                    words = {word.arg: word.value for word in getattr(part.value, "keywords", ())}
                    if not isinstance(words.get("name"), ast.Constant):
                        raise SystemExit(f'{file}: the card of {node.name} needs name="..." as a literal')
                    path = file.relative_to(source).with_suffix("").parts
                    methods.append(Declared(words["name"].value, path[0], ".".join(path), node.name))
    names = [method.name for method in methods]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"two methods are called {twice[0]!r}: give each card a name of its own")
    return sorted(methods, key=lambda method: (method.family, method.name))


# -- what needs no import of polyfed ----------------------------------------------------------------------------------


def registry_module(text: str, methods: Sequence[Declared]) -> str:
    """Returns `algorithms/__init__.py` with the imports, `REGISTRY` and `__all__` of these methods."""
    by_module: dict[str, list[str]] = {}
    for method in methods:
        by_module.setdefault(method.import_path, []).append(method.class_name)
    imports = "".join(
        f"from polyfed.algorithms.{module} import {', '.join(sorted(by_module[module]))}\n"
        for module in sorted(by_module)
    )
    entries = "".join(f'    "{method.name}": {method.class_name},\n' for method in methods)
    exported = ["REGISTRY", "get", "names", "registry_name", *(method.class_name for method in methods)]
    exported.sort(key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))
    text = re.sub(r"(?:from polyfed\.algorithms\.[^\n]*\n)+", lambda _: imports, text, count=1)
    text = re.sub(r"(?<=\nREGISTRY: dict\[str, type\[Algorithm\[Any, Any\]\]\] = \{\n).*?(?=\}\n)", lambda _: entries, text,
                  count=1, flags=re.DOTALL)  # fmt: skip
    listed = textwrap.indent(textwrap.fill(", ".join(f'"{name}"' for name in exported) + ",", 115), "    ") + "\n"
    return re.sub(r"(?<=\n__all__ = \[\n).*?(?=\])", lambda _: listed, text, count=1, flags=re.DOTALL)


def navigation(text: str, methods: Sequence[Declared]) -> str:
    """Returns `mkdocs.yml` with a page for each file of methods, by family."""
    lines = []
    for family, members in by_family(methods).items():
        lines.append(f"      - {family_title(family)}:\n")
        pages: dict[str, list[str]] = {}
        for method in sorted(members, key=lambda method: (method.module, len(method.name))):
            pages.setdefault(method.module, []).append(method.name)
        lines += [f"          - {', '.join(names)}: methods/{page}.md\n" for page, names in pages.items()]
    return between(text, "      - methods.md\n", "      - All defaults: defaults.md\n", "".join(lines))


def reference(text: str, methods: Sequence[Declared]) -> str:
    """Returns `docs/api/algorithms.md` with the class of each method."""
    entries = "".join(f"::: polyfed.algorithms.{m.class_name}\n    options: {{members: false}}\n" for m in methods)
    return text[: text.index("::: ")] + entries


def by_family(methods: Sequence[Declared]) -> dict[str, list[Declared]]:
    """Returns the methods of each family, both in order."""
    families: dict[str, list[Declared]] = {}
    for method in methods:
        families.setdefault(method.family, []).append(method)
    return families


def family_title(family: str) -> str:
    """Returns a family's name for people.

    >>> family_title("partial_sharing"), family_title("nas")
    ('Partial sharing', 'NAS')
    """
    return family.upper() if len(family) == 3 else family.replace("_", " ").capitalize()


def between(text: str, start: str, end: str, content: str) -> str:
    """Returns a text with this content between the first `start` and the `end` that follows it."""
    before, found, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"a document has no {start.strip()!r} with {end.strip()!r} after it; put them back")
    return f"{before}{start}{content}{end}{after}"


# -- what is asked of the classes -------------------------------------------------------------------------------------


def architectures_of(method: Any) -> str:
    """Returns in a few words which architectures the clients of a method may have."""
    if "images" in method.requires:
        return "the method's own, for images"
    if "one_architecture" in method.requires:
        return "one"
    if "one_family" in method.requires:
        return "one, of different widths"
    return "any, with one width" if "one_representation" in method.requires else "any"


def methods_page(text: str, methods: Sequence[Declared]) -> str:
    """Returns `docs/methods.md` with a table for each family."""
    registry, parts = load_registry(), []
    for family, members in by_family(methods).items():
        package = ast.parse((SOURCE / family / "__init__.py").read_text(encoding="utf-8"))
        sentence = " ".join((ast.get_docstring(package) or "").split()).removeprefix("Provides ")
        lines = [f"### {family_title(family)}", "", sentence[:1].upper() + sentence[1:], "",
                 "| name | what it does | architectures | evaluated model |", "|---|---|---|---|"]  # fmt: skip
        for declared in members:
            method = registry[declared.name]
            paper = f" ({method.card.paper})" if method.card.paper else ""
            lines.append(
                f"| [`{declared.name}`](methods/{declared.module}.md) | {method.card.summary}{paper} | "
                f"{architectures_of(method)} | {method.card.evaluated} |"
            )
        parts.append("\n".join(lines))
    return between(text, START, END, "\n\n" + "\n\n".join(parts) + "\n\n")


def with_count(text: str, methods: Sequence[Declared]) -> str:
    """Returns a page with the number of methods."""
    return re.sub(r"polyfed has \d+(\s+)methods", rf"polyfed has {len(methods)}\1methods", text)


def configuration_page(text: str, methods: Sequence[Declared]) -> str:
    """Returns `docs/configuration/engines.md` with the methods that a cohort trains together."""
    registry = load_registry()
    stacked, others = (
        ", ".join(f"`{method.name}`" for method in methods if registry[method.name].card.stacked is value)
        for value in (True, False)
    )
    sentence = (f"- **Together** are trained: {stacked}, and each method of yours that calls `fit` with `PerClientTerm` "
                f"terms or none. The others ({others}) are trained one by one, as always.")  # fmt: skip
    start, end = "- **Together** are trained:", "\n- **FedHeNN** aligns"
    return between(text, start, end, wrapped(sentence, "  ", 150).removeprefix(start))


def disclosure_page(text: str, methods: Sequence[Declared], recorded: Sequence[str] = ()) -> str:
    """Returns `docs/deploy/who_learns_what.md` with the methods that disclose weights, and a row of the table of traffic for
    each method; the traffic of a method without a row, and of those in `recorded`, is recorded."""
    import tabulate_traffic

    registry = load_registry()
    table, _, rest = text.partition("## Checked on replies")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    (weights_row,) = (line for line in rows if "| **weights**: what training on its data makes of a network" in line)
    elsewhere = {name for line in rows if line != weights_row for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    names = [method.name for method in methods if method.name not in elsewhere]
    if strange := [name for name in names if "weights" not in registry[name]().discloses]:
        raise SystemExit(f"{DISCLOSURES}: say in the first table what `{strange[0]}` shows the server and other sites")
    first_cell = ", ".join(f"`{name}`" for name in names)
    table = table.replace(weights_row, f"| {first_cell} |" + weights_row.split(" |", 1)[1])
    return tabulate_traffic.updated(table + _ + rest, recorded)


def secure_sums_page(text: str, methods: Sequence[Declared]) -> str:
    """Returns `docs/deploy/secure_sums.md` with the methods that have secure sums."""
    from polyfed.simulation.rounds.replies.secure_aggregation import supports_secure_sum

    registry = load_registry()
    summing = ", ".join(f"`{method.name}`" for method in methods if supports_secure_sum(registry[method.name]()))
    mean = re.compile(r"(?<=for methods whose server half is a mean: ).*?(?=; with an option)", flags=re.DOTALL)
    return mean.sub(lambda _: wrapped(summing, "", 150), text, count=1)


def asynchronous_page(text: str, methods: Sequence[Declared]) -> str:
    """Returns `docs/asynchronous.md` with the methods that FedBuff takes, and those of them that FedAsync does not."""
    import polyfed as pf
    from polyfed.simulation.checks.settings.scheduling import supports_asynchronous

    def able(rule: Any) -> list[str]:
        return [method.name for method in methods if supports_asynchronous(registry[method.name](), rule)]

    registry = load_registry()
    buffered, mixed = able(pf.FedBuff()), able(pf.FedAsync())
    names = ", ".join(f"`{name}`" for name in buffered)
    excluded = ", ".join(f"`{name}`" for name in buffered if name not in mixed)
    text = re.sub(
        r"(?<=mean of clients' weights, of which it holds an earlier version: ).*?(?=\. With)", lambda _: names, text
    )
    return re.sub(r"(?<=makes a step of its own \().*?(?=\))", lambda _: excluded, text)


def leaderboard(text: str, methods: Sequence[Declared]) -> str:
    """Returns the recipe `leaderboard` with the methods that suit each variant."""
    registry, recipe = load_registry(), yaml.safe_load(text)
    lines, variant = [], ""
    written: set[str] = set()
    pending = text.splitlines(keepends=True)
    while pending:
        line = pending.pop(0)
        if line == "variants:\n":
            variant = "?"
        elif variant and (key := re.match(r"  ([\w.-]+):", line)):
            variant = key[1]
        lines.append(line)
        if "baselines:" in line and YAML_MARK in line:
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            while pending and pending[0].startswith(indent):
                pending.pop(0)
            lines.append(flow_list(suiting(registry, recipe, variant, methods), indent))
            written.add(variant)
    common = suiting(registry, recipe, "", methods)
    for name in recipe["variants"]:
        if name not in written and suiting(registry, recipe, name, methods) != common:
            raise SystemExit(f"cli/recipes/leaderboard.yaml: write `    baselines:  {YAML_MARK}` into the variant {name!r}, "
                             "whose methods are others")  # fmt: skip
    return "".join(lines)


def suiting(
    registry: Mapping[str, Any], recipe: Mapping[str, Any], variant: str, methods: Sequence[Declared]
) -> list[Any]:
    """Returns the methods that suit a variant of the recipe `leaderboard`, with their hyper-parameters; "" is the base."""
    several = isinstance((recipe["variants"].get(variant) or {}).get("model"), list)
    entries: list[Any] = []
    for declared in methods:
        method = registry[declared.name]
        chosen = method.card.fields_of_leaderboard_variant(variant)
        if chosen is not None and not (several and "one_architecture" in method.requires):
            entries.append({"name": declared.name, **chosen} if chosen else declared.name)
    return entries


def flow_list(entries: Sequence[Any], indent: str) -> str:
    """Returns a list as lines of YAML, wrapped between its entries."""
    style = {"default_flow_style": True, "width": 10**6, "sort_keys": False}
    parts = [yaml.safe_dump(entry, **style).splitlines()[0] for entry in entries]
    unbroken = ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)
    return wrapped(f"[{unbroken}]", indent, 118, first=indent).replace("\N{NO-BREAK SPACE}", " ") + "\n"


def wrapped(text: str, indent: str, width: int, first: str = "") -> str:
    """Returns a text in lines of at most so many characters."""
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def load_registry() -> Mapping[str, Any]:
    """Returns `polyfed.algorithms.REGISTRY`."""
    from polyfed.algorithms import REGISTRY

    return REGISTRY


def defaults_page(text: str, methods: Sequence[Declared]) -> str:
    """Returns `docs/defaults.md`."""
    import tabulate_defaults

    return tabulate_defaults.table()


def method_page(text: str, methods: Sequence[Declared]) -> str:
    """Returns a page in `docs/methods/` with facts, defaults and results."""
    import site_blocks

    return site_blocks.filled(text)


DISCLOSURES = "docs/deploy/who_learns_what.md"
STATIC: Mapping[str, Callable[[str, Sequence[Declared]], str]] = {
    "src/polyfed/algorithms/__init__.py": registry_module,
    "mkdocs.yml": navigation,
    "docs/api/algorithms.md": reference,
}
"""The files that can be written before polyfed knows a new method."""

LISTS: Mapping[str, Callable[[str, Sequence[Declared]], str]] = {
    "README.md": with_count,
    "docs/index.md": with_count,
    "docs/methods.md": methods_page,
    "docs/configuration/engines.md": configuration_page,
    DISCLOSURES: disclosure_page,
    "docs/deploy/secure_sums.md": secure_sums_page,
    "docs/asynchronous.md": asynchronous_page,
    "docs/defaults.md": defaults_page,
    "src/polyfed/cli/recipes/leaderboard.yaml": leaderboard,
}


def update(recorded: Sequence[str] = (), check: bool = False) -> list[str]:
    """Writes the lists, and returns the files that were out of date."""
    methods, changed = find_methods(), []
    for group in (STATIC, None):
        if group is None:
            sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "src")]
            pages = {f"docs/methods/{method.module}.md": method_page for method in methods}
            group = {**LISTS, DISCLOSURES: lambda t, m: disclosure_page(t, m, recorded), **pages}
        for name, write in group.items():
            file = ROOT / name
            if not file.exists():
                raise SystemExit(f"{name} is missing: write it; `python tools/new_method.py` begins one")
            text = file.read_text(encoding="utf-8")
            made = write(text, methods)
            if made != text:
                changed.append(name)
                if not check:
                    file.write_text(made, encoding="utf-8")
    return changed


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="methods whose traffic is recorded anew")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file is out of date")
    given = parser.parse_args()
    changed = update(given.names, given.check)
    if changed:
        print(("out of date: " if given.check else "written: ") + ", ".join(changed))
    return int(bool(changed) and given.check)


if __name__ == "__main__":
    sys.exit(main())
