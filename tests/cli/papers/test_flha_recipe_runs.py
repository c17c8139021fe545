"""The recipes of FLHA-GHN run at scale `smoke`, with all their baselines and unseen clients, and Table 3 on pictures."""

import numpy as np
import pytest
from PIL import Image

from polyfed.cli.commands.options.recipes import read_recipe, shipped_recipe_files
from polyfed.simulation.storage.directory import read_config, read_metrics

FLHA = [name for name in shipped_recipe_files() if name.startswith("flha_")]

UNSEEN = ["flha_table6_fig3", "flha_fig7"]


def check_run(polyfed, name, variant, *words, score="accuracy"):
    """Runs a recipe and checks that each of its methods has scored every client on both test sets."""
    folder = f"{name}-{variant}"
    chosen = () if variant is None else ("--variant", variant)
    out = polyfed("run", name, *chosen, *words, "--quiet", "--out", folder)
    config = read_config(folder)
    method = config["algorithm"]["name"]
    baselines = [entry if isinstance(entry, str) else entry["name"] for entry in config["baselines"]]
    assert {line.split(":")[0] for line in out.splitlines() if "B down, " in line} == {method, *baselines}
    for path in (folder, *(f"{folder}/baselines/{baseline}" for baseline in baselines)):
        history = read_metrics(polyfed.here / path / "metrics.jsonl")
        assert len(history) == config["rounds"]
        clients = history[-1]["clients"]
        assert len(clients) == config["data"]["clients"] - config["data"]["unseen"]
        assert all(0 <= row[f"{part}{score}"] <= 1 for row in clients.values() for part in ("", "global_"))
        if read_config(path)["algorithm"]["name"] == "flha_ghn":
            assert all(f"generated_{score}" in row for row in clients.values())
    return folder


@pytest.mark.slow
def test_a_run_of_one_round(polyfed):
    check_run(polyfed, "flha_table1", "cifar10-25", "--scale", "smoke", "--rounds", "1", "--workers", "0")


@pytest.mark.slow
@pytest.mark.parametrize("name", FLHA)
def test_smoke_runs_with_all_baselines(polyfed, name):
    """The first and the last variant, and the last in the published form: few and many clients, with and without GNN, GHN
    and standard FL."""
    names = list(read_recipe(name).variants)
    plain = [variant for variant in names if not variant.endswith(("-published", "-unnormalised"))]
    for variant in dict.fromkeys((names[0], plain[-1], *[v for v in names if v.endswith("-published")][-1:])):
        folder = check_run(polyfed, name, variant, "--scale", "smoke")
        if name in UNSEEN:
            text = polyfed("warmstart", folder, "--epochs", "2", "--plot", "curves.png")
            unseen = f"client-{read_config(folder)['data']['clients'] - 1:03d}"
            assert f"{unseen}: accuracy after epochs of training the whole network" in " ".join(text.split())
            assert (polyfed.here / folder / "unseen" / f"{unseen}.safetensors").exists()
            assert (polyfed.here / "curves.png").stat().st_size > 1000


@pytest.mark.slow
def test_table_3_on_x_rays(polyfed):
    """Its smoke scale has digits instead; these are noise in the NIH's form, so that there is no more to see than AUCs."""
    folder, rng = polyfed.here / "xrays", np.random.default_rng(0)
    folder.mkdir()
    rows = ["Image Index,Finding Labels,Follow-up #,Patient ID"]
    for i in range(120):
        findings = ["Mass", "Hernia", "Mass|Edema", "No Finding"][i % 4]
        rows.append(f"{i}.png,{findings},0,{i}")
        Image.fromarray(rng.integers(0, 256, (64, 64), dtype=np.uint8)).save(folder / f"{i}.png")
    (folder / "Data_Entry_2017.csv").write_text("\n".join(rows))
    (folder / "test_list.txt").write_text("\n".join(f"{i}.png" for i in range(100, 120)))
    few = ["--data.examples_per_client", "12", "--data.global_test", "-1", "--rounds", "2", "--evaluate_every", "2"]
    words = ["--scale", "cpu", "--data.path", str(folder), *few]
    check_run(polyfed, "flha_table3", "xray-25", *words, score="auc")
    check_run(polyfed, "flha_upper_bound", "xray-25", *words, score="auc")
