"""Advice in errors and warnings: the argument in Python, the option in the terminal, and both where it is stored."""

import ast
import copy
import re
from pathlib import Path

import pytest

import polyfed
from polyfed.cli.main import main
from polyfed.core.errors import ClientError, UserError, warn_of_data
from polyfed.core.io.text.advice import keep_advice_for_python, keep_advice_for_terminal, keep_options_in_errors
from polyfed.data.sources.table_file import TableFile

_SOURCES = Path(polyfed.__file__).parent
_OPTION = re.compile(r"(?<![\w-])--[a-z]")
# An argument with a value, and an option within a few words after it.
_PAIR = re.compile(r"\w=(?!=)\S*,? ?(?:\(|or |\(or |or \(|in the terminal |and )?--[a-z]")


def _texts(tree):
    """Returns the strings of a file but for its docstrings; a computed part is `x`."""
    parents = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {
        id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, parents) and isinstance(n.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
            yield "".join(value.value if isinstance(value, ast.Constant) else "x" for value in node.values)
    yield from (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in skipped)


def test_every_sentence_that_names_an_argument_and_its_option_has_the_form_that_is_parted():
    texts = [
        text
        for path in _SOURCES.rglob("*.py")
        if path.relative_to(_SOURCES).parts[0] not in ("cli", "deploy")
        if _OPTION.search(source := path.read_text())
        for text in _texts(ast.parse(source))
        if isinstance(text, str) and _OPTION.search(text)
    ]
    pairs = [text for text in texts if keep_advice_for_python(text) != text]
    assert len(pairs) > 60  # so that this test reads what it is to read
    whole = [text for text in pairs if _OPTION.search(keep_advice_for_python(text))]
    assert whole == [], "Python would show an option here: write argument=... (--option)"
    assert all(_OPTION.search(keep_advice_for_terminal(text)) for text in pairs)
    unparted = [text for text in texts if _PAIR.search(text) and keep_advice_for_python(text) == text]
    assert unparted == [], "write argument=... (--option)"


def test_an_error_names_the_argument_in_python_and_the_option_in_the_terminal(tmp_path, capsys):
    text = "the column 'age' is empty; leave it out (drop='age', --data.drop age)"
    in_python = "the column 'age' is empty; leave it out (drop='age')"
    assert str(UserError(text)) == in_python
    assert str(ClientError(2, "north", "local", text)) == f"round 2, client 'north', phase 'local': {in_python}"
    with pytest.warns(UserWarning, match=re.escape(in_python) + "$") as warned:
        warn_of_data(text)
    assert Path(warned[0].filename) == Path(__file__)  # the line of the user, not one inside of polyfed
    with keep_options_in_errors():
        error = UserError(text)
        assert str(error) == str(UserError(error)) == text  # whoever prints or stores it chooses
    assert str(copy.copy(error)) == in_python  # as one that a worker process has sent

    (tmp_path / "t.csv").write_text("a,b,y\n1,2,n\n2,3,p\n")
    with pytest.raises(UserError, match=r"give target=\.\.\. with the column to predict"):
        TableFile(str(tmp_path / "t.csv")).load()
    assert main(["look", "table", "--data.path", str(tmp_path / "t.csv"), "--data.site", "a"]) == 2
    assert "give --data.target with the column to predict" in capsys.readouterr().err


@pytest.mark.parametrize(("room", "ask"), [("algorithms", "get"), ("models", "ModelSpec")])
def test_a_wrong_name_is_told_where_the_names_are_listed_in_python_and_in_the_terminal(room, ask):
    package = getattr(polyfed, room)
    assert set(package.names()) == set(getattr(package, "REGISTRY" if room == "algorithms" else "MODELS"))
    with pytest.raises(UserError, match=rf"All \d+: polyfed\.{room}\.names\(\)(\. |$)"):
        getattr(package, ask)("fedprx", *[{}, (1,), 2] * (room == "models"))
    with keep_options_in_errors(), pytest.raises(UserError) as error:
        getattr(package, ask)("fedprx", *[{}, (1,), 2] * (room == "models"))
    assert f"polyfed list {room}" in keep_advice_for_terminal(str(error.value))
    assert "names()" not in keep_advice_for_terminal(str(error.value))
