"""A comparison that was kept in memory is saved with its results, and nothing that it did not keep."""

import re

import pytest

import polyfed as pf
from polyfed.cli.main import main
from polyfed.testing import small_clients

WORDS = {"rounds": 2, "seeds": 2, "tune": "none", "references": False, "quiet": True}


@pytest.fixture(scope="module")
def comparison():
    return pf.compare(small_clients(2), ["fedprox"], **WORDS)


def test_a_saved_comparison_is_loaded_as_it_was(comparison, tmp_path, capsys):
    folder = comparison.save(tmp_path / "saved")
    loaded = pf.load(folder)
    assert loaded.results == comparison.results
    assert (str(loaded), loaded.answer_table()) == (str(comparison), comparison.answer_table())
    assert comparison.report(tmp_path / "page.html").is_file()
    assert loaded.report().is_file()
    assert main(["show", str(folder)]) == 0
    assert "fedprox" in capsys.readouterr().out


def test_what_cannot_be_saved_or_continued_is_refused(comparison, tmp_path):
    folder = comparison.save(tmp_path / "saved")
    with pytest.raises(pf.UserError, match="holds a comparison; choose another folder, or remove that one first"):
        comparison.save(folder)
    with pytest.raises(pf.UserError, match=re.escape(f"or copy it, shutil.copytree('{folder}', 'other')")):
        pf.load(folder).save("other")
    with pytest.raises(pf.UserError, match="holds the results of a comparison without its runs; choose another out"):
        pf.compare(small_clients(2), ["fedprox"], out=folder, **WORDS)
    with pytest.raises(pf.UserError, match="this is a plan of a comparison, with nothing to save"):
        pf.compare(small_clients(2), ["fedprox"], plan_only=True, **WORDS).save(tmp_path / "plan")
    with pytest.raises(pf.UserError, match=r'kept in memory; say where the page goes, report\("page.html"\)'):
        comparison.report()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@pytest.mark.thorough
def test_a_run_of_a_comparison_gets_no_more_rounds(tmp_path):
    pf.compare(small_clients(2), ["fedprox"], out=tmp_path / "a", **WORDS)
    run = tmp_path / "a/fedprox/seed-0"
    with pytest.raises(pf.UserError, match="is a run of a comparison, whose runs all have the same rounds"):
        pf.resume(run, clients=small_clients(2), rounds=3, quiet=True)
    assert len(pf.resume(run, clients=small_clients(2), quiet=True).history) == 2
