"""The paper's own form of FLHA-GHN in the recipes: as a variant of every experiment, and in appendix D's search."""

import functools
from dataclasses import fields, replace

import pytest

from polyfed.algorithms import FLHAGHN
from polyfed.cli.commands.options import recipes as shipped
from polyfed.cli.commands.options.recipes import SCALES, shipped_recipe_files

read = functools.cache(shipped.read_recipe)
SWEEP = "flha_appendix_d"
GHN = [name for name in shipped_recipe_files() if name.startswith("flha_") and name not in ("flha_upper_bound", SWEEP)]
PUBLISHED = {"graph": "layers", "normalise": False, "initialisation": "paper", "momentum": 0, "clip_norm": None}


@pytest.mark.thorough
@pytest.mark.parametrize("name", GHN)
def test_every_experiment_is_there_in_the_published_form(name, experiment):
    """Data, networks and epochs are those of polyfed's form; the rate is the paper's at each scale."""
    variants = list(read(name).variants)
    own = [v for v in variants if not v.endswith(("-published", "-unnormalised", "-standard"))]
    assert {v for v in variants if v.endswith("-published")} == {f"{v}-published" for v in own}
    for variant in own:
        for scale in SCALES:
            ours, published = (experiment(name, scale, v) for v in (variant, f"{variant}-published"))
            assert published.algorithm == replace(ours.algorithm, lr=0.009, **PUBLISHED)
            assert not published.baselines
            assert (published.settings, published.models, published.source, published.split, published.partition) == (
                ours.settings, ours.models, ours.source, ours.split, ours.partition,
            )  # fmt: skip


@pytest.mark.thorough
def test_appendix_d_changes_one_choice_within_the_papers_ranges(experiment):
    ranges = {"depth": (1, 8), "latent": (16, 128), "hidden": (16, 64), "lr": (1e-4, 0.1), "weight_decay": (5e-6, 5e-4)}
    values = {"gnn": {"gated", "sage"}, "schedule": {"constant"}, "optimizer": {"adam"}}
    optimum = FLHAGHN(head="mlp", **PUBLISHED)
    for scale in SCALES:
        small = {} if scale == "paper" else {"batch_size": 16, "buffers": "recompute"}
        here = replace(optimum, **small, **({"clip_norm": 5} if scale == "smoke" else {}))
        assert experiment(SWEEP, scale, "optimum").algorithm == here
        tried = {}
        for variant in list(read(SWEEP).variants)[1:]:
            found = experiment(SWEEP, scale, variant)
            assert found.models == experiment("flha_table1", scale).models
            changed = {f.name: getattr(found.algorithm, f.name) for f in fields(here)
                       if getattr(found.algorithm, f.name) != getattr(here, f.name)}  # fmt: skip
            assert len(changed) == 1 or set(changed) == {"optimizer", "lr"}
            for field, value in changed.items():
                tried.setdefault(field, set()).add(value)
        for field, (low, high) in ranges.items():
            both = tried.pop(field) | ({getattr(here, field)} - {0.0})
            assert (min(both), max(both)) == (low, high)
        assert tried == values
    assert experiment(SWEEP).settings.rounds * experiment(SWEEP).algorithm.local_epochs == 500
    assert (experiment(SWEEP).source, experiment(SWEEP).split) == (
        experiment("flha_table1").source, experiment("flha_table1").split,
    )  # fmt: skip
