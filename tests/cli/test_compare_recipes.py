"""`polyfed compare RECIPE` begins for every recipe that is not a paper's table: clients are built, nothing is trained."""

import pytest

from polyfed.cli.commands.compare import compare_command
from polyfed.cli.commands.options.recipes import shipped_recipe_files
from polyfed.cli.main import main

PAPERS = ("fedhenn_", "fedpnas_", "flha_", "pfedla_")
RECIPES = sorted(name for name in shipped_recipe_files() if not name.startswith(PAPERS))
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
    assert "local" in plan.methods
    assert len(plan.methods) > 1
    if recipe not in ELSEWHERE:
        for seed in plan.seeds[:2] if recipe == "leaderboard" else plan.seeds:
            assert plan.build_client_set(seed).clients
