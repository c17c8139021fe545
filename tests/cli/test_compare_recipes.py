"""`polyfed compare RECIPE` begins for every recipe that is not a paper's table: clients are built, nothing is trained."""

import sys

import pytest

from polyfed.cli.commands.compare import compare_command
from polyfed.cli.commands.options.recipes import shipped_recipe_files
from polyfed.cli.main import main
from polyfed.data.partitioning.folds import Folds

PAPERS = ("fedhenn_", "fedpnas_", "flha_", "pfedla_")
RECIPES = sorted(name for name in shipped_recipe_files() if not name.startswith(PAPERS))
WITH_SITES = {None, "blobs", "heart", "quickstart", "tagging"}  # a site of the data is a client, and has an answer
ELSEWHERE = {"rivals"}  # data that polyfed does not bring


class Stop(Exception):
    """Ends a command before it trains."""


@pytest.mark.parametrize("recipe", [None, *(pytest.param(r, marks=pytest.mark.thorough) for r in RECIPES)])
def test_a_recipe_can_be_compared(recipe, monkeypatch, tmp_path):
    plans = []

    def stop(plan):
        plans.append(plan)
        raise Stop

    monkeypatch.setattr(compare_command, "run_comparison", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stop):
        main(["compare", *([recipe] if recipe else []), "--quiet"])
    (plan,) = plans
    if recipe in {None, "quickstart"}:  # one name for the folder, in the terminal and on the page
        assert (plan.title, plan.out.parent.name, plan.out.name[:14]) == ("heart", "runs", "compare-heart-")
    assert "local" in plan.methods
    assert len(plan.methods) > 1
    assert (plan.folds == Folds(5)) == (recipe in WITH_SITES)
    if recipe not in ELSEWHERE:
        for seed in plan.seeds[:2] if recipe == "leaderboard" else plan.seeds:
            assert plan.build_client_set(seed).clients


def test_sites_that_cannot_be_dealt_into_folds_are_compared_by_seeds(monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr(compare_command, "run_comparison", lambda plan: plans.append(plan) or sys.exit())
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{site},{x + len(site) / 10 + size},{x % 2}"
        for site, size in (("north", 4), ("south", 3))
        for x in range(size)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["site,x,y", *rows]))
    words = ["compare", "--data", "table", "--data.path", "rows.csv", "--data.target", "y", "--data.site", "site"]
    for more in ([], ["--folds", "3"]):
        assert main([*words, "--quiet", *more]) == 0
    assert [(plan.folds, len(plan.seeds)) for plan in plans] == [(None, 5), (Folds(3), 3)]
