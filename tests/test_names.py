"""Rules for names (CONTRIBUTING.md, "Style"): a name says what a thing does or holds."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "polyfed"
FILES = sorted(SOURCE.rglob("*.py"))
SAY_NOTHING = {
    "found", "told", "given", "wanted", "asked", "known", "made", "one", "own", "down", "kept", "shown", "seen", "chosen",
    "drawn", "taken", "doing", "played", "of", "what", "wrong", "flaw",
}  # fmt: skip
PARTICIPLE = re.compile(
    r"^[a-z]+(ed|ing)$|^(built|found|given|held|kept|known|made|opened|put|seen|sent|taken|told|written)$"
)
# A property that the public API has, and functions whose word is an adjective of the field.
PARTICIPLES = {
    "skipped": "Comparison.skipped, methods that did not fit",
    "failed": "Comparison.failed, methods that stopped",
    "evaluated": "BringsNetwork.evaluated, which network is evaluated",
}


def local_names(function):
    """Parameters, and names that the function binds itself, without those of functions within it."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            yield argument.arg
    nodes = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        nodes.extend(ast.iter_child_nodes(node))


@cache
def all_definitions():
    """Each function and class of the package, with its file."""
    return [
        (file.relative_to(SOURCE).as_posix(), node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]


def definitions(kind):
    return ((file, node) for file, node in all_definitions() if isinstance(node, kind))


def test_locals_and_parameters_say_what_they_hold():
    nameless = [
        f"{file}:{function.lineno} {function.name}: {name}"
        for file, function in definitions(ast.FunctionDef)
        for name in sorted(SAY_NOTHING.intersection(local_names(function)))
    ]
    assert not nameless, "name a variable by what it holds"


def test_no_public_function_is_a_participle_alone():
    alone = [
        f"{file}:{function.lineno} {function.name}"
        for file, function in definitions(ast.FunctionDef)
        if PARTICIPLE.match(function.name) and function.name not in PARTICIPLES
    ]
    assert not alone, "begin a function's name with a verb, or name the value that it gives"


def test_private_functions_of_a_module_have_two_words():
    """A verb or a noun alone (`_check`, `_sizes`) needs a class around it, which says of what."""
    short = [
        f"{file}:{node.lineno} {node.name}"
        for file, node in definitions(ast.FunctionDef)
        if node.col_offset == 0 and re.fullmatch("_[a-z0-9]+", node.name)
    ]
    assert not short, "say in a function's name what it works on, or what it returns"


def test_docstrings_begin_with_a_verb():
    """With what a function does ("Returns") or a class is for ("Holds"); exceptions say when they are raised."""
    others = [
        f"{file}:{node.lineno} {node.name}: {docstring[:40]}"
        for file, node in all_definitions()
        if (docstring := ast.get_docstring(node)) and not node.name.startswith("test_")
        if not re.match(r"([A-Z][a-z]+s|Raised)\b", docstring)
    ]
    assert not others, "begin with the verb: Returns, Builds, Checks, Holds, ..."


def test_docstrings_say_in_one_line_what_a_function_or_class_is_for():
    """Shapes, errors and further cases stand in paragraphs of their own.

    The command line lists methods, data, networks and samplers by their whole first sentence, which may have more lines.
    """
    listed = {"algorithms": ast.ClassDef, "data": ast.ClassDef, "tasks": ast.ClassDef,
              "simulation/scheduling/sampling": ast.ClassDef, "models": ast.FunctionDef | ast.ClassDef}  # fmt: skip
    long = [
        f"{file}:{node.lineno} {node.name}"
        for file, node in all_definitions()
        if (docstring := ast.get_docstring(node)) and "\n" in docstring.partition("\n\n")[0]
        if not any(file.startswith(f"{room}/") and isinstance(node, kind) for room, kind in listed.items())
    ]
    assert not long, "shorten the first sentence to one line, and put the rest below"


def test_the_exceptions_are_needed():
    names = {function.name for _, function in definitions(ast.FunctionDef)}
    assert names >= PARTICIPLES.keys()


def test_no_two_classes_have_one_name():
    counts = Counter(node.name for _, node in definitions(ast.ClassDef) if not node.name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(own, *, x=1):\n    found = own", {"own", "x", "found"}),
        ("def f():\n    return [one for one in ()]", {"one"}),
        ("def f():\n    def g():\n        made = 1", set()),
    ],
)
def test_what_counts_as_a_local_name(text, names):
    assert set(local_names(ast.parse(text).body[0])) == names
