"""What a start may cost: names are imported when they are used, and nothing imports torch before it must."""

import ast
import inspect
import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import polyfed as pf


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_import_polyfed_imports_neither_torch_nor_anything_heavy():
    code = (
        "import sys, polyfed; print(*sorted({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = in_a_new_process(code)
    assert done.returncode == 0, done.stderr
    assert [name for name in done.stdout.split() if not name.startswith("_")] == ["polyfed"]


def test_the_public_names_are_those_that_type_checkers_see():
    """One list for type checkers, one for `import *`, one of places: the same names, and the same things."""
    tree = ast.parse(Path(pf.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in checked.body for alias in node.names}
    assert sorted(seen) == pf.__all__ == sorted(pf.__all__)
    for name, module in seen.items():
        wanted = import_module("polyfed.algorithms") if name == "algorithms" else getattr(import_module(module), name)
        assert getattr(pf, name) is wanted
    assert set(pf.__all__) <= set(dir(pf))
    rooms = {path.name.removesuffix(".py") for path in Path(pf.__file__).parent.iterdir() if path.name[0] != "_"}
    assert set(dir(pf)) <= {*pf.__all__, "__version__", *rooms}


def test_what_a_public_function_returns_can_be_annotated():
    functions = [getattr(pf, name) for name in pf.__all__ if inspect.isfunction(getattr(pf, name))]
    hints = [get_type_hints(function)["return"] for function in functions]
    returned = {kind for hint in hints for kind in get_args(hint) or [hint] if kind.__module__.startswith("polyfed.")}
    assert {kind.__name__ for kind in returned} >= {"Comparison", "Look", "Run", "SavedRun"}
    assert [kind.__name__ for kind in returned if getattr(pf, kind.__name__, None) is not kind] == []


EVERY_WAY = """
import pickle, sys
import polyfed as pf
assert not hasattr(pf, "fedrate")
assert "torch" not in sys.modules
assert pf.UserError and pf.algorithms.FedAvg and pf.nas.operations and pf.testing.AlgorithmContract
assert "torch" in sys.modules
from polyfed import Client, federate
from polyfed import *
import polyfed.models.mlp
assert polyfed.Client is Client is pf.Client and algorithms is pf.algorithms
print(pickle.loads({content!r})[2].lr)
"""


@pytest.mark.slow
def test_names_can_be_reached_in_every_way_and_classes_pickled_from_one_process_to_another():
    content = pickle.dumps((pf.Message({}), pf.Client, pf.algorithms.FedAvg(lr=0.5)))
    done = in_a_new_process(EVERY_WAY.format(content=content))
    assert (done.stdout, done.stderr) == ("0.5\n", "")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'polyfed' has no attribute 'fedrate'"):
        _ = pf.fedrate
    with pytest.raises(ImportError, match="cannot import name 'fedrate' from 'polyfed'"):
        from polyfed import fedrate  # noqa: F401


QUICK = [  # words, exit status, and what is said
    ("--help", 0, "usage: polyfed COMMAND"),
    ("--version", 0, "polyfed "),
    ("list", 0, "flha_ghn"),
    ("list models --json", 0, '"name": "mlp"'),
    ("show --help", 0, "polyfed show DIR"),
    ("show x", 2, "x does not exist"),
    ("list algorithms data", 0, "methods for one architecture"),
    ("list models recipes", 0, "what the scales reduce against the paper"),
    ("reproduce fedhenn", 0, "table1"),
    ("run --help", 0, "polyfed run heart"),
    ("run --help-all", 0, "--algorithm.momentum"),
    ("run digits --algorithm flha_ghn --help-all", 0, "--algorithm.catalogue"),
    ("run --print_config", 0, "partition:"),
    ("compare --help", 0, "--algorithms NAMES"),
    ("compare --help-all", 0, "--algorithm.momentum"),
    ("warmstart --help", 0, "shows their fields"),
    ("rnu", 2, "unknown command 'rnu'; did you mean run?"),
    ("run --roundz 3", 2, "unknown option --roundz; did you mean --rounds?"),
    ("run --rounds many", 2, "--rounds must be a whole number, got 'many'"),
    ("run quikstart", 2, "no recipe or file 'quikstart'; did you mean quickstart?"),
    ("run --algorithm fedavgg", 2, "unknown algorithm 'fedavgg'; did you mean fedavg or"),
    ("run --algorithm FedAvg", 2, "unknown algorithm 'FedAvg'; did you mean fedavg? All"),
    ("compare --algorithms KnnPer", 2, "unknown algorithm 'KnnPer'; did you mean knn_per? All"),
    ("run --model CNN-small", 2, "unknown model 'CNN-small'; did you mean cnn_small? All"),
    ("run --data.partition Classes-per-client", 2, "did you mean classes_per_client? Choices"),
    ("look Fashion-MNIST", 2, "there is no recipe or file 'Fashion-MNIST'; did you mean fashion_mnist"),
    ("run --algorithm.mu 1", 2, "fedavg has no 'mu', but fedprox, moon, gpfl have: give --algorithm fedprox"),
    ("run --model cnn_smal", 2, "unknown model 'cnn_smal'; did you mean cnn_small"),
    ("run quickstart --scale cpu", 2, "quickstart has no scales; leave --scale cpu out"),
    ("data --data.partition dirichlt", 2, "did you mean dirichlet?"),
    ("compare x --algorithm fedavgg", 2, "there is no recipe or file 'x'"),
    ("compare quickstart --algorithm fedavgg", 2, "unknown algorithm 'fedavgg'; did you mean fedavg or"),
    ("compare --seed 1", 2, "polyfed compare takes no --seed; give --seeds"),
    ("resume --quite x", 2, "unknown option --quite; did you mean --quiet?"),
    ("report --outt x", 2, "unknown option --outt; did you mean --out or --quiet?"),
    ("warmstart x --epoch 3", 2, "unknown option --epoch; did you mean --epochs"),
    ("graph mlp --inputs 3", 2, "unknown option --inputs; did you mean --input?"),
    ("reproduce fedhenn tabel1", 2, "no table or figure 'tabel1'; did you mean table1"),
    ("reproduce fedhenn table1 --roundz 3", 2, "unknown option --roundz; did you mean --rounds?"),
    ("look --jsn", 2, "unknown option --jsn; did you mean --json? All "),
    ("compare --jsn", 2, ": polyfed compare --help-all"),
    ("run --sed 3", 2, "unknown option --sed; did you mean --seed or --speeds"),
    ("run --strategy fedprox", 2, "unknown option --strategy; did you mean --algorithm?"),
    ("compare --methods fedprox", 2, "unknown option --methods; did you mean --algorithms?"),
    ("flower stats x", 2, "did you mean status?"),
    ("report nosuch", 2, "nosuch does not exist"),
    ("resume nosuch", 2, "nosuch does not exist"),
    ("warmstart nosuch", 2, "nosuch does not exist"),
    ("predict nosuch rows.csv", 2, "nosuch does not exist"),
    ("export nosuch --client a --out b", 2, "nosuch does not exist"),
    ("graph nosuch --input 3,8,8", 2, "there is no model 'nosuch'; the nearest are"),
    ("run --algorithm.lr -1", 2, "FedAvg: lr must be positive, got -1.0"),
    (
        "compare --algorithm fedprox --algorithm.batch-size -3",
        2,
        "FedProx: batch_size must be at least 1, or 0 for the",
    ),
    ("run --algorithm fedprox --algorithm.mu -1", 2, "FedProx: mu must be at least 0, got -1.0"),
    ("run --sampler uniformm", 2, "unknown sampler 'uniformm'; did you mean uniform?"),
    ("run --loss focal", 2, "'focal' does not name a loss; write it as module:name"),
    ("run --rounds 0", 2, "--rounds must be a whole number of at least 1, got 0"),
    ("run --clients_per_round 0", 2, "--clients-per-round must be a fraction above 0"),
    ("run quickstart --out full", 2, "full is not empty"),
    ("run --logger wandb", 2, "cannot track with 'wandb'"),
    ("run --data table --data.site s --data.target t", 2, "give --data.path with a CSV or Parquet file"),
    ("run rows.csv.gz", 2, "rows.csv.gz is compressed; unpack it, and give the file that is in it"),
    (
        "look rows.json",
        2,
        "rows.json is neither data nor a configuration by its ending; save it as CSV (pandas.read_json('rows.json').to_csv(",
    ),
    (
        "look rows.dat",
        2,
        "by its ending; --data table --data.path rows.dat for a CSV file, or give a table (.csv, .tsv, .txt, .parquet)",
    ),
    ("run settings.json --print_config", 0, "rounds: 7"),
    ("run --metrics AUROC", 2, "unknown metric 'AUROC'; did you mean auc? Choices: accuracy, auc"),
    ("compare --metrics accuracy,Log-Loss", 2, "unknown metric 'Log-Loss'; did you mean log_loss?"),
    (
        "run ward.csv --data.site ward --data.target ill --data.task Survive",
        2,
        "unknown task 'Survive'; did you mean surv",
    ),
    ("compare --method-config nosuch.yaml", 2, "cannot read nosuch.yaml: No such file"),
    ("run nosuch.csv", 2, "'nosuch.csv' does not exist"),
    ("look ward.csv", 2, "a row belongs to, and --data.target with the column to predict; or, to divide rows among"),
    ("look ward.csv", 2, "--data.clients 4; the columns: id, day, ward, ill"),
    ("look ward.csv --data.site ward", 2, "give --data.target with the column to predict; the columns: id, day,"),
    ("run ward.csv --data.site ward --data.target ill", 2, "'id' has 60 different texts in 60 rows (free text or an"),
    (
        "compare ward.txt --data.site ward --data.target ill",
        2,
        "leave them out (--data.drop id,day), or make numbers or",
    ),
    (
        "data ward.csv --data.site ward --data.target ill --data.group id",
        2,
        "column 'day' holds dates or times: leave it",
    ),
    ("look ward.csv --data.site ward --data.target ill --data.encoding x", 2, "cannot be read as text in x (unknown"),
    ("look latin.csv --data.site ward --data.target ill", 2, "cannot be read as text in utf-8 ('utf-8' codec can't"),
    ("run bad.yaml", 2, "bad.yaml, line 2: rounds must be a whole number, got 'ten'"),
    ("compare --algorithms nosuch", 2, "unknown algorithm 'nosuch'; the nearest are"),
    ("compare --algorithms fedprox,fedprox", 2, "--algorithms has 'fedprox' twice"),
    ("compare --rounds 0", 2, "--rounds must be a whole number of at least 1"),
    ("compare --budget x", 2, "unknown budget 'x'"),
    ("compare --tune lr", 2, "--tune takes 'grid'"),
    ("compare heart --tune lr=0.1;lr=0.2", 2, "--tune takes 'grid'"),
    ("compare heart --tune lrr=0.1", 2, "no method of the comparison has a field 'lrr' to search; did you mean lr?"),
    ("compare heart --tune lr=-1,2", 2, "lr must be positive, got -1"),
    ("compare heart --tune lr=0.01..1", 2, "the range '0.01..1' for lr needs a number of runs a method, --trials 20"),
    ("compare heart --tune lr=3..1 --trials 2", 2, "from the lower to the higher number, got '3..1'"),
    ("compare old --algorithms fedprox", 2, "old decides what is compared, so --algorithms cannot be given"),
    ("export ended --client a --out full", 2, "full exists; choose another folder, or remove it"),
    ("export ended --client a --out new --format onxx", 2, "unknown format 'onxx'; did you mean onnx?"),
    (
        "export ended --client nort --out new",
        2,
        "ended has no model of client 'nort'; did you mean north? Choices: north",
    ),
    ("export ended --out new", 2, "ended has models of several clients; give --client with one of north, south"),
    (
        "export ended --client north --out new --model mlp",
        2,
        "'mlp' does not name a model factory; write it as module:f",
    ),
    ("audit ended --client nort", 2, "ended has no model of client 'nort'; did you mean north?"),
    ("audit ended --runs 1000000000", 2, "runs of an audit must be at most 1000, got 1000000000"),
    ("compare heart --fold-repeats 1000000000", 2, "--fold-repeats must be at most 1000, got 1000000000"),
    (f"compare heart --folds {10**30}", 2, f"--folds must be at most 1000, got {10**30}"),
    ("compare heart --tune lr=0.1,1 --trials 5000", 2, "--trials must be at most 1000, got 5000"),
    ("compare heart --seeds 1e9", 2, "--seeds must be whole numbers with commas between"),
    (f"run heart --rounds {10**30}", 2, f"--rounds must be at most 1000000000, got {10**30}"),
    ("run heart --rounds 1e30", 2, "--rounds must be a whole number, got '1e+30'"),
    (f"run heart --seed {10**30}", 2, f"--seed must be below 2^63, got {10**30}"),
    (f"run heart --algorithm.batch-size {10**30}", 2, f": batch_size must be at most 1000000000, got {10**30}"),
    ("compare runs", 2, "runs is a folder of runs; give one of them, such as runs/b"),
    ("run nothing", 2, "nothing is an empty folder, and no recipe"),
    (
        "look names.csv",
        2,
        "'names.csv' has no rows, only the names of its columns; give a table with one row per example",
    ),
    ("run --device gpu", 2, "unknown device 'gpu'; use auto, cpu, cuda, cuda:N, mps"),
    ("run heart --data.test_fraction 1.5", 2, "test_fraction must be at least 0 and below 1, got 1.5"),
    ("look heart --data.val_fraction 0.8", 2, "leave nothing to train on; their sum must be below 1"),
    ("data digits --data.clients 0", 2, "clients must be at least 1, got 0"),
    ("compare --trials 3", 2, "--trials 3 searches nothing"),
    ("compare --folds 1", 2, "--folds must be a whole number of at least 2, got 1"),
    ("compare --fold-repeats 0", 2, "--fold-repeats must be a whole number of at least 1, got 0"),
    (
        "run heart --data.target num",
        2,
        "heart has no 'target', since its columns are known; for a file of your own give",
    ),
    ("compare --parallel 0", 2, "--parallel must be a whole number of at least 1, got 0"),
    (f"compare --parallel {10**30}", 2, f"--parallel must be at most 1000, got {10**30}"),
    (f"run digits --regions {10**30}", 2, f"--regions must be below 2^63, got {10**30}"),
    (f"run --data digits --data.clients {10**30}", 2, f"--data.clients must be below 2^63, got {10**30}"),
    ("run heart --algorithm.lr 1e300", 2, ": lr must be at most 3.4e38, as weights are, got 1e+300"),
    ("compare heart --tune lr=1e300,1", 2, ": lr must be at most 3.4e38, as weights are, got 1e+300"),
    ("run --data digits --data.clients 9 --clients-per-round 50", 2, "=50 asks for more clients than the 9 there are"),
    (
        "run wards.csv --data.target ill --data.site ward --clients-per-round 3",
        2,
        "--clients-per-round=3 asks for more clients than the 2 there are",
    ),
    (
        "warmstart trained",
        2,
        "trained: fedavg cannot give weights to a network that took no part; use a run of flha_ghn",
    ),
    ("compare --resplit 2 --folds 2", 2, "give one of them"),
    ("compare --out full", 2, "full is not empty and holds no comparison"),
    ("compare --logger wandb", 2, "cannot track with 'wandb'"),
    ("help run", 0, "polyfed run heart"),
    ("version", 0, "polyfed "),
    ("completion bash", 0, "complete -o default -F _polyfed polyfed"),
    ("flower doctor --help", 0, "usage: polyfed flower doctor DIR"),
]
PLAY = """
import contextlib, io, json, sys
from polyfed.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(words)
    found.append([status, said.getvalue(), sorted({"torch", "numpy", "pandas", "sklearn"} & set(sys.modules))])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    lines = json.dumps([words.split() for words, _, _ in QUICK])
    here = tmp_path_factory.mktemp("quick")
    for folder, file in {"full": "notes.txt", "old": "comparison.yaml", "ended": "config.yaml"}.items():
        (here / folder).mkdir()
        (here / folder / file).write_text("kept")
    for folder in ("runs/a", "runs/b", "nothing", "ended/models"):
        (here / folder).mkdir(parents=True)
    for client in ("north", "south"):
        (here / "ended/models" / f"{client}.signature.json").write_text(json.dumps({"client": client}))
    for file in ("runs/a/config.yaml", "runs/b/comparison.yaml"):
        (here / file).touch()
    (here / "names.csv").write_text("site,ill\n")
    rows = "".join(f"p{k},2026-01-{k % 28 + 1:02},{'ab'[k % 2]},{k % 3 % 2}\n" for k in range(60))
    for name in ("ward.csv", "ward.txt"):
        (here / name).write_text(f"id,day,ward,ill\n{rows}")
    rows = "".join(f"{k * 7919 % 60 + k / 9:.3f},{'fm'[k % 3 % 2]},{'ab'[k % 2]},{k % 5 % 2}\n" for k in range(60))
    (here / "wards.csv").write_text(f"age,sex,ward,ill\n{rows}")
    (here / "trained").mkdir()
    content = {"algorithm": {"name": "fedavg"}, "data": {"name": "table", "path": "wards.csv"}}
    (here / "trained/config.yaml").write_text(json.dumps(content))
    (here / "latin.csv").write_bytes("ward,ill\nKöln,1\n".encode("latin-1"))
    (here / "rows.json").write_text('{"age": [50, 60], "ill": [0, 1]}')
    (here / "rows.dat").write_text("age,ill\n50,0\n")
    (here / "settings.json").write_text('{"rounds": 7, "data": "digits"}')
    (here / "bad.yaml").write_text("seed: 1\nrounds: ten\n")
    where = {"cwd": here, "env": {**os.environ, "COLUMNS": "200"}}
    command = [sys.executable, "-W", "error", "-c", PLAY, lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0, done.stderr
    return dict(zip([words for words, _, _ in QUICK], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("words", "status", "text"), QUICK, ids=[words for words, _, _ in QUICK])
def test_help_lists_and_mistakes_are_answered_before_torch_is_imported(answers, words, status, text):
    found = answers[words]
    assert found[0] == status, found[1]
    assert text in " ".join(found[1].split())
    assert found[2] == []
