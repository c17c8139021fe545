"""Rules of the code base that no type checker knows: who may import whom, and what a start may cost."""

import ast
import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

import polyfed

SOURCE = Path(polyfed.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = (
    "datasets",
    "kornia",
    "sklearn",
    "matplotlib",
    "pandas",
    "scipy",
    "pyarrow",
    "PIL",
    "flwr",
    "ray",
    "sympy",
    "jinja2",
    "torch._dynamo",
)


def name(file):
    return str(file.relative_to(SOURCE))


@cache
def imported(file):
    """Modules that a file imports, at its top or in a function; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}: relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


ROOMS = (
    "core",
    "tasks",
    "data",
    "models",
    "graphs",
    "hypernetworks",
    "alignment",
    "nas",
    "algorithms",
    "simulation",
    "comparison",
    "report",
    "deploy",
    "cli",
    "testing",
)
"""From bottom to top, as in ARCHITECTURE.md: a room imports from itself and from those before it."""


def module(file):
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def room(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


def imports_of(files):
    """The graph of imports of our own modules: module -> modules. `from a import b` is an import of a.b if there is one."""
    names = {module(file): file for file in files}
    graph = {}
    for name, file in names.items():
        found = {one for one in imported(file) if one in names}
        members = {one.rpartition(".")[0] for one in found}
        graph[name] = found - members - {name}  # a package whose member is meant is not an import of its own
    return graph


def upward(graph):
    """Imports of a room above the importer's."""
    return [
        f"{importer} imports {target}"
        for importer, targets in graph.items()
        for target in sorted(targets)
        if room(importer) in ROOMS and (room(target) is None or ROOMS.index(room(target)) > ROOMS.index(room(importer)))
    ]


def cycles(graph):
    """Each module that reaches itself, with the way that it found."""
    found = []
    for start in graph:
        seen, ways = set(), [[start]]
        while ways:
            way = ways.pop()
            for target in sorted(graph.get(way[-1], ())):
                if target == start:
                    found.append(" -> ".join([*way, start]))
                    ways = []
                    break
                if target not in seen:
                    seen.add(target)
                    ways.append([*way, target])
    return found


def test_the_top_has_these_rooms_and_no_others():
    there = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert there - {"__init__", "__main__", "py.typed"} == set(ROOMS)
    assert len(ROOMS) <= 15


def test_imports_run_one_way():
    """Imports in functions and for type checkers count, too."""
    assert upward(imports_of(FILES)) == []


def test_no_module_imports_itself_by_a_detour():
    graph = imports_of(FILES)
    graph.pop("polyfed")  # the public names; no room imports them
    assert cycles(graph) == []


def test_an_import_upwards_and_a_cycle_are_found(tmp_path, monkeypatch):
    """The two tests above can fail."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "polyfed")
    texts = {
        "core/state_dict.py": "def late():\n    from polyfed.core import seeds\n",
        "core/seeds.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from polyfed.data.pool import Pool\n",
        "core/__init__.py": "",
        "data/pool.py": "from polyfed.core.state_dict import Tree\n",
        "data/__init__.py": "",
        "__init__.py": "",
    }
    files = []
    for place, text in texts.items():
        file = tmp_path / "polyfed" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        files.append(file)
    graph = imports_of(files)
    assert upward(graph) == ["polyfed.core.seeds imports polyfed.data.pool"]
    assert "polyfed.core.state_dict -> polyfed.core.seeds -> polyfed.data.pool -> polyfed.core.state_dict" in cycles(
        graph
    )
    assert len(cycles(graph)) == 3


@pytest.mark.parametrize(
    ("package", "allowed"),
    {
        "flwr": {
            "deploy/flower/apps.py",
            "deploy/flower/engine.py",
            "deploy/flower/envelopes.py",
            "deploy/flower/pending_requests.py",
            "deploy/flower/superlink.py",
            "deploy/flower/records.py",
            "deploy/flower/supernode.py",
        },
        "ray": {f"simulation/engines/ray/ray_{name}.py" for name in ("engine", "actor", "cluster", "payload", "sums")},
    }.items(),
)
def test_few_files_know_each_framework(package, allowed):
    users = {
        name(file) for file in FILES if any(one == package or one.startswith(f"{package}.") for one in imported(file))
    }
    assert users == allowed


def test_fit_is_the_only_training_loop():
    """`x.step()` occurs once, in `core/training.fit`; the audit's search for images trains no network."""
    search, steps = ("report/audit/messages/image_inversion.py", "search_images"), []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "step" in text else ():
            if isinstance(function, ast.FunctionDef):
                steps += [
                    (name(file), function.name)
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
                ]
    assert [step for step in steps if step != search] == [("core/training/loop.py", "fit")]


def test_only_tasks_know_the_names_of_tasks():
    """A new task is one file: no other room compares a task's name, or chooses by it.

    Docstrings may name tasks, and so may the requirement of methods that has the same word as a task."""
    names = set(polyfed.tasks.REGISTRY)
    allowed = {
        ("core/tasks/task.py", "classification"), ("core/methods/declared_words.py", "classification"),
        # Numbers that authenticate a message of a secure sum.
        ("deploy/secure_aggregation/client.py", "tokens"), ("deploy/server/secure_rounds.py", "tokens"),
    }  # fmt: skip
    found = set()
    for file in FILES:
        if room(module(file)) in ("tasks", "testing"):
            continue
        text = file.read_text(encoding="utf-8")
        if not any(f'"{word}"' in text for word in names):
            continue
        tree = ast.parse(text)
        requirements = {
            id(word) for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "requires"
            for word in ast.walk(node)
        }  # fmt: skip
        found |= {
            (name(file), node.value) for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in names and id(node) not in requirements
        }  # fmt: skip
    assert found - allowed == set()


def test_core_reaches_tasks_in_one_place():
    """`core` is below `tasks`, and imports it late, by name, to turn a task's name into the task."""
    users = [name(file) for file in FILES if 'import_module("polyfed.tasks")' in file.read_text(encoding="utf-8")]
    assert users == ["core/tasks/task_registry.py"]


def test_the_library_stands_on_its_own():
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert "../shared" not in text, name(file)
        assert "/work/" not in text, name(file)


LONG_METHODS = {
    "fedavg_kd": "a baseline of FLHA-GHN's paper, with two phases and a teacher of the user's own",
    "fedfomo": "examples that are held out, and models that clients ask for",
    "fedhenn": "a paper's method, with schedules, weightings and two ways to share",
    "flha_ghn": "a paper's method, with the graph of every network",
    "knn_per": "a network that holds examples, and the search of their weight",
    "pfedhn": "generates weights for networks of several architectures",
    "pfedla": "a paper's method, with the base of its variant in the same file",
}
"""Methods that may be longer, each with the reason."""
METHODS = sorted(
    file.stem for file in (SOURCE / "algorithms").rglob("*.py") if "card: ClassVar[" in file.read_text("utf-8")
)


def lines_of_code(text):
    """Lines of code as Python counts them, however a line is wrapped, without imports, docstrings and comments."""
    left_out = {
        line for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for line in range(node.lineno, node.end_lineno + 1)
    }  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NEWLINE and token.start[0] not in left_out for token in tokens)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_costs_at_most_seventy_lines(method):
    """On the bases that a contributor has; the methods of `LONG_METHODS` may be longer, and are."""
    text = next((SOURCE / "algorithms").rglob(f"{method}.py")).read_text(encoding="utf-8")
    count = lines_of_code(text)
    if method in LONG_METHODS:
        assert count > 71, f"{method} is short enough: take it out of LONG_METHODS in tests/test_layout.py"
    else:
        assert count <= 71, (  # the card is one of them
            f"{method}.py has {count - 1} lines of code besides its card, and at most 70 are usual: move what other methods "
            "can use into a base, or name it with the reason in LONG_METHODS of tests/test_layout.py"
        )


