"""The page of a comparison that was stopped shows only what can be compared."""

import pytest

from polyfed.core.errors import UserError
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.page_file import write_report

DESCRIPTION = "title: mine\nsame_clients: true\nreference: local\n"
EXPERIMENT = "experiment: {config: {}, methods: {}, same_data: false, resplit: null, references: false}\n"


def test_a_comparison_that_was_stopped(write_run, tmp_path):
    (tmp_path / "comparison.yaml").write_text(DESCRIPTION + EXPERIMENT)
    with pytest.raises(UserError, match="no evaluated round yet; go on with it: polyfed compare"):
        read_run_groups([tmp_path])
    for seed in (0, 1):  # their configurations may differ: seed 1 does not divide the data of seed 0
        data = {"name": f"data-{seed}"}
        write_run(tmp_path / f"local/seed-{seed}", "local", {"x": [0.5]}, seed=seed, data=data)
        write_run(tmp_path / f"mine/seed-{seed}", "fedavg", {"x": [0.6 + seed / 10]}, seed=seed, data=data)
    write_run(tmp_path / "other/seed-0", "fedprox", {})
    ((setting,), notes) = read_run_groups([tmp_path])
    assert [line.label for line in setting.methods] == ["mine", "local"]
    (gain,) = setting.gains_over_local(setting.methods[0])
    assert (gain.client, round(gain.mean, 9), round(gain.high, 9)) == ("x", 0.15, 0.2)
    assert notes[0] == f"{tmp_path / 'other/seed-0'} has no evaluated round yet and is left out"
    assert notes[1] == f"The comparison is not finished; go on with it: polyfed compare {tmp_path}"
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert all(note in page for note in notes)
    assert "<h1>Join, or train alone? " in page
    assert '<h2 class="verdict">Not finished: 4 of 4 runs are done, and there are no answers yet.</h2>' in page


def test_an_unfinished_comparison_in_folds_counts_its_runs_and_speaks_of_folds(write_run, tmp_path):
    fields = "seeds: [0, 1, 2]\nfolds: 3\nmethods: {local: {}, mine: {}}\n"
    (tmp_path / "comparison.yaml").write_text(DESCRIPTION + fields + EXPERIMENT)
    for seed in (0, 1):
        write_run(tmp_path / f"local/seed-{seed}", "local", {"x": [0.5]}, seed=seed)
        write_run(tmp_path / f"mine/seed-{seed}", "fedavg", {"x": [0.6]}, seed=seed)
    write_run(tmp_path / "mine/seed-2", "fedavg", {"x": [0.6]}, seed=2, wanted=3)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Not finished: 4 of 6 runs are done, and there are no answers yet.</h2>" in page
    assert "Compared on the 2 folds that all methods below have." in page
    visible = page.split("<script")[0].split("<footer>")[0].split("</style>")[1]
    assert "lowest to highest fold" in visible
    assert " seed" not in visible.replace("seed-", "")


def test_runs_that_cannot_be_compared_are_left_out(write_run, tmp_path):
    """A run at an earlier round, and a seed that not all methods have, would be compared with other rounds and seeds."""
    (tmp_path / "comparison.yaml").write_text(DESCRIPTION)
    for seed in (0, 1):
        write_run(tmp_path / f"local/seed-{seed}", "local", {"x": [0.5]}, seed=seed)
        write_run(tmp_path / f"mine/seed-{seed}", "fedavg", {"x": [0.6]}, seed=seed)
    write_run(tmp_path / "late/seed-0", "fedprox", {"x": [0.9]}, wanted=3)
    write_run(tmp_path / "mine/seed-2", "fedavg", {"x": [0.9]}, seed=2)
    ((setting,), notes) = read_run_groups([tmp_path])
    seeds_by_label = {method.label: [run.seed for run in method.runs] for method in setting.methods}
    assert seeds_by_label == {"mine": [0, 1], "local": [0, 1]}
    assert notes[-2:] == [
        f"The comparison is not finished; go on with it: polyfed.compare(clients, ..., out={str(tmp_path)!r})",
        "Compared on the 2 seeds that all methods below have.",
    ]
