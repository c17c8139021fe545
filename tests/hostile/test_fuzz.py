"""Every kind of file, damaged at random with a fixed seed, is refused with a sentence or accepted, without a traceback."""

import pytest
from fuzz import fuzz, kinds, table

pytestmark = pytest.mark.slow  # .ci/run has it

NAMES = ("config.yaml", "manifest.json", "metrics.jsonl", "comparison.json", "comparison.yaml", "complete.json",
         "checkpoint", "models/*.json", "predictions", "decode", "site: private state", "site: state, sum right",
         "site: run.json", "site: privacy.json", "catalogue.yaml", "trial.json", "pyproject.toml", "a field of the app",
         "measured.json", "mlflow.json", "unseen/curves.json", "vocabulary", "classes of Parquet", "analysis/*.npz",
         "message: head", "message: tensors", "checkpoint, sums right")  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return kinds(tmp_path_factory.mktemp("fuzz") / "files")


def test_every_kind_has_a_test(files):
    assert tuple(files) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_refused_or_accepted(files, name):
    found = fuzz(files[name], NAMES.index(name), 1.5, 400)
    assert found.cases >= 3
    assert not found.failures, found.failures


def test_the_fuzz_would_find_a_reader_that_fails(files):
    class Careless:
        file, write, content = files["decode"].file, files["decode"].write, files["decode"].content

        @staticmethod
        def read():
            return Careless.file.read_bytes()[10**6]

    found = fuzz(Careless, 0, 1, 20)
    assert sum(found.failures.values()) == found.cases == 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_minutes_of_damage(tmp_path, seed):
    rows = table(tmp_path / "files", 45, 1000 * seed)
    assert {name: found.failures for name, found in rows.items() if found.failures} == {}