OVERLONG = {
    "tests/comparison/references/test_reference_models.py": 401,
    "tests/deploy/protocol/test_piggyback.py": 411,
}
"""Files of 400 lines or more, which may only become shorter."""


def test_files_are_short():
    root = Path(__file__).parents[1]
    lengths = {
        file.relative_to(root).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in [*FILES, *Path(__file__).parent.rglob("*.py")]
    }
    assert {file: n for file, n in lengths.items() if n > OVERLONG.get(file, 399)} == {}
    assert [file for file in OVERLONG if lengths[file] < 400] == [], "no longer overlong"


DIGITS = """
import sys
import polyfed
heavy = set({heavy!r})
assert not heavy & set(sys.modules), ("import polyfed", heavy & set(sys.modules))
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.cli.commands.run import run_command
from polyfed.simulation import experiment
config = recipes.load_recipe_configuration("digits")
config.pop("description")
digits = experiment.build_experiment(configuration_parser.parse_configuration([], config, "polyfed run"))
found = experiment.load_participants(digits)
run_command._check_methods_and_models(digits, found)
assert len(found.clients) == 8
assert not heavy & set(sys.modules), ("digits", heavy & set(sys.modules))
from polyfed.testing import small_clients
polyfed.federate(small_clients(), polyfed.algorithms.FedAvg(), rounds=1, workers=0)
assert not heavy & set(sys.modules), ("a round", heavy & set(sys.modules))
"""


@pytest.mark.slow
def test_nothing_heavy_is_imported_for_the_recipe_of_digits():
    """Each of these costs up to seconds; whoever needs one imports it where it is used."""
    code = DIGITS.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_round_is_read_through_few_files_from_top_to_bottom(monkeypatch):
    """From `federate` to `optimizer.step()`: the files of the call stack, as a debugger shows it."""
    from polyfed.algorithms import FedProx
    from polyfed.core.nn import optimizers
    from polyfed.testing import small_clients

    stacks = []

    def step(*_, **__):
        frame, files = sys._getframe(1), []
        while frame is not None:
            place = Path(frame.f_code.co_filename)
            if SOURCE in place.parents and (not files or files[-1] != name(place)):
                files.append(name(place))
            frame = frame.f_back
        stacks.append(files[::-1])

    monkeypatch.setattr(optimizers.SGD, "step", step)
    polyfed.federate(small_clients(), FedProx(), rounds=1, workers=0)
    (files,) = {tuple(files) for files in stacks}
    assert files[0] == "core/io/values/keyword_names.py", "checks the arguments of the call"
    files = files[1:]
    assert files[0] == "simulation/federate.py"
    assert files[-1] == "core/training/loop.py"
    assert len(set(files)) <= 8, files
    rooms = [
        ROOMS.index(file.partition("/")[0])
        for file in files
        if file not in ("core/nn/grad_mode.py", "core/machine/threads.py")
    ]
    assert rooms == sorted(rooms, reverse=True), "a jump back up"
    assert len(files) == len(set(files)), f"a file is entered twice: {files}"
