"""From the answer of a comparison to the network: `polyfed export` and `predict` name the run, and train on all rows."""

import random
import shlex

import pytest

from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.main import main


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_export_names_the_run_of_the_answer_and_how_to_train_on_all_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = [f"{draw.gauss(0, 1):.3f},{'ns'[k % 2]},{draw.choice(['ill', 'well'])},x\n" for k in range(80)]
    (tmp_path / "my table.csv").write_text("lab,hospital,state,note\n" + "".join(rows))
    words = ["my table.csv", "--data.target", "state", "--data.site", "hospital", "--data.drop", "note"]
    words += ["--algorithms", "fedprox", "--algorithm", "fedprox", "--algorithm.mu", "0.5", "--folds", "2"]
    assert main(["compare", *words, "--rounds", "2", "--tune", "none", "--no-references", "--out", "c"]) == 0
    assert "added: fedavg, fedavg_ft, local\n" in capsys.readouterr().err
    for wrong_words, sentence in (
        (["predict", "c", "no.csv"], "'no.csv' does not exist; give a CSV or Parquet file"),
        (["predict", "c", "my table.csv", "--client", "north"], "c has no client 'north'; choices: n, s"),
        (["export", "c", "--client", "north", "--out", "net"], "c has no client 'north'; choices: n, s"),
        (["export", "c", "--client", "n", "--out", "my table.csv"], "my table.csv exists; choose another folder"),
        (["export", "c", "--out", "net", "--format", "onxx"], "unknown format 'onxx'; did you mean onnx?"),
    ):
        assert main(wrong_words) == 2
        assert sentence in capsys.readouterr().err
    assert main(["export", "c", "--client", "n", "--out", "net"]) == 2
    text = capsys.readouterr().err
    assert "c is a comparison; the answer for n is of " in text
    export = text.partition(": polyfed export")[2].partition(" (")[0]
    assert "the network of one fold, trained without the rows of that fold" in text
    command = shlex.split(text.partition("on nearly all rows: ")[2].partition(", and give its directory)")[0])
    assert "--data.test-fraction" in command
    config = configuration_parser.parse_configuration(
        ["--data", "table", "--data.path", *command[2:]], {}, "polyfed run"
    )
    values = [config["data"][name] for name in ("path", "target", "site", "drop")]
    assert values == ["my table.csv", "state", "hospital", "note"]
    if config["algorithm"]["name"] == "fedprox":
        assert config["algorithm"]["mu"] == 0.5
    assert main([*command[1:], "--out", "final", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["export", *shlex.split(export)]) == 0
    assert main(["predict", "final", "no.csv"]) == 2
    assert capsys.readouterr().err.startswith("polyfed: 'no.csv' does not exist; give a CSV")
    assert main(["predict", "c", "my table.csv", "--client", "s"]) == 2
    assert "(the network of one fold" in capsys.readouterr().err
